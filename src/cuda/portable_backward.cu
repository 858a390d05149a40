/* The backward pass of the main attention, sparse and dense: dq, dk, dv.
 *
 * Key-outer. A *row* is one (token, query head); a thread block takes a share (work.cuh): the 128 keys of a block (64
 * in fp32, or for blocks of 64) and the rows that attend to them, 32 a tile (16 in fp32). It computes transposed, so
 * that P and dS go from the accumulators of one product into the next as left operands: S^T = K Q^T, P^T = exp(S^T -
 * lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q, and dS^T crosses shared memory for dQ =
 * dS K, which needs all keys. delta = sum dO * O comes from a kernel of its own.
 *
 * Warp roles: all warps alike, 16 keys each for the transposed products and a part of dQ's columns for the last; dQ of
 * a tile is computed while the next tile is under way, so there is one barrier a tile. Rows are gathered by cp.async a
 * tile ahead, their numbers two tiles ahead.
 * Registers: dK and dV of 16 keys (128 at D = 128), V (32), the rest S, dP and operands: one block of 8 warps a
 * multiprocessor; spills at D = 128: 8 bytes a thread, 120 in fp32, whose V takes twice as many. Shared memory (D =
 * 128): K 32 KB, two stages of Q and dO 32 KB (V passes through them), dS 16 KB.
 *
 * Sums: dQ of a row gathers from its blocks by fp32 reductions in memory, dK and dV of a block from its shares
 * likewise, and a last kernel scales and rounds. With FMSA_FLAG_DETERMINISTIC nothing depends on an order of arrival:
 * in sparse mode each (row, slot) leaves its own dQ, summed in ascending order; in dense mode a launch takes the blocks
 * of one number, so that a row gets one addition a launch; and the shares of a block add their dK, dV in turns, one sum
 * for each unit of heads. Turns cost no second pass and no memory for a hot block, which one thread block walking the
 * whole list, or a partial result for each share, would.
 * fp32: products of split TF32 numbers (tile.cuh), each with a relative error of about 2^-21.
 * Floor: 10 * D * rows * keys floating-point operations at the rate of mma.sync; D * 4 bytes reduced a (row, block).
 * Measured on an H200, bf16, D = 128, all kernels included: heads 64/4/4/1, k = 16, random selection, 65,536
 * tokens: 52.9 ms, 198 TFLOP/s, deterministic 77.6 ms; 16/2/4/1, 16,384 tokens: 3.36 ms, 204 TFLOP/s; dense, 64/4/4/1,
 * 16,384 tokens: 50.9 ms, 216 TFLOP/s. */
#include "portable_parts.cuh"

namespace fmsa {

constexpr int most_threads = 256;
constexpr int ring = 4; /* tiles whose row data is kept */

template <typename T>
constexpr int tile_rows = sizeof(T) == 2 ? 32 : 16;

template <typename T>
struct backward_parameters {
    work w;
    head_map map;
    view<const T> q, k, v, dout;
    view<const float> lse;
    const float *delta; /* [rows][heads] */
    float scale_log2;   /* scale * log2(e) */
    int32_t heads;

    float *dq;     /* NULL, or sums of (row of the chunk, head, slot, part) */
    int32_t slots; /* times parts; 1 where rows add up instead */
    add_kind dq_kind;
    float *dk, *dv; /* NULL, or sums of (key, head of key_layout) */
    key_sums key_layout;
};

/* What is known of the rows of a tile, in shared memory. */
template <int rows>
struct row_data {
    float lse[rows];
    float delta[rows];
    int32_t limit[rows];  /* last key of the share that the row sees; negative: none, or no row */
    int32_t result[rows]; /* of its dQ: (row of the chunk, head, slot, part); negative: nothing to add */
};

/* The row that a thread copies: several threads share one. */
struct row_to_load {
    int32_t token; /* -1: none */
    int32_t head;
    int32_t slot;
    int32_t position; /* of the token */
};

template <typename T>
__device__ __forceinline__ row_to_load find_row(const backward_parameters<T> &a, const share &s, int32_t unit,
                                                int32_t number) {
    const int32_t edge = number / a.map.unit_heads;
    if (edge >= s.count) return {-1, 0, 0, -1};
    const int32_t head = unit * a.map.unit_heads + (number - edge * a.map.unit_heads);
    return {s.row(edge), head, s.slot(edge), -1};
}

template <typename T, int D>
__global__ void __launch_bounds__(most_threads, 1) backward_kernel(const __grid_constant__ backward_parameters<T> a) {
    constexpr int rows = tile_rows<T>, chunks = D / 8;
    constexpr int row_tiles = D == 128 ? rows / 16 : 1; /* of dQ, so that all warps have some */
    extern __shared__ __align__(128) char memory[];
    __shared__ row_data<rows> data[ring];
    const place at = take_place(a.w);
    __shared__ share s; /* There are no registers to spare for it. */
    share own;
    if (!take_share(a.w, at, own)) return;
    if (threadIdx.x == 0) s = own;
    __syncthreads();
    const int lane = threadIdx.x & 31, own_key = threadIdx.x / 32 * 16, keys = a.w.share_keys;
    const int32_t unit = (a.w.items == nullptr ? 0 : s.proxy_head * a.map.units_per_proxy_head) + at.unit;
    const int32_t key_head = unit / a.map.units_per_key_head;
    const tile<T, D> k(shared_address(memory));
    const uint32_t stages = k.address + tile<T, D>::bytes(keys);
    const uint32_t ds_stages = stages + 4 * tile<T, D>::bytes(rows);

    const tile<T, D> v(stages);
    for (int i = threadIdx.x; i < keys * chunks; i += blockDim.x) {
        const int key = i / chunks, chunk = i % chunks;
        const bool there = key < s.keys;
        const int64_t row = there ? s.key_row + key : 0;
        k.load(key, chunk, a.k.at(row, key_head) + 8 * chunk, there);
        v.load(key, chunk, a.v.at(row, key_head) + 8 * chunk, there);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    left_fragment<T> v_fragment[D / 16];
#pragma unroll
    for (int d = 0; d < D / 16; d++)
        v_fragment[d] = v.left(own_key, d);
    __syncthreads();

    const int threads_a_row = blockDim.x / rows, own_row = threadIdx.x / threads_a_row;
    const int first_chunk = threadIdx.x % threads_a_row;
    const int32_t tiles = (s.count * a.map.unit_heads + rows - 1) / rows;
    const auto q_tile = [&](int32_t i) { return tile<T, D>(stages + (i & 1) * 2 * tile<T, D>::bytes(rows)); };
    const auto dout_tile = [&](int32_t i) { return tile<T, D>(q_tile(i).address + tile<T, D>::bytes(rows)); };
    const auto ds_tile = [&](int32_t i) { return tile<T, rows>(ds_stages + (i & 1) * tile<T, rows>::bytes(keys)); };
    const auto find = [&](int32_t i) { return find_row(a, s, unit, i * rows + own_row); };
    const auto load = [&](int32_t i, const row_to_load &r) {
        const int32_t limit = r.token < 0 ? -1 : r.position - s.position;
        const bool there = limit >= 0;
        const int64_t row = there ? r.token : 0;
        const tile<T, D> q = q_tile(i), dout = dout_tile(i);
        const T *q_row = a.q.at(row, r.head), *dout_row = a.dout.at(row, r.head);
        for (int chunk = first_chunk; chunk < chunks; chunk += threads_a_row) {
            q.load(own_row, chunk, q_row + 8 * chunk, there);
            dout.load(own_row, chunk, dout_row + 8 * chunk, there);
        }
        if (first_chunk == 0) {
            row_data<rows> &d = data[i % ring];
            cp_async_4(shared_address(&d.lse[own_row]), a.lse.at(row, r.head), there);
            cp_async_4(shared_address(&d.delta[own_row]), a.delta + row * a.heads + r.head, there);
            d.limit[own_row] = limit;
            /* A row that sees no key of this part of the block still leaves its (slot, part): zeros. */
            const bool written = a.dq_kind == WRITE && r.token >= 0;
            const int32_t term = written ? r.slot * (a.w.block_size / keys) + at.part : 0;
            const int32_t vector = (r.token - a.w.row_begin) * a.heads + r.head;
            d.result[own_row] = there || written ? vector * a.slots + term : -1;
        }
        cp_async_commit();
    };
    const auto position_of = [&](const row_to_load &r) {
        return r.token < 0 ? -1 : a.w.geometry.row_position[r.token];
    };

    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    row_to_load next = find(0);
    next.position = position_of(next);
    load(0, next);
    next = find(1);
    next.position = position_of(next);
    for (int32_t i = 0; i < tiles; i++) {
        cp_async_wait<0>();
        __syncthreads();
        if (i + 1 < tiles) load(i + 1, next);
        next = find(i + 2);
        const row_data<rows> &d = data[i % ring];
        const tile<T, D> q = q_tile(i), dout = dout_tile(i);

        float p[rows / 8][4] = {}, ds[rows / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            const left_fragment<T> k_fragment = k.left(own_key, c);
#pragma unroll
            for (int n = 0; n < rows / 8; n += 2) {
                right_fragment<T> b[2];
                q.right_transposed(b, 8 * n, c);
                multiply_add(p[n], k_fragment, b[0]);
                multiply_add(p[n + 1], k_fragment, b[1]);
                dout.right_transposed(b, 8 * n, c);
                multiply_add(ds[n], v_fragment[c], b[0]);
                multiply_add(ds[n + 1], v_fragment[c], b[1]);
            }
        }
        next.position = position_of(next);
        const tile<T, rows> ds_shared = ds_tile(i);
#pragma unroll
        for (int n = 0; n < rows / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = 8 * n + 2 * (lane & 3) + e % 2, key = own_key + lane / 4 + 8 * (e / 2);
                const bool seen = key <= d.limit[row];
                p[n][e] = seen ? probability<T>(p[n][e], a.scale_log2, d.lse[row]) : 0;
                ds[n][e] = seen ? p[n][e] * (ds[n][e] - d.delta[row]) : 0;
            }
            ds_shared.store(own_key, 8 * n, ds[n]);
        }
#pragma unroll
        for (int j = 0; j < rows / 16; j++) {
            const left_fragment<T> p_fragment = to_left_fragment<T>(p[2 * j], p[2 * j + 1]);
            const left_fragment<T> ds_fragment = to_left_fragment<T>(ds[2 * j], ds[2 * j + 1]);
#pragma unroll
            for (int n = 0; n < D / 8; n += 2) {
                right_fragment<T> b[2];
                dout.right(b, 16 * j, 8 * n);
                multiply_add(dv[n], p_fragment, b[0]);
                multiply_add(dv[n + 1], p_fragment, b[1]);
                q.right(b, 16 * j, 8 * n);
                multiply_add(dk[n], ds_fragment, b[0]);
                multiply_add(dk[n + 1], ds_fragment, b[1]);
            }
        }
        if (i > 0 && a.dq != nullptr) {
            add_row_sums<row_tiles>(a.dq, a.dq_kind, ds_tile(i - 1), k, data[(i - 1) % ring].result, keys);
        }
    }
    __syncthreads();
    if (a.dq != nullptr) {
        add_row_sums<row_tiles>(a.dq, a.dq_kind, ds_tile(tiles - 1), k, data[(tiles - 1) % ring].result, keys);
    }

    int32_t *turn = wait_for_turn(a.key_layout, a.w, s, unit, at.part);
    const int64_t head = a.key_layout.turns == nullptr ? key_head : unit;
    if (a.dk != nullptr) add_key_sums<D>(a.dk, dk, a.key_layout, s, head, own_key);
    if (a.dv != nullptr) add_key_sums<D>(a.dv, dv, a.key_layout, s, head, own_key);
    end_turn(turn, s);
}

/* ---- delta: D / 8 lanes a (row, head). Rows in no fragment are not read. ---- */

template <typename T>
struct delta_parameters {
    view<const T> out, dout;
    const int32_t *row_position;
    int64_t rows;
    int32_t heads, dim;
    float *delta;
};

constexpr int delta_threads = 256;

template <typename T>
__device__ __forceinline__ float dot_eight(const T *x, const T *y) {
    const uint4 a = *reinterpret_cast<const uint4 *>(x), b = *reinterpret_cast<const uint4 *>(y);
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = unpack_pair(left[i], T()), v = unpack_pair(right[i], T());
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}
template <>
__device__ __forceinline__ float dot_eight<float>(const float *x, const float *y) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 u = reinterpret_cast<const float4 *>(x)[i], v = reinterpret_cast<const float4 *>(y)[i];
        sum += u.x * v.x + u.y * v.y + u.z * v.z + u.w * v.w;
    }
    return sum;
}

template <typename T>
__global__ void __launch_bounds__(delta_threads) delta_kernel(const __grid_constant__ delta_parameters<T> a) {
    const int lanes = a.dim / 8, lane = threadIdx.x % lanes;
    const int64_t number = (int64_t(blockIdx.x) * delta_threads + threadIdx.x) / lanes;
    const int64_t row = number / a.heads, head = number % a.heads;
    const bool there = row < a.rows && a.row_position[row] >= 0;
    float sum = there ? dot_eight(a.out.at(row, head) + 8 * lane, a.dout.at(row, head) + 8 * lane) : 0;
    for (int step = lanes / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0 && row < a.rows) a.delta[number] = sum;
}

/* ---- Host. ---- */

struct backward_scratch {
    fmsa_cuda_geometry geometry;
    int32_t *cuts;
    float *delta;
    float *dk, *dv;
    int32_t *turns;
    size_t turn_bytes;
    uint32_t *ticket;
    float *dq;
    size_t bytes;
};

static int32_t key_sum_heads(const fmsa_problem *problem) {
    return in_order(problem) ? problem->units : problem->config.num_kv_heads;
}

static size_t dq_row_bytes(const fmsa_problem *problem) {
    return sizeof(float) * problem->config.num_heads * problem->config.head_dim * row_terms(problem);
}

static backward_scratch take_scratch(const fmsa_problem *problem, void *workspace, int64_t chunk_rows) {
    const fmsa_config *c = &problem->config;
    const int64_t key_sums = c->total_k * key_sum_heads(problem) * c->head_dim;
    fmsa_cuda_arena arena = {static_cast<char *>(workspace), 0};
    backward_scratch s = {};
    s.cuts = static_cast<int32_t *>(fmsa_cuda_take(&arena, cuts_count(problem), sizeof(int32_t)));
    if (is_dense(problem)) {
        s.geometry = fmsa_cuda_geometry_at(problem, fmsa_cuda_take(&arena, fmsa_cuda_geometry_bytes(problem), 1));
    }
    s.delta = static_cast<float *>(fmsa_cuda_take(&arena, c->total_q * c->num_heads, sizeof(float)));
    s.dk = static_cast<float *>(fmsa_cuda_take(&arena, key_sums, sizeof(float)));
    s.dv = static_cast<float *>(fmsa_cuda_take(&arena, key_sums, sizeof(float)));
    if (in_order(problem)) {
        const int64_t turns = problem->max_key_blocks * problem->units * gradient_parts(problem);
        s.turns = static_cast<int32_t *>(fmsa_cuda_take(&arena, turns, sizeof(int32_t)));
        s.turn_bytes = turns * sizeof(int32_t);
        s.ticket = static_cast<uint32_t *>(fmsa_cuda_take(&arena, 1, sizeof(uint32_t)));
    }
    s.dq = static_cast<float *>(fmsa_cuda_take(&arena, chunk_rows, dq_row_bytes(problem)));
    s.bytes = arena.used;
    return s;
}

static fmsa_status plan(const fmsa_problem *problem, int64_t *rows) {
    return plan_chunk(problem, "the backward pass", take_scratch(problem, nullptr, 0).bytes, dq_row_bytes(problem),
                      rows);
}

template <typename T>
static fmsa_status compute_delta(const fmsa_problem *problem, const fmsa_tensors *t, const int32_t *row_position,
                                 float *delta, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    delta_parameters<T> p = {};
    p.out = view<const T>(t->out);
    p.dout = view<const T>(t->dout);
    p.row_position = row_position;
    p.rows = c->total_q;
    p.heads = c->num_heads;
    p.dim = c->head_dim;
    p.delta = delta;
    const unsigned grid = fmsa_cuda_grid(p.rows * p.heads * (p.dim / 8), delta_threads);
    return launch("delta", delta_kernel<T>, grid, delta_threads, 0, stream, p);
}

template <typename T, int D>
static fmsa_status launch_backward(const fmsa_problem *problem, const backward_parameters<T> &p, int32_t launched_parts,
                                   cudaStream_t stream) {
    constexpr int rows = tile_rows<T>;
    const int32_t keys = p.w.share_keys;
    if (p.w.ticket != nullptr) {
        const fmsa_status status = clear(p.w.ticket, sizeof *p.w.ticket, stream);
        if (status != FMSA_OK) return status;
    }
    const dim3 grid(static_cast<unsigned>(max_shares(problem, p.w)),
                    is_dense(problem) ? problem->units : p.map.units_per_proxy_head, launched_parts);
    constexpr auto shared_bytes = [](int keys) {
        return tile<T, D>::bytes(keys) + 4 * tile<T, D>::bytes(rows) + 2 * tile<T, rows>::bytes(keys);
    };
    constexpr int most_keys = most_gradient_keys<T>, other_bytes = sizeof(row_data<rows>[ring]) + 256;
    static_assert(shared_bytes(most_keys) + other_bytes <= most_shared_bytes, "it must run on every card");
    static_assert(tile<T, D>::bytes(most_keys) <= 4 * tile<T, D>::bytes(rows), "V passes through Q's and dO's stages");
    return launch("backward", backward_kernel<T, D>, grid, keys * 2,
                  shared_memory(shared_bytes(keys), shared_bytes(most_keys)), stream, p);
}

static rounding make_rounding(const fmsa_problem *problem, const float *sums, const fmsa_tensor &out) {
    rounding r = {};
    r.sums = sums;
    r.dim = problem->config.head_dim;
    r.terms = 1;
    r.factor = 1;
    r.out = out;
    r.dtype = problem->config.dtype;
    return r;
}

static fmsa_status round_key_gradient(const fmsa_problem *problem, const float *sums, const fmsa_tensor &out,
                                      double factor, cudaStream_t stream) {
    if (out.data == nullptr) return FMSA_OK;
    rounding r = make_rounding(problem, sums, out);
    r.rows = problem->config.total_k;
    r.heads = problem->config.num_kv_heads;
    r.terms = key_sum_heads(problem) / problem->config.num_kv_heads;
    r.factor = static_cast<float>(factor);
    if (problem->config.flags & FMSA_FLAG_FP32_KV_GRADS) r.dtype = FMSA_DTYPE_FP32;
    return round_sums(&r, 1, stream);
}

template <typename T, int D>
static fmsa_status run_chunk(const fmsa_problem *problem, const fmsa_tensors *t, backward_parameters<T> p,
                             const backward_scratch &scratch, const fmsa_cuda_schedule *schedule, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    fmsa_status status = FMSA_OK;
    if (p.dq != nullptr && p.dq_kind != WRITE) {
        status = clear(scratch.dq, (p.w.row_end - p.w.row_begin) * dq_row_bytes(problem), stream);
    }
    if (status == FMSA_OK) {
        const int32_t *num_items = schedule == nullptr ? nullptr : schedule->num_items;
        const bool one_by_one = p.dq != nullptr && p.dq_kind == ADD_ALONE;
        status = launch_shares(problem, p.w, num_items, one_by_one, stream, [&](const work &w, int32_t launched_parts) {
            p.w = w;
            return launch_backward<T, D>(problem, p, launched_parts, stream);
        });
    }
    if (status != FMSA_OK || p.dq == nullptr) return status;
    rounding r = make_rounding(problem, scratch.dq, t->dq);
    r.first_row = p.w.row_begin;
    r.rows = p.w.row_end - p.w.row_begin;
    r.heads = c->num_heads;
    r.terms = row_terms(problem);
    r.factor = static_cast<float>(c->softmax_scale);
    if (p.dq_kind == WRITE) {
        r.counts = schedule->row_count;
        r.count_stride = c->total_q;
        r.heads_per_count = problem->heads_per_proxy_head;
        r.terms_per_count = gradient_parts(problem);
    }
    return round_sums(&r, 1, stream);
}

template <typename T, int D>
static fmsa_status run(const fmsa_problem *problem, const fmsa_tensors *t, const backward_scratch &scratch,
                       const rows_and_blocks &found, int64_t chunk_rows, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const int64_t key_sum_bytes = sizeof(float) * c->total_k * key_sum_heads(problem) * c->head_dim;
    fmsa_status status = compute_delta<T>(problem, t, found.geometry.row_position, scratch.delta, stream);
    if (status == FMSA_OK && t->dk.data != nullptr) status = clear(scratch.dk, key_sum_bytes, stream);
    if (status == FMSA_OK && t->dv.data != nullptr) status = clear(scratch.dv, key_sum_bytes, stream);
    if (status == FMSA_OK) status = clear(scratch.turns, scratch.turn_bytes, stream);

    backward_parameters<T> p = {};
    p.map = {problem->units / c->num_proxy_heads, problem->unit_heads, problem->units / c->num_kv_heads};
    p.w = make_work(problem, found.geometry, found.sparse(), scratch.cuts, gradient_keys(problem), problem->unit_heads);
    p.w.ticket = scratch.ticket;
    p.q = view<const T>(t->q);
    p.k = view<const T>(t->k);
    p.v = view<const T>(t->v);
    p.dout = view<const T>(t->dout);
    p.lse = view<const float>(t->lse);
    p.delta = scratch.delta;
    p.scale_log2 = static_cast<float>(c->softmax_scale * log2_e);
    p.heads = c->num_heads;
    p.dq = t->dq.data == nullptr ? nullptr : scratch.dq;
    p.slots = row_terms(problem);
    p.dq_kind = !in_order(problem) ? ADD_IN_ANY_ORDER : is_dense(problem) ? ADD_ALONE : WRITE;
    p.dk = t->dk.data == nullptr ? nullptr : scratch.dk;
    p.dv = t->dv.data == nullptr ? nullptr : scratch.dv;
    p.key_layout = {key_sum_heads(problem), scratch.turns};
    for (int64_t begin = 0; begin < c->total_q && status == FMSA_OK; begin += chunk_rows) {
        p.w.row_begin = static_cast<int32_t>(begin);
        p.w.row_end = static_cast<int32_t>(begin + chunk_rows < c->total_q ? begin + chunk_rows : c->total_q);
        status = run_chunk<T, D>(problem, t, p, scratch, found.sparse(), stream);
    }
    if (status == FMSA_OK) status = round_key_gradient(problem, scratch.dk, t->dk, c->softmax_scale, stream);
    if (status == FMSA_OK) status = round_key_gradient(problem, scratch.dv, t->dv, 1, stream);
    return status;
}

} // namespace fmsa

using namespace fmsa;

fmsa_status fmsa_portable_backward_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    int64_t rows;
    const fmsa_status status = plan(problem, &rows);
    if (status == FMSA_OK) *bytes = take_scratch(problem, nullptr, rows).bytes;
    return status;
}

fmsa_status fmsa_portable_backward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace, size_t,
                                   cudaStream_t stream) {
    if (tensors->dq.data == nullptr && tensors->dk.data == nullptr && tensors->dv.data == nullptr) return FMSA_OK;
    int64_t rows;
    fmsa_status status = plan(problem, &rows);
    if (status != FMSA_OK) return status;
    const backward_scratch scratch = take_scratch(problem, workspace, rows);
    const rows_and_blocks found = find_rows(problem, tensors, scratch.geometry, stream, &status);
    if (status != FMSA_OK) return status;
    return with_type_and_dim(problem->config.dtype, problem->config.head_dim, [&](auto type, auto dim) {
        return run<decltype(type), decltype(dim)::value>(problem, tensors, scratch, found, rows, stream);
    });
}
