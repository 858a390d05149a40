/* Selection: which blocks are chosen, in what order, and what ties, NaN and infinities do. Where the scores are exact
 * in every type, the choice must be exactly the reference's; elsewhere it may differ by what rounding explains. */
#include "support.h"

static void select_blocks(const fmsa_case *c, int32_t *block_indices) {
    fmsa_call call;
    fmsa_call_open(&call, c, &cpu);
    run_operation(&call, FMSA_OPERATION_SELECT);
    fmsa_call_read_indices(&call, block_indices);
    fmsa_call_close(&call);
}

/* The library's choice is the reference's, entry for entry. */
static void check_exact_selection(const fmsa_case *c, const char *what) {
    const fmsa_config *g = &c->config;
    int32_t *chosen = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof *chosen);
    int32_t *expected = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof *expected);
    select_blocks(c, chosen);
    fmsa_reference_select(g, c->q_proxy, c->k_proxy, expected);
    for (int64_t i = 0; i < fmsa_case_index_count(c); i++) {
        check(chosen[i] == expected[i], "%s: proxy head %lld, row %lld, entry %lld is %d, not %d", what,
              (long long)(i / g->top_k / g->total_q), (long long)(i / g->top_k % g->total_q), (long long)(i % g->top_k),
              chosen[i], expected[i]);
    }
    free(chosen);
    free(expected);
}

/* Small whole numbers and a scale that is a power of two: every sum is exact, and many scores are equal. */
static void fill_with_whole_numbers(fmsa_case *c, uint64_t seed) {
    fmsa_random random = {seed};
    c->config.proxy_scale = 0.25;
    for (int64_t i = 0; i < query_proxy_elements(&c->config); i++) {
        c->q_proxy[i] = (double)fmsa_random_int(&random, -2, 2);
    }
    for (int64_t i = 0; i < key_proxy_elements(&c->config); i++) {
        c->k_proxy[i] = (double)fmsa_random_int(&random, -2, 2);
    }
}

static void test_exact_scores(void **state) {
    (void)state;
    static const int32_t heads[][4] = {{4, 2, 4, 1}, {4, 4, 2, 2}, {4, 1, 4, 2}, {6, 6, 6, 3}};
    static const int32_t top_ks[] = {1, 2, 3, 5, 7, 12, 64};
    static const int32_t dims[] = {1, 5, 16, 33, 64};
    for (uint64_t seed = 1; seed <= 84; seed++) {
        fmsa_config config =
            make_config((fmsa_dtype)(seed % 4), heads[seed / 4 % 4], 4, seed % 5 ? 16 : 17, top_ks[seed % 7]);
        config.proxy_head_dim = dims[seed % 5];
        config.local_blocks = (int32_t)(seed % 3);
        config.init_blocks = (int32_t)(seed / 3 % 3);
        fmsa_case c;
        open_documents(&c, &config, (int64_t[]){100, 0, 15, 230, 1}, 5, seed);
        fill_with_whole_numbers(&c, seed);
        c.input_layout = (fmsa_layout)(seed % FMSA_LAYOUT_COUNT);
        c.output_layout = (fmsa_layout)(seed / 2 % FMSA_LAYOUT_COUNT);
        char what[40];
        snprintf(what, sizeof what, "seed %llu", (unsigned long long)seed);
        check_exact_selection(&c, what);
        fmsa_case_close(&c);
    }
}

static void test_random_selections(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 120; seed++) {
        fmsa_case c;
        fmsa_case_random(&c, seed, &(fmsa_case_limits){FMSA_DEVICE_CPU, (fmsa_dtype)(seed % 4), 400});
        c.config.mode = FMSA_MODE_SPARSE;
        int32_t *indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof *indices);
        char complaint[200];
        select_blocks(&c, indices);
        check(fmsa_compare_selection(&c, indices, complaint, sizeof complaint), "seed %llu: %s",
              (unsigned long long)seed, complaint);
        free(indices);
        fmsa_case_close(&c);
    }
}

/* Every score ties: the forced blocks, then the lowest numbers. */
static void test_all_queries_zero(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){8, 2, 4, 1}, 32, 16, 5);
    config.init_blocks = 1;
    fmsa_case c;
    open_document(&c, &config, 500, 3);
    memset(c.q_proxy, 0, (size_t)query_proxy_elements(&c.config) * sizeof *c.q_proxy);
    check_exact_selection(&c, "q_proxy = 0");
    int32_t *indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof *indices);
    int32_t *again = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof *again);
    select_blocks(&c, indices);
    assert_memory_equal(indices + 499 * 5, ((int32_t[]){0, 1, 2, 3, 31}), 5 * sizeof *indices);
    for (int threads = 1; threads <= 4; threads++) {
        c.config.num_threads = threads;
        select_blocks(&c, again);
        assert_memory_equal(again, indices, (size_t)fmsa_case_index_count(&c) * sizeof *again);
    }
    free(again);
    free(indices);
    fmsa_case_close(&c);
}

/* 4,096 blocks whose neighbours in rank differ by one unit in the last place of an fp32 score near 1. */
static void test_nearly_equal_scores(void **state) {
    (void)state;
    enum { BLOCKS = 4096, BLOCK = 16 };
    fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){1, 1, 1, 1}, 2, BLOCK, 64);
    config.proxy_scale = 1;
    config.total_q = 1;
    config.total_k = BLOCKS * BLOCK;
    fmsa_case c;
    fmsa_case_open(&c, &config);
    fmsa_case_add_fragment(&c, 0, 1, 0, config.total_k);
    c.q_proxy[0] = c.q_proxy[1] = 1;
    for (int64_t j = 0; j < config.total_k; j++) {
        const int64_t rank = j / BLOCK * 1237 % BLOCKS; /* 1237 is odd: every rank occurs once */
        c.k_proxy[2 * j] = j % BLOCK == 5 ? 1 : 0;
        c.k_proxy[2 * j + 1] = (double)rank * 0x1p-23;
    }
    check_exact_selection(&c, "nearly equal scores");
    fmsa_case_close(&c);
}

/* -0 and +0 tie; NaN ranks last, and a block's M passes over it; infinities order as numbers do. */
static void test_special_scores(void **state) {
    (void)state;
    static const double specials[] = {0.0, -0.0, NAN, INFINITY, -INFINITY, 1, -1, NAN};
    for (uint64_t seed = 1; seed <= 60; seed++) {
        fmsa_random random = {seed};
        fmsa_config config =
            make_config((fmsa_dtype)(seed % 4), (int32_t[]){2, 1, 2, 1}, 1, 16, (int32_t)(1 + seed % 9));
        config.proxy_scale = 1;
        config.local_blocks = (int32_t)(seed % 2);
        fmsa_case c;
        open_document(&c, &config, 170, seed);
        for (int64_t i = 0; i < query_proxy_elements(&c.config); i++) {
            c.q_proxy[i] = seed % 5 == 0 && i % 7 == 0 ? NAN : (double)fmsa_random_int(&random, -1, 1);
        }
        for (int64_t j = 0; j < key_proxy_elements(&c.config); j++) {
            /* Some blocks hold one kind only: all NaN, all -inf, all -0. */
            const bool uniform = j / 16 % 3 == 0;
            const uint64_t pick = uniform ? (uint64_t)(j / 16) + seed : fmsa_random_bits(&random);
            c.k_proxy[j] = specials[pick % 8];
        }
        char what[40];
        snprintf(what, sizeof what, "special scores, seed %llu", (unsigned long long)seed);
        check_exact_selection(&c, what);
        fmsa_case_close(&c);
    }
}

/* Rows in no fragment get -1, and so do all entries where there are no blocks. */
static void test_rows_in_no_fragment(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP16, (int32_t[]){4, 2, 2, 1}, 8, 16, 3);
    config.total_q = 60;
    config.total_k = 90;
    fmsa_case c;
    fmsa_case_open(&c, &config);
    fmsa_case_add_fragment(&c, 5, 25, 10, 70);
    fmsa_case_add_fragment(&c, 30, 30, 70, 70);
    fmsa_case_add_fragment(&c, 40, 50, 75, 85);
    fill_with_whole_numbers(&c, 4);
    for (int64_t i = 0; i < 5 * 2 * 8; i++)
        c.q_proxy[i] = NAN;
    for (int64_t i = 50 * 2 * 8; i < 60 * 2 * 8; i++)
        c.q_proxy[i] = INFINITY;
    check_exact_selection(&c, "rows in no fragment");
    fmsa_case_close(&c);
}

/* More forced blocks than slots: the newest of them stay. */
static void test_more_forced_blocks_than_slots(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){1, 1, 1, 1}, 4, 16, 2);
    config.local_blocks = 3;
    fmsa_case c;
    int32_t indices[96 * 2];
    open_document(&c, &config, 96, 5);
    fill_with_whole_numbers(&c, 5);
    check_exact_selection(&c, "local 3, k 2");
    select_blocks(&c, indices);
    assert_memory_equal(indices + 95 * 2, ((int32_t[]){4, 5}), 2 * sizeof *indices);
    c.config.local_blocks = 1;
    c.config.init_blocks = 2;
    check_exact_selection(&c, "local 1, init 2, k 2");
    select_blocks(&c, indices);
    assert_memory_equal(indices + 95 * 2, ((int32_t[]){1, 5}), 2 * sizeof *indices);
    c.config.local_blocks = INT32_MAX;
    c.config.init_blocks = INT32_MAX;
    check_exact_selection(&c, "everything forced");
    fmsa_case_close(&c);
}

/* k far above the number of blocks: every visible block, and the rest -1. */
static void test_k_larger_than_everything(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){2, 1, 1, 1}, 8, 16, 300);
    fmsa_case c;
    open_documents(&c, &config, (int64_t[]){1, 50}, 2, 6);
    check_exact_selection(&c, "k 300");
    fmsa_case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_scores),
        cmocka_unit_test(test_random_selections),
        cmocka_unit_test(test_all_queries_zero),
        cmocka_unit_test(test_nearly_equal_scores),
        cmocka_unit_test(test_special_scores),
        cmocka_unit_test(test_rows_in_no_fragment),
        cmocka_unit_test(test_more_forced_blocks_than_slots),
        cmocka_unit_test(test_k_larger_than_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
