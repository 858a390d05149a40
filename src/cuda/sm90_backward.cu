/* The backward pass on Hopper: row values, then for each chunk of query rows (and in dense mode with a teacher, each
 * group of key blocks) the main kernel and the proxy loss, then the rounding of the sums. Everything is enqueued from
 * shapes alone. */
#include "portable_parts.cuh"
#include "sm90.h"
#include "sm90_backward_parts.h"
#include "sm90_proxy.h"
#include "tensor_map.h"

namespace fmsa {
namespace backward {

/* Terms of a row in dense mode, at most, for which fp16 sums do not take too much memory. */
constexpr int most_dense_terms = 8;

struct plan {
    bool with_teacher;
    bool half_sums, dq_alone;
    int32_t dq_terms;
    int32_t planes; /* of the teacher */
    int64_t rows;   /* of a chunk */
    int32_t places; /* of a group */
};

struct scratch {
    fmsa_cuda_geometry geometry; /* dense mode */
    int32_t *item_range, *ticket;
    row_values rows;
    void *sums; /* the next four: 0 at first; then those that `proxy` begins with */
    key_bounds bounds;
    float *dk, *dv;
    int32_t *key_turns;
    size_t sum_bytes;
    void *proxy;
    int32_t *dq_turns; /* dense mode */
    int32_t *counts;
    fmsa_cuda_item *items;
    void *dq, *group;
    size_t bytes;
};

static int32_t key_sum_heads(const fmsa_problem *problem) {
    return in_order(problem) ? problem->units : problem->config.num_kv_heads;
}

static int64_t key_sum_count(const fmsa_problem *problem) {
    return problem->config.total_k * key_sum_heads(problem) * problem->config.head_dim;
}

static size_t dq_row_bytes(const fmsa_problem *problem, const plan &plan) {
    return size_t(plan.half_sums ? 2 : 4) * problem->config.num_heads * problem->config.head_dim * plan.dq_terms;
}

static size_t dq_turns_row_bytes(const fmsa_problem *problem) {
    return in_order(problem) && is_dense(problem) ? sizeof(int32_t) * 4 * problem->units : 0;
}

static dense_group make_group(const fmsa_problem *problem, const plan &plan, int64_t row_begin, int32_t first_block) {
    const int64_t row_end = row_begin + plan.rows;
    dense_group g = {};
    g.row_begin = row_begin;
    g.row_end = row_end < problem->config.total_q ? row_end : problem->config.total_q;
    g.first_block = first_block;
    g.places = plan.places;
    g.piece_rows = dense_piece_rows(problem, plan.rows, plan.places);
    return g;
}

static scratch take_scratch(const fmsa_problem *problem, const plan &plan, void *workspace) {
    const fmsa_config *c = &problem->config;
    const int64_t values = (c->total_q + 1) * c->num_heads, bounds = problem->max_key_blocks * c->num_kv_heads;
    fmsa_cuda_arena arena = {static_cast<char *>(workspace), 0};
    const auto take = [&](int64_t count, size_t bytes) { return fmsa_cuda_take(&arena, count, bytes); };
    scratch s = {};
    s.item_range = static_cast<int32_t *>(take(2, sizeof(int32_t)));
    s.ticket = static_cast<int32_t *>(take(1, sizeof(int32_t)));
    s.rows.lse = static_cast<float *>(take(values, sizeof(float)));
    s.rows.delta = static_cast<float *>(take(values, sizeof(float)));
    if (plan.half_sums) s.rows.dq_scale = static_cast<float *>(take(values, sizeof(float)));
    const size_t before_sums = arena.used;
    s.sums = take(0, 1);
    if (plan.half_sums) {
        s.bounds.v = static_cast<uint32_t *>(take(2 * bounds, sizeof(uint32_t)));
        s.bounds.k = s.bounds.v + bounds;
    }
    s.dk = static_cast<float *>(take(2 * key_sum_count(problem), sizeof(float)));
    s.dv = s.dk + key_sum_count(problem);
    if (in_order(problem)) {
        const int64_t turns = problem->max_key_blocks * problem->units * 2;
        s.key_turns = static_cast<int32_t *>(take(turns, sizeof(int32_t)));
    }
    s.sum_bytes = arena.used - before_sums;
    if (plan.with_teacher) s.proxy = take(fmsa_sm90_proxy_bytes(problem), 1);
    if (is_dense(problem)) {
        const dense_group group = make_group(problem, plan, 0, 0);
        s.geometry = fmsa_cuda_geometry_at(problem, take(fmsa_cuda_geometry_bytes(problem), 1));
        s.counts = static_cast<int32_t *>(take(dense_pieces(group), sizeof(int32_t)));
        s.items = static_cast<fmsa_cuda_item *>(take(max_dense_items(problem, group), sizeof(fmsa_cuda_item)));
    }
    s.dq = take(plan.rows, dq_row_bytes(problem, plan));
    if (dq_turns_row_bytes(problem) > 0)
        s.dq_turns = static_cast<int32_t *>(take(plan.rows, dq_turns_row_bytes(problem)));
    if (plan.with_teacher) s.group = take(fmsa_sm90_proxy_group_bytes(problem, plan.rows, plan.places, plan.planes), 1);
    s.bytes = arena.used;
    return s;
}

/* How dQ is summed. Terms of one block may be fp16 whatever the type, since that rounds them only once. */
static void plan_dq(const fmsa_problem *problem, plan *p) {
    const bool bf16 = problem->config.dtype == FMSA_DTYPE_BF16;
    p->dq_terms = 1;
    if (is_dense(problem)) {
        const int64_t terms = fmsa_ceil_div(problem->max_fragment_blocks, dq_term_blocks);
        p->half_sums = bf16 && terms <= most_dense_terms && !in_order(problem);
        if (p->half_sums && terms > 1) p->dq_terms = static_cast<int32_t>(terms);
    } else {
        p->dq_alone = in_order(problem) && problem->slots > 1;
        if (p->dq_alone) p->dq_terms = problem->slots;
        p->half_sums = p->dq_alone || (bf16 && problem->slots <= dq_term_blocks);
    }
}

/* Gives the chunk as many rows as fit, whole segments of the schedule if one fits, so that chunks cut no more items
 * than they must. With a teacher in dense mode: all key blocks too, or in groups as many as fit. */
static fmsa_status make_plan(const fmsa_problem *problem, bool with_teacher, plan *made) {
    constexpr size_t usual_bytes = size_t(4) << 30;
    constexpr int64_t least_rows = 128;
    const fmsa_config *c = &problem->config;
    const bool grouped = is_dense(problem) && with_teacher;
    plan p = {};
    p.with_teacher = with_teacher;
    plan_dq(problem, &p);
    p.planes = problem->units / c->num_proxy_heads;
    const int32_t most_places = is_dense(problem) ? static_cast<int32_t>(problem->max_fragment_blocks) : problem->slots;
    p.places = grouped || most_places == 0 ? 1 : most_places;
    p.rows = c->total_q < least_rows ? c->total_q : least_rows;
    const size_t least_bytes = take_scratch(problem, p, nullptr).bytes;
    if (c->scratch_limit != 0 && c->scratch_limit < least_bytes) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE,
                         "scratch_limit is %zu; the backward pass needs at least %zu bytes for these shapes",
                         c->scratch_limit, least_bytes);
    }
    const size_t limit = c->scratch_limit != 0 ? c->scratch_limit : least_bytes + usual_bytes;
    const auto fits = [&](int64_t rows, int32_t places, size_t most) {
        plan q = p;
        q.rows = rows;
        q.places = places;
        return take_scratch(problem, q, nullptr).bytes <= most;
    };
    /* Few launches: chunks of rows with all their key blocks, of about the same size, unless they have too few rows. */
    if (grouped && most_places > 0) {
        constexpr int64_t least_chunk = 1024;
        int64_t chunks = 1, rows = c->total_q;
        while (rows > least_chunk && !fits(rows, most_places, limit))
            rows = fmsa_ceil_div(fmsa_ceil_div(c->total_q, ++chunks), least_rows) * least_rows;
        if (fits(rows, most_places, limit)) {
            p.rows = rows;
            p.places = most_places;
            *made = p;
            return FMSA_OK;
        }
    }
    /* Half for the rows alone where groups are to share the rest. */
    const size_t for_rows = grouped ? least_bytes + (limit - least_bytes) / 2 : limit;
    const int64_t segment = int64_t(1) << fmsa_cuda_segment_shift(problem);
    if (fits(c->total_q, p.places, for_rows)) {
        p.rows = c->total_q;
    } else {
        while (2 * p.rows <= segment && fits(2 * p.rows, p.places, for_rows))
            p.rows *= 2;
        while (p.rows >= segment && fits(p.rows + segment, p.places, for_rows))
            p.rows += segment;
    }
    while (grouped && p.places < most_places && fits(p.rows, p.places + 1, limit))
        p.places++;
    *made = p;
    return FMSA_OK;
}

/* ---- Tensor maps. ---- */

static fmsa_tensor_map_shape map_shape(const fmsa_problem *problem, int32_t rank) {
    fmsa_tensor_map_shape shape = {};
    shape.type =
        problem->config.dtype == FMSA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    shape.element_bytes = 2;
    shape.rank = rank;
    shape.box[0] = 64;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return shape;
}

static fmsa_status map_keys(const fmsa_problem *problem, CUtensorMap *map, const fmsa_tensor &tensor) {
    fmsa_tensor_map_shape shape = map_shape(problem, 3);
    shape.size[0] = problem->config.head_dim;
    shape.size[1] = problem->config.num_kv_heads;
    shape.size[2] = problem->config.total_k;
    shape.stride[1] = tensor.head_stride;
    shape.stride[2] = tensor.row_stride;
    shape.box[1] = 1;
    shape.box[2] = backward_keys;
    return fmsa_tensor_map(map, tensor.data, &shape);
}

/* A row's heads in groups: of eight, with boxes of all columns of some tokens of a unit; or of four, with boxes of 64
 * columns of a group. */
static fmsa_status map_rows(const fmsa_problem *problem, CUtensorMap *map, const fmsa_tensor &tensor, int32_t tokens) {
    const fmsa_config *c = &problem->config;
    const int32_t group = problem->unit_heads % 8 == 0 ? 8 : 4;
    fmsa_tensor_map_shape shape = map_shape(problem, 5);
    shape.size[0] = 64;
    shape.size[1] = group;
    shape.size[2] = c->head_dim / 64;
    shape.size[3] = c->num_heads / group;
    shape.size[4] = c->total_q;
    shape.stride[1] = tensor.head_stride;
    shape.stride[2] = 64;
    shape.stride[3] = group * tensor.head_stride;
    shape.stride[4] = tensor.row_stride;
    shape.box[1] = group;
    shape.box[2] = group == 8 ? c->head_dim / 64 : 1;
    shape.box[3] = group == 8 ? problem->unit_heads / 8 : 1;
    shape.box[4] = group == 8 ? tokens : 1;
    return fmsa_tensor_map(map, tensor.data, &shape);
}

static fmsa_status make_maps(const fmsa_problem *problem, const fmsa_tensors *t, backward_parameters *p) {
    FMSA_TRY(map_keys(problem, &p->k, t->k));
    FMSA_TRY(map_keys(problem, &p->v, t->v));
    p->in_fours = problem->unit_heads % 8 == 4;
    p->gathered = problem->unit_heads % 4 != 0;
    if (p->gathered) {
        p->q = {t->q.data, t->q.row_stride, t->q.head_stride};
        p->dout = {t->dout.data, t->dout.row_stride, t->dout.head_stride};
        return FMSA_OK;
    }
    FMSA_TRY(map_rows(problem, &p->q_token, t->q, 1));
    FMSA_TRY(map_rows(problem, &p->dout_token, t->dout, 1));
    FMSA_TRY(map_rows(problem, &p->q_tile, t->q, p->tile_tokens));
    return map_rows(problem, &p->dout_tile, t->dout, p->tile_tokens);
}

/* ---- The pass. ---- */

static fmsa_status make_parameters(const fmsa_problem *problem, const fmsa_tensors *t, const plan &plan,
                                   const scratch &scratch, const rows_and_blocks &found, backward_parameters *p) {
    const fmsa_config *c = &problem->config;
    p->tile_tokens = backward_rows / problem->unit_heads;
    p->token_factor = (1 << 16) / problem->unit_heads + 1;
    if (c->total_k > 0) FMSA_TRY(make_maps(problem, t, p));
    p->item_range = scratch.item_range;
    p->ticket = scratch.ticket;
    p->items = scratch.items;
    if (!found.dense) {
        p->items = found.schedule.items;
        p->edge_row = found.schedule.edge_row;
        p->edge_slot = found.schedule.edge_slot;
        p->list_begin = found.schedule.list_begin;
    }
    p->block_k_begin = found.geometry.block_k_begin;
    p->block_k_end = found.geometry.block_k_end;
    p->block_number = found.geometry.block_number;
    p->block_q_begin = found.geometry.block_q_begin;
    p->row_position = found.geometry.row_position;
    p->max_blocks = problem->max_key_blocks;
    p->total_q = static_cast<int32_t>(c->total_q);
    p->heads = c->num_heads;
    p->unit_heads = problem->unit_heads;
    p->units = problem->units;
    p->units_per_proxy_head = problem->units / c->num_proxy_heads;
    p->units_per_key_head = problem->units / c->num_kv_heads;
    p->scale_log2 = static_cast<float>(c->softmax_scale * log2_e);
    p->rows = scratch.rows;
    p->dq = t->dq.data == nullptr ? nullptr : scratch.dq;
    p->dq_terms = plan.dq_terms;
    p->dq_alone = plan.dq_alone;
    p->dq_turns = scratch.dq_turns;
    p->dk = t->dk.data == nullptr ? nullptr : scratch.dk;
    p->dv = t->dv.data == nullptr ? nullptr : scratch.dv;
    p->sum_heads = key_sum_heads(problem);
    p->key_turns = scratch.key_turns;
    p->teacher_factor = static_cast<float>(FMSA_SM90_TEACHER_SCALE) / static_cast<float>(problem->heads_per_proxy_head);
    return FMSA_OK;
}

static fmsa_status launch_main(const fmsa_problem *problem, const backward_parameters &p, bool half_sums,
                               cudaStream_t stream) {
    if (problem->config.total_k == 0) return FMSA_OK;
    return with_type_and_dim(problem->config.dtype, problem->config.head_dim, [&](auto type, auto dim) {
        typedef decltype(type) T;
        if constexpr (sizeof(T) == 2) {
            return launch_backward<T, decltype(dim)::value>(p, half_sums, stream);
        } else {
            return FMSA_ERROR_UNSUPPORTED;
        }
    });
}

struct pass {
    const fmsa_problem *problem;
    const fmsa_tensors *tensors;
    struct plan plan;
    struct scratch scratch;
    rows_and_blocks found;
    fmsa_sm90_proxy proxy;
    cudaStream_t stream;
};

static item_search search_items(const pass &pass, const dense_group &group) {
    item_search s = {};
    if (pass.found.dense) return s;
    s.work = make_work(pass.problem, pass.found.geometry, &pass.found.schedule, pass.scratch.item_range, backward_keys,
                       pass.problem->unit_heads);
    s.work.row_begin = static_cast<int32_t>(group.row_begin);
    s.work.row_end = static_cast<int32_t>(group.row_end);
    s.work.ticket = reinterpret_cast<uint32_t *>(pass.scratch.ticket);
    s.num_items = pass.found.schedule.num_items;
    s.segment_shift = fmsa_cuda_segment_shift(pass.problem);
    return s;
}

static fmsa_sm90_proxy_group proxy_group_of(const dense_group &group) {
    return {group.row_begin, group.row_end, group.first_block, group.places};
}

/* What the proxy loss needs before the main kernel. */
static fmsa_status prepare_proxy(const pass &pass, const dense_group &group) {
    if (!pass.plan.with_teacher) return FMSA_OK;
    const fmsa_sm90_proxy_group proxy_group = proxy_group_of(group);
    return fmsa_sm90_proxy_prepare(pass.problem, pass.tensors, &pass.proxy, &proxy_group, pass.scratch.group,
                                   pass.plan.planes, pass.stream);
}

static fmsa_status list_proxy(const pass &pass, const dense_group &group, bool wait_first) {
    if (!pass.plan.with_teacher) return FMSA_OK;
    const fmsa_sm90_proxy_group proxy_group = proxy_group_of(group);
    return fmsa_sm90_proxy_list(pass.problem, pass.tensors, &pass.proxy, &proxy_group, pass.scratch.group,
                                pass.plan.planes, wait_first, pass.stream);
}

static fmsa_status run_group(const pass &pass, backward_parameters p, const dense_group &group) {
    const fmsa_sm90_proxy_group proxy_group = proxy_group_of(group);
    p.row_begin = static_cast<int32_t>(group.row_begin);
    p.row_end = static_cast<int32_t>(group.row_end);
    p.first_place = group.first_block;
    p.places = group.places;
    if (pass.plan.with_teacher) {
        const fmsa_sm90_teacher teacher =
            fmsa_sm90_proxy_teacher(pass.problem, &pass.proxy, &proxy_group, pass.scratch.group, pass.plan.planes);
        p.teacher = reinterpret_cast<uint32_t *>(teacher.w);
        p.teacher_plane = teacher.plane_halves / 2;
    }
    if (pass.found.dense) {
        FMSA_TRY(list_dense_items(pass.problem, pass.found.geometry, group, pass.scratch.counts, pass.scratch.items,
                                  pass.scratch.item_range, pass.scratch.ticket, pass.stream));
    }
    FMSA_TRY(launch_main(pass.problem, p, pass.plan.half_sums, pass.stream));
    if (!pass.plan.with_teacher) return FMSA_OK;
    return fmsa_sm90_proxy_from_teacher(pass.problem, pass.tensors, &pass.proxy, &proxy_group, pass.scratch.group,
                                        pass.plan.planes, pass.stream);
}

/* What the proxy loss adds to dq_proxy. */
static fmsa_status add_proxy(const pass &pass, const dense_group &group) {
    if (!pass.plan.with_teacher) return FMSA_OK;
    const fmsa_sm90_proxy_group proxy_group = proxy_group_of(group);
    return fmsa_sm90_proxy_add(pass.problem, pass.tensors, &pass.proxy, &proxy_group, pass.scratch.group,
                               pass.plan.planes, pass.stream);
}

static bool runs_proxy(const pass &pass, const dense_group &group) {
    const fmsa_sm90_proxy_group proxy_group = proxy_group_of(group);
    return pass.plan.with_teacher && fmsa_sm90_proxy_has_places(pass.problem, &proxy_group);
}

static fmsa_status run_chunk(const pass &pass, const backward_parameters &p, int64_t row_begin) {
    const fmsa_problem *problem = pass.problem;
    const int64_t blocks = pass.found.dense && problem->max_fragment_blocks > 0 ? problem->max_fragment_blocks : 1;
    const dense_group first = make_group(problem, pass.plan, row_begin, 0);
    dq_sums sums = {};
    sums.sums = p.dq;
    sums.half_sums = pass.plan.half_sums;
    sums.terms = p.dq_terms;
    sums.alone = p.dq_alone;
    if (p.dq_alone) sums.row_count = pass.found.schedule.row_count;
    if (pass.found.dense && p.dq_terms > 1) sums.row_position = pass.found.geometry.row_position;
    sums.scale = pass.scratch.rows.dq_scale;
    sums.row_begin = first.row_begin;
    sums.row_end = first.row_end;
    if (p.dq != nullptr) {
        const size_t rows = first.row_end - first.row_begin;
        FMSA_TRY(clear(p.dq_turns, rows * dq_turns_row_bytes(problem), pass.stream));
    }
    for (int64_t block = 0; block < blocks; block += pass.plan.places) {
        const dense_group group = make_group(problem, pass.plan, row_begin, static_cast<int32_t>(block));
        FMSA_TRY(prepare_proxy(pass, group));
        if (block == 0) {
            FMSA_TRY(find_row_values(problem, pass.tensors, pass.found.geometry, pass.scratch.rows, pass.scratch.bounds,
                                     sums, search_items(pass, group), pass.stream));
        }
        FMSA_TRY(list_proxy(pass, group, block > 0));
        FMSA_TRY(run_group(pass, p, group));
        /* Here it fills the multiprocessors that the proxy loss leaves at its end. */
        if (p.dq != nullptr && block + pass.plan.places >= blocks)
            FMSA_TRY(round_dq(problem, pass.tensors->dq, sums, !runs_proxy(pass, group), pass.stream));
        FMSA_TRY(add_proxy(pass, group));
    }
    return FMSA_OK;
}

static rounding key_rounding(const fmsa_problem *problem, const float *sums, const fmsa_tensor &out, double factor) {
    const fmsa_config *c = &problem->config;
    rounding r = {};
    r.sums = sums;
    r.rows = c->total_k;
    r.heads = c->num_kv_heads;
    r.dim = c->head_dim;
    r.terms = key_sum_heads(problem) / c->num_kv_heads;
    r.factor = static_cast<float>(factor);
    r.out = out;
    r.dtype = c->flags & FMSA_FLAG_FP32_KV_GRADS ? FMSA_DTYPE_FP32 : c->dtype;
    return r;
}

/* What the keys' sums have become, all at once. */
static fmsa_status round_key_gradients(const pass &pass, bool with_teacher) {
    const fmsa_problem *problem = pass.problem;
    const fmsa_tensors *t = pass.tensors;
    rounding r[most_roundings];
    int count = 0;
    if (t->dk.data != nullptr)
        r[count++] = key_rounding(problem, pass.scratch.dk, t->dk, problem->config.softmax_scale);
    if (t->dv.data != nullptr) r[count++] = key_rounding(problem, pass.scratch.dv, t->dv, 1);
    if (with_teacher && t->dk_proxy.data != nullptr) r[count++] = fmsa_sm90_proxy_dk(problem, t, &pass.proxy);
    return round_sums(r, count, pass.stream);
}

static fmsa_status run(const fmsa_problem *problem, const fmsa_tensors *t, bool with_teacher, void *workspace,
                       cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    pass pass = {};
    pass.problem = problem;
    pass.tensors = t;
    pass.stream = stream;
    FMSA_TRY(make_plan(problem, with_teacher, &pass.plan));
    const scratch &s = pass.scratch = take_scratch(problem, pass.plan, workspace);
    fmsa_status status;
    pass.found = find_rows(problem, t, s.geometry, stream, &status);
    FMSA_TRY(status);
    if (with_teacher) pass.proxy = fmsa_sm90_proxy_at(problem, t, s.proxy);
    /* The proxy's sums follow those of the keys. */
    FMSA_TRY(clear(s.sums, s.sum_bytes + pass.proxy.sum_bytes, stream));
    if (s.rows.dq_scale != nullptr) FMSA_TRY(find_key_bounds(problem, t, pass.found.geometry, s.bounds, stream));
    if (with_teacher)
        FMSA_TRY(fmsa_sm90_proxy_begin(problem, t, &pass.proxy, &pass.found.geometry, pass.found.sparse(), stream));
    if (c->total_q > 0) {
        backward_parameters p = {};
        FMSA_TRY(make_parameters(problem, t, pass.plan, s, pass.found, &p));
        for (int64_t row = 0; row < c->total_q; row += pass.plan.rows)
            FMSA_TRY(run_chunk(pass, p, row));
    }
    if (with_teacher) FMSA_TRY(fmsa_sm90_proxy_finish_kl(problem, t, stream));
    return round_key_gradients(pass, with_teacher);
}

static bool wants_main(const fmsa_tensors *t) {
    return t->dq.data != nullptr || t->dk.data != nullptr || t->dv.data != nullptr;
}

static bool wants_proxy(const fmsa_tensors *t) {
    return t->dq_proxy.data != nullptr || t->dk_proxy.data != nullptr || t->kl != nullptr;
}

} // namespace backward
} // namespace fmsa

using namespace fmsa;

bool fmsa_sm90_takes_backward(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    const bool half = c->dtype == FMSA_DTYPE_BF16 || c->dtype == FMSA_DTYPE_FP16;
    return half && c->block_size == backward_keys && problem->unit_heads <= backward_rows;
}

fmsa_status fmsa_sm90_backward_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    backward::plan plan;
    FMSA_TRY(backward::make_plan(problem, false, &plan));
    *bytes = backward::take_scratch(problem, plan, nullptr).bytes;
    return FMSA_OK;
}

fmsa_status fmsa_sm90_backward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace, size_t,
                               cudaStream_t stream) {
    if (!backward::wants_main(tensors)) return FMSA_OK;
    return backward::run(problem, tensors, false, workspace, stream);
}

bool fmsa_sm90_takes_backward_with_proxy(const fmsa_problem *problem) {
    return fmsa_sm90_takes_backward(problem) && fmsa_sm90_takes_proxy_loss(problem) && fmsa_sm90_proxy_takes(problem);
}

/* Which outputs are wanted is not known yet: room for each of the three ways. */
fmsa_status fmsa_sm90_backward_with_proxy_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    backward::plan plan;
    size_t main_bytes, loss_bytes;
    FMSA_TRY(backward::make_plan(problem, true, &plan));
    FMSA_TRY(fmsa_sm90_backward_workspace_bytes(problem, &main_bytes));
    FMSA_TRY(fmsa_sm90_proxy_loss_workspace_bytes(problem, &loss_bytes));
    *bytes = backward::take_scratch(problem, plan, nullptr).bytes;
    if (*bytes < main_bytes) *bytes = main_bytes;
    if (*bytes < loss_bytes) *bytes = loss_bytes;
    return FMSA_OK;
}

fmsa_status fmsa_sm90_backward_with_proxy(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                          size_t workspace_bytes, cudaStream_t stream) {
    if (!backward::wants_main(tensors))
        return fmsa_sm90_proxy_loss(problem, tensors, workspace, workspace_bytes, stream);
    return backward::run(problem, tensors, backward::wants_proxy(tensors), workspace, stream);
}
