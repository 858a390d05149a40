/* Gives files to the fuzz target one after another, for compilers without libFuzzer and for the tests. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv) {
    enum { MOST_BYTES = 1 << 16 };
    static uint8_t data[MOST_BYTES];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (file == NULL) {
            fprintf(stderr, "%s: cannot be read\n", argv[i]);
            return 1;
        }
        const size_t size = fread(data, 1, MOST_BYTES, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d inputs\n", argc - 1);
    return argc > 1 ? 0 : 1;
}
