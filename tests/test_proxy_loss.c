/* The KL value and the proxy gradients as an operation of their own. */
#include "support.h"

static const int32_t heads[4] = {4, 2, 2, 1};

/* Everything but the main gradients, from proxy_loss. */
static void run_proxy_loss(results *r, const fmsa_case *c, const void *grad_kl) {
    fmsa_call call;
    r->config = c->config;
    r->block_indices = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof *r->block_indices);
    fmsa_reference_outputs_open(&r->outputs, &c->config);
    fmsa_call_open(&call, c, &cpu);
    call.tensors.grad_kl = grad_kl;
    if (c->config.mode == FMSA_MODE_SPARSE) {
        run_operation(&call, FMSA_OPERATION_SELECT);
        run_operation(&call, FMSA_OPERATION_SCHEDULE);
    }
    run_operation(&call, FMSA_OPERATION_FORWARD);
    run_operation(&call, FMSA_OPERATION_PROXY_LOSS);
    fmsa_call_read(&call, &r->outputs);
    fmsa_call_close(&call);
}

static void check_same_loss(const results *a, const results *b, const char *what) {
    check_identical(&a->outputs.kl, &b->outputs.kl, 1, what);
    check_identical(a->outputs.dq_proxy, b->outputs.dq_proxy, query_proxy_elements(&a->config), what);
    check_identical(a->outputs.dk_proxy, b->outputs.dk_proxy, key_proxy_elements(&a->config), what);
}

/* The forward pass logs the same KL as the backward pass gives. */
static void test_equals_backward_with_proxy(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), heads, 16, 16, 2);
        config.mode = i < 4 ? FMSA_MODE_SPARSE : FMSA_MODE_DENSE;
        fmsa_case c;
        results alone, together;
        open_documents(&c, &config, (int64_t[]){90, 17}, 2, 70);
        run_case(&together, &c);
        const double grad_kl = 1;
        const float narrow = 1;
        run_proxy_loss(&alone, &c, config.dtype == FMSA_DTYPE_FP64 ? (const void *)&grad_kl : &narrow);
        check_same_loss(&alone, &together, "proxy_loss and backward with proxy");
        close_results(&alone);
        close_results(&together);
        fmsa_case_close(&c);
    }
}

static void test_without_grad_kl_it_is_one(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, heads, 16, 16, 2);
    fmsa_case c;
    results without, with;
    open_document(&c, &config, 90, 71);
    run_proxy_loss(&without, &c, NULL);
    const float one = 1;
    run_proxy_loss(&with, &c, &one);
    check_same_loss(&without, &with, "grad_kl NULL and 1");
    close_results(&without);
    close_results(&with);
    fmsa_case_close(&c);
}

/* N divides the value and the gradients; by default it is Tq Hp, rows in no fragment among them. */
static void test_kl_count(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 8, 16, 2);
    config.total_q = 80;
    config.total_k = 50;
    fmsa_case c;
    results by_default, counted, other;
    fmsa_case_open(&c, &config);
    fmsa_case_add_fragment(&c, 10, 60, 0, 50);
    fmsa_case_fill(&c, 72, 2, 1);
    run_case(&by_default, &c);
    c.config.kl_count = 160;
    run_case(&counted, &c);
    check_identical_results(&counted, &by_default, "N = Tq Hp");
    c.config.kl_count = 40;
    run_case(&other, &c);
    assert_true(fabs(other.outputs.kl / by_default.outputs.kl - 4) < 1e-12);
    for (int64_t i = 0; i < query_proxy_elements(&c.config); i++)
        by_default.outputs.dq_proxy[i] *= 4;
    for (int64_t i = 0; i < key_proxy_elements(&c.config); i++)
        by_default.outputs.dk_proxy[i] *= 4;
    assert_true(relative_difference(other.outputs.dq_proxy, by_default.outputs.dq_proxy,
                                    query_proxy_elements(&c.config)) <= 1e-14);
    assert_true(relative_difference(other.outputs.dk_proxy, by_default.outputs.dk_proxy,
                                    key_proxy_elements(&c.config)) <= 1e-14);
    check_results(&c, &other, "N = 40");
    close_results(&by_default);
    close_results(&counted);
    close_results(&other);
    fmsa_case_close(&c);
}

/* g = 0 gives gradients of exactly 0, and the same value. */
static void test_zero_grad_kl(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 8, 16, 2);
    fmsa_case c;
    results one, zero;
    open_document(&c, &config, 60, 73);
    run_case(&one, &c);
    c.grad_kl = 0;
    run_case(&zero, &c);
    assert_true(zero.outputs.kl == one.outputs.kl && one.outputs.kl > 0);
    for (int64_t i = 0; i < query_proxy_elements(&c.config); i++)
        assert_true(zero.outputs.dq_proxy[i] == 0);
    for (int64_t i = 0; i < key_proxy_elements(&c.config); i++)
        assert_true(zero.outputs.dk_proxy[i] == 0);
    close_results(&one);
    close_results(&zero);
    fmsa_case_close(&c);
}

/* A student that gives almost nothing to what the teacher attends to: log r far below the smallest number. */
static void test_student_far_from_teacher(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, heads, 8, 16, 3);
        config.softmax_scale = config.proxy_scale = 1;
        fmsa_case c;
        results r;
        open_document(&c, &config, 48, 74);
        for (int64_t i = 0; i < query_proxy_elements(&c.config); i++)
            c.q_proxy[i] = i % 8 == 0 ? 30 : 0;
        for (int64_t i = 0; i < key_proxy_elements(&c.config); i++)
            c.k_proxy[i] = i % 8 == 0 ? (double)(i / 8 % 5 * 16) : 0;
        run_case(&r, &c);
        assert_true(isfinite(r.outputs.kl) && r.outputs.kl > 100);
        check_results(&c, &r, "student far from teacher");
        close_results(&r);
        fmsa_case_close(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_backward_with_proxy),
        cmocka_unit_test(test_without_grad_kl_it_is_one),
        cmocka_unit_test(test_kl_count),
        cmocka_unit_test(test_zero_grad_kl),
        cmocka_unit_test(test_student_far_from_teacher),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
