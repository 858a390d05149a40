/* The Hopper proxy loss on the host's side: memory, chunks and groups, the order of launches. The kernels are in
 * sm90_proxy_student.cu, sm90_proxy_gradient.cu, sm90_proxy_teacher.cu and sm90_proxy_parts.cu. */
#include "sm90.h"
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

fmsa_status multiprocessors(unsigned *count) {
    int device, number = 0;
    FMSA_TRY(fmsa_cuda_status("reading the current device", cudaGetDevice(&device)));
    FMSA_TRY(fmsa_cuda_status("counting multiprocessors",
                              cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device)));
    *count = static_cast<unsigned>(number);
    return FMSA_OK;
}

/* ---- Memory ---- */

static int64_t min_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Tokens of a share: long enough that what a share costs once does not count, short enough that every multiprocessor
 * gets several. In deterministic mode most lists stay whole, since the shares of one wait for each other. The same for
 * all groups, so that a smaller one never has more shares. */
static int32_t share_rows(const fmsa_problem *problem) {
    const int64_t wanted_shares = in_order(problem) ? 256 : 1024, most = in_order(problem) ? 4096 : 1024, least = 128;
    const fmsa_config *c = &problem->config;
    const int64_t places = is_dense(problem) ? (problem->max_fragment_blocks + 1) / 2 : problem->slots;
    const int64_t rows = fmsa_ceil_div(c->num_proxy_heads * c->total_q * places, wanted_shares * tile_tokens);
    return static_cast<int32_t>(min_of(rows * tile_tokens > least ? rows * tile_tokens : least, most));
}

/* An upper bound. A border between segments lies in one document at most, and adds no more than its blocks once more.
 */
static int64_t max_shares(const fmsa_problem *problem, const proxy_work &w) {
    const int64_t heads = w.proxy_heads, rows = w.row_end - w.row_begin;
    const int64_t segments = fmsa_ceil_div(rows, w.segment_rows);
    const int64_t of_document = is_dense(problem) ? w.places : problem->max_fragment_blocks;
    int64_t blocks = w.max_blocks;
    if (is_dense(problem)) blocks = min_of(blocks, problem->config.num_fragments * w.places);
    const int64_t lists = heads * min_of(segments * blocks, blocks + segments * of_document);
    if (is_dense(problem)) return lists;
    const int64_t edges = heads * rows * w.places;
    return edges / w.share_rows + min_of(edges, lists);
}

/* Numbers in dq_sums. */
static int64_t sum_count(const fmsa_problem *problem, const proxy_work &w) {
    return int64_t(w.row_end - w.row_begin) * problem->config.num_proxy_heads * w.sum_terms * vector_length;
}

group_memory take_group(const fmsa_problem *problem, const fmsa_sm90_proxy &proxy, const fmsa_sm90_proxy_group &group,
                        void *memory, int32_t planes, bool computed) {
    constexpr int32_t usual_segment = 1 << 16; /* rows of q_proxy of one head: 16 MB at Dp = 128 */
    const fmsa_config *c = &problem->config;
    group_memory g = {};
    proxy_work &w = g.work;
    w.geometry = proxy.geometry;
    if (!is_dense(problem)) {
        w.list_begin = proxy.schedule.list_begin;
        w.edge_row = proxy.schedule.edge_row;
        w.edge_slot = proxy.schedule.edge_slot;
        w.row_count = proxy.schedule.row_count;
    }
    w.max_blocks = problem->max_key_blocks;
    w.total_q = static_cast<int32_t>(c->total_q);
    w.proxy_heads = c->num_proxy_heads;
    w.row_begin = static_cast<int32_t>(group.row_begin);
    w.row_end = static_cast<int32_t>(group.row_end);
    w.first_block = group.first_block;
    w.places = group.places;
    w.student_lse = proxy.student_lse;
    w.key_heads = c->num_proxy_kv_heads;
    w.proxy_heads_per_key_head = c->num_proxy_heads / c->num_proxy_kv_heads;
    w.key_bounds = proxy.key_bounds;
    const int64_t rows = group.row_end - group.row_begin, count = rows * c->num_proxy_heads * group.places;
    w.share_rows = share_rows(problem);
    w.segment_rows = is_dense(problem) ? w.share_rows
                     : computed        ? 1 << fmsa_cuda_segment_shift(problem)
                                       : usual_segment;
    g.max_shares = max_shares(problem, w);

    fmsa_cuda_arena arena = {static_cast<char *>(memory), 0};
    w.vectors = static_cast<uint16_t *>(fmsa_cuda_take(&arena, count * planes, vector_length * sizeof(uint16_t)));
    w.numbers = static_cast<float *>(fmsa_cuda_take(&arena, count, sizeof(float)));
    if (sums_dq(problem)) {
        w.sum_terms = static_cast<int32_t>(fmsa_ceil_div(group.places, term_places));
        w.dq_sums = static_cast<uint16_t *>(fmsa_cuda_take(&arena, sum_count(problem, w), sizeof(uint16_t)));
    }
    w.shares = static_cast<proxy_share *>(fmsa_cuda_take(&arena, g.max_shares, sizeof(proxy_share)));
    w.num_shares = static_cast<int32_t *>(fmsa_cuda_take(&arena, 1, sizeof(int32_t)));
    w.group_shares = static_cast<int32_t *>(
        fmsa_cuda_take(&arena, fmsa_ceil_div(rows, w.segment_rows) * w.proxy_heads, sizeof(int32_t)));
    w.tickets = static_cast<uint32_t *>(fmsa_cuda_take(&arena, TICKETS, sizeof(uint32_t)));
    g.kl_sums = static_cast<float *>(fmsa_cuda_take(&arena, g.max_shares * kl_sums_a_share, sizeof(float)));
    if (is_dense(problem) && group.places < problem->max_fragment_blocks) {
        g.dq =
            static_cast<float *>(fmsa_cuda_take(&arena, rows * c->num_proxy_heads * c->proxy_head_dim, sizeof(float)));
    }
    g.bytes = arena.used;
    return g;
}

static size_t dk_sum_bytes(const fmsa_problem *problem) {
    return sizeof(float) * problem->config.total_k * dk_sum_heads(problem) * problem->config.proxy_head_dim;
}

static int64_t turn_count(const fmsa_problem *problem) {
    return in_order(problem) ? problem->config.num_proxy_heads * problem->max_key_blocks : 0;
}

static fmsa_sm90_proxy take_proxy(const fmsa_problem *problem, void *memory, size_t *bytes) {
    const fmsa_config *c = &problem->config;
    fmsa_cuda_arena arena = {static_cast<char *>(memory), 0};
    fmsa_sm90_proxy p = {};
    p.sums = fmsa_cuda_take(&arena, 0, 1);
    p.dk = static_cast<float *>(fmsa_cuda_take(&arena, dk_sum_bytes(problem), 1));
    p.turns = static_cast<int32_t *>(fmsa_cuda_take(&arena, turn_count(problem), sizeof(int32_t)));
    p.kl = static_cast<double *>(fmsa_cuda_take(&arena, 1, sizeof(double)));
    if (sums_dq(problem)) {
        const int64_t bounds = problem->max_key_blocks * c->num_proxy_kv_heads;
        p.key_bounds = static_cast<uint32_t *>(fmsa_cuda_take(&arena, bounds, sizeof(uint32_t)));
    }
    p.sum_bytes = arena.used;
    p.student_lse = static_cast<float *>(fmsa_cuda_take(&arena, c->total_q * c->num_proxy_heads, sizeof(float)));
    *bytes = arena.used;
    return p;
}

/* ---- A group ---- */

fmsa_status map_token_rows(const fmsa_problem *problem, const fmsa_tensor &q_proxy, CUtensorMap *map) {
    const fmsa_config *c = &problem->config;
    fmsa_tensor_map_shape shape = {};
    shape.type = c->dtype == FMSA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    shape.element_bytes = 2;
    shape.rank = 3;
    shape.size[0] = c->proxy_head_dim;
    shape.size[1] = c->num_proxy_heads;
    shape.size[2] = c->total_q;
    shape.stride[1] = q_proxy.head_stride;
    shape.stride[2] = q_proxy.row_stride;
    shape.box[0] = 64;
    shape.box[1] = 1;
    shape.box[2] = tile_tokens;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, q_proxy.data, &shape);
}

static bool wants_nothing(const fmsa_tensors *t) {
    return t->dq_proxy.data == nullptr && t->dk_proxy.data == nullptr && t->kl == nullptr;
}

/* Whether there is anything to do in a group but to write gradients that are 0. */
static bool has_places(const fmsa_problem *problem, const fmsa_sm90_proxy_group &group) {
    return group.row_begin < group.row_end && problem->max_fragment_blocks > 0 && group.places > 0;
}

static bool is_first(const fmsa_sm90_proxy_group &group) {
    return group.first_block == 0;
}

static bool is_last(const fmsa_problem *problem, const fmsa_sm90_proxy_group &group) {
    return !is_dense(problem) || group.first_block + group.places >= problem->max_fragment_blocks;
}

/* Whether counting must wait for the kernel before. A chunk's last kernel lets nothing begin where it sums dq_proxy;
 * else it is the gradient kernel, which does, and whose scratch may lie where this chunk's counts go. */
static bool counts_late(const fmsa_tensors *t) {
    return t->dq_proxy.data == nullptr;
}

/* Over all places of the group's rows: group by group, all in the same memory. */
static fmsa_status find_student_lse(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                                    fmsa_sm90_proxy_group group, void *memory, int32_t planes, cudaStream_t stream) {
    for (; group.first_block < problem->max_fragment_blocks; group.first_block += group.places) {
        const group_memory g = take_group(problem, proxy, group, memory, planes, false);
        FMSA_TRY(find_shares(g.work, counts_late(t), stream));
        FMSA_TRY(student_lse(problem, t, g.work, is_first(group), false, stream));
    }
    return FMSA_OK;
}

/* What does not need the teacher, but the student's LSE of a chunk that is one group: see run_group(). */
static fmsa_status prepare_group(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                                 const fmsa_sm90_proxy_group &group, void *memory, int32_t planes,
                                 cudaStream_t stream) {
    if (wants_nothing(t) || !has_places(problem, group)) return FMSA_OK;
    if (is_first(group) && !is_last(problem, group))
        FMSA_TRY(find_student_lse(problem, t, proxy, group, memory, planes, stream));
    const group_memory g = take_group(problem, proxy, group, memory, planes, false);
    if (g.work.dq_sums != nullptr && t->dq_proxy.data != nullptr) FMSA_TRY(clear_dq_sums(g.work, stream));
    return count_shares(g.work, counts_late(t), stream);
}

static fmsa_status list_group(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                              const fmsa_sm90_proxy_group &group, void *memory, int32_t planes, bool wait_first,
                              cudaStream_t stream) {
    if (wants_nothing(t) || !has_places(problem, group)) return FMSA_OK;
    return list_shares(take_group(problem, proxy, group, memory, planes, false).work, wait_first, stream);
}

/* close: whether the student's LSE, which does not need the teacher, may start while the maker of the teacher ends: it
 * fills the multiprocessors that this one leaves. */
static fmsa_status run_group(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                             const fmsa_sm90_proxy_group &group, void *memory, int32_t planes, bool close,
                             cudaStream_t stream) {
    if (wants_nothing(t) || !has_places(problem, group)) return FMSA_OK;
    const group_memory g = take_group(problem, proxy, group, memory, planes, false);
    if (is_first(group) && is_last(problem, group)) FMSA_TRY(student_lse(problem, t, g.work, true, close, stream));
    if (planes > 1) {
        const int64_t rows = group.row_end - group.row_begin;
        const int64_t plane_halves = rows * g.work.proxy_heads * group.places * vector_length;
        FMSA_TRY(add_planes(g.work, plane_halves, planes, stream));
    }
    return differ_from_teacher(problem, t, proxy, g, stream);
}

static fmsa_status add_group(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                             const fmsa_sm90_proxy_group &group, void *memory, int32_t planes, cudaStream_t stream) {
    if (t->dq_proxy.data == nullptr || group.row_begin == group.row_end) return FMSA_OK;
    const group_memory g = take_group(problem, proxy, group, memory, planes, false);
    return add_terms(problem, t, g, is_first(group), is_last(problem, group), stream);
}

/* With a teacher made here. */
static fmsa_status run_alone(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                             const fmsa_sm90_proxy_group &group, void *memory, cudaStream_t stream) {
    if (has_places(problem, group)) {
        const group_memory g = take_group(problem, proxy, group, memory, 1, true);
        FMSA_TRY(find_shares(g.work, counts_late(t), stream));
        FMSA_TRY(make_teacher(problem, t, g.work, stream));
    }
    FMSA_TRY(prepare_group(problem, t, proxy, group, memory, 1, stream));
    FMSA_TRY(list_group(problem, t, proxy, group, memory, 1, true, stream));
    FMSA_TRY(run_group(problem, t, proxy, group, memory, 1, false, stream));
    return add_group(problem, t, proxy, group, memory, 1, stream);
}

/* ---- The operation: chunks and groups ---- */

struct loss_plan {
    int64_t rows;
    int32_t places;
    size_t bytes;
};

static size_t kept_bytes(const fmsa_problem *problem) {
    return fmsa_sm90_proxy_bytes(problem) + (is_dense(problem) ? fmsa_cuda_geometry_bytes(problem) : 0);
}

/* Whether there is one within the scratch limit, or within what the library takes without one. */
static bool plan_loss(const fmsa_problem *problem, loss_plan *plan) {
    constexpr size_t usual_bytes = size_t(5) << 28;
    constexpr int64_t least_rows = 128, least_places = 8;
    const fmsa_config *c = &problem->config;
    const size_t kept = kept_bytes(problem);
    const size_t limit = c->scratch_limit != 0 ? c->scratch_limit : kept + usual_bytes;
    const int64_t least = is_dense(problem) ? min_of(least_places, problem->max_fragment_blocks) : problem->slots;
    int64_t rows = c->total_q, places = is_dense(problem) ? problem->max_fragment_blocks : problem->slots;
    while (true) {
        plan->rows = rows;
        plan->places = static_cast<int32_t>(places);
        plan->bytes = kept + fmsa_sm90_proxy_group_bytes(problem, rows, plan->places, 1);
        if (plan->bytes <= limit) return true;
        if (places > least) {
            places = places / 2 > least ? places / 2 : least;
        } else if (rows > least_rows) {
            rows = fmsa_ceil_div(rows, 2 * least_rows) * least_rows;
        } else {
            return false;
        }
    }
}

static fmsa_status run_loss(const fmsa_problem *problem, const fmsa_tensors *t, fmsa_sm90_proxy &proxy,
                            const loss_plan &plan, void *memory, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const int64_t blocks = is_dense(problem) ? problem->max_fragment_blocks : 1;
    for (int64_t begin = 0; begin < c->total_q; begin += plan.rows) {
        fmsa_sm90_proxy_group group = {begin, min_of(begin + plan.rows, c->total_q), 0, plan.places};
        do {
            FMSA_TRY(run_alone(problem, t, proxy, group, memory, stream));
            group.first_block += plan.places > 0 ? plan.places : 1;
        } while (group.first_block < blocks);
    }
    FMSA_TRY(fmsa_sm90_proxy_finish_kl(problem, t, stream));
    if (t->dk_proxy.data == nullptr) return FMSA_OK;
    const rounding dk = fmsa_sm90_proxy_dk(problem, t, &proxy);
    return round_sums(&dk, 1, stream);
}

} // namespace fmsa::proxy

using namespace fmsa;
using namespace fmsa::proxy;

bool fmsa_sm90_proxy_takes(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    return (c->dtype == FMSA_DTYPE_BF16 || c->dtype == FMSA_DTYPE_FP16) && c->block_size == block_keys;
}

size_t fmsa_sm90_proxy_bytes(const fmsa_problem *problem) {
    size_t bytes;
    take_proxy(problem, nullptr, &bytes);
    return bytes;
}

fmsa_sm90_proxy fmsa_sm90_proxy_at(const fmsa_problem *problem, const fmsa_tensors *tensors, void *memory) {
    size_t bytes;
    fmsa_sm90_proxy p = take_proxy(problem, memory, &bytes);
    if (tensors->dk_proxy.data == nullptr) p.dk = nullptr;
    return p;
}

size_t fmsa_sm90_proxy_group_bytes(const fmsa_problem *problem, int64_t rows, int32_t places, int32_t planes) {
    const fmsa_sm90_proxy none = {};
    const fmsa_sm90_proxy_group group = {0, rows, 0, places};
    /* The two kinds differ in the number of shares. */
    const size_t given = take_group(problem, none, group, nullptr, planes, false).bytes;
    const size_t computed = take_group(problem, none, group, nullptr, planes, true).bytes;
    return given > computed ? given : computed;
}

fmsa_status fmsa_sm90_proxy_begin(const fmsa_problem *problem, const fmsa_tensors *tensors, fmsa_sm90_proxy *proxy,
                                  const fmsa_cuda_geometry *geometry, const fmsa_cuda_schedule *schedule,
                                  cudaStream_t stream) {
    if (wants_nothing(tensors)) return FMSA_OK;
    proxy->geometry = *geometry;
    if (schedule != nullptr) proxy->schedule = *schedule;
    if (proxy->key_bounds == nullptr || tensors->dq_proxy.data == nullptr) return FMSA_OK;
    return find_key_bounds(problem, tensors, *geometry, proxy->key_bounds, stream);
}

fmsa_sm90_teacher fmsa_sm90_proxy_teacher(const fmsa_problem *problem, const fmsa_sm90_proxy *proxy,
                                          const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes) {
    const proxy_work w = take_group(problem, *proxy, *group, group_memory, planes, false).work;
    const int32_t rows = w.row_end - w.row_begin;
    const int64_t plane_halves = int64_t(rows) * w.proxy_heads * w.places * vector_length;
    return {w.vectors, plane_halves, w.row_begin, rows, w.first_block, w.places};
}

fmsa_status fmsa_sm90_proxy_prepare(const fmsa_problem *problem, const fmsa_tensors *tensors,
                                    const fmsa_sm90_proxy *proxy, const fmsa_sm90_proxy_group *group,
                                    void *group_memory, int32_t planes, cudaStream_t stream) {
    return prepare_group(problem, tensors, *proxy, *group, group_memory, planes, stream);
}

fmsa_status fmsa_sm90_proxy_list(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy *proxy,
                                 const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes,
                                 bool wait_first, cudaStream_t stream) {
    return list_group(problem, tensors, *proxy, *group, group_memory, planes, wait_first, stream);
}

bool fmsa_sm90_proxy_has_places(const fmsa_problem *problem, const fmsa_sm90_proxy_group *group) {
    return has_places(problem, *group);
}

fmsa_status fmsa_sm90_proxy_add(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy *proxy,
                                const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes,
                                cudaStream_t stream) {
    return add_group(problem, tensors, *proxy, *group, group_memory, planes, stream);
}

fmsa_status fmsa_sm90_proxy_from_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors,
                                         const fmsa_sm90_proxy *proxy, const fmsa_sm90_proxy_group *group,
                                         void *group_memory, int32_t planes, cudaStream_t stream) {
    return run_group(problem, tensors, *proxy, *group, group_memory, planes, true, stream);
}

rounding fmsa_sm90_proxy_dk(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy *proxy) {
    const fmsa_config *c = &problem->config;
    rounding r = {};
    r.sums = proxy->dk;
    r.rows = c->total_k;
    r.heads = c->num_proxy_kv_heads;
    r.dim = c->proxy_head_dim;
    r.terms = dk_sum_heads(problem) / c->num_proxy_kv_heads;
    r.factor = static_cast<float>(c->proxy_scale * kl_factor(problem)) / ds_scale_of(problem);
    r.device_factor = static_cast<const float *>(tensors->grad_kl);
    r.out = tensors->dk_proxy;
    r.dtype = c->flags & FMSA_FLAG_FP32_KV_GRADS ? FMSA_DTYPE_FP32 : c->dtype;
    return r;
}

fmsa_status fmsa_sm90_proxy_finish_kl(const fmsa_problem *problem, const fmsa_tensors *tensors, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const bool no_pairs = c->total_q == 0 || problem->max_fragment_blocks == 0; /* so nothing has written it */
    return tensors->kl != nullptr && no_pairs ? clear(tensors->kl, sizeof(float), stream) : FMSA_OK;
}

bool fmsa_sm90_takes_proxy_loss(const fmsa_problem *problem) {
    loss_plan plan;
    return fmsa_sm90_proxy_takes(problem) && plan_loss(problem, &plan);
}

fmsa_status fmsa_sm90_proxy_loss_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    loss_plan plan;
    plan_loss(problem, &plan);
    *bytes = plan.bytes;
    return FMSA_OK;
}

fmsa_status fmsa_sm90_proxy_loss(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace, size_t,
                                 cudaStream_t stream) {
    if (wants_nothing(tensors)) return FMSA_OK;
    loss_plan plan;
    plan_loss(problem, &plan);
    char *memory = static_cast<char *>(workspace);
    fmsa_sm90_proxy proxy = fmsa_sm90_proxy_at(problem, tensors, memory);
    memory += fmsa_sm90_proxy_bytes(problem);
    fmsa_status status;
    const rows_and_blocks found =
        find_rows(problem, tensors, is_dense(problem) ? fmsa_cuda_geometry_at(problem, memory) : fmsa_cuda_geometry(),
                  stream, &status);
    FMSA_TRY(status);
    FMSA_TRY(clear(proxy.sums, proxy.sum_bytes, stream));
    FMSA_TRY(fmsa_sm90_proxy_begin(problem, tensors, &proxy, &found.geometry, found.sparse(), stream));
    char *group_memory = static_cast<char *>(workspace) + kept_bytes(problem);
    return run_loss(problem, tensors, proxy, plan, group_memory, stream);
}
