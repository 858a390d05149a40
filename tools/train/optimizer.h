/* AdamW, with a learning rate that rises linearly and falls as a cosine. */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "model.h"

typedef struct optimizer {
    real *first, *second; /* moments, laid out as the weights */
    int64_t step;         /* taken so far */
} optimizer;

void optimizer_open(optimizer *optimizer, const model *model);
void optimizer_close(optimizer *optimizer);

/* Of a step counted from 0: the rise takes the first twentieth of all steps, and the fall ends at a tenth of peak. */
double optimizer_learning_rate(int64_t step, int64_t steps, double peak);

/* One step with model->gradients. The gradients of the trunk and of the proxies are clipped to a norm of 1 each on its
 * own, so that the KL loss cannot slow the trunk. Weight decay acts on matrices only. Returns the trunk's norm. */
double optimizer_step(optimizer *optimizer, model *model, double learning_rate, double weight_decay);

#endif
