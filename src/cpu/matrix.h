/* Dense panels in scratch memory: moving rows in and out of the caller's tensors, and the matrix product. */
#ifndef FMSA_CPU_MATRIX_H
#define FMSA_CPU_MATRIX_H

#include "flashmsa.h"
#include "panel.h"
#include "vector.h"

/* C[m x n] = A[m x depth] B[depth x n], or C += A B. Rows of A, B and C are dense, ld... elements apart; n is rounded
 * up to a multiple of FMSA_CPU_PANEL, and B and C must have that many columns. Each element is one chain of fused
 * multiply-adds in ascending order, whatever m and n are: results do not depend on how rows are grouped. */
void FMSA_CPU_NAME(gemm)(int64_t m, int64_t n, int64_t depth, const real *a, int64_t lda, const real *b, int64_t ldb,
                         real *c, int64_t ldc);

/* C[m x n] += A^T B with A[depth x m]: the same otherwise. */
void FMSA_CPU_NAME(gemm_transposed_add)(int64_t m, int64_t n, int64_t depth, const real *a, int64_t lda, const real *b,
                                        int64_t ldb, real *c, int64_t ldc);

/* One row of a tensor of type dtype, times scale, to `real`; and back, rounded once. */
void FMSA_CPU_NAME(load_row)(fmsa_dtype dtype, const void *row, int64_t count, real scale, real *to);
void FMSA_CPU_NAME(store_row)(fmsa_dtype dtype, const real *from, int64_t count, real scale, void *row);

/* A query row and one of a set of heads; place is that of the row in its list. */
typedef struct row_head {
    int32_t row, head, place;
} row_head;

/* The rows of a list times the heads of a set, rows outermost, are numbered through: writes pairs
 * begin ... begin + count. */
static inline void list_pairs(const int32_t *rows, int64_t heads, int64_t begin, int64_t count, row_head *pairs) {
    int64_t place = begin / heads, head = begin % heads;
    for (int64_t i = 0; i < count; i++) {
        pairs[i] = (row_head){rows[place], (int32_t)head, (int32_t)place};
        if (++head < heads) continue;
        head = 0;
        place++;
    }
}

/* Tensor rows of pairs, times scale, as rows of a panel; the heads of the pairs are counted from first_head. */
void FMSA_CPU_NAME(gather_pairs)(fmsa_dtype dtype, const fmsa_tensor *tensor, const row_head *pairs, int64_t count,
                                 int64_t first_head, int64_t dim, real scale, real *to, int64_t ld);

/* Rows row_begin ... row_begin + count of one head, as rows of a panel padded with zeros to a multiple of
 * FMSA_CPU_PANEL columns; or transposed, padded likewise with zeros to that many columns. */
void FMSA_CPU_NAME(pack_rows)(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row_begin, int64_t count,
                              int64_t head, int64_t dim, real *to, int64_t ld);
void FMSA_CPU_NAME(pack_transposed)(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row_begin, int64_t count,
                                    int64_t head, int64_t dim, real *to, int64_t ld);

#define gemm FMSA_CPU_NAME(gemm)
#define gemm_transposed_add FMSA_CPU_NAME(gemm_transposed_add)
#define load_row FMSA_CPU_NAME(load_row)
#define store_row FMSA_CPU_NAME(store_row)
#define gather_pairs FMSA_CPU_NAME(gather_pairs)
#define pack_rows FMSA_CPU_NAME(pack_rows)
#define pack_transposed FMSA_CPU_NAME(pack_transposed)

static inline size_t element_bytes(fmsa_dtype dtype) {
    return dtype == FMSA_DTYPE_FP64 ? 8 : dtype == FMSA_DTYPE_FP32 ? 4 : 2;
}

static inline const void *tensor_row(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row, int64_t head) {
    return (const char *)tensor->data +
           (row * tensor->row_stride + head * tensor->head_stride) * (int64_t)element_bytes(dtype);
}

static inline void *tensor_row_out(fmsa_dtype dtype, const fmsa_tensor *tensor, int64_t row, int64_t head) {
    return (char *)tensor->data +
           (row * tensor->row_stride + head * tensor->head_stride) * (int64_t)element_bytes(dtype);
}

#endif
