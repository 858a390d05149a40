/* Matrix products on all threads: OpenBLAS where the machine has it, otherwise a blocked loop of our own. */
#ifndef TRAIN_GEMM_H
#define TRAIN_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "real.h"

/* Whether a matrix is read as stored or transposed. */
typedef enum { AS_STORED, TRANSPOSED } gemm_view;

/* A row-major matrix and the distance between its rows. */
typedef struct gemm_matrix {
    const real *data;
    int64_t row_stride;
    gemm_view view;
} gemm_matrix;

/* Looks for OpenBLAS on this machine (it is no dependency of this command) and uses it from then on; false: there is
 * none, and the loop in this file does the work, as it does when this is never called. */
bool gemm_use_blas(void);

/* What computes, for people: "OpenBLAS (libopenblas.so.0)" or "built-in loop (AVX2)". */
const char *gemm_description(void);

/* c [rows, columns] = a [rows, inner] b [inner, columns], or c += when accumulating. The work is cut by rows of c into
 * one piece a thread, so the result is the same on every run with the same number of threads. */
void gemm(int64_t rows, int64_t columns, int64_t inner, gemm_matrix a, gemm_matrix b, bool accumulate, real *c,
          int64_t c_row_stride);

#endif
