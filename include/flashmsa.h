/* flashmsa: training kernels for MiniMax Sparse Attention (MSA).
 *
 * A small proxy attention scores all keys; each (token, proxy head) keeps the top-k blocks of keys by their largest
 * score; the main attention runs exactly over those; a KL loss teaches the proxies from the main attention's own
 * probabilities. docs/algorithm.md gives the formulas, and this header all that a caller needs:
 *
 *     fmsa_config config;
 *     fmsa_config_init(&config, sizeof config);
 *     config.dtype = FMSA_DTYPE_BF16;   config.num_heads = 64;   ... config.q_begin = cu_seqlens; ...
 *     fmsa_tensors tensors = {.struct_size = sizeof tensors, .q = {q, row_stride, head_stride}, ...};
 *     fmsa_workspace_bytes(&config, FMSA_OPERATION_SELECT, &bytes);     // once per shape; then bring the memory
 *     fmsa_select(&config, &tensors, workspace, bytes);                 // q_proxy, k_proxy -> block_indices
 *     fmsa_schedule(&config, &tensors, workspace, bytes);               // block_indices -> schedule
 *     fmsa_forward(&config, &tensors, workspace, bytes);                // q, k, v -> out, lse
 *     fmsa_backward_with_proxy(&config, &tensors, workspace, bytes);    // ... -> all gradients and the KL value
 *
 * Rules that hold for every call:
 *  - The caller owns all memory. The library allocates nothing on the device, and never synchronises with it: on CUDA
 *    a call enqueues work on config.stream and returns, and can be captured in a graph.
 *  - A call returns a status. On an error nothing has been written to any output, and fmsa_last_error() gives a
 *    sentence that names the argument, what was given and what is allowed.
 *  - A call may run on any thread; two calls may run at once if they share no output and no workspace.
 *  - Outputs share no memory with each other, with inputs, or with workspace and schedule.
 *  - Offsets are 64-bit throughout. Strides count elements, sizes count bytes, lengths count tokens.
 */
#ifndef FLASHMSA_H
#define FLASHMSA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FMSA_API __attribute__((visibility("default")))
#else
#define FMSA_API
#endif

#define FMSA_VERSION_MAJOR 0
#define FMSA_VERSION_MINOR 1
#define FMSA_VERSION_PATCH 0

/* ---- Status ------------------------------------------------------------------------------------------------- */

/* X(name, value, meaning): every status a call can return. */
#define FMSA_STATUS_MAP(X)                                                                                             \
    X(FMSA_OK, 0, "success")                                                                                           \
    X(FMSA_ERROR_ARGUMENT, 1, "an argument is wrong")                                                                  \
    X(FMSA_ERROR_UNSUPPORTED, 2, "the arguments are valid, but this backend cannot run them")                          \
    X(FMSA_ERROR_WORKSPACE, 3, "the workspace, the schedule or the scratch limit is too small")                        \
    X(FMSA_ERROR_DEVICE, 4, "the device is missing, too old, or its driver is")                                        \
    X(FMSA_ERROR_CUDA, 5, "a CUDA call failed")

typedef enum fmsa_status {
#define FMSA_STATUS_ENUM(name, value, meaning) name = value,
    FMSA_STATUS_MAP(FMSA_STATUS_ENUM)
#undef FMSA_STATUS_ENUM
} fmsa_status;

/* The status as it is spelled above; "unknown status" for any other number. Never NULL. */
FMSA_API const char *fmsa_status_name(fmsa_status status);

/* The sentence of this thread's last call that failed, whether or not others have succeeded since; "" when none has.
 * The text is overwritten by this thread's next call that fails. */
FMSA_API const char *fmsa_last_error(void);

/* ---- Types -------------------------------------------------------------------------------------------------- */

typedef enum fmsa_device { FMSA_DEVICE_CPU = 0, FMSA_DEVICE_CUDA = 1 } fmsa_device;

/* Type of q, k, v, the proxies, out, dout and the gradients. FMSA_DTYPE_FP64 is for the CPU (gradient checks). */
typedef enum fmsa_dtype {
    FMSA_DTYPE_BF16 = 0,
    FMSA_DTYPE_FP16 = 1,
    FMSA_DTYPE_FP32 = 2,
    FMSA_DTYPE_FP64 = 3
} fmsa_dtype;

/* Sparse: over the selected blocks. Dense: over every visible key (the warm-up of the proxies). */
typedef enum fmsa_mode { FMSA_MODE_SPARSE = 0, FMSA_MODE_DENSE = 1 } fmsa_mode;

typedef enum fmsa_operation {
    FMSA_OPERATION_SELECT = 0,
    FMSA_OPERATION_SCHEDULE = 1,
    FMSA_OPERATION_FORWARD = 2,
    FMSA_OPERATION_PROXY_LOSS = 3,
    FMSA_OPERATION_BACKWARD = 4,
    FMSA_OPERATION_BACKWARD_WITH_PROXY = 5,
    FMSA_OPERATION_COUNT = 6
} fmsa_operation;

enum {
    /* Bit-identical results on every run. The CPU always gives them, whatever the number of threads. */
    FMSA_FLAG_DETERMINISTIC = 1 << 0,
    /* Score blocks in FP8 E4M3 where the card has it: faster, and a few near-ties are decided differently. */
    FMSA_FLAG_SELECT_FP8 = 1 << 1,
    /* On CUDA, copy the fragments to the host and check them before anything runs. Synchronises: for debugging.
     * The CPU always checks them. */
    FMSA_FLAG_CHECK_FRAGMENTS = 1 << 2,
    /* Write dk, dv and dk_proxy as fp32 whatever dtype is, for callers that sum them over ranks. Not with FP64. */
    FMSA_FLAG_FP32_KV_GRADS = 1 << 3,
    /* On CUDA, use the portable kernels even where the card has faster ones: to compare the two. */
    FMSA_FLAG_PORTABLE = 1 << 4,
    /* In the sparse forward of sm_90, which treats a block query-outer for a tile of neighbouring tokens where many of
     * them chose it and key-outer elsewhere, take one of the two ways alone (but for each token's own block): to
     * measure what the other adds. Not both; ignored elsewhere. */
    FMSA_FLAG_KEY_OUTER = 1 << 5,
    FMSA_FLAG_QUERY_OUTER = 1 << 6
};

/* A view of [rows, heads, dim]: element (row, head, i) is data[row * row_stride + head * head_stride + i]. The last
 * dimension is dense. Strides count elements; those of inputs may be 0. On CUDA, data and strides of 16-bit and
 * 32-bit tensors with a head dimension are multiples of 16 bytes. Inputs are only read. */
typedef struct fmsa_tensor {
    void *data;
    int64_t row_stride;
    int64_t head_stride;
} fmsa_tensor;

/* What to compute: shapes, fragments and choices. Set the fields after fmsa_config_init.
 *
 * Fragments. A call holds num_fragments independent pieces of sequences, packed without padding. Fragment f owns query
 * rows [q_begin[f], q_end[f]) and sees key rows [k_begin[f], k_end[f]). Its query i stands at position
 *     (k_end - k_begin) - (q_end - q_begin) + i
 * and sees the keys at positions 0 ... its own, counted from k_begin (causal, aligned bottom-right). So
 *   - packed documents:  q_begin = k_begin = cu_seqlens, q_end = k_end = cu_seqlens + 1, num_fragments = documents;
 *   - a rank's chunks of a document under context parallelism: fragments with one k_begin, each with its own k_end.
 * A fragment may be empty, and must not have fewer keys than queries. Query ranges ascend and do not overlap; k_begin
 * never decreases; key ranges either start together (and then share their key blocks and add up their gradients) or do
 * not overlap. What rows in no fragment hold does not matter; they get output 0, LSE -inf, block index -1 and gradient
 * 0. The four arrays live where the tensors live, and on CUDA may change between replays of a graph. Arrays that break
 * these rules are an error on the CPU; on CUDA, where reading them would synchronise, all rows then count as in no
 * fragment (see FMSA_FLAG_CHECK_FRAGMENTS).
 *
 * Key block b of a fragment is the keys at positions [b * block_size, (b + 1) * block_size). */
typedef struct fmsa_config {
    size_t struct_size; /* sizeof(fmsa_config) of the caller; fmsa_config_init sets it */

    fmsa_device device;   /* where the tensors are */
    int32_t device_index; /* CUDA ordinal; -1 = the calling thread's current device (default) */
    void *stream;         /* cudaStream_t; NULL = the default stream */
    int32_t num_threads;  /* CPU threads, at most 1024; 0 = OpenMP's default (default) */

    fmsa_dtype dtype;
    fmsa_mode mode;
    uint32_t flags; /* FMSA_FLAG_... */

    int32_t num_heads;          /* Hq:  main query heads */
    int32_t num_kv_heads;       /* Hkv: main key/value heads; divides Hq; one of Hkv, Hp divides the other */
    int32_t num_proxy_heads;    /* Hp:  proxy query heads; divides Hq */
    int32_t num_proxy_kv_heads; /* Hpk: proxy key heads; divides Hp */
    int32_t head_dim;           /* D:  1 ... 256 on the CPU, 64 or 128 on CUDA */
    int32_t proxy_head_dim;     /* Dp: likewise */
    int32_t block_size;         /* B:  keys per block, default 128; 16 ... 65536 on the CPU, 64 or 128 on CUDA */
    int32_t top_k;              /* k:  blocks kept per (token, proxy head), from 1; ignored in dense mode */
    int32_t local_blocks;       /* newest visible blocks always kept, default 1 */
    int32_t init_blocks;        /* first blocks always kept, default 0 */
    double softmax_scale;       /* 0 = D^-1/2 (default) */
    double proxy_scale;         /* 0 = Dp^-1/2 (default) */
    int64_t kl_count;           /* N, the divisor of the KL loss; 0 = total_q * num_proxy_heads (default) */

    int64_t total_q;       /* rows of q, q_proxy, out, dout, ... */
    int64_t total_k;       /* rows of k, v, k_proxy and their gradients */
    int64_t num_fragments; /* n */
    int64_t max_seqlen_k;  /* no fragment has more keys; 0 = unknown (then total_k bounds it). Saves scratch on CUDA */
    const int32_t *q_begin, *q_end, *k_begin, *k_end; /* [n] each */

    size_t scratch_limit; /* bytes of workspace an operation may ask for; 0 = the library's choice (default). A lower
                             limit makes it work in smaller chunks; one below the least possible is an error */
} fmsa_config;

/* Sets every field of the first struct_size bytes, sizeof(fmsa_config) of the caller, to its default. */
FMSA_API void fmsa_config_init(fmsa_config *config, size_t struct_size);

/* Everything an operation reads or writes. Each operation says which fields it uses; it ignores the others.
 * "or double": when dtype is FMSA_DTYPE_FP64. */
typedef struct fmsa_tensors {
    size_t struct_size; /* sizeof(fmsa_tensors) of the caller */

    fmsa_tensor q;             /* [Tq, Hq, D] */
    fmsa_tensor k, v;          /* [Tk, Hkv, D] */
    fmsa_tensor q_proxy;       /* [Tq, Hp, Dp] */
    fmsa_tensor k_proxy;       /* [Tk, Hpk, Dp] */
    fmsa_tensor block_indices; /* int32 [Tq, Hp, k]: for the usual [Hp, Tq, k] array, row_stride k, head_stride Tq*k */
    void *schedule;            /* opaque; 64-byte aligned on the CPU, 256 on CUDA; NULL in dense mode */
    size_t schedule_bytes;

    fmsa_tensor out;  /* [Tq, Hq, D] */
    fmsa_tensor lse;  /* float (or double) [Tq, Hq]: for the usual [Hq, Tq] array, row_stride 1, head_stride Tq */
    fmsa_tensor dout; /* [Tq, Hq, D] */

    fmsa_tensor dq;       /* [Tq, Hq, D] */
    fmsa_tensor dk, dv;   /* [Tk, Hkv, D] */
    fmsa_tensor dq_proxy; /* [Tq, Hp, Dp] */
    fmsa_tensor dk_proxy; /* [Tk, Hpk, Dp] */
    const void *grad_kl;  /* float (or double), one value where the tensors are: dL/dKL; NULL = 1 */
    void *kl;             /* float (or double), one value where the tensors are */
} fmsa_tensors;

/* ---- Sizes -------------------------------------------------------------------------------------------------- */

/* Bytes of workspace an operation needs, from config's shapes, flags and scratch_limit alone: the fragment arrays are
 * not read and may be NULL. 0 is a possible answer. The CPU's answer depends on the number of threads. */
FMSA_API fmsa_status fmsa_workspace_bytes(const fmsa_config *config, fmsa_operation operation, size_t *bytes);

/* Bytes of the schedule, likewise. 0 in dense mode. */
FMSA_API fmsa_status fmsa_schedule_bytes(const fmsa_config *config, size_t *bytes);

/* ---- Operations ---------------------------------------------------------------------------------------------
 * workspace: scratch of at least fmsa_workspace_bytes, aligned as the schedule; its contents do not matter before the
 * call and mean nothing after it. Optional outputs are skipped, with their work, when their data is NULL. */

/* q_proxy, k_proxy -> block_indices. Each (token, proxy head) gets min(k, visible blocks) distinct blocks, ascending,
 * then -1: the local_blocks newest and the init_blocks first (the newest of these if k is too small), then those with
 * the greatest max-pooled score; equal scores go to the lower block, NaN ranks last. An error in dense mode. */
FMSA_API fmsa_status fmsa_select(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                 size_t workspace_bytes);

/* block_indices -> schedule: for each key block the ascending tokens that chose it, in a form the next four reuse.
 * block_indices may come from elsewhere: any order, distinct within a row, -1 anywhere. A block that is out of range or
 * in the future is an error on the CPU and ignored on CUDA; so is a duplicate. An error in dense mode. The schedule is
 * for the fragments it was made with: an operation that finds others is an error on the CPU. */
FMSA_API fmsa_status fmsa_schedule(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                   size_t workspace_bytes);

/* q, k, v, schedule -> out, lse. lse is the natural logarithm of the sum of exp of the scaled scores. A row without
 * keys gets out 0 and lse -inf. */
FMSA_API fmsa_status fmsa_forward(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                  size_t workspace_bytes);

/* q, k, lse, q_proxy, k_proxy, schedule, grad_kl -> kl, and optionally dq_proxy and dk_proxy. For logging the KL value
 * without a backward pass, or for proxy gradients computed at once with the forward pass. */
FMSA_API fmsa_status fmsa_proxy_loss(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                     size_t workspace_bytes);

/* q, k, v, out, lse, dout, schedule -> dq, dk, dv, each optional. */
FMSA_API fmsa_status fmsa_backward(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                   size_t workspace_bytes);

/* The inputs of fmsa_backward and fmsa_proxy_loss -> dq, dk, dv, dq_proxy, dk_proxy, kl, each optional. The CPU
 * and the Hopper kernels compute the main probabilities once for both; the portable CUDA kernels once for each. Hopper
 * takes the teacher from probabilities rounded to 16 bits: kl is off by about (1 + kl) u / sqrt(Tq * Hp), u = 2^-8 or
 * 2^-11. */
FMSA_API fmsa_status fmsa_backward_with_proxy(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/* ---- What is here ------------------------------------------------------------------------------------------- */

/* "0.1.0": version of the library, to compare with FMSA_VERSION_... of the header. */
FMSA_API const char *fmsa_version(void);

/* Lines "key=value": version, compiler, backends, CUDA toolkit and architectures this library was built with. */
FMSA_API const char *fmsa_build_info(void);

/* Devices of a kind that can be used: 1 for the CPU; for CUDA, cards the driver shows, 0 without a driver. */
FMSA_API int32_t fmsa_device_count(fmsa_device device);

/* A line on one device (name, features or compute capability, memory, kernel family), cut to size bytes with its
 * terminating zero. */
FMSA_API fmsa_status fmsa_device_description(fmsa_device device, int32_t index, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
