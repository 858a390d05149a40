/* The key-outer forward: the edges that few neighbours share. A piece of work is a key block and some of the tokens
 * that chose it; K and V stay in shared memory while tiles of these tokens' query rows are gathered, and every edge
 * leaves a partial result (sm90_forward.cuh), which the merging kernel takes up. Only whole blocks that lie before a
 * row's own come here: nothing is masked.
 *
 * Tile: two halves of 64 rows, one a consumer warpgroup, each with half_tokens tokens of the list, by the 128 keys of
 * the block. Warp roles: warp 0 plans (it hands out pieces and loads their keys and values), warps 1 and 2 gather the
 * query rows of a half each, with one copy a token, or one for 64 columns where heads do not come in groups of eight;
 * two warpgroups consume and take turns at the tensor cores. A consumer's step: issue S = Q K^T of this tile, stage O
 * of the last but one, issue O = P V of the last, hand over the turn, send what is staged, P = exp(S).
 * Softmax needs a reference, not the maximum: bf16 takes 0, and where a row's sum leaves 2^-40 ... 2^40 the maximum;
 * fp16 always takes the maximum.
 * Barriers: a full and an empty one for each stage of keys and values, which share a ring, of each half's Q, and of the
 * ring of pieces; consumers release a stage a warp.
 * Shared memory (D = 128): three stages of 32 KB for K and V, as many for Q, and 32 KB of results: 224 KB. Registers:
 * planner and gatherers 56, consumers 224, no spills.
 * Floor: 4 * 128 * 128 * D operations a tile, and 2 * D bytes written a row and edge. Measured on an H200, bf16, D =
 * 128, 64/4/4/1 heads, k 16, random selection, 65,536 tokens (profiler): 7.5 ms, 540 TFLOP/s, 2.1 TB/s. */
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

constexpr int block_stages = 3, query_stages = 3, piece_stages = 4;
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
    /* Where heads come in groups of eight, a half's query rows lie [8 rows][D / 64][8 rows][128 bytes], and one copy
     * brings a token's; else [D / 64][rows][128 bytes]. */
    bool grouped;
    int32_t token_bytes; /* from token to token */
};

/* Pieces in turn. The planner is a few ahead of the gatherers. */
struct key_piece {
    int32_t begin, edges; /* edges 0: none is left */
    int32_t unit, reserved;
};

struct key_barriers {
    uint64_t block_full[block_stages], block_empty[block_stages];
    uint64_t q_full[2][query_stages], q_empty[2][query_stages];
    uint64_t piece_full[piece_stages], piece_empty[piece_stages];
    key_piece piece[piece_stages];
    int32_t tiles[block_stages];              /* with keys: of the piece; 0: none is left */
    int32_t cell[2][query_stages][half_rows]; /* of each token; -1: none */
};

template <int D>
struct key_memory {
    static constexpr uint32_t block_bytes = block_keys * D * 2, half_bytes = half_rows * D * 2;
    static constexpr uint32_t blocks = 0, q = block_stages * block_bytes, results = q + 2 * query_stages * half_bytes;
    static constexpr uint32_t bytes = results + 2 * half_bytes;
};

/* The work of the planner warp: it hands out pieces, and loads their keys and values: each piece's keys take the next
 * place of a ring, its values the one behind. */
template <typename T, int D>
struct key_planner {
    const CUtensorMap &k_map, &v_map;
    const key_parameters<T> &a;
    key_barriers &b;
    const uint32_t base;
    const int lane = threadIdx.x & 31;
    ring<piece_stages> at{1};
    ring<block_stages> slot{1};
    int32_t drawn = 0; /* lane 0: the next piece, drawn early */

    __device__ __forceinline__ void draw() {
        if (lane == 0) drawn = atomicAdd(&a.state->next_key, 1);
    }

    __device__ __forceinline__ void load_block(const CUtensorMap &map, int32_t row, int32_t head) {
        if (lane == 0) {
            const uint32_t full = shared_address(&b.block_full[slot.stage]);
            barrier_arrive_expect(full, key_memory<D>::block_bytes);
            tma_load_4d(base + key_memory<D>::blocks + slot.stage * key_memory<D>::block_bytes, &map, full, 0, row, 0,
                        head);
        }
        __syncwarp();
        slot.advance();
    }

    __device__ __forceinline__ void wait_for_slot() const {
        barrier_wait(shared_address(&b.block_empty[slot.stage]), slot.parity);
    }

    __device__ __forceinline__ void run() {
        const int32_t pieces = a.state->pieces;
        draw();
        while (true) {
            const int32_t work = uniform(drawn), number = work / a.units_per_proxy_head;
            const bool more = number < pieces;
            edge_piece from = {};
            int32_t row = 0;
            if (more) {
                draw();
                from = a.pieces[number];
                row = a.block_k_begin[from.block];
            }
            const int32_t unit = from.proxy_head * a.units_per_proxy_head + work - number * a.units_per_proxy_head;
            barrier_wait(shared_address(&b.piece_empty[at.stage]), at.parity);
            if (lane == 0) {
                b.piece[at.stage] = {from.begin, from.edges, unit, 0};
                barrier_arrive(shared_address(&b.piece_full[at.stage]));
            }
            __syncwarp();
            at.advance();
            /* Keys go out with the piece's tile count: a consumer looks for both at once. */
            wait_for_slot();
            if (lane == 0) b.tiles[slot.stage] = (from.edges + a.shape.tokens - 1) / a.shape.tokens;
            if (!more) {
                if (lane == 0) barrier_arrive(shared_address(&b.block_full[slot.stage]));
                return;
            }
            const int32_t head = unit / a.units_per_key_head;
            load_block(k_map, row, head);
            wait_for_slot();
            load_block(v_map, row, head);
        }
    }
};

/* The work of the warp that gathers the query rows of one half of each tile. */
template <typename T, int D>
struct query_gatherer {
    const CUtensorMap &q_map;
    const key_parameters<T> &a;
    key_barriers &b;
    const uint32_t base;
    const int half;
    const int lane = threadIdx.x & 31;
    ring<query_stages> q{1};
    ring<piece_stages> at{0};

    /* The next tokens, one or two a lane. */
    struct tokens {
        remote_edge edge[token_words];
    };

    __device__ __forceinline__ key_piece take() {
        barrier_wait(shared_address(&b.piece_full[at.stage]), at.parity);
        const key_piece p = b.piece[at.stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&b.piece_empty[at.stage]));
        at.advance();
        return {uniform(p.begin), uniform(p.edges), uniform(p.unit), 0};
    }

    __device__ __forceinline__ void look_up(tokens &t, const key_piece &p, int32_t first) const {
#pragma unroll
        for (int i = 0; i < token_words; i++) {
            const int32_t token = lane + 32 * i;
            const bool exists = token < a.shape.half_tokens && first + token < p.edges;
            t.edge[i] = exists ? a.remote[p.begin + first + token] : remote_edge{-1, -1};
        }
    }

    __device__ __forceinline__ void gather(const tokens &t, int32_t unit) {
        barrier_wait(shared_address(&b.q_empty[half][q.stage]), q.parity);
        const uint32_t full = shared_address(&b.q_full[half][q.stage]);
        const uint32_t to = base + key_memory<D>::q + (half * query_stages + q.stage) * key_memory<D>::half_bytes;
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < token_words; i++) {
            count += __popc(__ballot_sync(0xffffffffu, t.edge[i].row >= 0));
            if (lane + 32 * i < a.shape.half_tokens) {
                const int32_t cell = t.edge[i].cell;
                b.cell[half][q.stage][lane + 32 * i] = cell < 0 ? -1 : unit * a.partials.unit_cells + cell;
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
            const uint32_t token_to = to + (lane + 32 * i) * a.token_bytes;
            if (a.grouped) {
                tma_load_5d(token_to, &q_map, full, 0, 0, 0, unit * (a.shape.heads / 8), t.edge[i].row);
                continue;
            }
#pragma unroll
            for (int columns = 0; columns < D / 64; columns++) {
                tma_load_3d(token_to + columns * (half_rows * 128), &q_map, full, columns * 64, unit * a.shape.heads,
                            t.edge[i].row);
            }
        }
        q.advance();
    }

    __device__ __forceinline__ void run() {
        key_piece now = take();
        if (now.edges == 0) return;
        int32_t first = half * a.shape.half_tokens;
        tokens ready;
        look_up(ready, now, first);
        while (now.edges != 0) {
            const tokens these = ready;
            const int32_t unit = now.unit;
            first += a.shape.tokens;
            if (first - half * a.shape.half_tokens >= now.edges) {
                now = take();
                first = half * a.shape.half_tokens;
            }
            look_up(ready, now, first);
            gather(these, unit);
        }
    }
};

template <typename T, int D>
__device__ __forceinline__ void consume_keys(const key_parameters<T> &a, key_barriers &b, uint32_t base, int half) {
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32 & 3);
    const uint64_t q_operand = operand(base + key_memory<D>::q + half * query_stages * key_memory<D>::half_bytes, 16,
                                       a.grouped ? D / 64 * 1024 : 1024);
    const uint32_t columns_apart = a.grouped ? 1024 >> 4 : half_rows * 128 >> 4;
    const uint64_t k_operand = operand(base + key_memory<D>::blocks, 16, 1024);
    const uint64_t v_operand = operand(base + key_memory<D>::blocks, block_keys * 128, 1024);
    const uint32_t staging = base + key_memory<D>::results + (half * 4 + warp) * (key_memory<D>::half_bytes / 4);
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
    ring<block_stages> k(0), v(0);
    v.advance(); /* keys and values alternate */
    const auto advance_piece = [](ring<block_stages> &at) {
        at.advance();
        at.advance();
    };
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
                           k_operand + k.stage * (key_memory<D>::block_bytes >> 4), columns_apart);
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
        constexpr float least = 9.1e-13f, most = 1.1e12f; /* 2^-40, 2^40: leaves room for values up to 2^87 */
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
    /* A warp's results leave by one copy for each token that has rows in it: of the 16 rows, lane i sends those of row
     * i's token, if row i is the first of them. */
    const int sent_row = warp * 16 + (lane & 15), sent_token = a.shape.token_of(sent_row);
    const int sent_head = sent_row - sent_token * a.shape.heads;
    const bool sends = lane < 16 && (lane == 0 || sent_head == 0);
    const uint32_t sent_bytes = sends ? min(a.shape.heads - sent_head, 16 - lane) * (2 * D) : 0;
    const auto stage_row = [&](int row, int head, int which, float inverse) {
#pragma unroll
        for (int piece = 0; piece < D / 32; piece++) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * (4 * piece + i) + 2 * which;
                pairs[i] = pack_pair(o[j] * inverse, o[j + 1] * inverse, T());
            }
            store_shared_16(staging + row * (2 * D) + partial_place<D>(piece, head) * 16,
                            {pairs[0], pairs[1], pairs[2], pairs[3]});
        }
    };
    const auto store_lse = [&](int32_t cell, int head, float lse) {
        if (cell >= 0 && (lane & 3) == 0) a.partials.lse[int64_t(cell) * a.shape.heads + head] = lse;
    };
    const auto stage = [&](const result &r) {
        bulk_wait_read<0>(); /* the results of the tile before have left */
        __syncwarp();
        stage_row(lane / 4, head_low, 0, r.sum.low);
        stage_row(lane / 4 + 8, head_high, 1, r.sum.high);
    };
    const auto send = [&](const result &r) {
        fence_async_proxy();
        __syncwarp();
        const int32_t low = __shfl_sync(0xffffffffu, r.cell_low, 4 * (lane & 7));
        const int32_t high = __shfl_sync(0xffffffffu, r.cell_high, 4 * (lane & 7));
        const int32_t cell = lane < 8 ? low : high;
        if (sends && cell >= 0) {
            bulk_store(a.partials.values + (int64_t(cell) * a.shape.heads + sent_head) * D, staging + lane * (2 * D),
                       sent_bytes);
            bulk_commit();
        }
        store_lse(r.cell_low, head_low, r.reference.low);
        store_lse(r.cell_high, head_high, r.reference.high);
    };
    int32_t left = 0;
    const auto take_piece = [&] {
        barrier_wait(shared_address(&b.block_full[k.stage]), k.parity);
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
        arrive(b.block_empty[k.stage]);
        advance_piece(k);
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
        stage(before);
        if (first) barrier_wait(shared_address(&b.block_full[v.stage]), v.parity);
        issue_pv();
        send(before);
        finish(now);
        wgmma_wait<1>();
        pin(s);
        release();
        wgmma_wait<0>();
        pin(o);
        pin(p);
        if (last) {
            arrive(b.block_empty[v.stage]);
            advance_piece(v);
        }
        soften(next);
        before = now;
        now = next;
        first = last;
        last = left == 0;
    }
    named_barrier_sync(own_turn, consumer_threads);
    stage(before);
    if (first) barrier_wait(shared_address(&b.block_full[v.stage]), v.parity);
    issue_pv();
    send(before);
    finish(now);
    wgmma_wait<0>();
    pin(o);
    stage(now);
    send(now);
    bulk_wait_read<0>();
}

template <typename T, int D>
__global__ void __launch_bounds__(kernel_threads, 1)
    key_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ key_parameters<T> a) {
    extern __shared__ uint8_t dynamic[];
    __shared__ key_barriers b;
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < block_stages; i++) {
            barrier_init(shared_address(&b.block_full[i]), 1);
            barrier_init(shared_address(&b.block_empty[i]), consumer_threads / 32);
        }
        for (int i = 0; i < piece_stages; i++) {
            barrier_init(shared_address(&b.piece_full[i]), 1);
            barrier_init(shared_address(&b.piece_empty[i]), 2);
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
    wait_for_grid_before();
    if (a.state->partials == 0) return;
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<56>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            key_planner<T, D>{k_map, v_map, a, b, base}.run();
        } else if (warp < 3) {
            query_gatherer<T, D>{q_map, a, b, base, warp - 1}.run();
        }
    } else {
        warpgroup_take_registers<224>();
        consume_keys<T, D>(a, b, base, role - 1);
    }
}

template <typename T, int D>
fmsa_status launch_keys(const launch_parameters &l) {
    CUtensorMap q_map, k_map, v_map;
    const bool grouped = l.shape.heads % 8 == 0;
    FMSA_TRY(grouped ? make_grouped_query_map<T>(l, &q_map) : make_query_map<T>(l, 1, &q_map));
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
    a.grouped = grouped;
    a.token_bytes = l.shape.heads * (grouped ? 2 * D : 128);
    return launch_close("key-outer forward", key_kernel<T, D>, dim3(l.processors), kernel_threads,
                        size_t(key_memory<D>::bytes + 1024), l.stream, q_map, k_map, v_map, a);
}

} // namespace

fmsa_status attend_keys(const launch_parameters &l) {
    return with_half_type_and_dim(
        l.problem, [&](auto type, auto dim) { return launch_keys<decltype(type), decltype(dim)::value>(l); });
}

} // namespace forward90
} // namespace fmsa
