/* The proxy loss, sparse and dense: the KL value, dq_proxy, dk_proxy.
 *
 * Key-outer, after the students' LSE (the forward kernels, without values). A thread block takes a share (work.cuh):
 * the 128 keys of a block (64 in fp32, or for blocks of 64) and the tokens that attend to them through one proxy head,
 * 64 a tile (16 in fp32). For each of the R main heads that the proxy head teaches from, S^T = K Q^T and w^T += exp(S^T
 * - lse) in fp32 registers; then, with the proxies' own product, r^T = exp(S_proxy^T - student LSE), KL += w (log w -
 * log r), dS^T = r^T - w^T, dk_proxy += dS^T q_proxy, and dS^T crosses shared memory for dq_proxy = dS k_proxy.
 *
 * So the main probabilities are computed here once more, beside the backward pass: one product more to its five. In
 * return w stays in fp32, is never stored (in dense mode it would be quadratic), takes no scratch, and the loss alone
 * and the loss within the backward pass are one kernel with one result.
 *
 * Warp roles: all warps alike, 16 keys each, and a part of dq_proxy's columns at the end of a tile. The tiles of the R
 * heads and of the proxy form one stream of steps; they are gathered by cp.async two steps ahead.
 * Registers: K (32), w, S, dk_proxy (64 at Dp = 128): one block of 8 warps a multiprocessor; in fp32 up to 120 bytes a
 * thread spill. Shared memory (D = Dp = 128): k_proxy 32 KB, three stages of 64 rows 48 KB, dS 16 KB. Sums: as in the
 * backward pass. The KL value is summed in a fixed order: a thread's, a block's, then all shares' in fp64. fp32:
 * products of split TF32 numbers (tile.cuh), each with a relative error of about 2^-21. Floor: (2 * D * R + 8 * Dp) *
 * (token, proxy head, key) floating-point operations at the rate of mma.sync, the LSE included. Measured on an H200,
 * bf16, D = Dp = 128, k = 16, all kernels included: heads 64/4/4/1, random selection, 65,536 tokens: 18.5 ms; 16/2/4/1,
 * 16,384 tokens: 1.86 ms; dense, 64/4/4/1, 16,384 tokens: 15.7 ms. */
#include "portable_parts.cuh"

namespace fmsa {

constexpr int most_threads = 256;
constexpr int stages = 3;
constexpr int ring = 3;       /* tiles whose token data is kept */
constexpr int most_steps = 8; /* of 16 columns, in a main head */

template <typename T>
constexpr int tile_rows = sizeof(T) == 2 ? 64 : 16;

template <typename T>
struct proxy_parameters {
    work w;
    view<const T> q, k, q_proxy, k_proxy;
    view<const float> lse;
    const float *student_lse; /* [rows][proxy heads] */
    int32_t dim;              /* of the main heads */
    int32_t heads_per_proxy_head, heads_per_kv_head, proxy_heads_per_key_head, proxy_heads;
    float scale_log2, proxy_scale_log2; /* times log2(e) */

    double *kl;    /* NULL, or one sum for each (part, share number, proxy head in dense mode) */
    float *dq;     /* NULL, or sums of (row of the chunk, proxy head, slot, part) */
    int32_t slots; /* times parts; 1 where rows add up instead */
    add_kind dq_kind;
    float *dk; /* NULL, or sums of (key, head of key_layout) */
    key_sums key_layout;
};

/* What is known of the tokens of a tile, in shared memory. */
template <int rows>
struct token_data {
    int32_t limit[rows];  /* last key of the share that the token sees; negative: none, or no token */
    int32_t result[rows]; /* of its dq_proxy: (row of the chunk, proxy head, slot, part); negative: nothing to add */
};

/* The token that a thread copies the rows of: several threads share one. */
struct token_to_load {
    int32_t token; /* -1: none */
    int32_t limit; /* negative: it is not read */
};

/* Two neighbouring elements in memory, as a fragment holds them. */
template <typename T>
__device__ __forceinline__ void load_pair(left_fragment<T> &a, int i, const T *place) {
    a.x[i] = place == nullptr ? 0 : *reinterpret_cast<const uint32_t *>(place);
}
template <>
__device__ __forceinline__ void load_pair<float>(left_fragment<float> &a, int i, const float *place) {
    const float2 two = place == nullptr ? make_float2(0, 0) : *reinterpret_cast<const float2 *>(place);
    a.x[4 * (i / 2) + i % 2] = two.x;
    a.x[4 * (i / 2) + i % 2 + 2] = two.y;
}

/* K of the warp's 16 keys, straight from memory: once a share, and again where a proxy head's main heads pass from one
 * key head to the next. */
template <typename T>
__device__ __forceinline__ void load_fragments(left_fragment<T> (&fragment)[most_steps], const view<const T> &k,
                                               const share &s, int key, int64_t head, int dim) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 0; d < most_steps; d++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int own_key = key + lane / 4 + 8 * (i % 2), column = 16 * d + 8 * (i / 2) + 2 * (lane & 3);
            const bool there = own_key < s.keys && column < dim;
            load_pair<T>(fragment[d], i, there ? k.at(s.key_row + own_key, head) + column : nullptr);
        }
    }
}

/* S^T = K Q^T over 16 * steps columns. */
template <int steps, typename T, int rows>
__device__ __forceinline__ void score(float (&sum)[rows / 8][4], const left_fragment<T> (&k)[most_steps],
                                      const tile<T, 128> &q) {
#pragma unroll
    for (int c = 0; c < steps; c++) {
#pragma unroll
        for (int n = 0; n < rows / 8; n += 2) {
            right_fragment<T> b[2];
            q.right_transposed(b, 8 * n, c);
            multiply_add(sum[n], k[c], b[0]);
            multiply_add(sum[n + 1], k[c], b[1]);
        }
    }
}

/* The sum over the block of all threads' values, in a fixed order; for thread 0. */
__device__ __forceinline__ double sum_of_block(double x) {
    __shared__ double warp_sum[most_threads / 32];
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++)
        sum += warp_sum[i];
    return sum;
}

template <typename T, int D>
__global__ void __launch_bounds__(most_threads, 1) proxy_kernel(const __grid_constant__ proxy_parameters<T> a) {
    constexpr int rows = tile_rows<T>;
    extern __shared__ __align__(128) char memory[];
    __shared__ token_data<rows> data[ring];
    __shared__ float stage_lse[stages][rows];
    const place at = take_place(a.w);
    share s;
    if (!take_share(a.w, at, s)) return;
    const int lane = threadIdx.x & 31, own_key = threadIdx.x / 32 * 16, keys = a.w.share_keys;
    const int32_t proxy_head = a.w.items == nullptr ? at.unit : s.proxy_head;
    const int64_t proxy_key_head = proxy_head / a.proxy_heads_per_key_head;
    const int32_t first_head = proxy_head * a.heads_per_proxy_head;
    const tile<T, D> k_proxy(shared_address(memory));
    const uint32_t first_stage = k_proxy.address + tile<T, D>::bytes(keys);
    constexpr int stage_bytes = tile<T, 128>::bytes(rows);
    const tile<T, rows> ds_shared(first_stage + stages * stage_bytes);

    for (int i = threadIdx.x; i < keys * (D / 8); i += blockDim.x) {
        const int key = i / (D / 8), chunk = i % (D / 8);
        const bool there = key < s.keys;
        k_proxy.load(key, chunk, a.k_proxy.at(there ? s.key_row + key : 0, proxy_key_head) + 8 * chunk, there);
    }
    int32_t held_head = first_head / a.heads_per_kv_head;
    left_fragment<T> k_fragment[most_steps];
    load_fragments<T>(k_fragment, a.k, s, own_key, held_head, a.dim);

    /* Steps: for each tile of tokens the R main heads, then the proxy. */
    const int32_t tiles = (s.count + rows - 1) / rows, steps_a_tile = a.heads_per_proxy_head + 1;
    const int threads_a_row = blockDim.x / rows, own_row = threadIdx.x / threads_a_row;
    const int first_chunk = threadIdx.x % threads_a_row;
    const auto stage_address = [&](int stage) { return first_stage + stage * stage_bytes; };
    const auto find = [&](int32_t tile_number) {
        const int32_t edge = tile_number * rows + own_row;
        token_to_load t = {-1, -1};
        if (edge >= s.count) return t;
        t.token = s.row(edge);
        t.limit = a.w.geometry.row_position[t.token] - s.position;
        return t;
    };
    const auto keep_token = [&](int32_t tile_number, const token_to_load &t) {
        if (first_chunk != 0) return;
        token_data<rows> &d = data[tile_number % ring];
        d.limit[own_row] = t.limit;
        /* A token that sees no key of this part of the block still leaves its (slot, part): zeros. */
        const bool written = a.dq_kind == WRITE && t.token >= 0;
        const int32_t term = written ? s.slot(tile_number * rows + own_row) * (a.w.block_size / keys) + at.part : 0;
        const int32_t vector = (t.token - a.w.row_begin) * a.proxy_heads + proxy_head;
        d.result[own_row] = t.limit >= 0 || written ? vector * a.slots + term : -1;
    };

    /* The step to load next: two ahead of the one in work. */
    int32_t load_tile = 0, load_step = 0, load_stage = 0;
    token_to_load current = find(0), following = find(1);
    keep_token(0, current);
    const auto load_next = [&]() {
        if (load_tile < tiles) {
            const bool there = current.limit >= 0;
            const int64_t token = there ? current.token : 0;
            const uint32_t address = stage_address(load_stage);
            const float *lse;
            if (load_step < a.heads_per_proxy_head) {
                const int32_t head = first_head + load_step, chunks = a.dim / 8;
                const T *row = a.q.at(token, head);
                for (int chunk = first_chunk; chunk < chunks; chunk += threads_a_row) {
                    tile<T, 128>(address).load(own_row, chunk, row + 8 * chunk, there);
                }
                lse = a.lse.at(token, head);
            } else {
                const T *row = a.q_proxy.at(token, proxy_head);
                for (int chunk = first_chunk; chunk < D / 8; chunk += threads_a_row) {
                    tile<T, D>(address).load(own_row, chunk, row + 8 * chunk, there);
                }
                lse = a.student_lse + token * a.proxy_heads + proxy_head;
            }
            if (first_chunk == 0) cp_async_4(shared_address(&stage_lse[load_stage][own_row]), lse, there);
            load_stage = load_stage + 1 == stages ? 0 : load_stage + 1;
            if (++load_step == steps_a_tile) {
                load_step = 0;
                load_tile++;
                current = following;
                keep_token(load_tile, current);
                following = find(load_tile + 1);
            }
        }
        cp_async_commit();
    };

    float dk[D / 8][4] = {};
    double kl = 0;
    int stage = 0;
    load_next();
    load_next();
    for (int32_t i = 0; i < tiles; i++) {
        const token_data<rows> &d = data[i % ring];
        float teacher[rows / 8][4] = {};
        for (int32_t h = 0; h < a.heads_per_proxy_head; h++) {
            const int32_t key_head = (first_head + h) / a.heads_per_kv_head;
            if (key_head != held_head) {
                held_head = key_head;
                load_fragments<T>(k_fragment, a.k, s, own_key, held_head, a.dim);
            }
            cp_async_wait<1>();
            __syncthreads();
            load_next();
            float main_score[rows / 8][4] = {};
            const tile<T, 128> q(stage_address(stage));
            if (a.dim == 128) {
                score<8, T, rows>(main_score, k_fragment, q);
            } else {
                score<4, T, rows>(main_score, k_fragment, q);
            }
#pragma unroll
            for (int n = 0; n < rows / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = 8 * n + 2 * (lane & 3) + e % 2, key = own_key + lane / 4 + 8 * (e / 2);
                    const float p = probability<T>(main_score[n][e], a.scale_log2, stage_lse[stage][row]);
                    teacher[n][e] += key <= d.limit[row] ? p : 0;
                }
            }
            stage = stage + 1 == stages ? 0 : stage + 1;
        }

        cp_async_wait<1>();
        __syncthreads();
        load_next();
        const tile<T, D> q_proxy(stage_address(stage));
        float ds[rows / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            const left_fragment<T> left = k_proxy.left(own_key, c);
#pragma unroll
            for (int n = 0; n < rows / 8; n += 2) {
                right_fragment<T> b[2];
                q_proxy.right_transposed(b, 8 * n, c);
                multiply_add(ds[n], left, b[0]);
                multiply_add(ds[n + 1], left, b[1]);
            }
        }
        const float mean = 1.0f / static_cast<float>(a.heads_per_proxy_head);
        float tile_kl = 0;
#pragma unroll
        for (int n = 0; n < rows / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = 8 * n + 2 * (lane & 3) + e % 2, key = own_key + lane / 4 + 8 * (e / 2);
                const float log2_r = fmaf(ds[n][e], a.proxy_scale_log2, -stage_lse[stage][row] * log2_e);
                const float w = teacher[n][e] * mean;
                if (w > 0) tile_kl += w * (__log2f(w) - log2_r);
                ds[n][e] = key <= d.limit[row] ? exp2_approx(log2_r) - w : 0;
            }
            if (a.dq != nullptr) ds_shared.store(own_key, 8 * n, ds[n]);
        }
        kl += tile_kl;
        if (a.dk != nullptr) {
#pragma unroll
            for (int j = 0; j < rows / 16; j++) {
                const left_fragment<T> left = to_left_fragment<T>(ds[2 * j], ds[2 * j + 1]);
#pragma unroll
                for (int n = 0; n < D / 8; n += 2) {
                    right_fragment<T> b[2];
                    q_proxy.right(b, 16 * j, 8 * n);
                    multiply_add(dk[n], left, b[0]);
                    multiply_add(dk[n + 1], left, b[1]);
                }
            }
        }
        stage = stage + 1 == stages ? 0 : stage + 1;
        if (a.dq != nullptr) {
            __syncthreads();
            add_row_sums<sizeof(T) == 2 ? 2 : 1>(a.dq, a.dq_kind, ds_shared, k_proxy, d.result, keys);
        }
    }
    cp_async_wait<0>();

    if (a.kl != nullptr) {
        const double sum = sum_of_block(kl) * (1 / double(log2_e));
        const int64_t place = (int64_t(at.part) * gridDim.y + at.unit) * gridDim.x + at.number;
        if (threadIdx.x == 0) a.kl[place] += sum;
    }
    if (a.dk == nullptr) return;
    int32_t *turn = wait_for_turn(a.key_layout, a.w, s, proxy_head, at.part);
    const int64_t head = a.key_layout.turns == nullptr ? proxy_key_head : proxy_head;
    add_key_sums<D>(a.dk, dk, a.key_layout, s, head, own_key);
    end_turn(turn, s);
}

/* ---- The KL value: one block, each thread a fixed subset of the sums, then a fixed tree. ---- */

constexpr int kl_threads = most_threads;

__global__ void __launch_bounds__(kl_threads) kl_kernel(const double *sums, int64_t count, double factor, float *kl) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += kl_threads)
        sum += sums[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) *kl = static_cast<float>(sum * factor);
}

/* ---- Host. ---- */

struct proxy_scratch {
    fmsa_cuda_geometry geometry;
    int32_t *cuts;
    float *student_lse;
    float *dk;
    int32_t *turns;
    size_t turn_bytes;
    uint32_t *ticket;
    double *kl;
    int64_t kl_count;
    float *dq;
    char *partials;
    size_t bytes;
};

static int32_t key_sum_heads(const fmsa_problem *problem) {
    return in_order(problem) ? problem->config.num_proxy_heads : problem->config.num_proxy_kv_heads;
}

static size_t dq_row_bytes(const fmsa_problem *problem) {
    return sizeof(float) * problem->config.num_proxy_heads * problem->config.proxy_head_dim * row_terms(problem);
}

static attention student(const fmsa_problem *problem, const fmsa_tensors *t, float *lse) {
    const fmsa_config *c = &problem->config;
    attention a = {};
    a.dim = c->proxy_head_dim;
    a.heads = c->num_proxy_heads;
    a.key_heads = c->num_proxy_kv_heads;
    a.scale = c->proxy_scale;
    a.q = t->q_proxy;
    a.k = t->k_proxy;
    a.lse = lse;
    a.lse_row_stride = c->num_proxy_heads;
    a.lse_head_stride = 1;
    return a;
}

static size_t partials_row_bytes(const fmsa_problem *problem) {
    const fmsa_tensors none = {};
    return is_dense(problem) ? 0 : partial_row_bytes(problem, student(problem, &none, nullptr));
}

static work proxy_work(const fmsa_problem *problem, const fmsa_cuda_geometry &geometry,
                       const fmsa_cuda_schedule *schedule, int32_t *cuts) {
    return make_work(problem, geometry, schedule, cuts, gradient_keys(problem), problem->heads_per_proxy_head);
}

static proxy_scratch take_scratch(const fmsa_problem *problem, void *workspace, int64_t chunk_rows) {
    const fmsa_config *c = &problem->config;
    const fmsa_cuda_schedule schedule = fmsa_cuda_schedule_at(problem, nullptr);
    fmsa_cuda_arena arena = {static_cast<char *>(workspace), 0};
    proxy_scratch s = {};
    s.cuts = static_cast<int32_t *>(fmsa_cuda_take(&arena, cuts_count(problem), sizeof(int32_t)));
    if (is_dense(problem)) {
        s.geometry = fmsa_cuda_geometry_at(problem, fmsa_cuda_take(&arena, fmsa_cuda_geometry_bytes(problem), 1));
    }
    s.student_lse = static_cast<float *>(fmsa_cuda_take(&arena, c->total_q * c->num_proxy_heads, sizeof(float)));
    s.dk = static_cast<float *>(
        fmsa_cuda_take(&arena, c->total_k * key_sum_heads(problem) * c->proxy_head_dim, sizeof(float)));
    if (in_order(problem)) {
        const int64_t turns = problem->max_key_blocks * c->num_proxy_heads * gradient_parts(problem);
        s.turns = static_cast<int32_t *>(fmsa_cuda_take(&arena, turns, sizeof(int32_t)));
        s.turn_bytes = turns * sizeof(int32_t);
        s.ticket = static_cast<uint32_t *>(fmsa_cuda_take(&arena, 1, sizeof(uint32_t)));
    }
    const work all = proxy_work(problem, schedule.geometry, is_dense(problem) ? nullptr : &schedule, nullptr);
    s.kl_count = (is_dense(problem) ? max_shares(problem, all) * c->num_proxy_heads : fmsa_cuda_max_items(problem)) *
                 gradient_parts(problem);
    s.kl = static_cast<double *>(fmsa_cuda_take(&arena, s.kl_count, sizeof(double)));
    s.dq = static_cast<float *>(fmsa_cuda_take(&arena, chunk_rows, dq_row_bytes(problem)));
    s.partials = static_cast<char *>(fmsa_cuda_take(&arena, chunk_rows, partials_row_bytes(problem)));
    s.bytes = arena.used;
    return s;
}

static fmsa_status plan(const fmsa_problem *problem, int64_t *rows) {
    return plan_chunk(problem, "the proxy loss", take_scratch(problem, nullptr, 0).bytes,
                      dq_row_bytes(problem) + partials_row_bytes(problem), rows);
}

template <typename T, int D>
static fmsa_status launch_proxy(const fmsa_problem *problem, const proxy_parameters<T> &p, int32_t launched_parts,
                                cudaStream_t stream) {
    constexpr int rows = tile_rows<T>;
    const int32_t keys = p.w.share_keys;
    if (p.w.ticket != nullptr) {
        const fmsa_status status = clear(p.w.ticket, sizeof *p.w.ticket, stream);
        if (status != FMSA_OK) return status;
    }
    const dim3 grid(static_cast<unsigned>(max_shares(problem, p.w)), is_dense(problem) ? p.proxy_heads : 1,
                    launched_parts);
    constexpr auto shared_bytes = [](int keys) {
        return tile<T, D>::bytes(keys) + stages * tile<T, 128>::bytes(rows) + tile<T, rows>::bytes(keys);
    };
    constexpr int other_bytes = sizeof(token_data<rows>[ring]) + sizeof(float[stages][rows]) + 256;
    static_assert(shared_bytes(most_gradient_keys<T>) + other_bytes <= most_shared_bytes, "it must run on every card");
    return launch("proxy loss", proxy_kernel<T, D>, grid, keys * 2,
                  shared_memory(shared_bytes(keys), shared_bytes(most_gradient_keys<T>)), stream, p);
}

/* 1 / N; without queries N may be 0, and so is every sum. */
static double kl_factor(const fmsa_problem *problem) {
    return problem->config.kl_count == 0 ? 0 : 1 / static_cast<double>(problem->config.kl_count);
}

static rounding make_rounding(const fmsa_problem *problem, const fmsa_tensors *t, const float *sums,
                              const fmsa_tensor &out) {
    const fmsa_config *c = &problem->config;
    rounding r = {};
    r.sums = sums;
    r.dim = c->proxy_head_dim;
    r.factor = static_cast<float>(c->proxy_scale * kl_factor(problem));
    r.device_factor = static_cast<const float *>(t->grad_kl);
    r.out = out;
    r.dtype = c->dtype;
    return r;
}

template <typename T, int D>
static fmsa_status run_chunk(const fmsa_problem *problem, const fmsa_tensors *t, proxy_parameters<T> p,
                             const proxy_scratch &scratch, const fmsa_cuda_schedule *schedule, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    fmsa_status status = FMSA_OK;
    if (schedule != nullptr) {
        status = attend_chunk(problem, student(problem, t, scratch.student_lse), *schedule, p.w.row_begin, p.w.row_end,
                              scratch.cuts, scratch.partials, stream);
    }
    if (status == FMSA_OK && p.dq != nullptr && p.dq_kind != WRITE) {
        status = clear(scratch.dq, (p.w.row_end - p.w.row_begin) * dq_row_bytes(problem), stream);
    }
    if (status == FMSA_OK) {
        const int32_t *num_items = schedule == nullptr ? nullptr : schedule->num_items;
        const bool one_by_one = p.dq != nullptr && p.dq_kind == ADD_ALONE;
        status = launch_shares(problem, p.w, num_items, one_by_one, stream, [&](const work &w, int32_t launched_parts) {
            p.w = w;
            return launch_proxy<T, D>(problem, p, launched_parts, stream);
        });
    }
    if (status != FMSA_OK || p.dq == nullptr) return status;
    rounding r = make_rounding(problem, t, scratch.dq, t->dq_proxy);
    r.first_row = p.w.row_begin;
    r.rows = p.w.row_end - p.w.row_begin;
    r.heads = c->num_proxy_heads;
    r.terms = row_terms(problem);
    if (p.dq_kind == WRITE) {
        r.counts = schedule->row_count;
        r.count_stride = c->total_q;
        r.heads_per_count = 1;
        r.terms_per_count = gradient_parts(problem);
    }
    return round_sums(&r, 1, stream);
}

static fmsa_status finish(const fmsa_problem *problem, const fmsa_tensors *t, const proxy_scratch &scratch,
                          cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    if (t->dk_proxy.data != nullptr) {
        rounding r = make_rounding(problem, t, scratch.dk, t->dk_proxy);
        r.rows = c->total_k;
        r.heads = c->num_proxy_kv_heads;
        r.terms = key_sum_heads(problem) / c->num_proxy_kv_heads;
        if (c->flags & FMSA_FLAG_FP32_KV_GRADS) r.dtype = FMSA_DTYPE_FP32;
        const fmsa_status status = round_sums(&r, 1, stream);
        if (status != FMSA_OK) return status;
    }
    if (t->kl == nullptr) return FMSA_OK;
    return launch("KL value", kl_kernel, dim3(1), kl_threads, 0, stream, scratch.kl, scratch.kl_count,
                  kl_factor(problem), static_cast<float *>(t->kl));
}

template <typename T, int D>
static fmsa_status run(const fmsa_problem *problem, const fmsa_tensors *t, const proxy_scratch &scratch,
                       const rows_and_blocks &found, int64_t chunk_rows, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    fmsa_status status = clear(scratch.turns, scratch.turn_bytes, stream);
    if (status == FMSA_OK) status = clear(scratch.kl, scratch.kl_count * sizeof(double), stream);
    if (status == FMSA_OK && t->dk_proxy.data != nullptr) {
        status = clear(scratch.dk, sizeof(float) * c->total_k * key_sum_heads(problem) * D, stream);
    }
    if (status == FMSA_OK && is_dense(problem)) {
        status = attend_dense(problem, student(problem, t, scratch.student_lse), found.geometry, stream);
    }

    proxy_parameters<T> p = {};
    p.w = proxy_work(problem, found.geometry, found.sparse(), scratch.cuts);
    p.w.ticket = scratch.ticket;
    p.q = view<const T>(t->q);
    p.k = view<const T>(t->k);
    p.q_proxy = view<const T>(t->q_proxy);
    p.k_proxy = view<const T>(t->k_proxy);
    p.lse = view<const float>(t->lse);
    p.student_lse = scratch.student_lse;
    p.dim = c->head_dim;
    p.heads_per_proxy_head = problem->heads_per_proxy_head;
    p.heads_per_kv_head = problem->heads_per_kv_head;
    p.proxy_heads_per_key_head = c->num_proxy_heads / c->num_proxy_kv_heads;
    p.proxy_heads = c->num_proxy_heads;
    p.scale_log2 = static_cast<float>(c->softmax_scale * log2_e);
    p.proxy_scale_log2 = static_cast<float>(c->proxy_scale * log2_e);
    p.kl = t->kl == nullptr ? nullptr : scratch.kl;
    p.dq = t->dq_proxy.data == nullptr ? nullptr : scratch.dq;
    p.slots = row_terms(problem);
    p.dq_kind = !in_order(problem) ? ADD_IN_ANY_ORDER : is_dense(problem) ? ADD_ALONE : WRITE;
    p.dk = t->dk_proxy.data == nullptr ? nullptr : scratch.dk;
    p.key_layout = {key_sum_heads(problem), scratch.turns};
    for (int64_t begin = 0; begin < c->total_q && status == FMSA_OK; begin += chunk_rows) {
        p.w.row_begin = static_cast<int32_t>(begin);
        p.w.row_end = static_cast<int32_t>(begin + chunk_rows < c->total_q ? begin + chunk_rows : c->total_q);
        status = run_chunk<T, D>(problem, t, p, scratch, found.sparse(), stream);
    }
    return status == FMSA_OK ? finish(problem, t, scratch, stream) : status;
}

} // namespace fmsa

using namespace fmsa;

fmsa_status fmsa_portable_proxy_loss_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    int64_t rows;
    const fmsa_status status = plan(problem, &rows);
    if (status == FMSA_OK) *bytes = take_scratch(problem, nullptr, rows).bytes;
    return status;
}

fmsa_status fmsa_portable_proxy_loss(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace, size_t,
                                     cudaStream_t stream) {
    if (tensors->dq_proxy.data == nullptr && tensors->dk_proxy.data == nullptr && tensors->kl == nullptr)
        return FMSA_OK;
    int64_t rows;
    fmsa_status status = plan(problem, &rows);
    if (status != FMSA_OK) return status;
    const proxy_scratch scratch = take_scratch(problem, workspace, rows);
    const rows_and_blocks found = find_rows(problem, tensors, scratch.geometry, stream, &status);
    if (status != FMSA_OK) return status;
    return with_type_and_dim(problem->config.dtype, problem->config.proxy_head_dim, [&](auto type, auto dim) {
        return run<decltype(type), decltype(dim)::value>(problem, tensors, scratch, found, rows, stream);
    });
}

/* One after the other in the same workspace; why, the opening comment says. */
fmsa_status fmsa_portable_backward_with_proxy_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    size_t main_bytes, proxy_bytes;
    fmsa_status status = fmsa_portable_backward_workspace_bytes(problem, &main_bytes);
    if (status == FMSA_OK) status = fmsa_portable_proxy_loss_workspace_bytes(problem, &proxy_bytes);
    if (status == FMSA_OK) *bytes = main_bytes > proxy_bytes ? main_bytes : proxy_bytes;
    return status;
}

fmsa_status fmsa_portable_backward_with_proxy(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                              size_t workspace_bytes, cudaStream_t stream) {
    const fmsa_status status = fmsa_portable_backward(problem, tensors, workspace, workspace_bytes, stream);
    return status == FMSA_OK ? fmsa_portable_proxy_loss(problem, tensors, workspace, workspace_bytes, stream) : status;
}
