/* Geometry that breaks attention libraries: empty, tiny and very many documents, keys without queries, rows in no
 * fragment, padding of the fragment arrays, offsets beyond 2^31. */
#include <sys/mman.h>

#include "support.h"

static const int32_t heads[4] = {4, 2, 2, 1};

static const fmsa_mode modes[] = {FMSA_MODE_SPARSE, FMSA_MODE_DENSE};

/* ---- Empty documents. ---- */

static void test_empty_documents(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 16, 16, 3);
        config.mode = modes[i];
        fmsa_case with, without;
        results a, b;
        open_documents(&with, &config, (int64_t[]){0, 0, 7, 0, 293, 0}, 6, 80);
        open_documents(&without, &config, (int64_t[]){7, 293}, 2, 80);
        run_case(&a, &with);
        run_case(&b, &without);
        check_identical_results(&a, &b, "empty documents");
        close_results(&a);
        close_results(&b);
        fmsa_case_close(&with);
        fmsa_case_close(&without);
    }
}

/* Fragment arrays padded with the last offset, as for a CUDA graph of a fixed number of documents. */
static void test_padded_fragments(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, heads, 16, 16, 3);
    fmsa_case c;
    results plain, padded;
    open_documents(&c, &config, (int64_t[]){30, 90}, 2, 81);
    run_case(&plain, &c);
    for (int i = 0; i < 100; i++)
        fmsa_case_add_fragment(&c, 120, 120, 120, 120);
    run_case(&padded, &c);
    check_identical_results(&padded, &plain, "padded fragments");
    close_results(&plain);
    close_results(&padded);
    fmsa_case_close(&c);
}

/* Keys that no query sees: their gradients are exactly 0. */
static void test_keys_without_queries(void **state) {
    (void)state;
    static const int64_t cu_q[] = {0, 0, 60, 60, 100}, cu_k[] = {0, 500, 700, 900, 1000};
    for (int i = 0; i < 2; i++) {
        fmsa_config config = make_config(FMSA_DTYPE_FP16, heads, 8, 64, 2);
        config.mode = modes[i];
        config.total_q = 100;
        config.total_k = 1000;
        fmsa_case c;
        results r;
        fmsa_case_open(&c, &config);
        for (int f = 0; f < 4; f++)
            fmsa_case_add_fragment(&c, cu_q[f], cu_q[f + 1], cu_k[f], cu_k[f + 1]);
        fmsa_case_fill(&c, 82, 2, 1);
        run_case(&r, &c);
        for (int64_t key = 0; key < 1000; key++) {
            if (key >= 500 && (key < 700 || key >= 900)) continue;
            for (int64_t d = 0; d < 16; d++)
                assert_true(r.outputs.dk[key * 16 + d] == 0 && r.outputs.dv[key * 16 + d] == 0);
            for (int64_t d = 0; d < 8; d++)
                assert_true(r.outputs.dk_proxy[key * 8 + d] == 0);
        }
        check_results(&c, &r, "keys without queries");
        close_results(&r);
        fmsa_case_close(&c);
    }
}

/* Chunks of one document need not be listed in the order of their ends, as when a rank owns a late chunk and an early
 * one. */
static void test_late_chunk_before_an_early_one(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), heads, 8, 16, 2);
        config.mode = modes[i / 4];
        config.total_q = 70;
        config.total_k = 130;
        fmsa_case c;
        fmsa_case_open(&c, &config);
        fmsa_case_add_fragment(&c, 0, 20, 0, 90);
        fmsa_case_add_fragment(&c, 20, 30, 0, 10);
        fmsa_case_add_fragment(&c, 30, 50, 0, 40);
        fmsa_case_add_fragment(&c, 50, 70, 90, 130); /* the next document */
        fmsa_case_fill(&c, 91, 2, 1);
        check_case(&c, "a late chunk before an early one");
        fmsa_case_close(&c);
    }
}

static void test_nothing_at_all(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 8, 16, 2);
        config.mode = modes[i];
        fmsa_case c;
        results r;
        open_documents(&c, &config, NULL, 0, 83); /* no fragments, no rows; and a limit on the memory for them */
        c.config.scratch_limit = 1 << 20;
        run_case(&r, &c);
        assert_true(r.outputs.kl == 0);
        close_results(&r);
        fmsa_case_close(&c);

        open_documents(&c, &config, (int64_t[]){0, 0}, 2, 83); /* empty fragments, no rows */
        run_case(&r, &c);
        assert_true(r.outputs.kl == 0);
        close_results(&r);
        fmsa_case_close(&c);

        config.total_k = 20; /* keys, but no queries: N is 0 */
        fmsa_case_open(&c, &config);
        fmsa_case_add_fragment(&c, 0, 0, 0, 20);
        fmsa_case_fill(&c, 83, 2, 1);
        check_case(&c, "no queries");
        fmsa_case_close(&c);

        config.total_q = 10; /* rows, but no fragments */
        fmsa_case_open(&c, &config);
        fmsa_case_fill(&c, 83, 2, 1);
        check_case(&c, "no fragments");
        fmsa_case_close(&c);
    }
}

/* ---- Lengths around a block. ---- */

static void test_lengths_around_a_block(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 3; dtype++) {
        for (int i = 0; i < 2; i++) {
            fmsa_config config = make_config((fmsa_dtype)dtype, heads, 8, 128, 1 + dtype);
            config.mode = modes[i];
            fmsa_case c;
            open_documents(&c, &config, (int64_t[]){1, 127, 128, 129, 255, 256, 257}, 7, 84);
            check_case(&c, "lengths around a block");
            fmsa_case_close(&c);
            open_document(&c, &config, 1, 85);
            check_case(&c, "one token");
            fmsa_case_close(&c);
        }
    }
}

/* Blocks that no kernel holds at once, and whose last part is short. */
static void test_large_blocks(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), heads, 8, i % 2 ? 300 : 65536, 1 + i % 2);
        config.mode = modes[i / 4];
        fmsa_case c;
        open_documents(&c, &config, (int64_t[]){430, 129, 290}, 3, 92);
        check_case(&c, "large blocks");
        fmsa_case_close(&c);
    }
}

/* One token more changes nothing for those before it. */
static void test_one_token_more(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){2, 1, 1, 1}, 8, 128, 4);
    fmsa_case longer, shorter;
    results a, b;
    open_document(&longer, &config, 1025, 86);
    open_document(&shorter, &config, 1024, 86);
    double *const to[] = {shorter.q, shorter.k, shorter.v, shorter.q_proxy, shorter.k_proxy};
    const double *const from[] = {longer.q, longer.k, longer.v, longer.q_proxy, longer.k_proxy};
    for (int i = 0; i < 5; i++)
        memcpy(to[i], from[i], (size_t)(1024 * (i == 0 ? 16 : 8)) * sizeof(double));
    run_case(&a, &longer);
    run_case(&b, &shorter);
    check_identical(a.outputs.out, b.outputs.out, 1024 * 16, "out of the first 1024");
    assert_memory_equal(a.block_indices, b.block_indices, 1024 * 4 * sizeof(int32_t));
    close_results(&a);
    close_results(&b);
    fmsa_case_close(&longer);
    fmsa_case_close(&shorter);
}

/* ---- Very many documents. ---- */

static void check_many_documents(int64_t count, int64_t length, fmsa_mode mode) {
    fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){1, 1, 1, 1}, 2, 16, 1);
    config.mode = mode;
    int64_t *lengths = fmsa_zeros((size_t)count, sizeof *lengths);
    for (int64_t i = 0; i < count; i++)
        lengths[i] = length;
    fmsa_case c;
    results r;
    open_documents(&c, &config, lengths, count, 87);
    run_case(&r, &c);
    for (int64_t i = 0; i < fmsa_case_index_count(&c); i++)
        assert_int_equal(r.block_indices[i], 0);
    check_results(&c, &r, "very many documents");
    close_results(&r);
    fmsa_case_close(&c);
    free(lengths);
}

static void test_very_many_documents(void **state) {
    (void)state;
    check_many_documents(12288, 16, FMSA_MODE_SPARSE);
    check_many_documents(70000, 3, FMSA_MODE_SPARSE);
    check_many_documents(70000, 3, FMSA_MODE_DENSE);
}

/* ---- Rows in no fragment. ---- */

/* They hold NaN and infinities, are never read, and get 0 (lse -inf). */
static void test_rows_in_no_fragment(void **state) {
    (void)state;
    enum { ROWS = 100, KEYS = 120 };
    for (int i = 0; i < 8; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), heads, 8, 16, 2);
        config.mode = modes[i / 4];
        config.total_q = ROWS;
        config.total_k = KEYS;
        fmsa_case c;
        results r;
        fmsa_case_open(&c, &config);
        fmsa_case_add_fragment(&c, 7, 40, 3, 43); /* queries 7...40 see keys 3...43; then keys 43...60 are nobody's */
        fmsa_case_add_fragment(&c, 55, 80, 60, 110);
        fmsa_case_fill(&c, 88, 2, 1);
        for (int64_t row = 0; row < ROWS; row++) {
            if ((row >= 7 && row < 40) || (row >= 55 && row < 80)) continue;
            for (int64_t d = 0; d < 32; d++)
                c.q[row * 32 + d] = c.dout[row * 32 + d] = d % 2 ? NAN : INFINITY;
            for (int64_t d = 0; d < 16; d++)
                c.q_proxy[row * 16 + d] = NAN;
        }
        for (int64_t key = 0; key < KEYS; key++) {
            if ((key >= 3 && key < 43) || (key >= 60 && key < 110)) continue;
            for (int64_t d = 0; d < 16; d++)
                c.k[key * 16 + d] = c.v[key * 16 + d] = d % 2 ? NAN : -INFINITY;
            for (int64_t d = 0; d < 8; d++)
                c.k_proxy[key * 8 + d] = NAN;
        }
        run_case(&r, &c);
        for (int64_t d = 0; d < 7 * 32; d++)
            assert_true(r.outputs.out[d] == 0 && r.outputs.dq[d] == 0);
        for (int64_t d = 80 * 32; d < ROWS * 32; d++)
            assert_true(r.outputs.out[d] == 0 && r.outputs.dq[d] == 0);
        for (int64_t d = 110 * 16; d < KEYS * 16; d++)
            assert_true(r.outputs.dk[d] == 0 && r.outputs.dv[d] == 0);
        assert_true(r.outputs.lse[3] == -INFINITY && r.outputs.lse[45] == -INFINITY);
        /* The yardstick knows no NaN: the same case with zeros there. */
        double *const tensors[] = {c.q, c.dout, c.k, c.v, c.q_proxy, c.k_proxy};
        const int64_t counts[] = {ROWS * 32, ROWS * 32, KEYS * 16, KEYS * 16, ROWS * 16, KEYS * 8};
        for (int t = 0; t < 6; t++) {
            for (int64_t j = 0; j < counts[t]; j++) {
                if (!isfinite(tensors[t][j])) tensors[t][j] = 0;
            }
        }
        check_results(&c, &r, "rows in no fragment");
        close_results(&r);
        fmsa_case_close(&c);
    }
}

/* Key blocks behind those that a row sees hold NaN or infinities: no effect on it, in any type and mode. */
static void test_future_blocks_do_not_reach_the_past(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), heads, 8, 16, 3);
        config.mode = modes[i / 4];
        fmsa_case c;
        results clean, dirty;
        open_document(&c, &config, 60, 89);
        run_case(&clean, &c);
        for (int64_t d = 32 * 16; d < 60 * 16; d++)
            c.k[d] = c.v[d] = d % 2 ? NAN : INFINITY;
        for (int64_t d = 32 * 8; d < 60 * 8; d++)
            c.k_proxy[d] = NAN;
        run_case(&dirty, &c);
        check_identical(dirty.outputs.out, clean.outputs.out, 32 * 32, "out before the NaN");
        check_identical(dirty.outputs.dq, clean.outputs.dq, 32 * 32, "dq before the NaN");
        check_identical(dirty.outputs.dq_proxy, clean.outputs.dq_proxy, 32 * 16, "dq_proxy before the NaN");
        close_results(&clean);
        close_results(&dirty);
        fmsa_case_close(&c);
    }
}

/* ---- Offsets beyond 2^31 elements: few rows, very far apart in memory that is mostly never touched. ---- */

enum { FAR_ROWS = 300 };
static const int64_t far_stride = (1 << 23) + 64; /* FAR_ROWS of them pass 2^31 */

typedef struct {
    void *memory;
    size_t bytes;
} region;

static bool move_far(fmsa_tensor *t, int64_t rows, int64_t heads_of, size_t row_bytes, size_t element, bool is_input,
                     region *r) {
    r->bytes = (size_t)rows * (size_t)far_stride * element;
    r->memory = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (r->memory == MAP_FAILED) return false;
    for (int64_t row = 0; row < rows && is_input; row++) {
        for (int64_t head = 0; head < heads_of; head++) {
            memcpy((char *)r->memory + (size_t)(row * far_stride + head * 64) * element,
                   (char *)t->data + (size_t)(row * t->row_stride + head * t->head_stride) * element, row_bytes);
        }
    }
    *t = (fmsa_tensor){r->memory, far_stride, 64};
    return true;
}

static bool move_views_far(fmsa_call *call, region regions[FMSA_CALL_VIEWS]) {
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        fmsa_call_view *view = &call->views[i];
        const size_t element = view->is_index ? 4 : view->dtype == FMSA_DTYPE_FP32 ? 4 : 2;
        if (!move_far(view->tensor, view->rows, view->heads, (size_t)view->dim * element, element, !view->is_output,
                      &regions[i])) {
            return false;
        }
    }
    return true;
}

/* Moves an output's values back to where the call keeps it. */
static void move_back(fmsa_call_view *view) {
    const size_t element = view->is_index ? 4 : view->dtype == FMSA_DTYPE_FP32 ? 4 : 2;
    for (int64_t row = 0; row < view->rows; row++) {
        for (int64_t head = 0; head < view->heads; head++) {
            memcpy((char *)view->memory +
                       (size_t)(row * view->opened.row_stride + head * view->opened.head_stride) * element,
                   (char *)view->tensor->data + (size_t)(row * far_stride + head * 64) * element,
                   (size_t)view->dim * element);
        }
    }
}

static void test_offsets_beyond_31_bits(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 16, 64, 2);
    fmsa_case c;
    fmsa_call call;
    results near, far;
    region regions[FMSA_CALL_VIEWS] = {0};
    open_document(&c, &config, FAR_ROWS, 90);
    run_case(&near, &c);
    fmsa_call_open(&call, &c, &cpu);
    const bool mapped = move_views_far(&call, regions);
    if (mapped) {
        const fmsa_operation steps[] = {FMSA_OPERATION_SELECT, FMSA_OPERATION_SCHEDULE, FMSA_OPERATION_FORWARD,
                                        FMSA_OPERATION_BACKWARD_WITH_PROXY};
        for (int i = 0; i < 4; i++)
            run_operation(&call, steps[i]);
        for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
            if (call.views[i].is_output) move_back(&call.views[i]);
        }
        far.config = c.config;
        far.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof(int32_t));
        fmsa_reference_outputs_open(&far.outputs, &c.config);
        fmsa_call_read(&call, &far.outputs);
        fmsa_call_read_indices(&call, far.block_indices);
        check_identical_results(&far, &near, "rows far apart");
        assert_memory_equal(far.block_indices, near.block_indices, (size_t)fmsa_case_index_count(&c) * sizeof(int32_t));
        close_results(&far);
    }
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        if (regions[i].memory != NULL && regions[i].memory != MAP_FAILED) munmap(regions[i].memory, regions[i].bytes);
    }
    fmsa_call_close(&call);
    close_results(&near);
    fmsa_case_close(&c);
    if (!mapped) skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_documents),
        cmocka_unit_test(test_padded_fragments),
        cmocka_unit_test(test_keys_without_queries),
        cmocka_unit_test(test_late_chunk_before_an_early_one),
        cmocka_unit_test(test_nothing_at_all),
        cmocka_unit_test(test_lengths_around_a_block),
        cmocka_unit_test(test_large_blocks),
        cmocka_unit_test(test_one_token_more),
        cmocka_unit_test(test_very_many_documents),
        cmocka_unit_test(test_rows_in_no_fragment),
        cmocka_unit_test(test_future_blocks_do_not_reach_the_past),
        cmocka_unit_test(test_offsets_beyond_31_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
