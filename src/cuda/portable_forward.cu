/* The forward pass, sparse and dense, and the proxies' own LSE (the same without values).
 *
 * A *row* is one (token, query head). Sparse mode is key-outer: a thread block holds the keys and values of one block
 * in shared memory and gathers the rows that selected it; every (row, slot) leaves a partial output, divided by its own
 * sum so that no 16-bit type overflows, and a partial LSE; combine_kernel merges the slots of a row in ascending order,
 * so the result does not depend on how the work was cut. Partials are bounded by taking a chunk of tokens at a time.
 * Dense mode is query-outer: a thread block keeps its rows and streams the keys of their documents, and nothing is left
 * to merge.
 *
 * Tile: a warp owns 32 rows (16 in fp32) and takes 64 keys (32) a step with online softmax: S = Q K^T, P = exp(S - m),
 * O = O * exp(old m - m) + P V, where P goes from the accumulators of the first product into the second without leaving
 * registers. Four warps a block, all with this one role. In the sparse kernel they share nothing but K and V and run
 * without barriers: each gathers its own rows, the next 32 while it works on the softmax and P V of these.
 * Shared memory (D = 128, 16 bits): K and V 64 KB (sparse: a block of 128 keys; dense: two stages of 64 keys), Q 32 KB.
 * Registers: 255, for two blocks a multiprocessor where shared memory allows it. Spills at D = 128, all outside the
 * products: some 50 bytes a thread (sparse), 20 (dense), 110 in fp32.
 * fp32: products of split TF32 numbers (tile.cuh), each with a relative error of about 2^-21.
 * Floor: 4 * D * rows * keys floating-point operations at the rate of mma.sync, and in the sparse kernel D * 2 bytes a
 * (row, slot) written and read again. Measured on an H200, bf16, D = 128, all kernels included: heads 64/4/4/1, k = 16,
 * random selection, 65,536 tokens: 25.7 ms, 163 TFLOP/s, of which the combination takes a fifth; 16/2/4/1, 16,384
 * tokens: 1.44 ms, 191 TFLOP/s; dense, 64/4/4/1, 16,384 tokens: 13.9 ms, 315 TFLOP/s. The warps wait for their own
 * results more than for memory: registers allow two a scheduler. */
#include <math_constants.h>

#include "portable_parts.cuh"

namespace fmsa {

constexpr int warps = 4;
constexpr int threads = 32 * warps;

template <typename T>
struct shape {
    static constexpr int row_tiles = sizeof(T) == 2 ? 2 : 1; /* of 16 rows, a warp */
    static constexpr int rows = 16 * row_tiles;
    static constexpr int step = sizeof(T) == 2 ? 64 : 32; /* keys */
};

template <typename T>
struct forward_parameters {
    work w;
    head_map map;
    view<const T> q, k, v; /* v.data is NULL when only the LSE is wanted */
    float scale_log2;      /* scale * log2(e) */
    int32_t heads;

    /* Sparse: partial results of (token of the chunk, slot, part, head). Within 32 columns, a lane's eight values stand
     * together. */
    T *partial;
    float *partial_lse; /* base 2 */
    int32_t slots;

    /* Dense. */
    view<T> out;
    view<float> lse;
    int32_t total_rows; /* tokens */
};

/* What a warp's rows have gathered so far. Thread: rows lane / 4 and lane / 4 + 8 of each row tile. */
template <typename T, int D>
struct attention_state {
    float out[shape<T>::row_tiles][D / 8][4];
    float greatest[shape<T>::row_tiles][2]; /* of the scaled scores, base 2 */
    float sum[shape<T>::row_tiles][2];      /* this lane's share of it */

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    out[m][n][i] = 0;
            greatest[m][0] = greatest[m][1] = -CUDART_INF_F;
            sum[m][0] = sum[m][1] = 0;
        }
    }

    /* The LSE, base 2, of a row tile's rows lane / 4 + 8 * half; inverse becomes what out is to be multiplied by. */
    __device__ __forceinline__ float finish(int m, int half, float &inverse) const {
        const float total = quad_sum(sum[m][half]);
        inverse = total > 0 ? 1 / total : total; /* NaN stays NaN */
        return total > 0 ? greatest[m][half] + log2f(total) : total == 0 ? -CUDART_INF_F : total;
    }
};

/* S = Q K^T of the warp's rows (query row first_row of q) and a step of keys. */
template <typename T, int D>
__device__ __forceinline__ void score(float (&s)[shape<T>::row_tiles][shape<T>::step / 8][4], const tile<T, D> &q,
                                      int first_row, const tile<T, D> &k, int first_key) {
    constexpr int row_tiles = shape<T>::row_tiles, key_tiles = shape<T>::step / 8;
#pragma unroll
    for (int m = 0; m < row_tiles; m++)
#pragma unroll
        for (int n = 0; n < key_tiles; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = 0;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        left_fragment<T> a[row_tiles];
#pragma unroll
        for (int m = 0; m < row_tiles; m++)
            a[m] = q.left(first_row + 16 * m, d);
#pragma unroll
        for (int n = 0; n < key_tiles; n += 2) {
            right_fragment<T> b[2];
            k.right_transposed(b, first_key + 8 * n, d);
#pragma unroll
            for (int m = 0; m < row_tiles; m++) {
                multiply_add(s[m][n], a[m], b[0]);
                multiply_add(s[m][n + 1], a[m], b[1]);
            }
        }
    }
}

/* Scores beyond a row's limit, the last key that it sees, become -inf. */
template <typename T>
__device__ __forceinline__ void mask(float (&s)[shape<T>::row_tiles][shape<T>::step / 8][4],
                                     const int32_t (&limit)[shape<T>::row_tiles][2], int first_key) {
    const int lane_key = first_key + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
        for (int n = 0; n < shape<T>::step / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (lane_key + 8 * n + e % 2 > limit[m][e / 2]) s[m][n][e] = -CUDART_INF_F;
            }
        }
    }
}

/* Online softmax of a step: s becomes the probabilities relative to the new maximum, exactly 0 for -inf. The first step
 * has nothing to rescale. */
template <typename T, int D>
__device__ __forceinline__ void soften(float (&s)[shape<T>::row_tiles][shape<T>::step / 8][4],
                                       attention_state<T, D> &state, bool first, float scale_log2) {
    constexpr int key_tiles = shape<T>::step / 8;
    float shrink[shape<T>::row_tiles][2];
#pragma unroll
    for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = -CUDART_INF_F;
#pragma unroll
            for (int n = 0; n < key_tiles; n++)
                greatest = fmaxf(greatest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            const float old = state.greatest[m][half];
            greatest = fmaxf(quad_max(greatest) * scale_log2, old);
            state.greatest[m][half] = greatest;
            const float reference = greatest == -CUDART_INF_F ? 0 : greatest;
            shrink[m][half] = exp2_approx(old - reference);
            float sum = 0;
#pragma unroll
            for (int n = 0; n < key_tiles; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &x = s[m][n][2 * half + i];
                    x = exp2_approx(fmaf(x, scale_log2, -reference));
                    sum += x;
                }
            }
            state.sum[m][half] = state.sum[m][half] * shrink[m][half] + sum;
        }
    }
    if (first) return;
#pragma unroll
    for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                state.out[m][n][e] *= shrink[m][e / 2];
        }
    }
}

/* out += P V. */
template <typename T, int D>
__device__ __forceinline__ void gather_values(attention_state<T, D> &state,
                                              const float (&p)[shape<T>::row_tiles][shape<T>::step / 8][4],
                                              const tile<T, D> &v, int first_key) {
    constexpr int row_tiles = shape<T>::row_tiles;
#pragma unroll
    for (int j = 0; j < shape<T>::step / 16; j++) {
        left_fragment<T> a[row_tiles];
#pragma unroll
        for (int m = 0; m < row_tiles; m++)
            a[m] = to_left_fragment<T>(p[m][2 * j], p[m][2 * j + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            right_fragment<T> b[2];
            v.right(b, first_key + 16 * j, 8 * n);
#pragma unroll
            for (int m = 0; m < row_tiles; m++) {
                multiply_add(state.out[m][n], a[m], b[0]);
                multiply_add(state.out[m][n + 1], a[m], b[1]);
            }
        }
    }
}

/* ---- Sparse. ---- */

/* What is known of a warp's rows, in shared memory. */
template <int rows>
struct row_data {
    int32_t position[rows];
    int32_t result[rows]; /* (token of the chunk, slot, part, head); -1: no row */
};

/* What a lane fetches ahead of one row, that of its number. */
struct row_to_load {
    int32_t token; /* -1: none */
    int32_t slot;
};

template <typename T>
__device__ __forceinline__ row_to_load find_row(const forward_parameters<T> &a, const share &s, int32_t number) {
    const int32_t edge = number / a.map.unit_heads;
    if (edge >= s.count) return {-1, 0};
    return {s.row(edge), s.slot(edge)};
}

/* Starts the copy of query rows to a warp's part of shared memory; the lanes hold where they are, NULL for none. */
template <typename T, int D>
__device__ __forceinline__ void load_queries(const tile<T, D> &q, int first_row, const T *own_row) {
    constexpr int chunks = D / 8;
    const int lane = threadIdx.x & 31;
#pragma unroll 4
    for (int i = 0; i < shape<T>::rows * chunks / 32; i++) {
        const int row = (i * 32 + lane) / chunks, chunk = lane % chunks;
        const uint64_t start = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(own_row), row);
        q.load(first_row + row, chunk, reinterpret_cast<const T *>(start) + 8 * chunk, start != 0);
    }
}

template <typename T, int columns, int count>
__device__ __forceinline__ void load_keys(const tile<T, columns> &target, int first, const view<const T> &source,
                                          int64_t key_row, int64_t head, int valid) {
    constexpr int chunks = columns / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < count * chunks; i += threads) {
        const int key = i / chunks, chunk = i % chunks;
        const bool there = key < valid;
        target.load(first + key, chunk, source.at(there ? key_row + key : 0, head) + 8 * chunk, there);
    }
}

/* Eight values that a lane holds of a row, in memory: a 16-byte store (32 in fp32). */
template <typename T>
__device__ __forceinline__ void store_eight(T *place, const float (&x)[8]) {
    *reinterpret_cast<uint4 *>(place) = make_uint4(pack_pair(x[0], x[1], T()), pack_pair(x[2], x[3], T()),
                                                   pack_pair(x[4], x[5], T()), pack_pair(x[6], x[7], T()));
}
template <>
__device__ __forceinline__ void store_eight<float>(float *place, const float (&x)[8]) {
    reinterpret_cast<float4 *>(place)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4 *>(place)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <typename T>
__device__ __forceinline__ void load_eight(float (&x)[8], const T *place) {
    const uint4 packed = __ldcs(reinterpret_cast<const uint4 *>(place));
    const uint32_t pair[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack_pair(pair[i], T());
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
    }
}
template <>
__device__ __forceinline__ void load_eight<float>(float (&x)[8], const float *place) {
    const float4 low = __ldcs(reinterpret_cast<const float4 *>(place));
    const float4 high = __ldcs(reinterpret_cast<const float4 *>(place) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

template <typename T, int D>
__device__ __forceinline__ void leave_partials(const forward_parameters<T> &a, const attention_state<T, D> &state,
                                               const row_data<shape<T>::rows> &data) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float inverse;
            const float lse = state.finish(m, half, inverse);
            const int64_t result = data.result[16 * m + 8 * half + lane / 4];
            if (result < 0) continue;
            if ((lane & 3) == 0) a.partial_lse[result] = lse;
            if (a.v.data == nullptr) continue;
#pragma unroll
            for (int n = 0; n < D / 8; n += 4) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    x[i] = state.out[m][n + i / 2][2 * half + i % 2] * inverse;
                store_eight<T>(a.partial + result * D + 8 * n + 8 * (lane & 3), x);
            }
        }
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(threads, 2) sparse_kernel(const __grid_constant__ forward_parameters<T> a) {
    constexpr int rows = shape<T>::rows, step = shape<T>::step;
    extern __shared__ __align__(128) char memory[];
    __shared__ row_data<rows> all_data[2][warps];
    const place at = take_place(a.w);
    __shared__ share s; /* There are no registers to spare for it. */
    share own;
    if (!take_share(a.w, at, own)) return;
    if (threadIdx.x == 0) s = own;
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int32_t unit = s.proxy_head * a.map.units_per_proxy_head + at.unit;
    const int32_t key_head = unit / a.map.units_per_key_head;
    const int keys = a.w.share_keys;
    const tile<T, D> q(shared_address(memory));
    const tile<T, D> k(q.address + tile<T, D>::bytes(warps * rows));
    const tile<T, D> v(k.address + tile<T, D>::bytes(keys));

    for (int first = 0; first < keys; first += step) {
        load_keys<T, D, step>(k, first, a.k, s.key_row + first, key_head, s.keys - first);
        if (a.v.data != nullptr) load_keys<T, D, step>(v, first, a.v, s.key_row + first, key_head, s.keys - first);
    }
    const auto find = [&](int32_t start) { return lane < rows ? find_row(a, s, start + lane) : row_to_load{-1, 0}; };
    const auto load = [&](int32_t start, int buffer, const row_to_load &r) {
        row_data<rows> &data = all_data[buffer][warp];
        const bool there = r.token >= 0;
        const int32_t head = unit * a.map.unit_heads + (start + lane) % a.map.unit_heads;
        if (lane < rows) {
            cp_async_4(shared_address(&data.position[lane]), a.w.geometry.row_position + max(r.token, 0), there);
            const int32_t edge = (r.token - a.w.row_begin) * a.slots + r.slot;
            data.result[lane] = there ? (edge * (a.w.block_size / keys) + at.part) * a.heads + head : -1;
        }
        load_queries(q, warp * rows, there ? a.q.at(r.token, head) : nullptr);
        cp_async_commit();
    };
    const int32_t total = s.count * a.map.unit_heads;
    int32_t start = warp * rows;
    load(start, 0, find(start));
    row_to_load next = find(start + warps * rows);
    cp_async_wait<0>();
    __syncthreads();

    for (int buffer = 0; start < total; start += warps * rows, buffer ^= 1) {
        cp_async_wait<0>();
        __syncwarp();
        const row_data<rows> &data = all_data[buffer][warp];
        const bool there = lane < rows && data.result[lane] >= 0;
        const int32_t own_limit = there ? data.position[lane] - s.position : -1;
        const int32_t nearest = __reduce_min_sync(0xffffffffu, there ? own_limit : INT32_MAX);
        const int32_t furthest = min(__reduce_max_sync(0xffffffffu, own_limit), keys - 1);
        attention_state<T, D> state;
        state.clear();
        int key = 0;
        do {
            float p[shape<T>::row_tiles][step / 8][4];
            score<T, D>(p, q, warp * rows, k, key);
            if (key + step > furthest) {
                __syncwarp();
                load(start + warps * rows, buffer ^ 1, next);
                next = find(start + 2 * warps * rows);
            }
            if (key + step - 1 > nearest) {
                int32_t limit[shape<T>::row_tiles][2];
#pragma unroll
                for (int m = 0; m < shape<T>::row_tiles; m++) {
                    limit[m][0] = data.position[16 * m + lane / 4] - s.position;
                    limit[m][1] = data.position[16 * m + lane / 4 + 8] - s.position;
                }
                mask<T>(p, limit, key);
            }
            soften<T, D>(p, state, key == 0, a.scale_log2);
            if (a.v.data != nullptr) gather_values<T, D>(state, p, v, key);
            key += step;
        } while (key <= furthest);
        leave_partials<T, D>(a, state, data);
    }
    cp_async_wait<0>();
}

/* ---- Combine: D / 8 lanes a (row, head). ---- */

template <typename T>
struct combine_parameters {
    const T *partial; /* NULL when only the LSE is wanted */
    const float *partial_lse;
    const int32_t *row_count;
    int64_t count_stride;
    int64_t row_begin, rows;
    int32_t heads, heads_per_proxy_head, dim, slots, parts;
    view<T> out;
    view<float> lse;
};

constexpr int combine_threads = 128;

template <typename T>
__global__ void __launch_bounds__(combine_threads) combine_kernel(const __grid_constant__ combine_parameters<T> a) {
    const int lanes = a.dim / 8;
    const int64_t number = (int64_t(blockIdx.x) * combine_threads + threadIdx.x) / lanes;
    if (number >= a.rows * a.heads) return;
    const int lane = threadIdx.x % lanes;
    const int64_t row = a.row_begin + number / a.heads;
    const int32_t head = number % a.heads;
    const int terms = a.row_count[head / a.heads_per_proxy_head * a.count_stride + row] * a.parts;
    const int64_t first = (row - a.row_begin) * a.slots * a.parts * a.heads + head;
    const float *lse = a.partial_lse + first;
    float greatest = -CUDART_INF_F;
    for (int t = 0; t < terms; t++)
        greatest = fmaxf(greatest, lse[int64_t(t) * a.heads]);
    const float reference = greatest == -CUDART_INF_F ? 0 : greatest;
    float total = 0;
    for (int t = 0; t < terms; t++)
        total += exp2_approx(lse[int64_t(t) * a.heads] - reference);
    if (lane == 0) *a.lse.at(row, head) = total == 0 ? -CUDART_INF_F : (reference + log2f(total)) * (1 / log2_e);
    if (a.partial == nullptr) return;
    const T *partial = a.partial + first * a.dim + 8 * lane;
    const float inverse = total == 0 ? 0 : 1 / total;
    float sum[8] = {};
#pragma unroll 4
    for (int t = 0; t < terms; t++) {
        float x[8];
        load_eight<T>(x, partial + int64_t(t) * a.heads * a.dim);
        const float weight = exp2_approx(lse[int64_t(t) * a.heads] - reference) * inverse;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += weight * x[i];
    }
    T *target = a.out.at(row, head) + lane / 4 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
        store_pair(target + 8 * i, sum[2 * i], sum[2 * i + 1]);
}

/* ---- Dense. ---- */

/* The keys of a step. The steps go through all blocks that any row of the tile sees. */
struct key_step {
    int32_t block;
    int32_t offset; /* within the block */
};

template <typename T, int D>
__global__ void __launch_bounds__(threads, 2) dense_kernel(const __grid_constant__ forward_parameters<T> a) {
    constexpr int rows = shape<T>::rows, step = shape<T>::step;
    extern __shared__ __align__(128) char memory[];
    __shared__ int32_t first_blocks[warps], last_blocks[warps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int32_t unit = blockIdx.y, key_head = unit / a.map.units_per_key_head;
    const int32_t block_size = a.w.block_size;
    const fmsa_cuda_geometry &g = a.w.geometry;
    const tile<T, D> q(shared_address(memory));
    const uint32_t stages = q.address + tile<T, D>::bytes(warps * rows);

    /* The longest rows come last in a document: they are started first. */
    const int64_t first = (int64_t(gridDim.x) - 1 - blockIdx.x) * (warps * rows) + warp * rows;
    const int64_t number = first + lane, total = int64_t(a.total_rows) * a.map.unit_heads;
    int32_t position = -1, first_block = 0, token = 0, head = 0;
    const bool counts = lane < rows && number < total;
    if (counts) {
        token = number / a.map.unit_heads;
        head = unit * a.map.unit_heads + (number - int64_t(token) * a.map.unit_heads);
        position = g.row_position[token];
        first_block = g.row_first_block[token];
    }
    load_queries(q, warp * rows, position >= 0 ? a.q.at(token, head) : nullptr);
    const int32_t lowest = __reduce_min_sync(0xffffffffu, position >= 0 ? first_block : INT32_MAX);
    const int32_t highest = __reduce_max_sync(0xffffffffu, position >= 0 ? first_block + position / block_size : -1);
    if (lane == 0) {
        first_blocks[warp] = lowest;
        last_blocks[warp] = highest;
    }
    __syncthreads();
    int32_t begin = first_blocks[0], end = last_blocks[0];
#pragma unroll
    for (int i = 1; i < warps; i++) {
        begin = min(begin, first_blocks[i]);
        end = max(end, last_blocks[i]);
    }

    const auto advance = [&](key_step &at) {
        at.offset += step;
        if (at.offset < block_size) return;
        at.offset = 0;
        at.block++;
    };
    const auto key_tile = [&](int stage) { return tile<T, D>(stages + stage * 2 * tile<T, D>::bytes(step)); };
    const auto load_step = [&](const key_step &at, int stage) {
        if (at.block <= end) {
            const int32_t key_row = g.block_k_begin[at.block] + at.offset;
            const int32_t valid = g.block_k_end[at.block] - key_row;
            const tile<T, D> k = key_tile(stage), v(k.address + tile<T, D>::bytes(step));
            load_keys<T, D, step>(k, 0, a.k, key_row, key_head, valid);
            if (a.v.data != nullptr) load_keys<T, D, step>(v, 0, a.v, key_row, key_head, valid);
        }
        cp_async_commit();
    };

    attention_state<T, D> state;
    state.clear();
    key_step at = {begin, 0};
    bool fresh = true;
    load_step(at, 0);
    for (int stage = 0; at.block <= end; stage ^= 1, advance(at)) {
        cp_async_wait<0>();
        __syncthreads();
        key_step following = at;
        advance(following);
        load_step(following, stage ^ 1);
        /* Blocks of a later document stand beyond the row's position too, since blocks are numbered through. */
        const int32_t relative = at.block - first_block;
        const int32_t own_limit = relative < 0 ? -1 : position - relative * block_size - at.offset;
        if (!__any_sync(0xffffffffu, own_limit >= 0)) continue;
        const tile<T, D> k = key_tile(stage), v(k.address + tile<T, D>::bytes(step));
        float p[shape<T>::row_tiles][step / 8][4];
        score<T, D>(p, q, warp * rows, k, 0);
        if (__any_sync(0xffffffffu, counts && own_limit < step - 1)) {
            int32_t limit[shape<T>::row_tiles][2];
#pragma unroll
            for (int m = 0; m < shape<T>::row_tiles; m++) {
                limit[m][0] = __shfl_sync(0xffffffffu, own_limit, 16 * m + lane / 4);
                limit[m][1] = __shfl_sync(0xffffffffu, own_limit, 16 * m + lane / 4 + 8);
            }
            mask<T>(p, limit, 0);
        }
        soften<T, D>(p, state, fresh, a.scale_log2);
        fresh = false;
        if (a.v.data != nullptr) gather_values<T, D>(state, p, v, 0);
    }
    cp_async_wait<0>();

#pragma unroll
    for (int m = 0; m < shape<T>::row_tiles; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = first + 16 * m + 8 * half + lane / 4;
            float inverse;
            const float lse = state.finish(m, half, inverse);
            if (row >= total) continue;
            const int64_t target_row = row / a.map.unit_heads;
            const int64_t target_head = unit * a.map.unit_heads + (row - target_row * a.map.unit_heads);
            if ((lane & 3) == 0) *a.lse.at(target_row, target_head) = lse * (1 / log2_e);
            if (a.v.data == nullptr) continue;
            T *target = a.out.at(target_row, target_head) + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                store_pair(target + 8 * n, state.out[m][n][2 * half] * inverse,
                           state.out[m][n][2 * half + 1] * inverse);
            }
        }
    }
}

/* ---- Host. ---- */

template <typename T>
forward_parameters<T> make_parameters(const attention &a) {
    forward_parameters<T> p = {};
    p.q = view<const T>(a.q);
    p.k = view<const T>(a.k);
    p.v = view<const T>(a.v);
    p.scale_log2 = static_cast<float>(a.scale * log2_e);
    p.heads = a.heads;
    p.out = view<T>(a.out);
    p.lse = view<float>(a.lse, a.lse_row_stride, a.lse_head_stride);
    return p;
}

static int32_t parts(const fmsa_problem *problem) {
    return problem->config.block_size / share_keys(problem, shape<float>::step);
}

static size_t partial_bytes(const fmsa_problem *problem, const attention &a) {
    return a.v.data == nullptr ? 0 : fmsa_dtype_bytes(problem->config.dtype) * a.dim;
}

size_t partial_row_bytes(const fmsa_problem *problem, const attention &a) {
    return (partial_bytes(problem, a) + sizeof(float)) * a.heads * problem->slots * parts(problem);
}

fmsa_status attend_chunk(const fmsa_problem *problem, const attention &a, const fmsa_cuda_schedule &schedule,
                         int64_t row_begin, int64_t row_end, int32_t *cuts, void *partials, cudaStream_t stream) {
    return with_type_and_dim(problem->config.dtype, a.dim, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value, rows = warps * shape<T>::rows;
        const int32_t proxy_heads = problem->config.num_proxy_heads;
        const int32_t units = proxy_heads > a.key_heads ? proxy_heads : a.key_heads;
        const int64_t results = (row_end - row_begin) * a.heads * problem->slots * parts(problem);
        forward_parameters<T> p = make_parameters<T>(a);
        p.map = {units / proxy_heads, a.heads / units, units / a.key_heads};
        p.w = make_work(problem, schedule.geometry, &schedule, cuts, share_keys(problem, shape<T>::step),
                        p.map.unit_heads);
        p.w.row_begin = static_cast<int32_t>(row_begin);
        p.w.row_end = static_cast<int32_t>(row_end);
        p.partial = static_cast<T *>(partials);
        p.partial_lse = reinterpret_cast<float *>(static_cast<char *>(partials) + results * partial_bytes(problem, a));
        p.slots = problem->slots;
        const dim3 grid(static_cast<unsigned>(max_shares(problem, p.w)), p.map.units_per_proxy_head, parts(problem));
        constexpr auto shared_bytes = [](int keys) { return tile<T, D>::bytes(rows) + 2 * tile<T, D>::bytes(keys); };
        constexpr int other_bytes = sizeof(row_data<shape<T>::rows>[2][warps]) + 256;
        constexpr int most_keys = sizeof(T) == 2 ? 128 : shape<T>::step;
        static_assert(shared_bytes(most_keys) + other_bytes <= most_shared_bytes, "it must run on every card");
        const shared_memory shared(shared_bytes(p.w.share_keys), shared_bytes(most_keys));
        fmsa_status status = cut_shares(problem, p.w, schedule.num_items, stream);
        if (status == FMSA_OK) {
            status = launch("sparse forward", sparse_kernel<T, D>, grid, threads, shared, stream, p);
        }
        if (status != FMSA_OK) return status;

        combine_parameters<T> c = {};
        c.partial = a.v.data == nullptr ? nullptr : p.partial;
        c.partial_lse = p.partial_lse;
        c.row_count = schedule.row_count;
        c.count_stride = problem->config.total_q;
        c.row_begin = row_begin;
        c.rows = row_end - row_begin;
        c.heads = a.heads;
        c.heads_per_proxy_head = a.heads / proxy_heads;
        c.dim = D;
        c.slots = problem->slots;
        c.parts = parts(problem);
        c.out = p.out;
        c.lse = p.lse;
        const int64_t blocks = fmsa_ceil_div(c.rows * c.heads * (D / 8), combine_threads);
        return launch("combine", combine_kernel<T>, static_cast<unsigned>(blocks), combine_threads, 0, stream, c);
    });
}

fmsa_status attend_dense(const fmsa_problem *problem, const attention &a, const fmsa_cuda_geometry &geometry,
                         cudaStream_t stream) {
    return with_type_and_dim(problem->config.dtype, a.dim, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value, rows = warps * shape<T>::rows;
        forward_parameters<T> p = make_parameters<T>(a);
        p.map = {1, a.heads / a.key_heads, 1};
        p.w = make_work(problem, geometry, nullptr, nullptr, problem->config.block_size, p.map.unit_heads);
        p.total_rows = static_cast<int32_t>(problem->config.total_q);
        const int64_t blocks = fmsa_ceil_div(problem->config.total_q * p.map.unit_heads, rows);
        const dim3 grid(static_cast<unsigned>(blocks), a.key_heads);
        constexpr size_t shared = tile<T, D>::bytes(rows) + 4 * tile<T, D>::bytes(shape<T>::step);
        static_assert(shared + 256 <= most_shared_bytes, "it must run on every card");
        return launch("dense forward", dense_kernel<T, D>, grid, threads, shared, stream, p);
    });
}

static attention main_attention(const fmsa_problem *problem, const fmsa_tensors *t) {
    const fmsa_config *c = &problem->config;
    attention a = {};
    a.dim = c->head_dim;
    a.heads = c->num_heads;
    a.key_heads = c->num_kv_heads;
    a.scale = c->softmax_scale;
    a.q = t->q;
    a.k = t->k;
    a.v = t->v;
    a.out = t->out;
    a.lse = static_cast<float *>(t->lse.data);
    a.lse_row_stride = t->lse.row_stride;
    a.lse_head_stride = t->lse.head_stride;
    return a;
}

} // namespace fmsa

using namespace fmsa;

/* Bytes of partial results that a row of the main attention leaves; v counts, wherever it lies. */
static size_t main_row_bytes(const fmsa_problem *problem) {
    fmsa_tensors t = {};
    t.v.data = &t;
    return partial_row_bytes(problem, main_attention(problem, &t));
}

struct forward_scratch {
    int32_t *cuts;
    void *partials;
    size_t bytes;
};

static forward_scratch take_scratch(const fmsa_problem *problem, void *workspace, int64_t chunk_rows) {
    fmsa_cuda_arena arena = {static_cast<char *>(workspace), 0};
    forward_scratch s = {};
    s.cuts = static_cast<int32_t *>(fmsa_cuda_take(&arena, cuts_count(problem), sizeof(int32_t)));
    s.partials = fmsa_cuda_take(&arena, chunk_rows, main_row_bytes(problem));
    s.bytes = arena.used;
    return s;
}

static fmsa_status plan_sparse(const fmsa_problem *problem, int64_t *rows) {
    return plan_chunk(problem, "the forward pass", take_scratch(problem, nullptr, 0).bytes, main_row_bytes(problem),
                      rows);
}

fmsa_status fmsa_portable_forward_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    if (is_dense(problem)) {
        *bytes = fmsa_cuda_geometry_bytes(problem);
        const size_t limit = problem->config.scratch_limit;
        if (limit != 0 && limit < *bytes) {
            return fmsa_fail(FMSA_ERROR_WORKSPACE,
                             "scratch_limit is %zu; the forward pass needs at least %zu bytes for "
                             "these shapes",
                             limit, *bytes);
        }
        return FMSA_OK;
    }
    int64_t rows;
    const fmsa_status status = plan_sparse(problem, &rows);
    if (status == FMSA_OK) *bytes = take_scratch(problem, nullptr, rows).bytes;
    return status;
}

fmsa_status fmsa_portable_forward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace, size_t,
                                  cudaStream_t stream) {
    const attention a = main_attention(problem, tensors);
    if (is_dense(problem)) {
        const fmsa_cuda_geometry geometry = fmsa_cuda_geometry_at(problem, workspace);
        const fmsa_status status = fmsa_cuda_build_geometry(problem, geometry, stream);
        return status == FMSA_OK ? attend_dense(problem, a, geometry, stream) : status;
    }
    const fmsa_cuda_schedule schedule = fmsa_cuda_schedule_at(problem, tensors->schedule);
    int64_t rows;
    fmsa_status status = plan_sparse(problem, &rows);
    const forward_scratch scratch = take_scratch(problem, workspace, status == FMSA_OK ? rows : 0);
    for (int64_t begin = 0; begin < problem->config.total_q && status == FMSA_OK; begin += rows) {
        const int64_t end = begin + rows < problem->config.total_q ? begin + rows : problem->config.total_q;
        status = attend_chunk(problem, a, schedule, begin, end, scratch.cuts, scratch.partials, stream);
    }
    return status;
}
