#include "optimizer.h"

#include <math.h>
#include <stdlib.h>

#include "failure.h"

static const double first_decay = 0.9, second_decay = 0.95, epsilon = 1e-8, greatest_norm = 1;

void optimizer_open(optimizer *o, const model *m) {
    o->first = train_allocate(m->weight_count, sizeof(real));
    o->second = train_allocate(m->weight_count, sizeof(real));
    o->step = 0;
}

void optimizer_close(optimizer *o) {
    free(o->first);
    free(o->second);
    *o = (optimizer){0};
}

double optimizer_learning_rate(int64_t step, int64_t steps, double peak) {
    const double rise = ceil((double)steps / 20), floor_share = 0.1;
    if ((double)step < rise) return peak * (double)(step + 1) / rise;
    const double fallen = ((double)step - rise) / fmax(1, (double)steps - rise);
    return peak * (floor_share + (1 - floor_share) * 0.5 * (1 + cos(3.14159265358979323846 * fmin(1, fallen))));
}

static double sum_of_squares(const real *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)x[i] * (double)x[i];
    return sum;
}

/* Norms of the gradients of the trunk [0] and of the proxies [1]: summed by tensor, for a fixed order. */
static void gradient_norms(const model *m, double norms[2]) {
    double *sums = train_allocate(m->parameter_count, sizeof *sums);
#pragma omp parallel for schedule(dynamic)
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        sums[p] = sum_of_squares(m->gradients + tensor->offset, tensor->rows * tensor->columns);
    }
    norms[0] = norms[1] = 0;
    for (int p = 0; p < m->parameter_count; p++)
        norms[m->parameters[p].is_proxy] += sums[p];
    free(sums);
    for (int i = 0; i < 2; i++)
        norms[i] = sqrt(norms[i]);
}

typedef struct update {
    real gradient_scale;
    real step_size, second_correction; /* with the moments' bias taken out */
    real kept;                         /* of each weight, after decay */
} update;

/* Called by all threads of a region, which share the tensor; none waits for the others at its end. */
static void update_tensor(optimizer *o, model *m, const parameter *tensor, update u) {
    real *w = m->weights + tensor->offset, *first = o->first + tensor->offset, *second = o->second + tensor->offset;
    const real *g = m->gradients + tensor->offset;
    const int64_t count = tensor->rows * tensor->columns;
    const real b1 = (real)first_decay, b2 = (real)second_decay, e = (real)epsilon;
#pragma omp for nowait
    for (int64_t i = 0; i < count; i++) {
        const real gradient = g[i] * u.gradient_scale;
        first[i] = b1 * first[i] + (1 - b1) * gradient;
        second[i] = b2 * second[i] + (1 - b2) * gradient * gradient;
        w[i] = u.kept * w[i] - u.step_size * first[i] / ((real)sqrt(second[i] * u.second_correction) + e);
    }
}

double optimizer_step(optimizer *o, model *m, double learning_rate, double weight_decay) {
    double norms[2];
    gradient_norms(m, norms);
    o->step++;
    const double step_size = learning_rate / (1 - pow(first_decay, (double)o->step));
    const double second_correction = 1 / (1 - pow(second_decay, (double)o->step));
#pragma omp parallel
    for (int p = 0; p < m->parameter_count; p++) {
        const parameter *tensor = &m->parameters[p];
        const double norm = norms[tensor->is_proxy];
        const update u = {.gradient_scale = (real)(norm > greatest_norm ? greatest_norm / norm : 1),
                          .step_size = (real)step_size,
                          .second_correction = (real)second_correction,
                          .kept = (real)(tensor->rows > 1 ? 1 - learning_rate * weight_decay : 1)};
        update_tensor(o, m, tensor, u);
    }
    return norms[0];
}
