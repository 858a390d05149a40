/* Where each tensor lies among the weights, and what it starts from. */
#ifndef TRAIN_MODEL_PARAMETERS_H
#define TRAIN_MODEL_PARAMETERS_H

#include "model.h"

typedef enum global_parameter { EMBEDDING, OUTPUT_NORM, OUTPUT_HEAD, GLOBAL_PARAMETERS } global_parameter;

typedef enum layer_parameter {
    ATTENTION_NORM, /* [dim] */
    QKV,            /* [(Hq + 2 Hkv) D, dim] */
    Q_GAIN,         /* [D] */
    K_GAIN,         /* [D] */
    ATTENTION_OUT,  /* [dim, Hq D] */
    PROXY_QK,       /* [(Hp + Hpk) Dp, dim] */
    PROXY_Q_GAIN,   /* [Dp] */
    PROXY_K_GAIN,   /* [Dp] */
    FFN_NORM,       /* [dim] */
    GATE_UP,        /* [2 hidden, dim] */
    FFN_DOWN,       /* [dim, hidden] */
    LAYER_PARAMETERS
} layer_parameter;

/* Lists the parameters of model->shape and allocates weights and gradients. */
void model_parameters_open(model *model);
void model_parameters_close(model *model);

/* Gains start at 1, matrices at random with a variance that keeps the activations' size. */
void model_parameters_initialise(model *model, uint64_t seed);

static inline real *global_tensor(const model *m, real *base, global_parameter which) {
    return base + m->parameters[which].offset;
}

static inline real *layer_tensor(const model *m, real *base, int layer, layer_parameter which) {
    return base + m->parameters[GLOBAL_PARAMETERS + layer * LAYER_PARAMETERS + which].offset;
}

#endif
