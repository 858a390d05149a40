#include "matrix.h"

#include <stdbool.h>

#include "convert.h"

/* ---- The matrix product. ---- */

/* One register tile: rows and vectors are constants where this is inlined. A's element (i, k) is
 * a[i * row_step + k * depth_step]. */
ALWAYS_INLINE void register_tile(int rows, int vectors, bool add, int64_t depth, const real *restrict a,
                                 int64_t row_step, int64_t depth_step, const real *restrict b, int64_t ldb,
                                 real *restrict c, int64_t ldc) {
    vec sum[TILE_ROWS][TILE_VECTORS];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? vec_load(c + i * ldc + j * LANES) : vec_all(0);
    }
    for (int64_t k = 0; k < depth; k++) {
        vec right[TILE_VECTORS];
        UNROLL
        for (int j = 0; j < vectors; j++)
            right[j] = vec_load(b + k * ldb + j * LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            const vec left = vec_all(a[i * row_step + k * depth_step]);
            UNROLL
            for (int j = 0; j < vectors; j++)
                sum[i][j] += left * right[j];
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            vec_store(c + i * ldc + j * LANES, sum[i][j]);
    }
}

/* All rows of a column panel of `vectors` vectors, in register tiles of TILE_ROWS rows, then half of that, then 2
 * and 1. */
ALWAYS_INLINE void column_panel(int vectors, bool add, int64_t m, int64_t depth, const real *a, int64_t row_step,
                                int64_t depth_step, const real *b, int64_t ldb, real *c, int64_t ldc) {
    enum { HALF = TILE_ROWS / 2 };
    int64_t i = 0;
#define TILES_OF(rows)                                                                                                 \
    for (; i + (rows) <= m; i += (rows)) {                                                                             \
        register_tile(rows, vectors, add, depth, a + i * row_step, row_step, depth_step, b, ldb, c + i * ldc, ldc);    \
    }
    TILES_OF(TILE_ROWS)
    TILES_OF(HALF)
    TILES_OF(2)
    TILES_OF(1)
#undef TILES_OF
}

ALWAYS_INLINE void product(bool add, int64_t m, int64_t n, int64_t depth, const real *a, int64_t row_step,
                           int64_t depth_step, const real *b, int64_t ldb, real *c, int64_t ldc) {
    const int64_t columns = fmsa_cpu_padded(n);
    int64_t j = 0;
    for (; j + TILE_VECTORS * LANES <= columns; j += TILE_VECTORS * LANES) {
        column_panel(TILE_VECTORS, add, m, depth, a, row_step, depth_step, b + j, ldb, c + j, ldc);
    }
    for (; j < columns; j += LANES) {
        column_panel(1, add, m, depth, a, row_step, depth_step, b + j, ldb, c + j, ldc);
    }
}

void gemm(int64_t m, int64_t n, int64_t depth, const real *a, int64_t lda, const real *b, int64_t ldb, real *c,
          int64_t ldc) {
    product(false, m, n, depth, a, lda, 1, b, ldb, c, ldc);
}

void gemm_transposed_add(int64_t m, int64_t n, int64_t depth, const real *a, int64_t lda, const real *b, int64_t ldb,
                         real *c, int64_t ldc) {
    product(true, m, n, depth, a, 1, lda, b, ldb, c, ldc);
}

/* ---- Rows in and out. ---- */

void load_row(fmsa_dtype dtype, const void *row, int64_t count, real scale, real *restrict to) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of_bf16(((const uint16_t *)row)[i]) * scale;
        return;
    case FMSA_DTYPE_FP16:
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of_fp16(((const uint16_t *)row)[i]) * scale;
        return;
    case FMSA_DTYPE_FP32:
        for (int64_t i = 0; i < count; i++)
            to[i] = ((const float *)row)[i] * scale;
        return;
    case FMSA_DTYPE_FP64:
        for (int64_t i = 0; i < count; i++)
            to[i] = (real)((const double *)row)[i] * scale;
        return;
    }
}

void store_row(fmsa_dtype dtype, const real *restrict from, int64_t count, real scale, void *row) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)row)[i] = bf16_of_float((float)(from[i] * scale));
        return;
    case FMSA_DTYPE_FP16:
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)row)[i] = fp16_of_float((float)(from[i] * scale));
        return;
    case FMSA_DTYPE_FP32:
        for (int64_t i = 0; i < count; i++)
            ((float *)row)[i] = (float)(from[i] * scale);
        return;
    case FMSA_DTYPE_FP64:
        for (int64_t i = 0; i < count; i++)
            ((double *)row)[i] = from[i] * scale;
        return;
    }
}

/* Rows of a list lie where no hardware prefetcher expects them: each is asked for some pairs ahead. */
void gather_pairs(fmsa_dtype dtype, const fmsa_tensor *tensor, const row_head *pairs, int64_t count, int64_t first_head,
                  int64_t dim, real scale, real *to, int64_t ld) {
    enum { AHEAD = 12, LINE = 64 };
    const int64_t row_bytes = dim * (int64_t)element_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            const row_head *later = &pairs[i + AHEAD];
            const char *next = tensor_row(dtype, tensor, later->row, first_head + later->head);
            for (int64_t byte = 0; byte < row_bytes; byte += LINE)
                __builtin_prefetch(next + byte);
        }
        load_row(dtype, tensor_row(dtype, tensor, pairs[i].row, first_head + pairs[i].head), dim, scale, to + i * ld);
    }
}

void pack_rows(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row_begin, int64_t count, int64_t head, int64_t dim,
               real *to, int64_t ld) {
    const int64_t columns = fmsa_cpu_padded(dim);
    for (int64_t i = 0; i < count; i++) {
        load_row(dtype, tensor_row(dtype, tensor, row_begin + i, head), dim, 1, to + i * ld);
        for (int64_t d = dim; d < columns; d++)
            to[i * ld + d] = 0;
    }
}

void pack_transposed(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row_begin, int64_t count, int64_t head,
                     int64_t dim, real *to, int64_t ld) {
    enum { GROUP = FMSA_CPU_PANEL };
    const int64_t columns = fmsa_cpu_padded(count);
    real rows[GROUP][256 + GROUP];
    for (int64_t i = 0; i < columns; i += GROUP) {
        for (int64_t j = 0; j < GROUP; j++) {
            if (i + j < count) {
                load_row(dtype, tensor_row(dtype, tensor, row_begin + i + j, head), dim, 1, rows[j]);
            } else {
                memset(rows[j], 0, (size_t)dim * sizeof(real));
            }
        }
        for (int64_t d = 0; d < dim; d++) {
            for (int64_t j = 0; j < GROUP; j++)
                to[d * ld + i + j] = rows[j][d];
        }
    }
}
