/* `flashmsa info`: what this library is, and what it can run on here. */
#include <stdio.h>
#include <string.h>

#include "flashmsa.h"
#include "tools.h"

static void print_devices(const char *label, fmsa_device device) {
    const int32_t count = fmsa_device_count(device);
    if (count == 0) printf("%s=none\n", label);
    for (int32_t i = 0; i < count; i++) {
        char text[256];
        const fmsa_status status = fmsa_device_description(device, i, text, sizeof text);
        printf("%s%d=%s\n", label, i, status == FMSA_OK ? text : fmsa_last_error());
    }
}

int fmsa_tool_info(int argc, char **argv) {
    if (argc > 1) {
        const int help = strcmp(argv[1], "--help") == 0;
        fprintf(help ? stdout : stderr,
                "usage: flashmsa info\nPrints lines \"key=value\" on the library and its devices.\n");
        return help ? 0 : 2;
    }
    fputs(fmsa_build_info(), stdout);
    print_devices("cpu", FMSA_DEVICE_CPU);
    print_devices("cuda", FMSA_DEVICE_CUDA);
    return 0;
}
