/* A case on a device: its inputs written, its outputs poisoned, every piece of memory between guard zones. */
#ifndef FMSA_TOOL_CALL_H
#define FMSA_TOOL_CALL_H

#include <stdbool.h>

#include "cases.h"
#include "device.h"
#include "flashmsa.h"
#include "reference.h"

enum { FMSA_CALL_VIEWS = 14 };

/* A field of fmsa_tensors and the memory behind it. */
typedef struct fmsa_call_view {
    const char *name;
    fmsa_tensor *tensor;
    int64_t rows, heads, dim;
    bool is_index; /* int32 rather than dtype */
    fmsa_dtype dtype;
    bool is_output;
    void *memory;
    size_t bytes;
    fmsa_tensor opened; /* the tensor as it was opened: tests may set another */
} fmsa_call_view;

typedef struct fmsa_call {
    fmsa_tool_device device;
    fmsa_config config;   /* the case's, with the fragment arrays on the device */
    fmsa_tensors tensors; /* set a tensor's data to NULL to leave out an optional output */
    fmsa_call_view views[FMSA_CALL_VIEWS];
    void *fragments[4];
    void *schedule, *kl, *grad_kl; /* kl and grad_kl: float, or double with fp64 */
    const char *complaint;         /* what fmsa_call_run found wrong beside the status; NULL if nothing */
} fmsa_call;

/* block_indices are written when the case has them; otherwise they are an output, for select to fill. */
void fmsa_call_open(fmsa_call *call, const fmsa_case *c, const fmsa_tool_device *device);
void fmsa_call_close(fmsa_call *call);

/* The operation itself, with nothing around it. */
fmsa_status fmsa_call_invoke(const fmsa_call *call, fmsa_operation operation, void *workspace, size_t bytes);

/* Runs one operation with a poisoned workspace of exactly the size the library asks for, and waits for it. Complains
 * when a guard zone or a gap between the rows of an output was written, or the device reports a fault. */
fmsa_status fmsa_call_run(fmsa_call *call, fmsa_operation operation);

/* select (when the case brings no block_indices; sparse mode only), schedule (sparse mode only), forward, and backward
 * with proxy. Stops at the first call that fails or complains. */
fmsa_status fmsa_call_run_all(fmsa_call *call);

/* The outputs as dense doubles in the reference's layout. */
void fmsa_call_read(const fmsa_call *call, fmsa_reference_outputs *outputs);
void fmsa_call_read_indices(const fmsa_call *call, int32_t *block_indices);

/* Overwrites a field that the case, or an earlier operation, had filled; dense, in the reference's layout. */
void fmsa_call_write_indices(fmsa_call *call, const int32_t *block_indices);

/* The view of a tensor of call->tensors. */
fmsa_call_view *fmsa_call_find(fmsa_call *call, const fmsa_tensor *tensor);

/* Poisons every output, and the schedule, again. */
void fmsa_call_poison(fmsa_call *call);

/* Whether no output has been written since it was poisoned, the schedule and kl among them. */
bool fmsa_call_untouched(fmsa_call *call);

#endif
