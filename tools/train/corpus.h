/* The text to train on: files and folders read into memory, and cut into a training and a validation part. */
#ifndef TRAIN_CORPUS_H
#define TRAIN_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "random.h"

typedef struct corpus {
    uint8_t *training, *validation;
    int64_t training_bytes, validation_bytes;
    int files;            /* read */
    int skipped;          /* found in folders, but empty or not text */
    uint64_t fingerprint; /* of all the text: the same only for the same files */
} corpus;

/* Reads the files, and the text files in the folders and the folders below; names with a leading dot and build folders
 * are passed over. Without paths: the current folder's source and documentation files. The last tenth of every file is
 * for validation. Both parts must hold a sequence of context + 1 bytes. */
bool corpus_open(corpus *corpus, char *const *paths, int count, int64_t context);
void corpus_close(corpus *corpus);

/* Whether the bytes are text in UTF-8 or nearly so: no zero bytes, and at most a tenth that is not UTF-8 (older
 * 8-bit encodings stay below that). */
bool corpus_is_text(const uint8_t *bytes, int64_t count);

/* count random training sequences: inputs [count, context], and targets, the byte after each. */
void corpus_training_batch(const corpus *corpus, random_state *random, int64_t count, int64_t context, uint8_t *inputs,
                           uint8_t *targets);

/* Sequence index of total, evenly spread over the validation text. */
void corpus_validation_sequence(const corpus *corpus, int64_t index, int64_t total, int64_t context, uint8_t *inputs,
                                uint8_t *targets);

#endif
