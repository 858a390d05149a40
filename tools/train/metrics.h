/* How good the model is on text it does not train on, and how well its proxies choose. */
#ifndef TRAIN_METRICS_H
#define TRAIN_METRICS_H

#include "corpus.h"
#include "model.h"

/* Sequences of an evaluation, up to whole batches: enough for a steady figure, few enough to take a few steps' time. */
enum { VALIDATION_SEQUENCES = 24 };

typedef struct evaluation {
    double loss;         /* nats a byte */
    double recall, mass; /* as in a record; NaN in the dense phase, or when no token sees more than top_k blocks */
} evaluation;

/* Over the same sequences of the validation text at every call. */
bool evaluate_model(model *model, attention_phase phase, const corpus *corpus, evaluation *evaluation);

/* Recall and mass of a layer, summed over a sample of the tokens that see more than top_k blocks: for the others, every
 * choice is right. count is the number of (token, proxy head) summed. */
typedef struct choice_sums {
    double recall, mass;
    int64_t count;
} choice_sums;

/* After a forward pass and with the layer's block_indices chosen. The main attention is evaluated over all that a token
 * sees; its blocks are ranked by their probability, summed over the heads that follow one proxy head. */
choice_sums score_choices(const model *model, int layer);

#endif
