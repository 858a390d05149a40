/* The transformer: bytes in, the next byte's distribution out. Each layer adds to the residual stream x
 *
 *     x += Wo msa(rope(norm(Wq n)), rope(norm(Wk n)), Wv n),   n = rmsnorm(x)
 *     x += Wdown (silu(Wgate m) * (Wup m)),                     m = rmsnorm(x)
 *
 * The proxies' queries and keys are projections of the same n, normed and rotated likewise. They are taught by the KL
 * loss alone, and nothing of it flows into n: the trunk trains as if there were no proxies. */
#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "attention.h"
#include "random.h"

enum { BYTE_VALUES = 256 };

/* Plain 32-bit numbers without padding: a checkpoint holds it as it is. */
typedef struct model_shape {
    int32_t layers, dim, hidden, context;
    attention_shape attention;
} model_shape;

/* A tensor among the weights: rows x columns from offset on; a vector has one row. */
typedef struct parameter {
    int64_t offset, rows, columns;
    bool is_proxy; /* belongs to the proxies, not to the trunk */
} parameter;

/* What a layer's forward pass leaves for its backward pass, with T = batch * context rows. */
typedef struct layer_state {
    real *input;                 /* [T, dim]: x before the layer */
    real *attention_inverse_rms; /* [T] */
    real *attention_normed;      /* [T, dim] */
    real *qkv;                   /* [T, (Hq + 2 Hkv) D]: the projections; v is used as it is */
    real *qk;                    /* [T, (Hq + Hkv) D]: q and k, normed and rotated */
    real *q_inverse_rms, *k_inverse_rms;
    real *proxy_projection; /* [T, (Hp + Hpk) Dp] */
    real *proxy;            /* the same, normed and rotated */
    real *proxy_q_inverse_rms, *proxy_k_inverse_rms;
    int32_t *block_indices; /* [Hp, T, top_k] */
    void *schedule;
    real *attended; /* [T, Hq D] */
    real *lse;      /* [Hq, T] */
    real *middle;   /* [T, dim]: x between the two halves */
    real *ffn_inverse_rms;
    real *ffn_normed; /* [T, dim] */
    real *gate_up;    /* [T, 2 hidden] */
    real *gated;      /* [T, hidden] */
} layer_state;

typedef struct model {
    model_shape shape;
    int32_t batch;
    int64_t rows; /* batch * context */

    parameter *parameters;
    int parameter_count;
    int64_t weight_count;
    real *weights, *gradients;

    attention attention;
    real *cosine, *sine, *proxy_cosine, *proxy_sine;
    layer_state *layers;
    real *output; /* [T, dim]: x after the last layer */
    real *output_inverse_rms, *output_normed, *logits;

    struct model_scratch *scratch; /* gradients of activations */
} model;

/* Everything for training on batch sequences at once; weights are drawn from seed. */
bool model_open(model *model, const model_shape *shape, int32_t batch, uint64_t seed);
void model_close(model *model);

/* Inputs [batch, context] and their targets -> mean loss in nats a byte. */
bool model_forward(model *model, attention_phase phase, const uint8_t *inputs, const uint8_t *targets, double *loss);

/* After model_forward of the same arguments: all gradients of loss + kl_weight * mean over the layers of the KL loss,
 * which also goes to *kl (0 in the dense phase). */
bool model_backward(model *model, attention_phase phase, const uint8_t *inputs, const uint8_t *targets,
                    double kl_weight, double *kl);

/* After a model_forward of the warm-up: the blocks that the proxies would choose, into block_indices of each layer. */
bool model_select(model *model);

#endif
