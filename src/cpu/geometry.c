#include "geometry.h"

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

fmsa_cpu_geometry fmsa_cpu_take_geometry(const fmsa_problem *problem, fmsa_cpu_arena *arena) {
    fmsa_cpu_geometry geometry = {0};
    geometry.fragment_first_block = fmsa_cpu_take(arena, problem->config.num_fragments, sizeof(int32_t));
    geometry.block_k_begin = fmsa_cpu_take(arena, problem->max_key_blocks, sizeof(int32_t));
    geometry.block_keys = fmsa_cpu_take(arena, problem->max_key_blocks, sizeof(int32_t));
    return geometry;
}

fmsa_cpu_schedule fmsa_cpu_take_schedule(const fmsa_problem *problem, fmsa_cpu_arena *arena) {
    const fmsa_config *c = &problem->config;
    fmsa_cpu_schedule schedule;
    schedule.stamp = fmsa_cpu_take(arena, 1, sizeof(uint64_t));
    schedule.begin = fmsa_cpu_take(arena, c->num_proxy_heads * (problem->max_key_blocks + 1), sizeof(int64_t));
    schedule.rows = fmsa_cpu_take(arena, c->num_proxy_heads * c->total_q * problem->slots, sizeof(int32_t));
    return schedule;
}

/* A step of FNV-1a, taking 64 bits at a time. */
static uint64_t mix(uint64_t hash, int64_t value) {
    return (hash ^ (uint64_t)value) * 0x100000001b3u;
}

uint64_t fmsa_cpu_schedule_stamp(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    const int64_t shape[] = {c->num_proxy_heads, c->block_size, problem->slots,
                             c->total_q,         c->total_k,    c->num_fragments};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        hash = mix(hash, shape[i]);
    for (int64_t f = 0; f < c->num_fragments; f++)
        hash = mix(mix(mix(mix(hash, c->q_begin[f]), c->q_end[f]), c->k_begin[f]), c->k_end[f]);
    return hash;
}

void fmsa_cpu_fill_geometry(const fmsa_problem *problem, fmsa_cpu_geometry *geometry) {
    const fmsa_config *c = &problem->config;
    int64_t blocks = 0;
    for (int64_t f = 0; f < c->num_fragments;) {
        const int64_t k_begin = c->k_begin[f];
        int64_t k_end = k_begin;
        const int64_t first_block = blocks;
        for (; f < c->num_fragments && c->k_begin[f] == k_begin; f++) {
            geometry->fragment_first_block[f] = (int32_t)first_block;
            if (c->k_end[f] > k_end) k_end = c->k_end[f];
        }
        for (int64_t key = k_begin; key < k_end; key += c->block_size) {
            geometry->block_k_begin[blocks] = (int32_t)key;
            geometry->block_keys[blocks] = (int32_t)min64(c->block_size, k_end - key);
            blocks++;
        }
    }
    geometry->num_blocks = blocks;
}

int64_t fmsa_cpu_find_fragment(const fmsa_problem *problem, int64_t row) {
    const fmsa_config *c = &problem->config;
    int64_t low = 0, high = c->num_fragments;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (c->q_end[middle] > row) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Position of a row of fragment f among the keys of the fragment. */
static int64_t row_position(const fmsa_config *c, int64_t f, int64_t row) {
    return (int64_t)(c->k_end[f] - c->k_begin[f]) - (c->q_end[f] - row);
}

void fmsa_cpu_positions(const fmsa_problem *problem, int64_t row_begin, int64_t row_end, int32_t *positions) {
    const fmsa_config *c = &problem->config;
    int64_t row = row_begin;
    for (int64_t f = fmsa_cpu_find_fragment(problem, row_begin); f < c->num_fragments && row < row_end; f++) {
        for (; row < row_end && row < c->q_begin[f]; row++)
            positions[row - row_begin] = -1;
        for (; row < row_end && row < c->q_end[f]; row++) {
            positions[row - row_begin] = (int32_t)row_position(c, f, row);
        }
    }
    for (; row < row_end; row++)
        positions[row - row_begin] = -1;
}

bool fmsa_cpu_next_segment(const fmsa_problem *problem, const fmsa_cpu_geometry *geometry, int64_t row_begin,
                           int64_t row_end, fmsa_cpu_segment *segment) {
    const fmsa_config *c = &problem->config;
    int64_t f = segment->fragment_end;
    if (f >= c->num_fragments || c->q_begin[f] >= row_end) return false;
    segment->fragment_begin = f;
    segment->row_begin = (int32_t)(c->q_begin[f] > row_begin ? c->q_begin[f] : row_begin);
    segment->row_end = segment->row_begin;
    segment->first_block = geometry->fragment_first_block[f];
    segment->num_blocks = 0;
    const int32_t k_begin = c->k_begin[f];
    for (; f < c->num_fragments && c->k_begin[f] == k_begin && c->q_begin[f] < row_end; f++) {
        const int64_t end = min64(c->q_end[f], row_end);
        if (c->q_begin[f] >= end) continue;
        const int32_t blocks = (int32_t)(row_position(c, f, end - 1) / c->block_size + 1);
        if (blocks > segment->num_blocks) segment->num_blocks = blocks;
        segment->row_end = (int32_t)end;
    }
    segment->fragment_end = f;
    return true;
}

/* The first place in ascending rows[0 ... count] whose row is not less than row. */
static int64_t lower_bound(const int32_t *rows, int64_t count, int64_t row) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (rows[middle] < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

fmsa_cpu_list fmsa_cpu_sparse_list(const fmsa_problem *problem, const fmsa_cpu_schedule *schedule, int32_t proxy_head,
                                   int32_t block, int64_t row_begin, int64_t row_end) {
    const int64_t *begin = schedule->begin + proxy_head * (problem->max_key_blocks + 1) + block;
    const int32_t *rows = schedule->rows + begin[0];
    const int64_t length = begin[1] - begin[0];
    const int64_t first = lower_bound(rows, length, row_begin);
    const int64_t count = lower_bound(rows + first, length - first, row_end);
    return (fmsa_cpu_list){rows + first, count, first > 0 ? rows[first - 1] : -1};
}

/* The last row before chunk_begin of the segment's document that sees the key at a position. */
static int32_t last_row_before(const fmsa_config *c, const fmsa_cpu_segment *segment, int64_t chunk_begin,
                               int64_t key_position) {
    const int64_t first = segment->fragment_begin;
    for (int64_t f = first; f >= 0 && c->k_begin[f] == c->k_begin[first]; f--) {
        const int64_t end = min64(c->q_end[f], chunk_begin);
        if (end > c->q_begin[f] && row_position(c, f, end - 1) >= key_position) return (int32_t)(end - 1);
    }
    return -1;
}

fmsa_cpu_list fmsa_cpu_dense_list(const fmsa_problem *problem, const fmsa_cpu_segment *segment, int32_t block,
                                  int64_t chunk_begin, const int32_t *positions, int32_t *memory) {
    const fmsa_config *c = &problem->config;
    const int64_t key_position = (int64_t)(block - segment->first_block) * c->block_size;
    int64_t count = 0;
    for (int32_t row = segment->row_begin; row < segment->row_end; row++) {
        if (positions[row - chunk_begin] >= key_position) memory[count++] = row;
    }
    return (fmsa_cpu_list){memory, count, last_row_before(c, segment, chunk_begin, key_position)};
}
