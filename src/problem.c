#include "problem.h"

#include <math.h>
#include <string.h>

#include "status.h"

/* No real call comes near these; below them no product of sizes in the library can overflow 64 bits. */
enum { MAX_HEADS = 1 << 14, MAX_HEAD_DIM = 256, MIN_BLOCK_SIZE = 16, MAX_BLOCK_SIZE = 1 << 16, MAX_THREADS = 1024 };

void fmsa_config_init(fmsa_config *config, size_t struct_size) {
    if (config == NULL) return;
    fmsa_config defaults;
    memset(&defaults, 0, sizeof defaults);
    defaults.struct_size = struct_size;
    defaults.device_index = -1;
    defaults.block_size = 128;
    defaults.local_blocks = 1;
    memset(config, 0, struct_size);
    memcpy(config, &defaults, struct_size < sizeof defaults ? struct_size : sizeof defaults);
}

size_t fmsa_dtype_bytes(fmsa_dtype dtype) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
    case FMSA_DTYPE_FP16:
        return 2;
    case FMSA_DTYPE_FP32:
        return 4;
    case FMSA_DTYPE_FP64:
        return 8;
    }
    return 0;
}

size_t fmsa_real_bytes(fmsa_dtype dtype) {
    return dtype == FMSA_DTYPE_FP64 ? sizeof(double) : sizeof(float);
}

static fmsa_status check_range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s is %lld; it must lie in %lld ... %lld", name, (long long)value,
                         (long long)least, (long long)most);
    }
    return FMSA_OK;
}

static fmsa_status check_divides(const char *divisor_name, int32_t divisor, const char *name, int32_t value) {
    if (value % divisor != 0) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s is %d and %s is %d; %s must be a multiple of %s", name, value,
                         divisor_name, divisor, name, divisor_name);
    }
    return FMSA_OK;
}

static fmsa_status check_scale(const char *name, double value) {
    if (!isfinite(value) || value < 0) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s is %g; it must be finite and positive, or 0 for the default", name,
                         value);
    }
    return FMSA_OK;
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        fmsa_status try_status = (call);                                                                               \
        if (try_status != FMSA_OK) return try_status;                                                                  \
    } while (0)

static fmsa_status check_choices(const fmsa_config *c) {
    TRY(check_range("device", c->device, FMSA_DEVICE_CPU, FMSA_DEVICE_CUDA));
    TRY(check_range("device_index", c->device_index, -1, 1 << 20));
    TRY(check_range("num_threads", c->num_threads, 0, MAX_THREADS));
    TRY(check_range("dtype", c->dtype, FMSA_DTYPE_BF16, FMSA_DTYPE_FP64));
    TRY(check_range("mode", c->mode, FMSA_MODE_SPARSE, FMSA_MODE_DENSE));
    const uint32_t known_flags = FMSA_FLAG_DETERMINISTIC | FMSA_FLAG_SELECT_FP8 | FMSA_FLAG_CHECK_FRAGMENTS |
                                 FMSA_FLAG_FP32_KV_GRADS | FMSA_FLAG_PORTABLE | FMSA_FLAG_KEY_OUTER |
                                 FMSA_FLAG_QUERY_OUTER;
    if (c->flags & ~known_flags) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "flags is 0x%x; only the bits 0x%x have a meaning", c->flags,
                         known_flags);
    }
    if ((c->flags & FMSA_FLAG_KEY_OUTER) && (c->flags & FMSA_FLAG_QUERY_OUTER))
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "flags has both FMSA_FLAG_KEY_OUTER and FMSA_FLAG_QUERY_OUTER");
    if (c->dtype == FMSA_DTYPE_FP64 && (c->flags & FMSA_FLAG_FP32_KV_GRADS)) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "flags has FMSA_FLAG_FP32_KV_GRADS and dtype is FMSA_DTYPE_FP64; the flag goes with the other "
                         "types only");
    }
    return FMSA_OK;
}

static fmsa_status check_heads(const fmsa_config *c) {
    TRY(check_range("num_heads", c->num_heads, 1, MAX_HEADS));
    TRY(check_range("num_kv_heads", c->num_kv_heads, 1, MAX_HEADS));
    TRY(check_range("num_proxy_heads", c->num_proxy_heads, 1, MAX_HEADS));
    TRY(check_range("num_proxy_kv_heads", c->num_proxy_kv_heads, 1, MAX_HEADS));
    TRY(check_divides("num_kv_heads", c->num_kv_heads, "num_heads", c->num_heads));
    TRY(check_divides("num_proxy_heads", c->num_proxy_heads, "num_heads", c->num_heads));
    TRY(check_divides("num_proxy_kv_heads", c->num_proxy_kv_heads, "num_proxy_heads", c->num_proxy_heads));
    if (c->num_kv_heads % c->num_proxy_heads != 0 && c->num_proxy_heads % c->num_kv_heads != 0) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "num_kv_heads is %d and num_proxy_heads is %d; one of the two must divide the other",
                         c->num_kv_heads, c->num_proxy_heads);
    }
    TRY(check_range("head_dim", c->head_dim, 1, MAX_HEAD_DIM));
    return check_range("proxy_head_dim", c->proxy_head_dim, 1, MAX_HEAD_DIM);
}

static fmsa_status check_selection(const fmsa_config *c) {
    TRY(check_range("block_size", c->block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE));
    if (c->mode == FMSA_MODE_SPARSE) TRY(check_range("top_k", c->top_k, 1, INT32_MAX));
    TRY(check_range("local_blocks", c->local_blocks, 0, INT32_MAX));
    return check_range("init_blocks", c->init_blocks, 0, INT32_MAX);
}

static fmsa_status check_sizes(const fmsa_config *c) {
    TRY(check_range("total_q", c->total_q, 0, INT32_MAX));
    TRY(check_range("total_k", c->total_k, 0, INT32_MAX));
    TRY(check_range("num_fragments", c->num_fragments, 0, INT32_MAX));
    TRY(check_range("max_seqlen_k", c->max_seqlen_k, 0, INT32_MAX));
    TRY(check_range("kl_count", c->kl_count, 0, INT64_MAX));
    TRY(check_scale("softmax_scale", c->softmax_scale));
    return check_scale("proxy_scale", c->proxy_scale);
}

fmsa_status fmsa_problem_init(fmsa_problem *problem, const fmsa_config *config) {
    if (config == NULL) return fmsa_fail(FMSA_ERROR_ARGUMENT, "config is NULL; it must point to a fmsa_config");
    if (config->struct_size != sizeof *config) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "config->struct_size is %zu; this library (%s) knows a fmsa_config of %zu bytes: call "
                         "fmsa_config_init first, and compile against this library's header",
                         config->struct_size, fmsa_version(), sizeof *config);
    }
    TRY(check_choices(config));
    TRY(check_heads(config));
    TRY(check_selection(config));
    TRY(check_sizes(config));

    memset(problem, 0, sizeof *problem);
    problem->config = *config;
    fmsa_config *c = &problem->config;
    if (c->softmax_scale == 0) c->softmax_scale = 1.0 / sqrt(c->head_dim);
    if (c->proxy_scale == 0) c->proxy_scale = 1.0 / sqrt(c->proxy_head_dim);
    if (c->kl_count == 0) c->kl_count = c->total_q > 0 ? c->total_q * c->num_proxy_heads : 1;
    if (c->max_seqlen_k == 0 || c->max_seqlen_k > c->total_k) c->max_seqlen_k = c->total_k;

    problem->heads_per_kv_head = c->num_heads / c->num_kv_heads;
    problem->heads_per_proxy_head = c->num_heads / c->num_proxy_heads;
    problem->bundles = c->num_proxy_heads < c->num_kv_heads ? c->num_proxy_heads : c->num_kv_heads;
    problem->units = c->num_proxy_heads < c->num_kv_heads ? c->num_kv_heads : c->num_proxy_heads;
    problem->unit_heads = c->num_heads / problem->units;
    problem->max_key_blocks = c->total_k / c->block_size + c->num_fragments;
    problem->max_fragment_blocks = fmsa_ceil_div(c->max_seqlen_k, c->block_size);
    problem->slots = (int32_t)(c->top_k < problem->max_fragment_blocks ? c->top_k : problem->max_fragment_blocks);
    return FMSA_OK;
}

static fmsa_status check_bounds(const char *side, int64_t f, int64_t begin, int64_t end, int64_t total) {
    if (begin < 0 || begin > end || end > total) {
        return fmsa_fail(
            FMSA_ERROR_ARGUMENT,
            "%s_begin[%lld] is %lld and %s_end[%lld] is %lld; they must ascend within 0 ... total_%s = %lld", side,
            (long long)f, (long long)begin, side, (long long)f, (long long)end, side, (long long)total);
    }
    return FMSA_OK;
}

fmsa_status fmsa_problem_check_fragments(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    int64_t last_q_end = 0, document_begin = 0, document_end = 0;
    for (int64_t f = 0; f < c->num_fragments; f++) {
        const int64_t q_begin = c->q_begin[f], q_end = c->q_end[f], k_begin = c->k_begin[f], k_end = c->k_end[f];
        TRY(check_bounds("q", f, q_begin, q_end, c->total_q));
        TRY(check_bounds("k", f, k_begin, k_end, c->total_k));
        if (q_begin < last_q_end) {
            return fmsa_fail(FMSA_ERROR_ARGUMENT,
                             "q_begin[%lld] is %lld; it must not lie before the end of the fragments before it, %lld",
                             (long long)f, (long long)q_begin, (long long)last_q_end);
        }
        if (k_begin != document_begin && k_begin < document_end) {
            return fmsa_fail(FMSA_ERROR_ARGUMENT,
                             "k_begin[%lld] is %lld; it must equal that of the fragment before it (%lld) or not lie "
                             "before the end of the keys so far, %lld",
                             (long long)f, (long long)k_begin, (long long)document_begin, (long long)document_end);
        }
        if (k_end - k_begin < q_end - q_begin) {
            return fmsa_fail(FMSA_ERROR_ARGUMENT,
                             "fragment %lld has %lld queries and %lld keys; it must have at least as many keys as "
                             "queries",
                             (long long)f, (long long)(q_end - q_begin), (long long)(k_end - k_begin));
        }
        if (k_end - k_begin > c->max_seqlen_k) {
            return fmsa_fail(FMSA_ERROR_ARGUMENT, "fragment %lld has %lld keys; max_seqlen_k allows at most %lld",
                             (long long)f, (long long)(k_end - k_begin), (long long)c->max_seqlen_k);
        }
        last_q_end = q_end;
        if (k_begin != document_begin) document_end = k_end;
        document_begin = k_begin;
        if (k_end > document_end) document_end = k_end;
    }
    return FMSA_OK;
}
