/* What surrounds the main kernel of the Hopper backward. Each kernel is bound by memory and reads its tensors once.
 *
 * Row values: lse in base 2, delta = sum dout * out, and the scale under which dQ is summed; D / 8 lanes a (row, head).
 * The sums are cleared on the way. Dense items: a thread block a piece of rows. dQ: four threads take 64 bytes of sums,
 * which are 16 (fp32) or 32 (fp16) neighbouring columns. No shared memory to speak of, and few registers.
 *
 * Floor: memory, 4.2 TB/s. Measured on an H200, bf16, D = 128, 64 heads, 65,536 tokens, fp16 sums: row values 0.84 ms
 * (3.2 GB), dQ 0.56 ms (2.1 GB). */
#include "portable_parts.cuh"
#include "scan.cuh"
#include "sm90.cuh"
#include "sm90_backward_parts.h"

namespace fmsa {
namespace backward {

constexpr int part_threads = 256;

/* How the threads of a launch share out rows of a tensor, or of dQ's sums: each has one chunk of 16 bytes of a row, the
 * same in several rows, so that what its place says is found once. Thread blocks with the same blockIdx.y have the same
 * chunks; where a row has fewer chunks than a thread block has threads, these take several rows at once. */
constexpr int rows_of_thread = 16, rows_at_once = 4;

struct row_chunks {
    uint32_t count;     /* of a row */
    uint32_t pass_rows; /* rows that a thread block takes at once */

    row_chunks() = default;
    __host__ explicit row_chunks(int64_t chunks)
        : count(chunks), pass_rows(chunks < part_threads ? part_threads / chunks : 1) {
    }
    __host__ dim3 grid(int64_t rows) const {
        return dim3(fmsa_cuda_grid(rows, rows_of_thread * pass_rows), fmsa_cuda_grid(count, part_threads));
    }
    /* This thread's chunk, and the first of its rows; the others are pass_rows apart. Threads left over have neither.
     */
    __device__ __forceinline__ uint32_t chunk() const {
        return (blockIdx.y * part_threads + threadIdx.x) % count;
    }
    __device__ __forceinline__ int64_t first_row() const {
        return int64_t(blockIdx.x) * (rows_of_thread * pass_rows) + (count < part_threads ? threadIdx.x / count : 0);
    }
    __device__ __forceinline__ bool has_chunk() const {
        return count < part_threads ? threadIdx.x < pass_rows * count : blockIdx.y * part_threads + threadIdx.x < count;
    }
};

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
    allow_next_grid();
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
    int64_t padding_row;
    int32_t heads, key_heads;
    row_chunks chunks;
    row_values values;
    key_bounds bounds;
    dq_sums s;
    int32_t chunk_sums; /* of a term, for each chunk of out: chunks of sums */
    item_search search;
};

/* Terms of dQ that a row at this position has in dense mode where sums are cut into terms. */
__device__ __forceinline__ int32_t dense_terms(int32_t position) {
    return position < 0 ? 0 : position / (backward_keys * dq_term_blocks) + 1;
}

/* A power of two that takes `bound` into 2^14 ... 2^15: half of what fp16 holds, so that the roundings of the sums,
 * of P and of out cannot lead beyond. */
__device__ __forceinline__ float scale_for(float bound) {
    if (!(bound > 0)) return 1;
    const int exponent = static_cast<int>(__float_as_uint(bound) >> 23) - 126; /* bound < 2^exponent */
    return __uint_as_float(static_cast<uint32_t>(min(15 - exponent, 126) + 127) << 23);
}

/* What a lane of a (row, head) needs of memory. */
struct row_operands {
    uint4 out, dout;
    float lse;
    int32_t position; /* -1: the row is in no fragment */
};

/* Reads some row whatever comes of it: a branch would keep the loads of several rows apart. */
template <int D, typename T>
__device__ __forceinline__ row_operands load_row(const row_parameters<T> &a, int64_t row, int32_t head) {
    const int64_t from = row < a.s.row_end ? row : a.s.row_begin;
    const int lane = threadIdx.x % (D / 8);
    row_operands x;
    x.out = __ldg(reinterpret_cast<const uint4 *>(a.out.at(from, head) + 8 * lane));
    x.dout = __ldg(reinterpret_cast<const uint4 *>(a.dout.at(from, head) + 8 * lane));
    x.lse = __ldg(a.lse.at(from, head));
    x.position = __ldg(a.row_position + from);
    if (row >= a.s.row_end) x.position = -1;
    return x;
}

/* dQ's terms are sums of dS k over keys of some blocks, with dS = a (dP - delta). The a of a row sum to 1 and delta is
 * the mean of the dP weighted by them, so the |dS| of a row sum to no more than the deviation of its dP, which is at
 * most |dout| max |v|, and no element of any partial sum exceeds |dout| max |v| max |element of k|. Keys that are not
 * finite do not count: rows that attend to them have no finite gradient. */
template <int D, typename T>
__device__ __forceinline__ void store_row(const row_parameters<T> &a, const row_operands &x, int64_t row, int32_t head,
                                          bool stores) {
    constexpr int lanes = D / 8;
    const uint32_t out_pairs[4] = {x.out.x, x.out.y, x.out.z, x.out.w};
    const uint32_t dout_pairs[4] = {x.dout.x, x.dout.y, x.dout.z, x.dout.w};
    float delta = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 out = unpack_pair(out_pairs[i], T()), dout = unpack_pair(dout_pairs[i], T());
        delta += out.x * dout.x + out.y * dout.y;
        squares += dout.x * dout.x + dout.y * dout.y;
    }
    delta = sum_over<lanes>(delta);
    squares = sum_over<lanes>(squares);
    if (!stores || row > a.s.row_end) return;
    const int64_t place = (row == a.s.row_end ? a.padding_row : row) * a.heads + head;
    const bool there = x.position >= 0;
    const float lse = there ? x.lse : -INFINITY;
    a.values.lse[place] = lse == -INFINITY ? INFINITY : lse * log2_e;
    a.values.delta[place] = there ? delta : 0;
    if (a.values.dq_scale == nullptr) return;
    float bound = 0;
    if (there) {
        const int64_t document = int64_t(a.row_first_block[row]) * a.key_heads + head / (a.heads / a.key_heads);
        bound = sqrtf(squares) * __uint_as_float(a.bounds.v[document]) * __uint_as_float(a.bounds.k[document]);
    }
    a.values.dq_scale[place] = scale_for(bound);
}

/* This thread's part of dQ's sums of a row. */
template <typename T>
__device__ __forceinline__ void clear_sums(const row_parameters<T> &a, int64_t row, int32_t position, uint32_t chunk) {
    if (a.s.sums == nullptr || a.s.alone) return;
    const int32_t stride = a.chunks.count, terms = a.s.row_position == nullptr ? a.s.terms : dense_terms(position);
    uint4 *sums = static_cast<uint4 *>(a.s.sums) + (row - a.s.row_begin) * a.s.terms * a.chunk_sums * stride + chunk;
    for (int32_t j = 0; j < terms * a.chunk_sums; j++)
        sums[int64_t(j) * stride] = make_uint4(0, 0, 0, 0);
}

/* By the first two warps of one thread block, while the others are at work. */
__device__ __forceinline__ void find_items(const item_search &s) {
    if (s.num_items == nullptr || threadIdx.x >= 64) return;
    cut_items(s.work, s.num_items, s.segment_shift);
    if (threadIdx.x == 0) *s.work.ticket = 0;
}

template <typename T, int D>
__global__ void __launch_bounds__(part_threads) row_values_kernel(const __grid_constant__ row_parameters<T> a) {
    wait_for_grid_before();
    allow_next_grid(); /* now: see fmsa_sm90_proxy_list() */
    if (blockIdx.x + blockIdx.y == 0) find_items(a.search);
    const uint32_t chunk = a.chunks.chunk();
    const int32_t head = chunk / (D / 8);
    const bool has_chunk = a.chunks.has_chunk(), stores = has_chunk && threadIdx.x % (D / 8) == 0;
    const int64_t first = a.s.row_begin + a.chunks.first_row();
#pragma unroll 1
    for (int start = 0; start < rows_of_thread; start += rows_at_once) {
        row_operands x[rows_at_once];
#pragma unroll
        for (int i = 0; i < rows_at_once; i++)
            x[i] = load_row<D>(a, first + (start + i) * a.chunks.pass_rows, head);
#pragma unroll
        for (int i = 0; i < rows_at_once; i++) {
            const int64_t row = first + (start + i) * a.chunks.pass_rows;
            store_row<D>(a, x[i], row, head, stores);
            if (has_chunk && row < a.s.row_end) clear_sums(a, row, x[i].position, chunk);
        }
    }
}

/* ---- Dense items. ---- */

struct dense_parameters {
    fmsa_cuda_geometry g;
    dense_group group;
    int32_t proxy_heads, tile_tokens;
    int32_t *counts;
    fmsa_cuda_item *items;
    int32_t *range, *ticket;
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
    allow_next_grid();
    wait_for_grid_before();
    int32_t count = 0;
    for_blocks_of_piece(a, blockIdx.x,
                        [&](bool taken, int32_t, int64_t, int32_t) { count += __syncthreads_count(taken); });
    if (threadIdx.x == 0) a.counts[blockIdx.x] = count;
}

__global__ void __launch_bounds__(part_threads) list_dense_kernel(const __grid_constant__ dense_parameters a) {
    allow_next_grid();
    wait_for_grid_before();
    const int32_t piece = blockIdx.x, count = a.counts[piece];
    int32_t before = 0, total;
    for (int32_t i = threadIdx.x; i < piece; i += part_threads)
        before += a.counts[i];
    block_exclusive_scan<part_threads>(before, 0, add(), total);
    fmsa_cuda_item *items = a.items + int64_t(total) * a.proxy_heads;
    if (piece == gridDim.x - 1 && threadIdx.x == 0) {
        a.range[0] = 0;
        a.range[1] = (total + count) * a.proxy_heads;
        *a.ticket = 0;
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
    row_chunks chunks; /* of a term */
    int64_t total_rows;
    int32_t heads, unit_heads, heads_per_proxy_head;
    float factor;
    fmsa_tensor out;
    bool wait_first;
};

/* Terms of a row's head. */
__device__ __forceinline__ int32_t terms_of(const dq_parameters &a, int64_t row, int32_t head) {
    if (a.s.row_count != nullptr) return a.s.row_count[head / a.heads_per_proxy_head * a.total_rows + row];
    if (a.s.row_position == nullptr) return a.s.terms;
    return dense_terms(a.s.row_position[row]);
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

/* Of a power of two. */
__device__ __forceinline__ float inverse(float scale) {
    return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

/* The first term. */
__device__ __forceinline__ const uint4 *sums_of(const dq_parameters &a, int64_t row) {
    return static_cast<const uint4 *>(a.s.sums) + (row - a.s.row_begin) * a.s.terms * a.chunks.count;
}

/* Where a chunk of a row's sums has its columns. */
struct dq_place {
    int32_t head, column;
};

template <int D, bool half_sums>
__device__ __forceinline__ dq_place place_of(const dq_parameters &a, uint32_t chunk) {
    constexpr uint32_t piece_columns = dq_piece_columns<D, half_sums>, pieces = D / piece_columns;
    constexpr uint32_t columns = half_sums ? 8 : 4, piece_groups = piece_columns / (4 * columns);
    /* [unit][piece][head of the unit][group][4] */
    const uint32_t group = chunk / 4 % piece_groups, line = chunk / (4 * piece_groups);
    const uint32_t unit = line / (pieces * a.unit_heads), piece = line / a.unit_heads % pieces;
    dq_place place;
    place.head = unit * a.unit_heads + line % a.unit_heads;
    /* In rows of odd heads groups have changed places in pairs. */
    place.column = piece * piece_columns + ((group ^ place.head % 2) * 4 + chunk % 4) * columns;
    return place;
}

/* Adds a chunk of sums. */
template <bool half_sums, int columns>
__device__ __forceinline__ void add_chunk(float (&sum)[columns], const uint4 &chunk) {
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

/* Four neighbouring threads have 32 (fp16) or 16 (fp32) neighbouring columns, and exchange them so that they write them
 * in order. */
template <typename T, int D, bool half_sums>
__global__ void __launch_bounds__(part_threads) round_dq_kernel(const __grid_constant__ dq_parameters a) {
    allow_next_grid();
    if (a.wait_first) wait_for_grid_before();
    constexpr int columns = half_sums ? 8 : 4;
    const uint32_t chunk = a.chunks.chunk();
    const dq_place place = place_of<D, half_sums>(a, chunk);
    const view<T> out(static_cast<T *>(a.out.data), a.out.row_stride, a.out.head_stride);
    const int64_t first = a.s.row_begin + a.chunks.first_row();
#pragma unroll 1
    for (int start = 0; start < rows_of_thread; start += rows_at_once) {
        uint4 x[rows_at_once];
        float scale[rows_at_once];
#pragma unroll
        for (int i = 0; i < rows_at_once; i++) {
            /* Some row is read whatever comes of it: a branch would keep the loads of several rows apart. */
            int64_t row = first + (start + i) * a.chunks.pass_rows;
            if (row >= a.s.row_end) row = a.s.row_begin;
            x[i] = __ldcs(sums_of(a, row) + chunk);
            scale[i] = a.s.scale == nullptr ? 1 : __ldg(a.s.scale + row * a.heads + place.head);
        }
#pragma unroll
        for (int i = 0; i < rows_at_once; i++) {
            const int64_t row = first + (start + i) * a.chunks.pass_rows;
            const bool there = a.chunks.has_chunk() && row < a.s.row_end;
            const int32_t terms = there ? terms_of(a, row, place.head) : 0;
            float sum[columns] = {};
            if (terms > 0) add_chunk<half_sums>(sum, x[i]);
#pragma unroll 4
            for (int t = 1; t < terms; t++)
                add_chunk<half_sums>(sum, __ldcs(sums_of(a, row) + int64_t(t) * a.chunks.count + chunk));
            const float factor = a.factor * inverse(scale[i]);
            uint32_t words[columns / 2];
#pragma unroll
            for (int j = 0; j < columns / 2; j++)
                words[j] = pack_pair(sum[2 * j] * factor, sum[2 * j + 1] * factor, T());
            if constexpr (half_sums) {
                const uint4 eighth = gather_eighth(words);
                if (there) *reinterpret_cast<uint4 *>(out.at(row, place.head) + place.column) = eighth;
            } else {
                const uint2 quarter = gather_quarter(words);
                if (there) *reinterpret_cast<uint2 *>(out.at(row, place.head) + place.column) = quarter;
            }
        }
    }
    wait_for_grid_before();
}

/* Calls f with a value of the 16-bit type and the head dimension. */
template <typename F>
static fmsa_status with_half_type_and_dim(const fmsa_config *c, F f) {
    const auto with_dim = [&](auto type) {
        return c->head_dim == 64 ? f(type, constant<64>()) : f(type, constant<128>());
    };
    return c->dtype == FMSA_DTYPE_BF16 ? with_dim(__nv_bfloat16()) : with_dim(__half());
}

} // namespace backward

using namespace backward;

fmsa_status find_key_bounds(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_cuda_geometry &g,
                            const key_bounds &bounds, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const dim3 grid(static_cast<unsigned>(problem->max_key_blocks), c->num_kv_heads);
    return with_half_type_and_dim(c, [&](auto type, auto dim) {
        typedef decltype(type) T;
        return launch("key bounds", key_bounds_kernel<T, decltype(dim)::value>, grid, part_threads, 0, stream,
                      view<const T>(t->k), view<const T>(t->v), g, bounds);
    });
}

fmsa_status find_row_values(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_cuda_geometry &g,
                            const row_values &rows, const key_bounds &bounds, const dq_sums &sums,
                            const item_search &search, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_half_type_and_dim(c, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value;
        row_parameters<T> p = {};
        p.out = view<const T>(t->out);
        p.dout = view<const T>(t->dout);
        p.lse = view<const float>(t->lse);
        p.row_position = g.row_position;
        p.row_first_block = g.row_first_block;
        p.padding_row = c->total_q;
        p.heads = c->num_heads;
        p.key_heads = c->num_kv_heads;
        p.chunks = row_chunks(c->num_heads * (D / 8));
        p.values = rows;
        p.bounds = bounds;
        p.s = sums;
        p.chunk_sums = sums.half_sums ? 1 : 2;
        p.search = search;
        const dim3 grid = p.chunks.grid(sums.row_end - sums.row_begin + 1);
        return launch_close("row values", row_values_kernel<T, D>, grid, part_threads, 0, stream, p);
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
                             int32_t *counts, fmsa_cuda_item *items, int32_t *range, int32_t *ticket,
                             cudaStream_t stream) {
    const int32_t tile_tokens = backward_rows / problem->unit_heads;
    const dense_parameters p = {geometry, group, problem->config.num_proxy_heads, tile_tokens, counts, items,
                                range,    ticket};
    const unsigned grid = static_cast<unsigned>(dense_pieces(group));
    const fmsa_status status = launch_close("dense count", count_dense_kernel, grid, part_threads, 0, stream, p);
    return status != FMSA_OK ? status : launch_close("dense list", list_dense_kernel, grid, part_threads, 0, stream, p);
}

fmsa_status round_dq(const fmsa_problem *problem, const fmsa_tensor &dq, const dq_sums &sums, bool wait_first,
                     cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    dq_parameters p = {};
    p.s = sums;
    p.total_rows = c->total_q;
    p.heads = c->num_heads;
    p.unit_heads = problem->unit_heads;
    p.heads_per_proxy_head = problem->heads_per_proxy_head;
    p.factor = static_cast<float>(c->softmax_scale);
    p.out = dq;
    p.wait_first = wait_first;
    return with_half_type_and_dim(c, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value;
        p.chunks = row_chunks(c->num_heads * (D / (sums.half_sums ? 8 : 4)));
        const dim3 grid = p.chunks.grid(sums.row_end - sums.row_begin);
        const auto kernel = sums.half_sums ? round_dq_kernel<T, D, true> : round_dq_kernel<T, D, false>;
        return launch_close("dq", kernel, grid, part_threads, 0, stream, p);
    });
}

} // namespace fmsa
