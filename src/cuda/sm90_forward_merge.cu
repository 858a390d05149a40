/* The query-outer forward that also merges the key-outer kernel's partial results and writes the final output: sparse
 * attention where some edges went to the key-outer kernel. It differs from sm90_forward_query.cu in what it loads: one
 * ring of slots carries queries, keys, values and partial results in the order in which they are used, and the queries
 * move on to registers at once.
 *
 * Tile: 128 rows by 128 keys a step. A tile's partial results, one slot of memory for one slot of its tokens, are
 * spread evenly over its steps. Order in the ring, for blocks 0 ... n - 1 of a tile: Q, K(0), the last tile's V(n - 1)
 * and its share of partial results, K(1), V(0) and its share, ... A partial result is merged in fp32:
 * o += 2^(lse - reference) * values. A consumer's step: issue O += P V of the last block and S = Q K^T of this one,
 * hand over the turn, merge while S runs and the other warpgroup multiplies, then P = exp(S).
 *
 * Warp roles: warp 0 produces, warp 1 plans, two warpgroups of 64 rows consume and take turns at the tensor cores.
 * Barriers: a full and an empty one for each slot; the consumers release a slot a warp. Named barriers 1 and 2: the
 * warpgroups' turns.
 * Shared memory (D = 128): six slots of 32 KB and results 32 KB: 224 KB, one block a multiprocessor. Registers:
 * producer and planner 40, consumers 232, no spills. Floor: 4 * 128 * 128 * D operations a step, and 2 * D bytes read a
 * row and partial result. Measured on an H200, bf16, D = 128, 64/4/4/1 heads, k 16, 65,536 tokens (profiler):
 * random selection 4.6 ms, 4.0 TB/s; trained-like 4.6 ms. There merging takes a consumer 24,000 of the 33,000
 * clocks of a tile at random selection, 1,600 a slot, and 14,000 of 35,000 trained-like: far more than its 230
 * instructions a slot. */
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

constexpr int slots = 6;
/* Partial results that are merged while S = Q K^T runs. As many, and the keys and values before them, must fit in the
 * ring: the keys are not released before. */
constexpr int most_ahead = 2;

template <typename T>
struct merge_parameters {
    tile_work w;
    float scale_log2; /* softmax scale * log2(e) */
    result_views<T> results;
    partial_results<T> partials;
};

struct merge_barriers {
    uint64_t full[slots], empty[slots];
    uint64_t incomplete;                /* values of an incomplete block, on their way */
    int32_t block[slots];               /* with keys: number of the block */
    uint32_t chosen[slots][mask_words]; /* with keys */
    header_ring headers;
};

template <int D>
struct merge_memory {
    static constexpr uint32_t slot_bytes = block_keys * D * 2, half_bytes = half_rows * D * 2;
    static constexpr uint32_t results = slots * slot_bytes;
    static constexpr uint32_t bytes = results + 2 * half_bytes;
};

/* The LSE of the tile's partial results come into the first-level cache, a line a lane. The planner can wait for that,
 * the producer cannot. */
__device__ __forceinline__ void touch_lse(const tile_shape &shape, const float *lse, const tile_header &h) {
    const int32_t numbers = h.list.partials * shape.tokens * shape.heads;
    for (int32_t i = (threadIdx.x & 31) * 32; i < numbers; i += 32 * 32)
        load_cached(lse + h.first_cell * shape.heads + i);
}

template <typename T, int D>
struct merge_producer {
    const CUtensorMap &q_map, &k_map, &v_map;
    const merge_parameters<T> &a;
    merge_barriers &b;
    const uint32_t base;
    const int lane = threadIdx.x & 31;
    ring<slots> at{1};
    uint32_t incomplete_parity = 0;

    __device__ __forceinline__ uint32_t full() const {
        return shared_address(&b.full[at.stage]);
    }
    __device__ __forceinline__ uint32_t slot() const {
        return base + at.stage * merge_memory<D>::slot_bytes;
    }
    __device__ __forceinline__ void wait() const {
        barrier_wait(shared_address(&b.empty[at.stage]), at.parity);
    }

    __device__ __forceinline__ void load_queries(const tile_header &h) {
        wait();
        const tile_shape &shape = a.w.shape;
        if (lane == 0) barrier_arrive_expect(full(), shape.tokens * shape.heads * (2 * D));
        __syncwarp();
        if (lane < 2 * (D / 64)) {
            const int half = lane / (D / 64), columns = lane % (D / 64);
            tma_load_3d(slot() + half * merge_memory<D>::half_bytes + columns * (half_rows * 128), &q_map, full(),
                        columns * 64, h.unit * shape.heads, h.at.first_row + half * shape.half_tokens, l2_leave_first);
        }
        at.advance();
    }

    __device__ __forceinline__ void load_keys(int32_t row, int32_t head, int32_t block, uint32_t chosen) {
        wait();
        if (lane < mask_words) b.chosen[at.stage][lane] = chosen;
        __syncwarp();
        if (lane == 0) {
            b.block[at.stage] = block;
            barrier_arrive_expect(full(), merge_memory<D>::slot_bytes);
            tma_load_4d(slot(), &k_map, full(), 0, row, 0, head, l2_stay);
        }
        at.advance();
    }

    __device__ __forceinline__ void load_values(int32_t row, int32_t head, int32_t keys) {
        wait();
        const bool complete = keys == block_keys;
        const uint32_t arrived = complete ? full() : shared_address(&b.incomplete);
        if (lane == 0) {
            barrier_arrive_expect(arrived, merge_memory<D>::slot_bytes);
            tma_load_4d(slot(), &v_map, arrived, 0, row, 0, head, l2_stay);
        }
        if (!complete) {
            barrier_wait(arrived, incomplete_parity);
            incomplete_parity ^= 1;
            clear_values<D>(slot(), keys);
            __syncwarp();
            if (lane == 0) barrier_arrive(full());
        }
        at.advance();
    }

    /* Slot number `number` of the tile's partial results: of the tokens that have so many. */
    __device__ __forceinline__ void load_partials(const tile_header &h, int32_t number) {
        wait();
        const tile_shape &shape = a.w.shape;
        const uint32_t bytes = shape.heads * (2 * D);
        int32_t active = 0;
#pragma unroll 1
        for (int32_t token = lane; token - lane < shape.tokens; token += 32)
            active += __popc(__ballot_sync(0xffffffffu, token < shape.tokens && number < h.token_partials[token]));
        const T *values = a.partials.values + (h.first_cell + int64_t(number) * shape.tokens) * shape.heads * D;
        if (lane == 0) barrier_arrive_expect(full(), active * bytes);
        __syncwarp();
        if (active == shape.tokens) {
            if (lane == 0) bulk_load(slot(), values, shape.tokens * bytes, full(), l2_leave_first);
        } else {
#pragma unroll 1
            for (int32_t token = lane; token < shape.tokens; token += 32) {
                if (number < h.token_partials[token])
                    bulk_load(slot() + token * bytes, values + int64_t(token) * shape.heads * D, bytes, full(),
                              l2_leave_first);
            }
        }
        at.advance();
    }

    __device__ __forceinline__ void run() {
        int32_t now = 0,
                of_values = 0; /* headers; of_values: of the values and partial results that are still to come */
        uint32_t parity = 0;
        int32_t value_row = -1, value_keys = 0, values = 0, loaded = 0; /* values: blocks of that tile so far */
        const auto load_waiting = [&] {
            if (value_row < 0) return;
            const tile_header &h = b.headers.header[of_values];
            load_values(value_row, h.unit / a.w.units_per_key_head, value_keys);
            const int32_t due = h.list.partials * ++values / h.list.steps;
            while (loaded < due)
                load_partials(h, loaded++);
        };
        while (true) {
            const tile_header &h = b.headers.header[now];
            barrier_wait(shared_address(&b.headers.fetched[now]), parity);
            if (h.list.steps == 0) break;
            load_queries(h);
            if (lane == 0) barrier_arrive(shared_address(&b.headers.begun[now]));
            list_reader reader(h, a.w.lists);
            for (int32_t i = 0; i < h.list.steps; i++) {
                uint32_t next_chosen;
                const int32_t next = reader.next(next_chosen), row = h.at.key_row + reader.block * block_keys;
                load_keys(row, h.unit / a.w.units_per_key_head, reader.block, reader.chosen);
                load_waiting();
                value_row = row;
                value_keys = i == 0 ? h.at.local_keys : block_keys;
                if (i == 0) {
                    of_values = now;
                    values = loaded = 0;
                }
                reader.block = next;
                reader.chosen = next_chosen;
            }
            now = following(now);
            parity ^= now == 0;
        }
        /* The end mark goes out first: the consumers look for it before they take the last values. */
        wait();
        if (lane == 0) barrier_arrive(full());
        at.advance();
        load_waiting();
    }
};

template <typename T, int D>
__device__ __forceinline__ void consume_and_merge(const merge_parameters<T> &a, const CUtensorMap &out_map,
                                                  merge_barriers &b, uint32_t base, int half) {
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x / 32 & 3);
    const tile_shape &shape = a.w.shape;
    const uint32_t staging = base + merge_memory<D>::results + (half * 4 + warp) * (merge_memory<D>::half_bytes / 4);
    const uint64_t k_operand = operand(base, 16, 1024), v_operand = operand(base, block_keys * 128, 1024);
    const int32_t rows = shape.half_tokens * shape.heads; /* of a half that are used */
    float s[64], o[D / 2];
    uint32_t p[32], query[D / 4];
#pragma unroll
    for (int i = 0; i < 64; i++)
        s[i] = 0;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        o[i] = 0;
    ring<slots> at(0);
    softmax_state state = {};
    int32_t now = 0; /* header of the tile */
    const uint32_t own_turn = 1 + half, other_turn = 2 - half;
    if (half == 1) named_barrier_arrive(1, consumer_threads);

    const auto wait = [&] { barrier_wait(shared_address(&b.full[at.stage]), at.parity); };
    const auto release = [&](int32_t slot) {
        if (lane == 0) barrier_arrive(shared_address(&b.empty[slot]));
    };
    const auto issue_pv = [&](int32_t slot, int accumulate) {
        pin(o);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++)
            issue_values<T, D>(o, p, v_operand + slot * (merge_memory<D>::slot_bytes >> 4), i, i > 0 ? 1 : accumulate);
        wgmma_commit();
    };
    /* The turn is handed over two products early: the other warpgroup needs that long to take it. */
    const auto issue_qk = [&](int32_t slot) {
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            issue_scores<T, D>(s, query, k_operand + slot * (merge_memory<D>::slot_bytes >> 4), i);
            if (i == D / 16 - 3) named_barrier_arrive(other_turn, consumer_threads);
        }
        wgmma_commit();
    };
    const auto finish_pv = [&](int32_t slot) {
        pin(o);
        pin(p);
        release(slot);
    };
    /* The thread's rows of the half, and their tokens in the tile; see fresh() for why they are not kept. */
    const auto first_row = [&] { return fresh(warp * 16 + lane / 4); };
    const auto token_of = [&](int32_t row) { return half * shape.half_tokens + shape.token_of(row); };
    const auto mask = [&](int32_t slot, int32_t position) {
        const int32_t relative = position - b.block[slot] * block_keys;
        const int32_t low = token_of(first_row()), high = token_of(first_row() + 8);
        const uint32_t in_low = b.chosen[slot][low / 32] >> (low & 31) & 1;
        const uint32_t in_high = b.chosen[slot][high / 32] >> (high & 31) & 1;
        mask_scores(s, in_low ? relative + low : -1, in_high ? relative + high : -1);
        __syncwarp();
    };
    int32_t steps, masked;
    const auto read_queries = [&] {
        wait();
        steps = uniform(b.headers.header[now].list.steps);
        masked = uniform(b.headers.header[now].list.masked);
        if (steps != 0) {
            const int32_t row = fresh(warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7)), low = first_row();
            const uint32_t from =
                base + at.stage * merge_memory<D>::slot_bytes + half * merge_memory<D>::half_bytes + row * 128;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                uint32_t r[4];
                ldmatrix_x4(r, from + i / 4 * (half_rows * 128) + (((i & 3) * 2 + (lane >> 4)) ^ (lane & 7)) * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    /* Idle rows hold what the slot held before. */
                    query[4 * i + j] = low + (j & 1) * 8 < rows ? r[j] : 0;
                }
            }
            pin(query);
        }
        __syncwarp();
        release(at.stage);
        at.advance();
    };
    /* Adds slots `merged` ... `due` - 1 of a tile's partial results. No product with o may be under way, nor one with p
     * wait. Where a reference is far off, it is raised, or set where the row has seen nothing yet. */
    int32_t merged = 0;
    const auto merge = [&](const tile_header &h, int32_t due) {
        if (merged >= due) return;
        const int32_t low = first_row(), high = low + 8;
        const int32_t head_low = low - shape.token_of(low) * shape.heads;
        const int32_t head_high = high - shape.token_of(high) * shape.heads;
        const uint32_t row = base + (half * rows + low) * (2 * D);
        uint32_t place_low[D / 32], place_high[D / 32];
#pragma unroll
        for (int piece = 0; piece < D / 32; piece++) {
            place_low[piece] = row + partial_place<D>(piece, head_low) * 16;
            place_high[piece] = row + 8 * (2 * D) + partial_place<D>(piece, head_high) * 16;
        }
        const int32_t count_low = low < rows ? h.token_partials[token_of(low)] : 0;
        const int32_t count_high = high < rows ? h.token_partials[token_of(high)] : 0;
        const float *from = a.partials.lse + (h.first_cell + int64_t(merged) * shape.tokens) * shape.heads;
        from += half * rows + low;
        row_pair next_lse = {-CUDART_INF_F, -CUDART_INF_F};
        if (merged < count_low) next_lse.low = load_cached(from);
        if (merged < count_high) next_lse.high = load_cached(from + 8);
#pragma unroll 1
        for (; merged < due; merged++) {
            const bool has_low = merged < count_low, has_high = merged < count_high;
            const row_pair lse = next_lse;
            from += shape.tokens * shape.heads;
            next_lse = {-CUDART_INF_F, -CUDART_INF_F};
            if (merged + 1 < count_low) next_lse.low = load_cached(from);
            if (merged + 1 < count_high) next_lse.high = load_cached(from + 8);
            wait();
            uint4 values_low[D / 32], values_high[D / 32];
#pragma unroll
            for (int piece = 0; piece < D / 32; piece++) {
                values_low[piece] = load_shared_16(place_low[piece] + at.stage * merge_memory<D>::slot_bytes);
                values_high[piece] = load_shared_16(place_high[piece] + at.stage * merge_memory<D>::slot_bytes);
            }
            const bool far_low = has_low && fabsf(lse.low - state.reference.low) > 60;
            const bool far_high = has_high && fabsf(lse.high - state.reference.high) > 60;
            if (__any_sync(0xffffffffu, far_low || far_high)) {
                const bool none_low = quad_max(state.sum.low) == 0, none_high = quad_max(state.sum.high) == 0;
                row_pair next = state.reference;
                if (far_low) next.low = none_low ? lse.low : fmaxf(next.low, lse.low);
                if (far_high) next.high = none_high ? lse.high : fmaxf(next.high, lse.high);
                const row_pair factor = {none_low ? 1 : exp2_approx(state.reference.low - next.low),
                                         none_high ? 1 : exp2_approx(state.reference.high - next.high)};
                state.reference = next;
                state.sum.low *= factor.low;
                state.sum.high *= factor.high;
                rescale(o, factor);
            }
            const row_pair weight = {exp2_approx(lse.low - state.reference.low),
                                     exp2_approx(lse.high - state.reference.high)};
            if ((lane & 3) == 0) {
                state.sum.low += weight.low;
                state.sum.high += weight.high;
            }
            if (!__all_sync(0xffffffffu, has_low && has_high)) {
                /* What lies in the place of a row that has none is anything. */
#pragma unroll
                for (int piece = 0; piece < D / 32; piece++) {
                    if (!has_low) values_low[piece] = {0, 0, 0, 0};
                    if (!has_high) values_high[piece] = {0, 0, 0, 0};
                }
            }
#pragma unroll
            for (int piece = 0; piece < D / 32; piece++) {
                const uint4 x = values_low[piece], y = values_high[piece];
                const uint32_t pairs_low[4] = {x.x, x.y, x.z, x.w}, pairs_high[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float *const target = o + 4 * (4 * piece + i);
                    const float2 u = unpack_pair(pairs_low[i], T()), v = unpack_pair(pairs_high[i], T());
                    target[0] = fmaf(weight.low, u.x, target[0]);
                    target[1] = fmaf(weight.low, u.y, target[1]);
                    target[2] = fmaf(weight.high, v.x, target[2]);
                    target[3] = fmaf(weight.high, v.y, target[3]);
                }
            }
            __syncwarp();
            release(at.stage);
            at.advance();
        }
    };

    read_queries();
    if (steps == 0) return;
    wait();
    int32_t keys = at.stage;
    at.advance();
    named_barrier_sync(own_turn, consumer_threads);
    issue_qk(keys);
    wgmma_wait<0>();
    pin(s);
    mask(keys, b.headers.header[now].at.position);
    release(keys);
    state.begin<T>(s, p, a.scale_log2);
    while (true) {
        int accumulate = 0;
        merged = 0;
        /* O += P V of the block before and, still under way on return, S = Q K^T. Keys and values are waited for before
         * the turn is taken. */
        const auto take_turn = [&] {
            wait();
            keys = at.stage;
            at.advance();
            wait();
            const int32_t values = at.stage;
            at.advance();
            named_barrier_sync(own_turn, consumer_threads);
            issue_pv(values, accumulate);
            issue_qk(keys);
            wgmma_wait<1>();
            finish_pv(values);
        };
#pragma unroll 1
        for (int32_t i = 1; i < steps; i++) {
            take_turn();
            accumulate = 1;
            const tile_header &h = b.headers.header[now];
            const int32_t due = uniform(h.list.partials) * i / steps;
            merge(h, min(due, merged + most_ahead));
            wgmma_wait<0>();
            pin(s);
            if (i < masked) mask(keys, h.at.position);
            release(keys);
            merge(h, due);
            if (i < masked) {
                row_pair factor;
                if (state.raise(s, a.scale_log2, factor)) rescale(o, factor);
                state.add<T>(s, p, a.scale_log2);
            } else {
                state.add_full<T>(s, p, o, a.scale_log2, [] {});
            }
        }
        const tile_header &done = b.headers.header[now];
        now = following(now);
        read_queries();
        /* The rest of the partial results, and the tile's own to memory. */
        const auto end = [&] {
            merge(done, uniform(done.list.partials));
            const row_pair lse = stage_results<T, D>(staging, state, o);
            write_results<T, D>(a.results, out_map, shape, staging, half, warp, done, lse);
        };
        if (steps == 0) {
            wait();
            const int32_t values = at.stage;
            at.advance();
            named_barrier_sync(own_turn, consumer_threads);
            issue_pv(values, accumulate);
            named_barrier_arrive(other_turn, consumer_threads);
            wgmma_wait<0>();
            finish_pv(values);
            end();
            if (lane == 0) bulk_wait_read<0>();
            return;
        }
        take_turn();
        merge(done, min(uniform(done.list.partials), merged + most_ahead));
        wgmma_wait<0>();
        pin(s);
        mask(keys, b.headers.header[now].at.position);
        release(keys);
        end();
        state.begin<T>(s, p, a.scale_log2);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(kernel_threads, 1)
    merge_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap out_map,
                 const __grid_constant__ merge_parameters<T> a) {
    extern __shared__ uint8_t dynamic[];
    __shared__ merge_barriers b;
    wait_for_grid_before();
    if (a.w.state->partials == 0) return; /* the plain kernel has the chunk */
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            barrier_init(shared_address(&b.full[i]), 1);
            barrier_init(shared_address(&b.empty[i]), consumer_threads / 32);
        }
        barrier_init(shared_address(&b.incomplete), 1);
        init_headers(b.headers);
        barrier_init_fence();
    }
    __syncthreads();
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<40>();
        if (threadIdx.x < 32) {
            merge_producer<T, D>{q_map, k_map, v_map, a, b, base}.run();
        } else if (threadIdx.x < 64) {
            planner{a.w, b.headers, &a.w.state->next_merge}.run(
                [&](const tile_header &h) { touch_lse(a.w.shape, a.partials.lse, h); });
        }
    } else {
        warpgroup_take_registers<232>();
        consume_and_merge<T, D>(a, out_map, b, base, role - 1);
    }
}

template <typename T, int D>
fmsa_status launch_merge(const launch_parameters &l) {
    CUtensorMap q_map, k_map, v_map, out_map;
    FMSA_TRY(make_query_map<T>(l, l.shape.half_tokens, &q_map));
    FMSA_TRY(make_key_map<T>(l, l.tensors->k, &k_map));
    FMSA_TRY(make_key_map<T>(l, l.tensors->v, &v_map));
    FMSA_TRY(make_result_map<T>(l, &out_map));
    merge_parameters<T> a = {};
    a.w = make_tile_work(l);
    a.scale_log2 = static_cast<float>(l.problem->config.softmax_scale * double(log2_e));
    a.results = make_results<T>(l);
    a.partials = make_partials<T>(l);
    return launch_close("query-outer forward with partial results", merge_kernel<T, D>, dim3(l.processors),
                        kernel_threads, size_t(merge_memory<D>::bytes + 1024), l.stream, q_map, k_map, v_map, out_map,
                        a);
}

} // namespace

fmsa_status attend_and_merge(const launch_parameters &l) {
    return with_half_type_and_dim(
        l.problem, [&](auto type, auto dim) { return launch_merge<decltype(type), decltype(dim)::value>(l); });
}

} // namespace forward90
} // namespace fmsa
