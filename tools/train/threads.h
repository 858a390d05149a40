/* The OpenMP calls of this command, which also builds without OpenMP: then there is one thread. */
#ifndef TRAIN_THREADS_H
#define TRAIN_THREADS_H

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_max_threads(void) {
    return 1;
}
static inline int omp_get_num_threads(void) {
    return 1;
}
static inline int omp_get_thread_num(void) {
    return 0;
}
static inline void omp_set_num_threads(int threads) {
    (void)threads;
}
#endif

#endif
