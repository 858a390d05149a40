#include "corpus.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "failure.h"

/* ---- The list of files. ---- */

typedef struct file_list {
    char **paths;
    int count;
    bool sources_only; /* keep only names that end as sources and documentation do */
} file_list;

static const char *const source_endings[] = {".c",  ".h",  ".cc",  ".cpp", ".hpp", ".cu",  ".cuh",
                                             ".py", ".md", ".rst", ".txt", ".sh",  ".toml"};
static const char *const passed_over_folders[] = {"build", "dist", "node_modules", "__pycache__"};

static bool ends_as_source(const char *name) {
    const char *ending = strrchr(name, '.');
    for (size_t i = 0; ending != NULL && i < sizeof source_endings / sizeof *source_endings; i++) {
        if (strcmp(ending, source_endings[i]) == 0) return true;
    }
    return false;
}

static bool is_passed_over(const char *name, bool folder) {
    if (name[0] == '.') return true;
    for (size_t i = 0; folder && i < sizeof passed_over_folders / sizeof *passed_over_folders; i++) {
        if (strcmp(name, passed_over_folders[i]) == 0) return true;
    }
    return false;
}

static void add_path(file_list *list, const char *path) {
    list->paths = realloc(list->paths, (size_t)(list->count + 1) * sizeof *list->paths);
    list->paths[list->count++] = strdup(path);
}

static void free_list(file_list *list) {
    for (int i = 0; i < list->count; i++)
        free(list->paths[i]);
    free(list->paths);
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool add_folder(file_list *list, const char *folder);

/* One name of a folder. Links to folders are not followed, so that no folder is read twice or without end. */
static bool add_entry(file_list *list, const char *folder, const char *name) {
    char path[4096];
    struct stat info;
    const int length = snprintf(path, sizeof path, "%s%s%s", strcmp(folder, ".") == 0 ? "" : folder,
                                strcmp(folder, ".") == 0 ? "" : "/", name);
    if (length >= (int)sizeof path || lstat(path, &info) != 0) return true;
    if (is_passed_over(name, S_ISDIR(info.st_mode))) return true;
    if (S_ISDIR(info.st_mode)) return add_folder(list, path);
    if (S_ISLNK(info.st_mode) && stat(path, &info) != 0) return true;
    if (S_ISREG(info.st_mode) && (!list->sources_only || ends_as_source(name))) add_path(list, path);
    return true;
}

static bool add_folder(file_list *list, const char *folder) {
    DIR *stream = opendir(folder);
    if (stream == NULL) return train_fail("cannot open the folder %s: %s", folder, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(stream)) != NULL;)
        ok = add_entry(list, folder, entry->d_name);
    closedir(stream);
    return ok;
}

/* ---- Files. ---- */

/* The length of a UTF-8 sequence that begins at bytes, 0 when there is none. Enough to tell text: overlong forms and
 * surrogates are let through. */
static int utf8_length(const uint8_t *bytes, int64_t left) {
    const int length = bytes[0] < 0x80       ? 1
                       : bytes[0] >> 5 == 6  ? 2
                       : bytes[0] >> 4 == 14 ? 3
                       : bytes[0] >> 3 == 30 ? 4
                                             : 0;
    if (length > left) return 0;
    for (int i = 1; i < length; i++) {
        if (bytes[i] >> 6 != 2) return 0;
    }
    return length;
}

bool corpus_is_text(const uint8_t *bytes, int64_t count) {
    if (memchr(bytes, 0, (size_t)count) != NULL) return false;
    int64_t invalid = 0;
    for (int64_t i = 0; i < count;) {
        const int length = utf8_length(bytes + i, count - i);
        if (length == 0) invalid++;
        i += length > 0 ? length : 1;
    }
    return invalid * 10 <= count;
}

/* The whole of a regular file; the caller frees *bytes. */
static bool read_file(const char *path, uint8_t **bytes, int64_t *count) {
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (file == NULL || fstat(fileno(file), &info) != 0) {
        const int error = errno;
        if (file != NULL) fclose(file);
        return train_fail("cannot read %s: %s", path, strerror(error));
    }
    *bytes = train_allocate(info.st_size, 1);
    *count = (int64_t)fread(*bytes, 1, (size_t)info.st_size, file);
    const bool failed = ferror(file) != 0;
    fclose(file);
    if (failed) {
        free(*bytes);
        return train_fail("cannot read %s: the read ended with an error", path);
    }
    return true;
}

static uint64_t extend_fingerprint(uint64_t hash, const uint8_t *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void append(uint8_t **text, int64_t *text_bytes, const uint8_t *bytes, int64_t count) {
    *text = realloc(*text, (size_t)(*text_bytes + count + 1));
    memcpy(*text + *text_bytes, bytes, (size_t)count);
    *text_bytes += count;
}

static const int64_t most_bytes = (int64_t)1 << 30;

/* Adds one file. required: the user named it, so that it must hold text. */
static bool add_file(corpus *c, const char *path, bool required) {
    uint8_t *bytes = NULL;
    int64_t count = 0;
    if (!read_file(path, &bytes, &count)) return false;
    const bool is_text = corpus_is_text(bytes, count);
    bool ok = true;
    if (count == 0 || !is_text) {
        c->skipped++;
        if (required && count == 0) ok = train_fail("%s is empty; give a file with text", path);
        if (required && count > 0) {
            ok = train_fail("%s is not text (it holds zero bytes, or bytes that are not UTF-8); give text files", path);
        }
    } else if (c->training_bytes + c->validation_bytes + count > most_bytes) {
        ok = train_fail("the input is larger than 1 GiB at %s; give fewer files", path);
    } else {
        const int64_t training = count - count / 10;
        append(&c->training, &c->training_bytes, bytes, training);
        append(&c->validation, &c->validation_bytes, bytes + training, count - training);
        c->fingerprint = extend_fingerprint(c->fingerprint, bytes, count);
        c->files++;
    }
    free(bytes);
    return ok;
}

static bool add_files(corpus *c, file_list *list, bool required) {
    bool ok = true;
    if (list->count > 0) qsort(list->paths, (size_t)list->count, sizeof *list->paths, compare_paths);
    for (int i = 0; ok && i < list->count; i++)
        ok = add_file(c, list->paths[i], required);
    return ok;
}

static bool add_input(corpus *c, const char *path, bool sources_only) {
    struct stat info;
    if (stat(path, &info) != 0) return train_fail("cannot read %s: %s", path, strerror(errno));
    if (S_ISREG(info.st_mode)) return add_file(c, path, true);
    if (!S_ISDIR(info.st_mode)) return train_fail("%s is neither a file nor a folder", path);
    file_list list = {.sources_only = sources_only};
    const int files_before = c->files;
    bool ok = add_folder(&list, path) && add_files(c, &list, false);
    free_list(&list);
    if (ok && c->files == files_before && !sources_only) ok = train_fail("the folder %s holds no text file", path);
    return ok;
}

static bool check_lengths(const corpus *c, int64_t context, bool given) {
    if (!given && c->files == 0) {
        return train_fail("the current folder holds no source or documentation files to train on: run it in the "
                          "repository, or give files or folders, as in `flashmsa train book.txt`");
    }
    if (c->training_bytes > context && c->validation_bytes > context) return true;
    return train_fail("the input holds %lld bytes of text, of which %lld are for training and %lld for validation; "
                      "each part must be longer than the context of %lld: give more text, or a smaller --context",
                      (long long)(c->training_bytes + c->validation_bytes), (long long)c->training_bytes,
                      (long long)c->validation_bytes, (long long)context);
}

bool corpus_open(corpus *c, char *const *paths, int count, int64_t context) {
    *c = (corpus){.fingerprint = 0xcbf29ce484222325u};
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = add_input(c, paths[i], false);
    if (count == 0) ok = add_input(c, ".", true);
    ok = ok && check_lengths(c, context, count > 0);
    if (!ok) corpus_close(c);
    return ok;
}

void corpus_close(corpus *c) {
    free(c->training);
    free(c->validation);
    *c = (corpus){0};
}

/* ---- Sequences. ---- */

static void copy_sequence(const uint8_t *text, int64_t context, uint8_t *inputs, uint8_t *targets) {
    memcpy(inputs, text, (size_t)context);
    memcpy(targets, text + 1, (size_t)context);
}

void corpus_training_batch(const corpus *c, random_state *random, int64_t count, int64_t context, uint8_t *inputs,
                           uint8_t *targets) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = random_below(random, c->training_bytes - context);
        copy_sequence(c->training + begin, context, inputs + i * context, targets + i * context);
    }
}

void corpus_validation_sequence(const corpus *c, int64_t index, int64_t total, int64_t context, uint8_t *inputs,
                                uint8_t *targets) {
    const int64_t last = c->validation_bytes - context - 1;
    const int64_t begin = total > 1 ? last * index / (total - 1) : 0;
    copy_sequence(c->validation + begin, context, inputs, targets);
}
