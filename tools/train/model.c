#include "model.h"

#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "layers.h"
#include "model_parameters.h"

/* Gradients of activations; one set serves all layers in turn. */
typedef struct model_scratch {
    real *dx;        /* [T, dim]: of the residual stream */
    real *dnormed;   /* [T, dim] */
    real *dlogits;   /* [T, 256] */
    real *dgated;    /* [T, hidden] */
    real *dgate_up;  /* [T, 2 hidden] */
    real *dattended; /* [T, Hq D] */
    real *dqk;       /* [T, (Hq + Hkv) D]: of q and k as the attention sees them */
    real *dqkv;      /* [T, (Hq + 2 Hkv) D]: of the projections */
    real *dproxy;    /* [T, (Hp + Hpk) Dp], as the attention sees them */
    real *dproxy_projection;
} model_scratch;

/* ---- Sizes of a row of activations. ---- */

static int64_t q_columns(const model *m) {
    return (int64_t)m->shape.attention.heads * m->shape.attention.head_dim;
}

static int64_t kv_columns(const model *m) {
    return (int64_t)m->shape.attention.kv_heads * m->shape.attention.head_dim;
}

static int64_t qk_columns(const model *m) {
    return q_columns(m) + kv_columns(m);
}

static int64_t qkv_columns(const model *m) {
    return q_columns(m) + 2 * kv_columns(m);
}

static int64_t proxy_q_columns(const model *m) {
    return (int64_t)m->shape.attention.proxy_heads * m->shape.attention.proxy_head_dim;
}

static int64_t proxy_columns(const model *m) {
    return proxy_q_columns(m) + (int64_t)m->shape.attention.proxy_kv_heads * m->shape.attention.proxy_head_dim;
}

/* ---- Memory. ---- */

static real *allocate_rows(const model *m, int64_t columns) {
    return train_allocate(m->rows * columns, sizeof(real));
}

static void open_layer(const model *m, layer_state *l) {
    const attention_shape *a = &m->shape.attention;
    l->input = allocate_rows(m, m->shape.dim);
    l->attention_inverse_rms = allocate_rows(m, 1);
    l->attention_normed = allocate_rows(m, m->shape.dim);
    l->qkv = allocate_rows(m, qkv_columns(m));
    l->qk = allocate_rows(m, qk_columns(m));
    l->q_inverse_rms = allocate_rows(m, a->heads);
    l->k_inverse_rms = allocate_rows(m, a->kv_heads);
    l->proxy_projection = allocate_rows(m, proxy_columns(m));
    l->proxy = allocate_rows(m, proxy_columns(m));
    l->proxy_q_inverse_rms = allocate_rows(m, a->proxy_heads);
    l->proxy_k_inverse_rms = allocate_rows(m, a->proxy_kv_heads);
    l->block_indices = train_allocate(m->rows * a->proxy_heads * a->top_k, sizeof(int32_t));
    l->schedule = train_allocate((int64_t)m->attention.schedule_bytes, 1);
    l->attended = allocate_rows(m, q_columns(m));
    l->lse = allocate_rows(m, a->heads);
    l->middle = allocate_rows(m, m->shape.dim);
    l->ffn_inverse_rms = allocate_rows(m, 1);
    l->ffn_normed = allocate_rows(m, m->shape.dim);
    l->gate_up = allocate_rows(m, 2 * (int64_t)m->shape.hidden);
    l->gated = allocate_rows(m, m->shape.hidden);
}

static void close_layer(layer_state *l) {
    void *const memory[] = {l->input,
                            l->attention_inverse_rms,
                            l->attention_normed,
                            l->qkv,
                            l->qk,
                            l->q_inverse_rms,
                            l->k_inverse_rms,
                            l->proxy_projection,
                            l->proxy,
                            l->proxy_q_inverse_rms,
                            l->proxy_k_inverse_rms,
                            l->block_indices,
                            l->schedule,
                            l->attended,
                            l->lse,
                            l->middle,
                            l->ffn_inverse_rms,
                            l->ffn_normed,
                            l->gate_up,
                            l->gated};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
}

static void open_scratch(model *m) {
    model_scratch *s = m->scratch = train_allocate(1, sizeof *s);
    s->dx = allocate_rows(m, m->shape.dim);
    s->dnormed = allocate_rows(m, m->shape.dim);
    s->dlogits = allocate_rows(m, BYTE_VALUES);
    s->dgated = allocate_rows(m, m->shape.hidden);
    s->dgate_up = allocate_rows(m, 2 * (int64_t)m->shape.hidden);
    s->dattended = allocate_rows(m, q_columns(m));
    s->dqk = allocate_rows(m, qk_columns(m));
    s->dqkv = allocate_rows(m, qkv_columns(m));
    s->dproxy = allocate_rows(m, proxy_columns(m));
    s->dproxy_projection = allocate_rows(m, proxy_columns(m));
}

static void close_scratch(model_scratch *s) {
    if (s == NULL) return;
    void *const memory[] = {s->dx,   s->dnormed, s->dlogits,           s->dgated, s->dgate_up, s->dattended, s->dqk,
                            s->dqkv, s->dproxy,  s->dproxy_projection, s};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
}

static void open_rope_tables(model *m) {
    const int64_t positions = m->shape.context;
    const int64_t pairs = m->shape.attention.head_dim / 2, proxy_pairs = m->shape.attention.proxy_head_dim / 2;
    m->cosine = train_allocate(positions * pairs, sizeof(real));
    m->sine = train_allocate(positions * pairs, sizeof(real));
    m->proxy_cosine = train_allocate(positions * proxy_pairs, sizeof(real));
    m->proxy_sine = train_allocate(positions * proxy_pairs, sizeof(real));
    rope_table(m->cosine, m->sine, positions, 2 * pairs);
    rope_table(m->proxy_cosine, m->proxy_sine, positions, 2 * proxy_pairs);
}

bool model_open(model *m, const model_shape *shape, int32_t batch, uint64_t seed) {
    *m = (model){.shape = *shape, .batch = batch, .rows = (int64_t)batch * shape->context};
    if (!attention_open(&m->attention, &shape->attention, batch, shape->context)) return false;
    model_parameters_open(m);
    model_parameters_initialise(m, seed);
    open_rope_tables(m);
    m->layers = train_allocate(shape->layers, sizeof *m->layers);
    for (int l = 0; l < shape->layers; l++)
        open_layer(m, &m->layers[l]);
    m->output = allocate_rows(m, shape->dim);
    m->output_inverse_rms = allocate_rows(m, 1);
    m->output_normed = allocate_rows(m, shape->dim);
    m->logits = allocate_rows(m, BYTE_VALUES);
    open_scratch(m);
    return true;
}

void model_close(model *m) {
    for (int l = 0; m->layers != NULL && l < m->shape.layers; l++)
        close_layer(&m->layers[l]);
    void *const memory[] = {
        m->layers,        m->cosine, m->sine, m->proxy_cosine, m->proxy_sine, m->output, m->output_inverse_rms,
        m->output_normed, m->logits};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    close_scratch(m->scratch);
    attention_close(&m->attention);
    model_parameters_close(m);
    *m = (model){0};
}

/* ---- Views for the attention. ---- */

static fmsa_tensor head_view(real *data, int64_t row_stride, int64_t dim) {
    return (fmsa_tensor){data, row_stride, dim};
}

static fmsa_tensors forward_tensors(const model *m, const layer_state *l) {
    const attention_shape *a = &m->shape.attention;
    fmsa_tensors t = {.struct_size = sizeof t};
    t.q = head_view(l->qk, qk_columns(m), a->head_dim);
    t.k = head_view(l->qk + q_columns(m), qk_columns(m), a->head_dim);
    t.v = head_view(l->qkv + qk_columns(m), qkv_columns(m), a->head_dim);
    t.q_proxy = head_view(l->proxy, proxy_columns(m), a->proxy_head_dim);
    t.k_proxy = head_view(l->proxy + proxy_q_columns(m), proxy_columns(m), a->proxy_head_dim);
    t.block_indices = (fmsa_tensor){l->block_indices, a->top_k, m->rows * a->top_k};
    t.schedule = l->schedule;
    t.schedule_bytes = m->attention.schedule_bytes;
    t.out = head_view(l->attended, q_columns(m), a->head_dim);
    t.lse = (fmsa_tensor){l->lse, 1, m->rows};
    return t;
}

static fmsa_tensors backward_tensors(const model *m, const layer_state *l, const real *grad_kl, real *kl) {
    const attention_shape *a = &m->shape.attention;
    const model_scratch *s = m->scratch;
    fmsa_tensors t = forward_tensors(m, l);
    t.dout = head_view(s->dattended, q_columns(m), a->head_dim);
    t.dq = head_view(s->dqk, qk_columns(m), a->head_dim);
    t.dk = head_view(s->dqk + q_columns(m), qk_columns(m), a->head_dim);
    t.dv = head_view(s->dqkv + qk_columns(m), qkv_columns(m), a->head_dim);
    t.dq_proxy = head_view(s->dproxy, proxy_columns(m), a->proxy_head_dim);
    t.dk_proxy = head_view(s->dproxy + proxy_q_columns(m), proxy_columns(m), a->proxy_head_dim);
    t.grad_kl = grad_kl;
    t.kl = kl;
    return t;
}

/* ---- The two sets of queries and keys: the main ones and the proxies'. ---- */

/* Queries and keys stand side by side in a row: as projected (with v behind them in the main set), and as normed and
 * rotated. */
typedef struct projection {
    layer_parameter weight, q_gain, k_gain;
    head_layout q, k; /* of either part */
    const real *cosine, *sine;
    real *projected, *rotated;
    real *q_inverse_rms, *k_inverse_rms;
    real *dprojected, *drotated;
} projection;

static projection main_projection(const model *m, int layer) {
    const layer_state *l = &m->layers[layer];
    const attention_shape *a = &m->shape.attention;
    const head_layout layout = {m->rows, 0, a->head_dim, m->shape.context, qkv_columns(m), qk_columns(m)};
    projection p = {.weight = QKV,
                    .q_gain = Q_GAIN,
                    .k_gain = K_GAIN,
                    .q = layout,
                    .k = layout,
                    .cosine = m->cosine,
                    .sine = m->sine,
                    .projected = l->qkv,
                    .rotated = l->qk,
                    .q_inverse_rms = l->q_inverse_rms,
                    .k_inverse_rms = l->k_inverse_rms,
                    .dprojected = m->scratch->dqkv,
                    .drotated = m->scratch->dqk};
    p.q.heads = a->heads;
    p.k.heads = a->kv_heads;
    return p;
}

static projection proxy_projection(const model *m, int layer) {
    const layer_state *l = &m->layers[layer];
    const attention_shape *a = &m->shape.attention;
    const head_layout layout = {m->rows, 0, a->proxy_head_dim, m->shape.context, proxy_columns(m), proxy_columns(m)};
    projection p = {.weight = PROXY_QK,
                    .q_gain = PROXY_Q_GAIN,
                    .k_gain = PROXY_K_GAIN,
                    .q = layout,
                    .k = layout,
                    .cosine = m->proxy_cosine,
                    .sine = m->proxy_sine,
                    .projected = l->proxy_projection,
                    .rotated = l->proxy,
                    .q_inverse_rms = l->proxy_q_inverse_rms,
                    .k_inverse_rms = l->proxy_k_inverse_rms,
                    .dprojected = m->scratch->dproxy_projection,
                    .drotated = m->scratch->dproxy};
    p.q.heads = a->proxy_heads;
    p.k.heads = a->proxy_kv_heads;
    return p;
}

static void project(const model *m, int layer, projection p) {
    const int64_t k_at = p.q.heads * p.q.dim;
    linear_forward(p.projected, m->layers[layer].attention_normed, layer_tensor(m, m->weights, layer, p.weight),
                   m->rows, p.q.input_stride, m->shape.dim);
    head_norm_rope_forward(&p.q, p.rotated, p.q_inverse_rms, p.projected, layer_tensor(m, m->weights, layer, p.q_gain),
                           p.cosine, p.sine);
    head_norm_rope_forward(&p.k, p.rotated + k_at, p.k_inverse_rms, p.projected + k_at,
                           layer_tensor(m, m->weights, layer, p.k_gain), p.cosine, p.sine);
}

/* From drotated to the gradients of the gains and of the weight. */
static void project_backward(const model *m, int layer, projection p) {
    real *const w = m->weights, *const g = m->gradients;
    const int64_t k_at = p.q.heads * p.q.dim;
    head_norm_rope_backward(&p.q, p.dprojected, layer_tensor(m, g, layer, p.q_gain), p.drotated, p.projected,
                            p.q_inverse_rms, layer_tensor(m, w, layer, p.q_gain), p.cosine, p.sine);
    head_norm_rope_backward(&p.k, p.dprojected + k_at, layer_tensor(m, g, layer, p.k_gain), p.drotated + k_at,
                            p.projected + k_at, p.k_inverse_rms, layer_tensor(m, w, layer, p.k_gain), p.cosine, p.sine);
    linear_backward_weight(layer_tensor(m, g, layer, p.weight), p.dprojected, m->layers[layer].attention_normed,
                           m->rows, p.q.input_stride, m->shape.dim);
}

/* ---- Forward. ---- */

static bool attend(const model *m, attention_phase phase, int layer) {
    const fmsa_tensors t = forward_tensors(m, &m->layers[layer]);
    if (phase == PHASE_SPARSE) {
        if (!attention_run(&m->attention, phase, FMSA_OPERATION_SELECT, &t)) return false;
        if (!attention_run(&m->attention, phase, FMSA_OPERATION_SCHEDULE, &t)) return false;
    }
    return attention_run(&m->attention, phase, FMSA_OPERATION_FORWARD, &t);
}

/* From l->input to output, which is the next layer's input. */
static bool layer_forward(const model *m, attention_phase phase, int layer, real *output) {
    layer_state *l = &m->layers[layer];
    real *const w = m->weights;
    const int64_t rows = m->rows, dim = m->shape.dim, hidden = m->shape.hidden;
    rmsnorm_forward(l->attention_normed, l->attention_inverse_rms, l->input, layer_tensor(m, w, layer, ATTENTION_NORM),
                    rows, dim);
    project(m, layer, main_projection(m, layer));
    if (phase != PHASE_DENSE) project(m, layer, proxy_projection(m, layer));
    if (!attend(m, phase, layer)) return false;
    linear_forward(l->middle, l->attended, layer_tensor(m, w, layer, ATTENTION_OUT), rows, dim, q_columns(m));
    add_to(l->middle, l->input, rows * dim);

    rmsnorm_forward(l->ffn_normed, l->ffn_inverse_rms, l->middle, layer_tensor(m, w, layer, FFN_NORM), rows, dim);
    linear_forward(l->gate_up, l->ffn_normed, layer_tensor(m, w, layer, GATE_UP), rows, 2 * hidden, dim);
    swiglu_forward(l->gated, l->gate_up, rows, hidden);
    linear_forward(output, l->gated, layer_tensor(m, w, layer, FFN_DOWN), rows, dim, hidden);
    add_to(output, l->middle, rows * dim);
    return true;
}

bool model_forward(model *m, attention_phase phase, const uint8_t *inputs, const uint8_t *targets, double *loss) {
    real *const w = m->weights;
    const int64_t rows = m->rows, dim = m->shape.dim;
    embedding_forward(m->layers[0].input, global_tensor(m, w, EMBEDDING), inputs, rows, dim);
    for (int l = 0; l < m->shape.layers; l++) {
        real *output = l + 1 < m->shape.layers ? m->layers[l + 1].input : m->output;
        if (!layer_forward(m, phase, l, output)) return false;
    }
    rmsnorm_forward(m->output_normed, m->output_inverse_rms, m->output, global_tensor(m, w, OUTPUT_NORM), rows, dim);
    linear_forward(m->logits, m->output_normed, global_tensor(m, w, OUTPUT_HEAD), rows, BYTE_VALUES, dim);
    *loss = cross_entropy(NULL, m->logits, targets, rows, BYTE_VALUES);
    return true;
}

bool model_select(model *m) {
    for (int l = 0; l < m->shape.layers; l++) {
        const fmsa_tensors t = forward_tensors(m, &m->layers[l]);
        if (!attention_run(&m->attention, PHASE_SPARSE, FMSA_OPERATION_SELECT, &t)) return false;
    }
    return true;
}

/* ---- Backward: scratch->dx holds the gradient of the residual stream, from the last layer to the first. ---- */

static void ffn_backward(const model *m, int layer) {
    const layer_state *l = &m->layers[layer];
    const model_scratch *s = m->scratch;
    real *const w = m->weights, *const g = m->gradients;
    const int64_t rows = m->rows, dim = m->shape.dim, hidden = m->shape.hidden;
    linear_backward_weight(layer_tensor(m, g, layer, FFN_DOWN), s->dx, l->gated, rows, dim, hidden);
    linear_backward_input(s->dgated, s->dx, layer_tensor(m, w, layer, FFN_DOWN), rows, dim, hidden);
    swiglu_backward(s->dgate_up, s->dgated, l->gate_up, rows, hidden);
    linear_backward_weight(layer_tensor(m, g, layer, GATE_UP), s->dgate_up, l->ffn_normed, rows, 2 * hidden, dim);
    linear_backward_input(s->dnormed, s->dgate_up, layer_tensor(m, w, layer, GATE_UP), rows, 2 * hidden, dim);
    rmsnorm_backward(s->dx, layer_tensor(m, g, layer, FFN_NORM), s->dnormed, l->middle, l->ffn_inverse_rms,
                     layer_tensor(m, w, layer, FFN_NORM), rows, dim);
}

static bool attention_backward(const model *m, attention_phase phase, int layer, real grad_kl, real *kl) {
    const layer_state *l = &m->layers[layer];
    const model_scratch *s = m->scratch;
    real *const w = m->weights, *const g = m->gradients;
    const int64_t rows = m->rows, dim = m->shape.dim;
    linear_backward_weight(layer_tensor(m, g, layer, ATTENTION_OUT), s->dx, l->attended, rows, dim, q_columns(m));
    linear_backward_input(s->dattended, s->dx, layer_tensor(m, w, layer, ATTENTION_OUT), rows, dim, q_columns(m));
    const fmsa_operation operation =
        phase == PHASE_DENSE ? FMSA_OPERATION_BACKWARD : FMSA_OPERATION_BACKWARD_WITH_PROXY;
    const fmsa_tensors t = backward_tensors(m, l, &grad_kl, kl);
    if (!attention_run(&m->attention, phase, operation, &t)) return false;
    project_backward(m, layer, main_projection(m, layer));
    linear_backward_input(s->dnormed, s->dqkv, layer_tensor(m, w, layer, QKV), rows, qkv_columns(m), dim);
    /* The proxies' gradient ends at their own weights: their input is detached. */
    if (phase != PHASE_DENSE) project_backward(m, layer, proxy_projection(m, layer));
    rmsnorm_backward(s->dx, layer_tensor(m, g, layer, ATTENTION_NORM), s->dnormed, l->input, l->attention_inverse_rms,
                     layer_tensor(m, w, layer, ATTENTION_NORM), rows, dim);
    return true;
}

static void head_backward(const model *m, const uint8_t *targets) {
    const model_scratch *s = m->scratch;
    real *const w = m->weights, *const g = m->gradients;
    const int64_t rows = m->rows, dim = m->shape.dim;
    cross_entropy(s->dlogits, m->logits, targets, rows, BYTE_VALUES);
    linear_backward_weight(global_tensor(m, g, OUTPUT_HEAD), s->dlogits, m->output_normed, rows, BYTE_VALUES, dim);
    linear_backward_input(s->dnormed, s->dlogits, global_tensor(m, w, OUTPUT_HEAD), rows, BYTE_VALUES, dim);
    memset(s->dx, 0, (size_t)(rows * dim) * sizeof *s->dx);
    rmsnorm_backward(s->dx, global_tensor(m, g, OUTPUT_NORM), s->dnormed, m->output, m->output_inverse_rms,
                     global_tensor(m, w, OUTPUT_NORM), rows, dim);
}

bool model_backward(model *m, attention_phase phase, const uint8_t *inputs, const uint8_t *targets, double kl_weight,
                    double *kl) {
    const int layers = m->shape.layers;
    memset(m->gradients, 0, (size_t)m->weight_count * sizeof *m->gradients);
    head_backward(m, targets);
    *kl = 0;
    for (int l = layers - 1; l >= 0; l--) {
        real layer_kl = 0;
        ffn_backward(m, l);
        if (!attention_backward(m, phase, l, (real)(kl_weight / layers), &layer_kl)) return false;
        *kl += (double)layer_kl / layers;
    }
    embedding_backward(global_tensor(m, m->gradients, EMBEDDING), m->scratch->dx, inputs, m->rows, m->shape.dim);
    return true;
}
