/* Wrong arguments: each is refused with its status and a sentence that names the argument and what was given, and
 * nothing is written. */
#include <pthread.h>

#include "support.h"

/* A small valid call, to be spoilt in one place. */
typedef struct {
    fmsa_case c;
    fmsa_call call;
    void *workspace;
    size_t workspace_bytes;
} fixture;

enum { SPARE_BYTES = 1 << 20 };

static void open_fixture(fixture *f, fmsa_dtype dtype) {
    fmsa_config config = make_config(dtype, (int32_t[]){4, 2, 2, 1}, 8, 16, 2);
    config.num_threads = 1;
    open_documents(&f->c, &config, (int64_t[]){20, 30}, 2, 1);
    f->c.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&f->c), sizeof(int32_t));
    fmsa_reference_select(&f->c.config, f->c.q_proxy, f->c.k_proxy, f->c.block_indices);
    fmsa_call_open(&f->call, &f->c, &cpu);
    f->workspace_bytes = SPARE_BYTES;
    f->workspace = fmsa_tool_alloc(&cpu, SPARE_BYTES);
}

static void close_fixture(fixture *f) {
    fmsa_tool_free(&cpu, f->workspace);
    fmsa_call_close(&f->call);
    fmsa_case_close(&f->c);
}

/* The operation must be refused like this, and leave every output as it was. */
static void check_refused(fixture *f, fmsa_operation operation, fmsa_status expected, const char *name,
                          const char *value) {
    const fmsa_status status = fmsa_call_invoke(&f->call, operation, f->workspace, f->workspace_bytes);
    const char *sentence = fmsa_last_error();
    check(status == expected, "%s = %s: got %s (%s), not %s", name, value, fmsa_status_name(status), sentence,
          fmsa_status_name(expected));
    check(strstr(sentence, name) != NULL, "the sentence '%s' does not name %s", sentence, name);
    check(strstr(sentence, value) != NULL, "the sentence '%s' does not say what was given: %s", sentence, value);
    check(fmsa_call_untouched(&f->call), "%s = %s: refused, but something was written", name, value);
}

/* ---- The configuration. ---- */

typedef struct {
    const char *name, *value;
    void (*spoil)(fmsa_config *config);
} bad_config;

#define SPOIL(function, statements)                                                                                    \
    static void function(fmsa_config *c) {                                                                             \
        statements                                                                                                     \
    }
SPOIL(spoil_struct_size, c->struct_size = 7;)
SPOIL(spoil_device, c->device = (fmsa_device)2;)
SPOIL(spoil_device_index, c->device_index = -2;)
SPOIL(spoil_num_threads, c->num_threads = -1;)
SPOIL(spoil_dtype, c->dtype = (fmsa_dtype)4;)
SPOIL(spoil_mode, c->mode = (fmsa_mode)2;)
SPOIL(spoil_flags, c->flags = 0x400;)
SPOIL(spoil_both_ways, c->flags = FMSA_FLAG_KEY_OUTER | FMSA_FLAG_QUERY_OUTER;)
SPOIL(spoil_fp64_flag, c->flags = FMSA_FLAG_FP32_KV_GRADS; c->dtype = FMSA_DTYPE_FP64;)
SPOIL(spoil_num_heads, c->num_heads = 0;)
SPOIL(spoil_num_kv_heads, c->num_kv_heads = -4;)
SPOIL(spoil_num_proxy_heads, c->num_proxy_heads = 0;)
SPOIL(spoil_num_proxy_kv_heads, c->num_proxy_kv_heads = 0;)
SPOIL(spoil_kv_divides, c->num_kv_heads = 3;)
SPOIL(spoil_proxy_divides, c->num_heads = 6; c->num_proxy_heads = 4;)
SPOIL(spoil_proxy_kv_divides, c->num_proxy_kv_heads = 4;)
SPOIL(spoil_one_divides_other, c->num_heads = 12; c->num_kv_heads = 4; c->num_proxy_heads = 6;)
SPOIL(spoil_head_dim_0, c->head_dim = 0;)
SPOIL(spoil_head_dim_257, c->head_dim = 257;)
SPOIL(spoil_proxy_head_dim_0, c->proxy_head_dim = 0;)
SPOIL(spoil_proxy_head_dim_257, c->proxy_head_dim = 257;)
SPOIL(spoil_block_size_15, c->block_size = 15;)
SPOIL(spoil_block_size_65537, c->block_size = 65537;)
SPOIL(spoil_top_k_0, c->top_k = 0;)
SPOIL(spoil_top_k_negative, c->top_k = -3;)
SPOIL(spoil_local_blocks, c->local_blocks = -1;)
SPOIL(spoil_init_blocks, c->init_blocks = -1;)
SPOIL(spoil_total_q_negative, c->total_q = -1;)
SPOIL(spoil_total_q_large, c->total_q = 1LL << 31;)
SPOIL(spoil_total_k_negative, c->total_k = -1;)
SPOIL(spoil_total_k_large, c->total_k = 1LL << 31;)
SPOIL(spoil_num_fragments, c->num_fragments = -1;)
SPOIL(spoil_max_seqlen_k, c->max_seqlen_k = -1;)
SPOIL(spoil_kl_count, c->kl_count = -1;)
SPOIL(spoil_softmax_scale_nan, c->softmax_scale = NAN;)
SPOIL(spoil_softmax_scale_infinite, c->softmax_scale = INFINITY;)
SPOIL(spoil_softmax_scale_negative, c->softmax_scale = -0.5;)
SPOIL(spoil_proxy_scale_nan, c->proxy_scale = NAN;)
SPOIL(spoil_proxy_scale_negative, c->proxy_scale = -0.25;)

static const bad_config bad_configs[] = {
    {"struct_size", "7", spoil_struct_size},
    {"device", "2", spoil_device},
    {"device_index", "-2", spoil_device_index},
    {"num_threads", "-1", spoil_num_threads},
    {"dtype", "4", spoil_dtype},
    {"mode", "2", spoil_mode},
    {"flags", "0x400", spoil_flags},
    {"FMSA_FLAG_KEY_OUTER", "FMSA_FLAG_QUERY_OUTER", spoil_both_ways},
    {"FMSA_FLAG_FP32_KV_GRADS", "FMSA_DTYPE_FP64", spoil_fp64_flag},
    {"num_heads", "0", spoil_num_heads},
    {"num_kv_heads", "-4", spoil_num_kv_heads},
    {"num_proxy_heads", "0", spoil_num_proxy_heads},
    {"num_proxy_kv_heads", "0", spoil_num_proxy_kv_heads},
    {"num_kv_heads", "3", spoil_kv_divides},
    {"num_proxy_heads", "4", spoil_proxy_divides},
    {"num_proxy_kv_heads", "4", spoil_proxy_kv_divides},
    {"num_proxy_heads", "6", spoil_one_divides_other},
    {"head_dim", "0", spoil_head_dim_0},
    {"head_dim", "257", spoil_head_dim_257},
    {"proxy_head_dim", "0", spoil_proxy_head_dim_0},
    {"proxy_head_dim", "257", spoil_proxy_head_dim_257},
    {"block_size", "15", spoil_block_size_15},
    {"block_size", "65537", spoil_block_size_65537},
    {"top_k", "0", spoil_top_k_0},
    {"top_k", "-3", spoil_top_k_negative},
    {"local_blocks", "-1", spoil_local_blocks},
    {"init_blocks", "-1", spoil_init_blocks},
    {"total_q", "-1", spoil_total_q_negative},
    {"total_q", "2147483648", spoil_total_q_large},
    {"total_k", "-1", spoil_total_k_negative},
    {"total_k", "2147483648", spoil_total_k_large},
    {"num_fragments", "-1", spoil_num_fragments},
    {"max_seqlen_k", "-1", spoil_max_seqlen_k},
    {"kl_count", "-1", spoil_kl_count},
    {"softmax_scale", "nan", spoil_softmax_scale_nan},
    {"softmax_scale", "inf", spoil_softmax_scale_infinite},
    {"softmax_scale", "-0.5", spoil_softmax_scale_negative},
    {"proxy_scale", "nan", spoil_proxy_scale_nan},
    {"proxy_scale", "-0.25", spoil_proxy_scale_negative},
};

static void test_configuration(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_FP32);
    const fmsa_config good = f.call.config;
    for (size_t i = 0; i < sizeof bad_configs / sizeof *bad_configs; i++) {
        const bad_config *bad = &bad_configs[i];
        f.call.config = good;
        bad->spoil(&f.call.config);
        for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
            size_t bytes = 12345;
            check_refused(&f, (fmsa_operation)operation, FMSA_ERROR_ARGUMENT, bad->name, bad->value);
            assert_int_equal(fmsa_workspace_bytes(&f.call.config, (fmsa_operation)operation, &bytes),
                             FMSA_ERROR_ARGUMENT);
            assert_int_equal(fmsa_schedule_bytes(&f.call.config, &bytes), FMSA_ERROR_ARGUMENT);
            assert_int_equal(bytes, 12345);
        }
    }
    f.call.config = good;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        assert_int_equal(fmsa_workspace_bytes(NULL, (fmsa_operation)operation, &(size_t){0}), FMSA_ERROR_ARGUMENT);
        assert_non_null(strstr(fmsa_last_error(), "config"));
    }
    close_fixture(&f);
}

/* What the CPU takes and CUDA does not, is taken here. */
static void test_unusual_shapes_are_valid(void **state) {
    (void)state;
    size_t bytes;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){7, 1, 7, 7}, 80, 100, 5);
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        assert_int_equal(fmsa_workspace_bytes(&config, (fmsa_operation)operation, &bytes), FMSA_OK);
    }
}

static void test_sizes_need_a_place(void **state) {
    (void)state;
    size_t bytes;
    const fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){1, 1, 1, 1}, 8, 16, 1);
    assert_int_equal(fmsa_workspace_bytes(&config, FMSA_OPERATION_FORWARD, NULL), FMSA_ERROR_ARGUMENT);
    assert_non_null(strstr(fmsa_last_error(), "bytes"));
    assert_int_equal(fmsa_schedule_bytes(&config, NULL), FMSA_ERROR_ARGUMENT);
    assert_non_null(strstr(fmsa_last_error(), "bytes"));
    assert_int_equal(fmsa_workspace_bytes(&config, (fmsa_operation)6, &bytes), FMSA_ERROR_ARGUMENT);
    assert_non_null(strstr(fmsa_last_error(), "operation is 6"));
    assert_int_equal(fmsa_workspace_bytes(&config, (fmsa_operation)-1, &bytes), FMSA_ERROR_ARGUMENT);
}

/* ---- Tensors. ---- */

/* The fields that an operation must be given, and the outputs among all that it uses. */
static int list_fields(fmsa_call *call, fmsa_operation operation, fmsa_tensor *required[16], fmsa_tensor *outputs[16],
                       int *output_count) {
    fmsa_tensors *t = &call->tensors;
    fmsa_tensor *needs[FMSA_OPERATION_COUNT][10] = {
        [FMSA_OPERATION_SELECT] = {&t->q_proxy, &t->k_proxy, &t->block_indices},
        [FMSA_OPERATION_SCHEDULE] = {&t->block_indices},
        [FMSA_OPERATION_FORWARD] = {&t->q, &t->k, &t->v, &t->out, &t->lse},
        [FMSA_OPERATION_PROXY_LOSS] = {&t->q, &t->k, &t->lse, &t->q_proxy, &t->k_proxy},
        [FMSA_OPERATION_BACKWARD] = {&t->q, &t->k, &t->v, &t->out, &t->lse, &t->dout},
        [FMSA_OPERATION_BACKWARD_WITH_PROXY] = {&t->q, &t->k, &t->v, &t->out, &t->lse, &t->dout, &t->q_proxy,
                                                &t->k_proxy},
    };
    fmsa_tensor *gives[FMSA_OPERATION_COUNT][10] = {
        [FMSA_OPERATION_SELECT] = {&t->block_indices},
        [FMSA_OPERATION_FORWARD] = {&t->out, &t->lse},
        [FMSA_OPERATION_PROXY_LOSS] = {&t->dq_proxy, &t->dk_proxy},
        [FMSA_OPERATION_BACKWARD] = {&t->dq, &t->dk, &t->dv},
        [FMSA_OPERATION_BACKWARD_WITH_PROXY] = {&t->dq, &t->dk, &t->dv, &t->dq_proxy, &t->dk_proxy},
    };
    int count = 0;
    while (needs[operation][count] != NULL) {
        required[count] = needs[operation][count];
        count++;
    }
    *output_count = 0;
    while (gives[operation][*output_count] != NULL) {
        outputs[*output_count] = gives[operation][*output_count];
        (*output_count)++;
    }
    return count;
}

static void test_tensors(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_FP32);
    for (int i = 0; i < FMSA_OPERATION_COUNT; i++) {
        const fmsa_operation operation = (fmsa_operation)i;
        fmsa_tensor *required[16], *outputs[16];
        int output_count;
        const int required_count = list_fields(&f.call, operation, required, outputs, &output_count);
        for (int j = 0; j < required_count; j++) {
            const char *name = fmsa_call_find(&f.call, required[j])->name;
            const fmsa_tensor good = *required[j];
            required[j]->data = NULL;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "NULL");
            required[j]->data = (char *)good.data + 1;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "multiple of 4 bytes");
            *required[j] = good;
            required[j]->row_stride = -64;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "row_stride -64");
            *required[j] = good;
            required[j]->row_stride = INT64_C(1) << 60;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "row_stride 1152921504606846976");
            *required[j] = good;
            required[j]->head_stride = -8;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "head_stride -8");
            *required[j] = good;
        }
        for (int j = 0; j < output_count; j++) {
            const char *name = fmsa_call_find(&f.call, outputs[j])->name;
            const fmsa_tensor good = *outputs[j];
            outputs[j]->row_stride = 0;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "row_stride 0");
            *outputs[j] = good;
            outputs[j]->data = (char *)good.data + 2;
            check_refused(&f, operation, FMSA_ERROR_ARGUMENT, name, "multiple of 4 bytes");
            *outputs[j] = good;
        }
    }
    close_fixture(&f);
}

static void test_tensor_struct_and_kl(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        f.call.tensors.struct_size = 9;
        check_refused(&f, (fmsa_operation)operation, FMSA_ERROR_ARGUMENT, "tensors", "9");
        f.call.tensors.struct_size = sizeof f.call.tensors;
    }
    assert_int_equal(fmsa_forward(&f.call.config, NULL, f.workspace, f.workspace_bytes), FMSA_ERROR_ARGUMENT);
    assert_non_null(strstr(fmsa_last_error(), "tensors"));
    f.call.tensors.kl = (char *)f.call.kl + 1;
    check_refused(&f, FMSA_OPERATION_PROXY_LOSS, FMSA_ERROR_ARGUMENT, "kl", "multiple of 4");
    check_refused(&f, FMSA_OPERATION_BACKWARD_WITH_PROXY, FMSA_ERROR_ARGUMENT, "kl", "multiple of 4");
    f.call.tensors.kl = f.call.kl;
    f.call.tensors.grad_kl = (char *)f.call.grad_kl + 1;
    check_refused(&f, FMSA_OPERATION_PROXY_LOSS, FMSA_ERROR_ARGUMENT, "grad_kl", "multiple of 4");
    check_refused(&f, FMSA_OPERATION_BACKWARD_WITH_PROXY, FMSA_ERROR_ARGUMENT, "grad_kl", "multiple of 4");
    close_fixture(&f);
}

/* ---- Memory that the caller brings. ---- */

static void test_workspace(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    for (int i = 0; i < FMSA_OPERATION_COUNT; i++) {
        const fmsa_operation operation = (fmsa_operation)i;
        size_t needed;
        char text[32];
        assert_int_equal(fmsa_workspace_bytes(&f.call.config, operation, &needed), FMSA_OK);
        assert_in_range(needed, 0, SPARE_BYTES - 1);
        if (needed == 0) continue;
        void *const good = f.workspace;
        f.workspace_bytes = needed - 1;
        snprintf(text, sizeof text, "%zu", needed - 1);
        check_refused(&f, operation, FMSA_ERROR_WORKSPACE, "workspace", text);
        f.workspace_bytes = SPARE_BYTES - 1;
        f.workspace = (char *)good + 1;
        check_refused(&f, operation, FMSA_ERROR_ARGUMENT, "workspace", "multiple of");
        f.workspace = NULL;
        check_refused(&f, operation, FMSA_ERROR_ARGUMENT, "workspace", "NULL");
        f.workspace = good;
    }
    close_fixture(&f);
}

static void test_schedule_memory(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    const size_t needed = f.call.tensors.schedule_bytes;
    assert_true(needed > 0);
    for (int i = FMSA_OPERATION_SCHEDULE; i < FMSA_OPERATION_COUNT; i++) {
        char text[32];
        snprintf(text, sizeof text, "%zu", needed - 1);
        f.call.tensors.schedule_bytes = needed - 1;
        check_refused(&f, (fmsa_operation)i, FMSA_ERROR_WORKSPACE, "schedule", text);
        f.call.tensors.schedule_bytes = needed;
        f.call.tensors.schedule = NULL;
        check_refused(&f, (fmsa_operation)i, FMSA_ERROR_ARGUMENT, "schedule", "NULL");
        f.call.tensors.schedule = (char *)f.call.schedule + 1;
        check_refused(&f, (fmsa_operation)i, FMSA_ERROR_ARGUMENT, "schedule", "multiple of");
        f.call.tensors.schedule = f.call.schedule;
    }
    close_fixture(&f);
}

/* A schedule that nobody wrote, and one that was written for other fragments. */
static void test_schedule_of_another_call(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_FP32);
    for (int i = FMSA_OPERATION_FORWARD; i < FMSA_OPERATION_COUNT; i++) {
        check_refused(&f, (fmsa_operation)i, FMSA_ERROR_ARGUMENT, "schedule", "fragments");
    }
    assert_int_equal(fmsa_call_invoke(&f.call, FMSA_OPERATION_SCHEDULE, f.workspace, f.workspace_bytes), FMSA_OK);
    assert_int_equal(fmsa_call_invoke(&f.call, FMSA_OPERATION_FORWARD, f.workspace, f.workspace_bytes), FMSA_OK);
    f.call.config.num_fragments = 1;
    for (int i = FMSA_OPERATION_FORWARD; i < FMSA_OPERATION_COUNT; i++) {
        const fmsa_operation operation = (fmsa_operation)i;
        assert_int_equal(fmsa_call_invoke(&f.call, operation, f.workspace, f.workspace_bytes), FMSA_ERROR_ARGUMENT);
        assert_non_null(strstr(fmsa_last_error(), "schedule"));
    }
    close_fixture(&f);
}

static void test_scratch_limit_below_the_least(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    f.call.config.scratch_limit = 1;
    for (int i = 0; i < FMSA_OPERATION_COUNT; i++) {
        const fmsa_operation operation = (fmsa_operation)i;
        size_t bytes = 0;
        if (fmsa_workspace_bytes(&f.call.config, operation, &bytes) == FMSA_OK) {
            assert_in_range(bytes, 0, 1);
            continue;
        }
        check_refused(&f, operation, FMSA_ERROR_WORKSPACE, "scratch_limit", "1");
    }
    close_fixture(&f);
}

static void test_selection_in_dense_mode(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    f.call.config.mode = FMSA_MODE_DENSE;
    check_refused(&f, FMSA_OPERATION_SELECT, FMSA_ERROR_ARGUMENT, "mode", "FMSA_MODE_DENSE");
    check_refused(&f, FMSA_OPERATION_SCHEDULE, FMSA_ERROR_ARGUMENT, "mode", "FMSA_MODE_DENSE");
    size_t bytes = 1;
    assert_int_equal(fmsa_schedule_bytes(&f.call.config, &bytes), FMSA_OK);
    assert_int_equal(bytes, 0);
    close_fixture(&f);
}

/* ---- Fragments. The good ones: queries and keys 0...20, 20...50. ---- */

static void test_fragments(void **state) {
    (void)state;
    static const struct {
        int array, index;
        int32_t spoilt;
        const char *name, *value;
    } bad[] = {
        {0, 0, -1, "q_begin[0]", "-1"},
        {0, 0, 21, "q_begin[0]", "21"}, /* after its end */
        {0, 1, 19, "q_begin[1]", "19"}, /* inside the first */
        {1, 1, 51, "q_end[1]", "51"},   /* past total_q */
        {2, 0, -5, "k_begin[0]", "-5"},
        {2, 1, 10, "k_begin[1]", "10"}, /* inside the first's keys, without starting where it does */
        {3, 1, 51, "k_end[1]", "51"},
        {3, 1, 15, "k_end[1]", "15"},           /* before its begin */
        {3, 0, 19, "fragment 0", "20 queries"}, /* and 19 keys */
        {2, 1, 45, "fragment 1", "5 keys"},
    };
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int32_t *entry = (int32_t *)f.call.fragments[bad[i].array] + bad[i].index;
        const int32_t good = *entry;
        *entry = bad[i].spoilt;
        for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
            check_refused(&f, (fmsa_operation)operation, FMSA_ERROR_ARGUMENT, bad[i].name, bad[i].value);
        }
        *entry = good;
    }
    f.call.config.max_seqlen_k = 29;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        check_refused(&f, (fmsa_operation)operation, FMSA_ERROR_ARGUMENT, "max_seqlen_k", "30 keys");
    }
    close_fixture(&f);
}

static void test_fragment_arrays_missing(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    const int32_t **arrays[] = {&f.call.config.q_begin, &f.call.config.q_end, &f.call.config.k_begin,
                                &f.call.config.k_end};
    for (int i = 0; i < 4; i++) {
        const int32_t *good = *arrays[i];
        *arrays[i] = NULL;
        for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
            check_refused(&f, (fmsa_operation)operation, FMSA_ERROR_ARGUMENT, "q_begin", "NULL");
        }
        *arrays[i] = good;
    }
    close_fixture(&f);
}

/* A backwards list of documents is refused although each alone would do. */
static void test_fragments_out_of_order(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    memcpy(f.call.fragments[0], (int32_t[]){0, 30}, 8);
    memcpy(f.call.fragments[1], (int32_t[]){30, 50}, 8);
    memcpy(f.call.fragments[2], (int32_t[]){20, 0}, 8);
    memcpy(f.call.fragments[3], (int32_t[]){50, 20}, 8);
    check_refused(&f, FMSA_OPERATION_FORWARD, FMSA_ERROR_ARGUMENT, "k_begin[1]", "0");
    close_fixture(&f);
}

/* ---- Block indices. ---- */

static void test_block_indices(void **state) {
    (void)state;
    static const struct {
        int64_t row;
        int32_t block[2];
        const char *value;
    } bad[] = {
        {49, {0, 2}, "2"},  /* the document has blocks 0 and 1 */
        {30, {1, -1}, "1"}, /* the row's position is 10: block 1 begins at 16 */
        {49, {-2, 0}, "-2"}, {49, {INT32_MAX, 0}, "2147483647"}, {49, {INT32_MIN, 0}, "-2147483648"},
        {49, {1, 1}, "1"}, /* twice */
    };
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int32_t *row = f.c.block_indices + (1 * f.c.config.total_q + bad[i].row) * 2;
        int32_t good[2];
        char name[16];
        memcpy(good, row, sizeof good);
        memcpy(row, bad[i].block, sizeof good);
        fmsa_call_write_indices(&f.call, f.c.block_indices);
        snprintf(name, sizeof name, "%lld", (long long)bad[i].row);
        check_refused(&f, FMSA_OPERATION_SCHEDULE, FMSA_ERROR_ARGUMENT, "block_indices", bad[i].value);
        assert_non_null(strstr(fmsa_last_error(), name));
        memcpy(row, good, sizeof good);
    }
    close_fixture(&f);
}

/* ---- Devices and what is said about the library. ---- */

static void test_cuda_where_there_is_none(void **state) {
    (void)state;
    if (fmsa_device_count(FMSA_DEVICE_CUDA) > 0) skip();
    const bool built_with_cuda = strstr(fmsa_build_info(), "cuda=none") == NULL;
    fixture f;
    open_fixture(&f, FMSA_DTYPE_BF16);
    f.call.config.device = FMSA_DEVICE_CUDA;
    f.call.config.head_dim = f.call.config.proxy_head_dim = 64;
    f.call.config.block_size = 64;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        check_refused(&f, (fmsa_operation)operation, built_with_cuda ? FMSA_ERROR_DEVICE : FMSA_ERROR_UNSUPPORTED,
                      built_with_cuda ? "driver" : "FMSA_DEVICE_CUDA", built_with_cuda ? "" : "without CUDA");
    }
    close_fixture(&f);
}

static void test_devices(void **state) {
    (void)state;
    char text[200];
    assert_int_equal(fmsa_device_count(FMSA_DEVICE_CPU), 1);
    assert_int_equal(fmsa_device_count((fmsa_device)5), 0);
    assert_int_equal(fmsa_device_description(FMSA_DEVICE_CPU, 0, text, sizeof text), FMSA_OK);
    assert_true(strlen(text) > 0 && strchr(text, '\n') == NULL);
    memset(text, 'x', sizeof text);
    assert_int_equal(fmsa_device_description(FMSA_DEVICE_CPU, 0, text, 5), FMSA_OK);
    assert_true(memchr(text, 0, 5) != NULL && text[5] == 'x');
    assert_int_equal(fmsa_device_description(FMSA_DEVICE_CPU, 1, text, sizeof text), FMSA_ERROR_ARGUMENT);
    assert_int_equal(fmsa_device_description(FMSA_DEVICE_CPU, -1, text, sizeof text), FMSA_ERROR_ARGUMENT);
    assert_int_equal(fmsa_device_description(FMSA_DEVICE_CPU, 0, NULL, 10), FMSA_ERROR_ARGUMENT);
}

static void test_words(void **state) {
    (void)state;
    assert_string_equal(fmsa_status_name(FMSA_OK), "FMSA_OK");
    assert_string_equal(fmsa_status_name(FMSA_ERROR_WORKSPACE), "FMSA_ERROR_WORKSPACE");
    assert_string_equal(fmsa_status_name((fmsa_status)99), "unknown status");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", FMSA_VERSION_MAJOR, FMSA_VERSION_MINOR, FMSA_VERSION_PATCH);
    assert_string_equal(fmsa_version(), version);
    assert_non_null(strstr(fmsa_build_info(), "backends=cpu"));
}

static void *read_last_error(void *copy) {
    strcpy(copy, fmsa_last_error());
    return NULL;
}

/* Each thread has its own sentence, and a thread whose calls all succeeded has none. */
static void test_last_error_belongs_to_the_thread(void **state) {
    (void)state;
    char other[200] = "x";
    pthread_t thread;
    assert_int_equal(fmsa_workspace_bytes(NULL, FMSA_OPERATION_FORWARD, &(size_t){0}), FMSA_ERROR_ARGUMENT);
    assert_int_equal(pthread_create(&thread, NULL, read_last_error, other), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_string_equal(other, "");
    assert_true(strlen(fmsa_last_error()) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_configuration),
        cmocka_unit_test(test_unusual_shapes_are_valid),
        cmocka_unit_test(test_sizes_need_a_place),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_tensor_struct_and_kl),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_schedule_memory),
        cmocka_unit_test(test_schedule_of_another_call),
        cmocka_unit_test(test_scratch_limit_below_the_least),
        cmocka_unit_test(test_selection_in_dense_mode),
        cmocka_unit_test(test_fragments),
        cmocka_unit_test(test_fragment_arrays_missing),
        cmocka_unit_test(test_fragments_out_of_order),
        cmocka_unit_test(test_block_indices),
        cmocka_unit_test(test_cuda_where_there_is_none),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_last_error_belongs_to_the_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
