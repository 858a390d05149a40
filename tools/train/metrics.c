#include "metrics.h"

#include <math.h>
#include <stdlib.h>

#include "failure.h"

/* Coprime to the block size, so that the sampled tokens lie anywhere in their block. */
enum { TOKEN_SAMPLE_STRIDE = 17 };

/* Adds to mass [visible blocks] the probability of each block for one head. probability is scratch [context]. */
static void add_block_mass(const model *m, const layer_state *l, int64_t row, int head, double *probability,
                           double *mass) {
    const attention_shape *a = &m->shape.attention;
    const int64_t dim = a->head_dim, stride = (int64_t)(a->heads + a->kv_heads) * dim;
    const int64_t position = row % m->shape.context, first_key = row - position;
    const real *q = l->qk + row * stride + head * dim;
    const real *keys = l->qk + (a->heads + head / (a->heads / a->kv_heads)) * dim;
    double greatest = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= position; j++) {
        const real *k = keys + (first_key + j) * stride;
        real dot = 0;
        for (int64_t i = 0; i < dim; i++)
            dot += q[i] * k[i];
        probability[j] = (double)dot / sqrt((double)dim);
        greatest = fmax(greatest, probability[j]);
    }
    for (int64_t j = 0; j <= position; j++)
        sum += probability[j] = exp(probability[j] - greatest);
    for (int64_t j = 0; j <= position; j++)
        mass[j / a->block_size] += probability[j] / sum;
}

/* Whether fewer than count blocks come before block: those of greater mass, and of equal mass with a lower number. */
static bool is_among_greatest(const double *mass, int64_t blocks, int64_t block, int64_t count) {
    int64_t before = 0;
    for (int64_t b = 0; b < blocks; b++)
        before += mass[b] > mass[block] || (mass[b] == mass[block] && b < block);
    return before < count;
}

/* Scores one token's choice for one proxy head. */
static void score_choice(const model *m, const layer_state *l, int64_t row, int proxy_head, double *probability,
                         double *mass, choice_sums *sums) {
    const attention_shape *a = &m->shape.attention;
    const int heads = a->heads / a->proxy_heads;
    const int64_t blocks = row % m->shape.context / a->block_size + 1;
    const int32_t *chosen = l->block_indices + (proxy_head * m->rows + row) * a->top_k;
    for (int64_t b = 0; b < blocks; b++)
        mass[b] = 0;
    for (int h = 0; h < heads; h++)
        add_block_mass(m, l, row, proxy_head * heads + h, probability, mass);
    for (int i = 0; i < a->top_k; i++) {
        sums->recall += (double)is_among_greatest(mass, blocks, chosen[i], a->top_k) / a->top_k;
        sums->mass += mass[chosen[i]] / heads;
    }
    sums->count++;
}

static void add_sums(choice_sums *total, const choice_sums *sums) {
    total->recall += sums->recall;
    total->mass += sums->mass;
    total->count += sums->count;
}

choice_sums score_choices(const model *m, int layer) {
    const attention_shape *a = &m->shape.attention;
    const int64_t context = m->shape.context, first_scored = (int64_t)a->top_k * a->block_size;
    const int64_t scored = context > first_scored ? (context - first_scored - 1) / TOKEN_SAMPLE_STRIDE + 1 : 0;
    /* One sum a token, added up in order: the same bits whatever thread took it. */
    choice_sums *sums = train_allocate(m->batch * scored, sizeof *sums);
#pragma omp parallel
    {
        double *probability = train_allocate(context, sizeof *probability);
        double *block_mass = train_allocate(context / a->block_size + 1, sizeof *block_mass);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < m->batch * scored; i++) {
            const int64_t row = i / scored * context + first_scored + i % scored * TOKEN_SAMPLE_STRIDE;
            for (int p = 0; p < a->proxy_heads; p++) {
                score_choice(m, &m->layers[layer], row, p, probability, block_mass, &sums[i]);
            }
        }
        free(probability);
        free(block_mass);
    }
    choice_sums total = {0};
    for (int64_t i = 0; i < m->batch * scored; i++)
        add_sums(&total, &sums[i]);
    free(sums);
    return total;
}

static void add_choices(const model *m, choice_sums *total) {
    for (int l = 0; l < m->shape.layers; l++) {
        const choice_sums sums = score_choices(m, l);
        add_sums(total, &sums);
    }
}

/* A whole number of batches, at least one. */
static int64_t validation_sequences(const model *m) {
    const int64_t batches = VALIDATION_SEQUENCES / m->batch;
    return (batches > 0 ? batches : 1) * m->batch;
}

bool evaluate_model(model *m, attention_phase phase, const corpus *corpus, evaluation *e) {
    const int64_t sequences = validation_sequences(m), context = m->shape.context;
    uint8_t *inputs = train_allocate(m->rows, 1), *targets = train_allocate(m->rows, 1);
    double loss_sum = 0;
    choice_sums choices = {0};
    bool ok = true;
    for (int64_t first = 0; ok && first < sequences; first += m->batch) {
        for (int64_t i = 0; i < m->batch; i++) {
            corpus_validation_sequence(corpus, first + i, sequences, context, inputs + i * context,
                                       targets + i * context);
        }
        double loss;
        ok = model_forward(m, phase, inputs, targets, &loss);
        if (ok && phase == PHASE_WARMUP) ok = model_select(m);
        if (!ok) break;
        loss_sum += loss * m->batch;
        if (phase != PHASE_DENSE) add_choices(m, &choices);
    }
    free(inputs);
    free(targets);
    e->loss = loss_sum / (double)sequences;
    e->recall = choices.count > 0 ? choices.recall / (double)choices.count : NAN;
    e->mass = choices.count > 0 ? choices.mass / (double)choices.count : NAN;
    return ok;
}
