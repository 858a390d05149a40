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

/* What is wrong with entry number i of a row whose newest visible block is `newest`. last_seen[b] is the last row, of
 * those checked so far, that chose block b. */
static block_fault fault_of_entry(const fmsa_problem *problem, int32_t block, int64_t newest, int64_t row,
                                  const int32_t *last_seen) {
    if (block == -1) return BLOCK_IS_FINE;
    if (block < 0 || block >= problem->max_fragment_blocks) return BLOCK_OUT_OF_RANGE;
    if (block > newest) return BLOCK_IN_FUTURE;
    return last_seen[block] == row ? BLOCK_TWICE : BLOCK_IS_FINE;
}

static fmsa_status report_fault(block_fault fault, int32_t proxy_head, int64_t row, int32_t block, int64_t newest) {
    const char *reason = fault == BLOCK_TWICE       ? "stands twice in this row"
                         : fault == BLOCK_IN_FUTURE ? "is in the future"
                                                    : "is out of range";
    return fmsa_fail(
        FMSA_ERROR_ARGUMENT,
        "block_indices of proxy head %d, row %lld, holds %d, which %s; a row's entries are distinct blocks "
        "in 0 ... %lld, or -1",
        (int)proxy_head, (long long)row, (int)block, reason, (long long)newest);
}

static fmsa_status check_row(const fmsa_cpu_call *call, int32_t proxy_head, int64_t row, int64_t newest,
                             int32_t *last_seen) {
    const int32_t *indices = row_of_indices(call, proxy_head, row);
    for (int32_t i = 0; i < call->problem->config.top_k; i++) {
        const block_fault fault = fault_of_entry(call->problem, indices[i], newest, row, last_seen);
        if (fault != BLOCK_IS_FINE) return report_fault(fault, proxy_head, row, indices[i], newest);
        if (indices[i] >= 0) last_seen[indices[i]] = (int32_t)row;
    }
    return FMSA_OK;
}

static int64_t newest_block(const fmsa_config *c, int64_t f, int64_t row) {
    return ((int64_t)(c->k_end[f] - c->k_begin[f]) - (c->q_end[f] - row)) / c->block_size;
}

static fmsa_status check_proxy_head(const fmsa_cpu_call *call, int32_t proxy_head, int32_t *last_seen) {
    const fmsa_config *c = &call->problem->config;
    memset(last_seen, 0xff, (size_t)call->problem->max_fragment_blocks * sizeof(int32_t));
    for (int64_t f = 0; f < c->num_fragments; f++) {
        for (int64_t row = c->q_begin[f]; row < c->q_end[f]; row++) {
            const fmsa_status status = check_row(call, proxy_head, row, newest_block(c, f, row), last_seen);
            if (status != FMSA_OK) return status;
        }
    }
    return FMSA_OK;
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
    const int32_t heads = call->problem->config.num_proxy_heads;
    int32_t *last_seen = fmsa_cpu_thread_arena(call, 0).base == NULL ? NULL : (int32_t *)call->thread_memory;
    for (int32_t p = 0; p < heads; p++) {
        const fmsa_status status = check_proxy_head(call, p, last_seen);
        if (status != FMSA_OK) return status;
    }
#pragma omp parallel for num_threads(call->plan.threads) schedule(dynamic, 1)
    for (int32_t p = 0; p < heads; p++)
        index_proxy_head(call, p);
    return FMSA_OK;
}
