/* The state of a run in one file: magic, version, settings, step, random state, weights, optimiser moments and records,
 * closed by a checksum. A run resumed from it gives the same bits as one that never stopped. */
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "run.h"

bool checkpoint_save(const char *path, const run *run);

/* Opens run as saved, with the text that corpus holds. */
bool checkpoint_load(const char *path, run *run, const corpus *corpus);

/* Only the settings: what the text must be long enough for is known from them. */
bool checkpoint_read_settings(const char *path, train_settings *settings);

#endif
