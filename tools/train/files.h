/* Files that are written whole or not at all: under another name first, renamed when complete. */
#ifndef TRAIN_FILES_H
#define TRAIN_FILES_H

#include <stdbool.h>
#include <stdio.h>

typedef struct whole_file {
    FILE *stream;
    char path[4096];
    char temporary_path[4096 + 16];
} whole_file;

bool whole_file_open(whole_file *file, const char *path);

/* Puts the file in place; on any error since opening it removes it instead, and says so. */
bool whole_file_close(whole_file *file);

/* The folder exists afterwards and can be written to. */
bool make_folder(const char *path);

#endif
