#include "model_parameters.h"

#include <math.h>
#include <stdlib.h>

#include "failure.h"

static void add_parameter(model *m, int64_t rows, int64_t columns, bool is_proxy) {
    /* Every tensor starts at a cache line. */
    const int64_t line = 64 / sizeof(real);
    m->parameters[m->parameter_count++] = (parameter){m->weight_count, rows, columns, is_proxy};
    m->weight_count += (rows * columns + line - 1) / line * line;
}

static void add_layer(model *m) {
    const model_shape *s = &m->shape;
    const attention_shape *a = &s->attention;
    const int64_t proxy_columns = (int64_t)(a->proxy_heads + a->proxy_kv_heads) * a->proxy_head_dim;
    add_parameter(m, 1, s->dim, false);
    add_parameter(m, (int64_t)(a->heads + 2 * a->kv_heads) * a->head_dim, s->dim, false);
    add_parameter(m, 1, a->head_dim, false);
    add_parameter(m, 1, a->head_dim, false);
    add_parameter(m, s->dim, (int64_t)a->heads * a->head_dim, false);
    add_parameter(m, proxy_columns, s->dim, true);
    add_parameter(m, 1, a->proxy_head_dim, true);
    add_parameter(m, 1, a->proxy_head_dim, true);
    add_parameter(m, 1, s->dim, false);
    add_parameter(m, 2 * (int64_t)s->hidden, s->dim, false);
    add_parameter(m, s->dim, s->hidden, false);
}

void model_parameters_open(model *m) {
    const int64_t count = GLOBAL_PARAMETERS + (int64_t)m->shape.layers * LAYER_PARAMETERS;
    m->parameters = train_allocate(count, sizeof *m->parameters);
    add_parameter(m, BYTE_VALUES, m->shape.dim, false);
    add_parameter(m, 1, m->shape.dim, false);
    add_parameter(m, BYTE_VALUES, m->shape.dim, false);
    for (int l = 0; l < m->shape.layers; l++)
        add_layer(m);
    m->weights = train_allocate(m->weight_count, sizeof(real));
    m->gradients = train_allocate(m->weight_count, sizeof(real));
}

void model_parameters_close(model *m) {
    free(m->parameters);
    free(m->weights);
    free(m->gradients);
}

/* A matrix's standard deviation is columns^-1/2, except where it writes to the residual stream, which all layers share,
 * and for the head, whose first guess should be no byte in particular. */
static double initial_deviation(const model *m, int index) {
    const double usual = 1 / sqrt((double)m->parameters[index].columns);
    if (index < GLOBAL_PARAMETERS) return index == OUTPUT_HEAD ? 0.2 * usual : usual;
    const int which = (index - GLOBAL_PARAMETERS) % LAYER_PARAMETERS;
    const bool writes_to_stream = which == ATTENTION_OUT || which == FFN_DOWN;
    return writes_to_stream ? usual / sqrt(2.0 * m->shape.layers) : usual;
}

void model_parameters_initialise(model *m, uint64_t seed) {
    random_state random;
    random_seed(&random, seed);
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        const double deviation = initial_deviation(m, p);
        for (int64_t i = 0; i < tensor->rows * tensor->columns; i++) {
            const double value = tensor->rows == 1 ? 1 : deviation * random_normal(&random);
            m->weights[tensor->offset + i] = (real)value;
        }
    }
}
