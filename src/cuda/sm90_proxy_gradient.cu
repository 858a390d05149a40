/* dq_proxy, dk_proxy and the KL value from the teacher w: r = exp(s_proxy - student LSE), dS = r - w, KL += w (log w -
 * log r), dk_proxy += dS^T q_proxy, dq_proxy = dS k_proxy. The teacher is what the main backward has left, or is made
 * here: one product S^T = K Q^T for each of the R main heads, w^T += exp(S^T - lse) in registers.
 *
 * Key-outer, persistent, one block of four warpgroups a multiprocessor; a tile is 64 tokens (N) x the block's 128 keys.
 * Warpgroup 0 produces: shares by ticket; key rows, token rows and teacher rows by cp.async. Warpgroups 1 and 2 take 64
 * keys (M) each: S^T by wgmma m64n64, dS^T in registers, dk_proxy += dS^T q_proxy by m64nDp with dS^T as the operand
 * from registers, dS as [token][key] to shared memory. Warpgroup 3: dq_proxy = dS k_proxy by m64nDp; it leaves a term
 * for each (row, place) in 16 bits with a scale of its own power of two, in the place of the teacher row. So a term is
 * 11 bits of its largest element, no sum is made in an order that could change, and no memory is added to at random;
 * dk_proxy is added in fp32, once a share.
 *
 * Barriers: full[stage] from the producer's 128 copies and 64 token writers to warpgroups 1 and 2, empty[stage] back
 * from their 8 warps; ds_full[i] from their 8 warps to warpgroup 3, ds_empty[i] back from its 4; key_full and key_empty
 * the same for a share's keys with all 12 warps; main_full and main_empty for the main heads' keys with 8. The tokens'
 * data has eight places: warpgroup 3 is at most two tiles behind the others. Registers, teacher given / made here:
 * producer 72 / 56, warpgroups 1 and 2 168 / 176 (dk_proxy 64, S 32, dS 16, teacher 32), warpgroup 3 104. Shared memory
 * (Dp = 128): proxy keys 64 KB, stages of 64 rows 48 KB, dS 32 KB, tokens 24 KB, and teacher rows 51 KB or the main
 * heads' keys 64 KB. A teacher row takes 272 B there, so that four lanes with two tokens each meet different banks.
 * Floor: 6 * 128 * Dp FLOPs a (row, place): 1,536 clocks a tile at Dp = 128; 512 B of memory.
 * Measured on an H200, 64/4/4/1 heads, 65,536 tokens, k 16, random selection, bf16: 1.12 ms, teacher given. */
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

constexpr int gradient_threads = 512, gradient_stages = 3, token_places = 8, ds_buffers = 2;
constexpr int key_buffers = 2, main_key_buffers = 2;
constexpr int teacher_row_bytes = 2 * block_keys + 16;

template <typename T>
struct gradient_parameters {
    proxy_work w;
    view<const T> q, k, q_proxy, k_proxy;
    view<const float> lse;
    int32_t heads_per_proxy_head, heads_per_kv_head; /* for a teacher that is made here, as q, k, lse, scale_log2 */
    int32_t proxy_heads_per_key_head;
    float scale_log2, proxy_scale_log2; /* times log2(e) */
    bool wants_dq;
    float *kl; /* NULL, or [shares][kl_sums_a_share] */
    float *dk; /* NULL, or [Tk][dk_heads][Dp] sums, in the order of work.cuh */
    int32_t dk_heads;
    int32_t *turns; /* NULL, or [proxy heads][blocks][2]: tokens of the list that either half of the keys has added */
};

/* MAIN: head dimension of the main heads; 0 where the teacher is given. */
template <int D, int MAIN>
struct gradient_memory {
    static constexpr int stage_bytes = tile_tokens * (D > MAIN ? D : MAIN) * 2;
    alignas(1024) char keys[key_buffers][block_keys * D * 2];
    alignas(1024) char main_keys[MAIN == 0 ? 1 : main_key_buffers][MAIN == 0 ? 1024 : block_keys * MAIN * 2];
    alignas(1024) char rows[gradient_stages][stage_bytes];
    alignas(1024) char ds[ds_buffers][tile_tokens * block_keys * 2];
    alignas(16) char teacher[MAIN == 0 ? gradient_stages : 1][MAIN == 0 ? tile_tokens * teacher_row_bytes : 16];
    token_tile tokens[token_places];
    float lse[gradient_stages][tile_tokens]; /* of a main head, natural */
    share_tokens<MAIN == 0 ? most_rows_given : most_rows_computed> share;
    share_data shares[key_buffers];
    uint64_t full[gradient_stages], empty[gradient_stages], ds_full[ds_buffers], ds_empty[ds_buffers];
    uint64_t key_full[key_buffers], key_empty[key_buffers], main_full[main_key_buffers], main_empty[main_key_buffers];
    int32_t next_share;
};
static_assert(sizeof(gradient_memory<128, 0>) <= most_block_memory, "a block has no more");
static_assert(sizeof(gradient_memory<128, 128>) <= most_block_memory, "a block has no more");

/* A place in a ring and how often it has been passed: the consumer waits for `phase`, the producer for the other. */
template <int count>
struct ring_place {
    int32_t index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == count) {
            index = 0;
            phase ^= 1;
        }
    }
};

/* ---- Warpgroup 0. ---- */

/* By cp.async as all else: a bulk copy a row would be issued thread after thread. */
__device__ __forceinline__ void load_teacher_rows(uint32_t destination, const token_tile &tile,
                                                  const uint16_t *vectors) {
    constexpr int chunks = vector_length / 8, rows_at_once = producer_threads / chunks;
    constexpr int count = tile_tokens / rows_at_once;
    const int chunk = threadIdx.x % chunks, first = threadIdx.x / chunks;
    int32_t place[count];
#pragma unroll
    for (int i = 0; i < count; i++)
        place[i] = tile.place[first + i * rows_at_once];
#pragma unroll
    for (int i = 0; i < count; i++) {
        cp_async_16(destination + (first + i * rows_at_once) * teacher_row_bytes + 16 * chunk,
                    vectors + int64_t(max(place[i], 0)) * vector_length + 8 * chunk, place[i] >= 0);
    }
}

template <typename T, int D, int MAIN>
__device__ __forceinline__ void produce(const gradient_parameters<T> &a, gradient_memory<D, MAIN> &m) {
    const proxy_work &w = a.w;
    const int tid = threadIdx.x;
    ring_place<key_buffers> buffer;
    ring_place<gradient_stages> stage;
    ring_place<main_key_buffers> main_buffer;
    uint32_t tile = 0;
    while (true) {
        const uint32_t key_full = shared_address(&m.key_full[buffer.index]);
        barrier_wait(shared_address(&m.key_empty[buffer.index]), buffer.phase ^ 1);
        proxy_share s;
        int32_t number;
        if (!take_share(w, 1, &m.next_share, s, number)) {
            if (tid == 0) m.shares[buffer.index].tiles = 0;
            barrier_arrive(key_full);
            barrier_arrive_after_copies(key_full);
            return;
        }
        const block_place block(w, s.block);
        if (tid == 0) describe_share(w, s, block, number, m.shares[buffer.index]);
        load_key_rows<D>(shared_address(m.keys[buffer.index]), a.k_proxy, block.key_row, block.keys,
                         s.proxy_head / a.proxy_heads_per_key_head);
        barrier_arrive(key_full);
        barrier_arrive_after_copies(key_full);
        buffer.advance();

        int32_t held_head = -1; /* the main key head whose keys were loaded last */
        find_tokens<true>(w, s, block, m.share);
        for (int32_t t = 0; t < tiles_of(s); t++, tile++) {
            token_tile &tokens = m.tokens[tile % token_places];
            barrier_wait(shared_address(&m.empty[stage.index]), stage.phase ^ 1);
            keep_tile(m.share, t, tokens);
            if constexpr (MAIN != 0) {
                for (int32_t h = 0; h < a.heads_per_proxy_head; h++) {
                    const int32_t head = s.proxy_head * a.heads_per_proxy_head + h;
                    const int32_t key_head = head / a.heads_per_kv_head;
                    if (key_head != held_head) {
                        const uint32_t main_full = shared_address(&m.main_full[main_buffer.index]);
                        held_head = key_head;
                        barrier_wait(shared_address(&m.main_empty[main_buffer.index]), main_buffer.phase ^ 1);
                        load_key_rows<MAIN>(shared_address(m.main_keys[main_buffer.index]), a.k, block.key_row,
                                            block.keys, key_head);
                        barrier_arrive_after_copies(main_full);
                        main_buffer.advance();
                    }
                    const uint32_t full = shared_address(&m.full[stage.index]);
                    barrier_wait(shared_address(&m.empty[stage.index]), stage.phase ^ 1);
                    load_token_rows<MAIN>(shared_address(m.rows[stage.index]), tokens, a.q, head);
                    if (tid < tile_tokens) {
                        const int32_t row = tokens.row[tid];
                        cp_async_4(shared_address(&m.lse[stage.index][tid]), a.lse.at(max(row, 0), head), row >= 0);
                        barrier_arrive(full);
                    }
                    barrier_arrive_after_copies(full);
                    stage.advance();
                }
                barrier_wait(shared_address(&m.empty[stage.index]), stage.phase ^ 1);
            }
            const uint32_t full = shared_address(&m.full[stage.index]);
            if constexpr (MAIN == 0) load_teacher_rows(shared_address(m.teacher[stage.index]), tokens, w.vectors);
            load_token_rows<D>(shared_address(m.rows[stage.index]), tokens, a.q_proxy, s.proxy_head);
            barrier_arrive_after_copies(full);
            if (tid < tile_tokens) barrier_arrive(full);
            stage.advance();
        }
    }
}

/* ---- Warpgroups 1 and 2: 64 keys each. ---- */

/* S^T = K Q^T: 64 keys x 64 tokens over `dim` columns. */
template <int dim, typename T>
__device__ __forceinline__ void score(float (&s)[32], uint64_t keys, uint64_t rows, T type) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < dim / 16; d++) {
        const uint64_t k = keys + d / 4 * (block_keys * 128 >> 4) + d % 4 * 2;
        const uint64_t q = rows + d / 4 * (tile_tokens * 128 >> 4) + d % 4 * 2;
        if (d == 0) {
            wgmma_new(s, k, q, type);
        } else {
            wgmma(s, k, q, type);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
}

/* Which of the numbers that a thread holds belong to what: s[4 * j + 2 * half + e] is key `key` + 8 * half, token 8 * j
 * + column + e. */
struct own_place {
    int key, column;
};

/* Added to w: keeps its logarithm finite, and is 0 for every other purpose. */
constexpr float least_teacher = 1e-30f;

/* dS in pairs from the scores, and the KL value's terms, times 1 / log 2. teacher(j, half, e) is w. masked: whether
 * some token does not see some key. */
template <bool masked, bool wants_kl, typename T, typename Teacher>
__device__ __forceinline__ void differ(uint32_t (&ds)[16], float &kl, const float (&s)[32], const token_tile &tokens,
                                       const own_place &own, float scale_log2, const Teacher &teacher) {
    float terms[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 lse = *reinterpret_cast<const float2 *>(&tokens.lse[8 * j + own.column]);
        int2 limit = {};
        if (masked) limit = *reinterpret_cast<const int2 *>(&tokens.limit[8 * j + own.column]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float difference[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool seen = !masked || own.key + 8 * half <= (e == 0 ? limit.x : limit.y);
                const float log2_r = fmaf(s[4 * j + 2 * half + e], scale_log2, e == 0 ? -lse.x : -lse.y);
                const float w = teacher(j, half, e);
                if (wants_kl) {
                    const float logarithm = log2_approx(w) - log2_r;
                    terms[e] = fmaf(seen ? w : 0, seen ? logarithm : 0, terms[e]);
                }
                difference[e] = seen ? (exp2_approx(log2_r) - w) * ds_scale<T> : 0;
            }
            ds[2 * j + half] = pack_pair(difference[0], difference[1], T());
        }
    }
    kl += terms[0] + terms[1];
}

template <typename T, typename Teacher>
__device__ __forceinline__ void differ(uint32_t (&ds)[16], float &kl, const float (&s)[32], const token_tile &tokens,
                                       const own_place &own, float scale_log2, bool wants_kl, const Teacher &teacher) {
    if ((tokens.masked[0] | tokens.masked[1]) != 0) {
        differ<true, true, T>(ds, kl, s, tokens, own, scale_log2, teacher);
    } else if (wants_kl) {
        differ<false, true, T>(ds, kl, s, tokens, own, scale_log2, teacher);
    } else {
        differ<false, false, T>(ds, kl, s, tokens, own, scale_log2, teacher);
    }
}

/* Adds a row of dk_proxy, columns 16 * j + column of it. In turn: four loads are under way at a time. */
template <int D>
__device__ __forceinline__ void add_row(float *row, const float (&dk)[D / 2], int half) {
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
        const float *x = &dk[8 * j + 2 * half];
        reduce_add_4(row + 16 * j, x[0], x[1], x[4], x[5]);
    }
}

template <int D>
__device__ __forceinline__ void add_row_in_turn(float *row, const float (&dk)[D / 2], int half) {
    constexpr int at_once = 4;
#pragma unroll
    for (int first = 0; first < D / 16; first += at_once) {
        float4 sum[at_once];
#pragma unroll
        for (int j = 0; j < at_once; j++)
            sum[j] = __ldcg(reinterpret_cast<const float4 *>(row + 16 * (first + j)));
#pragma unroll
        for (int j = 0; j < at_once; j++) {
            const float *x = &dk[8 * (first + j) + 2 * half];
            const float4 value = {sum[j].x + x[0], sum[j].y + x[1], sum[j].z + x[4], sum[j].w + x[5]};
            __stcg(reinterpret_cast<float4 *>(row + 16 * (first + j)), value);
        }
    }
}

/* Adds a warpgroup's 64 rows of dk_proxy, where there are turns when its own has come. */
template <typename T, int D>
__device__ __forceinline__ void add_dk(const gradient_parameters<T> &a, const share_data &s, const own_place &own,
                                       int warpgroup, const float (&dk)[D / 2]) {
    int32_t *turn = nullptr;
    int64_t head = s.proxy_head / a.proxy_heads_per_key_head;
    if (a.turns != nullptr) {
        head = s.proxy_head;
        turn = a.turns + (s.proxy_head * a.w.max_blocks + s.block) * 2 + warpgroup;
        if (threadIdx.x % 128 == 0) {
            while (atomicAdd(turn, 0) != s.before)
                __nanosleep(64);
            __threadfence();
        }
        named_barrier_sync(2 + warpgroup, 128);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = own.key + 8 * half;
        if (key >= s.keys) continue;
        float *row = a.dk + ((s.key_row + int64_t(key)) * a.dk_heads + head) * D + 2 * own.column;
        if (turn == nullptr) {
            add_row<D>(row, dk, half);
        } else {
            add_row_in_turn<D>(row, dk, half);
        }
    }
    if (turn == nullptr) return;
    __threadfence();
    named_barrier_sync(2 + warpgroup, 128);
    if (threadIdx.x % 128 != 0) return;
    __threadfence(); /* what the barrier gathered, not only this thread's own sums */
    atomicExch(turn, s.end);
}

template <typename T, int D, int MAIN>
__device__ __forceinline__ void consume(const gradient_parameters<T> &a, gradient_memory<D, MAIN> &m) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x % 128 / 32, warpgroup = threadIdx.x / 128 - 1;
    const own_place own = {64 * warpgroup + 16 * warp + lane / 4, 2 * (lane & 3)};
    const uint32_t half_of_keys = 64 * 128 * warpgroup;
    /* stmatrix: rows of 8 keys for token lane % 8 + 8 * (lane / 16), keys 8 * (lane / 8 % 2) on. */
    const uint32_t ds_offset =
        warpgroup * (tile_tokens * 128) + chunk_offset<tile_tokens>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
    const float mean = MAIN == 0 ? 0 : 1.0f / static_cast<float>(a.heads_per_proxy_head);
    ring_place<key_buffers> buffer;
    ring_place<gradient_stages> stage;
    ring_place<ds_buffers> ds_buffer;
    ring_place<main_key_buffers> main_buffer;
    uint32_t tile = 0;
    while (true) {
        barrier_wait(shared_address(&m.key_full[buffer.index]), buffer.phase);
        const share_data &shared = m.shares[buffer.index];
        const int32_t tiles = uniform(shared.tiles);
        if (tiles == 0) return;
        fence_async_proxy();
        const uint64_t keys = operand(shared_address(m.keys[buffer.index]) + half_of_keys, 0, 1024);
        float dk[D / 2] = {};
        float kl = 0;
        int32_t held_head = -1;
        for (int32_t t = 0; t < tiles; t++, tile++) {
            const token_tile &tokens = m.tokens[tile % token_places];
            float teacher[MAIN == 0 ? 1 : 32] = {};
            if constexpr (MAIN != 0) {
                for (int32_t h = 0; h < a.heads_per_proxy_head; h++) {
                    const int32_t key_head = (shared.proxy_head * a.heads_per_proxy_head + h) / a.heads_per_kv_head;
                    if (key_head != held_head) {
                        if (held_head >= 0) {
                            if (lane == 0) barrier_arrive(shared_address(&m.main_empty[main_buffer.index]));
                            main_buffer.advance();
                        }
                        held_head = key_head;
                        barrier_wait(shared_address(&m.main_full[main_buffer.index]), main_buffer.phase);
                    }
                    barrier_wait(shared_address(&m.full[stage.index]), stage.phase);
                    fence_async_proxy();
                    float s[32];
                    score<MAIN>(s, operand(shared_address(m.main_keys[main_buffer.index]) + half_of_keys, 0, 1024),
                                operand(shared_address(m.rows[stage.index]), 0, 1024), T());
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float2 lse = *reinterpret_cast<const float2 *>(&m.lse[stage.index][8 * j + own.column]);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float lse_log2 = (i % 2 == 0 ? lse.x : lse.y) * log2_e;
                            teacher[4 * j + i] += exp2_approx(fmaf(s[4 * j + i], a.scale_log2, -lse_log2));
                        }
                    }
                    __syncwarp();
                    if (lane == 0) barrier_arrive(shared_address(&m.empty[stage.index]));
                    stage.advance();
                }
            }
            barrier_wait(shared_address(&m.full[stage.index]), stage.phase);
            fence_async_proxy();
            const uint32_t rows = shared_address(m.rows[stage.index]);
            float s[32];
            score<D>(s, keys, operand(rows, 0, 1024), T());
            uint32_t ds[16];
            if constexpr (MAIN == 0) {
                const char *given = m.teacher[stage.index] + own.column * teacher_row_bytes +
                                    (8 * (4 * warpgroup + warp) + lane / 4) * 4;
                differ<T>(ds, kl, s, tokens, own, a.proxy_scale_log2, a.kl != nullptr, [&](int j, int half, int e) {
                    const uint32_t pair = *reinterpret_cast<const uint32_t *>(given + (8 * j + e) * teacher_row_bytes);
                    const float2 two = unpack_pair(pair, __half());
                    return fmaf(half == 0 ? two.x : two.y, 1.0f / FMSA_SM90_TEACHER_SCALE, least_teacher);
                });
            } else {
                differ<T>(ds, kl, s, tokens, own, a.proxy_scale_log2, a.kl != nullptr, [&](int j, int half, int e) {
                    return fmaf(teacher[4 * j + 2 * half + e], mean, least_teacher);
                });
            }
            if (a.dk != nullptr) {
                pin(ds);
                pin(dk);
                wgmma_fence();
                const uint64_t q = operand(rows, tile_tokens * 128, 1024);
#pragma unroll
                for (int i = 0; i < tile_tokens / 16; i++) {
                    wgmma<true>(dk, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3], q + i * (2048 >> 4), T());
                }
                wgmma_commit();
            }
            if (a.wants_dq) {
                barrier_wait(shared_address(&m.ds_empty[ds_buffer.index]), ds_buffer.phase ^ 1);
                const uint32_t target = shared_address(m.ds[ds_buffer.index]) + ds_offset;
#pragma unroll
                for (int i = 0; i < tile_tokens / 16; i++) {
                    stmatrix_x4_trans(target + i * (16 * 128), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
                }
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) barrier_arrive(shared_address(&m.ds_full[ds_buffer.index]));
                ds_buffer.advance();
            }
            wgmma_wait<0>();
            pin(dk);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&m.empty[stage.index]));
            stage.advance();
        }
        const share_data share = shared;
        __syncwarp();
        if (lane == 0) {
            if (MAIN != 0) barrier_arrive(shared_address(&m.main_empty[main_buffer.index]));
            barrier_arrive(shared_address(&m.key_empty[buffer.index]));
        }
        main_buffer.advance();
        buffer.advance();
        if (a.kl != nullptr) {
            for (int step = 16; step > 0; step /= 2)
                kl += __shfl_xor_sync(0xffffffffu, kl, step);
            if (lane == 0) a.kl[int64_t(share.number) * kl_sums_a_share + 4 * warpgroup + warp] = kl;
        }
        if (a.dk != nullptr) add_dk<T, D>(a, share, own, warpgroup, dk);
    }
}

/* ---- Warpgroup 3: dq_proxy. ---- */

/* One row's columns 8 * j + column + {0, 1} of x, for rows g (half 0) or g + 8, to the term of its place. Four lanes
 * hold a row; each writes 16 bytes of every 64. */
template <int D>
__device__ __forceinline__ void write_term(const proxy_work &w, int32_t place, int half, const float (&x)[D / 2]) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < D / 8; j++)
        most = fmaxf(most, fmaxf(fabsf(x[4 * j + 2 * half]), fabsf(x[4 * j + 2 * half + 1])));
    most = quad_max(most);
    /* most lies in 2^(e - 127) * [1, 2); times 2^(141 - e) it stays below 2^15. Infinity and NaN stay what they are. */
    const int exponent = max(__float_as_int(most) >> 23, 15);
    const float scale = __int_as_float((268 - exponent) << 23), back = __int_as_float((exponent - 14) << 23);
    if (place < 0) return;
    const int quarter = threadIdx.x & 3;
    uint4 *target = reinterpret_cast<uint4 *>(w.vectors + int64_t(place) * vector_length) + quarter;
    if (quarter == 0) w.numbers[place] = back;
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = &x[4 * (4 * c + i) + 2 * half];
            pair[i] = pack_pair(two[0] * scale, two[1] * scale, __half());
        }
        target[4 * c] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

template <typename T, int D, int MAIN>
__device__ __forceinline__ void make_terms(const gradient_parameters<T> &a, gradient_memory<D, MAIN> &m) {
    const int lane = threadIdx.x & 31, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    ring_place<key_buffers> buffer;
    ring_place<ds_buffers> ds_buffer;
    uint32_t tile = 0;
    while (true) {
        barrier_wait(shared_address(&m.key_full[buffer.index]), buffer.phase);
        const int32_t tiles = uniform(m.shares[buffer.index].tiles);
        if (tiles == 0) return;
        fence_async_proxy();
        const uint64_t keys = operand(shared_address(m.keys[buffer.index]), block_keys * 128, 1024);
        for (int32_t t = 0; t < (a.wants_dq ? tiles : 0); t++, tile++) {
            const token_tile &tokens = m.tokens[tile % token_places];
            barrier_wait(shared_address(&m.ds_full[ds_buffer.index]), ds_buffer.phase);
            const uint64_t ds = operand(shared_address(m.ds[ds_buffer.index]), 0, 1024);
            const int32_t place[2] = {tokens.place[row], tokens.place[row + 8]};
            float dq[D / 2];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < block_keys / 16; i++) {
                const uint64_t left = ds + i / 4 * (tile_tokens * 128 >> 4) + i % 4 * 2, right = keys + i * (2048 >> 4);
                if (i == 0) {
                    wgmma_new<false, true>(dq, left, right, T());
                } else {
                    wgmma<false, true>(dq, left, right, T());
                }
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(dq);
            if (lane == 0) barrier_arrive(shared_address(&m.ds_empty[ds_buffer.index]));
            ds_buffer.advance();
            write_term<D>(a.w, place[0], 0, dq);
            write_term<D>(a.w, place[1], 1, dq);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&m.key_empty[buffer.index]));
        buffer.advance();
    }
}

template <typename T, int D, int MAIN>
__global__ void __launch_bounds__(gradient_threads, 1)
    gradient_kernel(const __grid_constant__ gradient_parameters<T> a) {
    extern __shared__ __align__(1024) char memory[];
    typedef gradient_memory<D, MAIN> shared;
    shared &m = *reinterpret_cast<shared *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < gradient_stages; i++) {
            barrier_init(shared_address(&m.full[i]), producer_threads + tile_tokens);
            barrier_init(shared_address(&m.empty[i]), 8);
        }
        for (int i = 0; i < ds_buffers; i++) {
            barrier_init(shared_address(&m.ds_full[i]), 8);
            barrier_init(shared_address(&m.ds_empty[i]), 4);
        }
        for (int i = 0; i < key_buffers; i++) {
            barrier_init(shared_address(&m.key_full[i]), 2 * producer_threads);
            barrier_init(shared_address(&m.key_empty[i]), 12);
        }
        for (int i = 0; i < main_key_buffers; i++) {
            barrier_init(shared_address(&m.main_full[i]), producer_threads);
            barrier_init(shared_address(&m.main_empty[i]), 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<MAIN == 0 ? 72 : 56>();
        produce<T, D, MAIN>(a, m);
    } else if (role == 3) {
        warpgroup_give_registers<104>();
        make_terms<T, D, MAIN>(a, m);
    } else {
        warpgroup_take_registers<MAIN == 0 ? 168 : 176>();
        consume<T, D, MAIN>(a, m);
    }
}

/* ---- Host. ---- */

template <typename T>
static gradient_parameters<T> make_parameters(const fmsa_problem *problem, const fmsa_tensors *t,
                                              const fmsa_sm90_proxy &proxy, const group_memory &group) {
    const fmsa_config *c = &problem->config;
    gradient_parameters<T> p = {};
    p.w = group.work;
    p.q = view<const T>(t->q);
    p.k = view<const T>(t->k);
    p.q_proxy = view<const T>(t->q_proxy);
    p.k_proxy = view<const T>(t->k_proxy);
    p.lse = view<const float>(t->lse);
    p.heads_per_proxy_head = problem->heads_per_proxy_head;
    p.heads_per_kv_head = problem->heads_per_kv_head;
    p.proxy_heads_per_key_head = c->num_proxy_heads / c->num_proxy_kv_heads;
    p.scale_log2 = static_cast<float>(c->softmax_scale * log2_e);
    p.proxy_scale_log2 = static_cast<float>(c->proxy_scale * log2_e);
    p.wants_dq = t->dq_proxy.data != nullptr;
    p.kl = t->kl == nullptr ? nullptr : group.kl_sums;
    p.dk = proxy.dk;
    p.dk_heads = dk_sum_heads(problem);
    p.turns = in_order(problem) ? proxy.turns : nullptr;
    return p;
}

template <typename T, int D, int MAIN>
static fmsa_status launch_gradient(const gradient_parameters<T> &p, cudaStream_t stream) {
    unsigned blocks;
    FMSA_TRY(multiprocessors(&blocks));
    return launch("proxy loss", gradient_kernel<T, D, MAIN>, dim3(blocks), gradient_threads,
                  sizeof(gradient_memory<D, MAIN>), stream, p);
}

fmsa_status differ_from_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy &proxy,
                                const group_memory &group, bool computed, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_16_bit_type_and_dim(c->dtype, c->proxy_head_dim, [&](auto type, auto dim) {
        typedef decltype(type) T;
        constexpr int D = decltype(dim)::value;
        const gradient_parameters<T> p = make_parameters<T>(problem, tensors, proxy, group);
        if (!computed) return launch_gradient<T, D, 0>(p, stream);
        if (c->head_dim == 64) return launch_gradient<T, D, 64>(p, stream);
        return launch_gradient<T, D, 128>(p, stream);
    });
}

} // namespace fmsa::proxy
