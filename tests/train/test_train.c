/* `flashmsa train` as its user meets it: input, options, files, interruption and resumption. Each test calls the
 * command in a folder of its own under the current one. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint.h"
#include "corpus.h"
#include "failure.h"
#include "gemm.h"
#include "plan.h"
#include "random.h"
#include "train.h"

enum { MOST_ARGUMENTS = 48, OUTPUT_BYTES = 1 << 16 };

/* ---- A folder, files in it, and the command's output. ---- */

static char output[OUTPUT_BYTES];

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

static char *read_file(const char *path, size_t *count) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail_msg("%s is missing", path);
    static char bytes[1 << 22];
    *count = fread(bytes, 1, sizeof bytes - 1, file);
    bytes[*count] = 0;
    fclose(file);
    return bytes;
}

/* Text that a model can learn something from. */
static void write_text(const char *path, int64_t bytes) {
    static const char *const words[] = {"block ", "query ", "the ", "of ", "proxy ", "and ", "selects ", "key.\n"};
    char *text = train_allocate(bytes + 16, 1);
    random_state random;
    random_seed(&random, 6);
    int64_t used = 0;
    while (used < bytes) {
        const char *word = words[random_below(&random, 8)];
        memcpy(text + used, word, strlen(word));
        used += (int64_t)strlen(word);
    }
    write_file(path, text, (size_t)bytes);
    free(text);
}

static int enter_folder(void **state) {
    static char folder[] = "train_test_XXXXXX";
    strcpy(folder, "train_test_XXXXXX");
    *state = folder;
    if (mkdtemp(folder) == NULL || chdir(folder) != 0) return -1;
    write_text("text.txt", 20000);
    return 0;
}

static int leave_folder(void **state) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", (char *)*state);
    return chdir("..") == 0 && system(command) == 0 ? 0 : -1;
}

/* Runs `flashmsa train` with the words of line; everything it prints goes to output. */
static int train(const char *line) {
    static char words[2048];
    char *argv[MOST_ARGUMENTS] = {(char[]){"train"}};
    int argc = 1;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word != NULL; word = strtok(NULL, " "))
        argv[argc++] = word;

    fflush(NULL);
    const int kept_out = dup(STDOUT_FILENO), kept_err = dup(STDERR_FILENO);
    FILE *capture = tmpfile();
    dup2(fileno(capture), STDOUT_FILENO);
    dup2(fileno(capture), STDERR_FILENO);
    const int code = fmsa_tool_train(argc, argv);
    fflush(NULL);
    dup2(kept_out, STDOUT_FILENO);
    dup2(kept_err, STDERR_FILENO);
    close(kept_out);
    close(kept_err);
    rewind(capture);
    output[fread(output, 1, sizeof output - 1, capture)] = 0;
    fclose(capture);
    return code;
}

#define TINY                                                                                                           \
    "--layers 2 --dim 16 --hidden 24 --context 80 --batch 2 --head-dim 8 --proxy-head-dim 4 --top-k 2 --no-blas "

static void check_train(int expected, const char *line) {
    const int code = train(line);
    if (code != expected) fail_msg("train %s: exit code %d instead of %d\n%s", line, code, expected, output);
}

static void check_output(const char *part) {
    if (strstr(output, part) == NULL) fail_msg("the output lacks \"%s\":\n%s", part, output);
}

/* ---- Input. ---- */

static void test_text_is_told_from_other_bytes(void **state) {
    (void)state;
    static const uint8_t latin[] = "caf\xe9 au lait, s'il vous pla\xeet", zero[] = "a\0b",
                         utf8[] = "caf\xc3\xa9 \xe2\x82\xac";
    assert_true(corpus_is_text(latin, sizeof latin - 1));
    assert_true(corpus_is_text(utf8, sizeof utf8 - 1));
    assert_false(corpus_is_text(zero, sizeof zero - 1));
    assert_true(corpus_is_text(utf8, 0));
    uint8_t noise[4096];
    random_state random;
    random_seed(&random, 7);
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)(1 + random_below(&random, 255));
    assert_false(corpus_is_text(noise, sizeof noise));
}

static void test_bad_input_gets_a_sentence(void **state) {
    (void)state;
    write_file("empty.txt", "", 0);
    write_file("image.png", "\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 17);
    write_file("short.txt", "a few words", 11);
    assert_int_equal(mkdir("nothing", 0777), 0);
    assert_int_equal(mkfifo("pipe", 0666), 0);

    check_train(1, TINY "--steps 1 missing.txt");
    check_output("cannot read missing.txt: No such file or directory");
    check_train(1, TINY "--steps 1 empty.txt");
    check_output("empty.txt is empty");
    check_train(1, TINY "--steps 1 image.png");
    check_output("image.png is not text");
    check_train(1, TINY "--steps 1 short.txt");
    check_output("the input holds 11 bytes of text");
    check_train(1, TINY "--steps 1 nothing");
    check_output("the folder nothing holds no text file");
    check_train(1, TINY "--steps 1 pipe");
    check_output("pipe is neither a file nor a folder");
    assert_int_equal(chdir("nothing"), 0);
    const int code = train(TINY "--steps 1");
    assert_int_equal(chdir(".."), 0);
    assert_int_equal(code, 1);
    check_output("the current folder holds no source or documentation files");

    if (geteuid() == 0) return; /* root may read everything */
    assert_int_equal(chmod("short.txt", 0), 0);
    check_train(1, TINY "--steps 1 short.txt");
    check_output("cannot read short.txt: Permission denied");
}

static void open_corpus(corpus *c, char **paths, int count, int64_t context) {
    if (!corpus_open(c, paths, count, context)) fail_msg("%s", train_failure());
}

static void test_folders(void **state) {
    (void)state;
    assert_int_equal(mkdir("a", 0777), 0);
    assert_int_equal(mkdir("a/b", 0777), 0);
    assert_int_equal(mkdir("a/build", 0777), 0);
    assert_int_equal(mkdir("a/.hidden", 0777), 0);
    write_text("a/one", 1000);
    write_text("a/b/two.txt", 2000);
    write_text("a/build/three.txt", 400);
    write_text("a/.hidden/four.txt", 400);
    write_text("a/.five.txt", 400);
    write_file("a/binary", "\0\1\2", 3);
    assert_int_equal(symlink("..", "a/b/loop"), 0);

    corpus c;
    char *folder[] = {"a"};
    open_corpus(&c, folder, 1, 50);
    assert_int_equal(c.files, 2);
    assert_int_equal(c.skipped, 1);
    assert_int_equal(c.training_bytes, 900 + 1800);
    assert_int_equal(c.validation_bytes, 100 + 200);
    const uint64_t fingerprint = c.fingerprint;
    corpus_close(&c);

    /* Without paths, the current folder's files by their ending. */
    assert_int_equal(chdir("a"), 0);
    open_corpus(&c, NULL, 0, 50);
    assert_int_equal(c.files, 1);
    assert_true(c.fingerprint != fingerprint);
    corpus_close(&c);
    assert_int_equal(chdir(".."), 0);
}

/* Training sequences reach both ends of the training text and never the validation text. */
static void test_sequences(void **state) {
    (void)state;
    enum { BYTES = 100, CONTEXT = 8 };
    char text[BYTES];
    for (int i = 0; i < BYTES; i++)
        text[i] = (char)(' ' + i % 90);
    for (int i = 90; i < BYTES; i++)
        text[i] = '~';
    write_file("ramp.txt", text, sizeof text);
    corpus c;
    char *paths[] = {"ramp.txt"};
    open_corpus(&c, paths, 1, CONTEXT);
    random_state random;
    random_seed(&random, 8);
    bool at_begin = false, at_end = false;
    for (int i = 0; i < 4000; i++) {
        uint8_t inputs[CONTEXT], targets[CONTEXT];
        corpus_training_batch(&c, &random, 1, CONTEXT, inputs, targets);
        assert_memory_equal(inputs + 1, targets, CONTEXT - 1);
        assert_true(targets[CONTEXT - 1] == inputs[CONTEXT - 1] + 1);
        at_begin = at_begin || inputs[0] == ' ';
        at_end = at_end || targets[CONTEXT - 1] == text[89];
    }
    assert_true(at_begin && at_end);
    for (int i = 0; i < 3; i++) {
        uint8_t inputs[CONTEXT], targets[CONTEXT];
        corpus_validation_sequence(&c, i, 3, CONTEXT, inputs, targets);
        for (int j = 0; j < CONTEXT; j++)
            assert_true(inputs[j] == '~' && targets[j] == '~');
    }
    corpus_close(&c);
}

/* ---- Options. ---- */

static void test_wrong_options(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"--depth 3", "there is no option --depth; the options are --attention --compare --steps"},
        {"--steps", "--steps needs a value"},
        {"--steps many", "--steps takes a whole number"},
        {"--steps 0", "--steps is 0; it must be at least 1"},
        {"--steps -3", "--steps takes a whole number"},
        {"--steps 3 --seconds 3", "give one"},
        {"--lr nan", "--lr takes a number from 0"},
        {"--warmup 1.5", "--warmup is 1.5; it must lie in 0 ... 1"},
        {"--block 8", "--block is 8; it must lie in 16 ... 65536"},
        {"--head-dim 7", "both must be even"},
        {"--attention sparse", "--attention takes msa or dense"},
        {"--attention dense --compare", "leave --attention out"},
        {"--layers 0", "--layers is 0"},
        {"--context 1000000 --batch 100", "at most 4194304 bytes of text a step"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_train(2, cases[i][0]);
        check_output(cases[i][1]);
    }
    /* What only the library knows keeps the library's sentence. */
    check_train(1, TINY "--steps 1 --heads 6 --kv-heads 4 text.txt");
    check_output("num_heads is 6 and num_kv_heads is 4");
}

static void test_help(void **state) {
    (void)state;
    check_train(0, "--help");
    check_output("usage: flashmsa train");
    check_output("--warmup SHARE");
    check_output("block_recall");
    check_train(0, "-h");
}

static void test_output_folder(void **state) {
    (void)state;
    write_file("taken", "x", 1);
    check_train(1, TINY "--steps 1 --out taken text.txt");
    check_output("cannot make the output folder taken");
    check_train(1, TINY "--steps 1 --out taken/below text.txt");
    check_output("cannot make the output folder taken/below: Not a directory");
    check_train(0, TINY "--steps 1 --out new/and/deep text.txt");
    assert_int_equal(access("new/and/deep/train.csv", F_OK), 0);
    if (geteuid() == 0) return; /* root may write everywhere */
    assert_int_equal(mkdir("locked", 0555), 0);
    check_train(1, TINY "--steps 1 --out locked text.txt");
    check_output("cannot write in the output folder locked");
}

/* ---- Training. ---- */

static void open_checkpoint(const char *path, run *r, corpus *c) {
    char *paths[] = {"text.txt"};
    train_settings settings;
    if (!checkpoint_read_settings(path, &settings)) fail_msg("%s", train_failure());
    open_corpus(c, paths, 1, settings.shape.context);
    if (!checkpoint_load(path, r, c)) fail_msg("%s", train_failure());
}

static void check_same_records(const history *a, const history *b) {
    assert_int_equal(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++) {
        const record *x = &a->records[i], *y = &b->records[i];
        assert_int_equal(x->step, y->step);
        assert_int_equal(x->phase, y->phase);
        assert_memory_equal(&x->learning_rate, &y->learning_rate,
                            offsetof(record, tokens_per_second) - offsetof(record, learning_rate));
    }
}

/* Everything but times must be the same, to the last bit. */
static void check_same_checkpoints(const char *one, const char *other) {
    run a, b;
    corpus c, d;
    open_checkpoint(one, &a, &c);
    open_checkpoint(other, &b, &d);
    const size_t bytes = (size_t)a.model.weight_count * sizeof(real);
    assert_int_equal(a.step, b.step);
    assert_memory_equal(a.model.weights, b.model.weights, bytes);
    assert_memory_equal(a.optimizer.first, b.optimizer.first, bytes);
    assert_memory_equal(a.optimizer.second, b.optimizer.second, bytes);
    assert_memory_equal(&a.random, &b.random, sizeof a.random);
    check_same_records(&a.history, &b.history);
    run_close(&a);
    run_close(&b);
    corpus_close(&c);
    corpus_close(&d);
}

/* The two halves meet within the warm-up, at its end, and after it. */
static void test_resume_gives_the_same_bits(void **state) {
    (void)state;
    check_train(0, TINY "--steps 10 --warmup 0.5 --eval-every 4 --threads 2 --out straight text.txt");
    for (int half = 3; half <= 7; half += 2) {
        char line[512];
        snprintf(line, sizeof line,
                 TINY "--steps 10 --warmup 0.5 --eval-every 4 --threads 2 --stop-after %d --out halves text.txt", half);
        check_train(0, line);
        check_output("nothing is lost");
        check_output("flashmsa train --resume halves/msa.ckpt --out halves --threads 2 --no-blas text.txt");
        check_train(0, "--resume halves/msa.ckpt --out halves --threads 2 --no-blas text.txt");
        check_same_checkpoints("straight/msa.ckpt", "halves/msa.ckpt");
    }
}

/* Stopped between two runs' steps or between rounds, a comparison ends as if it had not been stopped; and until
 * attention becomes sparse, both runs have trained the same model. */
static void test_comparison(void **state) {
    (void)state;
    check_train(0, TINY "--compare --steps 8 --eval-every 2 --threads 2 --out straight text.txt");
    check_output("The validation loss of MSA is");
    check_output("Block recall:");
    check_output("speed-up");
    check_output("straight/train.svg");
    check_train(0, TINY "--compare --steps 8 --eval-every 2 --threads 2 --stop-after 5 --out halves text.txt");
    check_output("flashmsa train --compare --resume halves --out halves");
    check_train(0, "--compare --resume halves --out halves --threads 2 --no-blas text.txt");
    check_same_checkpoints("straight/dense.ckpt", "halves/dense.ckpt");
    check_same_checkpoints("straight/msa.ckpt", "halves/msa.ckpt");

    run dense, msa;
    corpus c, d;
    open_checkpoint("straight/dense.ckpt", &dense, &c);
    open_checkpoint("straight/msa.ckpt", &msa, &d);
    assert_int_equal(dense.history.count, msa.history.count);
    assert_int_equal(msa.settings.warmup_steps, 4);
    bool sparse_differs = false;
    for (int64_t i = 0; i < dense.history.count; i++) {
        const record *x = &dense.history.records[i], *y = &msa.history.records[i];
        assert_true(isnan(x->kl) && isnan(x->recall) && isnan(x->mass));
        assert_true(y->recall > 0 && y->recall <= 1 && y->mass > 0 && y->mass <= 1);
        if (y->phase == PHASE_WARMUP) assert_true(x->validation_loss == y->validation_loss);
        if (y->phase == PHASE_SPARSE) sparse_differs = sparse_differs || x->validation_loss != y->validation_loss;
    }
    assert_true(sparse_differs);
    run_close(&dense);
    run_close(&msa);
    corpus_close(&c);
    corpus_close(&d);
}

static void test_training_learns(void **state) {
    (void)state;
    check_train(0, TINY "--steps 120 --lr 0.01 --threads 2 --out out text.txt");
    run r;
    corpus c;
    open_checkpoint("out/msa.ckpt", &r, &c);
    const record *first = &r.history.records[0], *last = history_last_evaluation(&r.history);
    assert_true(fabs(first->validation_loss - log(256)) < 0.3);
    assert_true(last->validation_loss < 2);
    assert_true(last->step == 120);
    run_close(&r);
    corpus_close(&c);
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        count++;
    return count;
}

static void test_csv_and_picture(void **state) {
    (void)state;
    check_train(0, TINY "--steps 6 --eval-every 2 --threads 2 --out out text.txt");
    size_t count;
    const char *csv = read_file("out/train.csv", &count);
    const char *header = "run,step,phase,seconds,learning_rate,training_loss,validation_loss,kl,block_recall,"
                         "attention_mass,tokens_per_second\n";
    assert_memory_equal(csv, header, strlen(header));
    /* Before the first step, at each second one, and at the end of the warm-up, step 3. */
    assert_int_equal(count_of(csv, "\n"), 1 + 5);
    assert_int_equal(count_of(csv, ","), 10 * (1 + 5));
    assert_non_null(strstr(csv, "\nmsa,0,warmup,"));
    assert_non_null(strstr(csv, "\nmsa,3,warmup,"));
    assert_non_null(strstr(csv, "\nmsa,6,sparse,"));

    const char *svg = read_file("out/train.svg", &count);
    assert_memory_equal(svg, "<svg ", 5);
    assert_string_equal(svg + count - 7, "</svg>\n");
    assert_int_equal(count_of(svg, "<polyline"), 5);
    assert_int_equal(count_of(svg, "<svg"), 1);
    assert_int_equal(count_of(svg, "nan"), 0);
    assert_int_equal(count_of(svg, "inf"), 0);
    const char *const words[] = {"steps", "Loss", "nats a byte", "Proxy loss", "block recall", "attention mass"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        assert_non_null(strstr(svg, words[i]));
}

/* ---- Interruption. ---- */

static void press_ctrl_c(int signal) {
    (void)signal;
    raise(SIGINT);
}

/* The file of --proxies as NumPy reads it: normed queries and keys, so that each has the length that its gain gives. */
static void test_proxies(void **state) {
    (void)state;
    check_train(0, TINY "--steps 4 --proxies proxies.npy text.txt");
    size_t count;
    const char *file = read_file("proxies.npy", &count);
    enum { LAYERS = 2, BATCH = 2, CONTEXT = 80, HEADS = 3, DIM = 4, HEADER = 128 };
    const size_t numbers = LAYERS * BATCH * CONTEXT * HEADS * DIM;
    assert_memory_equal(file, "\x93NUMPY\x01\x00", 8);
    assert_int_equal((unsigned char)file[8], HEADER - 10);
    assert_non_null(strstr(file + 10, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2, 80, 3, 4), }"));
    assert_int_equal(file[HEADER - 1], '\n');
    assert_int_equal(count, HEADER + numbers * sizeof(float));
    for (size_t row = 0; row < numbers / DIM; row++) {
        float x[DIM], square = 0;
        memcpy(x, file + HEADER + row * sizeof x, sizeof x);
        for (int i = 0; i < DIM; i++)
            square += x[i] * x[i] / DIM;
        assert_true(fabsf(square - 1) < 0.1f);
    }
    check_train(1, TINY "--attention dense --steps 4 --proxies proxies.npy text.txt");
    check_output("--attention dense there are none");
}

static void test_ctrl_c(void **state) {
    (void)state;
    struct sigaction action = {.sa_handler = press_ctrl_c, .sa_flags = SA_RESTART}, kept;
    sigaction(SIGALRM, &action, &kept);
    const struct itimerval soon = {.it_value = {.tv_usec = 300000}};
    setitimer(ITIMER_REAL, &soon, NULL);
    const int code = train(TINY "--steps 100000000 --threads 2 --out out text.txt");
    sigaction(SIGALRM, &kept, NULL);
    assert_int_equal(code, 128 + SIGINT);
    check_output("nothing is lost. To go on:\n\n    flashmsa train --resume out/msa.ckpt --out out --threads 2");
    long long said = -1;
    assert_int_equal(sscanf(strstr(output, "Stopped after step"), "Stopped after step %lld", &said), 1);
    run r;
    corpus c;
    open_checkpoint("out/msa.ckpt", &r, &c);
    assert_true(r.step > 0 && r.step == said);
    run_close(&r);
    corpus_close(&c);
    assert_int_equal(access("out/train.csv", F_OK), 0);
    assert_int_equal(access("out/train.svg", F_OK), 0);
}

/* ---- Checkpoints. ---- */

static void test_damaged_checkpoints(void **state) {
    (void)state;
    check_train(0, TINY "--steps 2 --threads 2 --out out text.txt");
    size_t count;
    char *bytes = read_file("out/msa.ckpt", &count);
    char *whole = train_allocate((long long)count, 1);
    memcpy(whole, bytes, count);

    write_file("cut.ckpt", whole, count - 100);
    check_train(1, "--resume cut.ckpt --out out text.txt");
    check_output("the checkpoint cut.ckpt is damaged: it has");
    write_file("stub.ckpt", whole, 40);
    check_train(1, "--resume stub.ckpt --out out text.txt");
    check_output("stub.ckpt is not a checkpoint");
    check_train(1, "--resume text.txt --out out text.txt");
    check_output("text.txt is not a checkpoint");
    check_train(1, "--resume none.ckpt --out out text.txt");
    check_output("cannot read the checkpoint none.ckpt: No such file or directory");

    whole[count / 2] ^= 1;
    write_file("flipped.ckpt", whole, count);
    check_train(1, "--resume flipped.ckpt --out out text.txt");
    check_output("flipped.ckpt is damaged: its checksum does not match");
    free(whole);
}

static void test_resume_refuses_other_settings(void **state) {
    (void)state;
    check_train(0, TINY "--steps 4 --threads 2 --stop-after 2 --out out text.txt");
    check_train(1, "--resume out/msa.ckpt --dim 32 --out out text.txt");
    check_output("--dim is 16 in the checkpoint, but 32 was given");
    check_train(1, "--resume out/msa.ckpt --attention dense --out out text.txt");
    check_output("the checkpoint was trained with --attention msa");
    check_train(2, "--resume out/msa.ckpt --seconds 3 --out out text.txt");
    check_output("--seconds was given with --resume");
    write_text("other.txt", 9000);
    check_train(0, "--resume out/msa.ckpt --dim 16 --threads 2 --no-blas --out out other.txt");
    check_output("the text is not the one that the checkpoint was trained on");
}

/* ---- Plan. ---- */

static void test_plan_fits_the_time(void **state) {
    (void)state;
    train_settings s = settings_default();
    pace p = {.first = {0.1, 0.2, 0.15}};
    plan_steps(&p, &s, true, 0, 60);
    assert_true(plan_seconds_left(&p, &s, true, 0) <= 60);
    assert_true(plan_seconds_left(&p, &s, true, 0) > 59);
    assert_int_equal(s.warmup_steps, ceil(0.4 * (double)s.steps));

    /* Half the speed from here on: half the steps fit. The warm-up is over, and keeps its length. */
    const int64_t before = s.steps, warmup = s.warmup_steps, step = warmup + 3;
    for (int i = 0; i < 100; i++) {
        pace_observe_step(&p, PHASE_DENSE, 0.2);
        pace_observe_step(&p, PHASE_WARMUP, 0.4);
    }
    const double left = 30;
    plan_steps(&p, &s, true, step, left);
    assert_true(s.steps < before);
    assert_int_equal(s.warmup_steps, warmup);
    assert_true(plan_seconds_left(&p, &s, true, step) <= left);
    assert_true(plan_seconds_left(&p, &s, true, step) > left - 1);

    /* However little time there is, the plan is one that can be followed. */
    plan_steps(&p, &s, true, step, -5);
    assert_true(s.steps > step);
    assert_true(s.evaluate_every > 0);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, enter_folder, leave_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_is_told_from_other_bytes),
        IN_FOLDER(test_bad_input_gets_a_sentence),
        IN_FOLDER(test_folders),
        IN_FOLDER(test_sequences),
        IN_FOLDER(test_wrong_options),
        IN_FOLDER(test_help),
        IN_FOLDER(test_output_folder),
        IN_FOLDER(test_resume_gives_the_same_bits),
        IN_FOLDER(test_comparison),
        IN_FOLDER(test_training_learns),
        IN_FOLDER(test_csv_and_picture),
        IN_FOLDER(test_proxies),
        IN_FOLDER(test_ctrl_c),
        IN_FOLDER(test_damaged_checkpoints),
        IN_FOLDER(test_resume_refuses_other_settings),
        cmocka_unit_test(test_plan_fits_the_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
