#include "support.h"

const fmsa_tool_device cpu = {FMSA_DEVICE_CPU};

/* ---- Cases. ---- */

fmsa_config make_config(fmsa_dtype dtype, const int32_t heads[4], int32_t dim, int32_t block_size, int32_t top_k) {
    fmsa_config config;
    fmsa_config_init(&config, sizeof config);
    config.dtype = dtype;
    config.num_heads = heads[0];
    config.num_kv_heads = heads[1];
    config.num_proxy_heads = heads[2];
    config.num_proxy_kv_heads = heads[3];
    config.head_dim = dim;
    config.proxy_head_dim = dim;
    config.block_size = block_size;
    config.top_k = top_k;
    return config;
}

void open_documents(fmsa_case *c, const fmsa_config *config, const int64_t *lengths, int64_t count, uint64_t seed) {
    fmsa_config sized = *config;
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += lengths[i];
    sized.total_q = total;
    sized.total_k = total;
    fmsa_case_open(c, &sized);
    int64_t begin = 0;
    for (int64_t i = 0; i < count; i++) {
        fmsa_case_add_fragment(c, begin, begin + lengths[i], begin, begin + lengths[i]);
        begin += lengths[i];
    }
    fmsa_case_fill(c, seed, 2, 1);
}

void open_document(fmsa_case *c, const fmsa_config *config, int64_t length, uint64_t seed) {
    open_documents(c, config, &length, 1, seed);
}

/* ---- Running. ---- */

static void open_results(results *r, const fmsa_case *c) {
    r->config = c->config;
    r->block_indices = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof *r->block_indices);
    fmsa_reference_outputs_open(&r->outputs, &c->config);
}

void close_results(results *r) {
    fmsa_reference_outputs_close(&r->outputs);
    free(r->block_indices);
}

static void check_call(const fmsa_call *call, fmsa_status status) {
    check(status == FMSA_OK, "%s: %s", fmsa_status_name(status), fmsa_last_error());
    check(call->complaint == NULL, "%s", call->complaint);
}

void run_operation(fmsa_call *call, fmsa_operation operation) {
    check_call(call, fmsa_call_run(call, operation));
}

void run_case(results *r, const fmsa_case *c) {
    fmsa_call call;
    open_results(r, c);
    fmsa_call_open(&call, c, &cpu);
    check_call(&call, fmsa_call_run_all(&call));
    fmsa_call_read(&call, &r->outputs);
    if (c->config.mode == FMSA_MODE_SPARSE) fmsa_call_read_indices(&call, r->block_indices);
    fmsa_call_close(&call);
}

void evaluate_exactly(results *r, const fmsa_case *c, const int32_t *block_indices) {
    open_results(r, c);
    const size_t bytes = (size_t)fmsa_case_index_count(c) * sizeof *block_indices;
    if (block_indices != NULL && bytes > 0) memcpy(r->block_indices, block_indices, bytes);
    const fmsa_reference_inputs inputs = fmsa_case_inputs(c, r->block_indices);
    fmsa_reference_evaluate(&c->config, &inputs, FMSA_DTYPE_FP64, &r->outputs);
}

/* ---- Checking. ---- */

void check_results(const fmsa_case *c, const results *r, const char *what) {
    results exact;
    fmsa_reference_outputs same_type;
    evaluate_exactly(&exact, c, r->block_indices);
    fmsa_reference_outputs_open(&same_type, &c->config);
    const fmsa_reference_inputs inputs = fmsa_case_inputs(c, r->block_indices);
    fmsa_reference_evaluate(&c->config, &inputs, c->config.dtype, &same_type);

    fmsa_comparison comparisons[FMSA_QUANTITY_COUNT];
    fmsa_compare(c, &r->outputs, &same_type, &exact.outputs, comparisons);
    for (int i = 0; i < FMSA_QUANTITY_COUNT; i++) {
        check(comparisons[i].excess <= 1,
              "%s: %s has %.3g times the error it may have (relative to the tensor: %.3g; same type: %.3g)", what,
              fmsa_quantity_name((fmsa_quantity)i), comparisons[i].excess, comparisons[i].error,
              comparisons[i].same_type_error);
    }
    fmsa_reference_outputs_close(&same_type);
    close_results(&exact);
}

void check_case(const fmsa_case *c, const char *what) {
    results r;
    run_case(&r, c);
    if (c->config.mode == FMSA_MODE_SPARSE && c->block_indices == NULL) {
        char complaint[200];
        check(fmsa_compare_selection(c, r.block_indices, complaint, sizeof complaint), "%s: %s", what, complaint);
    }
    check_results(c, &r, what);
    close_results(&r);
}

void check_identical(const double *a, const double *b, int64_t count, const char *what) {
    for (int64_t i = 0; i < count; i++) {
        check(memcmp(&a[i], &b[i], sizeof a[i]) == 0, "%s differs at element %lld of %lld: %.17g and %.17g", what,
              (long long)i, (long long)count, a[i], b[i]);
    }
}

void check_identical_results(const results *a, const results *b, const char *what) {
    const fmsa_config *c = &a->config;
    char text[200];
    const struct {
        const char *name;
        const double *a, *b;
        int64_t count;
    } outputs[] = {
        {"out", a->outputs.out, b->outputs.out, query_elements(c)},
        {"lse", a->outputs.lse, b->outputs.lse, c->total_q * c->num_heads},
        {"dq", a->outputs.dq, b->outputs.dq, query_elements(c)},
        {"dk", a->outputs.dk, b->outputs.dk, key_elements(c)},
        {"dv", a->outputs.dv, b->outputs.dv, key_elements(c)},
        {"dq_proxy", a->outputs.dq_proxy, b->outputs.dq_proxy, query_proxy_elements(c)},
        {"dk_proxy", a->outputs.dk_proxy, b->outputs.dk_proxy, key_proxy_elements(c)},
        {"kl", &a->outputs.kl, &b->outputs.kl, 1},
    };
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
        snprintf(text, sizeof text, "%s: %s", what, outputs[i].name);
        check_identical(outputs[i].a, outputs[i].b, outputs[i].count, text);
    }
}

double relative_difference(const double *a, const double *b, int64_t count) {
    double difference = 0, greatest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isnan(a[i] - b[i])) return INFINITY;
        difference = fmax(difference, fabs(a[i] - b[i]));
        greatest = fmax(greatest, fabs(b[i]));
    }
    return difference == 0 ? 0 : difference / greatest;
}

int64_t query_elements(const fmsa_config *c) {
    return c->total_q * c->num_heads * c->head_dim;
}

int64_t key_elements(const fmsa_config *c) {
    return c->total_k * c->num_kv_heads * c->head_dim;
}

int64_t query_proxy_elements(const fmsa_config *c) {
    return c->total_q * c->num_proxy_heads * c->proxy_head_dim;
}

int64_t key_proxy_elements(const fmsa_config *c) {
    return c->total_k * c->num_proxy_kv_heads * c->proxy_head_dim;
}

/* ---- Finite differences. ---- */

void check_gradient(loss_function *loss, fmsa_case *c, double *x, const double *gradient, int64_t count, int64_t most,
                    const char *what) {
    const double step = 2e-5;
    const int64_t samples = count < most ? count : most;
    double greatest = 0, worst = 0;
    for (int64_t i = 0; i < count; i++)
        greatest = fmax(greatest, fabs(gradient[i]));
    check(greatest > 0, "%s: every gradient is 0", what);
    for (int64_t sample = 0; sample < samples; sample++) {
        const int64_t i = sample * count / samples;
        const double value = x[i];
        x[i] = value + step;
        const double above = loss(c);
        x[i] = value - step;
        const double below = loss(c);
        x[i] = value;
        worst = fmax(worst, fabs((above - below) / (2 * step) - gradient[i]));
    }
    check(worst <= 1e-6 * greatest, "%s: a central difference is off by %.3g of the greatest gradient", what,
          worst / greatest);
}

double weighted_sum(const fmsa_case *c, const double *out) {
    double sum = 0;
    for (int64_t i = 0; i < query_elements(&c->config); i++)
        sum += c->dout[i] * out[i];
    return sum;
}
