#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

fmsa_status fmsa_fail(fmsa_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *fmsa_last_error(void) {
    return last_error;
}

const char *fmsa_status_name(fmsa_status status) {
    switch (status) {
#define STATUS_CASE(name, value, meaning)                                                                              \
    case name:                                                                                                         \
        return #name;
        FMSA_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    }
    return "unknown status";
}
