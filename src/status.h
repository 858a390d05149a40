/* The status of a call and the sentence behind it. */
#ifndef FMSA_STATUS_H
#define FMSA_STATUS_H

#include "flashmsa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keeps the formatted sentence for fmsa_last_error of this thread and returns status, so that a check reads
 * `return fmsa_fail(FMSA_ERROR_ARGUMENT, "top_k is %d; it must be at least 1", top_k);`. The sentence names the
 * argument, the value given and what is allowed. */
fmsa_status fmsa_fail(fmsa_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#endif
