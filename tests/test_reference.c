/* The direct evaluation that everything else is held to: against numbers worked out by hand, and its gradients against
 * finite differences of its own values. */
#include "support.h"

static void test_number_formats(void **state) {
    (void)state;
    const struct {
        double value, bf16, fp16;
    } cases[] = {
        {1, 1, 1},
        {1 + 0x1p-8, 1, 1 + 0x1p-8},                  /* a tie goes to the even one */
        {1 + 3 * 0x1p-8, 1 + 0x1p-6, 1 + 3 * 0x1p-8}, /* likewise, upwards */
        {-1 - 0x1p-11, -1, -1},                       /* a tie in fp16 */
        {1 + 3 * 0x1p-11, 1, 1 + 0x1p-9},             /* likewise, upwards */
        {65520, 65536, INFINITY},                     /* half way to what would be the next number */
        {65519, 65536, 65504},                        /* the greatest number */
        {0x1p-24, 0x1p-24, 0x1p-24},                  /* the smallest positive number of fp16 */
        {0x1p-25, 0x1p-25, 0},                        /* half of it */
        {-INFINITY, -INFINITY, -INFINITY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint16_t memory[2];
        assert_true(fmsa_round(cases[i].value, FMSA_DTYPE_BF16) == cases[i].bf16);
        assert_true(fmsa_round(cases[i].value, FMSA_DTYPE_FP16) == cases[i].fp16);
        fmsa_encode(memory, 0, FMSA_DTYPE_BF16, cases[i].value);
        fmsa_encode(memory, 1, FMSA_DTYPE_FP16, cases[i].value);
        assert_true(fmsa_decode(memory, 0, FMSA_DTYPE_BF16) == cases[i].bf16);
        assert_true(fmsa_decode(memory, 1, FMSA_DTYPE_FP16) == cases[i].fp16);
    }
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t half = (uint16_t)bits;
        const double x = fmsa_decode(&half, 0, FMSA_DTYPE_FP16);
        uint16_t again;
        fmsa_encode(&again, 0, FMSA_DTYPE_FP16, x);
        assert_true(isnan(x) || again == half);
    }
}

/* Two keys, one query each; every number below is worked out from the formulas. */
static void test_two_tokens_by_hand(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, (int32_t[]){1, 1, 1, 1}, 1, 16, 1);
    config.kl_count = 4;
    fmsa_case c;
    open_document(&c, &config, 2, 1);
    memcpy(c.q, (double[]){1, 2}, 2 * sizeof(double));
    memcpy(c.k, (double[]){0, log(3) / 2}, 2 * sizeof(double)); /* row 1 has scores 0 and ln 3: a = 1/4, 3/4 */
    memcpy(c.v, (double[]){8, 4}, 2 * sizeof(double));
    memcpy(c.dout, (double[]){1, 2}, 2 * sizeof(double));
    memcpy(c.q_proxy, (double[]){1, 1}, 2 * sizeof(double));
    memcpy(c.k_proxy, (double[]){0, 0}, 2 * sizeof(double)); /* r = 1/2, 1/2 */
    c.grad_kl = 2;
    results r;
    evaluate_exactly(&r, &c, (int32_t[]){0, 0});
    const fmsa_reference_outputs *o = &r.outputs;
    assert_float_equal(o->out[0], 8, 1e-14);
    assert_float_equal(o->out[1], 5, 1e-14);
    assert_float_equal(o->lse[0], 0, 1e-14);
    assert_float_equal(o->lse[1], log(4), 1e-14);
    /* row 1: dP = 16, 8; delta = 10; dS = 6/4, -2 * 3/4 */
    assert_float_equal(o->dq[0], 0, 1e-14);
    assert_float_equal(o->dq[1], -1.5 * log(3) / 2, 1e-14);
    assert_float_equal(o->dk[0], 1.5 * 2, 1e-14);
    assert_float_equal(o->dk[1], -1.5 * 2, 1e-14);
    assert_float_equal(o->dv[0], 1 + 0.25 * 2, 1e-14);
    assert_float_equal(o->dv[1], 0.75 * 2, 1e-14);
    assert_float_equal(o->kl, (0.25 * log(0.5) + 0.75 * log(1.5)) / 4, 1e-14);
    assert_float_equal(o->dq_proxy[1], 0, 1e-14);
    assert_float_equal(o->dk_proxy[0], 2 * (0.5 - 0.25) / 4, 1e-14);
    assert_float_equal(o->dk_proxy[1], 2 * (0.5 - 0.75) / 4, 1e-14);
    close_results(&r);
    fmsa_case_close(&c);
}

static void test_selection_by_hand(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, (int32_t[]){1, 1, 1, 1}, 1, 16, 3);
    fmsa_case c;
    open_document(&c, &config, 96, 1); /* six blocks */
    const double key_of_block[6] = {1, 5, 5, 3, 2, 9};
    int32_t indices[96 * 3];
    for (int i = 0; i < 96; i++) {
        c.q_proxy[i] = 1;
        c.k_proxy[i] = i % 16 == 15 ? key_of_block[i / 16] : -9; /* the block's greatest score is its last key's */
    }
    fmsa_reference_select(&c.config, c.q_proxy, c.k_proxy, indices);
    const struct {
        int row;
        int32_t expected[3];
    } rows[] = {{0, {0, -1, -1}}, {16, {0, 1, -1}}, {79, {1, 2, 4}}, {80, {1, 2, 5}}, {95, {1, 2, 5}}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_memory_equal(indices + 3 * rows[i].row, rows[i].expected, sizeof rows[i].expected);
    }
    c.config.init_blocks = 1;
    c.config.local_blocks = 2;
    fmsa_reference_select(&c.config, c.q_proxy, c.k_proxy, indices);
    assert_memory_equal(indices + 3 * 95, ((int32_t[]){0, 4, 5}), 3 * sizeof *indices);
    c.config.init_blocks = 0;
    c.config.local_blocks = 0;
    for (int i = 0; i < 16; i++)
        c.k_proxy[5 * 16 + i] = NAN;
    c.k_proxy[16 + 3] = NAN; /* the block's other scores still count */
    fmsa_reference_select(&c.config, c.q_proxy, c.k_proxy, indices);
    assert_memory_equal(indices + 3 * 95, ((int32_t[]){1, 2, 3}), 3 * sizeof *indices);
    fmsa_case_close(&c);
}

static double main_loss(const fmsa_case *c) {
    results r;
    evaluate_exactly(&r, c, c->block_indices);
    const double loss = weighted_sum(c, r.outputs.out);
    close_results(&r);
    return loss;
}

static double proxy_loss(const fmsa_case *c) {
    results r;
    evaluate_exactly(&r, c, c->block_indices);
    const double loss = c->grad_kl * r.outputs.kl;
    close_results(&r);
    return loss;
}

static void check_reference_gradients(const int32_t heads[4], fmsa_mode mode, const char *what) {
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 3, 16, 2);
    config.mode = mode;
    config.proxy_head_dim = 2;
    config.kl_count = 7;
    fmsa_case c;
    open_documents(&c, &config, (int64_t[]){37, 1, 18}, 3, 11);
    c.grad_kl = 1.5;
    c.block_indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof(int32_t));
    fmsa_reference_select(&c.config, c.q_proxy, c.k_proxy, c.block_indices);
    results r;
    evaluate_exactly(&r, &c, c.block_indices);
    const fmsa_reference_outputs *o = &r.outputs;
    check_gradient(main_loss, &c, c.q, o->dq, query_elements(&c.config), 40, what);
    check_gradient(main_loss, &c, c.k, o->dk, key_elements(&c.config), 40, what);
    check_gradient(main_loss, &c, c.v, o->dv, key_elements(&c.config), 40, what);
    check_gradient(proxy_loss, &c, c.q_proxy, o->dq_proxy, query_proxy_elements(&c.config), 40, what);
    check_gradient(proxy_loss, &c, c.k_proxy, o->dk_proxy, key_proxy_elements(&c.config), 40, what);
    close_results(&r);
    fmsa_case_close(&c);
}

static void test_gradients_of_the_reference(void **state) {
    (void)state;
    check_reference_gradients((int32_t[]){4, 2, 4, 2}, FMSA_MODE_SPARSE, "sparse 4/2/4/2");
    check_reference_gradients((int32_t[]){4, 4, 2, 1}, FMSA_MODE_SPARSE, "sparse 4/4/2/1");
    check_reference_gradients((int32_t[]){3, 1, 1, 1}, FMSA_MODE_DENSE, "dense 3/1/1/1");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_number_formats),
        cmocka_unit_test(test_two_tokens_by_hand),
        cmocka_unit_test(test_selection_by_hand),
        cmocka_unit_test(test_gradients_of_the_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
