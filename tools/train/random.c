#include "random.h"

#include <math.h>

static uint64_t rotate_left(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

void random_seed(random_state *state, uint64_t seed) {
    for (int i = 0; i < 4; i++) {
        seed += 0x9e3779b97f4a7c15u;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        state->word[i] = z ^ (z >> 31);
    }
}

uint64_t random_next(random_state *state) {
    uint64_t *s = state->word;
    const uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

static double random_unit(random_state *state) {
    return (double)(random_next(state) >> 11) * 0x1p-53;
}

int64_t random_below(random_state *state, int64_t bound) {
    return (int64_t)(random_next(state) % (uint64_t)bound);
}

double random_normal(random_state *state) {
    const double radius = sqrt(-2 * log(1 - random_unit(state)));
    return radius * cos(2 * 3.14159265358979323846 * random_unit(state));
}
