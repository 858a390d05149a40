/* Ctrl-C and SIGTERM: the first asks the command to stop after the current step, the second ends it at once. */
#ifndef TRAIN_INTERRUPT_H
#define TRAIN_INTERRUPT_H

void interrupt_install(void);

/* The signal that asked the command to stop; 0: none has. */
int interrupt_signal(void);

#endif
