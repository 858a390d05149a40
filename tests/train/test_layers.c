/* Each layer, in fp64: products against a plain triple loop, gradients against central differences. */
#include "gradient_check.h"

#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "gemm.h"
#include "layers.h"

/* ---- Matrix products. ---- */

static double plain_element(const real *data, int64_t stride, gemm_view view, int64_t row, int64_t column) {
    return view == TRANSPOSED ? data[column * stride + row] : data[row * stride + column];
}

static void check_product(random_state *random, int64_t rows, int64_t columns, int64_t inner, gemm_view a_view,
                          gemm_view b_view, bool accumulate) {
    /* Strides and rows longer than needed: what lies beside the matrices must not matter, or change. */
    const int64_t pad = 3, c_stride = columns + pad;
    const int64_t a_stride = (a_view == TRANSPOSED ? rows : inner) + pad;
    const int64_t b_stride = (b_view == TRANSPOSED ? inner : columns) + pad;
    const int64_t a_count = a_stride * (a_view == TRANSPOSED ? inner : rows);
    const int64_t b_count = b_stride * (b_view == TRANSPOSED ? columns : inner);
    real *a = train_allocate(a_count, sizeof *a), *b = train_allocate(b_count, sizeof *b);
    real *c = train_allocate(rows * c_stride, sizeof *c), *before = train_allocate(rows * c_stride, sizeof *c);
    fill_random(random, a, a_count, 1);
    fill_random(random, b, b_count, 1);
    fill_random(random, c, rows * c_stride, 1);
    memcpy(before, c, (size_t)(rows * c_stride) * sizeof *c);
    gemm(rows, columns, inner, (gemm_matrix){a, a_stride, a_view}, (gemm_matrix){b, b_stride, b_view}, accumulate, c,
         c_stride);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < columns; j++) {
            double sum = accumulate ? before[r * c_stride + j] : 0;
            for (int64_t i = 0; i < inner; i++) {
                sum += plain_element(a, a_stride, a_view, r, i) * plain_element(b, b_stride, b_view, i, j);
            }
            assert_true(fabs(sum - c[r * c_stride + j]) <= 1e-11 * (1 + fabs(sum)));
        }
        for (int64_t j = columns; j < c_stride; j++)
            assert_true(before[r * c_stride + j] == c[r * c_stride + j]);
    }
    free(a);
    free(b);
    free(c);
    free(before);
}

static void check_products(void) {
    /* Below, at and above the tile and the panel, in every dimension. */
    static const int64_t sizes[][3] = {{1, 1, 1},     {5, 7, 3},      {6, 8, 4},     {13, 17, 19}, {97, 16, 1},
                                       {100, 129, 5}, {200, 33, 257}, {7, 300, 300}, {2, 256, 600}};
    random_state random;
    random_seed(&random, 1);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int variant = 0; variant < 8; variant++) {
            check_product(&random, sizes[s][0], sizes[s][1], sizes[s][2], variant & 1 ? TRANSPOSED : AS_STORED,
                          variant & 2 ? TRANSPOSED : AS_STORED, variant & 4);
        }
    }
}

static void test_products(void **state) {
    (void)state;
    assert_non_null(strstr(gemm_description(), "built-in loop"));
    check_products();
}

/* Last in the list: it turns BLAS on for the rest of the program. */
static void test_products_by_blas(void **state) {
    (void)state;
    if (!gemm_use_blas()) {
        print_message("OpenBLAS is not installed here\n");
        skip();
    }
    assert_non_null(strstr(gemm_description(), "OpenBLAS"));
    check_products();
}

/* ---- Layers. The scalar is a fixed random combination of the outputs. ---- */

enum { ROWS = 7, DIM = 10, OUT = 6, HEADS = 3, HEAD_DIM = 4, POSITIONS = 4, MOST = 1024 };

typedef struct layer_case {
    real x[MOST], weight[MOST], y[MOST], combination[MOST], inverse_rms[MOST];
    real dx[MOST], dweight[MOST];
    real cosine[MOST], sine[MOST];
    uint8_t bytes[ROWS];
    head_layout layout;
    int64_t outputs;
    void (*forward)(struct layer_case *c);
} layer_case;

static double combined_output(void *context) {
    layer_case *c = context;
    c->forward(c);
    double sum = 0;
    for (int64_t i = 0; i < c->outputs; i++)
        sum += c->combination[i] * c->y[i];
    return sum;
}

static layer_case *open_case(void (*forward)(layer_case *), int64_t outputs) {
    layer_case *c = train_allocate(1, sizeof *c);
    random_state random;
    random_seed(&random, 2);
    fill_random(&random, c->x, MOST, 1);
    fill_random(&random, c->weight, MOST, 1);
    fill_random(&random, c->combination, MOST, 1);
    c->forward = forward;
    c->outputs = outputs;
    forward(c);
    return c;
}

static void forward_linear(layer_case *c) {
    linear_forward(c->y, c->x, c->weight, ROWS, OUT, DIM);
}

static void test_linear(void **state) {
    (void)state;
    layer_case *c = open_case(forward_linear, ROWS * OUT);
    linear_backward_input(c->dx, c->combination, c->weight, ROWS, OUT, DIM);
    linear_backward_weight(c->dweight, c->combination, c->x, ROWS, OUT, DIM);
    check_gradient(combined_output, c, c->x, c->dx, ROWS * DIM, "linear dx");
    check_gradient(combined_output, c, c->weight, c->dweight, OUT * DIM, "linear dweight");
    free(c);
}

static void forward_rmsnorm(layer_case *c) {
    rmsnorm_forward(c->y, c->inverse_rms, c->x, c->weight, ROWS, DIM);
}

static void test_rmsnorm(void **state) {
    (void)state;
    layer_case *c = open_case(forward_rmsnorm, ROWS * DIM);
    rmsnorm_backward(c->dx, c->dweight, c->combination, c->x, c->inverse_rms, c->weight, ROWS, DIM);
    check_gradient(combined_output, c, c->x, c->dx, ROWS * DIM, "rmsnorm dx");
    check_gradient(combined_output, c, c->weight, c->dweight, DIM, "rmsnorm dgain");

    /* The gradient is added to what the stream already has. */
    const real once = c->dx[3];
    rmsnorm_backward(c->dx, c->dweight, c->combination, c->x, c->inverse_rms, c->weight, ROWS, DIM);
    assert_true(fabs(c->dx[3] - 2 * once) < 1e-12);
    free(c);
}

static void forward_heads(layer_case *c) {
    c->layout = (head_layout){ROWS, HEADS, HEAD_DIM, POSITIONS, HEADS * HEAD_DIM + 5, HEADS * HEAD_DIM};
    rope_table(c->cosine, c->sine, POSITIONS, HEAD_DIM);
    head_norm_rope_forward(&c->layout, c->y, c->inverse_rms, c->x, c->weight, c->cosine, c->sine);
}

static void test_heads(void **state) {
    (void)state;
    layer_case *c = open_case(forward_heads, ROWS * HEADS * HEAD_DIM);
    head_norm_rope_backward(&c->layout, c->dx, c->dweight, c->combination, c->x, c->inverse_rms, c->weight, c->cosine,
                            c->sine);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t at = r * c->layout.input_stride;
        check_gradient(combined_output, c, c->x + at, c->dx + at, HEADS * HEAD_DIM, "head norm and rope dx");
        for (int i = HEADS * HEAD_DIM; i < c->layout.input_stride; i++)
            assert_true(c->dx[at + i] == 0);
    }
    check_gradient(combined_output, c, c->weight, c->dweight, HEAD_DIM, "head norm dgain");
    free(c);
}

/* The rotary embedding makes a product of a query and a key depend on their distance alone. */
static void test_rope_is_relative(void **state) {
    (void)state;
    enum { LENGTH = 12 };
    static real x[LENGTH * HEAD_DIM], y[LENGTH * HEAD_DIM], inverse[LENGTH], cosine[LENGTH * 2], sine[LENGTH * 2];
    const real gain[HEAD_DIM] = {1, 1, 1, 1}, row[HEAD_DIM] = {0.3, -1.2, 0.7, 2};
    for (int r = 0; r < LENGTH; r++)
        memcpy(x + r * HEAD_DIM, row, sizeof row);
    rope_table(cosine, sine, LENGTH, HEAD_DIM);
    const head_layout layout = {LENGTH, 1, HEAD_DIM, LENGTH, HEAD_DIM, HEAD_DIM};
    head_norm_rope_forward(&layout, y, inverse, x, gain, cosine, sine);
    double dots[3] = {0};
    for (int i = 0; i < HEAD_DIM; i++) {
        dots[0] += y[5 * HEAD_DIM + i] * y[2 * HEAD_DIM + i];
        dots[1] += y[11 * HEAD_DIM + i] * y[8 * HEAD_DIM + i];
        dots[2] += y[11 * HEAD_DIM + i] * y[7 * HEAD_DIM + i];
    }
    assert_true(fabs(dots[0] - dots[1]) < 1e-12);
    assert_true(fabs(dots[0] - dots[2]) > 1e-3);
}

static void forward_swiglu(layer_case *c) {
    swiglu_forward(c->y, c->x, ROWS, DIM);
}

static void test_swiglu(void **state) {
    (void)state;
    layer_case *c = open_case(forward_swiglu, ROWS * DIM);
    swiglu_backward(c->dx, c->combination, c->x, ROWS, DIM);
    check_gradient(combined_output, c, c->x, c->dx, ROWS * 2 * DIM, "swiglu dx");
    free(c);
}

static const uint8_t some_bytes[ROWS] = {1, 0, 5, 1, 255 % DIM, 9, 1};

static void forward_embedding(layer_case *c) {
    embedding_forward(c->y, c->weight, some_bytes, ROWS, DIM);
}

static void test_embedding(void **state) {
    (void)state;
    layer_case *c = open_case(forward_embedding, ROWS * DIM);
    embedding_backward(c->dweight, c->combination, some_bytes, ROWS, DIM);
    check_gradient(combined_output, c, c->weight, c->dweight, 10 * DIM, "embedding dtable");
    free(c);
}

static void forward_cross_entropy(layer_case *c) {
    c->y[0] = cross_entropy(NULL, c->x, some_bytes, ROWS, DIM);
}

static void test_cross_entropy(void **state) {
    (void)state;
    layer_case *c = open_case(forward_cross_entropy, 1);
    c->combination[0] = 1;
    cross_entropy(c->dx, c->x, some_bytes, ROWS, DIM);
    check_gradient(combined_output, c, c->x, c->dx, ROWS * DIM, "cross entropy dlogits");

    /* Logits in the hundreds neither overflow nor lose the answer; equal logits give the logarithm of their number. */
    for (int i = 0; i < ROWS * DIM; i++)
        c->x[i] = 700;
    assert_true(fabs(cross_entropy(NULL, c->x, some_bytes, ROWS, DIM) - log(DIM)) < 1e-12);
    free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),         cmocka_unit_test(test_linear),
        cmocka_unit_test(test_rmsnorm),          cmocka_unit_test(test_heads),
        cmocka_unit_test(test_rope_is_relative), cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_embedding),        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_products_by_blas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
