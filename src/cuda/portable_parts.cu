/* Cutting work into chunks and shares, and rounding of fp32 sums. */
#include "portable_parts.cuh"
#include "scan.cuh"

namespace fmsa {

fmsa_status plan_chunk(const fmsa_problem *problem, const char *operation, size_t fixed_bytes, size_t row_bytes,
                       int64_t *rows) {
    constexpr size_t usual_bytes = size_t(5) << 28, gaps = 4096;
    constexpr int64_t least_rows = 128;
    const fmsa_config *c = &problem->config;
    const int64_t least = c->total_q < least_rows ? c->total_q : least_rows;
    const size_t least_bytes = fixed_bytes + gaps + least * row_bytes;
    if (c->scratch_limit != 0 && c->scratch_limit < least_bytes) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE, "scratch_limit is %zu; %s needs at least %zu bytes for these shapes",
                         c->scratch_limit, operation, least_bytes);
    }
    const size_t limit = c->scratch_limit != 0 ? c->scratch_limit : fixed_bytes + gaps + usual_bytes;
    /* Results of a chunk are numbered in 32 bits, and each takes at least 4 bytes. */
    constexpr size_t most_room = size_t(INT32_MAX) * 4;
    const size_t left = limit - fixed_bytes - gaps, room = left < most_room ? left : most_room;
    const int64_t segment = int64_t(1) << fmsa_cuda_segment_shift(problem);
    const int64_t fit = row_bytes == 0 ? c->total_q : static_cast<int64_t>(room / row_bytes);
    if (fit >= c->total_q) {
        *rows = c->total_q;
    } else if (fit >= segment) {
        *rows = fit / segment * segment;
    } else {
        *rows = least_rows;
        while (2 * *rows <= fit)
            *rows *= 2;
    }
    return FMSA_OK;
}

rows_and_blocks find_rows(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_cuda_geometry &memory,
                          cudaStream_t stream, fmsa_status *status) {
    rows_and_blocks found = {};
    found.dense = is_dense(problem);
    if (found.dense) {
        found.geometry = memory;
        *status = fmsa_cuda_build_geometry(problem, memory, stream);
    } else {
        found.schedule = fmsa_cuda_schedule_at(problem, tensors->schedule);
        found.geometry = found.schedule.geometry;
        *status = FMSA_OK;
    }
    return found;
}

work make_work(const fmsa_problem *problem, const fmsa_cuda_geometry &geometry, const fmsa_cuda_schedule *schedule,
               int32_t *cuts, int32_t keys, int32_t unit_heads) {
    /* Long enough that the key sums written at the end of a share do not count, short enough to fill the card; and not
     * more pieces a block than this, so that their number grows with the tokens alone. */
    constexpr int32_t share_rows = 8192, least_piece = 128, most_piece = 1024, most_pieces = 128;
    work w = {};
    w.geometry = geometry;
    if (schedule != nullptr) {
        w.items = schedule->items;
        w.list_begin = schedule->list_begin;
        w.edge_row = schedule->edge_row;
        w.edge_slot = schedule->edge_slot;
    }
    w.max_blocks = problem->max_key_blocks;
    w.block_size = problem->config.block_size;
    w.share_keys = keys;
    w.row_end = static_cast<int32_t>(problem->config.total_q);
    w.piece_rows = share_rows / unit_heads;
    if (w.piece_rows < least_piece) w.piece_rows = least_piece;
    if (w.piece_rows > most_piece) w.piece_rows = most_piece;
    if (w.piece_rows < w.row_end / most_pieces) w.piece_rows = w.row_end / most_pieces;
    w.cuts = cuts;
    w.only_block = -1;
    return w;
}

int64_t max_shares(const fmsa_problem *problem, const work &w) {
    const int64_t rows = w.row_end - w.row_begin;
    if (w.items != nullptr) {
        /* Each (proxy head, block, segment) that has edges leaves at most one item that is not full. */
        const int32_t shift = fmsa_cuda_segment_shift(problem);
        const int64_t segments = rows == 0 ? 0 : ((w.row_end - 1) >> shift) - (w.row_begin >> shift) + 1;
        const int64_t edges = problem->config.num_proxy_heads * (segments << shift) * problem->slots;
        const int64_t runs = problem->config.num_proxy_heads * problem->max_key_blocks * segments;
        const int64_t most = edges / FMSA_CUDA_ITEM_EDGES + (runs < edges ? runs : edges);
        const int64_t all = fmsa_cuda_max_items(problem);
        return most < all ? most : all;
    }
    if (w.only_block >= 0) return problem->config.num_fragments + rows / w.piece_rows;
    return w.max_blocks + rows * problem->max_fragment_blocks / w.piece_rows;
}

/* ---- Cuts: one thread block. ---- */

constexpr int cutting_threads = 1024;

__global__ void __launch_bounds__(cutting_threads) cut_dense_kernel(const __grid_constant__ work w) {
    const fmsa_cuda_geometry &g = w.geometry;
    const int32_t blocks = *g.num_blocks;
    int32_t begin = 0;
    for (int64_t first = 0; first < w.max_blocks; first += cutting_threads) {
        const int64_t block = first + threadIdx.x;
        int32_t pieces = 0;
        if (block < blocks && (w.only_block < 0 || g.block_number[block] == w.only_block)) {
            const int32_t rows = min(g.block_q_end[block], w.row_end) - max(g.block_q_begin[block], w.row_begin);
            pieces = rows <= 0 ? 0 : (rows + w.piece_rows - 1) / w.piece_rows;
        }
        int32_t total;
        const int32_t before = block_exclusive_scan<cutting_threads>(pieces, 0, add(), total);
        if (block < w.max_blocks) w.cuts[block] = begin + before;
        begin += total;
    }
    if (threadIdx.x == 0) w.cuts[w.max_blocks] = begin;
}

__global__ void __launch_bounds__(64)
    cut_sparse_kernel(const __grid_constant__ work w, const int32_t *num_items, int shift) {
    cut_items(w, num_items, shift);
}

fmsa_status cut_shares(const fmsa_problem *problem, const work &w, const int32_t *num_items, cudaStream_t stream) {
    if (w.items == nullptr) return launch("cutting", cut_dense_kernel, dim3(1), cutting_threads, 0, stream, w);
    return launch("cutting", cut_sparse_kernel, dim3(1), 64, 0, stream, w, num_items, fmsa_cuda_segment_shift(problem));
}

/* ---- Rounding: a thread takes the four columns that stand together, of the head blockIdx.y of what number blockIdx.z
 * names, in several rows at once. It is bound by memory: each sum is read once. ---- */

constexpr int rounding_threads = 256, rounded_at_once = 4;

struct roundings {
    rounding number[most_roundings];
};

/* Of r.terms, those in use. */
__device__ __forceinline__ int terms_of(const rounding &r, int64_t head, int64_t row) {
    if (r.counts == nullptr) return r.terms;
    return r.counts[head / r.heads_per_count * r.count_stride + row] * r.terms_per_count;
}

template <typename T>
__global__ void __launch_bounds__(rounding_threads) round_kernel(const __grid_constant__ roundings all) {
    const rounding &r = all.number[blockIdx.z];
    const uint32_t quads = r.dim / 4, block_rows = rounding_threads / quads;
    const int64_t head = blockIdx.y;
    if (head >= r.heads) return;
    const int place = static_cast<int>(threadIdx.x % quads) * 4;
    const float factor = r.device_factor == nullptr ? r.factor : r.factor * *r.device_factor;
    const view<T> out(static_cast<T *>(r.out.data), r.out.row_stride, r.out.head_stride);
    for (int64_t first = int64_t(blockIdx.x) * block_rows * rounded_at_once + threadIdx.x / quads; first < r.rows;
         first += int64_t(gridDim.x) * block_rows * rounded_at_once) {
        const float *sums[rounded_at_once];
        int terms[rounded_at_once], most = 0;
#pragma unroll
        for (int u = 0; u < rounded_at_once; u++) {
            const int64_t i = first + u * block_rows;
            sums[u] = r.sums + (i * r.heads + head) * r.terms * r.dim + place;
            terms[u] = i < r.rows ? terms_of(r, head, r.first_row + i) : 0;
            most = max(most, terms[u]);
        }
        float4 sum[rounded_at_once] = {};
        for (int t = 0; t < most; t++) {
#pragma unroll
            for (int u = 0; u < rounded_at_once; u++) {
                if (t >= terms[u]) continue;
                const float4 term = __ldcs(reinterpret_cast<const float4 *>(sums[u] + int64_t(t) * r.dim));
                sum[u] = {sum[u].x + term.x, sum[u].y + term.y, sum[u].z + term.z, sum[u].w + term.w};
            }
        }
#pragma unroll
        for (int u = 0; u < rounded_at_once; u++) {
            const int64_t i = first + u * block_rows;
            if (i >= r.rows) continue;
            T *target = out.at(r.first_row + i, head) + sum_column(place);
            store_pair<T>(target, sum[u].x * factor, sum[u].y * factor);
            store_pair<T>(target + 8, sum[u].z * factor, sum[u].w * factor);
        }
    }
}

fmsa_status round_sums(const rounding *of, int count, cudaStream_t stream) {
    if (count == 0) return FMSA_OK;
    roundings all = {};
    int64_t quads = 0, heads = 0;
    for (int i = 0; i < count; i++) {
        const rounding &r = all.number[i] = of[i];
        if (quads < r.rows * (r.dim / 4)) quads = r.rows * (r.dim / 4);
        if (heads < r.heads) heads = r.heads;
    }
    return with_type(of->dtype, [&](auto type) {
        const dim3 grid(fmsa_cuda_grid(quads, rounding_threads * rounded_at_once), static_cast<unsigned>(heads),
                        static_cast<unsigned>(count));
        return launch("round_sums", round_kernel<decltype(type)>, grid, rounding_threads, 0, stream, all);
    });
}

} // namespace fmsa
