/* The geometry: where each key block and each query row belongs, from the fragment arrays on the device.
 *
 * Two steps. One thread block scans the fragments in order: since documents ascend and do not overlap, the greatest
 * key end so far says how many key blocks of its document a fragment is the first to see. Then one thread for each
 * block id and each query row finds its fragment by bisection and writes its entries. Up to 1,024 fragments, both are
 * one launch: every thread block scans for itself, into shared memory (8 KB).
 *
 * Floor: the fragment arrays once, the geometry's arrays once; in practice the launches. Measured on an H200: 4.7 us
 * for one document of 65,536 tokens. */
#include "launch.h"
#include "scan.cuh"
#include "schedule.h"

namespace {

/* The fragment arrays, cut to what the call's shapes allow so that wrong ones cannot lead out of an array. */
struct fragments {
    const int32_t *q_begin, *q_end, *k_begin, *k_end;
    int32_t count, total_q, total_k, max_keys;

    static __device__ int32_t cut(int32_t x, int32_t least, int32_t most) {
        return min(max(x, least), most);
    }
    __device__ int32_t first_query(int f) const {
        return cut(q_begin[f], 0, total_q);
    }
    __device__ int32_t query_end(int f) const {
        return cut(q_end[f], 0, total_q);
    }
    __device__ int32_t first_key(int f) const {
        return cut(k_begin[f], 0, total_k);
    }
    __device__ int32_t key_end(int f) const {
        const int32_t first = first_key(f);
        return cut(k_end[f], first, first + min(max_keys, total_k - first));
    }

    /* Whether f breaks the rules of the public header; the fragments before it have keys up to keys_before. */
    __device__ bool breaks_rules(int f, int32_t keys_before) const {
        const bool in_order = f == 0 || q_begin[f] >= q_end[f - 1];
        const bool document = f == 0 || k_begin[f] == k_begin[f - 1] || k_begin[f] >= keys_before;
        const bool has_keys = key_end(f) - first_key(f) >= (int64_t)q_end[f] - q_begin[f];
        return !in_order || !document || !has_keys || q_begin[f] > q_end[f] || k_begin[f] > k_end[f];
    }
};

/* The first of 0 ... count - 1 that the predicate holds for, or count: false must not follow true. */
template <typename Predicate>
__device__ int first_where(int count, Predicate predicate) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (predicate(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

constexpr int scan_threads = 1024, fragments_per_thread = 8, few_fragments = 1024;

/* Fragment f's document has blocks_to(key_end[f]) blocks up to f, and had blocks_to(key_end[f - 1]) before it. */
__device__ int32_t blocks_to(int32_t key_end, int32_t k_begin, int32_t block_size) {
    const int32_t keys = key_end - k_begin;
    return keys <= 0 ? 0 : (keys - 1) / block_size + 1;
}

/* Fills fragment_first_new, fragment_key_end and num_blocks. Called by the scan_threads threads of a thread block. */
__device__ void scan(const fragments &fragments, const fmsa_cuda_geometry &geometry, int32_t max_blocks,
                     int32_t block_size) {
    int32_t keys_so_far = 0, blocks_so_far = 0;
    bool broken = false;
    for (int64_t tile = 0; tile < fragments.count; tile += scan_threads * fragments_per_thread) {
        const int64_t begin = tile + threadIdx.x * fragments_per_thread;
        const int first = (int)min(begin, (int64_t)fragments.count);
        const int end = (int)min(begin + fragments_per_thread, (int64_t)fragments.count);
        int32_t greatest_end = 0, tile_greatest, tile_blocks, blocks = 0;
        for (int f = first; f < end; f++)
            greatest_end = max(greatest_end, fragments.key_end(f));
        const int32_t end_before = max(
            keys_so_far, fmsa::block_exclusive_scan<scan_threads>(greatest_end, 0, fmsa::greatest(), tile_greatest));
        int32_t key_end = end_before;
        for (int f = first; f < end; f++) {
            const int32_t k_begin = fragments.first_key(f), previous_end = key_end;
            const bool same_document = f > 0 && fragments.first_key(f - 1) == k_begin;
            broken |= fragments.breaks_rules(f, previous_end);
            key_end = max(key_end, fragments.key_end(f));
            const int32_t seen = same_document ? blocks_to(previous_end, k_begin, block_size) : 0;
            geometry.fragment_key_end[f] = key_end;
            geometry.fragment_first_new[f] = blocks;
            blocks += max(blocks_to(key_end, k_begin, block_size) - seen, 0);
        }
        const int32_t blocks_before =
            blocks_so_far + fmsa::block_exclusive_scan<scan_threads>(blocks, 0, fmsa::add(), tile_blocks);
        for (int f = first; f < end; f++) {
            geometry.fragment_first_new[f] = min(geometry.fragment_first_new[f] + blocks_before, max_blocks);
        }
        keys_so_far = max(keys_so_far, tile_greatest);
        blocks_so_far = min(blocks_so_far + tile_blocks, max_blocks);
    }
    broken = __syncthreads_or(broken);
    if (threadIdx.x == 0) *geometry.num_blocks = broken ? 0 : blocks_so_far;
}

/* Blocks of f's document that fragments before f see. */
__device__ int32_t blocks_seen_before(const fragments &fragments, const fmsa_cuda_geometry &geometry, int f,
                                      int32_t block_size) {
    const int32_t k_begin = fragments.first_key(f);
    if (f == 0 || fragments.first_key(f - 1) != k_begin) return 0;
    return blocks_to(geometry.fragment_key_end[f - 1], k_begin, block_size);
}

__device__ int32_t document_first_block(const fragments &fragments, const fmsa_cuda_geometry &geometry, int f,
                                        int32_t block_size) {
    return max(geometry.fragment_first_new[f] - blocks_seen_before(fragments, geometry, f, block_size), 0);
}

__device__ void fill_block(const fragments &fragments, const fmsa_cuda_geometry &geometry, int32_t id,
                           int32_t block_size) {
    int32_t k_begin = 0, k_end = 0, number = 0, q_begin = 0, q_end = 0;
    if (id < *geometry.num_blocks) {
        /* The first fragment to see the block: its rows are the first that do. */
        const int first =
            max(first_where(fragments.count, [&](int f) { return geometry.fragment_first_new[f] > id; }) - 1, 0);
        const int32_t document = fragments.first_key(first);
        /* The last fragment of the document knows where the document ends. */
        const int last =
            max(first_where(fragments.count, [&](int f) { return fragments.first_key(f) > document; }) - 1, first);
        number = id - document_first_block(fragments, geometry, first, block_size);
        const int64_t begin = document + (int64_t)number * block_size;
        const int32_t document_end = geometry.fragment_key_end[last];
        k_begin = (int32_t)min(begin, (int64_t)document_end);
        k_end = (int32_t)min(begin + block_size, (int64_t)document_end);
        const int32_t first_row = fragments.first_query(first), row_end = fragments.query_end(first);
        const int32_t context = (fragments.key_end(first) - document) - (row_end - first_row);
        q_begin = min(first_row + max(k_begin - document - context, 0), row_end);
        q_end = max(fragments.query_end(last), q_begin);
    }
    geometry.block_k_begin[id] = k_begin;
    geometry.block_k_end[id] = k_end;
    geometry.block_number[id] = number;
    geometry.block_q_begin[id] = q_begin;
    geometry.block_q_end[id] = q_end;
}

__device__ void fill_row(const fragments &fragments, const fmsa_cuda_geometry &geometry, int32_t row,
                         int32_t block_size) {
    const int f = first_where(fragments.count, [&](int g) { return fragments.query_end(g) > row; });
    int32_t position = -1, first_block = 0;
    if (f < fragments.count && fragments.first_query(f) <= row) {
        const int32_t keys = fragments.key_end(f) - fragments.first_key(f);
        position = max(keys - (fragments.query_end(f) - row), -1);
        first_block = document_first_block(fragments, geometry, f, block_size);
        if (first_block >= *geometry.num_blocks) position = -1; /* the fragments break the rules */
    }
    geometry.row_position[row] = position;
    geometry.row_first_block[row] = position < 0 ? 0 : first_block;
}

/* Element `index` of the arrays of blocks and then of rows. */
__device__ void fill(const fragments &fragments, const fmsa_cuda_geometry &geometry, int64_t index, int32_t max_blocks,
                     int32_t block_size) {
    if (index < max_blocks) {
        fill_block(fragments, geometry, (int32_t)index, block_size);
    } else if (index - max_blocks < fragments.total_q) {
        fill_row(fragments, geometry, (int32_t)(index - max_blocks), block_size);
    }
}

__global__ void __launch_bounds__(scan_threads)
    scan_fragments(fragments fragments, fmsa_cuda_geometry geometry, int32_t max_blocks, int32_t block_size) {
    scan(fragments, geometry, max_blocks, block_size);
}

constexpr int fill_threads = 256;

__global__ void __launch_bounds__(fill_threads)
    fill_geometry(fragments fragments, fmsa_cuda_geometry geometry, int32_t max_blocks, int32_t block_size) {
    fill(fragments, geometry, (int64_t)blockIdx.x * fill_threads + threadIdx.x, max_blocks, block_size);
}

__global__ void __launch_bounds__(scan_threads)
    scan_and_fill(fragments fragments, fmsa_cuda_geometry geometry, int32_t max_blocks, int32_t block_size) {
    __shared__ int32_t first_new[few_fragments], key_end[few_fragments], num_blocks;
    fmsa_cuda_geometry own = geometry;
    own.fragment_first_new = first_new;
    own.fragment_key_end = key_end;
    own.num_blocks = &num_blocks;
    scan(fragments, own, max_blocks, block_size);
    __syncthreads();
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) *geometry.num_blocks = num_blocks;
        for (int f = threadIdx.x; f < fragments.count; f += scan_threads) {
            geometry.fragment_first_new[f] = first_new[f];
            geometry.fragment_key_end[f] = key_end[f];
        }
    }
    fill(fragments, own, (int64_t)blockIdx.x * scan_threads + threadIdx.x, max_blocks, block_size);
}

} // namespace

extern "C" fmsa_status fmsa_cuda_build_geometry(const fmsa_problem *problem, fmsa_cuda_geometry geometry,
                                                cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const fragments fragments = {c->q_begin,
                                 c->q_end,
                                 c->k_begin,
                                 c->k_end,
                                 (int32_t)c->num_fragments,
                                 (int32_t)c->total_q,
                                 (int32_t)c->total_k,
                                 (int32_t)c->max_seqlen_k};
    const int32_t max_blocks = (int32_t)problem->max_key_blocks;
    const int64_t elements = max_blocks + c->total_q;
    if (c->num_fragments <= few_fragments) {
        const unsigned blocks = fmsa_cuda_grid(elements > 0 ? elements : 1, scan_threads); /* num_blocks at least */
        return fmsa::launch("scan_and_fill", scan_and_fill, dim3(blocks), scan_threads, 0, stream, fragments, geometry,
                            max_blocks, c->block_size);
    }
    FMSA_TRY(fmsa::launch("scan_fragments", scan_fragments, dim3(1), scan_threads, 0, stream, fragments, geometry,
                          max_blocks, c->block_size));
    return fmsa::launch("fill_geometry", fill_geometry, dim3(fmsa_cuda_grid(elements, fill_threads)), fill_threads, 0,
                        stream, fragments, geometry, max_blocks, c->block_size);
}
