/* What the parts of the Hopper backward share: the parameters of its main kernel, and how dQ lies in scratch while its
 * terms come in. */
#ifndef FMSA_CUDA_SM90_BACKWARD_CUH
#define FMSA_CUDA_SM90_BACKWARD_CUH

#include <cuda.h>

#include "launch.h"
#include "schedule.h"

namespace fmsa {

constexpr int backward_keys = 128; /* of a block */
constexpr int backward_rows = 64;  /* of a tile: rows are (token, head of the unit) */

/* What is known of a row, and of a padding row: index total_q of these arrays of [total_q + 1][heads]. */
struct row_values {
    float *lse;      /* times log2(e); +inf where the row has no keys: its probabilities are then 0 */
    float *delta;    /* sum of dout * out */
    float *dq_scale; /* power of two that dQ is summed under in fp16; NULL where it is summed in fp32 */
};

/* dQ's terms come from the accumulators of a product and lie in scratch as
 *     [query row of the chunk][term][unit][piece][head of the unit][piece columns],
 * so that what one token's rows in a tile leave is contiguous for each piece. A piece is 256 bytes: 64 columns in fp32,
 * 128 (or the 64 there are) in fp16. Within it stand chunks of 16 bytes, one to a thread:
 *     fp32: chunk 4 * i + t has columns 16 * i + 2 * t + {0, 1, 8, 9};
 *     fp16: chunk 4 * i + t has columns 32 * i + 2 * t + {0, 1, 8, 9, 16, 17, 24, 25};
 * and in rows of odd heads chunk c changes places with c ^ 4, so that a warp's stores meet no bank twice.
 * fp16 sums are those of dQ times the row's dq_scale, which bounds them: see row_values_kernel. */
template <int D, bool half_sums>
constexpr int dq_piece_columns = half_sums ? D : 64;

/* Sums of more blocks than this are cut into terms where they are fp16. Of random terms, fp16 sums of 64 err by 1.2e-3,
 * which is less than the 1.7e-3 of dQ's own rounding to bf16; for dQ in fp16 it would be too much. */
constexpr int dq_term_blocks = 64;

/* A tensor of rows of 16-bit elements. */
struct row_view {
    const void *data;
    int64_t row_stride, head_stride;
};

struct backward_parameters {
    /* Not gathered: [64, 8, D / 64, Hq / 8, Tq], so that heads come in groups of eight; boxes of one token of a unit,
     * {64, 8, D / 64, unit_heads / 8, 1}, and for neighbouring tokens of tile_tokens of them. */
    CUtensorMap q_token, dout_token, q_tile, dout_tile;
    CUtensorMap k, v; /* [D, Hkv, Tk], boxes {64, 1, 128} */
    bool in_fours;    /* unit_heads is a multiple of 4 only: {64, 4, 1, 1, 1} of [64, 4, D / 64, Hq / 4, Tq] instead */
    bool gathered;    /* it is none of 4: rows are copied one by one */
    row_view q, dout; /* gathered */

    /* Work: items item_range[0] ... item_range[1] - 1, claimed in order through *ticket. In dense mode (edge_row NULL)
     * an item's edges are the neighbouring query rows edge_begin, edge_begin + 1, ... */
    const fmsa_cuda_item *items;
    const int32_t *item_range;
    int32_t *ticket;
    const int32_t *edge_row, *edge_slot;
    const int64_t *list_begin;
    const int32_t *block_k_begin, *block_k_end, *block_number, *block_q_begin, *row_position;
    int64_t max_blocks;
    int32_t row_begin, row_end; /* the chunk */
    int32_t total_q;

    int32_t heads, unit_heads, units, units_per_proxy_head, units_per_key_head;
    int32_t tile_tokens;  /* 64 / unit_heads */
    int32_t token_factor; /* row * token_factor >> 16 is row / unit_heads, for rows of a tile */
    float scale_log2;     /* softmax_scale * log2(e) */
    row_values rows;

    void *dq; /* NULL, or the sums */
    /* Of a row: 1; or one for each slot; or in dense mode one for each dq_term_blocks neighbouring blocks. */
    int32_t dq_terms;
    bool dq_alone; /* each block has a term of its own, which is written; else blocks add up */
    /* NULL: in any order. Or, for fp32 sums in dense mode, [rows of the chunk][units][4], 0 at first: at the first row
     * of each tile one more than the number of the last block added. */
    int32_t *dq_turns;

    float *dk, *dv;     /* NULL, or fp32 sums [Tk][key_sum_heads][D] as work.cuh has them */
    int32_t sum_heads;  /* key heads, or units where each has sums of its own */
    int32_t *key_turns; /* NULL, or [units][max_blocks][2]: edges of the list that have been added to a half's keys */

    /* NULL, or where w goes: fp16 pairs, see sm90_proxy.h. */
    uint32_t *teacher;
    int64_t teacher_plane; /* pairs from one unit's plane to the next */
    int32_t first_place, places;
    float teacher_factor; /* of the sum of a token's probabilities */
};

/* Launches the main kernel on every multiprocessor. half_sums: dQ in fp16. */
template <typename T, int D>
fmsa_status launch_backward(const backward_parameters &p, bool half_sums, cudaStream_t stream);

} // namespace fmsa

#endif
