/* The layers of the model, each forward and backward by hand. Matrices are row-major and packed unless a stride is
 * given; a backward function adds to the gradients of parameters and overwrites those of activations, unless it says
 * otherwise. Everything runs on all OpenMP threads, and gives the same bits for the same number of them. */
#ifndef TRAIN_LAYERS_H
#define TRAIN_LAYERS_H

#include <stdint.h>

#include "real.h"

/* y [rows, dim] = the rows of table [256, dim] that the bytes name. */
void embedding_forward(real *y, const real *table, const uint8_t *bytes, int64_t rows, int64_t dim);
void embedding_backward(real *dtable, const real *dy, const uint8_t *bytes, int64_t rows, int64_t dim);

/* y [rows, out] = x [rows, in] weight^T, with weight [out, in]. */
void linear_forward(real *y, const real *x, const real *weight, int64_t rows, int64_t out, int64_t in);
void linear_backward_input(real *dx, const real *dy, const real *weight, int64_t rows, int64_t out, int64_t in);
void linear_backward_weight(real *dweight, const real *dy, const real *x, int64_t rows, int64_t out, int64_t in);

/* y = x / rms(x) * gain for each row; inverse_rms [rows] is kept for the backward pass. */
void rmsnorm_forward(real *y, real *inverse_rms, const real *x, const real *gain, int64_t rows, int64_t dim);

/* Adds to dx: the input also feeds the residual stream. */
void rmsnorm_backward(real *dx, real *dgain, const real *dy, const real *x, const real *inverse_rms, const real *gain,
                      int64_t rows, int64_t dim);

/* cosine and sine [positions, dim / 2] of the rotary embedding. */
void rope_table(real *cosine, real *sine, int64_t positions, int64_t dim);

/* The heads of a packed projection: element (row, head, i) lies at row * row_stride + head * dim + i. Row r stands at
 * position r % positions of its sequence. */
typedef struct head_layout {
    int64_t rows, heads, dim, positions;
    int64_t input_stride, output_stride; /* between rows of the projection, and of what comes out of it */
} head_layout;

/* What queries and keys go through: RMSNorm of each head, with a gain [dim] common to all heads, then the rotation of
 * the pairs (i, i + dim / 2). inverse_rms [rows, heads] is kept for the backward pass. */
void head_norm_rope_forward(const head_layout *layout, real *y, real *inverse_rms, const real *x, const real *gain,
                            const real *cosine, const real *sine);
void head_norm_rope_backward(const head_layout *layout, real *dx, real *dgain, const real *dy, const real *x,
                             const real *inverse_rms, const real *gain, const real *cosine, const real *sine);

/* y [rows, hidden] = silu(gate) * up, from gate_up [rows, 2 * hidden] = gate and up side by side. */
void swiglu_forward(real *y, const real *gate_up, int64_t rows, int64_t hidden);
void swiglu_backward(real *dgate_up, const real *dy, const real *gate_up, int64_t rows, int64_t hidden);

/* x += y. */
void add_to(real *x, const real *y, int64_t count);

/* Mean over the rows of -log softmax(logits)[target]. When dlogits is not NULL it gets the gradient. */
double cross_entropy(real *dlogits, const real *logits, const uint8_t *targets, int64_t rows, int64_t classes);

#endif
