/* What the kernels of the Hopper proxy loss share: the group of rows and places they work on, its shares, and the
 * producer's part: rows gathered into shared memory.
 *
 * A *share* is one key block and at most share_rows of the tokens that attend to it through one proxy head. Shares are
 * numbered by (segment of query rows, proxy head, block), so that neighbours meet the same rows in L2, and the shares
 * of one list come in the order of its rows. Persistent thread blocks take them by ticket, in that order: one may wait
 * for those before it. A share is walked in tiles of 64 tokens.
 *
 * Memory of a group: for each (proxy head, row, place) a vector of 128 16-bit numbers, which is the teacher's row, and
 * one fp32 number, the place's part of the student's LSE. dq_proxy is summed in one of two ways. In fp16: each (proxy
 * head, row) has a vector of sums for every 64 places, which tiles add to in any order, under a scale that bounds them.
 * Or by terms, one a place: the kernel that reads a vector writes the term in its place, and its scale in the number's,
 * and the terms are added up in their order. */
#ifndef FMSA_CUDA_SM90_PROXY_CUH
#define FMSA_CUDA_SM90_PROXY_CUH

#include "launch.h"
#include "portable_parts.cuh"
#include "sm90.cuh"
#include "sm90_proxy.h"
#include "tensor_map.h"

namespace fmsa::proxy {

constexpr int tile_tokens = 64, block_keys = FMSA_SM90_TEACHER_KEYS, vector_length = FMSA_SM90_TEACHER_KEYS;
constexpr int producer_threads = 128, batch_tokens = 512, token_places = 8;
/* Of so many neighbouring places terms of dq_proxy may be summed in fp16: it errs by 1.2e-3 of 64 random ones. */
constexpr int term_places = 64;
constexpr size_t most_block_memory = 227 * 1024; /* shared memory of a thread block */

struct proxy_share {
    int64_t begin; /* first edge; in dense mode first query row */
    int32_t count; /* tokens, at least 1 */
    int32_t block; /* block id */
    int32_t proxy_head;
    int32_t reserved;
};

/* The first of 0 ... count - 1 with values[i] >= bound in an ascending array, or count. */
__device__ __forceinline__ int32_t first_at_least(const int32_t *values, int32_t count, int32_t bound) {
    int32_t low = 0, high = count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (values[middle] >= bound) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

enum { STUDENT_TICKET, TEACHER_TICKET, GRADIENT_TICKET, DONE_TICKET, TICKETS };

/* A group (sm90_proxy.h) as the kernels see it. The schedule's arrays are NULL in dense mode. */
struct proxy_work {
    fmsa_cuda_geometry geometry;
    const int64_t *list_begin;
    const int32_t *edge_row, *edge_slot, *row_count;
    int64_t max_blocks;
    int32_t total_q, proxy_heads;
    int32_t row_begin, row_end;
    int32_t first_block, places;
    int32_t segment_rows, share_rows; /* equal in dense mode; share_rows a multiple of 64 */

    proxy_share *shares;
    int32_t *num_shares;
    int32_t *group_shares; /* [segments][proxy heads] */
    uint32_t *tickets;     /* [TICKETS] one for each kernel that walks the shares, one for those that are done; 0 at
                              first */
    float *numbers;        /* [proxy heads][rows][places] */
    uint16_t *vectors;     /* the same, of vector_length */
    float *student_lse;    /* [proxy heads][total_q], times log2(e) */

    /* NULL, or dq_proxy's sums: [proxy heads][rows][sum_terms] vectors, fp16, place p in term p / term_places. They are
     * sums of dS k_proxy times dq_scale() of the document, which bounds them. */
    uint16_t *dq_sums;
    int32_t sum_terms;
    int32_t key_heads, proxy_heads_per_key_head;
    uint32_t *key_bounds; /* [max_blocks][key heads]: greatest |element of k_proxy| of the document of first block id,
                             bits of floats that are not negative, so that they compare as integers */

    __device__ __forceinline__ bool dense() const {
        return edge_row == nullptr;
    }
    __device__ __forceinline__ int64_t row_number(int32_t proxy_head, int32_t row) const {
        return int64_t(proxy_head) * (row_end - row_begin) + (row - row_begin);
    }
    /* The power of two under which terms of a document's rows are summed. A row's r and its w sum to 1 each, so no sum
     * of some of its terms exceeds twice the greatest element of k_proxy; scaled it stays below 2^15, half of what fp16
     * holds. */
    __device__ __forceinline__ float dq_scale(int32_t first_block, int32_t proxy_head) const {
        const uint32_t bound = key_bounds[int64_t(first_block) * key_heads + proxy_head / proxy_heads_per_key_head];
        const int32_t exponent = static_cast<int32_t>(bound >> 23) - 126; /* bound < 2^exponent */
        return bound == 0 ? 1 : __uint_as_float(static_cast<uint32_t>(min(14 - exponent, 126) + 127) << 23);
    }
    /* How many of a row's places exist: the first so many. */
    __device__ __forceinline__ int32_t places_of(int32_t proxy_head, int32_t row) const {
        if (!dense()) return row_count[int64_t(proxy_head) * total_q + row];
        const int32_t position = geometry.row_position[row];
        const int32_t blocks = position < 0 ? 0 : position / block_keys + 1;
        return min(max(blocks - first_block, 0), places);
    }
};

/* ---- Tokens. ---- */

/* The tokens of a tile, for the consumers. */
struct token_tile {
    int32_t limit[tile_tokens];        /* last key of the block that the token sees; negative: no token */
    int32_t place[tile_tokens];        /* number of (proxy head, row, place); negative: no token */
    int32_t term[tile_tokens];         /* number of the vector in dq_sums, if there are any */
    float lse[tile_tokens];            /* student's; +inf: no token, or not asked for */
    uint32_t masked[tile_tokens / 32]; /* whether any of 32 tokens does not see all 128 keys */
    uint32_t reserved[2];
};

/* A batch of the tokens of a share, for the producer alone: looked up all at once, so that the latency of memory counts
 * once a batch. */
struct token_batch {
    /* Rows of a tile, and places, stand as tile_rows_of_thread reads them. Negative: no token; such a row is not read.
     */
    alignas(16) int32_t row[batch_tokens], place[batch_tokens];
    int32_t limit[batch_tokens], term[batch_tokens];
    float lse[batch_tokens];
    int32_t whole[batch_tokens / 32]; /* whether 32 are neighbouring tokens of dense mode */

    __device__ __forceinline__ bool whole_tile(int32_t first) const {
        return (whole[first / 32] & whole[first / 32 + 1]) != 0;
    }
};

/* A place in a ring and how often the ring has been passed: a consumer waits for `phase`, a producer for the other. */
template <int count>
struct ring_place {
    int32_t index;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit ring_place(int32_t first = 0) : index(first) {
    }
    /* step: at most count */
    __device__ __forceinline__ void advance(int32_t step = 1) {
        index += step;
        if (index >= count) {
            index -= count;
            phase ^= 1;
        }
    }
};

/* ---- Copies by the producer: cp.async, since rows lie anywhere. 16-byte chunks go where the 128-byte swizzle of wgmma
 * expects them; 64 columns after 64 columns. What is not there is 0. ---- */

template <int rows>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return chunk / 8 * (rows * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

/* A tile's rows of `chunks` chunks each, as the threads of the producer share them: thread i has chunk i % chunks of
 * every row i / chunks + rows_at_once * n. The numbers of a thread's rows stand side by side. */
template <int chunks_a_row>
struct tile_rows_of_thread {
    static constexpr int chunks = chunks_a_row, rows_at_once = producer_threads / chunks;
    static constexpr int count = tile_tokens / rows_at_once;
    uint32_t number[count]; /* of rows of the tensor; negative as an int32_t: none */

    static __device__ __forceinline__ int chunk() {
        return threadIdx.x % chunks;
    }
    /* Where the number of a tile's row stands among those of the tile. */
    static __device__ __forceinline__ int slot(int row) {
        return row % rows_at_once * count + row / rows_at_once;
    }
    /* numbers: those of the tile. To be read before they are needed, since no read passes a copy. */
    __device__ __forceinline__ void read(const int32_t *numbers) {
        const int4 *own = reinterpret_cast<const int4 *>(numbers + threadIdx.x / chunks * count);
#pragma unroll
        for (int n = 0; n < count; n += 4) {
            const int4 four = own[n / 4];
            number[n] = four.x, number[n + 1] = four.y, number[n + 2] = four.z, number[n + 3] = four.w;
        }
    }
    /* Copies the thread's chunks of the rows, row_bytes apart from `begin` on, to a tile at `destination`. */
    __device__ __forceinline__ void copy(uint32_t destination, const void *begin, int64_t row_bytes) const {
        const uint32_t own = destination + chunk_offset<tile_tokens>(threadIdx.x / chunks, chunk());
        const char *const source = pinned(static_cast<const char *>(begin) + 16 * chunk());
#pragma unroll
        for (int n = 0; n < count; n++) {
            const bool absent = static_cast<int32_t>(number[n]) < 0;
            cp_async_16_unless(absent, own + n * (rows_at_once * 128), source + uint64_t(number[n]) * row_bytes);
        }
    }
};

template <int D, typename T>
__device__ __forceinline__ void load_token_rows(uint32_t destination, const tile_rows_of_thread<D / 8> &rows,
                                                const view<const T> &q, int64_t head) {
    rows.copy(destination, q.at(0, head), q.row_stride * int64_t(sizeof(T)));
}

/* By the TMA, where a tile's rows are neighbours: copies by cp.async pass shared memory in small pieces. Every thread
 * of the producer arrives, as after copies of its own. `loads` issues the copies. */
template <typename F>
__device__ __forceinline__ void arrive_with_loads(uint32_t barrier, uint32_t bytes, F loads) {
    if (threadIdx.x != 0) {
        barrier_arrive(barrier);
        return;
    }
    barrier_arrive_expect(barrier, bytes);
    loads();
}

/* map: of token rows, see map_token_rows(). */
template <int D>
__device__ __forceinline__ void load_whole_rows(uint32_t destination, const CUtensorMap *map, uint32_t barrier,
                                                int32_t head, int32_t row) {
    arrive_with_loads(barrier, tile_tokens * D * 2, [&] {
        for (int column = 0; column < D; column += 64)
            tma_load_3d(destination + column * (tile_tokens * 2), map, barrier, column, head, row);
    });
}

template <int D, typename T>
__device__ __forceinline__ void load_key_rows(uint32_t destination, const view<const T> &k, int32_t key_row,
                                              int32_t keys, int64_t head) {
    constexpr int chunks = D / 8, rows_at_once = producer_threads / chunks;
    const int chunk = threadIdx.x % chunks, first = threadIdx.x / chunks;
#pragma unroll 4
    for (int i = 0; i < block_keys / rows_at_once; i++) {
        const int r = first + i * rows_at_once;
        const bool there = r < keys;
        cp_async_16(destination + chunk_offset<block_keys>(r, chunk), k.at(key_row + (there ? r : 0), head) + 8 * chunk,
                    there);
    }
}

/* ---- Shares, on the producer's side. ---- */

struct block_place {
    int32_t key_row, keys; /* first key, and how many there are */
    int32_t position;      /* of the first key within its document */
    int32_t dense_place;   /* of the block in the group, in dense mode */

    __device__ __forceinline__ block_place(const proxy_work &w, int32_t block) {
        const fmsa_cuda_geometry &g = w.geometry;
        key_row = g.block_k_begin[block];
        keys = g.block_k_end[block] - key_row;
        position = g.block_number[block] * block_keys;
        dense_place = g.block_number[block] - w.first_block;
    }
};

__device__ __forceinline__ int32_t tiles_of(const proxy_share &s) {
    return (s.count + tile_tokens - 1) / tile_tokens;
}

/* The next share, by ticket, and its number. Whether there is one. All threads of the producer call, and pass another
 * of its barriers before they call again. shared: one number in shared memory. */
__device__ __forceinline__ bool take_share(const proxy_work &w, int ticket, int32_t *shared, proxy_share &s,
                                           int32_t &number) {
    const int32_t shares = *w.num_shares;
    if (threadIdx.x == 0) *shared = static_cast<int32_t>(atomicAdd(w.tickets + ticket, 1u));
    named_barrier_sync(1, producer_threads);
    number = uniform(*static_cast<volatile int32_t *>(shared));
    if (number >= shares) return false;
    s = w.shares[number];
    return true;
}

/* A thread's tokens of the next batch. Asked for a batch ahead, where there are the registers: then their latency does
 * not count. */
struct next_tokens {
    static constexpr int count = batch_tokens / producer_threads;
    int32_t row[count], slot[count]; /* row negative: no token. slot: sparse mode */

    /* From number `first` of a share on; behind the last there are none. */
    __device__ __forceinline__ void ask(const proxy_work &w, const proxy_share &s, int32_t first) {
#pragma unroll
        for (int n = 0; n < count; n++) {
            const int32_t i = first + threadIdx.x + n * producer_threads;
            row[n] = -1;
            slot[n] = 0;
            if (i >= s.count) continue;
            row[n] = w.dense() ? int32_t(s.begin) + i : w.edge_row[s.begin + i];
            if (!w.dense()) slot[n] = w.edge_slot[s.begin + i];
        }
    }
};

/* The tokens from number `first` of a share on, which have been asked for; asks for those of the next batch if it is to
 * look ahead. Called by all threads of the producer; afterwards all of them may read the batch, whose rows have
 * `chunks` chunks. */
template <int chunks, bool with_lse, bool with_whole, bool ahead>
__device__ __forceinline__ void find_tokens(const proxy_work &w, const proxy_share &s, const block_place &block,
                                            int32_t first, next_tokens &next, token_batch &batch) {
    typedef tile_rows_of_thread<chunks> token_rows;
    typedef tile_rows_of_thread<vector_length / 8> teacher_rows;
    constexpr int a_thread = next_tokens::count;
    int32_t row[a_thread], place[a_thread];
#pragma unroll
    for (int n = 0; n < a_thread; n++) {
        row[n] = next.row[n];
        place[n] = w.dense() ? block.dense_place : next.slot[n];
    }
    int32_t position[a_thread];
    float lse[a_thread];
#pragma unroll
    for (int n = 0; n < a_thread; n++) {
        position[n] = -1;
        lse[n] = INFINITY;
        if (row[n] < 0) continue;
        position[n] = w.geometry.row_position[row[n]];
        if (with_lse) lse[n] = w.student_lse[int64_t(s.proxy_head) * w.total_q + row[n]];
    }
    if (ahead) next.ask(w, s, first + batch_tokens);
    named_barrier_sync(1, producer_threads); /* All have read the batch before. */
#pragma unroll
    for (int n = 0; n < a_thread; n++) {
        const int32_t i = threadIdx.x + n * producer_threads, tile = i / tile_tokens * tile_tokens;
        const int32_t limit = position[n] < 0 ? -1 : position[n] - block.position;
        const bool there = limit >= 0;
        batch.limit[i] = limit;
        batch.row[tile + token_rows::slot(i % tile_tokens)] = there ? row[n] : -1;
        const int64_t vector = there ? w.row_number(s.proxy_head, row[n]) : 0;
        batch.place[tile + teacher_rows::slot(i % tile_tokens)] = there ? int32_t(vector * w.places) + place[n] : -1;
        batch.term[i] = int32_t(vector) * w.sum_terms + place[n] / term_places;
        batch.lse[i] = there ? lse[n] : INFINITY;
        if (!with_whole) continue;
        const bool whole = __all_sync(0xffffffffu, there) && w.dense();
        if (i % 32 == 0) batch.whole[i / 32] = whole;
    }
    named_barrier_sync(1, producer_threads);
}

/* The tile from token `first` of the batch on, by the first two warps of the producer. */
__device__ __forceinline__ void keep_tile(const token_batch &tokens, int32_t first, token_tile &tile) {
    const int i = threadIdx.x, from = first + i;
    const int32_t limit = tokens.limit[from];
    tile.limit[i] = limit;
    tile.place[i] = tokens.place[first + tile_rows_of_thread<vector_length / 8>::slot(i)];
    tile.term[i] = tokens.term[from];
    tile.lse[i] = tokens.lse[from];
    const uint32_t masked = __any_sync(0xffffffffu, limit < block_keys - 1);
    if (i % 32 == 0) tile.masked[i / 32] = masked;
}

/* What the consumers must know of a share. */
struct share_data {
    int32_t tiles; /* 0: there are no more shares */
    int32_t key_row, keys;
    int32_t proxy_head, block;
    int32_t number;      /* of the share */
    int32_t before, end; /* tokens of the block's list before the share, and up to its end */
    float dq_scale;      /* where there are dq_sums */
};

__device__ __forceinline__ void describe_share(const proxy_work &w, const proxy_share &s, const block_place &block,
                                               int32_t number, share_data &data) {
    data.tiles = tiles_of(s);
    data.key_row = block.key_row;
    data.keys = block.keys;
    data.proxy_head = s.proxy_head;
    data.block = s.block;
    data.number = number;
    const int64_t list =
        w.dense() ? int64_t(w.geometry.block_q_begin[s.block]) : w.list_begin[s.proxy_head * w.max_blocks + s.block];
    data.before = static_cast<int32_t>(s.begin - list);
    data.end = data.before + s.count;
    if (w.dq_sums != nullptr) data.dq_scale = w.dq_scale(s.block - block.position / block_keys, s.proxy_head);
}

/* ---- Products. ---- */

/* Begins S^T = K Q^T: 64 keys x 64 tokens over D columns. keys: an operand of a tile of 128 keys, from the first of the
 * 64 on. */
template <int D, typename T>
__device__ __forceinline__ void multiply_keys_by_rows(float (&s)[32], uint64_t keys, uint64_t rows, T type) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        const uint64_t k = keys + d / 4 * (block_keys * 128 >> 4) + d % 4 * 2;
        const uint64_t q = rows + d / 4 * (tile_tokens * 128 >> 4) + d % 4 * 2;
        if (d == 0) {
            wgmma_new(s, k, q, type);
        } else {
            wgmma(s, k, q, type);
        }
    }
    wgmma_commit();
}

constexpr int kl_sums_a_share = 8; /* one a warp */

/* ---- Host: the parts of a group's memory, and the launchers. ---- */

struct group_memory {
    proxy_work work;
    float *kl_sums; /* [shares][8] */
    int64_t max_shares;
    float *dq; /* dense mode: [rows][proxy heads][Dp] sums so far */
    size_t bytes;
};

/* computed: the teacher is made from q, k, lse, so neighbours should meet the same rows of q. */
group_memory take_group(const fmsa_problem *problem, const fmsa_sm90_proxy &proxy, const fmsa_sm90_proxy_group &group,
                        void *memory, int32_t planes, bool computed);

/* Dense mode: a tile's rows of one proxy head, 64 columns at a time, as load_token_rows() leaves them. */
fmsa_status map_token_rows(const fmsa_problem *problem, const fmsa_tensor &q_proxy, CUtensorMap *map);

/* Finds the shares of the group and sets the tickets to 0: counts them, which needs nothing but the schedule, then
 * lists them. wait_first: whether a kernel waits for the one before it. Counting must where that one may use memory
 * that the counts go to; listing must where it follows the counting directly, and otherwise may run beside a kernel
 * that has waited for the counting before it let the next one begin. find_shares() does both; wait_first is the
 * counting's. */
fmsa_status count_shares(const proxy_work &w, bool wait_first, cudaStream_t stream);
fmsa_status list_shares(const proxy_work &w, bool wait_first, cudaStream_t stream);
fmsa_status find_shares(const proxy_work &w, bool wait_first, cudaStream_t stream);

/* Beside the kernel before it, which is none that uses the sums. */
fmsa_status clear_dq_sums(const proxy_work &w, cudaStream_t stream);

/* The LSE of the rows over the places of the group, whose shares have been found. first: nothing was there before.
 * close: whether the large kernel may start while the one before it ends. */
fmsa_status student_lse(const fmsa_problem *problem, const fmsa_tensors *tensors, const proxy_work &w, bool first,
                        bool close, cudaStream_t stream);

/* Adds the planes of the teacher to the first. */
fmsa_status add_planes(const proxy_work &w, int64_t plane_halves, int32_t planes, cudaStream_t stream);

/* Makes the teacher from q, k, lse, in the group's vectors. */
fmsa_status make_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors, const proxy_work &w,
                         cudaStream_t stream);

/* Whether dq_proxy is summed in fp16: not where the order must not count, nor where the result keeps 11 bits. */
inline bool sums_dq(const fmsa_problem *problem) {
    return problem->config.dtype == FMSA_DTYPE_BF16 && !in_order(problem) &&
           (is_dense(problem) || problem->slots <= term_places);
}

/* Finds bounds, 0 at first: those of the group's kind of work, see proxy_work. */
fmsa_status find_key_bounds(const fmsa_problem *problem, const fmsa_tensors *tensors,
                            const fmsa_cuda_geometry &geometry, uint32_t *bounds, cudaStream_t stream);

/* The terms of dq_proxy, dk_proxy's sums and the KL value so far, from the teacher in the group's vectors. */
fmsa_status differ_from_teacher(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_sm90_proxy &proxy,
                                const group_memory &group, cudaStream_t stream);

/* Adds the terms to those of the chunk's groups before; after the last they are dq_proxy. */
fmsa_status add_terms(const fmsa_problem *problem, const fmsa_tensors *t, const group_memory &group, bool first,
                      bool last, cudaStream_t stream);

/* dS is multiplied by this before it is rounded: fp16 would lose what is below 2^-24. */
template <typename T>
constexpr float ds_scale = 1;
template <>
inline constexpr float ds_scale<__half> = 1 << 14;

inline float ds_scale_of(const fmsa_problem *problem) {
    return problem->config.dtype == FMSA_DTYPE_FP16 ? ds_scale<__half> : 1;
}

/* Sums of dk_proxy for a key: those that turns keep apart, or one a key head. */
inline int32_t dk_sum_heads(const fmsa_problem *problem) {
    return in_order(problem) ? problem->config.num_proxy_heads : problem->config.num_proxy_kv_heads;
}

/* 1 / N; without queries N may be 0, and so is every sum. */
inline double kl_factor(const fmsa_problem *problem) {
    return problem->config.kl_count == 0 ? 0 : 1 / static_cast<double>(problem->config.kl_count);
}

/* Thread blocks of a persistent kernel: one a multiprocessor. */
fmsa_status multiprocessors(unsigned *count);

template <typename F>
fmsa_status with_16_bit_type_and_dim(fmsa_dtype dtype, int dim, F f) {
    const auto with_dim = [&](auto type) {
        if (dim == 64) return f(type, constant<64>());
        return f(type, constant<128>());
    };
    if (dtype == FMSA_DTYPE_FP16) return with_dim(__half());
    return with_dim(__nv_bfloat16());
}

} // namespace fmsa::proxy

#endif
