/* What the user reads at the end. */
#ifndef TRAIN_SUMMARY_H
#define TRAIN_SUMMARY_H

#include "session.h"

/* Of a single run: its last figures. Of a comparison: both runs side by side, and the speed of the two attentions. */
bool summary_print(const session *session);

#endif
