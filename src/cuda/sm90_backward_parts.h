/* What surrounds the main kernel of the Hopper backward: values of each row before it, the list of work in dense mode,
 * the rounding of dQ after it. */
#ifndef FMSA_CUDA_SM90_BACKWARD_PARTS_H
#define FMSA_CUDA_SM90_BACKWARD_PARTS_H

#include "portable_parts.cuh"
#include "sm90_backward.cuh"

namespace fmsa {

/* Greatest |v| (Euclidean) and greatest |element of k| of a document's finite keys, by (its first block id, key head):
 * bits of floats that are not negative, so that they compare as integers. */
struct key_bounds {
    uint32_t *v, *k; /* [max_key_blocks][Hkv] each, k behind v */
};

/* bounds are 0 at first. */
fmsa_status find_key_bounds(const fmsa_problem *problem, const fmsa_tensors *tensors,
                            const fmsa_cuda_geometry &geometry, const key_bounds &bounds, cudaStream_t stream);

/* Work of the dense mode: the blocks numbered first_block ... first_block + places - 1 of all documents, by the rows
 * row_begin ... row_end - 1. */
struct dense_group {
    int64_t row_begin, row_end;
    int32_t first_block, places;
    int32_t piece_rows; /* an item has the rows of a block that lie in one piece of so many */
};

/* piece_rows for a group of such a size. */
int32_t dense_piece_rows(const fmsa_problem *problem, int64_t rows, int32_t places);
int64_t max_dense_items(const fmsa_problem *problem, const dense_group &group);

/* Fills items, piece after piece so that their rows meet in L2; within one by proxy head, then by block id; and range
 * with 0 and their number; sets the ticket to 0. counts: room for a number for each piece. */
fmsa_status list_dense_items(const fmsa_problem *problem, const fmsa_cuda_geometry &geometry, const dense_group &group,
                             int32_t *counts, fmsa_cuda_item *items, int32_t *range, int32_t *ticket,
                             cudaStream_t stream);
inline int64_t dense_pieces(const dense_group &group) {
    return fmsa_ceil_div(group.row_end - group.row_begin, group.piece_rows);
}

/* dQ's sums of the rows of a chunk. */
struct dq_sums {
    void *sums; /* NULL: dQ is not wanted */
    bool half_sums;
    bool alone;                  /* terms are written, not added up */
    int32_t terms;               /* of a row, at most; see backward_parameters */
    const int32_t *row_count;    /* NULL, or how many (proxy head, row) has */
    const int32_t *row_position; /* NULL, or the position that says how many a row has in dense mode */
    const float *scale;          /* fp16: dq_scale of all rows */
    int64_t row_begin, row_end;
};

/* The items of a chunk in sparse mode, to be found (cut_items()) in work.cuts; its ticket becomes 0. */
struct item_search {
    struct work work;
    const int32_t *num_items; /* NULL: there is nothing to find */
    int segment_shift;
};

/* Fills the values of a chunk's rows and of the padding row, clears dQ's sums unless they are written, and finds items
 * on the way. May start while the grid before it ends, and so may the next. */
fmsa_status find_row_values(const fmsa_problem *problem, const fmsa_tensors *tensors,
                            const fmsa_cuda_geometry &geometry, const row_values &rows, const key_bounds &bounds,
                            const dq_sums &sums, const item_search &search, cudaStream_t stream);

/* sums -> dq. wait_first: whether the kernel before it has a part in the sums; otherwise this may run beside it, if it
 * lets the next begin when all before it is complete. */
fmsa_status round_dq(const fmsa_problem *problem, const fmsa_tensor &dq, const dq_sums &sums, bool wait_first,
                     cudaStream_t stream);

} // namespace fmsa

#endif
