#include "files.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failure.h"

bool whole_file_open(whole_file *file, const char *path) {
    snprintf(file->path, sizeof file->path, "%s", path);
    snprintf(file->temporary_path, sizeof file->temporary_path, "%s.new", file->path);
    file->stream = fopen(file->temporary_path, "wb");
    if (file->stream == NULL) return train_fail("cannot write %s: %s", path, strerror(errno));
    return true;
}

bool whole_file_close(whole_file *file) {
    /* fsync before the rename: after a power cut there is the old file or the new one, never an empty one. */
    bool ok = fflush(file->stream) == 0 && !ferror(file->stream) && fsync(fileno(file->stream)) == 0;
    int error = errno;
    if (fclose(file->stream) != 0) ok = false;
    if (ok) {
        ok = rename(file->temporary_path, file->path) == 0;
        error = errno;
    }
    if (ok) return true;
    unlink(file->temporary_path);
    return train_fail("cannot write %s: %s", file->path, strerror(error));
}

static bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

bool make_folder(const char *path) {
    char parent[4096];
    if (snprintf(parent, sizeof parent, "%s", path) >= (int)sizeof parent) {
        return train_fail("the path of the output folder is too long: %.64s...", path);
    }
    for (char *at = parent; *at != 0; at++) {
        if (*at != '/' || at == parent) continue;
        *at = 0;
        mkdir(parent, 0777);
        *at = '/';
    }
    mkdir(parent, 0777);
    const int error = errno;
    if (!is_folder(path)) return train_fail("cannot make the output folder %s: %s", path, strerror(error));
    if (access(path, W_OK | X_OK) != 0) {
        return train_fail("cannot write in the output folder %s: %s", path, strerror(errno));
    }
    return true;
}
