/* The proxy loss on Hopper, as the backward pass calls it: student LSE, then from the teacher that the main backward
 * has left: dq_proxy, dk_proxy, the KL value.
 *
 * Work is cut twice. A *chunk* is a range of query rows, any range; chunks follow one another. In sparse mode a row's
 * *places* are its slots, and a chunk takes all of them at once. In dense mode a row's places are the key blocks of a
 * *group*: the blocks number first_block ... first_block + places - 1 of every document; the groups of a chunk follow
 * one another, ascending, from 0 to at least problem->max_fragment_blocks. So the teacher of a (chunk, group) is a
 * table of bounded size whatever the length, and needs no search: no T x T, and the same index in both modes.
 *
 * A backward pass does, all on one stream:
 *
 *     fmsa_sm90_proxy p = fmsa_sm90_proxy_at(problem, tensors, memory);           // fmsa_sm90_proxy_bytes
 *     clear p.sums
 *     FMSA_TRY(fmsa_sm90_proxy_begin(problem, tensors, &p, geometry, schedule, stream));
 *     for each chunk, for each group of it:
 *         group = {row_begin, row_end, first_block, places}
 *         fmsa_sm90_teacher t = fmsa_sm90_proxy_teacher(problem, &p, &group, chunk_memory, planes); // ..._group_bytes
 *         FMSA_TRY(fmsa_sm90_proxy_prepare(problem, tensors, &p, &group, chunk_memory, planes, stream));
 *         FMSA_TRY(fmsa_sm90_proxy_list(problem, tensors, &p, &group, chunk_memory, planes, wait_first, stream));
 *         the main backward over the group writes w to t.w
 *         FMSA_TRY(fmsa_sm90_proxy_from_teacher(problem, tensors, &p, &group, chunk_memory, planes, stream));
 *         FMSA_TRY(fmsa_sm90_proxy_add(problem, tensors, &p, &group, chunk_memory, planes, stream));
 *     FMSA_TRY(fmsa_sm90_proxy_finish_kl(problem, tensors, stream));
 *     round fmsa_sm90_proxy_dk(problem, tensors, &p)
 *
 * dq_proxy of a chunk's rows is written by the add of the chunk's last group, kl by the last of all. All outputs are
 * optional. Nothing depends on the order in which thread blocks run when FMSA_FLAG_DETERMINISTIC is set. */
#ifndef FMSA_CUDA_SM90_PROXY_H
#define FMSA_CUDA_SM90_PROXY_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "problem.h"
#include "schedule.h"

#ifdef __cplusplus
namespace fmsa {
struct rounding; /* portable_parts.cuh */
}

extern "C" {
#endif

/* The teacher is kept as fp16(w * 2^15), whatever the type of the tensors: 11 bits down to w = 2^-29. */
enum { FMSA_SM90_TEACHER_KEYS = 128, FMSA_SM90_TEACHER_SCALE = 1 << 15 };

/* Some rows and some places of them; see above. Sparse: first_block 0, places problem->slots. */
typedef struct fmsa_sm90_proxy_group {
    int64_t row_begin, row_end;
    int32_t first_block;
    int32_t places;
} fmsa_sm90_proxy_group;

/* Where the main backward writes w, the mean over the R main heads of a proxy head of their probabilities.
 *
 * Its row for (proxy head p, query row, place) begins at half number
 *     (((int64_t)p * rows + (row - row_begin)) * places + place) * FMSA_SM90_TEACHER_KEYS
 * of w, where place is edge_slot in sparse mode, block_number - first_block in dense mode. A row holds the block's 128
 * keys as 64 pairs: pair 8 * m + g is (key 16 * m + g, key 16 * m + g + 8), the lower in the low half: the two rows of
 * a 64-row accumulator that one thread holds, so a warp writes 32 contiguous bytes for each (token, place). The value
 * of a key that the row does not see is not looked at. Rows of edges that do not exist are neither written nor read.
 *
 * Where several thread blocks contribute to one w (several units follow one proxy head), each writes its part of the
 * sum, already divided by R, to a plane of its own: plane i begins at half i * plane_halves. The planes are added by
 * from_teacher, so the order is fixed and nothing has to be zeroed. */
typedef struct fmsa_sm90_teacher {
    uint16_t *w;
    int64_t plane_halves;
    int32_t row_begin, rows;
    int32_t first_block, places;
} fmsa_sm90_teacher;

/* What is kept through the whole pass. */
typedef struct fmsa_sm90_proxy {
    fmsa_cuda_geometry geometry;
    fmsa_cuda_schedule schedule; /* not used in dense mode */
    void *sums;                  /* the next four: 0 at first. They begin the memory that is kept */
    size_t sum_bytes;
    float *dk;            /* [Tk][heads][Dp] sums; NULL if dk_proxy is not wanted */
    int32_t *turns;       /* [Hp][max_key_blocks] in deterministic mode */
    double *kl;           /* [1] sum so far */
    uint32_t *key_bounds; /* [max_key_blocks][Hpk] where dq_proxy is summed in fp16, see sm90_proxy.cuh */
    float *student_lse;   /* [Hp][Tq], times log2(e) */
} fmsa_sm90_proxy;

/* Whether these kernels take the problem: 16-bit types, block_size 128. */
bool fmsa_sm90_proxy_takes(const fmsa_problem *problem);

/* Bytes kept through the pass: linear in tokens. memory is 256-byte aligned. */
size_t fmsa_sm90_proxy_bytes(const fmsa_problem *problem);
fmsa_sm90_proxy fmsa_sm90_proxy_at(const fmsa_problem *problem, const fmsa_tensors *tensors, void *memory);

/* Bytes of a group's memory, from the number of its rows and places: about 264 * Hp bytes a (row, place), the teacher's
 * 256 of them `planes` times, and 256 * Hp a row for every 64 places. Overwritten by from_teacher, and in dense mode
 * also kept from one group of a chunk to the next: the groups of a chunk have the same rows, places and memory. */
size_t fmsa_sm90_proxy_group_bytes(const fmsa_problem *problem, int64_t rows, int32_t places, int32_t planes);

/* schedule is NULL in dense mode. */
fmsa_status fmsa_sm90_proxy_begin(const fmsa_problem *problem, const fmsa_tensors *tensors, fmsa_sm90_proxy *proxy,
                                  const fmsa_cuda_geometry *geometry, const fmsa_cuda_schedule *schedule,
                                  cudaStream_t stream);

fmsa_sm90_teacher fmsa_sm90_proxy_teacher(const fmsa_problem *problem, const fmsa_sm90_proxy *proxy,
                                          const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes);

/* Before the main backward over the group: what does not need the teacher, but the student's LSE of a chunk that is one
 * group. Its kernels run beside those before and behind them: who reads what they write has ended or waits. */
fmsa_status fmsa_sm90_proxy_prepare(const fmsa_problem *problem, const fmsa_tensors *tensors,
                                    const fmsa_sm90_proxy *proxy, const fmsa_sm90_proxy_group *group,
                                    void *group_memory, int32_t planes, cudaStream_t stream);

/* Lists what prepare has counted. wait_first: unless the kernel before it has waited for prepare's kernels before it
 * let this one begin. */
fmsa_status fmsa_sm90_proxy_list(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy *proxy,
                                 const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes,
                                 bool wait_first, cudaStream_t stream);

/* The group's share of everything but dq_proxy. Its first kernel may start early: the kernel before it on the stream is
 * the main backward or does not allow it. Its last one lets the next begin when all before it is complete; it has none
 * where the group has no places. */
bool fmsa_sm90_proxy_has_places(const fmsa_problem *problem, const fmsa_sm90_proxy_group *group);
fmsa_status fmsa_sm90_proxy_from_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors,
                                         const fmsa_sm90_proxy *proxy, const fmsa_sm90_proxy_group *group,
                                         void *group_memory, int32_t planes, cudaStream_t stream);

/* Adds the group's terms of dq_proxy. No kernel behind it begins before it has ended. */
fmsa_status fmsa_sm90_proxy_add(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy *proxy,
                                const fmsa_sm90_proxy_group *group, void *group_memory, int32_t planes,
                                cudaStream_t stream);

/* kl, where there was nothing to do before. */
fmsa_status fmsa_sm90_proxy_finish_kl(const fmsa_problem *problem, const fmsa_tensors *tensors, cudaStream_t stream);

#ifdef __cplusplus
}

/* What is to be rounded to dk_proxy, if that is wanted. */
fmsa::rounding fmsa_sm90_proxy_dk(const fmsa_problem *problem, const fmsa_tensors *tensors,
                                  const fmsa_sm90_proxy *proxy);
#endif

#endif
