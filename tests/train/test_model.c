/* The whole model in fp64: gradients against central differences in every phase, and what must not influence what. */
#include "gradient_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "metrics.h"
#include "model.h"
#include "model_parameters.h"
#include "optimizer.h"

enum { BATCH = 2, CONTEXT = 40, LAYERS = 2, SAMPLES = 7 };

typedef struct fixture {
    model model;
    uint8_t inputs[BATCH * CONTEXT], targets[BATCH * CONTEXT];
    attention_phase phase;
    double kl_weight;
} fixture;

/* Gains are moved away from 1, and all weights are large enough for sharp attention. */
static void open_fixture(fixture *f, int top_k) {
    const model_shape shape = {.layers = LAYERS,
                               .dim = 12,
                               .hidden = 10,
                               .context = CONTEXT,
                               .attention = {.heads = 4,
                                             .kv_heads = 2,
                                             .head_dim = 6,
                                             .proxy_heads = 2,
                                             .proxy_kv_heads = 1,
                                             .proxy_head_dim = 4,
                                             .block_size = 16,
                                             .top_k = top_k}};
    if (!model_open(&f->model, &shape, BATCH, 3)) fail_msg("%s", train_failure());
    random_state random;
    random_seed(&random, 4);
    for (int64_t i = 0; i < f->model.weight_count; i++)
        f->model.weights[i] += 0.3 * random_normal(&random);
    for (int i = 0; i < BATCH * CONTEXT; i++) {
        f->inputs[i] = (uint8_t)random_below(&random, 256);
        f->targets[i] = (uint8_t)random_below(&random, 256);
    }
    f->kl_weight = 1;
}

static double forward_loss(void *context) {
    fixture *f = context;
    double loss;
    if (!model_forward(&f->model, f->phase, f->inputs, f->targets, &loss)) fail_msg("%s", train_failure());
    return loss;
}

static double backward_kl(fixture *f) {
    double kl;
    if (!model_backward(&f->model, f->phase, f->inputs, f->targets, f->kl_weight, &kl)) fail_msg("%s", train_failure());
    return kl;
}

static double forward_kl(void *context) {
    forward_loss(context);
    return backward_kl(context);
}

/* Checks a few entries of every tensor of the trunk, or of the proxies, spread over it. */
static void check_tensors(fixture *f, bool proxies, scalar_function *function) {
    const model *m = &f->model;
    forward_loss(f);
    backward_kl(f);
    real *gradients = train_allocate(m->weight_count, sizeof *gradients);
    memcpy(gradients, m->gradients, (size_t)m->weight_count * sizeof *gradients);
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        if (tensor->is_proxy != proxies) continue;
        char name[64];
        snprintf(name, sizeof name, "phase %d, tensor %d", f->phase, p);
        const int64_t count = tensor->rows * tensor->columns;
        for (int64_t s = 0; s < SAMPLES; s++) {
            const int64_t at =
                tensor->offset + (p == EMBEDDING ? f->inputs[s] * tensor->columns + s : s * (count - 1) / SAMPLES);
            check_derivative(function, f, &m->weights[at], gradients[at], name, at - tensor->offset);
        }
    }
    free(gradients);
}

static void check_phase(attention_phase phase, int top_k) {
    fixture f = {.phase = phase};
    open_fixture(&f, top_k);
    check_tensors(&f, false, forward_loss);
    if (phase != PHASE_DENSE) check_tensors(&f, true, forward_kl);
    model_close(&f.model);
}

static void test_dense_gradients(void **state) {
    (void)state;
    check_phase(PHASE_DENSE, 3);
}

static void test_warmup_gradients(void **state) {
    (void)state;
    check_phase(PHASE_WARMUP, 3);
}

static void test_sparse_gradients_with_all_blocks(void **state) {
    (void)state;
    check_phase(PHASE_SPARSE, 3);
}

/* The choice is piecewise constant: for this seed no central difference crosses a tie. */
static void test_sparse_gradients(void **state) {
    (void)state;
    check_phase(PHASE_SPARSE, 2);
}

static void test_kl_does_not_reach_the_trunk(void **state) {
    (void)state;
    for (attention_phase phase = PHASE_WARMUP; phase <= PHASE_SPARSE; phase++) {
        fixture f = {.phase = phase};
        open_fixture(&f, 2);
        const model *m = &f.model;
        forward_loss(&f);
        f.kl_weight = 0;
        backward_kl(&f);
        real *without = train_allocate(m->weight_count, sizeof *without);
        memcpy(without, m->gradients, (size_t)m->weight_count * sizeof *without);
        f.kl_weight = 5;
        assert_true(backward_kl(&f) > 0);
        for (int p = 0; p < m->parameter_count; p++) {
            const parameter *tensor = &m->parameters[p];
            const size_t bytes = (size_t)(tensor->rows * tensor->columns) * sizeof(real);
            const bool same = memcmp(without + tensor->offset, m->gradients + tensor->offset, bytes) == 0;
            assert_true(same == !tensor->is_proxy);
        }
        free(without);
        model_close(&f.model);
    }
}

static void disturb_proxies(model *m) {
    random_state random;
    random_seed(&random, 5);
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        if (tensor->is_proxy) fill_random(&random, m->weights + tensor->offset, tensor->rows * tensor->columns, 1);
    }
}

/* Neither the loss nor the trunk's gradients depend on the proxies until they choose: the warm-up of MSA is the dense
 * run, bit for bit. */
static void test_warmup_trunk_equals_dense(void **state) {
    (void)state;
    fixture f = {.phase = PHASE_DENSE};
    open_fixture(&f, 2);
    const model *m = &f.model;
    const double dense = forward_loss(&f);
    assert_true(backward_kl(&f) == 0);
    real *gradients = train_allocate(m->weight_count, sizeof *gradients);
    memcpy(gradients, m->gradients, (size_t)m->weight_count * sizeof *gradients);
    disturb_proxies(&f.model);
    f.phase = PHASE_WARMUP;
    assert_true(forward_loss(&f) == dense);
    backward_kl(&f);
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        if (tensor->is_proxy) continue;
        assert_memory_equal(gradients + tensor->offset, m->gradients + tensor->offset,
                            (size_t)(tensor->rows * tensor->columns) * sizeof(real));
    }
    free(gradients);
    model_close(&f.model);
}

/* With every block chosen sparse attention is dense attention; with fewer it is not. */
static void test_sparse_with_all_blocks_equals_dense(void **state) {
    (void)state;
    for (int top_k = 2; top_k <= 3; top_k++) {
        fixture f = {.phase = PHASE_DENSE};
        open_fixture(&f, top_k);
        const double dense = forward_loss(&f);
        f.phase = PHASE_SPARSE;
        const double difference = fabs(forward_loss(&f) - dense);
        if (top_k == 3) assert_true(difference < 1e-12);
        if (top_k == 2) assert_true(difference > 1e-6);
        model_close(&f.model);
    }
}

/* A later byte must not change the prediction of an earlier one; another sequence must not either. */
static void test_causality(void **state) {
    (void)state;
    fixture f = {.phase = PHASE_SPARSE};
    open_fixture(&f, 2);
    enum { CHANGED = CONTEXT - 3 };
    static real before[BATCH * CONTEXT * BYTE_VALUES];
    const size_t row = BYTE_VALUES * sizeof(real);
    forward_loss(&f);
    memcpy(before, f.model.logits, sizeof before);
    f.inputs[CHANGED] ^= 1;
    forward_loss(&f);
    assert_memory_equal(before, f.model.logits, CHANGED * row);
    assert_memory_not_equal(before + CHANGED * BYTE_VALUES, f.model.logits + CHANGED * BYTE_VALUES, row);
    assert_memory_equal(before + CONTEXT * BYTE_VALUES, f.model.logits + CONTEXT * BYTE_VALUES, CONTEXT * row);
    model_close(&f.model);
}

/* Probability of each block for one token and proxy head, by the definition: mean over the heads, all that is visible.
 */
static void direct_block_mass(const model *m, int layer, int row, int proxy_head, double *mass, int *blocks) {
    const attention_shape *a = &m->shape.attention;
    const int heads = a->heads / a->proxy_heads, position = row % CONTEXT;
    const int stride = (a->heads + a->kv_heads) * a->head_dim;
    const real *qk = m->layers[layer].qk;
    *blocks = position / a->block_size + 1;
    for (int b = 0; b < *blocks; b++)
        mass[b] = 0;
    for (int h = proxy_head * heads; h < (proxy_head + 1) * heads; h++) {
        const int k_at = (a->heads + h * a->kv_heads / a->heads) * a->head_dim;
        double weight[CONTEXT], sum = 0;
        for (int j = 0; j <= position; j++) {
            double dot = 0;
            for (int i = 0; i < a->head_dim; i++) {
                dot += qk[row * stride + h * a->head_dim + i] * qk[(row - position + j) * stride + k_at + i];
            }
            sum += weight[j] = exp(dot / sqrt(a->head_dim));
        }
        for (int j = 0; j <= position; j++)
            mass[j / a->block_size] += weight[j] / sum / heads;
    }
}

/* Recall and mass of choices put in by hand: the best one block, then the worst. The tokens that see more than one
 * block and lie on the sample's stride of 17 are 16 and 33 of each sequence. */
static void test_recall_and_mass(void **state) {
    (void)state;
    static const int positions[] = {16, 33};
    fixture f = {.phase = PHASE_WARMUP};
    open_fixture(&f, 1);
    forward_loss(&f);
    const model *m = &f.model;
    for (int best = 0; best <= 1; best++) {
        double expected_mass = 0;
        int count = 0;
        for (int i = 0; i < BATCH * 2; i++) {
            const int row = i / 2 * CONTEXT + positions[i % 2];
            for (int p = 0; p < m->shape.attention.proxy_heads; p++) {
                double mass[3] = {0};
                int blocks, chosen = 0;
                direct_block_mass(m, 1, row, p, mass, &blocks);
                for (int b = 1; b < blocks; b++) {
                    if (best ? mass[b] > mass[chosen] : mass[b] < mass[chosen]) chosen = b;
                }
                m->layers[1].block_indices[p * m->rows + row] = chosen;
                expected_mass += mass[chosen];
                count++;
            }
        }
        const choice_sums sums = score_choices(m, 1);
        assert_int_equal(sums.count, count);
        assert_true(sums.recall == (best ? count : 0));
        assert_true(fabs(sums.mass - expected_mass) < 1e-12);
    }
    model_close(&f.model);
}

/* The first step of Adam moves each weight by the learning rate against the sign of its gradient, and decays matrices
 * alone. */
static void test_optimizer_step(void **state) {
    (void)state;
    fixture f = {.phase = PHASE_WARMUP};
    open_fixture(&f, 2);
    model *m = &f.model;
    optimizer o;
    optimizer_open(&o, m);
    forward_loss(&f);
    backward_kl(&f);
    real *before = train_allocate(m->weight_count, sizeof *before);
    memcpy(before, m->weights, (size_t)m->weight_count * sizeof *before);
    const double rate = 0.01, decay = 0.5;
    assert_true(optimizer_step(&o, m, rate, decay) > 0);
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        for (int64_t i = tensor->offset; i < tensor->offset + tensor->rows * tensor->columns; i++) {
            const double kept = before[i] * (tensor->rows > 1 ? 1 - rate * decay : 1);
            const double g = m->gradients[i];
            if (fabs(g) > 1e-4) assert_true(fabs(m->weights[i] - (kept - copysign(rate, g))) < 0.01 * rate);
            if (g == 0) assert_true(m->weights[i] == (real)kept);
        }
    }
    free(before);
    optimizer_close(&o);
    model_close(m);
}

static void test_learning_rate(void **state) {
    (void)state;
    assert_true(optimizer_learning_rate(0, 1000, 1) > 0);
    assert_true(fabs(optimizer_learning_rate(49, 1000, 1) - 1) < 1e-12);
    assert_true(fabs(optimizer_learning_rate(1000, 1000, 1) - 0.1) < 1e-12);
    for (int step = 1; step < 1000; step++) {
        const double before = optimizer_learning_rate(step - 1, 1000, 1), now = optimizer_learning_rate(step, 1000, 1);
        assert_true(step < 50 ? now > before : now <= before);
    }
    assert_true(optimizer_learning_rate(0, 1, 1) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense_gradients),
        cmocka_unit_test(test_warmup_gradients),
        cmocka_unit_test(test_sparse_gradients_with_all_blocks),
        cmocka_unit_test(test_sparse_gradients),
        cmocka_unit_test(test_kl_does_not_reach_the_trunk),
        cmocka_unit_test(test_warmup_trunk_equals_dense),
        cmocka_unit_test(test_sparse_with_all_blocks_equals_dense),
        cmocka_unit_test(test_causality),
        cmocka_unit_test(test_recall_and_mass),
        cmocka_unit_test(test_optimizer_step),
        cmocka_unit_test(test_learning_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
