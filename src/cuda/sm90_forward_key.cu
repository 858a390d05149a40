/* The key-outer forward: the edges that few neighbours share. A piece of work is a key block and some of the tokens
 * that chose it; K and V stay in shared memory while tiles of these tokens' query rows are gathered, and every edge
 * leaves a partial result (sm90_forward.cuh), which the merging kernel takes up. Only whole blocks that lie before a
 * row's own come here: nothing is masked.
 *
 * Tile: two halves of 64 rows, one a consumer warpgroup, each with half_tokens tokens of the list, by the 128 keys of
 * the block. Warp roles: warp 0 produces (it gathers a token's heads with one copy for 64 columns), two warpgroups
 * consume and take turns at the tensor cores. A consumer's step: issue S = Q K^T of this tile, then store O of the last
 * but one, issue O = P V of the last, hand over the turn, P = exp(S).
 * Softmax needs a reference, not the maximum: bf16 takes 0, and where a row's sum leaves 2^-80 ... 2^80 the maximum;
 * fp16 always takes the maximum.
 * Barriers: a full and an empty one for each stage of K, V, and of each half's Q; consumers release a stage a warp.
 * Shared memory (D = 128): K and V two stages of 32 KB each, Q three of 32 KB: 224 KB. Results go from registers to
 * memory. Registers: producer 56, consumers 224, no spills.
 * Floor: 4 * 128 * 128 * D operations a tile, and 2 * D bytes written a row and edge. Measured on an H200, bf16, D =
 * 128, 64/4/4/1 heads, k 16, random selection, 65,536 tokens (profiler): 7.6 ms, 530 TFLOP/s, 2.1 TB/s. */
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

constexpr int key_stages = 2, query_stages = 3;
constexpr int token_words = half_rows / 32; /* tokens of a half that a lane has */

template <typename T>
struct key_parameters {
    tile_shape shape;
    int32_t units_per_key_head, units_per_proxy_head;
    float scale_log2;
    counters *state;
    const edge_piece *pieces;
    const remote_edge *remote;
    const int32_t *block_k_begin;
    partial_results<T> partials;
};

struct key_barriers {
    uint64_t k_full[key_stages], k_empty[key_stages], v_full[key_stages], v_empty[key_stages];
    uint64_t q_full[2][query_stages], q_empty[2][query_stages];
    int32_t tiles[key_stages]; /* of the piece in each stage; 0: none is left */
    int32_t unit[key_stages];
    int32_t cell[2][query_stages][half_rows]; /* of each token; -1: none */
};

template <int D>
struct key_memory {
    static constexpr uint32_t block_bytes = block_keys * D * 2, half_bytes = half_rows * D * 2;
    static constexpr uint32_t k = 0, v = key_stages * block_bytes, q = 2 * key_stages * block_bytes;
    static constexpr uint32_t bytes = q + 2 * query_stages * half_bytes;
};

template <typename T, int D>
struct key_producer {
    const CUtensorMap &q_map, &k_map, &v_map;
    const key_parameters<T> &a;
    key_barriers &b;
    const uint32_t base;
    const int lane = threadIdx.x & 31;
    ring<query_stages> q{1};
    ring<key_stages> k{1}, v{1};
    int32_t drawn = 0; /* lane 0: the next piece, drawn early */

    struct piece {
        int32_t edges, begin; /* edges 0: none is left */
        int32_t block, unit;
    };
    /* A half's next tokens, one or two a lane. */
    struct tokens {
        remote_edge edge[token_words];
    };

    __device__ __forceinline__ void draw() {
        if (lane == 0) drawn = atomicAdd(&a.state->next_key, 1);
    }

    __device__ __forceinline__ void take(piece &p) {
        const int32_t work = uniform(drawn), number = work / a.units_per_proxy_head;
        p.edges = 0;
        if (number >= a.state->pieces) return;
        draw();
        const edge_piece from = a.pieces[number];
        p.edges = from.edges;
        p.begin = from.begin;
        p.block = from.block;
        p.unit = from.proxy_head * a.units_per_proxy_head + work - number * a.units_per_proxy_head;
    }

    __device__ __forceinline__ void look_up(tokens &t, const piece &p, int32_t tile, int half) const {
        const int32_t first = tile * a.shape.tokens + half * a.shape.half_tokens;
#pragma unroll
        for (int i = 0; i < token_words; i++) {
            const int32_t token = lane + 32 * i;
            const bool exists = token < a.shape.half_tokens && first + token < p.edges;
            t.edge[i] = exists ? a.remote[p.begin + first + token] : remote_edge{-1, -1};
        }
    }

    __device__ __forceinline__ void gather(const tokens &t, const piece &p, int half) {
        barrier_wait(shared_address(&b.q_empty[half][q.stage]), q.parity);
        const uint32_t full = shared_address(&b.q_full[half][q.stage]);
        const uint32_t to = base + key_memory<D>::q + (half * query_stages + q.stage) * key_memory<D>::half_bytes;
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < token_words; i++) {
            count += __popc(__ballot_sync(0xffffffffu, t.edge[i].row >= 0));
            if (lane + 32 * i < a.shape.half_tokens) {
                const int32_t cell = t.edge[i].cell;
                b.cell[half][q.stage][lane + 32 * i] = cell < 0 ? -1 : p.unit * a.partials.unit_cells + cell;
            }
        }
        /* All lanes' cells come before the arrival: it completes the phase where a half has no tokens. The expected
         * bytes come before all copies. */
        __syncwarp();
        if (lane == 0) barrier_arrive_expect(full, count * a.shape.heads * (2 * D));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < token_words; i++) {
            if (t.edge[i].row < 0) continue;
#pragma unroll
            for (int columns = 0; columns < D / 64; columns++) {
                tma_load_3d(to + columns * (half_rows * 128) + (lane + 32 * i) * a.shape.heads * 128, &q_map, full,
                            columns * 64, p.unit * a.shape.heads, t.edge[i].row);
            }
        }
    }

    __device__ __forceinline__ void load_block(uint64_t *full_barriers, uint64_t *empty_barriers, uint32_t memory,
                                               const CUtensorMap &map, ring<key_stages> &at, const piece &p) {
        barrier_wait(shared_address(&empty_barriers[at.stage]), at.parity);
        if (lane == 0) {
            const uint32_t full = shared_address(&full_barriers[at.stage]);
            barrier_arrive_expect(full, key_memory<D>::block_bytes);
            tma_load_4d(base + memory + at.stage * key_memory<D>::block_bytes, &map, full, 0, a.block_k_begin[p.block],
                        0, p.unit / a.units_per_key_head);
        }
        at.advance();
    }

    __device__ __forceinline__ int32_t tiles_of(const piece &p) const {
        return (p.edges + a.shape.tokens - 1) / a.shape.tokens;
    }

    /* Keys go out with the piece's tile count: a consumer looks for both at once. */
    __device__ __forceinline__ void load_keys(const piece &p) {
        if (p.edges == 0) {
            barrier_wait(shared_address(&b.k_empty[k.stage]), k.parity);
            if (lane == 0) {
                b.tiles[k.stage] = 0;
                barrier_arrive(shared_address(&b.k_full[k.stage]));
            }
            return;
        }
        barrier_wait(shared_address(&b.k_empty[k.stage]), k.parity);
        if (lane == 0) {
            b.tiles[k.stage] = tiles_of(p);
            b.unit[k.stage] = p.unit;
        }
        load_block(b.k_full, b.k_empty, key_memory<D>::k, k_map, k, p);
    }

    __device__ __forceinline__ void run() {
        piece now, next;
        tokens ready[2];
        draw();
        take(now);
        load_keys(now);
        if (now.edges == 0) return;
        look_up(ready[0], now, 0, 0);
        look_up(ready[1], now, 0, 1);
        while (now.edges != 0) {
            take(next);
            const int32_t tiles = tiles_of(now);
            for (int32_t i = 0; i < tiles; i++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const tokens these = ready[half];
                    if (i + 1 < tiles) {
                        look_up(ready[half], now, i + 1, half);
                    } else if (next.edges != 0) {
                        look_up(ready[half], next, 0, half);
                    }
                    gather(these, now, half);
                }
                q.advance();
                /* Behind the first queries: values are needed last, the next piece's keys soon after. */
                if (i == 0) load_block(b.v_full, b.v_empty, key_memory<D>::v, v_map, v, now);
                if (i == min(tiles - 1, 1)) load_keys(next);
            }
            now = next;
        }
    }
};

template <typename T, int D>
__device__ __forceinline__ void consume_keys(const key_parameters<T> &a, key_barriers &b, uint32_t base, int half) {
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32 & 3);
    const uint64_t q_operand =
        operand(base + key_memory<D>::q + half * query_stages * key_memory<D>::half_bytes, 16, 1024);
    const uint64_t k_operand = operand(base + key_memory<D>::k, 16, 1024);
    const uint64_t v_operand = operand(base + key_memory<D>::v, block_keys * 128, 1024);
    const int low = warp * 16 + lane / 4, token_low = a.shape.token_of(low), head_low = low - token_low * a.shape.heads;
    const int high = low + 8, token_high = a.shape.token_of(high), head_high = high - token_high * a.shape.heads;
    const bool used_low = token_low < a.shape.half_tokens, used_high = token_high < a.shape.half_tokens;
    float s[64], o[D / 2];
    uint32_t p[32];
#pragma unroll
    for (int i = 0; i < 64; i++)
        s[i] = 0;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        o[i] = 0;
    ring<query_stages> q(0);
    ring<key_stages> k(0), v(0);
    const uint32_t own_turn = 1 + half, other_turn = 2 - half;
    if (half == 1) named_barrier_arrive(1, consumer_threads);

    /* What a tile's results need besides O: finish() makes the LSE (base 2) and the inverse of the other two. */
    struct result {
        int32_t cell_low, cell_high; /* -1: none */
        row_pair reference, sum;
    };
    const auto arrive = [&](uint64_t &barrier) {
        if (lane == 0) barrier_arrive(shared_address(&barrier));
    };
    const auto issue_qk = [&] {
        pin(s);
        wgmma_fence();
        issue_scores<T, D>(s, q_operand + q.stage * (key_memory<D>::half_bytes >> 4),
                           k_operand + k.stage * (key_memory<D>::block_bytes >> 4));
        wgmma_commit();
    };
    const auto issue_pv = [&] {
        pin(o);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            issue_values<T, D>(o, p, v_operand + v.stage * (key_memory<D>::block_bytes >> 4), i, i > 0);
            if (i == 5) named_barrier_arrive(other_turn, consumer_threads);
        }
        wgmma_commit();
    };
    const auto soften = [&](result &r) {
        constexpr float least = 8.27e-25f, most = 1.2e24f; /* 2^-80, 2^80 */
        r.reference = {0, 0};
        if constexpr (map_type<T> == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
            r.sum = exponentiate<T>(s, p, a.scale_log2, r.reference);
            const bool out_low = !(r.sum.low > least && r.sum.low < most);
            const bool out_high = !(r.sum.high > least && r.sum.high < most);
            if (!__any_sync(0xffffffffu, out_low || out_high)) return;
            const uint32_t quad = lane & 28;
            const bool redo_low = __ballot_sync(0xffffffffu, out_low) >> quad & 15;
            const bool redo_high = __ballot_sync(0xffffffffu, out_high) >> quad & 15;
            const row_pair top = softmax_state::top(s, a.scale_log2);
            r.reference = {redo_low ? top.low : 0, redo_high ? top.high : 0};
        } else {
            r.reference = softmax_state::top(s, a.scale_log2);
        }
        r.sum = exponentiate<T>(s, p, a.scale_log2, r.reference);
    };
    /* The sum of a row, its LSE and its inverse: while a product is under way. */
    const auto finish = [&](result &r) {
        const row_pair total = {quad_sum(r.sum.low), quad_sum(r.sum.high)};
        r.reference.low += log2_approx(total.low);
        r.reference.high += log2_approx(total.high);
        r.sum = {__fdividef(1, total.low), __fdividef(1, total.high)};
    };
    const auto store_row = [&](int32_t cell, int head, int which, float inverse, float lse) {
        if (cell < 0) return;
        const int64_t row = int64_t(cell) * a.shape.heads + head;
        uint4 *const target = reinterpret_cast<uint4 *>(a.partials.values + row * D);
#pragma unroll
        for (int piece = 0; piece < D / 32; piece++) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * (4 * piece + i) + 2 * which;
                pairs[i] = pack_pair(o[j] * inverse, o[j + 1] * inverse, T());
            }
            target[partial_place<D>(piece, head)] = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
        if ((lane & 3) == 0) a.partials.lse[row] = lse;
    };
    const auto store = [&](const result &r) {
        store_row(r.cell_low, head_low, 0, r.sum.low, r.reference.low);
        store_row(r.cell_high, head_high, 1, r.sum.high, r.reference.high);
    };
    int32_t left = 0;
    const auto take_piece = [&] {
        barrier_wait(shared_address(&b.k_full[k.stage]), k.parity);
        left = uniform(b.tiles[k.stage]);
    };
    const auto wait_for_queries = [&](result &r) {
        barrier_wait(shared_address(&b.q_full[half][q.stage]), q.parity);
        r.cell_low = used_low ? b.cell[half][q.stage][token_low] : -1;
        r.cell_high = used_high ? b.cell[half][q.stage][token_high] : -1;
    };
    /* Behind the scores of a tile; the piece's last one frees its keys. */
    const auto release = [&] {
        __syncwarp();
        arrive(b.q_empty[half][q.stage]);
        q.advance();
        if (--left > 0) return;
        arrive(b.k_empty[k.stage]);
        k.advance();
    };

    take_piece();
    if (left == 0) return;
    result now, before = {-1, -1, {0, 0}, {1, 1}};
    wait_for_queries(now);
    named_barrier_sync(own_turn, consumer_threads);
    issue_qk();
    named_barrier_arrive(other_turn, consumer_threads);
    wgmma_wait<0>();
    pin(s);
    release();
    bool last = left == 0, first = true; /* of its piece, the tile whose P V is to come */
    soften(now);
    while (true) {
        if (left == 0) {
            take_piece();
            if (left == 0) break;
        }
        result next;
        wait_for_queries(next);
        named_barrier_sync(own_turn, consumer_threads);
        issue_qk();
        store(before);
        if (first) barrier_wait(shared_address(&b.v_full[v.stage]), v.parity);
        issue_pv();
        finish(now);
        wgmma_wait<1>();
        pin(s);
        release();
        wgmma_wait<0>();
        pin(o);
        pin(p);
        if (last) {
            arrive(b.v_empty[v.stage]);
            v.advance();
        }
        soften(next);
        before = now;
        now = next;
        first = last;
        last = left == 0;
    }
    named_barrier_sync(own_turn, consumer_threads);
    store(before);
    if (first) barrier_wait(shared_address(&b.v_full[v.stage]), v.parity);
    issue_pv();
    finish(now);
    wgmma_wait<0>();
    pin(o);
    store(now);
}

template <typename T, int D>
__global__ void __launch_bounds__(kernel_threads, 1)
    key_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ key_parameters<T> a) {
    extern __shared__ uint8_t dynamic[];
    __shared__ key_barriers b;
    if (a.state->partials == 0) return;
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < key_stages; i++) {
            barrier_init(shared_address(&b.k_full[i]), 1);
            barrier_init(shared_address(&b.v_full[i]), 1);
            barrier_init(shared_address(&b.k_empty[i]), consumer_threads / 32);
            barrier_init(shared_address(&b.v_empty[i]), consumer_threads / 32);
        }
        for (int i = 0; i < 2 * query_stages; i++) {
            barrier_init(shared_address(&b.q_full[0][i]), 1);
            barrier_init(shared_address(&b.q_empty[0][i]), 4);
        }
        barrier_init_fence();
    }
    /* Idle rows start as zeros, so that they do not look like rows to be redone. */
    for (int i = threadIdx.x; i < int(2 * query_stages * key_memory<D>::half_bytes / 16); i += kernel_threads)
        store_shared_16(base + key_memory<D>::q + i * 16, {0, 0, 0, 0});
    fence_async_proxy();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<56>();
        if (threadIdx.x < 32) key_producer<T, D>{q_map, k_map, v_map, a, b, base}.run();
    } else {
        warpgroup_take_registers<224>();
        consume_keys<T, D>(a, b, base, role - 1);
    }
}

template <typename T, int D>
fmsa_status launch_keys(const launch_parameters &l) {
    CUtensorMap q_map, k_map, v_map;
    FMSA_TRY(make_query_map<T>(l, 1, &q_map));
    FMSA_TRY(make_key_map<T>(l, l.tensors->k, &k_map));
    FMSA_TRY(make_key_map<T>(l, l.tensors->v, &v_map));
    key_parameters<T> a = {};
    a.shape = l.shape;
    a.units_per_key_head = l.units_per_key_head;
    a.units_per_proxy_head = l.units_per_proxy_head;
    a.scale_log2 = static_cast<float>(l.problem->config.softmax_scale * double(log2_e));
    a.state = l.state;
    a.pieces = l.pieces;
    a.remote = l.remote;
    a.block_k_begin = l.geometry.block_k_begin;
    a.partials = make_partials<T>(l);
    return launch("key-outer forward", key_kernel<T, D>, dim3(l.processors), kernel_threads,
                  size_t(key_memory<D>::bytes + 1024), l.stream, q_map, k_map, v_map, a);
}

} // namespace

fmsa_status attend_keys(const launch_parameters &l) {
    return with_half_type_and_dim(
        l.problem, [&](auto type, auto dim) { return launch_keys<decltype(type), decltype(dim)::value>(l); });
}

} // namespace forward90
} // namespace fmsa
