/* The schedule: for each (proxy head, key block) the ascending rows that chose it, by counting. The selection is
 * checked first, so that nothing is written when it is wrong. */
#include "schedule.h"

#include <string.h>

#include "status.h"

static const int32_t *row_of_indices(const fmsa_cpu_call *call, int32_t proxy_head, int64_t row) {
    const fmsa_tensor *t = &call->tensors->block_indices;
    return (const int32_t *)t->data + row * t->row_stride + proxy_head * t->head_stride;
}

typedef enum { BLOCK_IS_FINE, BLOCK_OUT_OF_RANGE, BLOCK_IN_FUTURE, BLOCK_TWICE } block_fault;

typedef struct {
    block_fault fault;
    int32_t proxy_head, block;
    int64_t row, newest;
} found_fault;

/* What is wrong with one entry of a row whose newest visible block is `newest`. last_seen[b] is the last row, of those
 * checked so far, that chose block b. */
static block_fault fault_of_entry(int32_t block, int64_t newest, int64_t row, const int32_t *last_seen,
                                  int64_t num_blocks) {
    if (block == -1) return BLOCK_IS_FINE;
    if (block < 0 || block >= num_blocks) return BLOCK_OUT_OF_RANGE;
    if (block > newest) return BLOCK_IN_FUTURE;
    return last_seen[block] == row ? BLOCK_TWICE : BLOCK_IS_FINE;
}

static fmsa_status report_fault(const found_fault *found) {
    const char *reason = found->fault == BLOCK_TWICE       ? "stands twice in this row"
                         : found->fault == BLOCK_IN_FUTURE ? "is in the future"
                                                           : "is out of range";
    return fmsa_fail(
        FMSA_ERROR_ARGUMENT,
        "block_indices of proxy head %d, row %lld, holds %d, which %s; a row's entries are distinct blocks "
        "in 0 ... %lld, or -1",
        (int)found->proxy_head, (long long)found->row, (int)found->block, reason, (long long)found->newest);
}

static found_fault check_row(const fmsa_cpu_call *call, int32_t proxy_head, int64_t row, int64_t newest,
                             int32_t *last_seen) {
    const int32_t *indices = row_of_indices(call, proxy_head, row);
    for (int32_t i = 0; i < call->problem->config.top_k; i++) {
        const block_fault fault =
            fault_of_entry(indices[i], newest, row, last_seen, call->problem->max_fragment_blocks);
        if (fault != BLOCK_IS_FINE) return (found_fault){fault, proxy_head, indices[i], row, newest};
        if (indices[i] >= 0) last_seen[indices[i]] = (int32_t)row;
    }
    return (found_fault){.fault = BLOCK_IS_FINE};
}

static int64_t newest_block(const fmsa_config *c, int64_t f, int64_t row) {
    return ((int64_t)(c->k_end[f] - c->k_begin[f]) - (c->q_end[f] - row)) / c->block_size;
}

/* The first fault of a proxy head. last_seen has room for the blocks of a fragment. */
static found_fault check_proxy_head(const fmsa_cpu_call *call, int32_t proxy_head, int32_t *last_seen) {
    const fmsa_config *c = &call->problem->config;
    for (int64_t b = 0; b < call->problem->max_fragment_blocks; b++)
        last_seen[b] = -1;
    for (int64_t f = 0; f < c->num_fragments; f++) {
        for (int64_t row = c->q_begin[f]; row < c->q_end[f]; row++) {
            const found_fault found = check_row(call, proxy_head, row, newest_block(c, f, row), last_seen);
            if (found.fault != BLOCK_IS_FINE) return found;
        }
    }
    return (found_fault){.fault = BLOCK_IS_FINE};
}

/* The fault of the lowest proxy head, whichever thread finds one first. */
static found_fault check_selection(const fmsa_cpu_call *call) {
    const int32_t heads = call->problem->config.num_proxy_heads;
    found_fault first = {.fault = BLOCK_IS_FINE};
#pragma omp parallel num_threads(call->plan.threads)
    {
        int32_t *last_seen = (int32_t *)fmsa_cpu_thread_arena(call, fmsa_cpu_this_thread()).base;
#pragma omp for schedule(dynamic, 1)
        for (int32_t p = 0; p < heads; p++) {
            const found_fault found = check_proxy_head(call, p, last_seen);
            if (found.fault == BLOCK_IS_FINE) continue;
#pragma omp critical(fmsa_cpu_first_fault)
            if (first.fault == BLOCK_IS_FINE || p < first.proxy_head) first = found;
        }
    }
    return first;
}

/* Walks the edges of a proxy head in ascending rows. With rows NULL it counts them in begin[block id + 1]; otherwise it
 * writes each row to rows[begin[block id]] and moves that place on. */
static void walk_edges(const fmsa_cpu_call *call, int32_t proxy_head, int64_t *begin, int32_t *rows) {
    const fmsa_config *c = &call->problem->config;
    for (int64_t f = 0; f < c->num_fragments; f++) {
        int64_t *document = begin + call->shared.geometry.fragment_first_block[f];
        for (int64_t row = c->q_begin[f]; row < c->q_end[f]; row++) {
            const int32_t *indices = row_of_indices(call, proxy_head, row);
            for (int32_t i = 0; i < c->top_k; i++) {
                if (indices[i] < 0) continue;
                if (rows == NULL) {
                    document[indices[i] + 1]++;
                } else {
                    rows[document[indices[i]]++] = (int32_t)row;
                }
            }
        }
    }
}

static void index_proxy_head(const fmsa_cpu_call *call, int32_t proxy_head) {
    const fmsa_problem *problem = call->problem;
    const int64_t blocks = problem->max_key_blocks;
    int64_t *begin = call->schedule.begin + proxy_head * (blocks + 1);
    memset(begin, 0, (size_t)(blocks + 1) * sizeof *begin);
    begin[0] = (int64_t)proxy_head * problem->config.total_q * problem->slots;
    walk_edges(call, proxy_head, begin, NULL);
    for (int64_t b = 0; b < blocks; b++)
        begin[b + 1] += begin[b];
    walk_edges(call, proxy_head, begin, call->schedule.rows);
    /* Each place has moved to the end of its list, which is where the next list begins. */
    memmove(begin + 1, begin, (size_t)blocks * sizeof *begin);
    begin[0] = (int64_t)proxy_head * problem->config.total_q * problem->slots;
}

fmsa_status fmsa_cpu_schedule_run(const fmsa_cpu_call *call) {
    const found_fault found = check_selection(call);
    if (found.fault != BLOCK_IS_FINE) return report_fault(&found);
#pragma omp parallel for num_threads(call->plan.threads) schedule(dynamic, 1)
    for (int32_t p = 0; p < call->problem->config.num_proxy_heads; p++)
        index_proxy_head(call, p);
    *call->schedule.stamp = fmsa_cpu_schedule_stamp(call->problem);
    return FMSA_OK;
}
