/* Finite differences in fp64: central differences of the library's own out and KL against the library's own gradients,
 * for every kind of head relation, sparse and dense, over documents and over chunks of one document. */
#include "support.h"

/* The loss sum of dout * out, and g * KL, as the library computes them over the case's block_indices. */
static double main_loss(const fmsa_case *c) {
    fmsa_call call;
    fmsa_reference_outputs outputs;
    fmsa_reference_outputs_open(&outputs, &c->config);
    fmsa_call_open(&call, c, &cpu);
    if (c->config.mode == FMSA_MODE_SPARSE) run_operation(&call, FMSA_OPERATION_SCHEDULE);
    run_operation(&call, FMSA_OPERATION_FORWARD);
    fmsa_call_read(&call, &outputs);
    const double loss = weighted_sum(c, outputs.out);
    fmsa_call_close(&call);
    fmsa_reference_outputs_close(&outputs);
    return loss;
}

static double proxy_loss(const fmsa_case *c) {
    fmsa_call call;
    fmsa_reference_outputs outputs;
    fmsa_reference_outputs_open(&outputs, &c->config);
    fmsa_call_open(&call, c, &cpu);
    call.tensors.dq_proxy.data = NULL;
    call.tensors.dk_proxy.data = NULL;
    if (c->config.mode == FMSA_MODE_SPARSE) run_operation(&call, FMSA_OPERATION_SCHEDULE);
    run_operation(&call, FMSA_OPERATION_FORWARD);
    run_operation(&call, FMSA_OPERATION_PROXY_LOSS);
    fmsa_call_read(&call, &outputs);
    const double loss = c->grad_kl * outputs.kl;
    fmsa_call_close(&call);
    fmsa_reference_outputs_close(&outputs);
    return loss;
}

static void check_case_gradients(fmsa_case *c, const char *what) {
    enum { SAMPLES = 16 };
    c->block_indices = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof(int32_t));
    fmsa_reference_select(&c->config, c->q_proxy, c->k_proxy, c->block_indices);
    c->grad_kl = 1.5;
    c->config.num_threads = 1;
    results r;
    run_case(&r, c);
    const fmsa_reference_outputs *o = &r.outputs;
    char name[100];
#define CHECK_GRADIENT(loss, x, count)                                                                                 \
    snprintf(name, sizeof name, "%s: d" #x, what);                                                                     \
    check_gradient(loss, c, c->x, o->d##x, count, SAMPLES, name)
    CHECK_GRADIENT(main_loss, q, query_elements(&c->config));
    CHECK_GRADIENT(main_loss, k, key_elements(&c->config));
    CHECK_GRADIENT(main_loss, v, key_elements(&c->config));
    CHECK_GRADIENT(proxy_loss, q_proxy, query_proxy_elements(&c->config));
    CHECK_GRADIENT(proxy_loss, k_proxy, key_proxy_elements(&c->config));
#undef CHECK_GRADIENT
    close_results(&r);
}

static const int32_t relations[][4] = {{4, 2, 4, 1}, {4, 2, 2, 2}, {6, 6, 2, 1}, {3, 1, 1, 1},
                                       {4, 1, 4, 2}, {4, 4, 4, 4}, {1, 1, 1, 1}};

static void check_documents(fmsa_mode mode) {
    for (size_t i = 0; i < sizeof relations / sizeof *relations; i++) {
        fmsa_config config = make_config(FMSA_DTYPE_FP64, relations[i], 5, 16, 2);
        config.mode = mode;
        config.proxy_head_dim = 3;
        config.kl_count = i % 2 ? 7 : 0;
        config.softmax_scale = i % 3 ? 0 : 0.7;
        config.proxy_scale = i % 3 ? 0.9 : 0;
        fmsa_case c;
        char what[60];
        open_documents(&c, &config, (int64_t[]){37, 1, 18}, 3, 20 + i);
        snprintf(what, sizeof what, "%s, heads %d/%d/%d/%d", mode == FMSA_MODE_DENSE ? "dense" : "sparse",
                 relations[i][0], relations[i][1], relations[i][2], relations[i][3]);
        check_case_gradients(&c, what);
        fmsa_case_close(&c);
    }
}

static void test_sparse(void **state) {
    (void)state;
    check_documents(FMSA_MODE_SPARSE);
}

static void test_dense(void **state) {
    (void)state;
    check_documents(FMSA_MODE_DENSE);
}

/* Chunks of one document: their gradients meet in the same keys. */
static void check_chunks(fmsa_mode mode, const char *what) {
    fmsa_config config = make_config(FMSA_DTYPE_FP64, (int32_t[]){4, 2, 2, 1}, 4, 16, 2);
    config.mode = mode;
    config.total_q = 35;
    config.total_k = 50;
    fmsa_case c;
    fmsa_case_open(&c, &config);
    fmsa_case_add_fragment(&c, 0, 15, 0, 20);
    fmsa_case_add_fragment(&c, 15, 35, 0, 50);
    fmsa_case_fill(&c, 31, 2, 1);
    check_case_gradients(&c, what);
    fmsa_case_close(&c);
}

static void test_chunks(void **state) {
    (void)state;
    check_chunks(FMSA_MODE_SPARSE, "chunks, sparse");
    check_chunks(FMSA_MODE_DENSE, "chunks, dense");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sparse),
        cmocka_unit_test(test_dense),
        cmocka_unit_test(test_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
