/* block_indices -> the reverse index in the caller's schedule memory. */
#ifndef FMSA_CPU_SCHEDULE_H
#define FMSA_CPU_SCHEDULE_H

#include "call.h"

fmsa_status fmsa_cpu_schedule_run(const fmsa_cpu_call *call);

#endif
