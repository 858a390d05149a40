/* How a call is cut and where its scratch lies. An operation has shared memory and, for each thread, memory that a task
 * uses from start to end. A task is a chunk of query rows and a set of heads. */
#ifndef FMSA_CPU_PLAN_H
#define FMSA_CPU_PLAN_H

#include "geometry.h"

typedef struct fmsa_cpu_plan {
    int64_t chunk_rows; /* query rows of a chunk; depends on shapes and scratch_limit, never on the threads */
    int64_t num_chunks;
    int64_t num_tasks;
    int32_t threads;
    size_t shared_bytes; /* then come threads * thread_bytes */
    size_t thread_bytes;
    size_t total_bytes;
} fmsa_cpu_plan;

/* The plan of an operation; FMSA_ERROR_WORKSPACE when scratch_limit is below the least possible. */
fmsa_status fmsa_cpu_make_plan(const fmsa_problem *problem, fmsa_operation operation, fmsa_cpu_plan *plan);

/* Keys of a tile: the pieces into which a key block is cut. */
int64_t fmsa_cpu_tile_keys(const fmsa_problem *problem);

/* ---- Shared memory of each operation. ---- */

typedef struct fmsa_cpu_shared {
    fmsa_cpu_geometry geometry;
    /* The backward operations: */
    int32_t *turns;      /* [NB * tiles of a block * bundles] rows up to here have added to the tile's gradients */
    void *dk, *dv;       /* [Tk, Hkv, D], when the outputs are no place to accumulate in */
    void *dk_proxy;      /* [Tk, Hp, Dp] for each proxy head, since bundles may share a proxy key head */
    double *kl_of_tasks; /* [tasks] */
} fmsa_cpu_shared;

fmsa_cpu_shared fmsa_cpu_take_shared(const fmsa_problem *problem, fmsa_operation operation, int64_t num_tasks,
                                     fmsa_cpu_arena *arena);

/* ---- Memory of a thread. "Panels" have rows fmsa_cpu_leading(columns) apart. ---- */

typedef struct fmsa_cpu_select_scratch {
    int32_t *positions; /* [chunk] */
    void *k_transposed; /* panel [Dp, tile keys] */
    void *q;            /* panel [rows, Dp] */
    void *scores;       /* panel [rows, tile keys] */
    void *block_scores; /* [chunk * proxy heads of a key head, blocks of a fragment] */
    void *heap_scores;  /* [slots] */
    int32_t *heap;      /* [slots] */
    uint8_t *chosen;    /* [blocks of a fragment] */
} fmsa_cpu_select_scratch;

typedef struct fmsa_cpu_forward_scratch {
    int32_t *positions, *list; /* [chunk] */
    void *k_transposed;        /* panel [D, tile keys] */
    void *v;                   /* panel [tile keys, D] */
    void *q;                   /* panel [rows, D] */
    void *scores;              /* panel [rows, tile keys] */
    void *product;             /* panel [rows, D] */
    void *rescale;             /* [rows] */
    void *out;                 /* panel [chunk * heads of a unit, D] */
    void *max, *sum;           /* [chunk * heads of a unit] */
} fmsa_cpu_forward_scratch;

typedef struct fmsa_cpu_backward_scratch {
    int32_t *positions, *list;         /* [chunk] */
    void *k_transposed, *v_transposed; /* panels [D, tile keys] */
    void *k, *dk, *dv;                 /* panels [tile keys, D] */
    void *q, *dout;                    /* panels [rows, D] */
    void *p, *ds;                      /* panels [rows, tile keys] */
    void *product;                     /* panel [rows, max(D, Dp)] */
    void *dq;                          /* panel [chunk * heads of a bundle, D] */
    void *lse, *delta;                 /* [chunk * heads of a bundle] */
    void *k_proxy_transposed;          /* panel [Dp, tile keys] */
    void *k_proxy, *dk_proxy;          /* panels [tile keys, Dp] */
    void *q_proxy;                     /* panel [tokens, Dp] */
    void *teacher, *student;           /* panels [tokens, tile keys] */
    void *dq_proxy;                    /* panel [chunk * proxy heads of a bundle, Dp] */
    void *student_max, *student_sum;   /* [chunk * proxy heads of a bundle] */
} fmsa_cpu_backward_scratch;

fmsa_cpu_select_scratch fmsa_cpu_take_select_scratch(const fmsa_problem *problem, int64_t chunk_rows,
                                                     fmsa_cpu_arena *arena);
fmsa_cpu_forward_scratch fmsa_cpu_take_forward_scratch(const fmsa_problem *problem, int64_t chunk_rows,
                                                       fmsa_cpu_arena *arena);
fmsa_cpu_backward_scratch fmsa_cpu_take_backward_scratch(const fmsa_problem *problem, fmsa_operation operation,
                                                         int64_t chunk_rows, fmsa_cpu_arena *arena);

#endif
