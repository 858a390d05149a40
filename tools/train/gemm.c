#include "gemm.h"

#include "threads.h"
#include <dlfcn.h>
#include <string.h>

/* ---- OpenBLAS, loaded at run time. Each thread calls it for its own rows, with OpenBLAS's own threads turned off: two
 * pools of threads that wait for each other by spinning would halve the speed of both. ---- */

typedef void (*blas_gemm)(int layout, int trans_a, int trans_b, int m, int n, int k, real alpha, const real *a, int lda,
                          const real *b, int ldb, real beta, real *c, int ldc);
enum { BLAS_ROW_MAJOR = 101, BLAS_NO_TRANS = 111, BLAS_TRANS = 112 };

#ifdef TRAIN_FP64
static const char blas_symbol[] = "cblas_dgemm";
#else
static const char blas_symbol[] = "cblas_sgemm";
#endif

static blas_gemm blas;

bool gemm_use_blas(void) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return false;
    void (*set_threads)(int);
    blas_gemm found;
    /* POSIX lets dlsym return functions; ISO C has no cast for it, hence the copies. */
    void *symbol = dlsym(library, "openblas_set_num_threads");
    memcpy(&set_threads, &symbol, sizeof symbol);
    symbol = dlsym(library, blas_symbol);
    memcpy(&found, &symbol, sizeof symbol);
    if (set_threads == NULL || found == NULL) {
        dlclose(library);
        return false;
    }
    set_threads(1);
    blas = found;
    return true;
}

static void blas_piece(int64_t rows, int64_t columns, int64_t inner, gemm_matrix a, gemm_matrix b, bool accumulate,
                       real *c, int64_t c_row_stride) {
    blas(BLAS_ROW_MAJOR, a.view == TRANSPOSED ? BLAS_TRANS : BLAS_NO_TRANS,
         b.view == TRANSPOSED ? BLAS_TRANS : BLAS_NO_TRANS, (int)rows, (int)columns, (int)inner, 1, a.data,
         (int)a.row_stride, b.data, (int)b.row_stride, accumulate ? 1 : 0, c, (int)c_row_stride);
}

/* ---- The built-in loop: panels of a and b are packed so that the innermost loop reads both front to back, and a tile
 * of c stays in vector registers over the whole inner dimension of a panel. ---- */

enum {
    VECTOR_BYTES = 32,
    LANES = VECTOR_BYTES / sizeof(real),
    TILE_ROWS = 6,
    TILE_VECTORS = 2,
    TILE_COLUMNS = TILE_VECTORS * LANES,
    PANEL_ROWS = 16 * TILE_ROWS,
    PANEL_COLUMNS = 16 * TILE_COLUMNS,
    PANEL_INNER = 256
};
typedef real vector __attribute__((vector_size(VECTOR_BYTES)));

typedef struct panels {
    vector b[PANEL_COLUMNS / LANES * PANEL_INNER];
    real a[PANEL_ROWS * PANEL_INNER];
} panels;

static int64_t least(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static real element(gemm_matrix m, int64_t row, int64_t column) {
    return m.view == TRANSPOSED ? m.data[column * m.row_stride + row] : m.data[row * m.row_stride + column];
}

/* a's panel as strips of TILE_ROWS rows, inner index outermost within a strip; missing rows are zeros. */
static void pack_a(real *packed, gemm_matrix a, int64_t row, int64_t rows, int64_t inner_begin, int64_t inner) {
    for (int64_t strip = 0; strip < rows; strip += TILE_ROWS) {
        for (int64_t i = 0; i < inner; i++) {
            for (int64_t r = 0; r < TILE_ROWS; r++) {
                *packed++ = strip + r < rows ? element(a, row + strip + r, inner_begin + i) : 0;
            }
        }
    }
}

/* b's panel as strips of TILE_COLUMNS columns, likewise. */
static void pack_b(real *packed, gemm_matrix b, int64_t inner_begin, int64_t inner, int64_t column, int64_t columns) {
    for (int64_t strip = 0; strip < columns; strip += TILE_COLUMNS) {
        for (int64_t i = 0; i < inner; i++) {
            for (int64_t j = 0; j < TILE_COLUMNS; j++) {
                *packed++ = strip + j < columns ? element(b, inner_begin + i, column + strip + j) : 0;
            }
        }
    }
}

/* c's tile += a strip times b strip. Inlined into one function for each instruction set. */
__attribute__((always_inline)) static inline void tile_body(int64_t inner, const real *a, const vector *b, real *c,
                                                            int64_t c_row_stride, int64_t rows, int64_t columns) {
    vector sum[TILE_ROWS][TILE_VECTORS];
    memset(sum, 0, sizeof sum);
    for (int64_t i = 0; i < inner; i++, a += TILE_ROWS, b += TILE_VECTORS) {
        for (int r = 0; r < TILE_ROWS; r++) {
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[r][v] += a[r] * b[v];
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const real *row = (const real *)sum[r];
        for (int64_t j = 0; j < columns; j++)
            c[r * c_row_stride + j] += row[j];
    }
}

typedef void tile_function(int64_t inner, const real *a, const vector *b, real *c, int64_t c_row_stride, int64_t rows,
                           int64_t columns);

static void tile_baseline(int64_t inner, const real *a, const vector *b, real *c, int64_t c_row_stride, int64_t rows,
                          int64_t columns) {
    tile_body(inner, a, b, c, c_row_stride, rows, columns);
}

#ifdef __x86_64__
__attribute__((target("avx2,fma"))) static void tile_avx2(int64_t inner, const real *a, const vector *b, real *c,
                                                          int64_t c_row_stride, int64_t rows, int64_t columns) {
    tile_body(inner, a, b, c, c_row_stride, rows, columns);
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static tile_function *choose_tile(void) {
    return has_avx2() ? tile_avx2 : tile_baseline;
}
#else
static bool has_avx2(void) {
    return false;
}

static tile_function *choose_tile(void) {
    return tile_baseline;
}
#endif

static void clear(real *c, int64_t rows, int64_t columns, int64_t c_row_stride) {
    for (int64_t r = 0; r < rows; r++)
        memset(c + r * c_row_stride, 0, (size_t)columns * sizeof *c);
}

static void multiply_panels(tile_function *tile, const panels *p, int64_t rows, int64_t columns, int64_t inner, real *c,
                            int64_t c_row_stride) {
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS) {
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            tile(inner, p->a + row * inner, p->b + column / LANES * inner, c + row * c_row_stride + column,
                 c_row_stride, least(TILE_ROWS, rows - row), least(TILE_COLUMNS, columns - column));
        }
    }
}

static void loop_piece(int64_t rows, int64_t columns, int64_t inner, gemm_matrix a, gemm_matrix b, bool accumulate,
                       real *c, int64_t c_row_stride) {
    static _Thread_local panels p;
    tile_function *tile = choose_tile();
    if (!accumulate) clear(c, rows, columns, c_row_stride);
    for (int64_t j = 0; j < columns; j += PANEL_COLUMNS) {
        const int64_t panel_columns = least(PANEL_COLUMNS, columns - j);
        for (int64_t i = 0; i < inner; i += PANEL_INNER) {
            const int64_t panel_inner = least(PANEL_INNER, inner - i);
            pack_b((real *)p.b, b, i, panel_inner, j, panel_columns);
            for (int64_t r = 0; r < rows; r += PANEL_ROWS) {
                const int64_t panel_rows = least(PANEL_ROWS, rows - r);
                pack_a(p.a, a, r, panel_rows, i, panel_inner);
                multiply_panels(tile, &p, panel_rows, panel_columns, panel_inner, c + r * c_row_stride + j,
                                c_row_stride);
            }
        }
    }
}

/* ---- Common. ---- */

const char *gemm_description(void) {
    if (blas != NULL) return "OpenBLAS (libopenblas.so.0)";
    return has_avx2() ? "built-in loop (AVX2)" : "built-in loop";
}

static gemm_matrix skip_rows(gemm_matrix m, int64_t rows) {
    m.data += m.view == TRANSPOSED ? rows : rows * m.row_stride;
    return m;
}

void gemm(int64_t rows, int64_t columns, int64_t inner, gemm_matrix a, gemm_matrix b, bool accumulate, real *c,
          int64_t c_row_stride) {
    /* A piece is a whole number of tiles: otherwise every thread would end with a partly empty one. */
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = least(rows, tiles * thread / threads * TILE_ROWS);
        const int64_t end = least(rows, tiles * (thread + 1) / threads * TILE_ROWS);
        if (begin < end) {
            (blas != NULL ? blas_piece : loop_piece)(end - begin, columns, inner, skip_rows(a, begin), b, accumulate,
                                                     c + begin * c_row_stride, c_row_stride);
        }
    }
}
