/* The subcommands of the flashmsa command. Each takes its own arguments (argv[0] is its name) and returns the exit
 * code: 0 success, 1 failure, 2 wrong usage. */
#ifndef FMSA_TOOLS_H
#define FMSA_TOOLS_H

int fmsa_tool_info(int argc, char **argv);
int fmsa_tool_check(int argc, char **argv);
int fmsa_tool_bench(int argc, char **argv);

#endif
