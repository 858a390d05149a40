/* What the portable operations share on the host's side: the choice of a kernel by type and head dimension, the cutting
 * into chunks, and the parts that one operation lends to another. */
#ifndef FMSA_CUDA_PORTABLE_PARTS_CUH
#define FMSA_CUDA_PORTABLE_PARTS_CUH

#include "launch.h"
#include "work.cuh"

namespace fmsa {

/* Shared memory that a block of any kernel of this family may take, static and dynamic: compute capability 8.6, 8.9 and
 * 12.0 have no more to give. */
constexpr int most_shared_bytes = 99 * 1024;

template <int n>
struct constant {
    static constexpr int value = n;
};

/* Calls f with a value of the element type. FP64 is refused before it comes here. */
template <typename F>
fmsa_status with_type(fmsa_dtype dtype, F f) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        return f(__nv_bfloat16());
    case FMSA_DTYPE_FP16:
        return f(__half());
    default:
        return f(float());
    }
}

/* The same with the head dimension as a constant. */
template <typename F>
fmsa_status with_type_and_dim(fmsa_dtype dtype, int dim, F f) {
    return with_type(dtype, [&](auto type) {
        if (dim == 64) return f(type, constant<64>());
        return f(type, constant<128>());
    });
}

inline bool in_order(const fmsa_problem *problem) {
    return problem->config.flags & FMSA_FLAG_DETERMINISTIC;
}

inline bool is_dense(const fmsa_problem *problem) {
    return problem->config.mode == FMSA_MODE_DENSE;
}

inline fmsa_status clear(void *memory, size_t bytes, cudaStream_t stream) {
    return bytes == 0 ? FMSA_OK : fmsa_cuda_status("clearing scratch", cudaMemsetAsync(memory, 0, bytes, stream));
}

/* Query rows of a chunk such that fixed_bytes + rows * row_bytes (and the gaps between pieces of memory) fit in
 * scratch_limit, or in about a gigabyte more than the fixed part if there is no limit. All rows if they fit; else whole
 * segments of the schedule, or a power of two of rows if no segment fits, so that chunks cut no more items than they
 * must. */
fmsa_status plan_chunk(const fmsa_problem *problem, const char *operation, size_t fixed_bytes, size_t row_bytes,
                       int64_t *rows);

/* Keys of a share: a whole block, or part of it where fp32 would not fit in shared memory otherwise. */
inline int32_t share_keys(const fmsa_problem *problem, int32_t most_fp32) {
    const int32_t block = problem->config.block_size;
    return problem->config.dtype == FMSA_DTYPE_FP32 && block > most_fp32 ? most_fp32 : block;
}

/* The gradient kernels' keys a share, and the parts that they cut a block into. */
template <typename T>
constexpr int most_gradient_keys = sizeof(T) == 2 ? 128 : 64;
inline int32_t gradient_keys(const fmsa_problem *problem) {
    return share_keys(problem, most_gradient_keys<float>);
}
inline int32_t gradient_parts(const fmsa_problem *problem) {
    return problem->config.block_size / gradient_keys(problem);
}

/* Sums that a query row's gradient has: one that grows, or one for each (slot, part). */
inline int32_t row_terms(const fmsa_problem *problem) {
    return in_order(problem) && !is_dense(problem) ? problem->slots * gradient_parts(problem) : 1;
}

/* The geometry, and in sparse mode the schedule that it is part of. */
struct rows_and_blocks {
    fmsa_cuda_geometry geometry;
    fmsa_cuda_schedule schedule;
    bool dense;

    const fmsa_cuda_schedule *sparse() const {
        return dense ? nullptr : &schedule;
    }
};

/* In dense mode the geometry is built in `memory`. */
rows_and_blocks find_rows(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_cuda_geometry &memory,
                          cudaStream_t stream, fmsa_status *status);

/* The work over all rows. schedule is NULL in dense mode. cuts: see cuts_count. unit_heads: query heads that a row of
 * it stands for. */
work make_work(const fmsa_problem *problem, const fmsa_cuda_geometry &geometry, const fmsa_cuda_schedule *schedule,
               int32_t *cuts, int32_t keys, int32_t unit_heads);

/* Numbers that work.cuts has room for. */
inline int64_t cuts_count(const fmsa_problem *problem) {
    return is_dense(problem) ? problem->max_key_blocks + 1 : 2;
}

/* Enqueues the finding of w's shares: before each launch with another chunk or other blocks. */
fmsa_status cut_shares(const fmsa_problem *problem, const work &w, const int32_t *num_items, cudaStream_t stream);

/* Calls f with w and the parts of each block that it is to launch. In dense mode, one_by_one takes one block number and
 * one part of the blocks after the other, so that every row gets one addition a launch. */
template <typename F>
fmsa_status launch_shares(const fmsa_problem *problem, work w, const int32_t *num_items, bool one_by_one,
                          cudaStream_t stream, F f) {
    const int32_t parts = w.block_size / w.share_keys;
    fmsa_status status = FMSA_OK;
    for (int64_t i = 0; i < (one_by_one ? problem->max_fragment_blocks : 1) && status == FMSA_OK; i++) {
        w.only_block = one_by_one ? static_cast<int32_t>(i) : -1;
        status = cut_shares(problem, w, num_items, stream);
        for (w.first_part = 0; w.first_part < (one_by_one ? parts : 1) && status == FMSA_OK; w.first_part++) {
            status = f(w, one_by_one ? 1 : parts);
        }
    }
    return status;
}

/* Numbers of the shares of w, an upper bound: grid.x. */
int64_t max_shares(const fmsa_problem *problem, const work &w);

/* Softmax attention of `heads` query heads. Without v only the LSE is computed. */
struct attention {
    int32_t dim;
    int32_t heads, key_heads;
    double scale;
    fmsa_tensor q, k, v, out;
    float *lse;
    int64_t lse_row_stride, lse_head_stride;
};

/* Bytes of partial results that a query row leaves, for attend_chunk. */
size_t partial_row_bytes(const fmsa_problem *problem, const attention &a);

/* Sparse: rows row_begin ... row_end - 1. partials has room for them; cuts: see cuts_count. */
fmsa_status attend_chunk(const fmsa_problem *problem, const attention &a, const fmsa_cuda_schedule &schedule,
                         int64_t row_begin, int64_t row_end, int32_t *cuts, void *partials, cudaStream_t stream);

/* Dense: all rows. */
fmsa_status attend_dense(const fmsa_problem *problem, const attention &a, const fmsa_cuda_geometry &geometry,
                         cudaStream_t stream);

/* Rounds fp32 sums (work.cuh) to a tensor: out[row][head] = factor * the sum of `terms` rows of sums, in order, of
 * which counts (if not NULL; [heads / heads_per_count][all rows]) * terms_per_count are used. */
struct rounding {
    const float *sums; /* [rows][heads][terms][dim] */
    int64_t first_row, rows, heads;
    int32_t dim, terms;
    const int32_t *counts;
    int64_t count_stride;
    int32_t heads_per_count, terms_per_count;
    float factor;
    const float *device_factor; /* NULL, or one more factor */
    fmsa_tensor out;
    fmsa_dtype dtype; /* of out */
};

constexpr int most_roundings = 3;

/* Up to most_roundings of one type, in one launch. */
fmsa_status round_sums(const rounding *roundings, int count, cudaStream_t stream);

} // namespace fmsa

#endif
