/* What the tests have in common: cmocka, small cases, and calls that must succeed. */
#ifndef FMSA_TEST_SUPPORT_H
#define FMSA_TEST_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "cases.h"
#include "compare.h"
#include "device.h"
#include "flashmsa.h"
#include "numbers.h"
#include "reference.h"

extern const fmsa_tool_device cpu;

/* A configuration for the CPU: heads as (Hq, Hkv, Hp, Hpk), D = Dp = dim. */
fmsa_config make_config(fmsa_dtype dtype, const int32_t heads[4], int32_t dim, int32_t block_size, int32_t top_k);

/* A case with Tq = Tk = the sum of the lengths, one fragment a document, filled with scores of deviation 2 and 1. */
void open_documents(fmsa_case *c, const fmsa_config *config, const int64_t *lengths, int64_t count, uint64_t seed);

/* A case with one document. */
void open_document(fmsa_case *c, const fmsa_config *config, int64_t length, uint64_t seed);

/* Everything a sequence of calls gave, and the selection it used. */
typedef struct results {
    fmsa_reference_outputs outputs;
    int32_t *block_indices; /* [Hp, Tq, k] */
    fmsa_config config;
} results;

/* select (or the case's block_indices), schedule, forward, backward with proxy; every call must succeed and write only
 * what is its own. */
void run_case(results *r, const fmsa_case *c);

/* The exact evaluation of the case, over these block_indices. */
void evaluate_exactly(results *r, const fmsa_case *c, const int32_t *block_indices);

void close_results(results *r);

/* One operation that must succeed and write only what is its own. */
void run_operation(fmsa_call *call, fmsa_operation operation);

/* Runs the case, checks the selection (when it was the library's) and holds every output to the error rule. */
void check_case(const fmsa_case *c, const char *what);

/* Holds every output to the error rule. */
void check_results(const fmsa_case *c, const results *r, const char *what);

/* Bitwise equality of arrays of doubles; NaN equals NaN of the same bits. */
void check_identical(const double *a, const double *b, int64_t count, const char *what);
void check_identical_results(const results *a, const results *b, const char *what);

/* The greatest |a - b|, over the greatest |b|. */
double relative_difference(const double *a, const double *b, int64_t count);

/* Elements of each output. */
int64_t query_elements(const fmsa_config *c);
int64_t key_elements(const fmsa_config *c);
int64_t query_proxy_elements(const fmsa_config *c);
int64_t key_proxy_elements(const fmsa_config *c);

/* Changes elements of x one at a time (every one, or evenly spaced ones up to `most`) and compares the central
 * difference of loss with gradient; checks that they agree to 1e-6 of the greatest gradient. */
typedef double loss_function(const fmsa_case *c);
void check_gradient(loss_function *loss, fmsa_case *c, double *x, const double *gradient, int64_t count, int64_t most,
                    const char *what);

/* sum of dout * out */
double weighted_sum(const fmsa_case *c, const double *out);

/* cmocka's assert_true with a sentence. */
#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) fail_msg(__VA_ARGS__);                                                                       \
    } while (0)

#endif
