/* How a function of this command fails: it records one sentence for the user and returns false. */
#ifndef TRAIN_FAILURE_H
#define TRAIN_FAILURE_H

#include <stdbool.h>

/* Records the sentence and returns false, so that `return train_fail(...)` reads as one step. */
__attribute__((format(printf, 1, 2))) bool train_fail(const char *format, ...);

/* The sentence of the last failure; "" when nothing has failed. */
const char *train_failure(void);

/* Memory of zeros, aligned to 64 bytes, to be freed with free. Running out of it ends the program with a sentence:
 * nothing that this command could still do would be of use. */
void *train_allocate(long long count, unsigned long element_bytes);

#endif
