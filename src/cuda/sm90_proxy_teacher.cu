/* The teacher where no backward pass has left it: w = the mean over R main heads of exp(softmax_scale * <q, k> - lse),
 * written as sm90_proxy.h says, one plane.
 *
 * Key-outer, persistent, one block of five warpgroups a multiprocessor; a tile is 64 tokens (N) x the block's 128 keys.
 * Warpgroup 0 produces: for each of the R heads 64 rows of q and their LSE for two tiles at once, and the keys of the
 * head where they change (with the share, or within the tiles if a proxy head teaches from several key heads), all by
 * cp.async. Warpgroups 1 and 2 are a pair, 3 and 4 another; a pair takes one of the two tiles, each warpgroup 64 keys
 * (M): S^T by wgmma m64n64, w += exp(S - lse) in registers. The exponentials of one pair run beside the products of the
 * other.
 *
 * Barriers: full[pair][stage] from the producer's 128 copies and 64 token writers to the pair, empty[pair][stage] back
 * from its 8 warps; key_full and key_empty the same for a head's keys and share_full and share_empty for what is known
 * of a share, with all 16 warps. The tokens' data has eight places a pair: no more than four tiles are under way.
 * Registers: 96 a thread (S 32, w 32). Shared memory (D = 128): keys 64 KB, twice four stages 128 KB, tokens 24 KB.
 * Floor: 2 * 128 * D FLOPs and 128 exponentials a (row, place, head), 512 clocks each for a tile at D = 128; its
 * operands pass shared memory in about 650. Measured on an H200, bf16, D = 128, 64/4/4/1 heads, k = 16, 65,536 tokens,
 * in steady state: 8.8 ms for all of fmsa_proxy_loss where the KL value alone is wanted. */
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

constexpr int pairs = 2, teacher_threads = 128 + pairs * 256, teacher_stages = 4, key_buffers = 2, share_buffers = 2;

template <typename T>
struct teacher_parameters {
    proxy_work w;
    view<const T> q, k;
    view<const float> lse;
    int32_t heads_per_proxy_head, heads_per_kv_head;
    float scale_log2; /* softmax_scale * log2(e) */
    float factor;     /* of the sum over the heads */
};

template <int D>
struct teacher_memory {
    alignas(1024) char keys[key_buffers][block_keys * D * 2];
    alignas(1024) char rows[pairs][teacher_stages][tile_tokens * D * 2];
    float lse[pairs][teacher_stages][tile_tokens]; /* natural */
    token_tile tokens[pairs][token_places];
    token_batch batch;
    share_data shares[share_buffers];
    uint64_t full[pairs][teacher_stages], empty[pairs][teacher_stages];
    uint64_t key_full[key_buffers], key_empty[key_buffers], share_full[share_buffers], share_empty[share_buffers];
    int32_t next_share;
};
static_assert(sizeof(teacher_memory<128>) <= most_block_memory, "a block has no more");

/* ---- Warpgroup 0. ---- */

template <typename T, int D>
struct row_producer {
    const teacher_parameters<T> &a;
    teacher_memory<D> &m;
    ring_place<key_buffers> keys;
    ring_place<teacher_stages> stage; /* of both pairs */
    int32_t held_head;                /* the key head whose keys were loaded last */
    uint32_t tile_pair;

    __device__ __forceinline__ row_producer(const teacher_parameters<T> &a, teacher_memory<D> &m)
        : a(a), m(m), tile_pair(0) {
    }

    __device__ __forceinline__ void load_keys(const block_place &block, int32_t key_head) {
        barrier_wait(shared_address(&m.key_empty[keys.index]), keys.phase ^ 1);
        load_key_rows<D>(shared_address(m.keys[keys.index]), a.k, block.key_row, block.keys, key_head);
        barrier_arrive_after_copies(shared_address(&m.key_full[keys.index]));
        keys.advance();
        held_head = key_head;
    }

    /* The R heads of the two tiles from token `first` of the batch on. */
    __device__ __forceinline__ void load_tiles(const block_place &block, int32_t proxy_head, int32_t first) {
        const int tid = threadIdx.x;
        tile_rows_of_thread<D / 8> rows[pairs];
#pragma unroll
        for (int p = 0; p < pairs; p++)
            rows[p].read(m.batch.row + first + p * tile_tokens);
        for (int32_t h = 0; h < a.heads_per_proxy_head; h++) {
            const int32_t head = proxy_head * a.heads_per_proxy_head + h, key_head = head / a.heads_per_kv_head;
            if (key_head != held_head) load_keys(block, key_head);
#pragma unroll
            for (int p = 0; p < pairs; p++) {
                const uint32_t full = shared_address(&m.full[p][stage.index]);
                barrier_wait(shared_address(&m.empty[p][stage.index]), stage.phase ^ 1);
                pin(rows[p].number); /* There are no registers to keep what follows from them for all heads. */
                load_token_rows<D>(shared_address(m.rows[p][stage.index]), rows[p], a.q, head);
                if (tid < tile_tokens) {
                    if (h == 0) keep_tile(m.batch, first + p * tile_tokens, m.tokens[p][tile_pair % token_places]);
                    const int32_t row = m.batch.row[first + p * tile_tokens + tile_rows_of_thread<D / 8>::slot(tid)];
                    cp_async_4(shared_address(&m.lse[p][stage.index][tid]), a.lse.at(max(row, 0), head), row >= 0);
                    barrier_arrive(full);
                }
                barrier_arrive_after_copies(full);
            }
            stage.advance();
        }
        tile_pair++;
    }

    __device__ __forceinline__ void run() {
        const proxy_work &w = a.w;
        ring_place<share_buffers> buffer;
        while (true) {
            const uint32_t share_full = shared_address(&m.share_full[buffer.index]);
            barrier_wait(shared_address(&m.share_empty[buffer.index]), buffer.phase ^ 1);
            proxy_share s;
            int32_t number;
            if (!take_share(w, TEACHER_TICKET, &m.next_share, s, number)) {
                if (threadIdx.x == 0) m.shares[buffer.index].tiles = 0;
                barrier_arrive(share_full);
                return;
            }
            const block_place block(w, s.block);
            if (threadIdx.x == 0) describe_share(w, s, block, number, m.shares[buffer.index]);
            barrier_arrive(share_full);
            buffer.advance();
            held_head = -1;
            for (int32_t i = 0; i < s.count; i += pairs * tile_tokens) {
                if (i % batch_tokens == 0) {
                    next_tokens next;
                    next.ask(w, s, i);
                    find_tokens<D / 8, false, false, false>(w, s, block, i, next, m.batch);
                }
                load_tiles(block, s.proxy_head, i % batch_tokens);
            }
        }
    }
};

/* ---- Warpgroups 1 to 4. ---- */

template <typename T, int D>
struct teacher_maker {
    const teacher_parameters<T> &a;
    teacher_memory<D> &m;
    const int lane, warp, half, pair; /* warp of the warpgroup, which 64 keys, which tile */
    ring_place<key_buffers> keys;
    ring_place<teacher_stages> stage;

    __device__ __forceinline__ teacher_maker(const teacher_parameters<T> &a, teacher_memory<D> &m)
        : a(a), m(m), lane(threadIdx.x & 31), warp(threadIdx.x % 128 / 32), half((threadIdx.x / 128 - 1) % 2),
          pair((threadIdx.x / 128 - 1) / 2) {
    }

    /* w += the probabilities of one head. */
    __device__ __forceinline__ void add_head(float (&w)[32], uint64_t key_operand) {
        float s[32];
        barrier_wait(shared_address(&m.full[pair][stage.index]), stage.phase);
        fence_async_proxy();
        multiply_keys_by_rows<D>(s, key_operand, operand(shared_address(m.rows[pair][stage.index]), 0, 1024), T());
        const float *const own_lse = &m.lse[pair][stage.index][2 * (lane & 3)];
        float reference[16];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 lse = *reinterpret_cast<const float2 *>(own_lse + 8 * j);
            reference[2 * j] = -lse.x * log2_e;
            reference[2 * j + 1] = -lse.y * log2_e;
        }
        wgmma_wait<0>();
        pin(s);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&m.empty[pair][stage.index]));
        stage.advance();
#pragma unroll
        for (int i = 0; i < 32; i++)
            w[i] += exp2_approx(fmaf(s[i], a.scale_log2, reference[i / 4 * 2 + i % 2]));
    }

    /* Heads first ... end - 1 of the proxy head, which share a key head. */
    __device__ __forceinline__ void add_heads(float (&w)[32], int32_t first, int32_t end) {
        const uint64_t key_operand = operand(shared_address(m.keys[keys.index]) + half * (64 * 128), 0, 1024);
        for (int32_t h = first; h < end; h++)
            add_head(w, key_operand);
    }

    __device__ __forceinline__ void next_keys() {
        if (lane == 0) barrier_arrive(shared_address(&m.key_empty[keys.index]));
        keys.advance();
    }

    __device__ __forceinline__ void write_tile(const float (&w)[32], const token_tile &tokens) {
        uint32_t *const own_pair = reinterpret_cast<uint32_t *>(a.w.vectors) + 8 * (4 * half + warp) + lane / 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t place = tokens.place[8 * j + 2 * (lane & 3) + e];
                if (place < 0) continue;
                own_pair[int64_t(place) * (vector_length / 2)] =
                    pack_pair(w[4 * j + e] * a.factor, w[4 * j + 2 + e] * a.factor, __half());
            }
        }
    }

    /* The keys of the first key head are held from tile to tile if they are the only ones. */
    __device__ __forceinline__ void make_tile(int32_t proxy_head, bool hold, bool held, const token_tile &tokens) {
        float w[32] = {};
        const int32_t first_head = proxy_head * a.heads_per_proxy_head;
        for (int32_t h = 0; h < a.heads_per_proxy_head;) {
            const int32_t of_key_head = a.heads_per_kv_head - (first_head + h) % a.heads_per_kv_head;
            const int32_t end = min(h + of_key_head, a.heads_per_proxy_head);
            if (!held || h > 0) barrier_wait(shared_address(&m.key_full[keys.index]), keys.phase);
            fence_async_proxy();
            add_heads(w, h, end);
            h = end;
            __syncwarp();
            if (!hold || h < a.heads_per_proxy_head) next_keys();
        }
        write_tile(w, tokens);
    }

    __device__ __forceinline__ void run() {
        ring_place<share_buffers> buffer;
        uint32_t tile_pair = 0;
        while (true) {
            barrier_wait(shared_address(&m.share_full[buffer.index]), buffer.phase);
            const int32_t tiles = uniform(m.shares[buffer.index].tiles);
            const int32_t proxy_head = uniform(m.shares[buffer.index].proxy_head);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&m.share_empty[buffer.index]));
            buffer.advance();
            if (tiles == 0) return;
            const int32_t first_head = proxy_head * a.heads_per_proxy_head;
            const bool one_key_head =
                first_head / a.heads_per_kv_head == (first_head + a.heads_per_proxy_head - 1) / a.heads_per_kv_head;
            for (int32_t t = 0; t < tiles; t += pairs, tile_pair++) {
                const bool last = t + pairs >= tiles;
                make_tile(proxy_head, one_key_head && !last, one_key_head && t > 0,
                          m.tokens[pair][tile_pair % token_places]);
            }
        }
    }
};

template <typename T, int D>
__global__ void __launch_bounds__(teacher_threads, 1) teacher_kernel(const __grid_constant__ teacher_parameters<T> a) {
    extern __shared__ __align__(1024) char memory[];
    teacher_memory<D> &m = *reinterpret_cast<teacher_memory<D> *>(memory);
    if (threadIdx.x == 0) {
        for (int p = 0; p < pairs; p++) {
            for (int i = 0; i < teacher_stages; i++) {
                barrier_init(shared_address(&m.full[p][i]), producer_threads + tile_tokens);
                barrier_init(shared_address(&m.empty[p][i]), 8);
            }
        }
        for (int i = 0; i < key_buffers; i++) {
            barrier_init(shared_address(&m.key_full[i]), producer_threads);
            barrier_init(shared_address(&m.key_empty[i]), 8 * pairs);
        }
        for (int i = 0; i < share_buffers; i++) {
            barrier_init(shared_address(&m.share_full[i]), producer_threads);
            barrier_init(shared_address(&m.share_empty[i]), 8 * pairs);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (uniform(threadIdx.x / 128) == 0) {
        row_producer<T, D>(a, m).run();
    } else {
        teacher_maker<T, D>(a, m).run();
    }
}

template <typename T, int D>
static fmsa_status launch_teacher(const fmsa_problem *problem, const fmsa_tensors *t, const proxy_work &w,
                                  cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    teacher_parameters<T> p = {};
    p.w = w;
    p.q = view<const T>(t->q);
    p.k = view<const T>(t->k);
    p.lse = view<const float>(t->lse);
    p.heads_per_proxy_head = problem->heads_per_proxy_head;
    p.heads_per_kv_head = problem->heads_per_kv_head;
    p.scale_log2 = static_cast<float>(c->softmax_scale * log2_e);
    p.factor = static_cast<float>(FMSA_SM90_TEACHER_SCALE) / static_cast<float>(p.heads_per_proxy_head);
    unsigned blocks;
    FMSA_TRY(multiprocessors(&blocks));
    return launch("teacher", teacher_kernel<T, D>, dim3(blocks), teacher_threads, sizeof(teacher_memory<D>), stream, p);
}

fmsa_status make_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors, const proxy_work &w,
                         cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_16_bit_type_and_dim(c->dtype, c->head_dim, [&](auto type, auto dim) {
        return launch_teacher<decltype(type), decltype(dim)::value>(problem, tensors, w, stream);
    });
}

} // namespace fmsa::proxy
