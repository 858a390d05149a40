#include "proxies.h"

#include <string.h>

#include "failure.h"
#include "files.h"
#include "metrics.h"

/* Magic, version and length of the header, then a Python dictionary, padded so that the numbers are aligned. */
static void write_npy_header(FILE *stream, const run *r) {
    enum { PREFIX = 10, ALIGNMENT = 64, MOST = 256 };
    const attention_shape *a = &r->settings.shape.attention;
    char text[MOST];
    const int used =
        snprintf(text, sizeof text, "{'descr': '<f%zu', 'fortran_order': False, 'shape': (%d, %d, %d, %d, %d), }",
                 sizeof(real), (int)r->settings.shape.layers, (int)r->settings.batch, (int)r->settings.shape.context,
                 (int)(a->proxy_heads + a->proxy_kv_heads), (int)a->proxy_head_dim);
    const int length = (PREFIX + used + 1 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - PREFIX;
    memset(text + used, ' ', (size_t)(length - used));
    text[length - 1] = '\n';
    const unsigned char prefix[PREFIX] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)length, 0};
    fwrite(prefix, 1, PREFIX, stream);
    fwrite(text, 1, (size_t)length, stream);
}

bool proxies_write(const char *path, run *r) {
    const train_settings *s = &r->settings;
    const attention_shape *a = &s->shape.attention;
    double loss;
    for (int32_t i = 0; i < s->batch; i++) {
        const int64_t at = (int64_t)i * s->shape.context;
        corpus_validation_sequence(r->corpus, i, VALIDATION_SEQUENCES, s->shape.context, r->inputs + at,
                                   r->targets + at);
    }
    if (!model_forward(&r->model, run_phase(r), r->inputs, r->targets, &loss)) return false;
    whole_file file;
    if (!whole_file_open(&file, path)) return false;
    write_npy_header(file.stream, r);
    const int64_t numbers = r->model.rows * (a->proxy_heads + a->proxy_kv_heads) * a->proxy_head_dim;
    for (int32_t layer = 0; layer < s->shape.layers; layer++)
        fwrite(r->model.layers[layer].proxy, sizeof(real), (size_t)numbers, file.stream);
    return whole_file_close(&file);
}
