/* A BLAS found at run time: a yardstick for `bench`, and nothing that the library needs. */
#ifndef FMSA_TOOL_BLAS_H
#define FMSA_TOOL_BLAS_H

#include <stdbool.h>

/* GFLOP/s of a large fp32 matrix product by OpenBLAS on `threads` threads (0 = its default), best of several; false
 * when no OpenBLAS is installed. */
bool fmsa_tool_blas_gflops(int threads, double *gflops);

#endif
