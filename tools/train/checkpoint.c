#include "checkpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "files.h"

/* The file is this header, then weights, first and second moments (reals), then the records; then the checksum of all
 * of that. Numbers are stored as they lie in memory: a machine of the other byte order sees another magic number. */
typedef struct header {
    uint64_t magic;
    uint32_t version;
    uint32_t real_bytes;
    train_settings settings;
    uint64_t fingerprint;
    random_state random;
    int64_t step, optimizer_step;
    double seconds;
    run_sums sums;
    int64_t weight_count, record_count;
} header;

static const uint64_t magic = 0x4e494152544d5346u; /* "FSMTRAIN" in the byte order of x86 and Arm */
static const uint32_t version = 1;

/* FNV-1a over 8-byte words; every part of the file is a whole number of them. */
static uint64_t extend_checksum(uint64_t checksum, const void *data, size_t bytes) {
    const char *at = data;
    for (size_t i = 0; i + sizeof(uint64_t) <= bytes; i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, at + i, sizeof word);
        checksum = (checksum ^ word) * 0x100000001b3u;
    }
    return checksum;
}

static const uint64_t checksum_start = 0xcbf29ce484222325u;

/* The parts after the header, in the order of the file. */
typedef struct part {
    void *data;
    size_t bytes;
} part;
enum { PARTS = 4 };

static void list_parts(const run *r, part parts[PARTS]) {
    const size_t bytes = (size_t)r->model.weight_count * sizeof(real);
    parts[0] = (part){r->model.weights, bytes};
    parts[1] = (part){r->optimizer.first, bytes};
    parts[2] = (part){r->optimizer.second, bytes};
    parts[3] = (part){r->history.records, (size_t)r->history.count * sizeof(record)};
}

bool checkpoint_save(const char *path, const run *r) {
    header h;
    memset(&h, 0, sizeof h);
    h.magic = magic;
    h.version = version;
    h.real_bytes = sizeof(real);
    h.settings = r->settings;
    h.fingerprint = r->fingerprint;
    h.random = r->random;
    h.step = r->step;
    h.optimizer_step = r->optimizer.step;
    h.seconds = r->seconds;
    h.sums = r->sums;
    h.weight_count = r->model.weight_count;
    h.record_count = r->history.count;

    whole_file file;
    if (!whole_file_open(&file, path)) return false;
    fwrite(&h, sizeof h, 1, file.stream);
    uint64_t checksum = extend_checksum(checksum_start, &h, sizeof h);
    part parts[PARTS];
    list_parts(r, parts);
    for (int i = 0; i < PARTS; i++) {
        if (parts[i].bytes > 0) fwrite(parts[i].data, parts[i].bytes, 1, file.stream);
        checksum = extend_checksum(checksum, parts[i].data, parts[i].bytes);
    }
    fwrite(&checksum, sizeof checksum, 1, file.stream);
    return whole_file_close(&file);
}

static bool read_header(const char *path, FILE *stream, header *h) {
    if (fread(h, sizeof *h, 1, stream) != 1 || h->magic != magic) {
        return train_fail("%s is not a checkpoint of flashmsa train", path);
    }
    if (h->version != version) {
        return train_fail("%s is a checkpoint of version %u; this program reads version %u", path, h->version, version);
    }
    if (h->real_bytes != sizeof(real)) {
        return train_fail("%s holds numbers of %u bytes; this program trains with numbers of %zu", path, h->real_bytes,
                          sizeof(real));
    }
    return true;
}

static FILE *open_checkpoint(const char *path, header *h) {
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        train_fail("cannot read the checkpoint %s: %s", path, strerror(errno));
        return NULL;
    }
    if (read_header(path, stream, h)) return stream;
    fclose(stream);
    return NULL;
}

bool checkpoint_read_settings(const char *path, train_settings *settings) {
    header h;
    FILE *stream = open_checkpoint(path, &h);
    if (stream == NULL) return false;
    fclose(stream);
    *settings = h.settings;
    return true;
}

static bool read_parts(const char *path, FILE *stream, const header *h, run *r) {
    /* The file's length bounds the records before memory for them is asked for. */
    const long long expected = (long long)sizeof *h + 3 * r->model.weight_count * (long long)sizeof(real) +
                               h->record_count * (long long)sizeof(record) + (long long)sizeof(uint64_t);
    fseek(stream, 0, SEEK_END);
    const long long actual = ftell(stream);
    fseek(stream, (long)sizeof *h, SEEK_SET);
    if (h->weight_count != r->model.weight_count || h->record_count < 0 || actual != expected) {
        return train_fail("the checkpoint %s is damaged: it has %lld bytes instead of %lld; use an older one", path,
                          actual, expected);
    }
    r->history.count = h->record_count;
    r->history.records = calloc((size_t)h->record_count + 1, sizeof(record));
    part parts[PARTS];
    list_parts(r, parts);
    uint64_t checksum = extend_checksum(checksum_start, h, sizeof *h), stored = 0;
    bool ok = true;
    for (int i = 0; ok && i < PARTS; i++) {
        ok = parts[i].bytes == 0 || fread(parts[i].data, parts[i].bytes, 1, stream) == 1;
        checksum = extend_checksum(checksum, parts[i].data, parts[i].bytes);
    }
    ok = ok && fread(&stored, sizeof stored, 1, stream) == 1 && stored == checksum;
    return ok || train_fail("the checkpoint %s is damaged: its checksum does not match; use an older one", path);
}

bool checkpoint_load(const char *path, run *r, const corpus *corpus) {
    header h;
    FILE *stream = open_checkpoint(path, &h);
    if (stream == NULL) return false;
    bool ok = run_open(r, &h.settings, corpus);
    if (ok) {
        ok = read_parts(path, stream, &h, r);
        r->fingerprint = h.fingerprint;
        r->random = h.random;
        r->step = h.step;
        r->optimizer.step = h.optimizer_step;
        r->seconds = h.seconds;
        r->sums = h.sums;
        if (!ok) run_close(r);
    }
    fclose(stream);
    return ok;
}
