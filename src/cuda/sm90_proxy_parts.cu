/* Around the two large kernels of the Hopper proxy loss: the finding of shares, the addition of teacher planes, the
 * terms of dq_proxy added up.
 *
 * Shares: a thread block for each (segment, proxy head) looks at the blocks that the segment's rows can see, twice: it
 * counts, and with the counts of all before it known it writes. Floor of the rest: memory, 256 B a (row, place) once.
 */
#include "scan.cuh"
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

/* ---- Shares ---- */

constexpr int find_threads = 256;

/* The part of a block's list that a segment has: edges, or in dense mode rows. */
struct part_of_list {
    int64_t begin;
    int32_t count;
};

__device__ __forceinline__ part_of_list find_part(const proxy_work &w, int32_t proxy_head, int32_t block,
                                                  int32_t row_begin, int32_t row_end) {
    if (w.dense()) {
        const int32_t number = w.geometry.block_number[block];
        const int32_t begin = max(w.geometry.block_q_begin[block], row_begin);
        const int32_t end = min(w.geometry.block_q_end[block], row_end);
        const bool taken = number >= w.first_block && number < w.first_block + w.places;
        return {begin, taken && begin < end ? end - begin : 0};
    }
    const int64_t *list = w.list_begin + proxy_head * w.max_blocks + block;
    const int32_t *rows = w.edge_row + list[0], count = static_cast<int32_t>(list[1] - list[0]);
    const int32_t first = row_begin == 0 ? 0 : first_at_least(rows, count, row_begin);
    const int32_t end = row_end == w.total_q ? count : first + first_at_least(rows + first, count - first, row_end);
    return {list[0] + first, end - first};
}

/* Tokens of the shares of a list: all about the same, since those of one list may wait for each other. */
__device__ __forceinline__ int32_t share_length(const proxy_work &w, int32_t tokens) {
    const int32_t shares = max((tokens + w.share_rows - 1) / w.share_rows, 1);
    return max((tokens + shares * tile_tokens - 1) / (shares * tile_tokens), 1) * tile_tokens;
}

/* counting: writes the number of shares of each (segment, proxy head). Otherwise: writes the shares. */
__global__ void __launch_bounds__(find_threads)
    find_shares_kernel(const __grid_constant__ proxy_work w, bool counting, bool wait_first) {
    allow_next_grid();
    if (wait_first) wait_for_grid_before();
    const int32_t group = blockIdx.x, proxy_head = group % w.proxy_heads;
    const int32_t row_begin = w.row_begin + group / w.proxy_heads * w.segment_rows;
    const int32_t row_end = min(row_begin + w.segment_rows, w.row_end);
    const int32_t blocks = *w.geometry.num_blocks;
    /* Query ranges of blocks begin and end in ascending order. */
    const int32_t first = first_at_least(w.geometry.block_q_end, blocks, row_begin + 1);
    const int32_t end = first_at_least(w.geometry.block_q_begin, blocks, row_end);
    int32_t before = 0, total;
    if (!counting) {
        for (int32_t i = threadIdx.x; i < group; i += find_threads)
            before += w.group_shares[i];
        block_exclusive_scan<find_threads>(before, 0, add(), total);
        before = total;
    }
    for (int32_t tile = first; tile < end; tile += find_threads) {
        const int32_t block = tile + static_cast<int32_t>(threadIdx.x);
        part_of_list part = {0, 0};
        if (block < end) part = find_part(w, proxy_head, block, row_begin, row_end);
        const int32_t length = share_length(w, part.count);
        const int32_t shares = (part.count + length - 1) / length;
        int32_t place = before + block_exclusive_scan<find_threads>(shares, 0, add(), total);
        before += total;
        if (counting) continue;
        for (int32_t done = 0; done < part.count; done += length) {
            const int32_t count = min(part.count - done, length);
            w.shares[place++] = {part.begin + done, count, block, proxy_head, 0};
        }
    }
    if (threadIdx.x == 0 && counting) w.group_shares[group] = before;
    if (threadIdx.x == 0 && !counting && group == static_cast<int32_t>(gridDim.x) - 1) {
        *w.num_shares = before;
        for (int i = 0; i < TICKETS; i++)
            w.tickets[i] = 0;
    }
    wait_for_grid_before();
}

static fmsa_status launch_find(const proxy_work &w, bool counting, bool wait_first, cudaStream_t stream) {
    const unsigned segments = fmsa_cuda_grid(w.row_end - w.row_begin, w.segment_rows);
    return launch_close("shares of the proxy loss", find_shares_kernel, dim3(segments * w.proxy_heads), find_threads, 0,
                        stream, w, counting, wait_first);
}

fmsa_status count_shares(const proxy_work &w, bool wait_first, cudaStream_t stream) {
    return launch_find(w, true, wait_first, stream);
}

fmsa_status list_shares(const proxy_work &w, bool wait_first, cudaStream_t stream) {
    return launch_find(w, false, wait_first, stream);
}

fmsa_status find_shares(const proxy_work &w, bool wait_first, cudaStream_t stream) {
    FMSA_TRY(count_shares(w, wait_first, stream));
    return list_shares(w, true, stream);
}

/* ---- Sums of dq_proxy. ---- */

constexpr int clearing_threads = 256;

/* Beside the kernels before it: see fmsa_sm90_proxy_prepare(). */
__global__ void __launch_bounds__(clearing_threads) clear_kernel(uint4 *memory, int64_t count) {
    allow_next_grid();
    for (int64_t i = int64_t(blockIdx.x) * clearing_threads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * clearing_threads)
        memory[i] = make_uint4(0, 0, 0, 0);
    wait_for_grid_before();
}

fmsa_status clear_dq_sums(const proxy_work &w, cudaStream_t stream) {
    const int64_t chunks = int64_t(w.row_end - w.row_begin) * w.proxy_heads * w.sum_terms * (vector_length / 8);
    constexpr int chunks_of_thread = 8;
    return launch_close("clearing dq_proxy", clear_kernel,
                        dim3(fmsa_cuda_grid(chunks, clearing_threads * chunks_of_thread)), clearing_threads, 0, stream,
                        reinterpret_cast<uint4 *>(w.dq_sums), chunks);
}

/* ---- Planes of the teacher: added to the first, in order. A half warp a (proxy head, row, place). ---- */

constexpr int vector_threads = 256;

__device__ __forceinline__ void add_halves(uint32_t &sum, uint32_t term) {
    const float2 a = unpack_pair(sum, __half()), b = unpack_pair(term, __half());
    sum = pack_pair(a.x + b.x, a.y + b.y, __half());
}

__global__ void __launch_bounds__(vector_threads)
    add_planes_kernel(const __grid_constant__ proxy_work w, int64_t plane_halves, int32_t planes) {
    constexpr int lanes = vector_length / 8;
    const int64_t rows = w.row_end - w.row_begin, total = rows * w.proxy_heads * w.places * lanes;
    for (int64_t i = int64_t(blockIdx.x) * vector_threads + threadIdx.x; i < total;
         i += int64_t(gridDim.x) * vector_threads) {
        const int64_t vector = i / lanes, row = vector / w.places;
        if (vector % w.places >=
            w.places_of(static_cast<int32_t>(row / rows), w.row_begin + static_cast<int32_t>(row % rows)))
            continue;
        uint4 *first = reinterpret_cast<uint4 *>(w.vectors) + i;
        uint4 sum = *first;
        for (int32_t plane = 1; plane < planes; plane++) {
            const uint4 term = first[plane * plane_halves / 8];
            add_halves(sum.x, term.x);
            add_halves(sum.y, term.y);
            add_halves(sum.z, term.z);
            add_halves(sum.w, term.w);
        }
        *first = sum;
    }
}

fmsa_status add_planes(const proxy_work &w, int64_t plane_halves, int32_t planes, cudaStream_t stream) {
    const int64_t halves = int64_t(w.row_end - w.row_begin) * w.proxy_heads * w.places * vector_length;
    return launch("planes of the teacher", add_planes_kernel, dim3(fmsa_cuda_grid(halves / 8, vector_threads)),
                  vector_threads, 0, stream, w, plane_halves, planes);
}

/* ---- Bounds of the keys: a thread block a (key block, key head). ---- */

constexpr int bound_threads = 256;

template <typename T, int D>
__global__ void __launch_bounds__(bound_threads)
    key_bounds_kernel(view<const T> k, fmsa_cuda_geometry geometry, uint32_t *bounds) {
    constexpr int chunks = D / 8;
    allow_next_grid();
    const int32_t block = blockIdx.x, head = blockIdx.y;
    const int32_t begin = geometry.block_k_begin[block], end = geometry.block_k_end[block];
    float greatest = 0;
    for (int32_t i = threadIdx.x; i < (end - begin) * chunks; i += bound_threads) {
        const uint4 x = *reinterpret_cast<const uint4 *>(k.at(begin + i / chunks, head) + 8 * (i % chunks));
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 two = unpack_pair(pairs[j], T());
            if (isfinite(two.x)) greatest = fmaxf(greatest, fabsf(two.x));
            if (isfinite(two.y)) greatest = fmaxf(greatest, fabsf(two.y));
        }
    }
    const uint32_t all = __reduce_max_sync(0xffffffffu, __float_as_uint(greatest));
    if (threadIdx.x % 32 == 0)
        atomicMax(bounds + int64_t(block - geometry.block_number[block]) * gridDim.y + head, all);
    wait_for_grid_before();
}

fmsa_status find_key_bounds(const fmsa_problem *problem, const fmsa_tensors *tensors,
                            const fmsa_cuda_geometry &geometry, uint32_t *bounds, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_16_bit_type_and_dim(c->dtype, c->proxy_head_dim, [&](auto type, auto dim) {
        typedef decltype(type) T;
        const dim3 grid(static_cast<unsigned>(problem->max_key_blocks), c->num_proxy_kv_heads);
        return launch_close("proxy key bounds", key_bounds_kernel<T, decltype(dim)::value>, grid, bound_threads, 0,
                            stream, view<const T>(tensors->k_proxy), geometry, bounds);
    });
}

/* ---- dq_proxy: Dp / 8 lanes a row of proxy head blockIdx.y add its terms in the order of its places. ---- */

struct term_parameters {
    proxy_work w;
    float *sums;      /* NULL, or what earlier groups have left, and these leave: [proxy heads][rows][Dp] */
    bool first, last; /* of the groups */
    float factor;
    const float *device_factor; /* NULL: 1 */
    fmsa_tensor out;
};

/* Lane 4 * c + t of a row's lanes holds pairs of columns 8 * (4 * c + i) + 2 * t + {0, 1}, i = 0 ... 3. Afterwards it
 * holds pairs 2 * i of the columns from 8 * (4 * c + t) on: a 4 x 4 transpose among neighbouring lanes. */
__device__ __forceinline__ void transpose_pairs(uint32_t (&pair)[4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int step = 1; step < 4; step++) {
        const int other = t ^ step;
        const uint32_t sent = other == 0 ? pair[0] : other == 1 ? pair[1] : other == 2 ? pair[2] : pair[3];
        const uint32_t received = __shfl_xor_sync(0xffffffffu, sent, step);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i == other) pair[i] = received;
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(vector_threads) add_terms_kernel(const __grid_constant__ term_parameters a) {
    constexpr int lanes = D / 8;
    const proxy_work &w = a.w;
    const int64_t number = int64_t(blockIdx.x) * (vector_threads / lanes) + threadIdx.x / lanes;
    const bool there = number < w.row_end - w.row_begin; /* whole warps stay for the transpose */
    const int lane = threadIdx.x % lanes;
    const int32_t proxy_head = blockIdx.y, row = there ? w.row_begin + static_cast<int32_t>(number) : w.row_end - 1;
    const int64_t vector = w.row_number(proxy_head, row);
    const bool summed = w.dq_sums != nullptr;
    const int32_t places = w.places_of(proxy_head, row);
    const int32_t count = summed ? (places + term_places - 1) / term_places : places;
    const int64_t first = vector * (summed ? w.sum_terms : w.places);
    const float *scale = w.numbers + first;
    const uint4 *term =
        reinterpret_cast<const uint4 *>(summed ? w.dq_sums : w.vectors) + first * (vector_length / 8) + lane;
    const float scale_back = summed ? 1 / w.dq_scale(w.geometry.row_first_block[row], proxy_head) : 0;
    const float factor = a.device_factor == nullptr ? a.factor : a.factor * *a.device_factor;
    wait_for_grid_before(); /* for the terms; what is above was there before */
    float4 *kept = reinterpret_cast<float4 *>(a.sums) + (vector * lanes + lane) * 2;
    float sum[8] = {};
    if (!a.first) {
        const float4 low = kept[0], high = kept[1];
        sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
        sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
    }
#pragma unroll 8
    for (int32_t p = 0; p < count; p++) {
        const uint4 x = __ldcs(term + int64_t(p) * (vector_length / 8));
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
        const float back = summed ? scale_back : scale[p];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = unpack_pair(pairs[i], __half());
            sum[2 * i] = fmaf(two.x, back, sum[2 * i]);
            sum[2 * i + 1] = fmaf(two.y, back, sum[2 * i + 1]);
        }
    }
    if (!a.last) {
        if (!there) return;
        kept[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        kept[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        return;
    }
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pair[i] = pack_pair(sum[2 * i] * factor, sum[2 * i + 1] * factor, T());
    transpose_pairs(pair);
    if (!there) return;
    const view<T> out(static_cast<T *>(a.out.data), a.out.row_stride, a.out.head_stride);
    *reinterpret_cast<uint4 *>(out.at(row, proxy_head) + 8 * lane) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

fmsa_status add_terms(const fmsa_problem *problem, const fmsa_tensors *t, const group_memory &group, bool first,
                      bool last, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    term_parameters p = {};
    p.w = group.work;
    p.sums = group.dq;
    p.first = first;
    p.last = last;
    p.factor = static_cast<float>(c->proxy_scale * kl_factor(problem)) / ds_scale_of(problem);
    p.device_factor = static_cast<const float *>(t->grad_kl);
    p.out = t->dq_proxy;
    return with_16_bit_type_and_dim(c->dtype, c->proxy_head_dim, [&](auto type, auto dim) {
        constexpr int D = decltype(dim)::value;
        const int64_t lanes = int64_t(p.w.row_end - p.w.row_begin) * (D / 8);
        const dim3 grid(fmsa_cuda_grid(lanes, vector_threads), p.w.proxy_heads);
        return launch_close("terms of dq_proxy", add_terms_kernel<decltype(type), D>, grid, vector_threads, 0, stream,
                            p);
    });
}

} // namespace fmsa::proxy
