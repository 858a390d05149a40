#include "options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"

typedef enum option_kind { KIND_FLAG, KIND_INT32, KIND_INT64, KIND_DOUBLE, KIND_TEXT, KIND_ATTENTION } option_kind;

typedef struct option {
    const char *name;
    const char *placeholder; /* NULL for a flag */
    option_kind kind;
    size_t offset;       /* in train_options */
    bool is_setting;     /* part of the checkpoint */
    const char *meaning; /* for --help */
} option;

#define SETTING(field) offsetof(train_options, settings.field), true
#define OPTION(field) offsetof(train_options, field), false
static const option table[] = {
    {"--attention", "msa|dense", KIND_ATTENTION, SETTING(dense), "attention to train with (default msa)"},
    {"--compare", NULL, KIND_FLAG, OPTION(compare),
     "train densely and with MSA on the same batches, then compare loss and speed"},
    {"--steps", "N", KIND_INT64, SETTING(steps), "optimiser steps of a run (default: what --seconds allows)"},
    {"--seconds", "S", KIND_DOUBLE, OPTION(seconds),
     "time for the whole command; the steps follow from measured speed (default 60; 120 with --compare)"},
    {"--out", "DIR", KIND_TEXT, OPTION(out),
     "folder for train.csv, train.svg and the checkpoints (default build/train)"},
    {"--resume", "FILE", KIND_TEXT, OPTION(resume),
     "go on from a checkpoint; with --compare, from the folder of an interrupted comparison"},
    {"--stop-after", "N", KIND_INT64, OPTION(stop_after),
     "stop after N steps in all as Ctrl-C does, with a checkpoint to go on from"},
    {"--proxies", "FILE", KIND_TEXT, OPTION(proxies),
     "in the end, write the proxies' queries and keys for a batch of the validation text (.npy)"},
    {"--eval-every", "N", KIND_INT64, SETTING(evaluate_every),
     "steps between evaluations and checkpoints (default: a tenth of the steps, at least 5)"},
    {"--seed", "N", KIND_INT64, SETTING(seed), "of the weights and the batches (default 1)"},
    {"--threads", "N", KIND_INT32, OPTION(threads), "processor threads (default: all)"},
    {"--no-blas", NULL, KIND_FLAG, OPTION(no_blas),
     "multiply matrices with the built-in loop, even if OpenBLAS is here"},
    {"--batch", "N", KIND_INT32, SETTING(batch), "sequences a step (default 2)"},
    {"--context", "N", KIND_INT32, SETTING(shape.context), "bytes of a sequence (default 512)"},
    {"--layers", "N", KIND_INT32, SETTING(shape.layers), "transformer layers (default 3)"},
    {"--dim", "N", KIND_INT32, SETTING(shape.dim), "width of the residual stream (default 128)"},
    {"--hidden", "N", KIND_INT32, SETTING(shape.hidden), "width inside the feed-forward part (default 352)"},
    {"--heads", "N", KIND_INT32, SETTING(shape.attention.heads), "main query heads (default 4)"},
    {"--kv-heads", "N", KIND_INT32, SETTING(shape.attention.kv_heads), "main key/value heads (default 2)"},
    {"--head-dim", "N", KIND_INT32, SETTING(shape.attention.head_dim), "width of a main head (default 32)"},
    {"--proxy-heads", "N", KIND_INT32, SETTING(shape.attention.proxy_heads), "proxy query heads (default 2)"},
    {"--proxy-kv-heads", "N", KIND_INT32, SETTING(shape.attention.proxy_kv_heads), "proxy key heads (default 1)"},
    {"--proxy-head-dim", "N", KIND_INT32, SETTING(shape.attention.proxy_head_dim),
     "width of a proxy head (default 32)"},
    {"--block", "N", KIND_INT32, SETTING(shape.attention.block_size), "bytes of a key block, from 16 (default 16)"},
    {"--top-k", "N", KIND_INT32, SETTING(shape.attention.top_k), "blocks that a token keeps (default 8)"},
    {"--warmup", "SHARE", KIND_DOUBLE, SETTING(warmup),
     "share of the steps with dense attention that teach the proxies first (default 0.4)"},
    {"--lr", "RATE", KIND_DOUBLE, SETTING(learning_rate), "peak learning rate (default 0.003)"},
    {"--kl-weight", "W", KIND_DOUBLE, SETTING(kl_weight), "weight of the proxies' KL loss (default 1)"},
    {"--weight-decay", "W", KIND_DOUBLE, SETTING(weight_decay), "of matrices (default 0.1)"},
    {"--help", NULL, KIND_FLAG, OPTION(help), "print this"},
};
enum { OPTIONS = sizeof table / sizeof *table };
_Static_assert(OPTIONS <= 64, "train_options.given has one bit an option");

void options_print_help(void) {
    printf("usage: flashmsa train [OPTION...] [FILE or FOLDER...]\n\n"
           "Trains a byte-level transformer whose attention is MSA on the text of the given files and folders; without "
           "any,\non the source and documentation files of the current folder. First a warm-up: attention is dense, "
           "and the proxies\nlearn from all of it. Then attention is sparse, and they learn from the blocks they "
           "choose.\n\nCtrl-C stops after the current step with a checkpoint; a second Ctrl-C stops at once.\n\n"
           "options:\n");
    for (int i = 0; i < OPTIONS; i++) {
        char usage[64];
        snprintf(usage, sizeof usage, "%s%s%s", table[i].name, table[i].placeholder ? " " : "",
                 table[i].placeholder ? table[i].placeholder : "");
        printf("  %-22s %s\n", usage, table[i].meaning);
    }
    printf("\ntrain.csv has one line for each run and recorded step, with the columns\n"
           "  run                dense or msa\n"
           "  step               optimiser steps taken\n"
           "  phase              dense, warmup or sparse: the attention of that step\n"
           "  seconds            spent in the run's steps so far\n"
           "  learning_rate      of that step\n"
           "  training_loss      nats a byte, mean since the line before\n"
           "  validation_loss    nats a byte, on text that is never trained on\n"
           "  kl                 the proxies' KL loss in nats, mean over layers and since the line before\n"
           "  block_recall       share of the main attention's own top-k blocks that the proxies chose\n"
           "  attention_mass     share of the main attention's probability inside the chosen blocks\n"
           "  tokens_per_second  bytes trained on a second, since the line before\n"
           "A field is empty where nothing was measured. Recall and mass are means over validation tokens that see "
           "more than\n--top-k blocks; for the others every choice is right.\n");
}

static int find_option(const char *name) {
    for (int i = 0; i < OPTIONS; i++) {
        if (strcmp(name, table[i].name) == 0) return i;
    }
    return -1;
}

static bool fail_unknown(const char *name) {
    char names[1024] = "";
    for (int i = 0; i < OPTIONS; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, " %s", table[i].name);
    }
    return train_fail("there is no option %s; the options are%s", name, names);
}

static bool parse_integer(const option *o, const char *text, long long least, long long most, long long *value) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno != 0 || *value < least || *value > most) {
        return train_fail("%s takes a whole number in %lld ... %lld, not \"%s\"", o->name, least, most, text);
    }
    return true;
}

static bool parse_value(train_options *options, const option *o, const char *text) {
    void *field = (char *)options + o->offset;
    long long integer;
    char *end;
    switch (o->kind) {
    case KIND_FLAG:
        *(bool *)field = true;
        return true;
    case KIND_INT32:
        if (!parse_integer(o, text, 0, INT32_MAX, &integer)) return false;
        *(int32_t *)field = (int32_t)integer;
        return true;
    case KIND_INT64:
        if (!parse_integer(o, text, 0, 1000000000000, &integer)) return false;
        *(int64_t *)field = integer;
        return true;
    case KIND_DOUBLE:
        *(double *)field = strtod(text, &end);
        if (end != text && *end == 0 && *(double *)field >= 0 && isfinite(*(double *)field)) return true;
        return train_fail("%s takes a number from 0, not \"%s\"", o->name, text);
    case KIND_TEXT:
        *(const char **)field = text;
        return true;
    case KIND_ATTENTION:
        *(int32_t *)field = strcmp(text, "dense") == 0;
        if (strcmp(text, "dense") == 0 || strcmp(text, "msa") == 0) return true;
        return train_fail("%s takes msa or dense, not \"%s\"", o->name, text);
    }
    return false;
}

static bool was_given(const train_options *options, const char *name) {
    return options->given >> find_option(name) & 1;
}

static bool check_combinations(train_options *o) {
    if (o->compare && was_given(o, "--attention")) {
        return train_fail("--compare trains with both kinds of attention; leave --attention out");
    }
    if (was_given(o, "--steps") && o->settings.steps == 0) return train_fail("--steps is 0; it must be at least 1");
    if (was_given(o, "--steps") && was_given(o, "--seconds")) {
        return train_fail("--steps and --seconds were both given; the steps follow from the seconds, so give one");
    }
    if (was_given(o, "--resume") && was_given(o, "--seconds")) {
        return train_fail("--seconds was given with --resume; the number of steps was fixed when the run began");
    }
    if (was_given(o, "--seconds") && o->seconds == 0) return train_fail("--seconds is 0; it must be positive");
    if (o->threads > 1024) return train_fail("--threads is %d; it must be at most 1024", (int)o->threads);
    if (o->seconds == 0) o->seconds = o->compare ? 120 : 60;
    return settings_check(&o->settings);
}

bool options_parse(train_options *o, int argc, char **argv) {
    *o = (train_options){.settings = settings_default(), .out = "build/train"};
    o->paths = argv + 1;
    bool options_ended = false;
    for (int i = 1; i < argc; i++) {
        char *argument = argv[i];
        if (options_ended || argument[0] != '-') {
            o->paths[o->path_count++] = argument;
            continue;
        }
        options_ended = strcmp(argument, "--") == 0;
        if (options_ended) continue;
        const int index = find_option(strcmp(argument, "-h") == 0 ? "--help" : argument);
        if (index < 0) return fail_unknown(argument);
        const option *found = &table[index];
        if (found->placeholder != NULL && ++i == argc) {
            return train_fail("%s needs a value: %s %s", found->name, found->name, found->placeholder);
        }
        if (!parse_value(o, found, argv[i])) return false;
        o->given |= (uint64_t)1 << index;
    }
    return o->help || check_combinations(o);
}

static double setting_value(const option *o, const train_settings *s) {
    const char *field = (const char *)s + (o->offset - offsetof(train_options, settings));
    if (o->kind == KIND_DOUBLE) return *(const double *)field;
    return o->kind == KIND_INT64 ? (double)*(const int64_t *)field : (double)*(const int32_t *)field;
}

bool options_agree(const train_options *options, const train_settings *checkpoint) {
    for (int i = 0; i < OPTIONS; i++) {
        if (!table[i].is_setting || !(options->given >> i & 1)) continue;
        const double given = setting_value(&table[i], &options->settings);
        const double saved = setting_value(&table[i], checkpoint);
        if (given == saved) continue;
        if (table[i].kind == KIND_ATTENTION) {
            return train_fail("the checkpoint was trained with --attention %s; leave --attention out",
                              checkpoint->dense ? "dense" : "msa");
        }
        return train_fail("%s is %g in the checkpoint, but %g was given; leave %s out to go on, or --resume to start "
                          "afresh",
                          table[i].name, saved, given, table[i].name);
    }
    return true;
}
