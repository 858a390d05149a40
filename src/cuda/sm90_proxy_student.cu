/* The student's LSE over the places of a group: log2 of the sum of exp2(log2(e) * proxy_scale * <q_proxy, k_proxy>).
 *
 * Key-outer, persistent, one block of four warpgroups a multiprocessor. Tiles of 64 tokens (M) x 128 keys (N), S = Q
 * K^T by wgmma m64n128, the row's sum of exponentials from the accumulator (and its maximum where fp32 would not hold
 * the sum without); one number for each (row, place). A small kernel then adds up the places of a row, in their order,
 * so the result is the same on every run.
 *
 * Warpgroup 0 produces: it takes shares by ticket, copies the share's keys (two buffers) and the tokens' rows (six
 * stages of 64) by cp.async, or where a tile's tokens are neighbours of dense mode by the TMA; warpgroups 1-3 take
 * the tiles in turn, so that the exponentials of two run beside the product of the third. Barriers: full[stage] from
 * the producer's 128 threads or their copies and 64 token writers to the tile's warpgroup, empty[stage] back from
 * its 4 warps; key_full and key_empty the same for a share, with all 12 warps. Registers: 128 a thread; S takes 64.
 * Shared memory (Dp = 128): keys 64 KB, stages 96 KB, tokens 16 KB. Floor: 2 * 128 * Dp FLOPs and 128 exponentials
 * a (row, place): both 1,024 clocks for 128 of them at Dp = 128. Measured on an H200, 16/2/4/1 heads, 16,384 tokens,
 * k = 16: 1,420 clocks a tile of 64, 0.10 ms. */
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

constexpr int student_threads = 512, consumers = 3, key_buffers = 2;
/* A multiple of the warpgroups that take tiles in turns, so that a stage is always the same one's: it has seen the fill
 * before, and its wait for a parity cannot take that one's for the next. */
constexpr int student_stages = 2 * consumers;

template <typename T>
struct student_parameters {
    CUtensorMap q_map; /* dense mode */
    proxy_work w;
    view<const T> q_proxy, k_proxy;
    int32_t proxy_heads_per_key_head;
    float scale_log2; /* proxy_scale * log2(e) */
};

template <int D>
struct student_memory {
    static constexpr int key_bytes = block_keys * D * 2, stage_bytes = tile_tokens * D * 2;
    alignas(1024) char keys[key_buffers][key_bytes];
    alignas(1024) char rows[student_stages][stage_bytes];
    token_tile tokens[student_stages];
    token_batch batch;
    share_data shares[key_buffers];
    uint64_t full[student_stages], empty[student_stages], key_full[key_buffers], key_empty[key_buffers];
    int32_t next_share;
};
static_assert(sizeof(student_memory<128>) <= most_block_memory, "a block has no more");

template <typename T, int D>
__device__ __forceinline__ void produce(const student_parameters<T> &a, student_memory<D> &m) {
    const proxy_work &w = a.w;
    const int tid = threadIdx.x;
    uint32_t tile = 0;
    for (uint32_t i = 0;; i++) {
        const int buffer = i % key_buffers;
        barrier_wait(shared_address(&m.key_empty[buffer]), (i / key_buffers + 1) & 1);
        const uint32_t key_full = shared_address(&m.key_full[buffer]);
        proxy_share s;
        int32_t number;
        if (!take_share(w, STUDENT_TICKET, &m.next_share, s, number)) {
            if (tid == 0) m.shares[buffer].tiles = 0;
            barrier_arrive(key_full);
            barrier_arrive_after_copies(key_full);
            return;
        }
        next_tokens next;
        next.ask(w, s, 0);
        const block_place block(w, s.block);
        if (tid == 0) describe_share(w, s, block, number, m.shares[buffer]);
        load_key_rows<D>(shared_address(m.keys[buffer]), a.k_proxy, block.key_row, block.keys,
                         s.proxy_head / a.proxy_heads_per_key_head);
        barrier_arrive(key_full);
        barrier_arrive_after_copies(key_full);

        for (int32_t t = 0; t < tiles_of(s); t++, tile++) {
            const int32_t first = t * tile_tokens % batch_tokens;
            if (first == 0) find_tokens<D / 8, false, true, true>(w, s, block, t * tile_tokens, next, m.batch);
            const bool whole = m.batch.whole_tile(first);
            tile_rows_of_thread<D / 8> rows;
            rows.read(m.batch.row + first);
            const int stage = tile % student_stages;
            const uint32_t full = shared_address(&m.full[stage]);
            barrier_wait(shared_address(&m.empty[stage]), (tile / student_stages + 1) & 1);
            if (whole) {
                load_whole_rows<D>(shared_address(m.rows[stage]), &a.q_map, full, s.proxy_head,
                                   int32_t(s.begin) + t * tile_tokens);
            } else {
                load_token_rows<D>(shared_address(m.rows[stage]), rows, a.q_proxy, s.proxy_head);
                barrier_arrive_after_copies(full);
            }
            if (tid < tile_tokens) {
                keep_tile(m.batch, first, m.tokens[stage]);
                barrier_arrive(full);
            }
        }
    }
}

/* Scores of the keys that the tokens of rows g and g + 8 do not see. */
__device__ __forceinline__ void mask_scores(float (&s)[64], const int32_t (&limit)[2]) {
    const int column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (8 * j + column + i % 2 > limit[i / 2]) s[4 * j + i] = -INFINITY;
    }
}

/* What a row's numbers i of an accumulator, i / 2 % 2 == half, come to. */
template <typename F>
__device__ __forceinline__ float over_row(const float (&x)[8], int half, F f) {
    return f(f(x[2 * half], x[2 * half + 1]), f(x[2 * half + 4], x[2 * half + 5]));
}

/* Sums of exponentials of rows g and g + 8 relative to 2^reference; in four sums each, so that nothing waits. */
__device__ __forceinline__ void sum_exponentials(float (&result)[2], const float (&s)[64], float scale_log2,
                                                 const float (&reference)[2]) {
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < 64; i++)
        sum[i % 8] += exp2_approx(fmaf(s[i], scale_log2, -reference[i / 2 % 2]));
#pragma unroll
    for (int half = 0; half < 2; half++)
        result[half] = quad_sum(over_row(sum, half, [](float x, float y) { return x + y; }));
}

/* The greatest scores, as powers of two. */
__device__ __forceinline__ void find_references(float (&reference)[2], const float (&s)[64], float scale_log2) {
    float most[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        most[i] = s[i];
#pragma unroll
    for (int i = 8; i < 64; i++)
        most[i % 8] = fmaxf(most[i % 8], s[i]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float greatest = quad_max(over_row(most, half, [](float x, float y) { return fmaxf(x, y); }));
        reference[half] = greatest == -INFINITY ? 0 : greatest * scale_log2;
    }
}

/* log2 of the sum of exponentials of rows g and g + 8. Any reference gives the same: 1, unless a sum comes near the
 * ends of what fp32 holds (or is no number); then all again with the greatest score. */
__device__ __forceinline__ void log2_sums(float (&result)[2], const float (&s)[64], float scale_log2) {
    constexpr float most = 1e24f; /* 2^80 */
    float reference[2] = {0, 0}, sum[2];
    sum_exponentials(sum, s, scale_log2, reference);
    const bool good = fminf(sum[0], sum[1]) > 1 / most && fmaxf(sum[0], sum[1]) < most;
    if (__any_sync(0xffffffffu, !good)) {
        find_references(reference, s, scale_log2);
        sum_exponentials(sum, s, scale_log2, reference);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        result[half] = reference[half] + log2_approx(sum[half]);
}

template <typename T, int D>
__device__ __forceinline__ void consume(const student_parameters<T> &a, student_memory<D> &m) {
    const proxy_work &w = a.w;
    const int lane = threadIdx.x & 31, own = threadIdx.x / 128 - 1;
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    uint32_t first = 0; /* tile of the share */
    for (uint32_t i = 0;; i++) {
        const int buffer = i % key_buffers;
        barrier_wait(shared_address(&m.key_full[buffer]), i / key_buffers & 1);
        const int32_t tiles = uniform(m.shares[buffer].tiles);
        if (tiles == 0) return;
        fence_async_proxy();
        const uint64_t keys = operand(shared_address(m.keys[buffer]), 0, 1024);
        for (uint32_t tile = first + (own + consumers - first % consumers) % consumers; tile < first + tiles;
             tile += consumers) {
            const int stage = tile % student_stages;
            const token_tile &tokens = m.tokens[stage];
            barrier_wait(shared_address(&m.full[stage]), tile / student_stages & 1);
            fence_async_proxy();
            const uint64_t rows = operand(shared_address(m.rows[stage]), 0, 1024);
            float s[64];
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                const uint64_t q = rows + d / 4 * (tile_tokens * 128 >> 4) + d % 4 * 2;
                const uint64_t k = keys + d / 4 * (block_keys * 128 >> 4) + d % 4 * 2;
                if (d == 0) {
                    wgmma_new(s, q, k, T());
                } else {
                    wgmma(s, q, k, T());
                }
            }
            wgmma_commit();
            const int32_t limit[2] = {tokens.limit[row], tokens.limit[row + 8]};
            const int32_t place[2] = {tokens.place[row], tokens.place[row + 8]};
            const bool masked = (tokens.masked[0] | tokens.masked[1]) != 0;
            wgmma_wait<0>();
            pin(s);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&m.empty[stage]));
            if (masked) mask_scores(s, limit);
            float value[2];
            log2_sums(value, s, a.scale_log2);
#pragma unroll
            for (int half = 0; half < 2; half++)
                if ((lane & 3) == 0 && place[half] >= 0) w.numbers[place[half]] = value[half];
        }
        first += tiles;
        if (lane == 0) barrier_arrive(shared_address(&m.key_empty[buffer]));
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(student_threads, 1) student_kernel(const __grid_constant__ student_parameters<T> a) {
    extern __shared__ __align__(1024) char memory[];
    student_memory<D> &m = *reinterpret_cast<student_memory<D> *>(memory);
    allow_next_grid();
    if (threadIdx.x == 0) {
        for (int i = 0; i < student_stages; i++) {
            barrier_init(shared_address(&m.full[i]), producer_threads + tile_tokens);
            barrier_init(shared_address(&m.empty[i]), 4);
        }
        for (int i = 0; i < key_buffers; i++) {
            barrier_init(shared_address(&m.key_full[i]), 2 * producer_threads);
            barrier_init(shared_address(&m.key_empty[i]), 4 * consumers);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (uniform(threadIdx.x / 128) == 0) {
        produce<T, D>(a, m);
    } else {
        consume<T, D>(a, m);
    }
    wait_for_grid_before();
}

/* ---- The places of a row of proxy head blockIdx.y, added up by eight lanes. ---- */

constexpr int sum_threads = 256, sum_lanes = 8;

template <typename F>
__device__ __forceinline__ float over_sum_lanes(float x, F f) {
#pragma unroll
    for (int step = sum_lanes / 2; step > 0; step /= 2)
        x = f(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__global__ void __launch_bounds__(sum_threads) sum_places(const __grid_constant__ proxy_work w, bool first) {
    allow_next_grid();
    wait_for_grid_before();
    const int64_t number = (int64_t(blockIdx.x) * sum_threads + threadIdx.x) / sum_lanes;
    const bool there = number < w.row_end - w.row_begin; /* whole warps stay */
    const int32_t proxy_head = blockIdx.y, row = there ? w.row_begin + static_cast<int32_t>(number) : w.row_end - 1;
    const float *numbers = w.numbers + w.row_number(proxy_head, row) * w.places;
    const int32_t lane = threadIdx.x % sum_lanes, count = w.places_of(proxy_head, row);
    float &lse = w.student_lse[int64_t(proxy_head) * w.total_q + row];
    const float before = first ? -INFINITY : lse;
    float most = -INFINITY;
#pragma unroll 4
    for (int32_t p = lane; p < count; p += sum_lanes)
        most = fmaxf(most, numbers[p]);
    most = fmaxf(before, over_sum_lanes(most, [](float x, float y) { return fmaxf(x, y); }));
    if (most == -INFINITY) most = 0;
    float sum = 0;
#pragma unroll 4
    for (int32_t p = lane; p < count; p += sum_lanes)
        sum += exp2f(numbers[p] - most);
    sum = exp2f(before - most) + over_sum_lanes(sum, [](float x, float y) { return x + y; });
    if (lane == 0 && there) lse = most + log2f(sum);
}

template <typename T, int D>
static fmsa_status launch_student(const fmsa_problem *problem, const fmsa_tensors *t, const proxy_work &w, bool close,
                                  cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    student_parameters<T> p = {};
    p.w = w;
    p.q_proxy = view<const T>(t->q_proxy);
    p.k_proxy = view<const T>(t->k_proxy);
    p.proxy_heads_per_key_head = c->num_proxy_heads / c->num_proxy_kv_heads;
    p.scale_log2 = static_cast<float>(c->proxy_scale * log2_e);
    if (w.places > 0 && is_dense(problem)) FMSA_TRY(map_token_rows(problem, t->q_proxy, &p.q_map));
    unsigned blocks;
    FMSA_TRY(multiprocessors(&blocks));
    return launch_as(close, "student LSE", student_kernel<T, D>, dim3(blocks), student_threads,
                     sizeof(student_memory<D>), stream, p);
}

fmsa_status student_lse(const fmsa_problem *problem, const fmsa_tensors *tensors, const proxy_work &w, bool first,
                        bool close, cudaStream_t stream) {
    if (w.max_blocks > 0) {
        FMSA_TRY(
            with_16_bit_type_and_dim(problem->config.dtype, problem->config.proxy_head_dim, [&](auto type, auto dim) {
                return launch_student<decltype(type), decltype(dim)::value>(problem, tensors, w, close, stream);
            }));
    }
    const dim3 grid(fmsa_cuda_grid(int64_t(w.row_end - w.row_begin) * sum_lanes, sum_threads), w.proxy_heads);
    return launch_close("sum of places", sum_places, grid, sum_threads, 0, stream, w, first);
}

} // namespace fmsa::proxy
