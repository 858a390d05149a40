/* The proxies of a trained model, for others to measure with. */
#ifndef TRAIN_PROXIES_H
#define TRAIN_PROXIES_H

#include "run.h"

/* Runs the model on the first validation sequences, a batch of them, and writes what select reads in each layer: an
 * .npy file of [layers, batch, context, Hp + Hpk, Dp], the proxies' queries and then their keys, normed and rotated. */
bool proxies_write(const char *path, run *run);

#endif
