/* The flashmsa command: one subcommand a task, each in a file of its own. */
#include <stdio.h>
#include <string.h>

#include "flashmsa.h"
#include "tools.h"
#include "train/train.h"

typedef struct {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the subcommand's name; returns the exit code */
} subcommand;

static const subcommand subcommands[] = {
    {"info", "version, backends, processor features and cards", fmsa_tool_info},
    {"check", "compare every operation with a direct evaluation in fp64", fmsa_tool_check},
    {"bench", "time every operation", fmsa_tool_bench},
    {"train", "train a byte-level transformer with MSA on text", fmsa_tool_train},
};
enum { SUBCOMMANDS = sizeof subcommands / sizeof *subcommands };

static void print_usage(FILE *stream) {
    fprintf(stream,
            "flashmsa %s: training kernels for MiniMax Sparse Attention\n\nusage: flashmsa COMMAND [OPTION...]\n\n",
            fmsa_version());
    for (int i = 0; i < SUBCOMMANDS; i++)
        fprintf(stream, "  %-8s %s\n", subcommands[i].name, subcommands[i].summary);
    fprintf(stream, "\n`flashmsa COMMAND --help` lists the options of a command.\n");
}

/* Output that could not be written, to a full disk say, is a failure. */
static int close_output(int exit_code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return exit_code;
    perror("flashmsa: standard output");
    return exit_code == 0 ? 1 : exit_code;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_usage(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_usage(stdout);
        return 0;
    }
    if (strcmp(name, "--version") == 0) {
        printf("flashmsa %s\n", fmsa_version());
        return 0;
    }
    for (int i = 0; i < SUBCOMMANDS; i++) {
        if (strcmp(name, subcommands[i].name) == 0) return close_output(subcommands[i].run(argc - 1, argv + 1));
    }
    fprintf(stderr, "flashmsa: there is no command '%s'\n\n", name);
    print_usage(stderr);
    return 2;
}
