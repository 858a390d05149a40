/* One training step of MSA on the CPU, through the C API: select, schedule, forward, backward with the proxy loss. Two
 * packed documents of random numbers stand for a model's projections.
 *
 *     cc minimal.c $(pkg-config --cflags --libs flashmsa) && ./a.out
 */
#include <flashmsa.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 1000, HEADS = 8, KV_HEADS = 2, PROXY_HEADS = 2, PROXY_KV_HEADS = 1, DIM = 64, TOP_K = 4 };

static void *allocations[32];
static int allocation_count;

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (memory == NULL) exit(1);
    allocations[allocation_count++] = memory;
    return memory;
}

static fmsa_tensor new_tensor(int64_t heads, int64_t dim) {
    return (fmsa_tensor){
        .data = allocate(TOKENS * heads * dim * sizeof(float)), .row_stride = heads * dim, .head_stride = dim};
}

static fmsa_tensor new_random(int64_t heads, int64_t dim) {
    const fmsa_tensor t = new_tensor(heads, dim);
    for (int64_t i = 0; i < TOKENS * heads * dim; i++)
        ((float *)t.data)[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
    return t;
}

static void check(fmsa_status status) {
    if (status == FMSA_OK) return;
    fprintf(stderr, "%s: %s\n", fmsa_status_name(status), fmsa_last_error());
    exit(1);
}

typedef fmsa_status operation(const fmsa_config *, const fmsa_tensors *, void *, size_t);

static void run(operation *function, fmsa_operation number, const fmsa_config *config, const fmsa_tensors *tensors) {
    size_t bytes;
    check(fmsa_workspace_bytes(config, number, &bytes));
    void *workspace = allocate(bytes);
    check(function(config, tensors, workspace, bytes));
}

int main(void) {
    static const int32_t cu_seqlens[] = {0, 700, TOKENS};
    fmsa_config config;
    fmsa_config_init(&config, sizeof config);
    config.dtype = FMSA_DTYPE_FP32;
    config.num_heads = HEADS;
    config.num_kv_heads = KV_HEADS;
    config.num_proxy_heads = PROXY_HEADS;
    config.num_proxy_kv_heads = PROXY_KV_HEADS;
    config.head_dim = config.proxy_head_dim = DIM;
    config.top_k = TOP_K;
    config.total_q = config.total_k = TOKENS;
    config.num_fragments = 2;
    config.q_begin = config.k_begin = cu_seqlens;
    config.q_end = config.k_end = cu_seqlens + 1;

    float kl;
    fmsa_tensors t = {.struct_size = sizeof t, .kl = &kl};
    t.q = new_random(HEADS, DIM), t.k = new_random(KV_HEADS, DIM), t.v = new_random(KV_HEADS, DIM);
    t.q_proxy = new_random(PROXY_HEADS, DIM), t.k_proxy = new_random(PROXY_KV_HEADS, DIM);
    t.out = new_tensor(HEADS, DIM), t.lse = new_tensor(HEADS, 1), t.dout = new_random(HEADS, DIM);
    t.dq = new_tensor(HEADS, DIM), t.dk = new_tensor(KV_HEADS, DIM), t.dv = new_tensor(KV_HEADS, DIM);
    t.dq_proxy = new_tensor(PROXY_HEADS, DIM), t.dk_proxy = new_tensor(PROXY_KV_HEADS, DIM);
    t.block_indices = new_tensor(PROXY_HEADS, TOP_K); /* int32, of float's size */
    check(fmsa_schedule_bytes(&config, &t.schedule_bytes));
    t.schedule = allocate(t.schedule_bytes);

    run(fmsa_select, FMSA_OPERATION_SELECT, &config, &t);
    run(fmsa_schedule, FMSA_OPERATION_SCHEDULE, &config, &t);
    run(fmsa_forward, FMSA_OPERATION_FORWARD, &config, &t);
    run(fmsa_backward_with_proxy, FMSA_OPERATION_BACKWARD_WITH_PROXY, &config, &t);
    const int64_t last = TOKENS - 1;
    const int32_t *blocks = (const int32_t *)t.block_indices.data + last * PROXY_HEADS * TOP_K;
    printf("The last token reads blocks %d %d %d; KL %.4f, out %.4f, dq %.4f, dk_proxy %.2e\n", blocks[0], blocks[1],
           blocks[2], kl, ((float *)t.out.data)[last * HEADS * DIM], ((float *)t.dq.data)[last * HEADS * DIM],
           ((float *)t.dk_proxy.data)[last * PROXY_KV_HEADS * DIM]);
    for (int i = 0; i < allocation_count; i++)
        free(allocations[i]);
    return 0;
}
