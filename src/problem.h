/* A validated call: the caller's configuration with its defaults filled in, and the sizes that follow from it. Every
 * backend works from this and checks nothing of it again. */
#ifndef FMSA_PROBLEM_H
#define FMSA_PROBLEM_H

#include "flashmsa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Heads are walked in *bundles* and *units*. A bundle is the smallest set of heads that shares nothing with another:
 * min(Hp, Hkv) of them, each with a whole number of main heads, key/value heads and proxy heads. A unit is the smallest
 * set that shares both one key/value head and one proxy head: max(Hp, Hkv) of them. Unit u has main heads
 * [u * unit_heads, (u + 1) * unit_heads), reads key/value head u / (units / Hkv) and follows the selection of proxy
 * head u / (units / Hp). */
typedef struct fmsa_problem {
    fmsa_config config; /* scales and kl_count are never 0 here; max_seqlen_k only when there are no keys */

    int32_t heads_per_kv_head;    /* G = Hq / Hkv */
    int32_t heads_per_proxy_head; /* R = Hq / Hp */
    int32_t bundles;
    int32_t units;
    int32_t unit_heads; /* Hq / units */

    /* Distinct key blocks of all documents (fragments that share k_begin are one document) are at most
     * Tk / B + n, since each document adds at most one incomplete block. */
    int64_t max_key_blocks;
    int64_t max_fragment_blocks; /* key blocks that one fragment sees, at most */
    int32_t slots;               /* min(k, max_fragment_blocks): valid entries of a block_indices row, at most */
} fmsa_problem;

/* Checks every scalar of config and fills problem. The fragment arrays are not read. */
fmsa_status fmsa_problem_init(fmsa_problem *problem, const fmsa_config *config);

/* Checks the fragments of problem->config, whose arrays must be readable by the host. */
fmsa_status fmsa_problem_check_fragments(const fmsa_problem *problem);

/* Bytes of one element of the tensors, and of lse, kl and grad_kl. */
size_t fmsa_dtype_bytes(fmsa_dtype dtype);
size_t fmsa_real_bytes(fmsa_dtype dtype);

static inline int64_t fmsa_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

#ifdef __cplusplus
}
#endif

#endif
