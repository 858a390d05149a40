/* What surrounds the main kernel of the Hopper backward. Each kernel is bound by memory and reads its tensors once.
 *
 * Row values: lse in base 2, delta = sum dout * out, and the scale under which dQ is summed in fp16. D / 8 lanes a
 * (row, head). Dense items: a thread block a piece of rows. dQ: a thread takes 64 bytes of sums, which are 16 (fp32) or
 * 32 (fp16) neighbouring columns. No shared memory to speak of, and few registers. */
#include "portable_parts.cuh"
#include "scan.cuh"
#include "sm90_backward_parts.h"

namespace fmsa {
namespace backward {

constexpr int part_threads = 256;

template <typename T>
__device__ __forceinline__ void unpack_eight(float (&x)[8], const T *from) {
    const uint4 pairs = __ldg(reinterpret_cast<const uint4 *>(from));
    const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack_pair(pair[i], T());
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
    }
}

/* The sum over neighbouring lanes, in all of them. */
template <int lanes>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* ---- Bounds of the keys: a thread block for each (key block, key head). ---- */

template <typename T, int D>
__global__ void __launch_bounds__(part_threads)
    key_bounds_kernel(view<const T> k, view<const T> v, fmsa_cuda_geometry g, key_bounds bounds) {
    constexpr int lanes = D / 8;
    const int32_t block = blockIdx.x, head = blockIdx.y;
    const int lane = threadIdx.x % lanes;
    const int32_t begin = g.block_k_begin[block], end = g.block_k_end[block];
    float greatest_v = 0, greatest_k = 0;
    for (int32_t i = threadIdx.x / lanes; i < backward_keys; i += part_threads / lanes) {
        float x[8] = {}, y[8] = {};
        if (begin + i < end) {
            unpack_eight(x, v.at(begin + i, head) + 8 * lane);
            unpack_eight(y, k.at(begin + i, head) + 8 * lane);
        }
        float squares = 0;
        bool finite = true;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            squares += x[j] * x[j];
            finite &= isfinite(x[j]);
            if (isfinite(y[j])) greatest_k = fmaxf(greatest_k, fabsf(y[j]));
        }
        squares = sum_over<lanes>(finite ? squares : NAN);
        greatest_v = fmaxf(greatest_v, sqrtf(squares)); /* NaN does not count; infinity is a bound too */
    }
    const uint32_t all_v = __reduce_max_sync(0xffffffffu, __float_as_uint(greatest_v));
    const uint32_t all_k = __reduce_max_sync(0xffffffffu, __float_as_uint(greatest_k));
    if (threadIdx.x % 32 != 0) return;
    const int64_t document = int64_t(block - g.block_number[block]) * gridDim.y + head;
    atomicMax(bounds.v + document, all_v);
    atomicMax(bounds.k + document, all_k);
}

/* ---- Values of each row. ---- */

template <typename T>
struct row_parameters {
    view<const T> out, dout;
    view<const float> lse;
    const int32_t *row_position, *row_first_block;
    int64_t rows;
    int32_t heads, key_heads;
    int32_t block_rows; /* of a thread block */
    row_values values;
    key_bounds bounds;
};

/* A power of two that takes `bound` into 2^14 ... 2^15: half of what fp16 holds, so that the roundings of the sums,
 * of P and of out cannot lead beyond. */
__device__ __forceinline__ float scale_for(float bound) {
    if (!(bound > 0)) return 1;
    const int exponent = static_cast<int>(__float_as_uint(bound) >> 23) - 126; /* bound < 2^exponent */
    return __uint_as_float(static_cast<uint32_t>(min(15 - exponent, 126) + 127) << 23);
}

/* dQ's terms are sums of dS k over keys of some blocks, with dS = a (dP - delta). The a of a row sum to 1, out is a
 * mean of the v weighted by them, so |dP| and |delta| are at most |dout| max |v|, and no element of any partial sum
 * exceeds 2 |dout| max |v| max |element of k|. Keys that are not finite do not count: rows that attend to them have no
 * finite gradient. */
template <typename T, int D>
__global__ void __launch_bounds__(part_threads) row_values_kernel(const __grid_constant__ row_parameters<T> a) {
    constexpr uint32_t lanes = D / 8;
    const int64_t first_row = int64_t(blockIdx.x) * a.block_rows;
    const uint32_t count = a.block_rows * a.heads * lanes;
    for (uint32_t start = 0; start < count; start += part_threads) {
        const uint32_t i = start + threadIdx.x, lane = i % lanes, number = i / lanes, head = number % a.heads;
        const int64_t row = first_row + number / a.heads;
        const bool there = i < count && row < a.rows && a.row_position[row] >= 0;
        float out[8] = {}, dout[8] = {};
        if (there) {
            unpack_eight(out, a.out.at(row, head) + 8 * lane);
            unpack_eight(dout, a.dout.at(row, head) + 8 * lane);
        }
        float delta = 0, squares = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            delta += out[j] * dout[j];
            squares += dout[j] * dout[j];
        }
        delta = sum_over<lanes>(delta);
        squares = sum_over<lanes>(squares);
        if (lane != 0 || i >= count || row > a.rows) continue;
        const int64_t place = row * a.heads + head;
        const float lse = there ? *a.lse.at(row, head) : -INFINITY;
        a.values.lse[place] = lse == -INFINITY ? INFINITY : lse * log2_e;
        a.values.delta[place] = delta;
        if (a.values.dq_scale == nullptr) continue;
        float bound = 0;
        if (there) {
            const int64_t document = int64_t(a.row_first_block[row]) * a.key_heads + head / (a.heads / a.key_heads);
            bound = 2 * sqrtf(squares) * __uint_as_float(a.bounds.v[document]) * __uint_as_float(a.bounds.k[document]);
        }
        a.values.dq_scale[place] = scale_for(bound);
    }
}

/* ---- Dense items. ---- */

struct dense_parameters {
    fmsa_cuda_geometry g;
    dense_group group;
    int32_t proxy_heads, tile_tokens;
    int32_t *counts;
    fmsa_cuda_item *items;
    int32_t *range;
};

/* The first of the block ids in use that f holds for; f does not cease to hold. */
template <typename F>
__device__ __forceinline__ int32_t first_block_where(int32_t blocks, F f) {
    int32_t low = 0, high = blocks;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (f(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Calls f(taken, block, first row, rows) in all threads for each round of blocks that see the piece's rows. The first
 * row is one at which tiles of the document's other blocks begin too, so that a row's tile is the same for all of them.
 */
template <typename F>
__device__ __forceinline__ void for_blocks_of_piece(const dense_parameters &a, int32_t piece, F f) {
    const int64_t begin = a.group.row_begin + int64_t(piece) * a.group.piece_rows;
    const int64_t end = min(begin + a.group.piece_rows, a.group.row_end);
    const int32_t used = *a.g.num_blocks;
    const int32_t first = first_block_where(used, [&](int32_t id) { return a.g.block_q_end[id] > begin; });
    const int32_t last = first_block_where(used, [&](int32_t id) { return a.g.block_q_begin[id] >= end; });
    for (int32_t start = first; start < last; start += part_threads) {
        const int32_t block = start + static_cast<int32_t>(threadIdx.x);
        bool taken = block < last;
        int64_t from = 0, to = 0;
        if (taken) {
            const int32_t number = a.g.block_number[block];
            from = max(int64_t(a.g.block_q_begin[block]), begin);
            to = min(int64_t(a.g.block_q_end[block]), end);
            taken = number >= a.group.first_block && number - a.group.first_block < a.group.places && from < to;
            const int64_t first_tile = max(int64_t(a.g.block_q_begin[block - number]), begin);
            from -= (from - first_tile) % a.tile_tokens;
        }
        f(taken, block, from, static_cast<int32_t>(to - from));
    }
}

__global__ void __launch_bounds__(part_threads) count_dense_kernel(const __grid_constant__ dense_parameters a) {
    int32_t count = 0;
    for_blocks_of_piece(a, blockIdx.x,
                        [&](bool taken, int32_t, int64_t, int32_t) { count += __syncthreads_count(taken); });
    if (threadIdx.x == 0) a.counts[blockIdx.x] = count;
}

__global__ void __launch_bounds__(part_threads) list_dense_kernel(const __grid_constant__ dense_parameters a) {
    const int32_t piece = blockIdx.x, count = a.counts[piece];
    int32_t before = 0, total;
    for (int32_t i = threadIdx.x; i < piece; i += part_threads)
        before += a.counts[i];
    block_exclusive_scan<part_threads>(before, 0, add(), total);
    fmsa_cuda_item *items = a.items + int64_t(total) * a.proxy_heads;
    if (piece == gridDim.x - 1 && threadIdx.x == 0) {
        a.range[0] = 0;
        a.range[1] = (total + count) * a.proxy_heads;
    }
    int32_t done = 0;
    for_blocks_of_piece(a, piece, [&](bool taken, int32_t block, int64_t from, int32_t rows) {
        int32_t found;
        const int32_t place = done + block_exclusive_scan<part_threads>(taken ? 1 : 0, 0, add(), found);
        for (int32_t p = 0; taken && p < a.proxy_heads; p++)
            items[int64_t(p) * count + place] = {from, rows, block, p, 0};
        done += found;
    });
}

/* ---- Rounding of dQ. ---- */

struct dq_parameters {
    dq_sums s;
    int64_t total_rows;
    int32_t block_rows; /* of a thread block */
    int32_t heads, unit_heads, heads_per_proxy_head;
    float factor;
    fmsa_tensor out;
};

/* Terms of a row's head. */
__device__ __forceinline__ int32_t terms_of(const dq_parameters &a, int64_t row, uint32_t head) {
    if (a.s.row_count != nullptr) return a.s.row_count[head / a.heads_per_proxy_head * a.total_rows + row];
    if (a.s.row_position == nullptr) return a.s.terms;
    const int32_t position = a.s.row_position[row];
    return position < 0 ? 0 : position / (backward_keys * dq_term_blocks) + 1;
}

/* Four lanes hold four words each, lane t those of columns 2 * t and 2 * t + 1 of each eighth; then lane t has all of
 * eighth number t. */
__device__ __forceinline__ uint4 gather_eighth(const uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
    const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
    const uint2 low_eighth = odd ? make_uint2(a, x[1]) : make_uint2(x[0], a);
    const uint2 high_eighth = odd ? make_uint2(b, x[3]) : make_uint2(x[2], b);
    const uint2 sent = high ? low_eighth : high_eighth, kept = high ? high_eighth : low_eighth;
    const uint32_t c = __shfl_xor_sync(0xffffffffu, sent.x, 2), d = __shfl_xor_sync(0xffffffffu, sent.y, 2);
    return high ? make_uint4(c, d, kept.x, kept.y) : make_uint4(kept.x, kept.y, c, d);
}

/* The same with two words: lane t then has columns 4 * t ... 4 * t + 3 of sixteen. */
__device__ __forceinline__ uint2 gather_quarter(const uint32_t (&x)[2]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[0] : x[1], 2);
    const uint32_t first = high ? other : x[0], second = high ? x[1] : other;
    const uint32_t neighbour = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    return odd ? make_uint2(neighbour, second) : make_uint2(first, neighbour);
}

/* A thread takes a chunk of 16 bytes; four neighbours have 32 (fp16) or 16 (fp32) neighbouring columns, and exchange
 * them so that they write them in order. */
template <typename T, int D, bool half_sums>
__global__ void __launch_bounds__(part_threads) round_dq_kernel(const __grid_constant__ dq_parameters a) {
    constexpr uint32_t piece_columns = dq_piece_columns<D, half_sums>, pieces = D / piece_columns;
    constexpr uint32_t columns = half_sums ? 8 : 4; /* of a thread */
    constexpr uint32_t piece_groups = piece_columns / (4 * columns);
    const uint32_t row_chunks = a.heads * (D / columns), unit_chunks = a.unit_heads * (D / columns);
    const int64_t term_bytes = int64_t(row_chunks) * 16;
    const view<T> out(static_cast<T *>(a.out.data), a.out.row_stride, a.out.head_stride);
    for (uint32_t start = 0; start < a.block_rows * row_chunks; start += part_threads) {
        const uint32_t i = start + threadIdx.x;
        const int64_t chunk_row = int64_t(blockIdx.x) * a.block_rows + i / row_chunks;
        const bool there = i < a.block_rows * row_chunks && a.s.row_begin + chunk_row < a.s.row_end;
        /* [unit][piece][head of the unit][group][4] */
        const uint32_t in_row = i % row_chunks, group = in_row / 4 % piece_groups;
        const uint32_t piece_and_head = in_row % unit_chunks / (4 * piece_groups);
        const uint32_t head = in_row / unit_chunks * a.unit_heads + piece_and_head % a.unit_heads;
        /* In rows of odd heads groups have changed places in pairs. */
        const uint32_t column = piece_and_head / a.unit_heads % pieces * piece_columns +
                                (group ^ head % 2) * 4 * columns + threadIdx.x % 4 * columns;
        const int64_t row = a.s.row_begin + chunk_row;
        const int32_t terms = there ? terms_of(a, row, head) : 0;
        const char *first = static_cast<const char *>(a.s.sums) + chunk_row * a.s.terms * term_bytes + in_row * 16;
        float sum[columns] = {};
#pragma unroll 4
        for (int t = 0; t < terms; t++) {
            const uint4 chunk = __ldcs(reinterpret_cast<const uint4 *>(first + t * term_bytes));
            const uint32_t x[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if constexpr (half_sums) {
                    const float2 two = unpack_pair(x[j], __half());
                    sum[2 * j] += two.x;
                    sum[2 * j + 1] += two.y;
                } else {
                    sum[j] += __uint_as_float(x[j]);
                }
            }
        }
        float factor = a.factor;
        if constexpr (half_sums) factor /= there ? a.s.scale[row * a.heads + head] : 1;
        uint32_t words[columns / 2];
#pragma unroll
        for (int j = 0; j < columns / 2; j++)
            words[j] = pack_pair(sum[2 * j] * factor, sum[2 * j + 1] * factor, T());
        if constexpr (half_sums) {
            const uint4 eighth = gather_eighth(words);
            if (there) *reinterpret_cast<uint4 *>(out.at(row, head) + column) = eighth;
        } else {
            const uint2 quarter = gather_quarter(words);
            if (there) *reinterpret_cast<uint2 *>(out.at(row, head) + column) = quarter;
        }
    }
}

/* Rows of a thread block with so many threads' work each, so that a thread has a few rounds of it. */
static int32_t rows_of_block(int64_t row_threads) {
    constexpr int64_t rounds = 8;
    const int64_t rows = rounds * part_threads / row_threads;
    return rows > 1 ? static_cast<int32_t>(rows) : 1;
}

/* Calls f with a value of the 16-bit type and the head dimension. */
template <typename F>
static fmsa_status with_half_type_and_dim(const fmsa_config *c, F f) {
    const auto with_dim = [&](auto type) {
        return c->head_dim == 64 ? f(type, constant<64>()) : f(type, constant<128>());
    };
    return c->dtype == FMSA_DTYPE_BF16 ? with_dim(__nv_bfloat16()) : with_dim(__half());
}

template <typename T, int D>
static fmsa_status find_key_bounds(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_cuda_geometry &g,
                                   const key_bounds &bounds, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const size_t bytes = sizeof(uint32_t) * problem->max_key_blocks * c->num_kv_heads;
    FMSA_TRY(clear(bounds.v, bytes, stream));
    FMSA_TRY(clear(bounds.k, bytes, stream));
    const dim3 grid(static_cast<unsigned>(problem->max_key_blocks), c->num_kv_heads);
    return launch("key bounds", key_bounds_kernel<T, D>, grid, part_threads, 0, stream, view<const T>(t->k),
                  view<const T>(t->v), g, bounds);
}

} // namespace backward

using namespace backward;

fmsa_status find_row_values(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_cuda_geometry &g,
                            const row_values &rows, const key_bounds &bounds, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_half_type_and_dim(c, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value;
        if (rows.dq_scale != nullptr) FMSA_TRY((find_key_bounds<T, D>(problem, t, g, bounds, stream)));
        row_parameters<T> p = {};
        p.out = view<const T>(t->out);
        p.dout = view<const T>(t->dout);
        p.lse = view<const float>(t->lse);
        p.row_position = g.row_position;
        p.row_first_block = g.row_first_block;
        p.rows = c->total_q;
        p.heads = c->num_heads;
        p.key_heads = c->num_kv_heads;
        p.block_rows = rows_of_block(c->num_heads * (D / 8));
        p.values = rows;
        p.bounds = bounds;
        const unsigned grid = fmsa_cuda_grid(p.rows + 1, p.block_rows);
        return launch("row values", row_values_kernel<T, D>, grid, part_threads, 0, stream, p);
    });
}

int32_t dense_piece_rows(const fmsa_problem *problem, int64_t rows, int32_t places) {
    /* Long enough that adding dK and dV at an item's end does not count, short enough to share the work out evenly; and
     * not more pieces than this, so that items grow with the tokens alone. */
    constexpr int64_t most_tiles = 256, least_tiles = 32, wanted_items = 4096, most_pieces = 128;
    const int64_t tokens = backward_rows / problem->unit_heads;
    const int64_t even = problem->config.num_proxy_heads * rows * places / wanted_items;
    int64_t tiles = most_tiles;
    while (tiles > least_tiles && tiles * tokens > even)
        tiles /= 2;
    const int64_t piece = tiles * tokens;
    return static_cast<int32_t>(piece * most_pieces < rows ? fmsa_ceil_div(rows, most_pieces) : piece);
}

int64_t max_dense_items(const fmsa_problem *problem, const dense_group &group) {
    /* The rows of each block that does not begin and end with a piece reach into two more. */
    const int64_t of_documents = group.places * problem->config.num_fragments;
    const int64_t blocks = of_documents < problem->max_key_blocks ? of_documents : problem->max_key_blocks;
    const int64_t rows = group.row_end - group.row_begin;
    return problem->config.num_proxy_heads * (group.places * rows / group.piece_rows + 2 * blocks);
}

fmsa_status list_dense_items(const fmsa_problem *problem, const fmsa_cuda_geometry &geometry, const dense_group &group,
                             int32_t *counts, fmsa_cuda_item *items, int32_t *range, cudaStream_t stream) {
    const int32_t tile_tokens = backward_rows / problem->unit_heads;
    const dense_parameters p = {geometry, group, problem->config.num_proxy_heads, tile_tokens, counts, items, range};
    const unsigned grid = static_cast<unsigned>(dense_pieces(group));
    const fmsa_status status = launch("dense count", count_dense_kernel, grid, part_threads, 0, stream, p);
    return status != FMSA_OK ? status : launch("dense list", list_dense_kernel, grid, part_threads, 0, stream, p);
}

fmsa_status round_dq(const fmsa_problem *problem, const fmsa_tensor &dq, const dq_sums &sums, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    dq_parameters p = {};
    p.s = sums;
    p.total_rows = c->total_q;
    p.heads = c->num_heads;
    p.unit_heads = problem->unit_heads;
    p.heads_per_proxy_head = problem->heads_per_proxy_head;
    p.factor = static_cast<float>(c->softmax_scale);
    p.out = dq;
    return with_half_type_and_dim(c, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value;
        p.block_rows = rows_of_block(c->num_heads * (D / (sums.half_sums ? 8 : 4)));
        const unsigned grid = fmsa_cuda_grid(sums.row_end - sums.row_begin, p.block_rows);
        const auto kernel = sums.half_sums ? round_dq_kernel<T, D, true> : round_dq_kernel<T, D, false>;
        return launch("dq", kernel, grid, part_threads, 0, stream, p);
    });
}

} // namespace fmsa
