/* Bounds a gradient in place on the host, in one pass; megasdc.tensors.bound has the formula and says what each sum is.

   Blocks are first checked for anything to do, without a square root or a branch, while their sums are taken; then, if
   there was an alarm, vectors of the block; only those with an alarm of their own follow the formula. Both checks compare
   squares: y^2 with the smallest limit's, where y is the element times SHIFT. They may raise a false alarm but miss
   nothing:
   - An element of over 2^23, NaN or Inf makes the block's sum of y^2 reach LARGEST, so that y^2 never overflows unseen;
     a limit that overflows is above every y^2.
   - Where y^2 underflows (|element| < 2^-100) nothing has to be found, because limits are larger: V is 0, and the
     element passes, or at least 2^-149, and sqrt(LEAST_RATIO 2^-149) > 2^-86. A pass with smaller limits is not sure.
   - MARGIN covers the rounding of products and limits.
   The largest ratio comes out of the same checks: a ratio above the largest so far is an alarm, and these become rare
   after the first block.

   The sums of a block depend on its elements and limits alone and not on the largest ratio so far, so that a repeated
   step has the same norm, bit by bit. Measured: a processor's own fetching ahead ends with a page, so the first line of
   the next block, which is as long as a page, is asked for by hand (9 % in the last cache); more of it costs time. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define LANES (VECTOR_BYTES / 4)
#define UNROLL 4
#define BLOCK 1024 /* elements: few fp32 additions a lane, so that a block's sums are good to 1e-6 */

#define SHIFT 0x1p37f
#define LARGEST 0x1p120f
#define SMALLEST 0x1p-90f
#define LEAST_RATIO 0x1p-20
#define LEAST_LIMIT 0x1p-90
#define MARGIN (1.0 - 0x1p-20)

enum { FP32, BF16, FP16 };
enum { KEEP, ZERO, BOUND };
enum { SQUARES, MASS, REMOVED, BY_ABSOLUTE, BY_SPIKE, NUM_NAN, NUM_INF, LARGEST_RATIO };

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef double doubles __attribute__((vector_size(VECTOR_BYTES * 2)));

#define INLINE static inline __attribute__((always_inline))

struct limits {
    float absolute, spike, root_factor, root_floor; /* fp32 numbers of the formula; the others are for ratios */
    double theta, floor, v_factor, scale;
    int32_t non_finite;
};

/* What a pass carries from block to block. */
struct pass {
    struct limits limits;
    float of_v, of_floor, of_absolute; /* what the check compares y^2 with: of_v V, of_floor, of_absolute */
    int has_v, sure;                   /* sure: the check misses nothing */
    float candidate;                   /* sqrt(largest ratio) scale, rounded down */
    doubles squares, mass;
    double removed, largest_ratio;
    int64_t counts[4];
};

INLINE floats all(float value) { return value - (floats){0}; }

INLINE floats choose(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

/* Whether a lane is negative, as those of a true condition are. */
INLINE int any(ints condition) {
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)condition, _mm512_setzero_si512()) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)condition) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= condition[lane];
    return found < 0;
#endif
}

INLINE int32_t count(ints condition) {
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum -= condition[lane];
    return sum;
}

INLINE floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }

INLINE floats load(const void *from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE floats widen(halves h, int type) {
    if (type == BF16) return (floats)(__builtin_convertvector(h, words) << 16);
#if defined(__F16C__) && defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)h);
#else
    _Float16 parts[LANES];
    floats x;
    memcpy(parts, &h, sizeof h);
    for (int lane = 0; lane < LANES; lane++) x[lane] = parts[lane];
    return x;
#endif
}

/* Rounds towards zero; x is at least 0 and not NaN. */
INLINE halves narrow(floats x, int type) {
    if (type == BF16) return __builtin_convertvector((words)x >> 16, halves);
#if defined(__F16C__) && defined(__AVX512F__)
    return (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_ZERO);
#elif defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_ZERO);
#else
    halves h;
    for (int lane = 0; lane < LANES; lane++) {
        _Float16 nearest = (_Float16)x[lane];
        uint16_t bits;
        memcpy(&bits, &nearest, sizeof bits);
        h[lane] = bits - ((float)nearest > x[lane]);
    }
    return h;
#endif
}

INLINE const char *at(const void *gradient, int64_t element, int type) {
    return (const char *)gradient + element * (type == FP32 ? 4 : 2);
}

INLINE floats read_gradient(const void *gradient, int64_t element, int type) {
    if (type == FP32) return load(at(gradient, element, type));
    halves h;
    memcpy(&h, at(gradient, element, type), sizeof h);
    return widen(h, type);
}

INLINE doubles wide(floats x) { return __builtin_convertvector(x, doubles); }

/* a b - c; rounded once where the processor can, which takes an instruction less. */
INLINE floats difference(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b - c;
#endif
}

INLINE floats tree(const floats *x) {
    floats sum = x[0] + x[1];
    for (int i = 2; i < UNROLL; i += 2) sum += x[i] + x[i + 1];
    return sum;
}

/* Sets what the check compares with, from the limits and the largest ratio so far. */
static void prepare(struct pass *pass) {
    const struct limits *limits = &pass->limits;
    double ratio = pass->largest_ratio < limits->theta ? pass->largest_ratio : limits->theta;
    double spike = ratio * limits->scale * limits->scale * SHIFT * SHIFT * MARGIN;
    double absolute = (double)limits->absolute * SHIFT;
    double candidate = sqrt(pass->largest_ratio) * limits->scale * MARGIN;
    pass->sure = limits->absolute >= LEAST_LIMIT;
    if (pass->has_v) {
        const double factor = ratio * limits->scale * limits->scale;
        pass->sure &= factor * limits->v_factor >= LEAST_RATIO;
        pass->sure &= limits->floor == 0 || factor * limits->floor >= LEAST_LIMIT * LEAST_LIMIT;
    }
    pass->of_v = (float)fmin(spike * limits->v_factor, FLT_MAX);
    pass->of_floor = (float)fmin(spike * limits->floor, FLT_MAX);
    pass->of_absolute = (float)fmin(absolute * absolute * MARGIN, FLT_MAX);
    pass->candidate = (float)fmin(candidate, FLT_MAX);
}

/* Takes the sums of a block and tells whether it may need anything else, at the least cost: the floor of V is left out,
   and sums of squares stand for the largest of them. `treat` looks closer. */
INLINE int check(const void *gradient, const float *second_moment, const struct pass *pass, int type, floats *squares,
                 floats *mass) {
    floats squares_of[UNROLL] = {0}, mass_of[UNROLL] = {0};
    ints alarms[UNROLL] = {0};
    __builtin_prefetch(at(gradient, BLOCK, type));
    if (second_moment) __builtin_prefetch(second_moment + BLOCK);
    for (int64_t i = 0; i < BLOCK; i += UNROLL * LANES) {
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) {
            const int64_t element = i + u * LANES;
            const floats x = read_gradient(gradient, element, type), y = x * SHIFT, square = y * y;
            squares_of[u] += square;
            mass_of[u] += magnitude(x);
            if (second_moment) /* the sign of a difference is an alarm */
                alarms[u] |= (ints)difference(load(second_moment + element), all(pass->of_v), square);
        }
    }
    for (int u = 0; u < UNROLL; u++) alarms[0] |= alarms[u] | (ints)(pass->of_absolute - squares_of[u]);
    *squares = tree(squares_of);
    *mass = tree(mass_of);
    return any(alarms[0]);
}

/* A block's sums are good if no y^2 has overflowed and those that underflowed do not matter, in each lane. */
INLINE int sums_are_good(floats squares, floats mass) {
    return !any(~((squares < LARGEST) & ((squares > SMALLEST) | (mass == 0))));
}

/* Looks at the few elements whose ratio may be the largest so far. */
static void update_ratio(struct pass *pass, ints candidates, floats m, floats v) {
    const struct limits *limits = &pass->limits;
    for (int lane = 0; lane < LANES; lane++) {
        if (!candidates[lane]) continue;
        const double g = m[lane] / limits->scale, raw = v[lane] * limits->v_factor;
        const double ratio = g * g / (raw > limits->floor ? raw : limits->floor);
        if (ratio > pass->largest_ratio) pass->largest_ratio = ratio;
    }
    prepare(pass);
}

/* Follows the formula for one vector of elements, if it may need anything; tells whether it changed any. */
INLINE int treat(void *gradient, const float *second_moment, int64_t element, struct pass *pass, int type,
                 double *added) {
    const struct limits *limits = &pass->limits;
    const floats infinity = all(INFINITY), x = read_gradient(gradient, element, type), m = magnitude(x);
    const floats y = x * SHIFT, square = y * y;
    ints alarm = (ints)(pass->of_absolute - square) | ~(square < LARGEST);
    if (second_moment) {
        const floats of_v = load(second_moment + element) * pass->of_v;
        alarm |= (ints)(of_v - square) & (ints)(pass->of_floor - square);
    }
    if (pass->sure && !any(alarm)) return 0;
    const ints finite = m < infinity, infinite = m == infinity, nan = ~(finite | infinite);
    floats limit = all(limits->absolute);
    ints of_spike = {0};
    if (second_moment) {
        const floats v = load(second_moment + element), positive = (floats)((ints)v & ~(v < 0));
        floats root = positive;
        for (int lane = 0; lane < LANES; lane++) root[lane] = sqrtf(positive[lane]);
        root *= limits->root_factor;
        root = choose(root < limits->root_floor, all(limits->root_floor), root);
        const ints known = (root > 0) & (root < infinity);
        const floats spike = choose(known, root * limits->spike, infinity);
        of_spike = spike < limit;
        limit = choose(of_spike, spike, limit);
        const ints candidates = finite & known & (m > 0) & (m >= root * pass->candidate);
        if (any(candidates)) update_ratio(pass, candidates, m, v);
    }
    const ints over = finite & (m > limit);
    ints to_limit = over, to_zero = {0};
    if (limits->non_finite == ZERO) to_zero = ~finite;
    if (limits->non_finite == BOUND) {
        to_limit |= infinite & (limit < infinity);
        to_zero = ~finite & ~to_limit;
    }
    pass->counts[2] += count(nan);
    pass->counts[3] += count(infinite);
    const ints changed = to_limit | to_zero;
    if (!any(changed)) return 0;

    pass->counts[0] += count(over & ~of_spike);
    pass->counts[1] += count(over & of_spike);
    limit = choose(to_limit, limit, all(0)); /* what takes its place */
    const ints sign = (ints)x & ~0x7fffffff & to_limit;
    if (type == FP32) {
        const floats after = choose(changed, (floats)((ints)limit | sign), x);
        memcpy((char *)gradient + element * 4, &after, sizeof after);
    } else {
        halves h, mask = __builtin_convertvector((words)changed, halves);
        memcpy(&h, at(gradient, element, type), sizeof h);
        const halves bounded = narrow(limit, type);
        limit = widen(bounded, type);
        h = (h & ~mask) | ((bounded | __builtin_convertvector((words)sign >> 16, halves)) & mask);
        memcpy((char *)gradient + element * 2, &h, sizeof h);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (over[lane]) pass->removed += (double)m[lane] - limit[lane];
        else if (changed[lane]) *added += limit[lane];
    }
    return 1;
}

/* Follows the formula for a block, and takes its sums in fp64 where those of the check are not good. */
INLINE int treat_block(void *gradient, const float *second_moment, struct pass *pass, int type, int good,
                       floats *squares, floats *mass) {
    const double removed = pass->removed;
    double added = 0;
    int changed = 0;
    for (int64_t i = 0; i < BLOCK; i += LANES) changed |= treat(gradient, second_moment, i, pass, type, &added);
    if (good && !changed) return 0;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const floats m = magnitude(read_gradient(gradient, i, type));
        const doubles exact = wide(choose(m < INFINITY, m, all(0)));
        pass->squares += exact * exact;
        pass->mass += exact;
    }
    pass->mass[0] += pass->removed - removed - added;
    *squares = *mass = all(0);
    return changed;
}

INLINE int block(void *gradient, const float *second_moment, struct pass *pass, int type) {
    floats squares, mass;
    const int alarm = check(gradient, second_moment, pass, type, &squares, &mass);
    const int good = sums_are_good(squares, mass);
    int changed = 0;
    if (alarm || !good || !pass->sure)
        changed = treat_block(gradient, second_moment, pass, type, good, &squares, &mass);
    pass->squares += wide(squares) * (1.0 / ((double)SHIFT * SHIFT));
    pass->mass += wide(mass);
    return changed;
}

INLINE void run(void *gradient, const float *second_moment, int64_t elements, struct pass *pass, int type) {
    const int64_t width = type == FP32 ? 4 : 2, whole = elements / BLOCK * BLOCK, rest = elements - whole;
    for (int64_t i = 0; i < whole; i += BLOCK)
        block((char *)gradient + i * width, second_moment ? second_moment + i : 0, pass, type);
    if (rest) {
        char last[BLOCK * 4] = {0}; /* zeros add nothing and are never bounded */
        float v[BLOCK] = {0};
        memcpy(last, (char *)gradient + whole * width, rest * width);
        if (second_moment) memcpy(v, second_moment + whole, rest * 4);
        if (block(last, second_moment ? v : 0, pass, type)) memcpy((char *)gradient + whole * width, last, rest * width);
    }
}

void megasdc_bound(void *gradient, const float *second_moment, int64_t elements, int32_t type,
                   const struct limits *limits, double *sums) {
    struct pass pass = {.limits = *limits, .has_v = second_moment != 0, .largest_ratio = sums[LARGEST_RATIO]};
    prepare(&pass);
#define CASE(type) \
    if (second_moment) run(gradient, second_moment, elements, &pass, type); \
    else run(gradient, 0, elements, &pass, type);
    if (type == FP32) { CASE(FP32) } else if (type == BF16) { CASE(BF16) } else { CASE(FP16) }
    for (int lane = 0; lane < LANES; lane++) {
        sums[SQUARES] += pass.squares[lane];
        sums[MASS] += pass.mass[lane] / limits->scale;
    }
    sums[REMOVED] += pass.removed / limits->scale;
    for (int i = 0; i < 4; i++) sums[BY_ABSOLUTE + i] += pass.counts[i];
    sums[LARGEST_RATIO] = pass.largest_ratio;
}
