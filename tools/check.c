/* `flashmsa check`: runs every operation of a backend over random cases and holds the results to the direct evaluation
 * in fp64. */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "call.h"
#include "cases.h"
#include "compare.h"
#include "device.h"
#include "flashmsa.h"
#include "reference.h"
#include "tools.h"

enum { DTYPES = 4, MOST_FAILURES_SHOWN = 10 };
static const char *const dtype_names[DTYPES] = {"bf16", "fp16", "fp32", "fp64"};

typedef struct {
    fmsa_tool_device device;
    int64_t cases;
    uint64_t seed;
    bool dtypes[DTYPES];
    bool portable; /* kernels, whatever the card */
} options;

/* ---- The table: a line for every output of every operation, in every type. ---- */

typedef struct {
    const char *operation;
    fmsa_quantity quantity;
    bool together; /* by backward with proxy, rather than by the operations one after another */
} line;

static const line lines[] = {
    {"forward", FMSA_QUANTITY_OUT, false},
    {"forward", FMSA_QUANTITY_LSE, false},
    {"proxy_loss", FMSA_QUANTITY_KL, false},
    {"proxy_loss", FMSA_QUANTITY_DQ_PROXY, false},
    {"proxy_loss", FMSA_QUANTITY_DK_PROXY, false},
    {"backward", FMSA_QUANTITY_DQ, false},
    {"backward", FMSA_QUANTITY_DK, false},
    {"backward", FMSA_QUANTITY_DV, false},
    {"backward_with_proxy", FMSA_QUANTITY_DQ, true},
    {"backward_with_proxy", FMSA_QUANTITY_DK, true},
    {"backward_with_proxy", FMSA_QUANTITY_DV, true},
    {"backward_with_proxy", FMSA_QUANTITY_DQ_PROXY, true},
    {"backward_with_proxy", FMSA_QUANTITY_DK_PROXY, true},
    {"backward_with_proxy", FMSA_QUANTITY_KL, true},
};
enum { LINES = sizeof lines / sizeof *lines };

typedef struct {
    fmsa_comparison worst; /* each figure is the greatest of all cases */
    uint64_t seed;         /* of the case with the greatest excess */
} cell;

typedef struct {
    cell cells[DTYPES][LINES];
    int64_t selections[DTYPES]; /* cases whose selection was right */
    int64_t sparse_cases[DTYPES];
    int64_t failures;
} report;

static void fail(report *r, const options *o, const fmsa_case *c, uint64_t seed, const char *operation,
                 const char *why) {
    if (++r->failures > MOST_FAILURES_SHOWN) return;
    char text[300];
    fmsa_case_describe(c, text, sizeof text);
    printf("FAILED %s: %s\n  %s\n  flashmsa check --device %s%s --dtype %s --cases 1 --seed %llu\n", operation, why,
           text, o->device.kind == FMSA_DEVICE_CUDA ? "cuda" : "cpu", o->portable ? " --kernels portable" : "",
           dtype_names[c->config.dtype], (unsigned long long)seed);
}

static void record(report *r, const options *o, const fmsa_case *c, uint64_t seed, const fmsa_comparison *comparisons,
                   bool together) {
    for (int i = 0; i < LINES; i++) {
        if (lines[i].together != together) continue;
        const fmsa_comparison *comparison = &comparisons[lines[i].quantity];
        cell *worst = &r->cells[c->config.dtype][i];
        worst->worst.error = fmax(worst->worst.error, comparison->error);
        worst->worst.same_type_error = fmax(worst->worst.same_type_error, comparison->same_type_error);
        if (comparison->excess >= worst->worst.excess) {
            worst->worst.excess = comparison->excess;
            worst->seed = seed;
        }
        if (comparison->excess <= 1) continue;
        char why[120];
        snprintf(why, sizeof why, "%s has %.3g times the error it may have", fmsa_quantity_name(lines[i].quantity),
                 comparison->excess);
        fail(r, o, c, seed, lines[i].operation, why);
    }
}

static void print_report(const report *r, const options *o) {
    printf("\n%-20s %-9s %-5s %11s %11s %11s  %s\n", "operation", "output", "type", "error", "same type", "of allowed",
           "worst seed");
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        if (!o->dtypes[dtype]) continue;
        printf("%-20s %-9s %-5s %lld of %lld sparse cases right\n", "select", "blocks", dtype_names[dtype],
               (long long)r->selections[dtype], (long long)r->sparse_cases[dtype]);
        for (int i = 0; i < LINES; i++) {
            const cell *worst = &r->cells[dtype][i];
            printf("%-20s %-9s %-5s %11.2e %11.2e %10.0f%%  %llu\n", lines[i].operation,
                   fmsa_quantity_name(lines[i].quantity), dtype_names[dtype], worst->worst.error,
                   worst->worst.same_type_error, 100 * worst->worst.excess, (unsigned long long)worst->seed);
        }
    }
}

/* ---- One case. ---- */

static bool run_step(report *r, const options *o, const fmsa_case *c, uint64_t seed, fmsa_call *call,
                     fmsa_operation operation, const char *name) {
    const fmsa_status status = fmsa_call_run(call, operation);
    if (status != FMSA_OK) {
        fail(r, o, c, seed, name, fmsa_last_error());
        return false;
    }
    if (call->complaint != NULL) fail(r, o, c, seed, name, call->complaint);
    return call->complaint == NULL;
}

static bool run_selection(report *r, const options *o, const fmsa_case *c, uint64_t seed, fmsa_call *call,
                          int32_t *block_indices) {
    if (!run_step(r, o, c, seed, call, FMSA_OPERATION_SELECT, "select")) return false;
    fmsa_call_read_indices(call, block_indices);
    r->sparse_cases[c->config.dtype]++;
    char complaint[200];
    if (!fmsa_compare_selection(c, block_indices, complaint, sizeof complaint)) {
        fail(r, o, c, seed, "select", complaint);
        return false;
    }
    r->selections[c->config.dtype]++;
    return run_step(r, o, c, seed, call, FMSA_OPERATION_SCHEDULE, "schedule");
}

/* The operations one after another: every gradient by the operation that gives nothing else. */
static bool run_apart(report *r, const options *o, const fmsa_case *c, uint64_t seed, int32_t *block_indices,
                      fmsa_reference_outputs *outputs) {
    fmsa_call call;
    fmsa_call_open(&call, c, &o->device);
    bool ran = c->config.mode == FMSA_MODE_DENSE || run_selection(r, o, c, seed, &call, block_indices);
    ran = ran && run_step(r, o, c, seed, &call, FMSA_OPERATION_FORWARD, "forward") &&
          run_step(r, o, c, seed, &call, FMSA_OPERATION_PROXY_LOSS, "proxy_loss") &&
          run_step(r, o, c, seed, &call, FMSA_OPERATION_BACKWARD, "backward");
    fmsa_call_read(&call, outputs);
    fmsa_call_close(&call);
    return ran;
}

static bool run_together(report *r, const options *o, const fmsa_case *c, uint64_t seed,
                         fmsa_reference_outputs *outputs) {
    fmsa_call call;
    fmsa_call_open(&call, c, &o->device);
    const fmsa_status status = fmsa_call_run_all(&call);
    if (status != FMSA_OK) fail(r, o, c, seed, "backward_with_proxy", fmsa_last_error());
    if (call.complaint != NULL) fail(r, o, c, seed, "backward_with_proxy", call.complaint);
    const bool ran = status == FMSA_OK && call.complaint == NULL;
    fmsa_call_read(&call, outputs);
    fmsa_call_close(&call);
    return ran;
}

static void check_case(report *r, const options *o, fmsa_dtype dtype, uint64_t seed) {
    const int64_t tokens = o->device.kind == FMSA_DEVICE_CUDA ? 700 : 300;
    fmsa_case c;
    fmsa_case_random(&c, seed, &(fmsa_case_limits){o->device.kind, dtype, tokens});
    if (o->portable) c.config.flags |= FMSA_FLAG_PORTABLE;
    int32_t *block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof *block_indices);
    fmsa_reference_outputs apart, together, exact, same_type;
    fmsa_reference_outputs_open(&apart, &c.config);
    fmsa_reference_outputs_open(&together, &c.config);
    fmsa_reference_outputs_open(&exact, &c.config);
    fmsa_reference_outputs_open(&same_type, &c.config);

    if (run_apart(r, o, &c, seed, block_indices, &apart) && run_together(r, o, &c, seed, &together)) {
        const fmsa_reference_inputs inputs = fmsa_case_inputs(&c, block_indices);
        fmsa_reference_evaluate(&c.config, &inputs, FMSA_DTYPE_FP64, &exact);
        fmsa_reference_evaluate(&c.config, &inputs, dtype, &same_type);
        fmsa_comparison comparisons[FMSA_QUANTITY_COUNT];
        fmsa_compare(&c, &apart, &same_type, &exact, comparisons);
        record(r, o, &c, seed, comparisons, false);
        fmsa_compare(&c, &together, &same_type, &exact, comparisons);
        record(r, o, &c, seed, comparisons, true);
    }

    fmsa_reference_outputs_close(&apart);
    fmsa_reference_outputs_close(&together);
    fmsa_reference_outputs_close(&exact);
    fmsa_reference_outputs_close(&same_type);
    free(block_indices);
    fmsa_case_close(&c);
}

/* ---- The command line. ---- */

static void print_usage(FILE *stream) {
    fprintf(stream,
            "usage: flashmsa check [--device cpu|cuda] [--dtype bf16|fp16|fp32|fp64] [--cases N] [--seed S]\n"
            "                      [--kernels best|portable]\n\n"
            "Runs every operation over random shapes, fragments, strides and score sharpness, and compares each\n"
            "output with a direct evaluation in fp64. An output passes when its error is at most twice that of\n"
            "a plain evaluation in the same type, plus a floor of a few roundings, in every row.\n\n"
            "  --device   where to run (default cpu)\n"
            "  --dtype    only this type (default: all that the device has)\n"
            "  --cases    random cases for each type (default 50)\n"
            "  --seed     of the first case (default 1)\n"
            "  --kernels  on a card: the best it can run (default), or those that every card can\n\n"
            "Exit code: 0 all passed, 1 something failed, 2 wrong usage.\n");
}

static int wrong_usage(const char *option, const char *value, const char *allowed) {
    fprintf(stderr, "flashmsa check: %s is '%s'; it must be %s\n", option, value, allowed);
    return 2;
}

static bool parse_number(const char *text, int64_t least, int64_t *value) {
    char *end;
    errno = 0;
    const long long parsed = strtoll(text, &end, 10);
    *value = parsed;
    return errno == 0 && end != text && *end == '\0' && parsed >= least;
}

static int set_device(options *o, const char *value) {
    const bool cuda = strcmp(value, "cuda") == 0;
    if (!cuda && strcmp(value, "cpu") != 0) return wrong_usage("--device", value, "cpu or cuda");
    if (!fmsa_tool_device_open(&o->device, cuda ? FMSA_DEVICE_CUDA : FMSA_DEVICE_CPU)) {
        fprintf(stderr, "flashmsa check: there is no CUDA device: no card, no driver, or a build without CUDA\n");
        return 2;
    }
    return 0;
}

static int set_dtype(options *o, const char *value) {
    for (int i = 0; i < DTYPES; i++)
        o->dtypes[i] = strcmp(value, dtype_names[i]) == 0;
    for (int i = 0; i < DTYPES; i++) {
        if (o->dtypes[i]) return 0;
    }
    return wrong_usage("--dtype", value, "bf16, fp16, fp32 or fp64");
}

static int set_kernels(options *o, const char *value) {
    o->portable = strcmp(value, "portable") == 0;
    if (o->portable || strcmp(value, "best") == 0) return 0;
    return wrong_usage("--kernels", value, "best or portable");
}

static int set_option(options *o, const char *option, const char *value) {
    int64_t number = 0;
    if (strcmp(option, "--device") == 0) return set_device(o, value);
    if (strcmp(option, "--dtype") == 0) return set_dtype(o, value);
    if (strcmp(option, "--kernels") == 0) return set_kernels(o, value);
    if (strcmp(option, "--cases") == 0) {
        if (!parse_number(value, 1, &o->cases)) return wrong_usage(option, value, "a number from 1");
        return 0;
    }
    if (strcmp(option, "--seed") == 0) {
        if (!parse_number(value, 0, &number)) return wrong_usage(option, value, "a number from 0");
        o->seed = (uint64_t)number;
        return 0;
    }
    fprintf(stderr, "flashmsa check: there is no option '%s'\n\n", option);
    print_usage(stderr);
    return 2;
}

static int parse_options(options *o, int argc, char **argv) {
    *o = (options){.device = {FMSA_DEVICE_CPU}, .cases = 50, .seed = 1, .dtypes = {true, true, true, true}};
    for (int i = 1; i < argc; i += 2) {
        if (strncmp(argv[i], "--", 2) != 0) {
            fprintf(stderr, "flashmsa check: unexpected argument '%s'\n\n", argv[i]);
            print_usage(stderr);
            return 2;
        }
        if (i + 1 == argc) {
            fprintf(stderr, "flashmsa check: '%s' needs a value\n", argv[i]);
            return 2;
        }
        const int code = set_option(o, argv[i], argv[i + 1]);
        if (code != 0) return code;
    }
    if (o->device.kind != FMSA_DEVICE_CUDA) return 0;
    o->dtypes[FMSA_DTYPE_FP64] = false;
    for (int i = 0; i < DTYPES; i++) {
        if (o->dtypes[i]) return 0;
    }
    return wrong_usage("--dtype", "fp64", "bf16, fp16 or fp32 with --device cuda");
}

int fmsa_tool_check(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_usage(stdout);
            return 0;
        }
    }
    options o;
    const int code = parse_options(&o, argc, argv);
    if (code != 0) return code;

    report *r = fmsa_zeros(1, sizeof *r);
    const bool shows_progress = isatty(STDERR_FILENO);
    int64_t count = 0;
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        if (!o.dtypes[dtype]) continue;
        for (int64_t i = 0; i < o.cases; i++) {
            check_case(r, &o, (fmsa_dtype)dtype, o.seed + (uint64_t)i);
            count++;
            if (shows_progress)
                fprintf(stderr, "\r%s: %lld of %lld ", dtype_names[dtype], (long long)i + 1, (long long)o.cases);
        }
    }
    if (shows_progress) fprintf(stderr, "\r%40s\r", "");
    print_report(r, &o);
    if (r->failures > MOST_FAILURES_SHOWN) printf("(only the first %d failures are shown)\n", MOST_FAILURES_SHOWN);
    printf("\n%lld cases, %lld failures\n", (long long)count, (long long)r->failures);
    const bool passed = r->failures == 0;
    free(r);
    return passed ? 0 : 1;
}
