/* What `python -m tools.bench bounds` calls reading g and V once, and what it calls comparing them: no pass that bounds can do less
   than to compare g^2 with a multiple of V. Vectors in independent registers, so that memory and not arithmetic takes the
   time. */

#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));

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

/* How many lanes hold an element whose g^2 / V is above `ratio`. */
int64_t megasdc_compare_both(const float *gradient, const float *second_moment, int64_t elements, float ratio) {
    ints above[UNROLL] = {0};
    int64_t found = 0, i = 0;
    for (; i + UNROLL * LANES <= elements; i += UNROLL * LANES) {
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) {
            floats g, v;
            memcpy(&g, gradient + i + u * LANES, sizeof g);
            memcpy(&v, second_moment + i + u * LANES, sizeof v);
            above[u] |= (ints)(v * ratio - g * g); /* the sign of a difference */
        }
    }
    for (; i < elements; i++) above[0][i % LANES] |= gradient[i] * gradient[i] > ratio * second_moment[i] ? -1 : 0;
    for (int u = 1; u < UNROLL; u++) above[0] |= above[u];
    for (int lane = 0; lane < LANES; lane++) found += above[0][lane] < 0;
    return found;
}
