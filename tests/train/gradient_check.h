/* Central differences against a gradient computed by hand. */
#ifndef TESTS_TRAIN_GRADIENT_CHECK_H
#define TESTS_TRAIN_GRADIENT_CHECK_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "random.h"
#include "real.h"

typedef double scalar_function(void *context);

/* Fails unless df/dx[i] by central differences agrees with expected to 1e-6 of its size, and to 1e-8 near 0. */
static inline void check_derivative(scalar_function *f, void *context, real *x, double expected, const char *what,
                                    int64_t index) {
    const double h = 1e-5;
    const real kept = *x;
    *x = kept + (real)h;
    const double above = f(context);
    *x = kept - (real)h;
    const double below = f(context);
    *x = kept;
    const double measured = (above - below) / (2 * h);
    const double error = fabs(measured - expected);
    if (!(error <= 1e-6 * (fabs(measured) + fabs(expected)) + 1e-8)) {
        fail_msg("%s[%lld]: the gradient is %.12g, central differences give %.12g", what, (long long)index, expected,
                 measured);
    }
}

static inline void check_gradient(scalar_function *f, void *context, real *x, const real *gradient, int64_t count,
                                  const char *what) {
    for (int64_t i = 0; i < count; i++)
        check_derivative(f, context, &x[i], (double)gradient[i], what, i);
}

static inline void fill_random(random_state *random, real *x, int64_t count, double deviation) {
    for (int64_t i = 0; i < count; i++)
        x[i] = (real)(deviation * random_normal(random));
}

#endif
