/* The query-outer forward: a tile of neighbouring tokens walks a list of key blocks with online softmax and leaves
 * nothing to merge. Dense attention (the list is every visible block), and sparse attention where neighbours agree on
 * their blocks so well that no edge is left to the key-outer kernel.
 *
 * Tile: 128 rows (sm90_forward.cuh) by 128 keys a step.
 *
 * Warp roles: warp 0 produces (it issues all copies by the TMA and clears what lies behind an incomplete block's
 * values), warp 1 plans (it fetches the headers of the tiles to come), two warpgroups consume, 64 rows each, and take
 * turns at the tensor cores: while one multiplies, the other exponentiates. A consumer's step: issue S = Q K^T of this
 * block, then O += P V of the last one, hand over the turn, then P = exp(S), part of it while P V runs. A tile's
 * results are staged between the next tile's S and its first P V.
 *
 * Barriers: a full and an empty one for each stage of Q, K and V; the consumers release a stage a warp. Named barriers
 * 1 and 2: the warpgroups' turns.
 *
 * Shared memory (D = 128): K and V two stages of 32 KB each, Q two of 32 KB, results 32 KB: 224 KB, one block a
 * multiprocessor. Registers: producer and planner 40, consumers 232, no spills.
 *
 * Floor: 4 * 128 * 128 * D operations a step, 2,048 clocks of the tensor cores at D = 128. Measured on an H200, bf16,
 * D = 128, 64/4 heads, steady state, 32,768 tokens dense causal: 725 TFLOP/s, 1.07 of cuBLAS 8192^3 in the same run.
 */
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

constexpr int stages = 2;

template <typename T>
struct query_parameters {
    tile_work w;
    float scale_log2; /* softmax scale * log2(e) */
    result_views<T> results;
};

struct barriers {
    uint64_t k_full[stages], k_empty[stages], v_full[stages], v_empty[stages], q_full[stages], q_empty[stages];
    uint64_t incomplete;   /* values of an incomplete block, on their way */
    int32_t block[stages]; /* number of the block in each stage of K */
    uint32_t chosen[stages][mask_words];
    header_ring headers;
};

template <int D>
struct memory {
    static constexpr uint32_t block_bytes = block_keys * D * 2, half_bytes = half_rows * D * 2;
    static constexpr uint32_t k = 0, v = stages * block_bytes, q = 2 * stages * block_bytes;
    static constexpr uint32_t results = q + stages * 2 * half_bytes;
    static constexpr uint32_t bytes = results + 2 * half_bytes;
};

/* The work of the producer warp. */
template <typename T, int D>
struct producer {
    const CUtensorMap &q_map, &k_map, &v_map;
    const query_parameters<T> &a;
    barriers &b;
    const uint32_t base;
    const int lane = threadIdx.x & 31;
    ring<stages> q{1}, k{1}, v{1};
    uint32_t incomplete_parity = 0;

    __device__ __forceinline__ void load_queries(const tile_header &h) {
        barrier_wait(shared_address(&b.q_empty[q.stage]), q.parity);
        const uint32_t full = shared_address(&b.q_full[q.stage]);
        const tile_shape &shape = a.w.shape;
        if (lane == 0) barrier_arrive_expect(full, shape.tokens * shape.heads * (2 * D));
        __syncwarp();
        if (lane < 2 * (D / 64)) {
            const int half = lane / (D / 64), columns = lane % (D / 64);
            const uint32_t to =
                base + memory<D>::q + (2 * q.stage + half) * memory<D>::half_bytes + columns * (half_rows * 128);
            tma_load_3d(to, &q_map, full, columns * 64, h.unit * shape.heads, h.at.first_row + half * shape.half_tokens,
                        l2_leave_first);
        }
        q.advance();
    }

    __device__ __forceinline__ void load_keys(int32_t row, int32_t head, int32_t block, uint32_t chosen) {
        barrier_wait(shared_address(&b.k_empty[k.stage]), k.parity);
        if (lane < mask_words) b.chosen[k.stage][lane] = chosen;
        __syncwarp();
        if (lane == 0) {
            b.block[k.stage] = block;
            const uint32_t full = shared_address(&b.k_full[k.stage]);
            barrier_arrive_expect(full, memory<D>::block_bytes);
            tma_load_4d(base + memory<D>::k + k.stage * memory<D>::block_bytes, &k_map, full, 0, row, 0, head, l2_stay);
        }
        k.advance();
    }

    /* keys: those of the block that exist. What the copy brings behind them belongs to another document or to nobody,
     * and 0 times it need not be 0. */
    __device__ __forceinline__ void load_values(int32_t row, int32_t head, int32_t keys) {
        barrier_wait(shared_address(&b.v_empty[v.stage]), v.parity);
        const uint32_t full = shared_address(&b.v_full[v.stage]);
        const uint32_t to = base + memory<D>::v + v.stage * memory<D>::block_bytes;
        const bool complete = keys == block_keys;
        const uint32_t arrived = complete ? full : shared_address(&b.incomplete);
        if (lane == 0) {
            barrier_arrive_expect(arrived, memory<D>::block_bytes);
            tma_load_4d(to, &v_map, arrived, 0, row, 0, head, l2_stay);
        }
        if (!complete) {
            barrier_wait(arrived, incomplete_parity);
            incomplete_parity ^= 1;
            clear_values<D>(to, keys);
            __syncwarp();
            if (lane == 0) barrier_arrive(full);
        }
        v.advance();
    }

    __device__ __forceinline__ void run() {
        int32_t value_row = -1, value_head = 0, value_keys = 0; /* values that are still to be loaded */
        const auto load_waiting_values = [&] {
            if (value_row >= 0) load_values(value_row, value_head, value_keys);
        };
        int32_t now = 0;
        uint32_t parity = 0;
        while (true) {
            const tile_header &h = b.headers.header[now];
            barrier_wait(shared_address(&b.headers.fetched[now]), parity);
            if (h.list.steps == 0) break;
            load_queries(h);
            if (lane == 0) barrier_arrive(shared_address(&b.headers.begun[now]));
            const int32_t head = h.unit / a.w.units_per_key_head;
            list_reader reader(h, a.w.lists);
            for (int32_t i = 0; i < h.list.steps; i++) {
                uint32_t next_chosen;
                const int32_t next = reader.next(next_chosen), row = h.at.key_row + reader.block * block_keys;
                load_keys(row, head, reader.block, reader.chosen);
                load_waiting_values();
                value_row = row;
                value_head = head;
                value_keys = i == 0 ? h.at.local_keys : block_keys;
                reader.block = next;
                reader.chosen = next_chosen;
            }
            now = following(now);
            parity ^= now == 0;
        }
        /* The end mark goes out before the last values: the consumers look for it before they take them. */
        barrier_wait(shared_address(&b.q_empty[q.stage]), q.parity);
        if (lane == 0) barrier_arrive(shared_address(&b.q_full[q.stage]));
        load_waiting_values();
    }
};

/* The work of a consumer warpgroup. */
template <typename T, int D>
__device__ __forceinline__ void consume(const query_parameters<T> &a, const CUtensorMap &out_map, barriers &b,
                                        uint32_t base, int half) {
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32 & 3);
    const uint32_t staging = base + memory<D>::results + (half * 4 + warp) * (memory<D>::half_bytes / 4);
    const uint64_t q_operand = operand(base + memory<D>::q + half * memory<D>::half_bytes, 16, 1024);
    const uint64_t k_operand = operand(base + memory<D>::k, 16, 1024);
    const uint64_t v_operand = operand(base + memory<D>::v, block_keys * 128, 1024);
    const int32_t first_token = half * a.w.shape.half_tokens;
    const int32_t token_low = first_token + a.w.shape.token_of(warp * 16 + lane / 4);
    const int32_t token_high = first_token + a.w.shape.token_of(warp * 16 + lane / 4 + 8);
    float s[64], o[D / 2];
    uint32_t p[32];
#pragma unroll
    for (int i = 0; i < 64; i++)
        s[i] = 0;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        o[i] = 0;
    ring<stages> q(0), k(0), v(0);
    softmax_state state;
    int32_t now = 0, waiting = -1; /* headers of the tile, and of one whose results wait to be written; -1: none */
    const uint32_t own_turn = 1 + half, other_turn = 2 - half;
    if (half == 1) named_barrier_arrive(1, consumer_threads);

    const auto arrive = [&](uint64_t &barrier) {
        if (lane == 0) barrier_arrive(shared_address(&barrier));
    };
    const auto issue_qk = [&] {
        pin(s);
        wgmma_fence();
        issue_scores<T, D>(s, q_operand + q.stage * (2 * memory<D>::half_bytes >> 4),
                           k_operand + k.stage * (memory<D>::block_bytes >> 4));
        wgmma_commit();
    };
    /* The turn is handed over two products early: the other warpgroup needs that long to take it. */
    const auto issue_pv = [&](int accumulate) {
        barrier_wait(shared_address(&b.v_full[v.stage]), v.parity);
        pin(o);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            issue_values<T, D>(o, p, v_operand + v.stage * (memory<D>::block_bytes >> 4), i, i > 0 ? 1 : accumulate);
            if (i == 5) named_barrier_arrive(other_turn, consumer_threads);
        }
        wgmma_commit();
    };
    const auto release_k = [&] {
        arrive(b.k_empty[k.stage]);
        k.advance();
    };
    const auto finish_pv = [&] {
        wgmma_wait<0>();
        pin(o);
        pin(p);
        arrive(b.v_empty[v.stage]);
        v.advance();
    };
    const auto write = [&](int32_t header, const row_pair &lse) {
        write_results<T, D>(a.results, out_map, a.w.shape, staging, half, warp, b.headers.header[header], lse);
    };
    /* The sums of a tile whose results wait step aside, registers are short: to where the results will be staged. The
     * results of the tile before it have left that memory. */
    const auto put_aside = [&] {
        if (lane == 0) bulk_wait_read<0>();
        __syncwarp();
        store_shared_16(staging + 16 * lane, pack(state));
    };
    const auto stage_waiting = [&] {
        const softmax_state done = unpack(load_shared_16(staging + 16 * lane));
        __syncwarp();
        return stage_results<T, D>(staging, done, o);
    };
    /* Takes its turn: the scores of a block and, meanwhile, the results of a tile that is done; then the values of the
     * block before. */
    const auto take_turn = [&](int accumulate) {
        barrier_wait(shared_address(&b.k_full[k.stage]), k.parity);
        named_barrier_sync(own_turn, consumer_threads);
        issue_qk();
        if (waiting >= 0) {
            const row_pair lse = stage_waiting();
            issue_pv(accumulate);
            write(waiting, lse);
            waiting = -1;
        } else {
            issue_pv(accumulate);
        }
        wgmma_wait<1>();
        pin(s);
    };
    const auto mask = [&] {
        const int32_t relative = b.headers.header[now].at.position - b.block[k.stage] * block_keys;
        const uint32_t low = b.chosen[k.stage][token_low / 32] >> (token_low & 31) & 1;
        const uint32_t high = b.chosen[k.stage][token_high / 32] >> (token_high & 31) & 1;
        mask_scores(s, low ? relative + token_low : -1, high ? relative + token_high : -1);
        __syncwarp();
    };
    int32_t steps, masked;
    const auto read_header = [&] {
        barrier_wait(shared_address(&b.q_full[q.stage]), q.parity);
        steps = uniform(b.headers.header[now].list.steps);
        masked = uniform(b.headers.header[now].list.masked);
    };

    read_header();
    if (steps == 0) return;
    barrier_wait(shared_address(&b.k_full[0]), 0);
    named_barrier_sync(own_turn, consumer_threads);
    issue_qk();
    named_barrier_arrive(other_turn, consumer_threads);
    wgmma_wait<0>();
    pin(s);
    mask();
    release_k();
    state.begin<T>(s, p, a.scale_log2);
    while (true) {
        int accumulate = 0;
        int32_t i = 1;
#pragma unroll 1
        for (; i < masked; i++) {
            take_turn(accumulate);
            mask();
            release_k();
            row_pair factor;
            const bool raised = state.raise(s, a.scale_log2, factor);
            finish_pv();
            if (raised) rescale(o, factor);
            state.add<T>(s, p, a.scale_log2);
            accumulate = 1;
        }
#pragma unroll 1
        for (; i < steps; i++) {
            take_turn(accumulate);
            release_k();
            state.add_full<T>(s, p, o, a.scale_log2, finish_pv);
            accumulate = 1;
        }
        arrive(b.q_empty[q.stage]);
        q.advance();
        const int32_t done = now;
        now = following(now);
        read_header();
        if (steps == 0) {
            named_barrier_sync(own_turn, consumer_threads);
            if (waiting >= 0) write(waiting, stage_waiting());
            issue_pv(accumulate);
            finish_pv();
            write(done, stage_results<T, D>(staging, state, o));
            if (lane == 0) bulk_wait_read<0>();
            return;
        }
        take_turn(accumulate);
        mask();
        release_k();
        finish_pv();
        put_aside();
        waiting = done;
        state.begin<T>(s, p, a.scale_log2);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(kernel_threads, 1)
    query_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap out_map,
                 const __grid_constant__ query_parameters<T> a) {
    extern __shared__ uint8_t dynamic[];
    __shared__ barriers b;
    wait_for_grid_before();
    if (a.w.lists.lists != nullptr && a.w.state->partials != 0) return; /* the merging kernel has the chunk */
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            barrier_init(shared_address(&b.k_full[i]), 1);
            barrier_init(shared_address(&b.v_full[i]), 1);
            barrier_init(shared_address(&b.q_full[i]), 1);
            barrier_init(shared_address(&b.k_empty[i]), consumer_threads / 32);
            barrier_init(shared_address(&b.v_empty[i]), consumer_threads / 32);
            barrier_init(shared_address(&b.q_empty[i]), consumer_threads / 32);
        }
        barrier_init(shared_address(&b.incomplete), 1);
        init_headers(b.headers);
        barrier_init_fence();
    }
    /* The copies leave a half's idle rows alone: zeros there keep them from looking like rows to be redone. */
    for (int i = threadIdx.x; i < int(stages * 2 * memory<D>::half_bytes / 16); i += kernel_threads)
        store_shared_16(base + memory<D>::q + i * 16, {0, 0, 0, 0});
    fence_async_proxy();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<40>();
        if (threadIdx.x < 32) {
            producer<T, D>{q_map, k_map, v_map, a, b, base}.run();
        } else if (threadIdx.x < 64) {
            planner{a.w, b.headers, &a.w.state->next_query}.run([](const tile_header &) {});
        }
    } else {
        warpgroup_take_registers<232>();
        consume<T, D>(a, out_map, b, base, role - 1);
    }
}

template <typename T, int D>
fmsa_status launch_query(const launch_parameters &l) {
    const fmsa_tensors &t = *l.tensors;
    CUtensorMap q_map, k_map, v_map, out_map;
    FMSA_TRY(make_query_map<T>(l, l.shape.half_tokens, &q_map));
    FMSA_TRY(make_key_map<T>(l, t.k, &k_map));
    FMSA_TRY(make_key_map<T>(l, t.v, &v_map));
    FMSA_TRY(make_result_map<T>(l, &out_map));
    query_parameters<T> a = {};
    a.w = make_tile_work(l);
    a.scale_log2 = static_cast<float>(l.problem->config.softmax_scale * double(log2_e));
    a.results = make_results<T>(l);
    return launch_close("query-outer forward", query_kernel<T, D>, dim3(l.processors), kernel_threads,
                        size_t(memory<D>::bytes + 1024), l.stream, q_map, k_map, v_map, out_map, a);
}

} // namespace

fmsa_status attend_queries(const launch_parameters &l) {
    return with_half_type_and_dim(
        l.problem, [&](auto type, auto dim) { return launch_query<decltype(type), decltype(dim)::value>(l); });
}

} // namespace forward90
} // namespace fmsa
