/* What the CUDA kernels know of a call's fragments and selections, in device memory: where each array lies follows from
 * the shapes alone, so that a graph can be replayed with other fragments and other selections. */
#ifndef FMSA_CUDA_SCHEDULE_H
#define FMSA_CUDA_SCHEDULE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The fragments, spread out so that a kernel finds a row or a block without searching. Key blocks of all documents
 * (fragments that share k_begin are one document) are numbered through: a *block id*. NB = problem->max_key_blocks,
 * n = num_fragments.
 *
 * Fragments that break the rules of the public header, once their ends are cut to Tq, Tk and max_seqlen_k, count as
 * none at all: no block id is in use and every row is in no fragment. */
typedef struct fmsa_cuda_geometry {
    int32_t *num_blocks;    /* [1]  block ids in use, at most NB; the rest of the [NB] arrays has empty ranges */
    int32_t *block_k_begin; /* [NB] first key row */
    int32_t *block_k_end;   /* [NB] one past the last key row, at most block_size more */
    int32_t *block_number;  /* [NB] number within the document: its first key stands at block_number * block_size */
    int32_t *block_q_begin; /* [NB] all query rows that see the block lie in block_q_begin ... block_q_end; the range */
    int32_t *block_q_end;   /*      may hold others, whose row_position is less than the first key's, or -1. Neither
                                    begins nor ends ever decrease over the ids in use. */
    int32_t *row_position;  /* [Tq] position of the query row among its keys; -1 when it is in no fragment */
    int32_t *row_first_block; /* [Tq] block id of block 0 of the row's document; 0 when it is in no fragment */

    int32_t *fragment_first_new; /* [n] block ids before the first one that no earlier fragment has seen */
    int32_t *fragment_key_end;   /* [n] greatest key end of this fragment and those before it */
} fmsa_cuda_geometry;

/* A piece of work for the KV-outer kernels: some of the tokens that chose one key block through one proxy head, all of
 * one segment of query rows. Items are ordered by segment, so that the query rows of neighbouring items meet in L2;
 * within it by proxy head; within it long ones first; then by block id. The order is the same on every run. */
typedef struct fmsa_cuda_item {
    int64_t edge_begin; /* first edge */
    int32_t edge_count; /* 1 ... FMSA_CUDA_ITEM_EDGES */
    int32_t block;      /* block id */
    int32_t proxy_head;
    int32_t reserved;
} fmsa_cuda_item;

enum { FMSA_CUDA_ITEM_EDGES = 1024 };

/* The reverse index. An *edge* is one (proxy head, row, valid selected block); slots = problem->slots. */
typedef struct fmsa_cuda_schedule {
    fmsa_cuda_geometry geometry;
    int64_t *list_begin;   /* [Hp * NB + 1] edges of (proxy head, block id): list_begin[p * NB + id] ... the next */
    int32_t *edge_row;     /* [Hp * Tq * slots] the query row; ascending within a list */
    int32_t *edge_slot;    /* [Hp * Tq * slots] rank of the block among its row's valid blocks, ascending: 0, 1, ... */
    int32_t *row_count;    /* [Hp * Tq] valid blocks of (proxy head, row): the slots 0 ... row_count - 1 are used */
    int32_t *row_block;    /* [Hp * Tq * slots] block id of each slot, ascending; -1 behind the last */
    int32_t *num_items;    /* [1] */
    fmsa_cuda_item *items; /* [fmsa_cuda_max_items] */
} fmsa_cuda_schedule;

/* Bytes of each, and the arrays within memory (256-byte aligned). From shapes alone. */
size_t fmsa_cuda_geometry_bytes(const fmsa_problem *problem);
fmsa_cuda_geometry fmsa_cuda_geometry_at(const fmsa_problem *problem, void *memory);
size_t fmsa_cuda_schedule_bytes(const fmsa_problem *problem);
fmsa_cuda_schedule fmsa_cuda_schedule_at(const fmsa_problem *problem, void *memory);
int64_t fmsa_cuda_max_items(const fmsa_problem *problem);

/* Segments have 1 << fmsa_cuda_segment_shift rows: 4,096, or more where lists are so thin that items would have fewer
 * than 128 edges, up to 131,072. */
int32_t fmsa_cuda_segment_shift(const fmsa_problem *problem);
int64_t fmsa_cuda_segments(const fmsa_problem *problem);

/* Enqueues the kernels that fill the geometry from the fragment arrays. */
fmsa_status fmsa_cuda_build_geometry(const fmsa_problem *problem, fmsa_cuda_geometry geometry, cudaStream_t stream);

/* The schedule operation: geometry and reverse index from tensors->block_indices into tensors->schedule. */
fmsa_status fmsa_portable_schedule(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                   size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_schedule_workspace_bytes(const fmsa_problem *problem, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
