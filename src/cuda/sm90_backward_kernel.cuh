/* The main kernel of the Hopper backward: dQ, dK and dV of the main attention, and the teacher of the proxy loss.
 *
 * Key-outer. A *row* is one (token, query head). A thread block stays on a multiprocessor and takes one item after
 * another: the 128 keys of a block and tokens that attend to them, in tiles of 64 rows = 64 / unit_heads tokens of one
 * unit of heads. Transposed, so that P and dS go from the accumulators of one product into the next as left operands:
 * S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q; only dS
 * crosses shared memory, for dQ = dS K, which needs all keys.
 *
 * Warp roles, 512 threads. In warpgroup 0, warp 0 is the finder: it claims items and writes the tokens of their tiles
 * into a ring, up to eight tiles ahead. Warp 1 is the loader: Q and dO by the TMA, one box a token (or one a tile whose
 * tokens are neighbours), lse and delta by cp.async, and K and V once an item. Where unit_heads is a multiple of 4 but
 * not of 8, warps 1 to 3 bring boxes of four heads and 64 columns; where it is not one of 4, they use cp.async. Padding
 * tokens are token total_q: they are read as zeros, and their lse is +inf, so P and dS are 0. Warpgroups 1 and 2 take
 * 64 keys each: all products but dQ; dK and dV stay in registers over the item and are added to fp32 sums at its end,
 * in the order of the items where key_turns says so. Warpgroup 3 makes dQ: each warp stages its 16 rows and adds them
 * to the sums by bulk reductions, one a token and piece.
 *
 * Barriers: per place in the ring tokens_full (finder) and tokens_empty (main and dQ warps); per stage q_full (Q, lse,
 * delta, limits), dout_full, empty (main warps); per dS buffer ds_full (main warps), ds_empty (dQ warps); per item
 * kv_full, kv_empty (main and dQ warps).
 *
 * Rows lie in shared memory in groups of eight, [group][64 columns][row][128 bytes swizzled]: so one box of the TMA
 * brings all columns of a token.
 *
 * Teacher: for 4 or 16 heads a unit, P is summed over the heads of a token by additions and exchanges between lanes.
 * For any other number it is one more product, P^T by a matrix of ones that says which row is which token's.
 *
 * Shared memory at D = 128: K and V 64 KB, three stages of Q and dO 96 KB, two dS buffers 32 KB, staging of dQ 16 KB.
 * Registers a thread: warpgroup 0 32, main 208, dQ 64; no spills.
 *
 * Floor: 2,560 clocks of the tensor cores a tile at D = 128. What limits it is power: at full load the card lowers its
 * clock. Measured on an H200, bf16, D = 128, 64/4/4/1 heads, k = 16, 65,536 tokens, in steady state and one run (cuBLAS
 * 680 TFLOP/s): the whole pass 21.5 ms with a random selection, 489 TFLOP/s, 0.72 of cuBLAS; 20.6 ms with the newest 16
 * blocks, 510 TFLOP/s, 0.75. */
#ifndef FMSA_CUDA_SM90_BACKWARD_KERNEL_CUH
#define FMSA_CUDA_SM90_BACKWARD_KERNEL_CUH

#include "sm90_backward_load.cuh"

namespace fmsa {
namespace backward {

/* ---- Main warpgroups. ---- */

template <typename T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<__nv_bfloat16> = true;

/* How the kernel leaves the teacher: not; for any number of heads a unit, as a product with ones; or for so many heads
 * by additions. */
enum teaching { teach_none = 0, teach_any = 1, teach_4_heads = 4, teach_16_heads = 16 };

/* Of two values, each summed over this lane and the one `step` further or before: lanes without the bit `step` keep a,
 * those with it b. */
__device__ __forceinline__ float fold(float a, float b, int step) {
    const bool upper = threadIdx.x & step;
    return (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, step);
}

/* Sums of the probabilities of a token's rows, for 4 or 16 heads a unit. A thread holds numbers of two keys (halves)
 * and columns 8 * j + 2 * (lane % 4) + {0, 1}; four lanes share the tokens' sums out among them. */
template <int heads>
struct token_sums {
    static constexpr int groups = heads == 16 ? 4 : 8, words = 16 / heads;
    float sum[groups][2];

    __device__ __forceinline__ token_sums() : sum{} {
    }
    __device__ __forceinline__ void add(int j, int half, float x, float y) {
        sum[j * groups / 8][half] += x + y;
    }
    /* The token of this lane's word i. */
    __device__ __forceinline__ static int32_t token(uint32_t thread, int i) {
        const uint32_t lane = thread % 4;
        return heads == 4 ? 2 * i + 8 * (lane % 2) + lane / 2 : lane;
    }
    /* Pairs of the two keys' sums times the factor. */
    __device__ __forceinline__ void finish(uint32_t (&word)[words], float factor) const {
        float w[words][2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < words; i++) {
                if constexpr (heads == 4) {
                    w[i][half] = fold(sum[i][half], sum[i + 4][half], 1);
                } else {
                    const float low = fold(sum[0][half], sum[2][half], 2), high = fold(sum[1][half], sum[3][half], 2);
                    w[i][half] = fold(low, high, 1);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < words; i++)
            word[i] = pack_pair(w[i][0] * factor, w[i][1] * factor, __half());
    }
};

/* Nothing is summed. */
template <>
struct token_sums<teach_none> {
    __device__ __forceinline__ void add(int, int, float, float) {
    }
};
template <>
struct token_sums<teach_any> : token_sums<teach_none> {};

/* A value that the compiler computes where it stands: kept over the loop it would take a register. */
__device__ __forceinline__ uint32_t found_anew(uint32_t x) {
    uint32_t value[1] = {x};
    pin(value);
    return value[0];
}

template <typename T, int D, bool half_sums, teaching teach>
struct main_warpgroup {
    using layout = shared_memory_of<D, half_sums>;
    static constexpr int columns = D / 2; /* accumulators of 64 rows and D columns */
    const backward_parameters &a;
    shared_state &shared;
    uint32_t base;
    int group;
    float dk[columns], dv[columns];

    __device__ __forceinline__ main_warpgroup(const backward_parameters &parameters, shared_state &state, uint32_t base,
                                              int group)
        : a(parameters), shared(state), base(base), group(group) {
    }

    __device__ __forceinline__ static int lane() {
        return threadIdx.x & 31;
    }
    __device__ __forceinline__ static int warp() {
        return threadIdx.x / 32 % 4;
    }
    /* The first of the two keys that this thread's accumulators belong to; the other is eight further. */
    __device__ __forceinline__ int own_key() const {
        return 64 * group + 16 * warp() + lane() / 4;
    }

    /* What the TMA brought behind the block's last key is another document's, or nothing: any bits. dQ multiplies it by
     * 0, and would turn an Inf into a NaN. */
    __device__ __forceinline__ void zero_missing_keys(int32_t keys) {
        const int32_t key = 64 * group + threadIdx.x % 64, half = threadIdx.x / 64 % 2;
        if (key >= keys && half < layout::halves) {
            const uint32_t row = base + half * layout::key_half + key * 128;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                store_shared_16(row + layout::k + 16 * i, make_uint4(0, 0, 0, 0));
                store_shared_16(row + layout::v + 16 * i, make_uint4(0, 0, 0, 0));
            }
        }
        fence_async_proxy();
        named_barrier_sync(1 + group, warpgroup);
    }

    /* d = keys * rows^T over the columns, both K-major: S^T and dP^T. */
    __device__ __forceinline__ void multiply_columns(float (&d)[32], uint32_t keys, uint32_t rows) {
        wgmma_fence();
        wgmma_new(d, describe<0, 1024>(keys), describe<0, layout::row_group>(rows), T());
#pragma unroll
        for (int i = 1; i < D / 16; i++) {
            const uint32_t key_step = ((i / 4) * layout::key_half + i % 4 * 32) >> 4;
            const uint32_t row_step = ((i / 4) * layout::row_half + i % 4 * 32) >> 4;
            wgmma(d, describe<0, 1024>(keys + key_step), describe<0, layout::row_group>(rows + row_step), T());
        }
        wgmma_commit();
    }

    /* d += p^T * rows: dV and dK. */
    __device__ __forceinline__ void multiply_rows(float (&d)[columns], const uint32_t (&p)[16], uint32_t rows) {
        pin(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma<true>(d, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                        describe<layout::row_half, layout::row_group>(rows + (i * 2 * layout::row_group >> 4)), T());
        }
        wgmma_commit();
    }

    /* Scores of keys that a row does not see become -inf. */
    __device__ __forceinline__ void mask(float (&s)[32], const stage_rows &rows) {
        const int thread = found_anew(threadIdx.x), column = 2 * (thread % 4);
        const int key = 64 * group + thread % warpgroup / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t limit = rows.limit[8 * j + column + e];
                if (key > limit) s[4 * j + e] = -INFINITY;
                if (key + 8 > limit) s[4 * j + 2 + e] = -INFINITY;
            }
        }
    }

    /* p = exp(s - lse), rounded. */
    __device__ __forceinline__ void probabilities(uint32_t (&p)[16], token_sums<teach> &sums, float (&s)[32],
                                                  const stage_rows &rows) {
        const uint32_t lse = shared_address(rows.lse) + 8 * (lane() % 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 l = load_shared_8(lse + 32 * j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float x = exp2_approx(fmaf(s[4 * j + 2 * half], a.scale_log2, -l.x));
                const float y = exp2_approx(fmaf(s[4 * j + 2 * half + 1], a.scale_log2, -l.y));
                p[2 * j + half] = pack_pair(x, y, T());
                sums.add(j, half, x, y);
            }
        }
        pin(p);
    }

    /* ds = p (dp - delta), from the rounded p: that needs no registers for another. In bf16 the difference is rounded
     * before the product, which saves a seventh of this warpgroup's instructions; in fp16 it might overflow. */
    __device__ __forceinline__ void score_gradients(uint32_t (&ds)[16], const uint32_t (&p)[16], const float (&dp)[32],
                                                    const stage_rows &rows) {
        const uint32_t delta = shared_address(rows.delta) + 8 * (lane() % 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 d = load_shared_8(delta + 32 * j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float x = dp[4 * j + 2 * half] - d.x, y = dp[4 * j + 2 * half + 1] - d.y;
                const uint32_t pair = p[2 * j + half];
                if constexpr (is_bf16<T>) {
                    ds[2 * j + half] = multiply_pairs(pair, pack_pair(x, y, T()));
                } else {
                    const float2 two = unpack_pair(pair, T());
                    ds[2 * j + half] = pack_pair(two.x * x, two.y * y, T());
                }
            }
        }
        pin(ds);
    }

    /* dS as [row][key], for the dQ warps. */
    __device__ __forceinline__ void store_score_gradients(const uint32_t (&ds)[16], const progress &at) {
        const uint32_t buffer = at.ds_buffer();
        const uint32_t thread = found_anew(threadIdx.x), row = thread % 32 / 16 * 8 + thread % 8;
        const uint32_t chunk = (thread / 32 % 4 * 2 + thread / 8 % 2) ^ thread % 8;
        const uint32_t to =
            base + layout::ds + buffer * layout::ds_bytes + group * layout::ds_half + row * 128 + chunk * 16;
        barrier_wait(shared_address(&shared.ds_empty[buffer]), at.ds_parity() ^ 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
            stmatrix_x4_trans(to + i * 2048, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        fence_async_proxy();
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared_address(&shared.ds_full[buffer]));
    }

    /* w = sums of p over the rows of each of eight tokens. */
    __device__ __forceinline__ void multiply_ones(float (&w)[4], const uint32_t (&p)[16], int32_t first_token) {
        const uint32_t ones = (base + layout::ones + first_token * 128) >> 4;
        wgmma_fence();
        wgmma_new(w, p[0], p[1], p[2], p[3], describe<0, 1024>(ones), T());
#pragma unroll
        for (int i = 1; i < 4; i++)
            wgmma(w, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], describe<0, 1024>(ones + 2 * i), T());
        wgmma_commit();
    }

    __device__ __forceinline__ void store_teacher(const float (&w)[4], const tile_tokens &tokens, int32_t first_token) {
        const uint32_t thread = found_anew(threadIdx.x);
        const uint32_t pair = 8 * (4 * group + thread / 32 % 4) + thread % 32 / 4;
        uint32_t *to = a.teacher + shared.item.teacher + pair;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int32_t token = first_token + 2 * (thread % 4) + e;
            const int32_t row = token < a.tile_tokens ? tokens.row[token] : a.total_q;
            if (row == a.total_q) continue;
            to[(int64_t(row) * a.places + tokens.place[token]) * (backward_keys / 2)] =
                pack_pair(w[e] * a.teacher_factor, w[2 + e] * a.teacher_factor, __half());
        }
    }

    /* The same for one pair. */
    __device__ __forceinline__ void store_teacher(uint32_t w, const tile_tokens &tokens, int32_t token) {
        const uint32_t thread = found_anew(threadIdx.x);
        const uint32_t pair = 8 * (4 * group + thread / 32 % 4) + thread % 32 / 4;
        const int32_t row = tokens.row[token];
        if (row == a.total_q) return;
        uint32_t *to = a.teacher + shared.item.teacher + pair;
        to[(int64_t(row) * a.places + tokens.place[token]) * (backward_keys / 2)] = w;
    }

    /* w of the tile's tokens from the first on. */
    __device__ __forceinline__ void leave_teacher(const uint32_t (&p)[16], const tile_tokens &tokens, int32_t first) {
#pragma unroll 1
        for (; first < a.tile_tokens; first += 8) {
            float w[4];
            multiply_ones(w, p, first);
            wgmma_wait<0>();
            pin(w);
            store_teacher(w, tokens, first);
        }
    }

    __device__ __forceinline__ void run_tile(const progress &at) {
        const uint32_t keys = (base + layout::k + group * 64 * 128) >> 4;
        const uint32_t q = (base + layout::q + at.stage() * layout::row_bytes) >> 4;
        constexpr uint32_t to_v = (layout::v - layout::k) >> 4, to_dout = (layout::dout - layout::q) >> 4;
        const stage_rows &rows = shared.rows[at.stage()];
        float s[32], dp[32];
        uint32_t p[16], ds[16];
        barrier_wait(shared_address(&shared.q_full[at.stage()]), at.stage_parity());
        if (a.gathered) fence_async_proxy();
        multiply_columns(s, keys, q);
        const int32_t masked = shared.masked[at.stage()];
        wgmma_wait<0>();
        pin(s);
        if (masked) mask(s, rows);
        token_sums<teach> sums;
        probabilities(p, sums, s, rows);
        barrier_wait(shared_address(&shared.dout_full[at.stage()]), at.stage_parity());
        if (a.gathered) fence_async_proxy();
        multiply_columns(dp, keys + to_v, q + to_dout);
        multiply_rows(dv, p, q + to_dout);
        /* In fp16 there are no registers left for w while dP is under way. */
        constexpr bool early = teach == teach_any && is_bf16<T>;
        float w[4];
        if constexpr (early) multiply_ones(w, p, 0);
        constexpr bool by_sums = teach > teach_any;
        uint32_t words[by_sums ? 16 / teach : 1];
        if constexpr (by_sums) {
            sums.finish(words, a.teacher_factor);
            pin(words);
        }
        wgmma_wait<early ? 2 : 1>();
        pin(dp);
        score_gradients(ds, p, dp, rows);
        multiply_rows(dk, ds, q);
        store_score_gradients(ds, at);
        if constexpr (early) {
            wgmma_wait<1>();
            pin(w);
            store_teacher(w, shared.tokens[at.ring_place()], 0);
        }
        if constexpr (teach == teach_any) leave_teacher(p, shared.tokens[at.ring_place()], early ? 8 : 0);
        if constexpr (by_sums) {
#pragma unroll
            for (int i = 0; i < token_sums<teach>::words; i++)
                store_teacher(words[i], shared.tokens[at.ring_place()], token_sums<teach>::token(threadIdx.x, i));
        }
        wgmma_wait<0>();
        pin(dv);
        pin(dk);
        if (lane() == 0) {
            barrier_arrive(shared_address(&shared.empty[at.stage()]));
            barrier_arrive(shared_address(&shared.tokens_empty[at.ring_place()]));
        }
    }

    __device__ __forceinline__ void add(float *sums, const float (&d)[columns], const item_state &item, int64_t head) {
        if (sums == nullptr) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = own_key() + 8 * half;
            if (key >= item.keys) continue;
            float *to = sums + ((item.key_row + int64_t(key)) * a.sum_heads + head) * D + 4 * (lane() % 4);
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                const float *x = d + 8 * i + 2 * half;
                reduce_add_4(to + 16 * i, x[0], x[1], x[4], x[5]);
            }
        }
    }

    /* Adds the item's dK and dV to the sums. */
    __device__ __forceinline__ void add_key_gradients(const item_state &item) {
        int32_t *turn = nullptr;
        if (a.key_turns != nullptr) {
            turn = a.key_turns + (item.unit * a.max_blocks + item.block) * 2 + group;
            if (threadIdx.x % warpgroup == 0) {
                while (atomicAdd(turn, 0) != item.turn_begin)
                    __nanosleep(64);
                __threadfence();
            }
            named_barrier_sync(1 + group, warpgroup);
        }
        const int64_t head = a.sum_heads == a.units ? item.unit : item.unit / a.units_per_key_head;
        add(a.dv, dv, item, head);
        add(a.dk, dk, item, head);
        if (turn != nullptr) {
            __threadfence();
            named_barrier_sync(1 + group, warpgroup);
            if (threadIdx.x % warpgroup == 0) {
                __threadfence();
                atomicExch(turn, item.turn_end);
            }
        }
    }

    __device__ __forceinline__ void run() {
        progress at;
        while (true) {
            barrier_wait(shared_address(&shared.kv_full), at.item_parity());
            at.end_item();
            const int32_t tiles = uniform(shared.item.tiles);
            if (tiles == 0) return;
            if (shared.item.keys < backward_keys) zero_missing_keys(shared.item.keys);
#pragma unroll
            for (int i = 0; i < columns; i++)
                dk[i] = dv[i] = 0;
#pragma unroll 1
            for (int32_t left = tiles; left > 0; left--) {
                run_tile(at);
                at.end_tile();
            }
            const item_state item = shared.item;
            __syncwarp();
            if (lane() == 0) barrier_arrive(shared_address(&shared.kv_empty));
            add_key_gradients(item);
        }
    }
};

/* ---- dQ warps. ---- */

template <typename T, int D, bool half_sums>
struct dq_warpgroup {
    using layout = shared_memory_of<D, half_sums>;
    static constexpr int pieces = D / dq_piece_columns<D, half_sums>;
    const backward_parameters &a;
    shared_state &shared;
    uint32_t base, staging;

    __device__ __forceinline__ dq_warpgroup(const backward_parameters &parameters, shared_state &state, uint32_t base)
        : a(parameters), shared(state), base(base) {
        staging = base + layout::staging + warp() * layout::warp_staging;
    }

    __device__ __forceinline__ static int lane() {
        return threadIdx.x & 31;
    }
    __device__ __forceinline__ static int warp() {
        return threadIdx.x / 32 % 4;
    }

    /* d = dS K for 64 of the columns. */
    __device__ __forceinline__ void multiply(float (&d)[32], uint32_t buffer, int half) {
        const uint32_t ds = (base + layout::ds + buffer * layout::ds_bytes) >> 4;
        const uint32_t k = (base + layout::k + half * layout::key_half) >> 4;
        wgmma_fence();
        wgmma_new<false, true>(d, describe<0, 1024>(ds), describe<0, 1024>(k), T());
#pragma unroll
        for (int i = 1; i < 8; i++) {
            const uint32_t ds_step = ((i / 4) * layout::ds_half + i % 4 * 32) >> 4;
            wgmma<false, true>(d, describe<0, 1024>(ds + ds_step), describe<0, 1024>(k + (i * 2048 >> 4)), T());
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(d);
    }

    /* The tile's row of this thread's accumulators, and the other eight further. */
    __device__ __forceinline__ static int32_t own_row(int half) {
        return 16 * warp() + lane() / 4 + 8 * half;
    }

    __device__ __forceinline__ int32_t head_of(int32_t row) const {
        return row - token_of(a, row) * a.unit_heads;
    }

    /* The accumulators of one of this thread's two rows into the staging buffer. */
    __device__ __forceinline__ void stage(const float (&d)[32], int row_half, int half, float scale,
                                          int32_t first_head) {
        const uint32_t row = staging + (lane() / 4 + 8 * row_half) * layout::piece_bytes;
        const int own = (lane() % 4) ^ ((first_head + head_of(own_row(row_half))) % 2 * 4);
        if constexpr (half_sums) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t x[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float *two = d + 4 * (4 * i + j) + 2 * row_half;
                    x[j] = pack_pair(two[0] * scale, two[1] * scale, __half());
                }
                store_shared_16(row + ((8 * half + 4 * i) ^ own) * 16, make_uint4(x[0], x[1], x[2], x[3]));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = d + 8 * i + 2 * row_half;
                const uint4 chunk = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[4]),
                                     __float_as_uint(x[5])};
                store_shared_16(row + ((4 * i) ^ own) * 16, chunk);
            }
        }
    }

    /* The term that the rows of the token that begin at this lane's add to; negative: no token begins here. */
    __device__ __forceinline__ int32_t find_target(const tile_tokens &tokens) const {
        const int32_t own = 16 * warp() + lane(), token = token_of(a, own);
        const bool begins = lane() == 0 || (lane() < 16 && own == token * a.unit_heads);
        const int32_t row = begins ? tokens.row[token] : a.total_q;
        if (row == a.total_q) return -1;
        int32_t target = (row - a.row_begin) * a.dq_terms;
        if (a.dq_terms > 1)
            target += a.edge_slot == nullptr ? tokens.item.block_number / dq_term_blocks : tokens.place[token];
        return target;
    }

    /* Sends the rows of one token. A term of one block is written, not added: nothing else writes there. */
    __device__ __forceinline__ void send(int32_t target, int32_t first_head, int piece) {
        const int32_t head = head_of(16 * warp() + lane());
        const uint32_t bytes = min(a.unit_heads - head, 16 - lane()) * layout::piece_bytes;
        const int64_t before = (int64_t(target) * a.heads + first_head) * pieces + piece * a.unit_heads + head;
        char *to = static_cast<char *>(a.dq) + before * layout::piece_bytes;
        const uint32_t from = staging + lane() * layout::piece_bytes;
        if (a.dq_alone) {
            bulk_store(to, from, bytes);
        } else if constexpr (half_sums) {
            bulk_reduce_add(reinterpret_cast<__half *>(to), from, bytes);
        } else {
            bulk_reduce_add(reinterpret_cast<float *>(to), from, bytes);
        }
    }

    /* dQ's sums of a tile's rows are added to block by block where a.dq_turns says so: lower numbers first. */
    __device__ __forceinline__ int32_t *turn_of(const tile_tokens &tokens) const {
        const int64_t row = tokens.item.edge_begin + tokens.number * a.tile_tokens - a.row_begin;
        return a.dq_turns + (row * a.units + tokens.item.unit) * dq_warps + warp();
    }

    __device__ __forceinline__ void wait_for_turn(const tile_tokens &tokens) const {
        if (lane() == 0) {
            const int32_t *turn = turn_of(tokens);
            while (__ldcg(turn) != tokens.item.block_number)
                __nanosleep(32);
            __threadfence();
        }
        __syncwarp();
    }

    /* The reductions must be done, not only read. */
    __device__ __forceinline__ void end_turn(const tile_tokens &tokens) const {
        if (lane() < 16) bulk_wait_complete<0>();
        __threadfence();
        __syncwarp();
        if (lane() == 0) atomicExch(turn_of(tokens), tokens.item.block_number + 1);
    }

    __device__ __forceinline__ void run_tile(const progress &at, int32_t first_head, bool last) {
        constexpr int piece_halves = layout::halves / pieces;
        const uint32_t buffer = at.ds_buffer();
        barrier_wait(shared_address(&shared.ds_full[buffer]), at.ds_parity());
        const tile_tokens &tokens = shared.tokens[at.ring_place()];
        float scale[2] = {1, 1};
        if constexpr (half_sums) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int32_t row = own_row(i), token = token_of(a, row);
                scale[i] = __ldg(a.rows.dq_scale + int64_t(tokens.row[token]) * a.heads + first_head + head_of(row));
            }
        }
#pragma unroll
        for (int half = 0; half < layout::halves; half++) {
            float d[32];
            multiply(d, buffer, half);
            int32_t target = -1;
            if ((half + 1) % piece_halves == 0) target = find_target(tokens);
            if (half == layout::halves - 1 && lane() == 0) {
                barrier_arrive(shared_address(&shared.ds_empty[buffer]));
                if (last) barrier_arrive(shared_address(&shared.kv_empty));
            }
            if (a.dq == nullptr) continue;
            if (half % piece_halves == 0) {
                if (lane() < 16) bulk_wait_read<0>();
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                stage(d, i, half, scale[i], first_head);
            if ((half + 1) % piece_halves == 0) {
                fence_async_proxy();
                __syncwarp();
                if (!half_sums && a.dq_turns != nullptr && half == 0) wait_for_turn(tokens);
                if (target >= 0) send(target, first_head, half / piece_halves);
                if (lane() < 16) bulk_commit();
            }
        }
        if (!half_sums && a.dq_turns != nullptr && a.dq != nullptr) end_turn(tokens);
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared_address(&shared.tokens_empty[at.ring_place()]));
    }

    __device__ __forceinline__ void run() {
        progress at;
        while (true) {
            barrier_wait(shared_address(&shared.kv_full), at.item_parity());
            at.end_item();
            const int32_t first_head = shared.item.unit * a.unit_heads;
            int32_t tiles = uniform(shared.item.tiles);
            if (tiles == 0) break;
#pragma unroll 1
            for (; tiles > 0; tiles--) {
                run_tile(at, first_head, tiles == 1);
                at.end_tile();
            }
        }
        bulk_wait_complete<0>();
    }
};

/* ---- The kernel. ---- */

/* Rows of a stage that no token fills keep zeros from here on; ones[token][row] says whose row it is. */
template <typename T, int D, bool half_sums>
__device__ __forceinline__ void fill_constants(const backward_parameters &a, uint32_t base) {
    using layout = shared_memory_of<D, half_sums>;
    for (int32_t i = threadIdx.x; i < 2 * stages * layout::row_bytes / 16; i += threads)
        store_shared_16(base + layout::q + 16 * i, make_uint4(0, 0, 0, 0));
    for (int32_t i = threadIdx.x; i < backward_rows * backward_rows / 2; i += threads) {
        const int32_t token = i / (backward_rows / 2), row = i % (backward_rows / 2) * 2;
        const float x = row / a.unit_heads == token, y = (row + 1) / a.unit_heads == token;
        const uint32_t chunk = (row / 8) ^ (token % 8);
        store_shared_4(base + layout::ones + token * 128 + chunk * 16 + row % 8 * 2, pack_pair(x, y, T()));
    }
    fence_async_proxy();
}

__device__ __forceinline__ void init_barriers(shared_state &shared, bool gathered) {
    for (int i = 0; i < ring; i++) {
        barrier_init(shared_address(&shared.tokens_full[i]), 1);
        barrier_init(shared_address(&shared.tokens_empty[i]), main_warps + dq_warps);
    }
    for (int i = 0; i < stages; i++) {
        barrier_init(shared_address(&shared.q_full[i]), 1 + (gathered ? 3 * 32 : 32));
        barrier_init(shared_address(&shared.dout_full[i]), 1 + (gathered ? 3 * 32 : 0));
        barrier_init(shared_address(&shared.empty[i]), main_warps);
    }
    for (int i = 0; i < ds_buffers; i++) {
        barrier_init(shared_address(&shared.ds_full[i]), main_warps);
        barrier_init(shared_address(&shared.ds_empty[i]), dq_warps);
    }
    barrier_init(shared_address(&shared.kv_full), 1);
    barrier_init(shared_address(&shared.kv_empty), main_warps + dq_warps);
    barrier_init_fence();
}

template <typename T, int D, bool half_sums, teaching teach>
__global__ void __launch_bounds__(threads, 1) backward_kernel(const __grid_constant__ backward_parameters a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ shared_state shared;
    const uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) init_barriers(shared, a.gathered);
    fill_constants<T, D, half_sums>(a, base);
    /* The next grid relies on what this one waits for. */
    wait_for_grid_before();
    if constexpr (teach != teach_none) allow_next_grid();
    __syncthreads();
    const int role = uniform(threadIdx.x / warpgroup);
    if (role == 0) {
        warpgroup_give_registers<32>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            finder(a, shared).run();
        } else if (warp == 1 || a.in_fours || a.gathered) {
            loader<T, D, half_sums>(a, shared, base).run();
        }
    } else if (role == 3) {
        warpgroup_give_registers<64>();
        dq_warpgroup<T, D, half_sums>(a, shared, base).run();
    } else {
        warpgroup_take_registers<208>();
        main_warpgroup<T, D, half_sums, teach>(a, shared, base, role - 1).run();
    }
}

template <typename T, int D, bool half_sums, teaching teach>
fmsa_status launch_kernel(const backward_parameters &p, cudaStream_t stream) {
    int device = 0, multiprocessors = 0;
    fmsa_status status = fmsa_cuda_status("reading the current device", cudaGetDevice(&device));
    if (status == FMSA_OK) {
        status = fmsa_cuda_status("counting multiprocessors",
                                  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    }
    if (status != FMSA_OK) return status;
    return launch_close("backward", backward_kernel<T, D, half_sums, teach>, dim3(multiprocessors), threads,
                        shared_memory_of<D, half_sums>::bytes, stream, p);
}

} // namespace backward

template <typename T, int D, bool half_sums>
fmsa_status launch_teaching(const backward_parameters &p, cudaStream_t stream) {
    using namespace backward;
    if (p.teacher == nullptr) return launch_kernel<T, D, half_sums, teach_none>(p, stream);
    switch (p.unit_heads) {
    case 4:
        return launch_kernel<T, D, half_sums, teach_4_heads>(p, stream);
    case 16:
        return launch_kernel<T, D, half_sums, teach_16_heads>(p, stream);
    default:
        return launch_kernel<T, D, half_sums, teach_any>(p, stream);
    }
}

template <typename T, int D>
fmsa_status launch_backward(const backward_parameters &p, bool half_sums, cudaStream_t stream) {
    return half_sums ? launch_teaching<T, D, true>(p, stream) : launch_teaching<T, D, false>(p, stream);
}

} // namespace fmsa

#endif
