/* Forward: every head relation, sharp softmax, extreme LSE, one-hot rows, rows without keys. */
#include "support.h"

static void test_head_relations(void **state) {
    (void)state;
    static const int32_t relations[][4] = {{64, 4, 4, 1}, {16, 2, 4, 1}, {16, 2, 4, 4}, {8, 8, 8, 1}, {6, 1, 1, 1},
                                           {28, 4, 4, 1}, {32, 8, 2, 1}, {12, 4, 4, 2}, {1, 1, 1, 1}};
    for (int i = 0; i < 36; i++) {
        const int32_t *heads = relations[i / 4];
        const fmsa_dtype dtype = i % 2 ? FMSA_DTYPE_FP16 : FMSA_DTYPE_BF16;
        fmsa_config config = make_config(dtype, heads, i / 2 % 2 ? 128 : 64, 32, 2);
        fmsa_case c;
        char what[60];
        open_documents(&c, &config, (int64_t[]){70, 20}, 2, (uint64_t)i);
        snprintf(what, sizeof what, "heads %d/%d/%d/%d, D %d", heads[0], heads[1], heads[2], heads[3], config.head_dim);
        check_case(&c, what);
        fmsa_case_close(&c);
    }
}

/* Scores of deviation 1 to 8, and in the hundreds, in every type. */
static void test_sharp_softmax(void **state) {
    (void)state;
    static const double deviations[] = {1, 2, 4, 8, 50, 300};
    for (int dtype = 0; dtype < 4; dtype++) {
        for (size_t i = 0; i < sizeof deviations / sizeof *deviations; i++) {
            fmsa_config config = make_config((fmsa_dtype)dtype, (int32_t[]){4, 2, 2, 1}, 32, 16, 3);
            config.mode = i % 2 ? FMSA_MODE_DENSE : FMSA_MODE_SPARSE;
            fmsa_case c;
            char what[60];
            open_documents(&c, &config, (int64_t[]){120, 41}, 2, 40 + i);
            fmsa_case_fill(&c, 40 + i, deviations[i], deviations[i] / 2);
            snprintf(what, sizeof what, "type %d, deviation %g", dtype, deviations[i]);
            check_case(&c, what);
            fmsa_case_close(&c);
        }
    }
}

/* Every score is the same large number, negative or positive: exp without its maximum taken out is 0 or infinite. */
static void test_extreme_lse(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        const double score = (const double[]){-120, 600, -90000}[i % 3];
        fmsa_config config = make_config(i < 3 ? FMSA_DTYPE_BF16 : FMSA_DTYPE_FP32, (int32_t[]){2, 1, 1, 1}, 16, 16, 2);
        config.softmax_scale = 1;
        fmsa_case c;
        results r;
        open_document(&c, &config, 60, 50);
        for (int64_t j = 0; j < query_elements(&c.config); j++)
            c.q[j] = j % 16 == 0 ? score / 8 : 0;
        for (int64_t j = 0; j < key_elements(&c.config); j++)
            c.k[j] = j % 16 == 0 ? 8 : 0;
        for (int64_t j = 0; j < query_elements(&c.config); j++)
            c.q[j] = fmsa_round(c.q[j], config.dtype);
        run_case(&r, &c);
        const double exact = c.q[0] * 8;
        assert_true(fabs(r.outputs.lse[0] - exact) <= 1e-6 * fabs(exact));
        close_results(&r);
        check_case(&c, "extreme lse");
        fmsa_case_close(&c);
    }
}

/* One key far above the others: probabilities are 1 and 0, and w log w at w = 0 is 0. */
static void test_one_hot_rows(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, (int32_t[]){4, 2, 2, 1}, 8, 16, 2);
        config.softmax_scale = 1;
        fmsa_case c;
        open_document(&c, &config, 64, 51);
        for (int64_t j = 0; j < query_elements(&c.config); j++)
            c.q[j] = j % 8 == 0 ? 1 : 0;
        for (int64_t j = 0; j < key_elements(&c.config); j++)
            c.k[j] = j % 8 == 0 ? (double)(j / 16 % 16 * 1000) : 0;
        check_case(&c, "one-hot rows");
        fmsa_case_close(&c);
    }
}

/* A row whose block_indices are all -1: out 0, lse -inf, its gradients 0; the other rows as if it were not there. */
static void test_rows_without_keys(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, (int32_t[]){4, 2, 2, 1}, 8, 16, 2);
        fmsa_case c;
        results full, masked;
        open_document(&c, &config, 70, 52);
        run_case(&full, &c);
        c.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof(int32_t));
        memcpy(c.block_indices, full.block_indices, (size_t)fmsa_case_index_count(&c) * sizeof(int32_t));
        for (int64_t i = 0; i < 2; i++)
            c.block_indices[33 * 2 + i] = -1; /* proxy head 0, row 33 */
        run_case(&masked, &c);
        const fmsa_reference_outputs *o = &masked.outputs;
        for (int64_t head = 0; head < 4; head++) {
            const bool is_masked = head < 2;
            assert_true((o->lse[head * 70 + 33] == -INFINITY) == is_masked);
            for (int64_t d = 0; d < 8; d++) {
                assert_true((o->out[(33 * 4 + head) * 8 + d] == 0) == is_masked);
                if (is_masked) assert_true(o->dq[(33 * 4 + head) * 8 + d] == 0);
            }
        }
        for (int64_t d = 0; d < 8; d++)
            assert_true(o->dq_proxy[33 * 2 * 8 + d] == 0);
        check_identical(o->out, full.outputs.out, 33 * 32, "rows before the masked one");
        check_identical(o->out + 34 * 32, full.outputs.out + 34 * 32, 36 * 32, "rows after the masked one");
        check_identical(o->dq + 34 * 32, full.outputs.dq + 34 * 32, 36 * 32, "dq of rows after the masked one");
        check_results(&c, &masked, "a row without keys");
        close_results(&full);
        close_results(&masked);
        fmsa_case_close(&c);
    }
}

/* Every row of a call without keys. */
static void test_no_row_has_keys(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){2, 1, 1, 1}, 8, 16, 2);
    fmsa_case c;
    results r;
    open_document(&c, &config, 40, 53);
    c.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof(int32_t));
    for (int64_t i = 0; i < fmsa_case_index_count(&c); i++)
        c.block_indices[i] = -1;
    run_case(&r, &c);
    for (int64_t i = 0; i < 80; i++)
        assert_true(r.outputs.lse[i] == -INFINITY);
    assert_true(r.outputs.kl == 0);
    for (int64_t i = 0; i < key_elements(&c.config); i++) {
        assert_true(r.outputs.dk[i] == 0 && r.outputs.dv[i] == 0 && r.outputs.dk_proxy[i] == 0);
    }
    check_results(&c, &r, "no row has keys");
    close_results(&r);
    fmsa_case_close(&c);
}

/* -1 between blocks, and blocks in descending order. */
static void test_holes_in_block_indices(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, (int32_t[]){2, 1, 1, 1}, 8, 16, 5);
    fmsa_case c;
    open_document(&c, &config, 80, 54);
    c.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof(int32_t));
    for (int32_t row = 0; row < 80; row++) {
        const int32_t newest = row / 16;
        const int32_t indices[5] = {-1, newest, -1, newest >= 2 ? newest - 2 : -1, -1};
        memcpy(c.block_indices + 5 * row, indices, sizeof indices);
    }
    check_case(&c, "holes in block_indices");
    fmsa_case_close(&c);
}

/* forward needs nothing but its own inputs. */
static void test_forward_reads_only_its_inputs(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, (int32_t[]){4, 2, 2, 1}, 8, 16, 2);
    fmsa_case c;
    fmsa_call call;
    open_document(&c, &config, 50, 55);
    fmsa_call_open(&call, &c, &cpu);
    run_operation(&call, FMSA_OPERATION_SELECT);
    run_operation(&call, FMSA_OPERATION_SCHEDULE);
    fmsa_tensor *unused[] = {&call.tensors.q_proxy, &call.tensors.k_proxy,  &call.tensors.block_indices,
                             &call.tensors.dout,    &call.tensors.dq,       &call.tensors.dk,
                             &call.tensors.dv,      &call.tensors.dq_proxy, &call.tensors.dk_proxy};
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        *unused[i] = (fmsa_tensor){NULL, -1, -1};
    call.tensors.kl = NULL;
    call.tensors.grad_kl = (void *)1;
    assert_int_equal(fmsa_call_invoke(&call, FMSA_OPERATION_FORWARD, NULL, 0), FMSA_ERROR_WORKSPACE);
    size_t bytes;
    assert_int_equal(fmsa_workspace_bytes(&call.config, FMSA_OPERATION_FORWARD, &bytes), FMSA_OK);
    void *workspace = fmsa_tool_alloc(&cpu, bytes);
    assert_int_equal(fmsa_call_invoke(&call, FMSA_OPERATION_FORWARD, workspace, bytes), FMSA_OK);
    fmsa_tool_free(&cpu, workspace);
    fmsa_call_close(&call);
    fmsa_case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head_relations),
        cmocka_unit_test(test_sharp_softmax),
        cmocka_unit_test(test_extreme_lse),
        cmocka_unit_test(test_one_hot_rows),
        cmocka_unit_test(test_rows_without_keys),
        cmocka_unit_test(test_no_row_has_keys),
        cmocka_unit_test(test_holes_in_block_indices),
        cmocka_unit_test(test_forward_reads_only_its_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
