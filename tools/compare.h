/* The rule that results are held to. Over the whole tensor, the error of a result against the exact evaluation is at
 * most twice the error of a plain evaluation in the same type, plus a floor. In each row it is at most twice the plain
 * evaluation's error in that row, plus eight times its root mean square error of a row, plus a floor: one rounded
 * number (delta, a probability near 1) can make up a row's whole error, and then how much smaller the plain
 * evaluation's is there is chance. Few rows have errors far above the mean, more so the smaller the head dimension.
 *
 * The floor of a row is (4 u + 8 (1 + L) w) times the length of the row plus the root mean square length of all rows:
 * u is the unit roundoff of the tensors' type and w that of the type that softmax is computed in (fp32, or fp64 with
 * fp64 tensors), and L the greatest |lse| of the case, main or proxy, since a rounded score or LSE of size L changes a
 * probability by w L. lse and kl are of the softmax's type: u is w for them. Where the quantity is a difference of
 * terms that can cancel (dP - delta, r - w, log w - log r), 8 (1 + L) w times the length of the terms is added. The
 * whole tensor's floor is the same with its length for the row's. Infinite values must be met exactly, and NaN is
 * always an error. */
#ifndef FMSA_TOOL_COMPARE_H
#define FMSA_TOOL_COMPARE_H

#include <stdbool.h>

#include "cases.h"
#include "reference.h"

typedef enum fmsa_quantity {
    FMSA_QUANTITY_OUT,
    FMSA_QUANTITY_LSE,
    FMSA_QUANTITY_DQ,
    FMSA_QUANTITY_DK,
    FMSA_QUANTITY_DV,
    FMSA_QUANTITY_DQ_PROXY,
    FMSA_QUANTITY_DK_PROXY,
    FMSA_QUANTITY_KL,
    FMSA_QUANTITY_COUNT
} fmsa_quantity;

typedef struct fmsa_comparison {
    double error;           /* of the result, relative to the exact tensor's length */
    double same_type_error; /* of the plain evaluation in the same type, likewise */
    double excess;          /* error over what is allowed, in the worst row or the whole tensor: at most 1 passes */
} fmsa_comparison;

const char *fmsa_quantity_name(fmsa_quantity quantity);

void fmsa_compare(const fmsa_case *c, const fmsa_reference_outputs *result, const fmsa_reference_outputs *same_type,
                  const fmsa_reference_outputs *exact, fmsa_comparison comparisons[FMSA_QUANTITY_COUNT]);

/* Whether indices [Hp, Tq, k] are a right selection: ascending, min(k, visible) of them and then -1, every forced block
 * that fits, and no block left out whose exact score is greater than that of a chosen one by more than the rounding of
 * the scores explains. Otherwise says what is wrong. */
bool fmsa_compare_selection(const fmsa_case *c, const int32_t *block_indices, char *complaint, size_t size);

#endif
