/* The number type of the model: float, or double where its gradients are checked against finite differences. */
#ifndef TRAIN_REAL_H
#define TRAIN_REAL_H

#include "flashmsa.h"

#ifdef TRAIN_FP64
typedef double real;
#define REAL_DTYPE FMSA_DTYPE_FP64
#else
typedef float real;
#define REAL_DTYPE FMSA_DTYPE_FP32
#endif

#endif
