/* The definition, evaluated directly: a row at a time over an explicit list of the keys it attends to, in double
 * precision, with nothing shared with any backend. Slow and plain on purpose: backends are held to it.
 *
 * Tensors are dense double arrays: q, out, dout, dq [Tq, Hq, D]; k, v, dk, dv [Tk, Hkv, D]; q_proxy, dq_proxy
 * [Tq, Hp, Dp]; k_proxy, dk_proxy [Tk, Hpk, Dp]; lse [Hq, Tq]; block_indices [Hp, Tq, k]. The fragment arrays of the
 * configuration are read by the host. Device, threads, flags and scratch limit are ignored, except for
 * FMSA_FLAG_FP32_KV_GRADS, which decides how evaluations in a narrow type round. */
#ifndef FMSA_TOOL_REFERENCE_H
#define FMSA_TOOL_REFERENCE_H

#include "flashmsa.h"

typedef struct fmsa_reference_inputs {
    const double *q, *k, *v, *q_proxy, *k_proxy;
    const double *dout;           /* NULL: no gradients of the main attention */
    double grad_kl;               /* dL/dKL */
    const int32_t *block_indices; /* not read in dense mode; entries that name no visible block, and repeats, are
                                     passed over */
} fmsa_reference_inputs;

typedef struct fmsa_reference_outputs {
    double *out, *lse;
    double *proxy_lse; /* [Hp, Tq], of the student's scores; no operation gives it */
    double *dq, *dk, *dv, *dq_proxy, *dk_proxy;
    double kl;
} fmsa_reference_outputs;

/* block_indices [Hp, Tq, k] from q_proxy and k_proxy. */
void fmsa_reference_select(const fmsa_config *config, const double *q_proxy, const double *k_proxy,
                           int32_t *block_indices);

/* The blocks that (row, proxy head) sees: their count, and the greatest score in each in maxima (room for as many as
 * the longest fragment has), NaN where every score is NaN. Sets forced[b] where block b is kept whatever its
 * score, and clears it elsewhere. */
int64_t fmsa_reference_row_blocks(const fmsa_config *config, const double *q_proxy, const double *k_proxy, int64_t row,
                                  int32_t proxy_head, double *maxima, unsigned char *forced);

/* Everything else. precision FMSA_DTYPE_FP64 is the exact evaluation. A narrower one rounds where a plain evaluation
 * in that type rounds: products and sums in fp32, the probabilities and dS to the type before they enter a matrix
 * product, every output once. Its error is the yardstick for a backend's. */
void fmsa_reference_evaluate(const fmsa_config *config, const fmsa_reference_inputs *inputs, fmsa_dtype precision,
                             fmsa_reference_outputs *outputs);

/* Arrays of zeros for config's shapes. Exits the program when there is no memory. */
void fmsa_reference_outputs_open(fmsa_reference_outputs *outputs, const fmsa_config *config);
void fmsa_reference_outputs_close(fmsa_reference_outputs *outputs);

/* calloc, or exit with a message. */
void *fmsa_zeros(size_t count, size_t size);

#endif
