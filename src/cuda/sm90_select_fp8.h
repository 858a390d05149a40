/* Proxy scores in FP8 E4M3 (FMSA_FLAG_SELECT_FP8), for the select operation on Hopper. */
#ifndef FMSA_CUDA_SM90_SELECT_FP8_H
#define FMSA_CUDA_SM90_SELECT_FP8_H

#include "launch.h"
#include "schedule.h"
#include "sm90_select.cuh"

/* Proxy keys in 8 bits: element = value / block_scale of its key block. Keys in no fragment are not written. */
struct fmsa_sm90_fp8_keys {
    uint8_t *data;      /* [Hpk][Tk][128] */
    float *block_scale; /* [Hpk][NB] */
};

fmsa_sm90_fp8_keys fmsa_sm90_fp8_take_keys(const fmsa_problem *problem, fmsa_cuda_arena *arena);

fmsa_status fmsa_sm90_fp8_quantise(const fmsa_problem *problem, const fmsa_tensor *k_proxy, fmsa_cuda_geometry geometry,
                                   fmsa_sm90_fp8_keys keys, cudaStream_t stream);

/* The tiles of w, from its 16-bit queries. */
fmsa_status fmsa_sm90_fp8_score(const fmsa_problem *problem, fmsa_sm90_fp8_keys keys, const fmsa::select_work &w,
                                bool fused, cudaStream_t stream);

#endif
