/* Workspace and schedule: how large they are, that no size overflows, and that a limit changes nothing but the size. */
#include "support.h"

static fmsa_config make_large(int64_t tokens, int64_t documents) {
    fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){64, 4, 4, 1}, 128, 128, 16);
    config.num_threads = 2;
    config.total_q = config.total_k = tokens;
    config.num_fragments = documents;
    return config;
}

static double workspace_bytes(const fmsa_config *config, fmsa_operation operation) {
    size_t bytes;
    const fmsa_status status = fmsa_workspace_bytes(config, operation, &bytes);
    check(status == FMSA_OK, "%s: %s", fmsa_status_name(status), fmsa_last_error());
    return (double)bytes;
}

static double schedule_bytes(const fmsa_config *config) {
    size_t bytes;
    assert_int_equal(fmsa_schedule_bytes(config, &bytes), FMSA_OK);
    return (double)bytes;
}

/* The fragment arrays are never read for it: they are NULL here. */
static void test_sizes_grow_linearly(void **state) {
    (void)state;
    const int64_t base = 1 << 17;
    for (int mode = 0; mode < 2; mode++) {
        for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
            double bytes[4];
            for (int i = 0; i < 4; i++) {
                fmsa_config config = make_large(base << i, 8);
                config.mode = (fmsa_mode)mode;
                bytes[i] = workspace_bytes(&config, (fmsa_operation)operation);
            }
            for (int i = 0; i < 3; i++) {
                check(bytes[i + 1] <= 2.01 * bytes[i] + 65536,
                      "operation %d: %.0f bytes for %lld tokens, %.0f for twice", operation, bytes[i],
                      (long long)(base << i), bytes[i + 1]);
            }
        }
    }
    const fmsa_config once = make_large(base, 8), twice = make_large(2 * base, 8);
    assert_true(schedule_bytes(&twice) <= 2.01 * schedule_bytes(&once) + 65536);
}

/* One long document and many short ones: what counts is the tokens in all, not documents times the longest. */
static void test_many_documents_cost_little(void **state) {
    (void)state;
    const int64_t tokens = 131072 + 63 * 1024;
    fmsa_config one = make_large(tokens, 1), many = make_large(tokens, 64);
    many.max_seqlen_k = 131072;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        assert_true(workspace_bytes(&many, (fmsa_operation)operation) <=
                    1.05 * workspace_bytes(&one, (fmsa_operation)operation) + 65536);
    }
    assert_true(schedule_bytes(&many) <= 1.05 * schedule_bytes(&one) + 65536);
}

/* The schedule holds one row number for each choice: sizes that pass 32 bits come out right. */
static void test_sizes_beyond_32_bits(void **state) {
    (void)state;
    fmsa_config config = make_large(INT32_MAX, 1);
    const double choices = (double)INT32_MAX * config.num_proxy_heads * config.top_k;
    assert_true(schedule_bytes(&config) >= choices * sizeof(int32_t) / 2);
    assert_true(schedule_bytes(&config) <= choices * sizeof(int32_t) * 4);
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        assert_true(workspace_bytes(&config, (fmsa_operation)operation) < 0x1p50);
    }
    config = make_large(262145, 1);
    const double smaller = schedule_bytes(&config);
    config.total_q = config.total_k = 2 * 262145;
    assert_true(schedule_bytes(&config) > 1.9 * smaller);
    config.num_heads = config.num_kv_heads = config.num_proxy_heads = config.num_proxy_kv_heads = 1 << 14;
    config.head_dim = config.proxy_head_dim = 256;
    config.total_q = config.total_k = INT32_MAX;
    config.num_fragments = INT32_MAX;
    config.top_k = INT32_MAX;
    size_t bytes;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        const fmsa_status status = fmsa_workspace_bytes(&config, (fmsa_operation)operation, &bytes);
        assert_true(status == FMSA_OK || status == FMSA_ERROR_WORKSPACE);
    }
}

/* Halves the limit until the library refuses it, and at each step everything must come out as without a limit. */
static void check_limits(fmsa_mode mode, const int32_t heads[4], fmsa_dtype dtype) {
    fmsa_config config = make_config(dtype, heads, 16, 16, 3);
    config.mode = mode;
    config.num_threads = 2;
    fmsa_case c;
    results unlimited, limited;
    open_documents(&c, &config, (int64_t[]){700, 3, 200}, 3, 95);
    run_case(&unlimited, &c);
    size_t limit = 0, bytes;
    for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
        const bool selects = operation == FMSA_OPERATION_SELECT || operation == FMSA_OPERATION_SCHEDULE;
        if (mode == FMSA_MODE_DENSE && selects) continue;
        assert_int_equal(fmsa_workspace_bytes(&c.config, (fmsa_operation)operation, &bytes), FMSA_OK);
        if (bytes > limit) limit = bytes;
    }
    int steps = 0;
    for (bool refused = false; !refused; limit = limit * 3 / 4) {
        c.config.scratch_limit = limit;
        for (int operation = 0; operation < FMSA_OPERATION_COUNT; operation++) {
            const fmsa_status status = fmsa_workspace_bytes(&c.config, (fmsa_operation)operation, &bytes);
            if (status == FMSA_OK) {
                check(bytes <= limit, "operation %d asks for %zu bytes under a limit of %zu", operation, bytes, limit);
                continue;
            }
            assert_int_equal(status, FMSA_ERROR_WORKSPACE);
            assert_non_null(strstr(fmsa_last_error(), "scratch_limit"));
            refused = true;
        }
        if (refused) break;
        run_case(&limited, &c);
        check_results(&c, &limited, "a scratch limit");
        check_identical(limited.outputs.out, unlimited.outputs.out, query_elements(&c.config), "out under a limit");
        assert_memory_equal(limited.block_indices, unlimited.block_indices,
                            (size_t)fmsa_case_index_count(&c) * sizeof(int32_t));
        close_results(&limited);
        steps++;
    }
    assert_in_range(steps, 1, 100);
    close_results(&unlimited);
    fmsa_case_close(&c);
}

static void test_scratch_limits(void **state) {
    (void)state;
    check_limits(FMSA_MODE_SPARSE, (int32_t[]){4, 2, 2, 1}, FMSA_DTYPE_BF16);
    check_limits(FMSA_MODE_SPARSE, (int32_t[]){4, 1, 4, 2}, FMSA_DTYPE_FP32);
    check_limits(FMSA_MODE_DENSE, (int32_t[]){4, 4, 2, 2}, FMSA_DTYPE_FP64);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_grow_linearly),
        cmocka_unit_test(test_many_documents_cost_little),
        cmocka_unit_test(test_sizes_beyond_32_bits),
        cmocka_unit_test(test_scratch_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
