/* A case: a configuration with everything an operation reads, in host memory and in double precision. Made at random
 * from a seed, or piece by piece. */
#ifndef FMSA_TOOL_CASES_H
#define FMSA_TOOL_CASES_H

#include "flashmsa.h"
#include "reference.h"

/* How a view [rows, heads, dim] lies in memory. */
typedef enum fmsa_layout {
    FMSA_LAYOUT_ROWS,   /* a row's heads together, dense */
    FMSA_LAYOUT_HEADS,  /* a head's rows together, dense */
    FMSA_LAYOUT_PADDED, /* heads together, with gaps between heads and between rows, as in a fused buffer */
    FMSA_LAYOUT_COUNT
} fmsa_layout;

typedef struct fmsa_case {
    fmsa_config config; /* the fragment arrays are the four below */
    int32_t *q_begin, *q_end, *k_begin, *k_end;

    double *q, *k, *v, *q_proxy, *k_proxy, *dout; /* dense; every value is one of config.dtype */
    double grad_kl;
    int32_t *block_indices; /* [Hp, Tq, k]; NULL: take what select gives */

    fmsa_layout input_layout, output_layout;
    int broadcast_dout; /* dout is one row and head, seen with strides 0; then every row of dout is the same */
} fmsa_case;

/* What a backend can run. */
typedef struct fmsa_case_limits {
    fmsa_device device;
    fmsa_dtype dtype;
    int64_t tokens; /* about as many, at most */
} fmsa_case_limits;

/* The case of a seed: head relation, dimensions, block size, k, fragments, layouts, scales, forced blocks and the
 * sharpness of the softmax (deviation of the scores from 1 to 8). */
void fmsa_case_random(fmsa_case *c, uint64_t seed, const fmsa_case_limits *limits);

/* A case of config's shapes, without fragments, whose tensors are zero. */
void fmsa_case_open(fmsa_case *c, const fmsa_config *config);
void fmsa_case_close(fmsa_case *c);

/* Appends a fragment. */
void fmsa_case_add_fragment(fmsa_case *c, int64_t q_begin, int64_t q_end, int64_t k_begin, int64_t k_end);

/* Fills all inputs with normal values of config.dtype: v and dout with deviation 1, the others such that main and proxy
 * scores have these deviations. */
void fmsa_case_fill(fmsa_case *c, uint64_t seed, double main_deviation, double proxy_deviation);

/* The inputs as the reference takes them; block_indices come from the caller. */
fmsa_reference_inputs fmsa_case_inputs(const fmsa_case *c, const int32_t *block_indices);

/* One line that says what the case is. */
void fmsa_case_describe(const fmsa_case *c, char *text, size_t size);

/* Elements of [Hp, Tq, k]. */
int64_t fmsa_case_index_count(const fmsa_case *c);

/* ---- Random numbers (splitmix64): the same on every machine. ---- */

typedef struct fmsa_random {
    uint64_t state;
} fmsa_random;

uint64_t fmsa_random_bits(fmsa_random *random);
int64_t fmsa_random_int(fmsa_random *random, int64_t least, int64_t most);
double fmsa_random_uniform(fmsa_random *random); /* in (0, 1) */
double fmsa_random_normal(fmsa_random *random);

#endif
