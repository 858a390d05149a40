/* What must hold of the definition, whatever the numbers: one test a property. */
#include "support.h"

static const int32_t heads[4] = {4, 2, 2, 1};

static void run_with_indices(results *r, fmsa_case *c, const int32_t *block_indices) {
    const size_t bytes = (size_t)fmsa_case_index_count(c) * sizeof *block_indices;
    free(c->block_indices);
    c->block_indices = fmsa_zeros(bytes, 1);
    memcpy(c->block_indices, block_indices, bytes);
    run_case(r, c);
}

/* ---- k at least the number of visible blocks: sparse equals dense. ---- */

static void test_all_blocks_equal_dense(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, heads, 16, 16, 7);
        fmsa_case c;
        results sparse, dense;
        open_documents(&c, &config, (int64_t[]){100, 33, 1, 112}, 4, 1);
        run_case(&sparse, &c);
        c.config.mode = FMSA_MODE_DENSE;
        run_case(&dense, &c);
        check_identical_results(&sparse, &dense, "sparse with all blocks, and dense");
        close_results(&sparse);
        close_results(&dense);
        fmsa_case_close(&c);
    }
}

/* ---- Documents do not know of each other. ---- */

/* Copies rows begin ... begin + rows of a tensor whose rows have `width` elements. */
static void copy_rows(double *to, const double *from, int64_t begin, int64_t rows, int64_t width) {
    memcpy(to, from + begin * width, (size_t)(rows * width) * sizeof *to);
}

static void open_part(fmsa_case *part, const fmsa_case *whole, int64_t begin, int64_t rows) {
    fmsa_config config = whole->config;
    const int64_t q = config.num_heads * config.head_dim, kv = config.num_kv_heads * config.head_dim;
    config.total_q = config.total_k = rows;
    fmsa_case_open(part, &config);
    fmsa_case_add_fragment(part, 0, rows, 0, rows);
    copy_rows(part->q, whole->q, begin, rows, q);
    copy_rows(part->dout, whole->dout, begin, rows, q);
    copy_rows(part->k, whole->k, begin, rows, kv);
    copy_rows(part->v, whole->v, begin, rows, kv);
    copy_rows(part->q_proxy, whole->q_proxy, begin, rows, config.num_proxy_heads * config.proxy_head_dim);
    copy_rows(part->k_proxy, whole->k_proxy, begin, rows, config.num_proxy_kv_heads * config.proxy_head_dim);
}

static void check_document_alone(fmsa_mode mode, fmsa_dtype dtype) {
    static const int64_t lengths[] = {40, 0, 75, 1, 30};
    fmsa_config config = make_config(dtype, heads, 8, 16, 2);
    config.mode = mode;
    config.kl_count = 1000;
    fmsa_case whole;
    results together;
    open_documents(&whole, &config, lengths, 5, 2);
    run_case(&together, &whole);
    double kl = 0;
    int64_t begin = 0;
    for (int i = 0; i < 5; i++) {
        fmsa_case part;
        results alone;
        open_part(&part, &whole, begin, lengths[i]);
        run_case(&alone, &part);
        const int64_t q = begin * config.num_heads * config.head_dim;
        const int64_t kv = begin * config.num_kv_heads * config.head_dim;
        const fmsa_reference_outputs *a = &alone.outputs, *t = &together.outputs;
        check_identical(a->out, t->out + q, query_elements(&part.config), "out of a document alone");
        check_identical(a->dq, t->dq + q, query_elements(&part.config), "dq of a document alone");
        check_identical(a->dk, t->dk + kv, key_elements(&part.config), "dk of a document alone");
        check_identical(a->dv, t->dv + kv, key_elements(&part.config), "dv of a document alone");
        check_identical(a->dq_proxy, t->dq_proxy + begin * config.num_proxy_heads * config.proxy_head_dim,
                        query_proxy_elements(&part.config), "dq_proxy of a document alone");
        check_identical(a->dk_proxy, t->dk_proxy + begin * config.num_proxy_kv_heads * config.proxy_head_dim,
                        key_proxy_elements(&part.config), "dk_proxy of a document alone");
        kl += lengths[i] > 0 ? a->kl : 0;
        begin += lengths[i];
        close_results(&alone);
        fmsa_case_close(&part);
    }
    assert_true(fabs(kl - together.outputs.kl) <= 1e-5 * fabs(kl));
    close_results(&together);
    fmsa_case_close(&whole);
}

static void test_documents_alone(void **state) {
    (void)state;
    check_document_alone(FMSA_MODE_SPARSE, FMSA_DTYPE_FP64);
    check_document_alone(FMSA_MODE_SPARSE, FMSA_DTYPE_BF16);
    check_document_alone(FMSA_MODE_DENSE, FMSA_DTYPE_FP32);
}

/* A change in the first document leaves the second bit-identical. */
static void test_change_in_another_document(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, heads, 8, 16, 2);
    fmsa_case c;
    results before, after;
    open_documents(&c, &config, (int64_t[]){50, 60}, 2, 3);
    run_case(&before, &c);
    double *const inputs[] = {c.q, c.k, c.v, c.q_proxy, c.k_proxy, c.dout};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        for (int64_t j = 0; j < 50 * 8; j++)
            inputs[i][j] = fmsa_round(inputs[i][j] * 3 + 1, config.dtype);
    }
    run_case(&after, &c);
    const fmsa_reference_outputs *a = &after.outputs, *b = &before.outputs;
    check_identical(a->out + 50 * 32, b->out + 50 * 32, 60 * 32, "out of the other document");
    check_identical(a->dq + 50 * 32, b->dq + 50 * 32, 60 * 32, "dq of the other document");
    check_identical(a->dk + 50 * 16, b->dk + 50 * 16, 60 * 16, "dk of the other document");
    check_identical(a->dv + 50 * 16, b->dv + 50 * 16, 60 * 16, "dv of the other document");
    check_identical(a->dq_proxy + 50 * 16, b->dq_proxy + 50 * 16, 60 * 16, "dq_proxy of the other document");
    check_identical(a->dk_proxy + 50 * 8, b->dk_proxy + 50 * 8, 60 * 8, "dk_proxy of the other document");
    assert_true(memcmp(a->out, b->out, 50 * 32 * sizeof(double)) != 0);
    close_results(&before);
    close_results(&after);
    fmsa_case_close(&c);
}

/* ---- The order of block_indices. ---- */

static void test_order_of_block_indices(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        fmsa_config config = make_config((fmsa_dtype)dtype, heads, 16, 16, 5);
        fmsa_case c;
        results ordered, shuffled;
        open_documents(&c, &config, (int64_t[]){200, 33, 70}, 3, 4);
        run_case(&ordered, &c);
        int32_t *indices = fmsa_zeros((size_t)fmsa_case_index_count(&c), sizeof *indices);
        memcpy(indices, ordered.block_indices, (size_t)fmsa_case_index_count(&c) * sizeof *indices);
        fmsa_random random = {5};
        for (int64_t row = 0; row < fmsa_case_index_count(&c); row += config.top_k) {
            for (int64_t i = config.top_k - 1; i > 0; i--) {
                const int64_t j = fmsa_random_int(&random, 0, i);
                const int32_t swapped = indices[row + i];
                indices[row + i] = indices[row + j];
                indices[row + j] = swapped;
            }
        }
        run_with_indices(&shuffled, &c, indices);
        check_identical_results(&shuffled, &ordered, "shuffled block_indices");
        free(indices);
        close_results(&ordered);
        close_results(&shuffled);
        fmsa_case_close(&c);
    }
}

/* ---- A document cut into chunks. ---- */

/* One call with the chunks as fragments against one with the document whole: out equal, gradients equal after summation
 * (fp64, where sums in another order differ by roundings only). */
static void check_chunks(fmsa_mode mode, int32_t num_proxy_heads) {
    fmsa_config config = make_config(FMSA_DTYPE_FP64, (int32_t[]){4, 2, num_proxy_heads, 1}, 8, 16, 3);
    config.mode = mode;
    fmsa_case whole, chunks;
    results w, x;
    open_document(&whole, &config, 110, 6);
    open_document(&chunks, &config, 110, 6);
    chunks.config.num_fragments = 0; /* drops the whole document */
    fmsa_case_add_fragment(&chunks, 0, 20, 0, 20);
    fmsa_case_add_fragment(&chunks, 20, 67, 0, 67);
    fmsa_case_add_fragment(&chunks, 67, 110, 0, 110);
    run_case(&w, &whole);
    run_case(&x, &chunks);
    const fmsa_reference_outputs *a = &x.outputs, *b = &w.outputs;
    check_identical(a->out, b->out, query_elements(&whole.config), "out of chunks");
    const struct {
        const char *name;
        const double *a, *b;
        int64_t count;
    } gradients[] = {{"dq", a->dq, b->dq, query_elements(&whole.config)},
                     {"dk", a->dk, b->dk, key_elements(&whole.config)},
                     {"dv", a->dv, b->dv, key_elements(&whole.config)},
                     {"dq_proxy", a->dq_proxy, b->dq_proxy, query_proxy_elements(&whole.config)},
                     {"dk_proxy", a->dk_proxy, b->dk_proxy, key_proxy_elements(&whole.config)},
                     {"kl", &a->kl, &b->kl, 1}};
    for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++) {
        const double difference = relative_difference(gradients[i].a, gradients[i].b, gradients[i].count);
        check(difference <= 1e-12, "%s of chunks differs by %.3g", gradients[i].name, difference);
    }
    close_results(&w);
    close_results(&x);
    fmsa_case_close(&whole);
    fmsa_case_close(&chunks);
}

static void test_chunks_of_a_document(void **state) {
    (void)state;
    check_chunks(FMSA_MODE_SPARSE, 2);
    check_chunks(FMSA_MODE_SPARSE, 4);
    check_chunks(FMSA_MODE_SPARSE, 1);
    check_chunks(FMSA_MODE_DENSE, 2);
}

/* The chunks of different ranks, each in a call of its own: gradients of the keys add up to the whole document's. */
static void test_chunks_on_ranks(void **state) {
    (void)state;
    static const int64_t ends[] = {0, 31, 70, 110};
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 8, 16, 2);
    config.kl_count = 110 * 2;
    fmsa_case whole;
    results w;
    open_document(&whole, &config, 110, 7);
    run_case(&w, &whole);
    double *dk = fmsa_zeros((size_t)key_elements(&whole.config), sizeof *dk);
    double *dk_proxy = fmsa_zeros((size_t)key_proxy_elements(&whole.config), sizeof *dk_proxy);
    double kl = 0;
    for (int rank = 0; rank < 3; rank++) {
        fmsa_case c;
        results r;
        open_document(&c, &config, 110, 7);
        c.q_begin[0] = (int32_t)ends[rank];
        c.q_end[0] = (int32_t)ends[rank + 1];
        c.k_end[0] = (int32_t)ends[rank + 1];
        run_case(&r, &c);
        for (int64_t i = 0; i < key_elements(&whole.config); i++)
            dk[i] += r.outputs.dk[i];
        for (int64_t i = 0; i < key_proxy_elements(&whole.config); i++)
            dk_proxy[i] += r.outputs.dk_proxy[i];
        kl += r.outputs.kl;
        check_identical(r.outputs.out + ends[rank] * 32, w.outputs.out + ends[rank] * 32,
                        (ends[rank + 1] - ends[rank]) * 32, "out of a rank");
        close_results(&r);
        fmsa_case_close(&c);
    }
    assert_true(relative_difference(dk, w.outputs.dk, key_elements(&whole.config)) <= 1e-12);
    assert_true(relative_difference(dk_proxy, w.outputs.dk_proxy, key_proxy_elements(&whole.config)) <= 1e-12);
    assert_true(fabs(kl - w.outputs.kl) <= 1e-12 * kl);
    free(dk);
    free(dk_proxy);
    close_results(&w);
    fmsa_case_close(&whole);
}

/* ---- Probabilities and the KL value. ---- */

/* v of ones gives sums of a: out = 1. dout of ones makes dv the sums of a over the rows, so dv adds up to Tq. dq_proxy
 * = factor * sum of (r - w) k_proxy: with k_proxy equal in every key, sum r = sum w makes it 0. */
static void test_probabilities_sum_to_one(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 4, 16, 3);
    fmsa_case c;
    results r;
    open_documents(&c, &config, (int64_t[]){70, 50}, 2, 8);
    for (int64_t i = 0; i < key_elements(&c.config); i++)
        c.v[i] = 1;
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] = 1;
    for (int64_t i = 0; i < key_proxy_elements(&c.config); i++)
        c.k_proxy[i] = 1 + (double)(i % 4);
    run_case(&r, &c);
    double sum = 0;
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        assert_true(fabs(r.outputs.out[i] - 1) < 1e-13);
    for (int64_t i = 0; i < key_elements(&c.config); i++)
        sum += r.outputs.dv[i];
    assert_true(fabs(sum / (double)query_elements(&c.config) - 1) < 1e-12);
    for (int64_t i = 0; i < query_proxy_elements(&c.config); i++)
        assert_true(fabs(r.outputs.dq_proxy[i]) < 1e-14);
    close_results(&r);
    fmsa_case_close(&c);
}

static void test_kl_is_not_negative(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 8, 16, 2);
        config.mode = seed % 2 ? FMSA_MODE_SPARSE : FMSA_MODE_DENSE;
        fmsa_case c;
        results r;
        open_document(&c, &config, 60, seed);
        run_case(&r, &c);
        assert_true(r.outputs.kl > 0);
        close_results(&r);
        fmsa_case_close(&c);
    }
}

/* R = 1 and the proxies equal the main queries and keys: student and teacher agree, in every type. */
static void test_proxies_equal_to_main(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 4; dtype++) {
        for (int mode = 0; mode < 2; mode++) {
            fmsa_config config = make_config((fmsa_dtype)dtype, (int32_t[]){4, 2, 4, 2}, 8, 16, 2);
            config.mode = (fmsa_mode)mode;
            fmsa_case c;
            results r;
            open_documents(&c, &config, (int64_t[]){70, 17}, 2, 9);
            memcpy(c.q_proxy, c.q, (size_t)query_elements(&c.config) * sizeof *c.q);
            memcpy(c.k_proxy, c.k, (size_t)key_elements(&c.config) * sizeof *c.k);
            run_case(&r, &c);
            const double tolerance = dtype == FMSA_DTYPE_FP64 ? 1e-14 : 2e-6;
            assert_true(fabs(r.outputs.kl) <= tolerance);
            for (int64_t i = 0; i < query_proxy_elements(&c.config); i++) {
                assert_true(fabs(r.outputs.dq_proxy[i]) <= tolerance);
            }
            for (int64_t i = 0; i < key_proxy_elements(&c.config); i++) {
                assert_true(fabs(r.outputs.dk_proxy[i]) <= tolerance);
            }
            close_results(&r);
            fmsa_case_close(&c);
        }
    }
}

/* ---- Linearity. ---- */

/* The sum of two v gives the sum of the two out. */
static void test_linear_in_v(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 8, 16, 2);
    fmsa_case a, b;
    results ra, rb, sum;
    open_documents(&a, &config, (int64_t[]){70, 40}, 2, 10);
    open_documents(&b, &config, (int64_t[]){70, 40}, 2, 10);
    fmsa_random random = {3};
    for (int64_t i = 0; i < key_elements(&a.config); i++)
        b.v[i] = fmsa_random_normal(&random);
    run_case(&ra, &a);
    run_case(&rb, &b);
    for (int64_t i = 0; i < key_elements(&a.config); i++)
        a.v[i] += b.v[i];
    run_case(&sum, &a);
    for (int64_t i = 0; i < query_elements(&a.config); i++)
        ra.outputs.out[i] += rb.outputs.out[i];
    assert_true(relative_difference(sum.outputs.out, ra.outputs.out, query_elements(&a.config)) <= 1e-14);
    check_identical(sum.outputs.lse, rb.outputs.lse, a.config.total_q * 4, "lse does not depend on v");
    close_results(&ra);
    close_results(&rb);
    close_results(&sum);
    fmsa_case_close(&a);
    fmsa_case_close(&b);
}

/* Doubling is exact in binary: twice dout is twice every main gradient, bit for bit. */
static void test_linear_in_dout(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP64, heads, 8, 16, 2);
    fmsa_case c;
    results once, twice;
    open_documents(&c, &config, (int64_t[]){70, 40}, 2, 11);
    run_case(&once, &c);
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] *= 2;
    run_case(&twice, &c);
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        once.outputs.dq[i] *= 2;
    for (int64_t i = 0; i < key_elements(&c.config); i++) {
        once.outputs.dk[i] *= 2;
        once.outputs.dv[i] *= 2;
    }
    check_identical_results(&twice, &once, "dout doubled");
    close_results(&once);
    close_results(&twice);
    fmsa_case_close(&c);
}

/* ---- What has no gradient. ---- */

/* KL does not reach dq, dk, dv, whatever g is; out does not reach the proxies. */
static void test_losses_are_apart(void **state) {
    (void)state;
    fmsa_config config = make_config(FMSA_DTYPE_FP32, heads, 8, 16, 2);
    fmsa_case c;
    results base, other;
    open_document(&c, &config, 90, 12);
    run_case(&base, &c);
    c.grad_kl = 100;
    run_case(&other, &c);
    check_identical(other.outputs.dq, base.outputs.dq, query_elements(&c.config), "dq under another g");
    check_identical(other.outputs.dk, base.outputs.dk, key_elements(&c.config), "dk under another g");
    check_identical(other.outputs.dv, base.outputs.dv, key_elements(&c.config), "dv under another g");
    close_results(&other);
    c.grad_kl = 1;
    for (int64_t i = 0; i < query_elements(&c.config); i++)
        c.dout[i] = 0;
    run_case(&other, &c);
    check_identical(other.outputs.dq_proxy, base.outputs.dq_proxy, query_proxy_elements(&c.config),
                    "dq_proxy without dout");
    check_identical(other.outputs.dk_proxy, base.outputs.dk_proxy, key_proxy_elements(&c.config),
                    "dk_proxy without dout");
    for (int64_t i = 0; i < key_elements(&c.config); i++) {
        assert_true(other.outputs.dk[i] == 0 && other.outputs.dv[i] == 0);
    }
    close_results(&base);
    close_results(&other);
    fmsa_case_close(&c);
}

/* ---- Threads. ---- */

/* Long enough for many tasks to add to the same keys at once. */
static void test_threads_that_meet_in_the_same_keys(void **state) {
    (void)state;
    for (int mode = 0; mode < 2; mode++) {
        fmsa_config config = make_config(FMSA_DTYPE_FP32, (int32_t[]){1, 1, 1, 1}, 4, 16, 2);
        config.mode = (fmsa_mode)mode;
        config.init_blocks = 1;
        config.num_threads = 1;
        fmsa_case c;
        results one, many;
        open_document(&c, &config, mode == FMSA_MODE_DENSE ? 2500 : 8000, 14);
        run_case(&one, &c);
        c.config.num_threads = 5;
        for (int repeat = 0; repeat < 4; repeat++) {
            run_case(&many, &c);
            check_identical_results(&many, &one, "threads that meet in the same keys");
            close_results(&many);
        }
        close_results(&one);
        fmsa_case_close(&c);
    }
}

static void test_threads_do_not_change_a_bit(void **state) {
    (void)state;
    static const int32_t relations[][4] = {{8, 2, 4, 1}, {4, 4, 2, 1}, {2, 1, 1, 1}, {4, 1, 4, 2}};
    for (int i = 0; i < 16; i++) {
        fmsa_config config = make_config((fmsa_dtype)(i % 4), relations[i / 4], 16, 16, 3);
        config.mode = i % 3 == 0 ? FMSA_MODE_DENSE : FMSA_MODE_SPARSE;
        config.num_threads = 1;
        fmsa_case c;
        results one, many;
        open_documents(&c, &config, (int64_t[]){190, 5, 300}, 3, 13);
        run_case(&one, &c);
        for (size_t t = 0; t < 3; t++) {
            c.config.num_threads = (const int32_t[]){2, 3, 5}[t];
            run_case(&many, &c);
            check_identical_results(&many, &one, "more threads");
            assert_memory_equal(many.block_indices, one.block_indices,
                                (size_t)fmsa_case_index_count(&c) * sizeof(int32_t));
            close_results(&many);
        }
        close_results(&one);
        fmsa_case_close(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_blocks_equal_dense),
        cmocka_unit_test(test_documents_alone),
        cmocka_unit_test(test_change_in_another_document),
        cmocka_unit_test(test_order_of_block_indices),
        cmocka_unit_test(test_chunks_of_a_document),
        cmocka_unit_test(test_chunks_on_ranks),
        cmocka_unit_test(test_probabilities_sum_to_one),
        cmocka_unit_test(test_kl_is_not_negative),
        cmocka_unit_test(test_proxies_equal_to_main),
        cmocka_unit_test(test_linear_in_v),
        cmocka_unit_test(test_linear_in_dout),
        cmocka_unit_test(test_losses_are_apart),
        cmocka_unit_test(test_threads_do_not_change_a_bit),
        cmocka_unit_test(test_threads_that_meet_in_the_same_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
