/* dq_proxy, dk_proxy and the KL value from the teacher w: r = exp(s_proxy - student LSE), dS = r - w, KL += w (log w -
 * log r), dk_proxy += dS^T q_proxy, dq_proxy = dS k_proxy.
 *
 * Key-outer, persistent, one block of four warpgroups a multiprocessor; a tile is 64 tokens (N) x the block's 128 keys.
 * Warpgroup 0 produces: shares by ticket; key rows, token rows and teacher rows by cp.async, or where a tile's tokens
 * are neighbours of dense mode by the TMA. Warpgroups 1 and 2 take turns at the tiles: twice 64 keys (M) of S^T by
 * wgmma m64n64, dS in registers and as [token][key] to shared memory, where it takes the place of the teacher: a warp
 * writes only what it alone has read. One's products run beside the other's exponentials. Warpgroup 3 multiplies:
 * dq_proxy = dS k_proxy by m64nDp, and beside its epilogue dk_proxy += dS^T q_proxy by two m64nDp. dq_proxy is added to
 * fp16 sums (see proxy_work::dq_scale). Where the order must not count, or the result has more bits, it is left as a
 * term for each (row, place) in 16 bits with a scale of its own power of two, in the place of the teacher row: 11 bits
 * of its largest element. dk_proxy is added in fp32, once a share. The thread block that is done last adds up the KL
 * value.
 *
 * Barriers: full[stage] from the producer's 128 threads or their copies and 64 token writers to warpgroups 1 and 2
 * (and through them to 3), empty[stage] back from the 4 warps of warpgroup 3, which uses the tile last; teacher_full
 * and teacher_empty the same for teacher rows; ds_full, for these too, from the 4 warps that made dS of them to
 * warpgroup 3; key_full and key_empty for a share's keys, with all 12. The tokens' data has eight places: no more
 * than four tiles are under way. Registers: producer 72, warpgroups 1 and 2 104 (S 32, dS 16), warpgroup 3 232
 * (dk_proxy 128, dq_proxy 64). Shared memory (Dp = 128): keys 64 KB, four stages of 64 rows 64 KB, five of teacher
 * rows and dS 80 KB, tokens 18 KB. Floor: 6 * 128 * Dp FLOPs a (row, place): 1,536 clocks a tile at Dp = 128; its
 * operands pass shared memory in about 1,900; 256 B of memory a (row, place), 512 with terms. Measured on an H200,
 * 16/2/4/1 heads, 16,384 tokens, k = 16: 3,590 clocks a tile, 0.27 ms. */
#include "sm90_proxy.cuh"

namespace fmsa::proxy {

constexpr int difference_warps = 8, difference_threads = 32 * difference_warps;
constexpr int gradient_threads = 512, gradient_stages = 4, teacher_stages = 5, key_buffers = 2;

template <typename T>
struct gradient_parameters {
    CUtensorMap q_map, teacher_map; /* dense mode */
    proxy_work w;
    view<const T> q_proxy, k_proxy;
    int32_t proxy_heads_per_key_head;
    float scale_log2; /* proxy_scale * log2(e) */
    bool wants_dq;
    float *kl; /* NULL, or [shares][kl_sums_a_share] */
    double *kl_sum;
    float *kl_value; /* of all groups so far: *kl_sum * kl_factor */
    double kl_factor;
    float *dk; /* NULL, or [Tk][dk_heads][Dp] sums, in the order of work.cuh */
    int32_t dk_heads;
    int32_t *turns; /* NULL, or [proxy heads][blocks]: tokens of the list that have been added */
};

template <int D>
struct gradient_memory {
    alignas(1024) char keys[key_buffers][block_keys * D * 2];
    alignas(1024) char rows[gradient_stages][tile_tokens * D * 2];
    alignas(1024) char teacher[teacher_stages][tile_tokens * 2 * vector_length]; /* then dS */
    token_tile tokens[token_places];
    token_batch batch;
    share_data shares[key_buffers];
    uint64_t full[gradient_stages], empty[gradient_stages];
    uint64_t teacher_full[teacher_stages], ds_full[teacher_stages], teacher_empty[teacher_stages];
    uint64_t key_full[key_buffers], key_empty[key_buffers];
    int32_t next_share, blocks_done;
    double warp_sum[difference_warps];
};
static_assert(sizeof(gradient_memory<128>) <= most_block_memory, "a block has no more");

/* ---- Warpgroup 0. ---- */

/* Teacher rows lie as token rows do: then the four pairs of tokens that a warp reads at once meet different banks. By
 * cp.async: a bulk copy a row would be issued thread after thread. */
__device__ __forceinline__ void
load_teacher_rows(uint32_t destination, const tile_rows_of_thread<vector_length / 8> &places, const uint16_t *vectors) {
    places.copy(destination, vectors, vector_length * sizeof(uint16_t));
}

/* place: of the block in the group. vector: of the first row, counted by (proxy head, row). */
__device__ __forceinline__ void load_whole_teacher(uint32_t destination, const CUtensorMap *map, uint32_t barrier,
                                                   int32_t place, int32_t vector) {
    arrive_with_loads(barrier, tile_tokens * vector_length * 2, [&] {
        for (int column = 0; column < vector_length; column += 64)
            tma_load_3d(destination + column * (tile_tokens * 2), map, barrier, column, place, vector);
    });
}

template <typename T, int D>
__device__ __forceinline__ void produce(const gradient_parameters<T> &a, gradient_memory<D> &m) {
    const proxy_work &w = a.w;
    const int tid = threadIdx.x;
    ring_place<key_buffers> buffer;
    ring_place<gradient_stages> stage;
    ring_place<teacher_stages> teacher;
    uint32_t tile = 0;
    while (true) {
        const uint32_t key_full = shared_address(&m.key_full[buffer.index]);
        barrier_wait(shared_address(&m.key_empty[buffer.index]), buffer.phase ^ 1);
        proxy_share s;
        int32_t number;
        if (!take_share(w, GRADIENT_TICKET, &m.next_share, s, number)) {
            if (tid == 0) m.shares[buffer.index].tiles = 0;
            barrier_arrive(key_full);
            barrier_arrive_after_copies(key_full);
            return;
        }
        next_tokens next;
        next.ask(w, s, 0);
        const block_place block(w, s.block);
        if (tid == 0) describe_share(w, s, block, number, m.shares[buffer.index]);
        load_key_rows<D>(shared_address(m.keys[buffer.index]), a.k_proxy, block.key_row, block.keys,
                         s.proxy_head / a.proxy_heads_per_key_head);
        barrier_arrive(key_full);
        barrier_arrive_after_copies(key_full);
        buffer.advance();

        for (int32_t t = 0; t < tiles_of(s); t++, tile++) {
            const int32_t first = t * tile_tokens % batch_tokens;
            if (first == 0) find_tokens<D / 8, true, true, true>(w, s, block, t * tile_tokens, next, m.batch);
            tile_rows_of_thread<D / 8> rows;
            rows.read(m.batch.row + first);
            const uint32_t full = shared_address(&m.full[stage.index]);
            barrier_wait(shared_address(&m.empty[stage.index]), stage.phase ^ 1);
            const bool whole = m.batch.whole_tile(first);
            const int32_t row = static_cast<int32_t>(s.begin) + t * tile_tokens; /* dense mode */
            if (whole) {
                load_whole_rows<D>(shared_address(m.rows[stage.index]), &a.q_map, full, s.proxy_head, row);
            } else {
                load_token_rows<D>(shared_address(m.rows[stage.index]), rows, a.q_proxy, s.proxy_head);
                barrier_arrive_after_copies(full);
            }
            if (tid < tile_tokens) {
                keep_tile(m.batch, first, m.tokens[tile % token_places]);
                barrier_arrive(full);
            }
            tile_rows_of_thread<vector_length / 8> places;
            places.read(m.batch.place + first);
            barrier_wait(shared_address(&m.teacher_empty[teacher.index]), teacher.phase ^ 1);
            const uint32_t teacher_full = shared_address(&m.teacher_full[teacher.index]);
            if (whole) {
                load_whole_teacher(shared_address(m.teacher[teacher.index]), &a.teacher_map, teacher_full,
                                   block.dense_place, static_cast<int32_t>(w.row_number(s.proxy_head, row)));
            } else {
                load_teacher_rows(shared_address(m.teacher[teacher.index]), places, w.vectors);
                barrier_arrive_after_copies(teacher_full);
            }
            stage.advance();
            teacher.advance();
        }
    }
}

/* ---- Warpgroups 1 and 2: dS, 64 keys each. ---- */

/* Which of the numbers that a thread holds belong to what: s[4 * j + 2 * half + e] is key `key` + 8 * half, token 8 * j
 * + column + e. */
struct own_place {
    int key, column;
};

/* Added to w: keeps its logarithm finite, and is 0 for every other purpose. */
constexpr float least_teacher = 1e-30f;

/* dS in pairs from the scores, and the KL value's terms, times 1 / log 2. teacher: where the tile's rows are. masked:
 * whether some token does not see some key. */
template <bool masked, bool wants_kl, typename T>
__device__ __forceinline__ void differ(uint32_t (&ds)[16], float &kl, const float (&s)[32], const token_tile &tokens,
                                       const char *teacher, const own_place &own, float scale_log2) {
    float terms[2] = {0, 0};
    /* Pair 8 * m + g of a row, in chunk 2 * m + g / 4, is keys 16 * m + g and + 8. */
    const int chunk = own.key / 16 * 2 + own.key % 8 / 4;
    const char *const pairs[2] = {teacher + chunk_offset<tile_tokens>(own.column, chunk) + own.key % 4 * 4,
                                  teacher + chunk_offset<tile_tokens>(own.column + 1, chunk) + own.key % 4 * 4};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 lse = *reinterpret_cast<const float2 *>(&tokens.lse[8 * j + own.column]);
        int2 limit = {};
        if (masked) limit = *reinterpret_cast<const int2 *>(&tokens.limit[8 * j + own.column]);
        float difference[2][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float2 w_scaled = unpack_pair(*reinterpret_cast<const uint32_t *>(pairs[e] + 8 * j * 128), __half());
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool seen = !masked || own.key + 8 * half <= (e == 0 ? limit.x : limit.y);
                const float log2_r = fmaf(s[4 * j + 2 * half + e], scale_log2, e == 0 ? -lse.x : -lse.y);
                const float w =
                    fmaf(half == 0 ? w_scaled.x : w_scaled.y, 1.0f / FMSA_SM90_TEACHER_SCALE, least_teacher);
                if (wants_kl) {
                    const float logarithm = log2_approx(w) - log2_r;
                    terms[e] = fmaf(seen ? w : 0, seen ? logarithm : 0, terms[e]);
                }
                difference[half][e] = seen ? (exp2_approx(log2_r) - w) * ds_scale<T> : 0;
            }
        }
        ds[2 * j] = pack_pair(difference[0][0], difference[0][1], T());
        ds[2 * j + 1] = pack_pair(difference[1][0], difference[1][1], T());
    }
    kl += terms[0] + terms[1];
}

/* One of the two warpgroups: every other tile, all its keys. */
template <typename T, int D>
struct difference_maker {
    const gradient_parameters<T> &a;
    gradient_memory<D> &m;
    const int lane, warp, warpgroup;
    float kl;
    ring_place<gradient_stages> stage;
    ring_place<teacher_stages> teacher;
    uint32_t tile; /* the next */

    __device__ __forceinline__ difference_maker(const gradient_parameters<T> &a, gradient_memory<D> &m)
        : a(a), m(m), lane(threadIdx.x & 31), warp(threadIdx.x % 128 / 32), warpgroup(threadIdx.x / 128 - 1),
          stage(warpgroup), teacher(warpgroup), tile(warpgroup) {
    }

    /* dS of a half's keys, to where their teacher was. */
    __device__ __forceinline__ void make_ds(const float (&s)[32], int half) {
        const token_tile &tokens = m.tokens[tile % token_places];
        const char *const rows = m.teacher[teacher.index];
        const own_place own = {64 * half + 16 * warp + lane / 4, 2 * (lane & 3)};
        uint32_t ds[16];
        if ((tokens.masked[0] | tokens.masked[1]) != 0) {
            differ<true, true, T>(ds, kl, s, tokens, rows, own, a.scale_log2);
        } else if (a.kl != nullptr) {
            differ<false, true, T>(ds, kl, s, tokens, rows, own, a.scale_log2);
        } else {
            differ<false, false, T>(ds, kl, s, tokens, rows, own, a.scale_log2);
        }
        /* stmatrix: a lane gives the row of 8 keys of token lane % 8 + 8 * (lane / 16), from key 8 * (lane / 8 % 2) on.
         */
        const uint32_t target = shared_address(rows) + half * (tile_tokens * 128) +
                                chunk_offset<tile_tokens>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < tile_tokens / 16; i++)
            stmatrix_x4_trans(target + i * (16 * 128), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }

    /* keys: operand, all 128. What this warpgroup multiplies runs beside the other's exponentials. */
    __device__ __forceinline__ void make_tile(uint64_t keys) {
        barrier_wait(shared_address(&m.full[stage.index]), stage.phase);
        fence_async_proxy();
        const uint64_t rows = operand(shared_address(m.rows[stage.index]), 0, 1024);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            float s[32];
            multiply_keys_by_rows<D>(s, keys + half * (64 * 128 >> 4), rows, T());
            if (half == 0) barrier_wait(shared_address(&m.teacher_full[teacher.index]), teacher.phase);
            wgmma_wait<0>();
            pin(s);
            make_ds(s, half);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&m.ds_full[teacher.index]));
        stage.advance(2);
        teacher.advance(2);
        tile += 2;
    }

    /* first_tile: of the share, among all of the thread block's. Which warpgroup had the share's even tiles depends on
     * it, and on what the thread block did before; where their sum goes must not. */
    __device__ __forceinline__ void leave_kl(int32_t share, uint32_t first_tile) {
        for (int step = 16; step > 0; step /= 2)
            kl += __shfl_xor_sync(0xffffffffu, kl, step);
        const uint32_t odd = (warpgroup + first_tile) & 1;
        if (lane == 0) a.kl[int64_t(share) * kl_sums_a_share + 4 * odd + warp] = kl;
    }

    /* The thread block that is done last adds the sums of all shares, always in the same order. */
    __device__ __forceinline__ void add_up_kl() {
        const int thread = threadIdx.x - 128;
        __threadfence();
        named_barrier_sync(3, difference_threads);
        if (thread == 0) m.blocks_done = static_cast<int32_t>(atomicAdd(a.w.tickets + DONE_TICKET, 1u)) + 1;
        named_barrier_sync(3, difference_threads);
        if (m.blocks_done != static_cast<int32_t>(gridDim.x)) return;
        __threadfence();
        const int64_t count = int64_t(*a.w.num_shares) * kl_sums_a_share;
        double sum = 0;
#pragma unroll 8
        for (int64_t i = thread; i < count; i += difference_threads)
            sum += __ldcg(a.kl + i);
        for (int step = 16; step > 0; step /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) m.warp_sum[thread / 32] = sum;
        named_barrier_sync(3, difference_threads);
        if (thread != 0) return;
        sum = *a.kl_sum;
        for (int i = 0; i < difference_warps; i++)
            sum += m.warp_sum[i];
        *a.kl_sum = sum;
        *a.kl_value = static_cast<float>(sum * a.kl_factor);
    }

    __device__ __forceinline__ void run() {
        ring_place<key_buffers> buffer;
        uint32_t end = 0; /* of the share's tiles */
        while (true) {
            barrier_wait(shared_address(&m.key_full[buffer.index]), buffer.phase);
            const int32_t tiles = uniform(m.shares[buffer.index].tiles), share = m.shares[buffer.index].number;
            if (tiles == 0) break;
            fence_async_proxy();
            const uint64_t keys = operand(shared_address(m.keys[buffer.index]), 0, 1024);
            kl = 0;
            end += tiles;
            while (tile < end)
                make_tile(keys);
            if (lane == 0) barrier_arrive(shared_address(&m.key_empty[buffer.index]));
            buffer.advance();
            if (a.kl != nullptr) leave_kl(share, end - tiles);
        }
        if (a.kl != nullptr) add_up_kl();
    }
};

/* ---- Warpgroup 3: the products with dS. ---- */

/* The thread's columns of the 32 from 32 * c on of row g (half 0) or g + 8 of x, scaled. */
template <int D>
__device__ __forceinline__ void pack_columns(uint32_t (&pair)[4], const float (&x)[D / 2], int c, int half,
                                             float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *two = &x[4 * (4 * c + i) + 2 * half];
        pair[i] = pack_pair(two[0] * scale, two[1] * scale, __half());
    }
}

/* One row's columns 8 * j + column + {0, 1} of x, for rows g (half 0) or g + 8, to the term of its place. Four lanes
 * hold a row; each writes 16 bytes of every 64. */
template <int D>
__device__ __forceinline__ void write_term(const proxy_work &w, int32_t place, int half, const float (&x)[D / 2]) {
    float most[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        most[j % 2] = fmaxf(most[j % 2], fabsf(x[4 * j + 2 * half]));
        most[2 + j % 2] = fmaxf(most[2 + j % 2], fabsf(x[4 * j + 2 * half + 1]));
    }
    const float greatest = quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
    /* It lies in 2^(e - 127) * [1, 2); times 2^(141 - e) it stays below 2^15. Infinity and NaN stay what they are. */
    const int exponent = max(__float_as_int(greatest) >> 23, 15);
    const float scale = __int_as_float((268 - exponent) << 23), back = __int_as_float((exponent - 14) << 23);
    if (place < 0) return;
    const int quarter = threadIdx.x & 3;
    uint4 *target = reinterpret_cast<uint4 *>(w.vectors + int64_t(place) * vector_length) + quarter;
    if (quarter == 0) w.numbers[place] = back;
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
        uint32_t pair[4];
        pack_columns<D>(pair, x, c, half, scale);
        target[4 * c] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

/* The same, added to the sum at `term`. */
template <int D>
__device__ __forceinline__ void add_term(const proxy_work &w, int32_t term, float scale, int half,
                                         const float (&x)[D / 2]) {
    __half *const target =
        reinterpret_cast<__half *>(w.dq_sums) + int64_t(term) * vector_length + 8 * (threadIdx.x & 3);
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
        uint32_t pair[4];
        pack_columns<D>(pair, x, c, half, scale);
        reduce_add_8(target + 32 * c, pair);
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

template <typename T, int D>
struct product_maker {
    const gradient_parameters<T> &a;
    gradient_memory<D> &m;
    const int lane, warp;
    float dk[2][D / 2]; /* of either 64 keys */
    ring_place<gradient_stages> stage;
    ring_place<teacher_stages> teacher;
    uint32_t tile;

    __device__ __forceinline__ product_maker(const gradient_parameters<T> &a, gradient_memory<D> &m)
        : a(a), m(m), lane(threadIdx.x & 31), warp(threadIdx.x % 128 / 32), tile(0) {
    }

    /* dS k_proxy: 64 tokens x Dp over 128 keys. */
    __device__ __forceinline__ void begin_dq(float (&dq)[D / 2], uint32_t ds, uint64_t keys) {
        const uint64_t left = operand(ds, 0, 1024);
#pragma unroll
        for (int i = 0; i < block_keys / 16; i++) {
            const uint64_t tokens = left + i / 4 * (tile_tokens * 128 >> 4) + i % 4 * 2;
            if (i == 0) {
                wgmma_new<false, true>(dq, tokens, keys + i * (2048 >> 4), T());
            } else {
                wgmma<false, true>(dq, tokens, keys + i * (2048 >> 4), T());
            }
        }
        wgmma_commit();
    }

    /* dS^T q_proxy: twice 64 keys x Dp over 64 tokens. */
    __device__ __forceinline__ void begin_dk(uint32_t ds, uint32_t rows) {
        const uint64_t right = operand(rows, tile_tokens * 128, 1024);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint64_t left = operand(ds + half * (tile_tokens * 128), 0, 1024);
#pragma unroll
            for (int i = 0; i < tile_tokens / 16; i++)
                wgmma<true, true>(dk[half], left + i * (2048 >> 4), right + i * (2048 >> 4), T());
        }
        wgmma_commit();
    }

    /* keys: operand, all 128. */
    __device__ __forceinline__ void multiply_tile(uint64_t keys, float scale) {
        /* Those who made dS have waited for the rows, and fenced them and dS. A fence here would wait for the terms of
         * the tile before on their way to memory. */
        barrier_wait(shared_address(&m.ds_full[teacher.index]), teacher.phase);
        const uint32_t ds = shared_address(m.teacher[teacher.index]), rows = shared_address(m.rows[stage.index]);
        const token_tile &tokens = m.tokens[tile % token_places];
        const int row = 16 * warp + lane / 4;
        const int32_t place[2] = {tokens.place[row], tokens.place[row + 8]};
        float dq[D / 2];
        pin(dk[0]);
        pin(dk[1]);
        wgmma_fence();
        begin_dq(dq, ds, keys);
        begin_dk(ds, rows);
        wgmma_wait<1>();
        pin(dq);
        if (a.wants_dq && a.w.dq_sums != nullptr) {
            if (place[0] >= 0) add_term<D>(a.w, tokens.term[row], scale, 0, dq);
            if (place[1] >= 0) add_term<D>(a.w, tokens.term[row + 8], scale, 1, dq);
        } else if (a.wants_dq) {
            write_term<D>(a.w, place[0], 0, dq);
            write_term<D>(a.w, place[1], 1, dq);
        }
        wgmma_wait<0>();
        pin(dk[0]);
        pin(dk[1]);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared_address(&m.teacher_empty[teacher.index]));
            barrier_arrive(shared_address(&m.empty[stage.index]));
        }
        teacher.advance();
        stage.advance();
        tile++;
    }

    __device__ __forceinline__ void add_rows(const share_data &s, int64_t head) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = 64 * (i / 2) + 16 * warp + lane / 4 + 8 * (i % 2);
            if (key >= s.keys) continue;
            float *row = a.dk + ((s.key_row + int64_t(key)) * a.dk_heads + head) * D + 4 * (lane & 3);
            if (a.turns == nullptr) {
                add_row<D>(row, dk[i / 2], i % 2);
            } else {
                add_row_in_turn<D>(row, dk[i / 2], i % 2);
            }
        }
    }

    /* Adds the share's dk_proxy, where there are turns when its own has come. */
    __device__ __forceinline__ void add_dk(const share_data &s) {
        if (a.turns == nullptr) {
            add_rows(s, s.proxy_head / a.proxy_heads_per_key_head);
            return;
        }
        int32_t *const turn = a.turns + s.proxy_head * a.w.max_blocks + s.block;
        if (threadIdx.x % 128 == 0) {
            while (atomicAdd(turn, 0) != s.before)
                __nanosleep(64);
            __threadfence();
        }
        named_barrier_sync(2, 128);
        add_rows(s, s.proxy_head);
        __threadfence();
        named_barrier_sync(2, 128);
        if (threadIdx.x % 128 != 0) return;
        __threadfence(); /* what the barrier gathered, not only this thread's own sums */
        atomicExch(turn, s.end);
    }

    __device__ __forceinline__ void run() {
        ring_place<key_buffers> buffer;
        while (true) {
            barrier_wait(shared_address(&m.key_full[buffer.index]), buffer.phase);
            const int32_t tiles = uniform(m.shares[buffer.index].tiles);
            if (tiles == 0) return;
            fence_async_proxy();
            const uint64_t keys = operand(shared_address(m.keys[buffer.index]), block_keys * 128, 1024);
#pragma unroll
            for (int i = 0; i < D / 2; i++)
                dk[0][i] = dk[1][i] = 0;
            const float scale = m.shares[buffer.index].dq_scale;
            for (int32_t t = 0; t < tiles; t++)
                multiply_tile(keys, scale);
            const share_data share = m.shares[buffer.index];
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&m.key_empty[buffer.index]));
            buffer.advance();
            if (a.dk != nullptr) add_dk(share);
        }
    }
};

template <typename T, int D>
__global__ void __launch_bounds__(gradient_threads, 1)
    gradient_kernel(const __grid_constant__ gradient_parameters<T> a) {
    extern __shared__ __align__(1024) char memory[];
    gradient_memory<D> &m = *reinterpret_cast<gradient_memory<D> *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < gradient_stages; i++) {
            barrier_init(shared_address(&m.full[i]), producer_threads + tile_tokens);
            barrier_init(shared_address(&m.empty[i]), 4);
        }
        for (int i = 0; i < teacher_stages; i++) {
            barrier_init(shared_address(&m.teacher_full[i]), producer_threads);
            barrier_init(shared_address(&m.ds_full[i]), 4);
            barrier_init(shared_address(&m.teacher_empty[i]), 4);
        }
        for (int i = 0; i < key_buffers; i++) {
            barrier_init(shared_address(&m.key_full[i]), 2 * producer_threads);
            barrier_init(shared_address(&m.key_empty[i]), 12);
        }
        barrier_init_fence();
    }
    wait_for_grid_before();
    allow_next_grid();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        warpgroup_give_registers<72>();
        produce<T, D>(a, m);
    } else if (role == 3) {
        warpgroup_take_registers<232>();
        product_maker<T, D>(a, m).run();
    } else {
        warpgroup_give_registers<104>();
        difference_maker<T, D>(a, m).run();
    }
}

/* ---- Host. ---- */

constexpr double log_2 = 0.69314718055994530942;

/* A tile's rows of one place, 64 keys at a time. */
static fmsa_status map_teacher(const proxy_work &w, CUtensorMap *map) {
    fmsa_tensor_map_shape shape = {};
    shape.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    shape.element_bytes = 2;
    shape.rank = 3;
    shape.size[0] = vector_length;
    shape.size[1] = w.places;
    shape.size[2] = int64_t(w.row_end - w.row_begin) * w.proxy_heads;
    shape.stride[1] = vector_length;
    shape.stride[2] = int64_t(w.places) * vector_length;
    shape.box[0] = 64;
    shape.box[1] = 1;
    shape.box[2] = tile_tokens;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, w.vectors, &shape);
}

template <typename T, int D>
static fmsa_status launch_gradient(const fmsa_problem *problem, const fmsa_tensors *t, const fmsa_sm90_proxy &proxy,
                                   const group_memory &group, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    gradient_parameters<T> p = {};
    p.w = group.work;
    p.q_proxy = view<const T>(t->q_proxy);
    p.k_proxy = view<const T>(t->k_proxy);
    p.proxy_heads_per_key_head = c->num_proxy_heads / c->num_proxy_kv_heads;
    p.scale_log2 = static_cast<float>(c->proxy_scale * log2_e);
    p.wants_dq = t->dq_proxy.data != nullptr;
    p.kl = t->kl == nullptr ? nullptr : group.kl_sums;
    p.kl_sum = proxy.kl;
    p.kl_value = static_cast<float *>(t->kl);
    p.kl_factor = kl_factor(problem) * log_2;
    p.dk = proxy.dk;
    p.dk_heads = dk_sum_heads(problem);
    p.turns = in_order(problem) ? proxy.turns : nullptr;
    if (is_dense(problem)) {
        FMSA_TRY(map_token_rows(problem, t->q_proxy, &p.q_map));
        FMSA_TRY(map_teacher(p.w, &p.teacher_map));
    }
    unsigned blocks;
    FMSA_TRY(multiprocessors(&blocks));
    return launch_close("proxy loss", gradient_kernel<T, D>, dim3(blocks), gradient_threads, sizeof(gradient_memory<D>),
                        stream, p);
}

fmsa_status differ_from_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy &proxy,
                                const group_memory &group, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    return with_16_bit_type_and_dim(c->dtype, c->proxy_head_dim, [&](auto type, auto dim) {
        return launch_gradient<decltype(type), decltype(dim)::value>(problem, tensors, proxy, group, stream);
    });
}

} // namespace fmsa::proxy
