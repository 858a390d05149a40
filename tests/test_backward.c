/* Backward and backward with proxy: optional outputs, strides, fp32 gradients of keys, loss scales. */
#include "support.h"

static const int32_t heads[4] = {4, 2, 2, 1};

static void open_forward(fmsa_call *call, const fmsa_case *c) {
    fmsa_call_open(call, c, &cpu);
    if (c->config.mode == FMSA_MODE_SPARSE) {
        run_operation(call, FMSA_OPERATION_SELECT);
        run_operation(call, FMSA_OPERATION_SCHEDULE);
    }
    run_operation(call, FMSA_OPERATION_FORWARD);
}

static void read_call(const fmsa_call *call, const fmsa_case *c, results *r) {
    r->config = c->config;
    r->block_indices = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof *r->block_indices);
    fmsa_reference_outputs_open(&r->outputs, &c->config);
    fmsa_call_read(call, &r->outputs);
}

/* Every subset of the optional outputs: those asked for are what they are when all are, bit for bit, and the others
 * stay as they were. */
static void check_subsets(fmsa_operation operation, fmsa_mode mode, fmsa_dtype dtype) {
    fmsa_config config = make_config(dtype, heads, 8, 16, 2);
    config.mode = mode;
    fmsa_case c;
    results all;
    open_documents(&c, &config, (int64_t[]){50, 23}, 2, 60);
    run_case(&all, &c);
    for (unsigned subset = 0; subset < 64; subset++) {
        fmsa_call call;
        results r;
        open_forward(&call, &c);
        fmsa_tensors *t = &call.tensors;
        fmsa_tensor *gradients[] = {&t->dq, &t->dk, &t->dv, &t->dq_proxy, &t->dk_proxy};
        for (int i = 0; i < 5; i++) {
            if (!(subset >> i & 1)) gradients[i]->data = NULL;
        }
        if (!(subset >> 5 & 1)) t->kl = NULL;
        run_operation(&call, operation);
        read_call(&call, &c, &r);
        const bool main = operation != FMSA_OPERATION_PROXY_LOSS, proxy = operation != FMSA_OPERATION_BACKWARD;
        const struct {
            const char *name;
            const double *got, *expected;
            int64_t count;
            bool wanted;
        } outputs[] = {
            {"dq", r.outputs.dq, all.outputs.dq, query_elements(&c.config), main && (subset & 1)},
            {"dk", r.outputs.dk, all.outputs.dk, key_elements(&c.config), main && (subset >> 1 & 1)},
            {"dv", r.outputs.dv, all.outputs.dv, key_elements(&c.config), main && (subset >> 2 & 1)},
            {"dq_proxy", r.outputs.dq_proxy, all.outputs.dq_proxy, query_proxy_elements(&c.config),
             proxy && (subset >> 3 & 1)},
            {"dk_proxy", r.outputs.dk_proxy, all.outputs.dk_proxy, key_proxy_elements(&c.config),
             proxy && (subset >> 4 & 1)},
            {"kl", &r.outputs.kl, &all.outputs.kl, 1, proxy && (subset >> 5 & 1)},
        };
        for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
            if (outputs[i].wanted)
                check_identical(outputs[i].got, outputs[i].expected, outputs[i].count, outputs[i].name);
            for (int64_t j = 0; j < outputs[i].count && !outputs[i].wanted; j++) {
                check(isnan(outputs[i].got[j]), "%s was not asked for, but written", outputs[i].name);
            }
        }
        close_results(&r);
        fmsa_call_close(&call);
    }
    close_results(&all);
    fmsa_case_close(&c);
}

static void test_subsets_of_outputs(void **state) {
    (void)state;
    check_subsets(FMSA_OPERATION_BACKWARD, FMSA_MODE_SPARSE, FMSA_DTYPE_BF16);
    check_subsets(FMSA_OPERATION_BACKWARD_WITH_PROXY, FMSA_MODE_SPARSE, FMSA_DTYPE_FP32);
    check_subsets(FMSA_OPERATION_BACKWARD_WITH_PROXY, FMSA_MODE_DENSE, FMSA_DTYPE_FP16);
    check_subsets(FMSA_OPERATION_PROXY_LOSS, FMSA_MODE_SPARSE, FMSA_DTYPE_FP64);
    check_subsets(FMSA_OPERATION_PROXY_LOSS, FMSA_MODE_DENSE, FMSA_DTYPE_BF16);
}

/* What an operation does not use may be missing: only the main loss needs no proxies, only KL needs no v, out, dout. */
static void test_operations_read_only_their_inputs(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 8, 16, 2);
    fmsa_case c;
    fmsa_call call;
    open_document(&c, &config, 50, 61);
    open_forward(&call, &c);
    const fmsa_tensors all = call.tensors;
    fmsa_tensors *t = &call.tensors;
    t->q_proxy = t->k_proxy = t->dq_proxy = t->dk_proxy = t->block_indices = (fmsa_tensor){NULL, -1, -1};
    t->kl = NULL;
    t->grad_kl = (void *)1;
    run_operation(&call, FMSA_OPERATION_BACKWARD);
    *t = all;
    t->v = t->out = t->dout = t->dq = t->dk = t->dv = t->block_indices = (fmsa_tensor){NULL, -1, -1};
    run_operation(&call, FMSA_OPERATION_PROXY_LOSS);
    fmsa_call_close(&call);
    fmsa_case_close(&c);
}

/* ---- Strides. ---- */

/* Every layout of inputs and outputs gives the same bits; out and dout need not be alike. */
static void test_layouts(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, heads, 12, 16, 2);
        fmsa_case c;
        results plain, other;
        open_documents(&c, &config, (int64_t[]){50, 33}, 2, 62);
        run_case(&plain, &c);
        for (int layout = 1; layout < FMSA_LAYOUT_COUNT * FMSA_LAYOUT_COUNT; layout++) {
            c.input_layout = (fmsa_layout)(layout % FMSA_LAYOUT_COUNT);
            c.output_layout = (fmsa_layout)(layout / FMSA_LAYOUT_COUNT);
            run_case(&other, &c);
            check_identical_results(&other, &plain, "another layout");
            close_results(&other);
        }
        close_results(&plain);
        fmsa_case_close(&c);
    }
}

/* q, k and v are views of one fused [T, Hq + 2 Hkv, D] buffer. */
static void test_fused_qkv(void **state) {
    (void)state;
    enum { ROWS = 60, DIM = 8, WIDTH = (4 + 2 + 2) * DIM };
    fmsa_config config = make_config(FMSA_DTYPE_FP32, heads, DIM, 16, 2);
    fmsa_case c;
    fmsa_call call;
    results separate, fused;
    open_document(&c, &config, ROWS, 63);
    run_case(&separate, &c);
    float *qkv = fmsa_tool_alloc(&cpu, ROWS * WIDTH * sizeof *qkv);
    for (int64_t row = 0; row < ROWS; row++) {
        for (int i = 0; i < WIDTH; i++) {
            const double *from = i < 4 * DIM   ? &c.q[row * 4 * DIM + i]
                                 : i < 6 * DIM ? &c.k[row * 2 * DIM + i - 4 * DIM]
                                               : &c.v[row * 2 * DIM + i - 6 * DIM];
            qkv[row * WIDTH + i] = (float)*from;
        }
    }
    fmsa_call_open(&call, &c, &cpu);
    call.tensors.q = (fmsa_tensor){qkv, WIDTH, DIM};
    call.tensors.k = (fmsa_tensor){qkv + 4 * DIM, WIDTH, DIM};
    call.tensors.v = (fmsa_tensor){qkv + 6 * DIM, WIDTH, DIM};
    for (int i = 0; i < FMSA_OPERATION_COUNT; i++) {
        size_t bytes;
        assert_int_equal(fmsa_workspace_bytes(&call.config, (fmsa_operation)i, &bytes), FMSA_OK);
        void *workspace = fmsa_tool_alloc(&cpu, bytes);
        assert_int_equal(fmsa_call_invoke(&call, (fmsa_operation)i, workspace, bytes), FMSA_OK);
        fmsa_tool_free(&cpu, workspace);
    }
    read_call(&call, &c, &fused);
    check_identical_results(&fused, &separate, "fused q, k, v");
    fmsa_call_close(&call);
    fmsa_tool_free(&cpu, qkv);
    close_results(&separate);
    close_results(&fused);
    fmsa_case_close(&c);
}

/* dout as the gradient of a sum: one number, strides 0. */
static void test_broadcast_dout(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 8, 16, 2);
    fmsa_case c;
    results broadcast, dense;
    open_documents(&c, &config, (int64_t[]){50, 33}, 2, 64);
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] = 1;
    run_case(&dense, &c);
    c.broadcast_dout = 1;
    run_case(&broadcast, &c);
    check_identical_results(&broadcast, &dense, "broadcast dout");
    close_results(&broadcast);
    close_results(&dense);
    fmsa_case_close(&c);
}

/* ---- Number ranges. ---- */

/* FMSA_FLAG_FP32_KV_GRADS: dk, dv, dk_proxy before their rounding. */
static void test_fp32_gradients_of_keys(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 3; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, heads, 8, 16, 2);
        fmsa_case c;
        results narrow, wide;
        open_documents(&c, &config, (int64_t[]){90, 33}, 2, 65);
        run_case(&narrow, &c);
        c.config.flags = FMSA_FLAG_FP32_KV_GRADS;
        run_case(&wide, &c);
        check_results(&c, &wide, "fp32 gradients of keys");
        for (int64_t i = 0; i < key_elements(&c.config); i++) {
            assert_true(fmsa_round(wide.outputs.dk[i], config.dtype) == narrow.outputs.dk[i]);
            assert_true(fmsa_round(wide.outputs.dv[i], config.dtype) == narrow.outputs.dv[i]);
        }
        for (int64_t i = 0; i < key_proxy_elements(&c.config); i++) {
            assert_true(fmsa_round(wide.outputs.dk_proxy[i], config.dtype) == narrow.outputs.dk_proxy[i]);
        }
        check_identical(wide.outputs.dq, narrow.outputs.dq, query_elements(&c.config), "dq");
        close_results(&narrow);
        close_results(&wide);
        fmsa_case_close(&c);
    }
}

/* fp16 with a loss scale of 65,536 on KL, divided over as many tokens as a long run has: the factor g * scale / N, or a
 * gradient before it, must not vanish on the way. */
static void test_fp16_proxy_gradients_do_not_vanish(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP16, heads, 16, 16, 2);
    config.kl_count = 1 << 22;
    fmsa_case c;
    results r;
    open_document(&c, &config, 100, 66);
    c.grad_kl = 65536;
    run_case(&r, &c);
    int64_t zeros = 0;
    for (int64_t i = 16 * 2 * 16; i < query_proxy_elements(&c.config); i++)
        zeros += r.outputs.dq_proxy[i] == 0;
    assert_in_range(zeros, 0, query_proxy_elements(&c.config) / 100);
    check_results(&c, &r, "KL under a loss scale");
    close_results(&r);
    fmsa_case_close(&c);
}

/* dout of a few subnormal steps of fp16: gradients are as exact as their own type allows. */
static void test_fp16_small_dout(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP16, heads, 16, 16, 2);
    config.flags = FMSA_FLAG_FP32_KV_GRADS;
    fmsa_case c;
    results scaled, small;
    open_document(&c, &config, 100, 67);
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] = round(c.dout[i] * 4);
    run_case(&scaled, &c);
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] *= 0x1p-24;
    run_case(&small, &c);
    for (int64_t i = 0; i < key_elements(&c.config); i++) {
        scaled.outputs.dk[i] *= 0x1p-24;
        scaled.outputs.dv[i] *= 0x1p-24;
    }
    assert_true(relative_difference(small.outputs.dv, scaled.outputs.dv, key_elements(&c.config)) <= 1e-6);
    assert_true(relative_difference(small.outputs.dk, scaled.outputs.dk, key_elements(&c.config)) <= 1e-6);
    close_results(&scaled);
    close_results(&small);
    fmsa_case_close(&c);
}

/* Every row chooses the first block and its own: the first block's keys gather gradients from all rows. */
static void test_everyone_chooses_the_first_block(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_BF16, heads, 16, 16, 2);
    config.init_blocks = 1;
    fmsa_case c;
    open_document(&c, &config, 600, 68);
    check_case(&c, "everyone chooses the first block");
    fmsa_case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_subsets_of_outputs),
        cmocka_unit_test(test_operations_read_only_their_inputs),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_fused_qkv),
        cmocka_unit_test(test_broadcast_dout),
        cmocka_unit_test(test_fp32_gradients_of_keys),
        cmocka_unit_test(test_fp16_proxy_gradients_do_not_vanish),
        cmocka_unit_test(test_fp16_small_dout),
        cmocka_unit_test(test_everyone_chooses_the_first_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
