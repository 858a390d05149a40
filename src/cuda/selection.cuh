/* Which blocks a (token, proxy head) keeps whatever the scores are, and how many the scores decide. */
#ifndef FMSA_CUDA_SELECTION_CUH
#define FMSA_CUDA_SELECTION_CUH

#include <stdint.h>

namespace fmsa {

/* Block numbers within the document. Blocks init_begin ... init_end - 1 and local_begin ... visible - 1 are forced;
 * `chosen` of those between are taken by their scores. */
struct selection {
    int32_t visible, take;        /* blocks, and how many of them are kept */
    int32_t init_begin, init_end; /* forced, the newest first where k is too small: these, */
    int32_t local_begin;          /* and the blocks from here on */

    __device__ selection(int32_t visible, int32_t top_k, int32_t local_blocks, int32_t init_blocks)
        : visible(visible), take(min(visible, top_k)) {
        const int32_t local = min(local_blocks, take);
        local_begin = visible - local;
        init_end = min(init_blocks, local_begin);
        init_begin = max(0, init_end - (take - local));
    }
    __device__ int32_t chosen() const {
        return take - (visible - local_begin) - (init_end - init_begin);
    }
    /* Whether it takes scores to tell them: some, but not all, of the candidates are chosen. */
    __device__ bool open() const {
        return chosen() > 0 && chosen() < local_begin - init_end;
    }
};

} // namespace fmsa

#endif
