/* Random cases of every type: shapes, fragments, strides, forced blocks, scales and softmax sharpness, each held to the
 * error rule in every output. */
#include "support.h"

static void check_random_cases(fmsa_dtype dtype, uint64_t first_seed, int count) {
    for (int i = 0; i < count; i++) {
        const uint64_t seed = first_seed + (uint64_t)i;
        fmsa_case c;
        char what[300], description[250];
        fmsa_case_random(&c, seed, &(fmsa_case_limits){FMSA_DEVICE_CPU, dtype, 250});
        fmsa_case_describe(&c, description, sizeof description);
        snprintf(what, sizeof what, "seed %llu: %s", (unsigned long long)seed, description);
        check_case(&c, what);
        fmsa_case_close(&c);
    }
}

static void test_bf16(void **state) {
    (void)state;
    check_random_cases(FMSA_DTYPE_BF16, 1000, 30);
}

static void test_fp16(void **state) {
    (void)state;
    check_random_cases(FMSA_DTYPE_FP16, 2000, 30);
}

static void test_fp32(void **state) {
    (void)state;
    check_random_cases(FMSA_DTYPE_FP32, 3000, 30);
}

static void test_fp64(void **state) {
    (void)state;
    check_random_cases(FMSA_DTYPE_FP64, 4000, 30);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_fp16),
        cmocka_unit_test(test_fp32),
        cmocka_unit_test(test_fp64),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
