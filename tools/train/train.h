/* `flashmsa train`: trains a byte-level transformer with MSA on text. */
#ifndef TRAIN_TRAIN_H
#define TRAIN_TRAIN_H

/* argv[0] is "train". Returns the exit code: 0 success, 1 failure, 2 wrong usage, 128 + the signal when stopped by one.
 */
int fmsa_tool_train(int argc, char **argv);

#endif
