/* Reads two arrays of fp32 numbers once and adds them up: what `megasdc bench bounds` calls reading g and V once.
   Sums of vectors in independent registers, so that memory and not additions takes the time. */

#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(64)));

#define LANES 16
#define UNROLL 4

double megasdc_read_both(const float *first, const float *second, int64_t elements) {
    floats of_first[UNROLL] = {0}, of_second[UNROLL] = {0};
    double total = 0;
    int64_t i = 0;
    for (; i + UNROLL * LANES <= elements; i += UNROLL * LANES) {
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) {
            floats a, b;
            memcpy(&a, first + i + u * LANES, sizeof a);
            memcpy(&b, second + i + u * LANES, sizeof b);
            of_first[u] += a;
            of_second[u] += b;
        }
    }
    for (; i < elements; i++) total += (double)first[i] + second[i];
    for (int u = 0; u < UNROLL; u++)
        for (int lane = 0; lane < LANES; lane++) total += (double)of_first[u][lane] + of_second[u][lane];
    return total;
}
