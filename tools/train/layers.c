#include "layers.h"

#include "threads.h"
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "gemm.h"

#ifdef TRAIN_FP64
#define EXP exp
#define SQRT sqrt
#else
#define EXP expf
#define SQRT sqrtf
#endif

static const real norm_epsilon = (real)1e-5;

void embedding_forward(real *y, const real *table, const uint8_t *bytes, int64_t rows, int64_t dim) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * dim, table + bytes[r] * dim, (size_t)dim * sizeof *y);
}

void embedding_backward(real *dtable, const real *dy, const uint8_t *bytes, int64_t rows, int64_t dim) {
    /* Rows of equal bytes meet in one row of the table: each thread takes columns of its own, for a fixed order. */
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = dim * thread / threads, end = dim * (thread + 1) / threads;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t i = begin; i < end; i++)
                dtable[bytes[r] * dim + i] += dy[r * dim + i];
        }
    }
}

void linear_forward(real *y, const real *x, const real *weight, int64_t rows, int64_t out, int64_t in) {
    gemm(rows, out, in, (gemm_matrix){x, in, AS_STORED}, (gemm_matrix){weight, in, TRANSPOSED}, false, y, out);
}

void linear_backward_input(real *dx, const real *dy, const real *weight, int64_t rows, int64_t out, int64_t in) {
    gemm(rows, in, out, (gemm_matrix){dy, out, AS_STORED}, (gemm_matrix){weight, in, AS_STORED}, false, dx, in);
}

void linear_backward_weight(real *dweight, const real *dy, const real *x, int64_t rows, int64_t out, int64_t in) {
    gemm(out, in, rows, (gemm_matrix){dy, out, TRANSPOSED}, (gemm_matrix){x, in, AS_STORED}, true, dweight, in);
}

/* ---- RMSNorm of one row, and the sum of the gain's gradient over rows. ---- */

static real row_inverse_rms(const real *x, int64_t dim) {
    real sum = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += x[i] * x[i];
    return 1 / SQRT(sum / (real)dim + norm_epsilon);
}

/* With n = x / rms: dx = (dn - n <dn, n> / dim) / rms, dn = dy * gain; dgain += dy * n. */
static void row_norm_backward(real *dx, real *dgain, const real *dy, const real *x, real inverse_rms, const real *gain,
                              int64_t dim, bool add_to_dx) {
    real dot = 0;
    for (int64_t i = 0; i < dim; i++)
        dot += dy[i] * gain[i] * x[i];
    const real along = dot * inverse_rms * inverse_rms / (real)dim;
    for (int64_t i = 0; i < dim; i++) {
        dgain[i] += dy[i] * x[i] * inverse_rms;
        dx[i] = (add_to_dx ? dx[i] : 0) + inverse_rms * (dy[i] * gain[i] - x[i] * along);
    }
}

/* One partial sum a thread, added up in the order of the threads. */
static real *open_partial_sums(int64_t dim) {
    return train_allocate(omp_get_max_threads() * dim, sizeof(real));
}

static void close_partial_sums(real *sums, real *total, int64_t dim) {
    for (int64_t t = 0; t < omp_get_max_threads(); t++)
        add_to(total, sums + t * dim, dim);
    free(sums);
}

void rmsnorm_forward(real *y, real *inverse_rms, const real *x, const real *gain, int64_t rows, int64_t dim) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real inverse = row_inverse_rms(x + r * dim, dim);
        inverse_rms[r] = inverse;
        for (int64_t i = 0; i < dim; i++)
            y[r * dim + i] = x[r * dim + i] * inverse * gain[i];
    }
}

void rmsnorm_backward(real *dx, real *dgain, const real *dy, const real *x, const real *inverse_rms, const real *gain,
                      int64_t rows, int64_t dim) {
    real *partial = open_partial_sums(dim);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        row_norm_backward(dx + r * dim, partial + omp_get_thread_num() * dim, dy + r * dim, x + r * dim, inverse_rms[r],
                          gain, dim, true);
    }
    close_partial_sums(partial, dgain, dim);
}

/* ---- Queries and keys. ---- */

void rope_table(real *cosine, real *sine, int64_t positions, int64_t dim) {
    const int64_t pairs = dim / 2;
    const double base = 10000;
    for (int64_t p = 0; p < positions; p++) {
        for (int64_t i = 0; i < pairs; i++) {
            const double angle = (double)p * pow(base, -(double)i / (double)pairs);
            cosine[p * pairs + i] = (real)cos(angle);
            sine[p * pairs + i] = (real)sin(angle);
        }
    }
}

void head_norm_rope_forward(const head_layout *layout, real *y, real *inverse_rms, const real *x, const real *gain,
                            const real *cosine, const real *sine) {
    const int64_t dim = layout->dim, pairs = dim / 2;
#pragma omp parallel for
    for (int64_t r = 0; r < layout->rows; r++) {
        const real *c = cosine + r % layout->positions * pairs, *s = sine + r % layout->positions * pairs;
        for (int64_t h = 0; h < layout->heads; h++) {
            const real *in = x + r * layout->input_stride + h * dim;
            real *out = y + r * layout->output_stride + h * dim;
            const real inverse = row_inverse_rms(in, dim);
            inverse_rms[r * layout->heads + h] = inverse;
            for (int64_t i = 0; i < pairs; i++) {
                const real a = in[i] * inverse * gain[i], b = in[i + pairs] * inverse * gain[i + pairs];
                out[i] = a * c[i] - b * s[i];
                out[i + pairs] = a * s[i] + b * c[i];
            }
        }
    }
}

void head_norm_rope_backward(const head_layout *layout, real *dx, real *dgain, const real *dy, const real *x,
                             const real *inverse_rms, const real *gain, const real *cosine, const real *sine) {
    const int64_t dim = layout->dim, pairs = dim / 2;
    real *partial = open_partial_sums(dim);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < layout->rows; r++) {
        const real *c = cosine + r % layout->positions * pairs, *s = sine + r % layout->positions * pairs;
        for (int64_t h = 0; h < layout->heads; h++) {
            const real *rotated = dy + r * layout->output_stride + h * dim;
            const int64_t at = r * layout->input_stride + h * dim;
            real unrotated[256];
            for (int64_t i = 0; i < pairs; i++) {
                unrotated[i] = rotated[i] * c[i] + rotated[i + pairs] * s[i];
                unrotated[i + pairs] = rotated[i + pairs] * c[i] - rotated[i] * s[i];
            }
            row_norm_backward(dx + at, partial + omp_get_thread_num() * dim, unrotated, x + at,
                              inverse_rms[r * layout->heads + h], gain, dim, false);
        }
    }
    close_partial_sums(partial, dgain, dim);
}

/* ---- Feed-forward and loss. ---- */

void swiglu_forward(real *y, const real *gate_up, int64_t rows, int64_t hidden) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = gate_up + r * 2 * hidden, *up = gate + hidden;
        for (int64_t i = 0; i < hidden; i++)
            y[r * hidden + i] = gate[i] / (1 + EXP(-gate[i])) * up[i];
    }
}

void swiglu_backward(real *dgate_up, const real *dy, const real *gate_up, int64_t rows, int64_t hidden) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = gate_up + r * 2 * hidden, *up = gate + hidden;
        real *dgate = dgate_up + r * 2 * hidden, *dup = dgate + hidden;
        for (int64_t i = 0; i < hidden; i++) {
            const real sigmoid = 1 / (1 + EXP(-gate[i])), d = dy[r * hidden + i];
            dup[i] = d * gate[i] * sigmoid;
            dgate[i] = d * up[i] * sigmoid * (1 + gate[i] * (1 - sigmoid));
        }
    }
}

void add_to(real *x, const real *y, int64_t count) {
#pragma omp parallel for if (count > 4096)
    for (int64_t i = 0; i < count; i++)
        x[i] += y[i];
}

double cross_entropy(real *dlogits, const real *logits, const uint8_t *targets, int64_t rows, int64_t classes) {
    double *row_loss = train_allocate(rows, sizeof *row_loss);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const real *row = logits + r * classes;
        real greatest = row[0];
        for (int64_t i = 1; i < classes; i++)
            greatest = row[i] > greatest ? row[i] : greatest;
        double sum = 0;
        for (int64_t i = 0; i < classes; i++)
            sum += EXP(row[i] - greatest);
        const double log_sum = (double)greatest + log(sum);
        row_loss[r] = log_sum - (double)row[targets[r]];
        if (dlogits == NULL) continue;
        const real shift = (real)log_sum, share = 1 / (real)rows;
        for (int64_t i = 0; i < classes; i++)
            dlogits[r * classes + i] = EXP(row[i] - shift) * share;
        dlogits[r * classes + targets[r]] -= share;
    }
    double loss = 0;
    for (int64_t r = 0; r < rows; r++)
        loss += row_loss[r];
    free(row_loss);
    return loss / (double)rows;
}
