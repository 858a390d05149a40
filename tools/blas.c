#include "blas.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "clock.h"

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, SIZE = 2048, REPEATS = 5 };

typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                            const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
typedef void set_threads_function(int threads);

bool fmsa_tool_blas_gflops(int threads, double *gflops) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return false;
    sgemm_function *sgemm = NULL;
    set_threads_function *set_threads = NULL;
    *(void **)&sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
    if (sgemm == NULL) return false;
    if (threads > 0 && set_threads != NULL) set_threads(threads);

    const size_t elements = (size_t)SIZE * SIZE;
    float *a = malloc(elements * sizeof *a), *b = malloc(elements * sizeof *b), *c = malloc(elements * sizeof *c);
    double best = 0;
    if (a != NULL && b != NULL && c != NULL) {
        for (size_t i = 0; i < elements; i++) {
            a[i] = (float)(i % 127) / 127 - 0.5f;
            b[i] = (float)(i % 113) / 113 - 0.5f;
        }
        for (int repeat = 0; repeat <= REPEATS; repeat++) {
            const double start = fmsa_tool_seconds();
            sgemm(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
            const double rate = 2.0 * SIZE * elements / (fmsa_tool_seconds() - start) * 1e-9;
            if (repeat > 0 && rate > best) best = rate;
        }
    }
    free(a);
    free(b);
    free(c);
    *gflops = best;
    return best > 0;
}
