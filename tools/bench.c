/* `flashmsa bench`: times every operation at one or several lengths, beside the speed of a large matrix product. */
#include <getopt.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "blas.h"
#include "clock.h"
#include "device.h"
#include "flashmsa.h"
#include "numbers.h"
#include "tools.h"

enum { MAX_LENGTHS = 32, MAX_REPEATS = 1000 };

typedef struct {
    fmsa_config config; /* all but what depends on the length */
    int64_t lengths[MAX_LENGTHS];
    int num_lengths;
    int64_t documents;
    int repeats;
    const char *json_path;
} bench_options;

/* What one operation did at one length. */
typedef struct {
    const char *name;
    double seconds; /* median */
    double flops;   /* useful, by the formulas of docs/algorithm.md */
    size_t workspace_bytes;
} bench_row;

typedef struct {
    int64_t length;
    int64_t edges;       /* E: selected visible (token, key) pairs, averaged over proxy heads */
    size_t memory_bytes; /* tensors, schedule and the largest workspace */
    long peak_kib;       /* largest resident set of the process so far */
    bench_row rows[FMSA_OPERATION_COUNT];
    int num_rows;
} bench_result;

/* ---- Options ---- */

static const char usage[] =
    "usage: flashmsa bench [OPTION...]\n"
    "Times every operation on random inputs: medians, useful GFLOP/s, and how these compare with a large sgemm\n"
    "(OpenBLAS, when it is installed).\n\n"
    "  --tokens N[,N...]   lengths (16384)\n"
    "  --documents N       documents of equal length in each (1)\n"
    "  --heads Q/KV/P/PK   main query, main key/value, proxy query and proxy key heads (8/2/2/1)\n"
    "  --head-dim N        of the main attention and of the proxy (64)\n"
    "  --block N           keys per block (128)\n"
    "  --top-k N           blocks per token and proxy head (16)\n"
    "  --dtype TYPE        bf16, fp16, fp32 or fp64 (fp32)\n"
    "  --dense             every visible key instead of selected blocks\n"
    "  --device cpu|cuda   (cpu)\n"
    "  --threads N         CPU threads (all)\n"
    "  --deterministic     bit-identical results on every run (the CPU always gives them)\n"
    "  --repeats N         runs of each operation, of which the median counts (5)\n"
    "  --json FILE         write the figures there as well\n";

static int fail(const char *option, const char *value) {
    fprintf(stderr, "flashmsa bench: %s is '%s', which it cannot be; see `flashmsa bench --help`\n", option, value);
    return 2;
}

static bool check_status(fmsa_status status) {
    if (status != FMSA_OK) fprintf(stderr, "flashmsa bench: %s: %s\n", fmsa_status_name(status), fmsa_last_error());
    return status == FMSA_OK;
}

static bool parse_count(const char *text, long long least, long long most, long long *value) {
    char *end;
    *value = strtoll(text, &end, 10);
    return end != text && *end == '\0' && *value >= least && *value <= most;
}

static bool parse_lengths(char *text, bench_options *options) {
    options->num_lengths = 0;
    for (char *word = text, *next = text; next != NULL; word = next) {
        char *comma = strchr(word, ',');
        next = comma == NULL ? NULL : comma + 1;
        if (comma != NULL) *comma = '\0';
        long long length;
        if (options->num_lengths == MAX_LENGTHS || !parse_count(word, 1, INT32_MAX, &length)) return false;
        options->lengths[options->num_lengths++] = length;
    }
    return true;
}

static bool parse_heads(const char *text, fmsa_config *c) {
    int read = 0;
    return sscanf(text, "%d/%d/%d/%d%n", &c->num_heads, &c->num_kv_heads, &c->num_proxy_heads, &c->num_proxy_kv_heads,
                  &read) == 4 &&
           text[read] == '\0';
}

static bool parse_dtype(const char *text, fmsa_dtype *dtype) {
    static const char *const names[] = {"bf16", "fp16", "fp32", "fp64"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            *dtype = (fmsa_dtype)i;
            return true;
        }
    }
    return false;
}

static void default_options(bench_options *options) {
    memset(options, 0, sizeof *options);
    fmsa_config *c = &options->config;
    fmsa_config_init(c, sizeof *c);
    c->dtype = FMSA_DTYPE_FP32;
    c->num_heads = 8;
    c->num_kv_heads = 2;
    c->num_proxy_heads = 2;
    c->num_proxy_kv_heads = 1;
    c->head_dim = c->proxy_head_dim = 64;
    c->top_k = 16;
    options->lengths[options->num_lengths++] = 16384;
    options->documents = 1;
    options->repeats = 5;
}

/* Returns -1 to go on, otherwise the exit code. */
static int parse_options(int argc, char **argv, bench_options *options) {
    enum {
        TOKENS,
        DOCUMENTS,
        HEADS,
        HEAD_DIM,
        BLOCK,
        TOP_K,
        DTYPE,
        DENSE,
        DEVICE,
        THREADS,
        DETERMINISTIC,
        REPEATS,
        JSON,
        HELP
    };
    static const struct option names[] = {{"tokens", required_argument, NULL, TOKENS},
                                          {"documents", required_argument, NULL, DOCUMENTS},
                                          {"heads", required_argument, NULL, HEADS},
                                          {"head-dim", required_argument, NULL, HEAD_DIM},
                                          {"block", required_argument, NULL, BLOCK},
                                          {"top-k", required_argument, NULL, TOP_K},
                                          {"dtype", required_argument, NULL, DTYPE},
                                          {"dense", no_argument, NULL, DENSE},
                                          {"device", required_argument, NULL, DEVICE},
                                          {"threads", required_argument, NULL, THREADS},
                                          {"deterministic", no_argument, NULL, DETERMINISTIC},
                                          {"repeats", required_argument, NULL, REPEATS},
                                          {"json", required_argument, NULL, JSON},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    default_options(options);
    fmsa_config *c = &options->config;
    for (int name; (name = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        long long count = 0;
        bool good = true;
        switch (name) {
        case TOKENS:
            good = parse_lengths(optarg, options);
            break;
        case DOCUMENTS:
            good = parse_count(optarg, 1, INT32_MAX, &count);
            options->documents = count;
            break;
        case HEADS:
            good = parse_heads(optarg, c);
            break;
        case HEAD_DIM:
            good = parse_count(optarg, 1, 256, &count);
            c->head_dim = c->proxy_head_dim = (int32_t)count;
            break;
        case BLOCK:
            good = parse_count(optarg, 1, INT32_MAX, &count);
            c->block_size = (int32_t)count;
            break;
        case TOP_K:
            good = parse_count(optarg, 1, INT32_MAX, &count);
            c->top_k = (int32_t)count;
            break;
        case DTYPE:
            good = parse_dtype(optarg, &c->dtype);
            break;
        case DENSE:
            c->mode = FMSA_MODE_DENSE;
            break;
        case DEVICE:
            good = strcmp(optarg, "cpu") == 0 || strcmp(optarg, "cuda") == 0;
            c->device = strcmp(optarg, "cuda") == 0 ? FMSA_DEVICE_CUDA : FMSA_DEVICE_CPU;
            break;
        case THREADS:
            good = parse_count(optarg, 0, 1 << 16, &count);
            c->num_threads = (int32_t)count;
            break;
        case DETERMINISTIC:
            c->flags |= FMSA_FLAG_DETERMINISTIC;
            break;
        case REPEATS:
            good = parse_count(optarg, 1, MAX_REPEATS, &count);
            options->repeats = (int)count;
            break;
        case JSON:
            options->json_path = optarg;
            break;
        case HELP:
            fputs(usage, stdout);
            return 0;
        default:
            fputs(usage, stderr);
            return 2;
        }
        if (!good) {
            char option[32];
            snprintf(option, sizeof option, "--%s", names[name].name);
            return fail(option, optarg);
        }
    }
    if (optind < argc) return fail("an argument", argv[optind]);
    for (int i = 0; i < options->num_lengths; i++) {
        if (options->documents > options->lengths[i]) return fail("--documents", "more than the tokens");
    }
    size_t bytes; /* any size will do: the call refuses shapes that do not fit together */
    if (!check_status(fmsa_workspace_bytes(c, FMSA_OPERATION_FORWARD, &bytes))) return 2;
    return -1;
}

/* ---- One length ---- */

/* The tensors of a call and their memory on the device. */
typedef struct {
    const fmsa_tool_device *device;
    fmsa_config config;
    fmsa_tensors tensors;
    int32_t *fragments; /* on the device: begins, then ends */
    void *workspace;
    size_t workspace_bytes[FMSA_OPERATION_COUNT];
    size_t total_bytes;
    uint64_t random_state;
} bench_call;

static size_t dtype_bytes(fmsa_dtype dtype) {
    return dtype == FMSA_DTYPE_FP64 ? 8 : dtype == FMSA_DTYPE_FP32 ? 4 : 2;
}

static double random_uniform(bench_call *call) {
    call->random_state ^= call->random_state << 13;
    call->random_state ^= call->random_state >> 7;
    call->random_state ^= call->random_state << 17;
    return ((double)(call->random_state >> 11) + 0.5) * 0x1p-53;
}

static void *device_alloc(bench_call *call, size_t bytes) {
    call->total_bytes += bytes;
    return fmsa_tool_alloc(call->device, bytes);
}

static void make_tensor(bench_call *call, fmsa_tensor *tensor, int64_t rows, int64_t heads, int64_t dim,
                        size_t element) {
    tensor->row_stride = heads * dim;
    tensor->head_stride = dim;
    tensor->data = device_alloc(call, (size_t)(rows * heads * dim) * element);
}

static void fill_random(bench_call *call, const fmsa_tensor *tensor, int64_t rows) {
    const size_t element = dtype_bytes(call->config.dtype);
    const int64_t count = rows * tensor->row_stride;
    char *host = malloc((size_t)count * element);
    if (host == NULL) {
        fprintf(stderr, "flashmsa bench: out of memory\n");
        exit(1);
    }
    for (int64_t i = 0; i < count; i++) {
        const double normal = sqrt(-2 * log(random_uniform(call))) * cos(6.283185307179586 * random_uniform(call));
        fmsa_encode(host, i, call->config.dtype, normal);
    }
    fmsa_tool_write(call->device, tensor->data, host, (size_t)count * element);
    free(host);
}

static void make_fragments(bench_call *call, int64_t documents) {
    fmsa_config *c = &call->config;
    int32_t *host = malloc(((size_t)documents + 1) * sizeof *host);
    for (int64_t i = 0; host != NULL && i <= documents; i++)
        host[i] = (int32_t)(c->total_q * i / documents);
    call->fragments = device_alloc(call, ((size_t)documents + 1) * sizeof *host);
    fmsa_tool_write(call->device, call->fragments, host, ((size_t)documents + 1) * sizeof *host);
    free(host);
    c->num_fragments = documents;
    c->q_begin = c->k_begin = call->fragments;
    c->q_end = c->k_end = call->fragments + 1;
    c->max_seqlen_k = c->total_k / documents + 1;
}

static bool make_workspace(bench_call *call) {
    size_t most = 0;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        size_t *bytes = &call->workspace_bytes[operation];
        if (!check_status(fmsa_workspace_bytes(&call->config, (fmsa_operation)operation, bytes))) return false;
        if (*bytes > most) most = *bytes;
    }
    call->workspace = device_alloc(call, most);
    if (!check_status(fmsa_schedule_bytes(&call->config, &call->tensors.schedule_bytes))) return false;
    call->tensors.schedule = device_alloc(call, call->tensors.schedule_bytes);
    return true;
}

static bool make_call(bench_call *call, const fmsa_tool_device *device, const bench_options *options, int64_t length) {
    memset(call, 0, sizeof *call);
    call->device = device;
    call->config = options->config;
    call->random_state = 0x9e3779b97f4a7c15u;
    fmsa_config *c = &call->config;
    c->total_q = c->total_k = length;
    make_fragments(call, options->documents);
    fmsa_tensors *t = &call->tensors;
    t->struct_size = sizeof *t;
    const size_t element = dtype_bytes(c->dtype), real = c->dtype == FMSA_DTYPE_FP64 ? 8 : 4;
    fmsa_tensor *const main_q[] = {&t->q, &t->out, &t->dout, &t->dq}, *const main_kv[] = {&t->k, &t->v, &t->dk, &t->dv};
    fmsa_tensor *const proxy_q[] = {&t->q_proxy, &t->dq_proxy}, *const proxy_k[] = {&t->k_proxy, &t->dk_proxy};
    for (int i = 0; i < 4; i++)
        make_tensor(call, main_q[i], length, c->num_heads, c->head_dim, element);
    for (int i = 0; i < 4; i++)
        make_tensor(call, main_kv[i], length, c->num_kv_heads, c->head_dim, element);
    for (int i = 0; i < 2; i++)
        make_tensor(call, proxy_q[i], length, c->num_proxy_heads, c->proxy_head_dim, element);
    for (int i = 0; i < 2; i++)
        make_tensor(call, proxy_k[i], length, c->num_proxy_kv_heads, c->proxy_head_dim, element);
    make_tensor(call, &t->lse, length, c->num_heads, 1, real);
    if (c->mode == FMSA_MODE_SPARSE) {
        make_tensor(call, &t->block_indices, length, c->num_proxy_heads, c->top_k, sizeof(int32_t));
    }
    t->kl = device_alloc(call, real);
    fmsa_tensor *const inputs_q[] = {&t->q, &t->q_proxy, &t->dout}, *const inputs_k[] = {&t->k, &t->v, &t->k_proxy};
    for (int i = 0; i < 3; i++)
        fill_random(call, inputs_q[i], length);
    for (int i = 0; i < 3; i++)
        fill_random(call, inputs_k[i], length);
    return make_workspace(call);
}

static void free_call(bench_call *call) {
    fmsa_tensors *t = &call->tensors;
    void *const memory[] = {t->q.data,
                            t->k.data,
                            t->v.data,
                            t->q_proxy.data,
                            t->k_proxy.data,
                            t->out.data,
                            t->dout.data,
                            t->dq.data,
                            t->dk.data,
                            t->dv.data,
                            t->dq_proxy.data,
                            t->dk_proxy.data,
                            t->lse.data,
                            t->block_indices.data,
                            t->kl,
                            t->schedule,
                            call->workspace,
                            call->fragments};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        if (memory[i] != NULL) fmsa_tool_free(call->device, memory[i]);
    }
}

/* Visible pairs of a document of `length` tokens. */
static double visible_pairs(double length) {
    return length * (length + 1) / 2;
}

/* Counts E from block_indices: every block but the newest is full. */
static double count_edges(const bench_call *call) {
    const fmsa_config *c = &call->config;
    const int64_t documents = c->num_fragments;
    double pairs = 0;
    if (c->mode == FMSA_MODE_DENSE) {
        for (int64_t f = 0; f < documents; f++) {
            pairs += visible_pairs((double)(c->total_q * (f + 1) / documents - c->total_q * f / documents));
        }
        return pairs;
    }
    const int64_t entries = c->total_q * c->num_proxy_heads * c->top_k;
    int32_t *indices = malloc((size_t)entries * sizeof *indices);
    if (indices == NULL) return NAN;
    fmsa_tool_read(call->device, indices, call->tensors.block_indices.data, (size_t)entries * sizeof *indices);
    int64_t i = 0;
    for (int64_t f = 0; f < documents; f++) {
        const int64_t length = c->total_q * (f + 1) / documents - c->total_q * f / documents;
        for (int64_t position = 0; position < length; position++) {
            for (int64_t end = i + (int64_t)c->num_proxy_heads * c->top_k; i < end; i++) {
                if (indices[i] < 0) continue;
                const int64_t seen = position + 1 - (int64_t)indices[i] * c->block_size;
                pairs += seen < c->block_size ? (double)seen : (double)c->block_size;
            }
        }
    }
    free(indices);
    return pairs / c->num_proxy_heads;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef fmsa_status operation_function(const fmsa_config *, const fmsa_tensors *, void *, size_t);

/* The median of several runs; one more before them warms up. Negative when a call failed. */
static double time_operation(bench_call *call, operation_function *run, size_t workspace_bytes, int repeats) {
    double seconds[MAX_REPEATS];
    for (int i = -1; i < repeats; i++) {
        const double start = fmsa_tool_seconds();
        if (!check_status(run(&call->config, &call->tensors, call->workspace, workspace_bytes))) return -1;
        const char *error;
        if (!fmsa_tool_synchronise(call->device, &error)) {
            fprintf(stderr, "flashmsa bench: the device reports: %s\n", error);
            return -1;
        }
        if (i >= 0) seconds[i] = fmsa_tool_seconds() - start;
    }
    qsort(seconds, (size_t)repeats, sizeof *seconds, compare_doubles);
    return (seconds[(repeats - 1) / 2] + seconds[repeats / 2]) / 2;
}

static bool bench_length(const fmsa_tool_device *device, const bench_options *options, int64_t length,
                         bench_result *result) {
    static const struct {
        const char *name;
        fmsa_operation operation;
        operation_function *run;
    } operations[] = {
        {"select", FMSA_OPERATION_SELECT, fmsa_select},
        {"schedule", FMSA_OPERATION_SCHEDULE, fmsa_schedule},
        {"forward", FMSA_OPERATION_FORWARD, fmsa_forward},
        {"proxy_loss", FMSA_OPERATION_PROXY_LOSS, fmsa_proxy_loss},
        {"backward", FMSA_OPERATION_BACKWARD, fmsa_backward},
        {"backward_with_proxy", FMSA_OPERATION_BACKWARD_WITH_PROXY, fmsa_backward_with_proxy},
    };
    bench_call call;
    bool good = make_call(&call, device, options, length);
    const fmsa_config *c = &call.config;
    result->length = length;
    result->num_rows = 0;
    for (int i = 0; good && i < FMSA_OPERATION_COUNT; i++) {
        const fmsa_operation operation = operations[i].operation;
        if (c->mode == FMSA_MODE_DENSE && operation <= FMSA_OPERATION_SCHEDULE) continue;
        bench_row *row = &result->rows[result->num_rows++];
        row->name = operations[i].name;
        row->workspace_bytes = call.workspace_bytes[operation];
        row->seconds = time_operation(&call, operations[i].run, row->workspace_bytes, options->repeats);
        good = row->seconds >= 0;
    }
    if (good) {
        const double edges = count_edges(&call);
        const double main_flops = (double)c->head_dim * c->num_heads * edges;
        const double proxy_flops = (double)c->proxy_head_dim * c->num_proxy_heads;
        const double documents = (double)c->num_fragments;
        const double flops[FMSA_OPERATION_COUNT] = {
            [FMSA_OPERATION_SELECT] = 2 * proxy_flops * documents * visible_pairs((double)length / documents),
            [FMSA_OPERATION_FORWARD] = 4 * main_flops,
            [FMSA_OPERATION_PROXY_LOSS] = 2 * main_flops + 6 * proxy_flops * edges,
            [FMSA_OPERATION_BACKWARD] = 10 * main_flops,
            [FMSA_OPERATION_BACKWARD_WITH_PROXY] = 10 * main_flops + 6 * proxy_flops * edges};
        const int skipped = FMSA_OPERATION_COUNT - result->num_rows;
        for (int i = 0; i < result->num_rows; i++)
            result->rows[i].flops = flops[operations[i + skipped].operation];
        result->edges = (int64_t)edges;
        result->memory_bytes = call.total_bytes;
        struct rusage resources;
        getrusage(RUSAGE_SELF, &resources);
        result->peak_kib = resources.ru_maxrss;
    }
    free_call(&call);
    return good;
}

/* ---- Output ---- */

static const bench_row *find_row(const bench_result *result, const char *name) {
    for (int i = 0; i < result->num_rows; i++) {
        if (strcmp(result->rows[i].name, name) == 0) return &result->rows[i];
    }
    return NULL;
}

/* Useful GFLOP/s of the main attention, forward and backward together. */
static double step_gflops(const bench_result *result) {
    const bench_row *forward = find_row(result, "forward"), *backward = find_row(result, "backward");
    return (forward->flops + backward->flops) / (forward->seconds + backward->seconds) * 1e-9;
}

/* Nanoseconds a token, forward and backward together, without the proxy scores. */
static double step_nanoseconds(const bench_result *result) {
    double seconds = find_row(result, "forward")->seconds + find_row(result, "backward")->seconds;
    const bench_row *schedule = find_row(result, "schedule");
    if (schedule != NULL) seconds += schedule->seconds;
    return seconds / (double)result->length * 1e9;
}

static void print_result(const bench_result *result, double sgemm) {
    printf("\n%lld tokens; %.1f selected keys a token; %.1f MiB of tensors and scratch; peak of the process %.1f MiB\n",
           (long long)result->length, (double)result->edges / (double)result->length,
           (double)result->memory_bytes / 1048576, (double)result->peak_kib / 1024);
    printf("  %-22s %12s %12s %10s %14s\n", "operation", "ms", "GFLOP/s", "of sgemm", "workspace MiB");
    for (int i = 0; i < result->num_rows; i++) {
        const bench_row *row = &result->rows[i];
        printf("  %-22s %12.3f ", row->name, row->seconds * 1e3);
        if (row->flops > 0)
            printf("%12.1f ", row->flops / row->seconds * 1e-9);
        else
            printf("%12s ", "");
        if (row->flops > 0 && sgemm > 0)
            printf("%10.2f ", row->flops / row->seconds * 1e-9 / sgemm);
        else
            printf("%10s ", "");
        printf("%14.1f\n", (double)row->workspace_bytes / 1048576);
    }
    printf("  forward + backward: %.1f GFLOP/s", step_gflops(result));
    if (sgemm > 0) printf(", %.2f of sgemm", step_gflops(result) / sgemm);
    printf("; %.0f ns a token with the schedule\n", step_nanoseconds(result));
}

static bool write_json(FILE *file, const bench_options *options, const bench_result *results, double sgemm) {
    const fmsa_config *c = &options->config;
    char device[256] = "";
    fmsa_device_description(c->device, 0, device, sizeof device);
    static const char *const dtypes[] = {"bf16", "fp16", "fp32", "fp64"};
    fprintf(file, "{\n  \"version\": \"%s\",\n  \"device\": \"%s\",\n  \"dtype\": \"%s\",\n  \"mode\": \"%s\",\n",
            fmsa_version(), device, dtypes[c->dtype], c->mode == FMSA_MODE_DENSE ? "dense" : "sparse");
    fprintf(file, "  \"heads\": [%d, %d, %d, %d],\n  \"head_dim\": %d,\n  \"block_size\": %d,\n  \"top_k\": %d,\n",
            c->num_heads, c->num_kv_heads, c->num_proxy_heads, c->num_proxy_kv_heads, c->head_dim, c->block_size,
            c->top_k);
    fprintf(file, "  \"documents\": %lld,\n  \"repeats\": %d,\n  \"sgemm_gflops\": %.1f,\n  \"lengths\": [",
            (long long)options->documents, options->repeats, sgemm);
    for (int i = 0; i < options->num_lengths; i++) {
        const bench_result *result = &results[i];
        fprintf(file, "%s\n    {\"tokens\": %lld, \"edges\": %lld, \"memory_bytes\": %zu, \"peak_kib\": %ld,\n",
                i > 0 ? "," : "", (long long)result->length, (long long)result->edges, result->memory_bytes,
                result->peak_kib);
        fprintf(file, "     \"step_gflops\": %.2f, \"step_ns_per_token\": %.1f,\n     \"operations\": {",
                step_gflops(result), step_nanoseconds(result));
        for (int j = 0; j < result->num_rows; j++) {
            const bench_row *row = &result->rows[j];
            fprintf(file, "%s\n       \"%s\": {\"ms\": %.4f, \"gflop\": %.4f, \"workspace_bytes\": %zu}",
                    j > 0 ? "," : "", row->name, row->seconds * 1e3, row->flops * 1e-9, row->workspace_bytes);
        }
        fprintf(file, "}}");
    }
    fprintf(file, "\n  ]\n}\n");
    return fclose(file) == 0;
}

int fmsa_tool_bench(int argc, char **argv) {
    bench_options options;
    const int exit_code = parse_options(argc, argv, &options);
    if (exit_code >= 0) return exit_code;
    fmsa_tool_device device;
    if (!fmsa_tool_device_open(&device, options.config.device)) {
        fprintf(stderr, "flashmsa bench: no CUDA device can be used here; see `flashmsa info`\n");
        return 1;
    }
    FILE *json = options.json_path != NULL ? fopen(options.json_path, "w") : NULL;
    if (options.json_path != NULL && json == NULL) {
        fprintf(stderr, "flashmsa bench: cannot write %s\n", options.json_path);
        return 1;
    }
    double sgemm = 0;
    char description[256] = "";
    fmsa_device_description(options.config.device, 0, description, sizeof description);
    printf("%s\n", description);
    if (options.config.device == FMSA_DEVICE_CPU) {
        if (fmsa_tool_blas_gflops(options.config.num_threads, &sgemm))
            printf("sgemm 2048 (OpenBLAS): %.1f GFLOP/s\n", sgemm);
        else
            printf("OpenBLAS is not installed: no sgemm to compare with\n");
    }
    bench_result results[MAX_LENGTHS];
    for (int i = 0; i < options.num_lengths; i++) {
        if (!bench_length(&device, &options, options.lengths[i], &results[i])) return 1;
        print_result(&results[i], sgemm);
        fflush(stdout);
    }
    if (options.num_lengths > 1) {
        printf("\ntime a token at %lld tokens over that at %lld: %.2f\n",
               (long long)options.lengths[options.num_lengths - 1], (long long)options.lengths[0],
               step_nanoseconds(&results[options.num_lengths - 1]) / step_nanoseconds(&results[0]));
    }
    if (json != NULL && !write_json(json, &options, results, sgemm)) {
        fprintf(stderr, "flashmsa bench: cannot write %s\n", options.json_path);
        return 1;
    }
    return 0;
}
