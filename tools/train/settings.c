#include "settings.h"

#include <math.h>
#include <stddef.h>

#include "failure.h"

train_settings settings_default(void) {
    return (train_settings){
        .shape = {.layers = 3,
                  .dim = 128,
                  .hidden = 352,
                  .context = 512,
                  .attention = {.heads = 4,
                                .kv_heads = 2,
                                .head_dim = 32,
                                .proxy_heads = 2,
                                .proxy_kv_heads = 1,
                                .proxy_head_dim = 32,
                                .block_size = 16,
                                .top_k = 8}},
        .batch = 2,
        .seed = 1,
        .warmup = 0.4,
        .learning_rate = 3e-3,
        .kl_weight = 1,
        .weight_decay = 0.1,
    };
}

typedef struct bound {
    const char *option;
    double value, least, most;
} bound;

static bool check_bounds(const train_settings *s) {
    const model_shape *m = &s->shape;
    const attention_shape *a = &m->attention;
    const bound bounds[] = {
        {"--layers", m->layers, 1, 256},
        {"--dim", m->dim, 1, 1 << 14},
        {"--hidden", m->hidden, 1, 1 << 16},
        {"--context", m->context, 1, 1 << 20},
        {"--batch", s->batch, 1, 1 << 16},
        {"--heads", a->heads, 1, 1 << 10},
        {"--kv-heads", a->kv_heads, 1, 1 << 10},
        {"--proxy-heads", a->proxy_heads, 1, 1 << 10},
        {"--proxy-kv-heads", a->proxy_kv_heads, 1, 1 << 10},
        {"--head-dim", a->head_dim, 2, 256},
        {"--proxy-head-dim", a->proxy_head_dim, 2, 256},
        {"--block", a->block_size, 16, 1 << 16},
        {"--top-k", a->top_k, 1, 1 << 16},
        {"--steps", (double)s->steps, 0, 1e9},
        {"--eval-every", (double)s->evaluate_every, 0, 1e9},
        {"--warmup", s->warmup, 0, 1},
        {"--lr", s->learning_rate, 0, 10},
        {"--kl-weight", s->kl_weight, 0, 1e6},
        {"--weight-decay", s->weight_decay, 0, 10},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        const bound *b = &bounds[i];
        if (b->value >= b->least && b->value <= b->most) continue;
        return train_fail("%s is %g; it must lie in %g ... %g", b->option, b->value, b->least, b->most);
    }
    return true;
}

bool settings_check(const train_settings *s) {
    const attention_shape *a = &s->shape.attention;
    const int64_t most_rows = 1 << 22;
    if (!check_bounds(s)) return false;
    if (a->head_dim % 2 != 0 || a->proxy_head_dim % 2 != 0) {
        return train_fail("--head-dim is %d and --proxy-head-dim is %d; both must be even, since the rotary embedding "
                          "turns pairs",
                          a->head_dim, a->proxy_head_dim);
    }
    if ((int64_t)s->batch * s->shape.context > most_rows) {
        return train_fail("--batch is %d and --context is %d; together they must be at most %lld bytes of text a step",
                          s->batch, s->shape.context, (long long)most_rows);
    }
    return true;
}

attention_phase settings_phase(const train_settings *s, int64_t step) {
    if (s->dense) return PHASE_DENSE;
    return step < s->warmup_steps ? PHASE_WARMUP : PHASE_SPARSE;
}

const char *settings_run_name(const train_settings *s) {
    return s->dense ? "dense" : "msa";
}

int32_t settings_blocks(const train_settings *s) {
    const int32_t block = s->shape.attention.block_size;
    return (s->shape.context + block - 1) / block;
}
