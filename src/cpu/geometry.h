/* Where rows and key blocks lie. The query rows are cut into *chunks* of consecutive rows, a chunk into *segments*, one
 * for each document it meets; key blocks of all documents are numbered through (a *block id*), in ascending order of
 * their keys. Fragments that share k_begin are one document and share their blocks. */
#ifndef FMSA_CPU_GEOMETRY_H
#define FMSA_CPU_GEOMETRY_H

#include <stdbool.h>

#include "arena.h"
#include "problem.h"

typedef struct fmsa_cpu_geometry {
    int64_t num_blocks;            /* block ids in use */
    int32_t *fragment_first_block; /* [n]  block id of block 0 of the fragment's document */
    int32_t *block_k_begin;        /* [NB] first key row; NB = problem->max_key_blocks */
    int32_t *block_keys;           /* [NB] keys in the block, 1 ... block_size */
} fmsa_cpu_geometry;

/* The reverse index that fmsa_schedule writes into the caller's memory: for each (proxy head p, block id b) the
 * ascending query rows that chose it, rows[begin[p * (NB + 1) + b]] up to rows[begin[p * (NB + 1) + b + 1]]. */
typedef struct fmsa_cpu_schedule {
    uint64_t *stamp; /* [1] fmsa_cpu_schedule_stamp of the call that wrote it */
    int64_t *begin;  /* [Hp * (NB + 1)] */
    int32_t *rows;   /* [Hp * Tq * slots] */
} fmsa_cpu_schedule;

/* The rows of a chunk that belong to one document. */
typedef struct fmsa_cpu_segment {
    int64_t fragment_begin, fragment_end; /* the fragments that the segment meets; may include empty ones */
    int32_t row_begin, row_end;           /* may enclose rows in no fragment, whose position is -1 */
    int32_t first_block;                  /* block id of the document's block 0 */
    int32_t num_blocks;                   /* blocks that some row of the segment sees */
} fmsa_cpu_segment;

/* Query rows of a chunk that attend to one block, ascending. */
typedef struct fmsa_cpu_list {
    const int32_t *rows;
    int64_t count;
    int32_t previous; /* the last row before the chunk that attends to the block, or -1 */
} fmsa_cpu_list;

fmsa_cpu_geometry fmsa_cpu_take_geometry(const fmsa_problem *problem, fmsa_cpu_arena *arena);
void fmsa_cpu_fill_geometry(const fmsa_problem *problem, fmsa_cpu_geometry *geometry);
fmsa_cpu_schedule fmsa_cpu_take_schedule(const fmsa_problem *problem, fmsa_cpu_arena *arena);

/* A hash of the shapes and fragments that a schedule depends on, to notice one that was made for others or not at all:
 * the backward operations would wait for ever for rows that never come. */
uint64_t fmsa_cpu_schedule_stamp(const fmsa_problem *problem);

/* The first fragment that ends behind a row; num_fragments when there is none. */
int64_t fmsa_cpu_find_fragment(const fmsa_problem *problem, int64_t row);

/* Writes the position among its keys of each row in row_begin ... row_end, or -1 for a row in no fragment. */
void fmsa_cpu_positions(const fmsa_problem *problem, int64_t row_begin, int64_t row_end, int32_t *positions);

/* Walks the segments of a chunk: start with fragment_end = fmsa_cpu_find_fragment(row_begin). False behind the last. */
bool fmsa_cpu_next_segment(const fmsa_problem *problem, const fmsa_cpu_geometry *geometry, int64_t row_begin,
                           int64_t row_end, fmsa_cpu_segment *segment);

/* The rows in row_begin ... row_end that chose a block through a proxy head (sparse mode). */
fmsa_cpu_list fmsa_cpu_sparse_list(const fmsa_problem *problem, const fmsa_cpu_schedule *schedule, int32_t proxy_head,
                                   int32_t block, int64_t row_begin, int64_t row_end);

/* The rows of the segment that see a block (dense mode), written to memory for as many rows as the chunk has.
 * positions are those of the chunk, which begins at chunk_begin. */
fmsa_cpu_list fmsa_cpu_dense_list(const fmsa_problem *problem, const fmsa_cpu_segment *segment, int32_t block,
                                  int64_t chunk_begin, const int32_t *positions, int32_t *memory);

#endif
