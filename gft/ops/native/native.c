/* Quantizing activations, summing votes and moving weights, on a CPU, in one pass each. Built when first needed (build.py).
 *
 *     noise.h    random numbers
 *     stored.h   weights as bytes, as values, as floats
 *     votes.h    grad_output^T · x of bytes
 *     tokens.h   x or grad_output, in whole numbers, times levels
 *     mean.h     votes -> a running mean of them
 *     moves.h    votes -> factors -> moved weights
 *
 * Every operation is a function of a job and of a range of rows, so that threads can share it (gft_take_parts). They equal
 * the torch definition bit for bit: integers throughout, and float products that are followed by no addition (built with
 * -ffp-contract=off). Loops are written for the compiler to vectorise: over short arrays, in the narrowest type that holds
 * the numbers, without branches.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define BLOCK 2048 /* elements at a time: noise, old and new values of them stay in the first-level cache */

/* ------------------------------------------------------------------------------------------------ interface.py */

/* philox.NoiseKey: which random numbers. */
typedef struct {
    uint64_t seed, first; /* element of the whole */
    uint32_t step, stream, call;
} NoiseKey;

/* storage.Storage: how a weight's bytes are read. */
typedef struct {
    int32_t memory, inertia, field_bits;
    int32_t low_bits; /* below the level: memory's, or spare ones */
    int32_t largest; /* level */
    int32_t lowest, limit; /* of a value */
} Storage;

/* rounding.RoundingPlan: move = votes · row · column, in 1/65536 of a stored value, less a dead zone. */
typedef struct {
    const float *row, *column;
    float cap, threshold_share; /* the latter of the former */
    int32_t follow; /* chance of a level to follow, in 1/256 */
} RoundingPlan;

/* topk.TopKPlan: the least and the largest |vote| of K. */
typedef struct {
    int64_t least, largest, p_min;
} TopKPlan;

/* How second moments are renewed, and made factors of moves. */
typedef struct {
    double share; /* of the newest */
    float size; /* of a move, in 1/65536 of a stored value, rms */
    int32_t shift; /* bits taken off the votes before they were squared */
    int32_t rescale_step; /* rows and columns by the running moments, but the step as a whole by its own */
} Moments;

/* The jobs. Shapes are said once, here: of x (tokens, columns), grad (tokens, rows), votes and stored weights (rows, columns). */
typedef struct {
    const float *values, *factor; /* (tokens, columns), (columns,) */
    int8_t *out; /* as values */
    double *squares; /* (pieces, columns): sums over pieces of `piece` rows */
    int64_t columns, piece;
    float top, largest_squared;
    NoiseKey key;
} QuantizeJob;

typedef struct {
    const uint8_t *stored;
    void *out; /* float, or int8 if bytes, and then of levels alone */
    float factor;
    int64_t columns;
    int32_t bytes;
    Storage storage;
} LevelsJob;

typedef struct {
    const int8_t *grad, *x;
    uint8_t *packed; /* x, by gft_pack_x */
    int32_t *votes;
    int64_t tokens, rows, columns;
} VotesJob;

typedef struct {
    const float *values, *by_feature; /* (tokens, features), (features,) or none */
    void *q; /* as values: int8, or int32 */
    float *scale; /* (tokens,) */
    int64_t features;
    float largest, smallest, factor; /* of q, of a token's amax, of the scale */
    int32_t bytes; /* is q int8? */
} TokensJob;

typedef struct {
    const void *q; /* (tokens, features) int8, or int32 */
    const int8_t *levels; /* (outputs, features) */
    const float *scale, *by_output; /* (tokens,), (outputs,) or none */
    uint8_t *packed_levels;
    int8_t *packed_tokens;
    int32_t *starts;
    float *out; /* (tokens, outputs) */
    int64_t tokens, features, outputs;
    int32_t bytes; /* is q int8? */
} ProductJob;

typedef struct {
    int8_t *stored; /* (rows, columns) */
    const void *votes; /* int32, or int64 if wide */
    const float *scale, *inverse; /* (columns,): of the mean as it lies, and 65536 over that of the mean to come */
    float *amax; /* (pieces, columns): over pieces of `piece` rows */
    int64_t *largest_vote; /* (pieces,) */
    int32_t *moves; /* (rows, columns) */
    int64_t columns, piece, first_row; /* of these in the whole matrix */
    int32_t wide;
    float share, rest, per_move;
    NoiseKey key; /* of the whole matrix */
} MeanJob;

typedef struct {
    const void *votes; /* int32, or int64 if wide */
    int64_t *by_row, *by_column; /* (rows,), and (pieces, columns): over pieces of `piece` rows */
    int64_t columns, piece;
    int32_t wide, shift;
} SquaresJob;

typedef struct {
    uint8_t *stored;
    const void *votes; /* int32, or int64 if wide */
    int64_t columns;
    int32_t wide;
    Storage storage;
    RoundingPlan rounding; /* one of the two */
    TopKPlan topk;
    NoiseKey key;
} MoveJob;

static inline int at_most(int64_t a, int most) { return a < most ? (int)a : most; }

/* a within -most..most: two instructions, if it is said as this processor's compiler knows it. */
static inline float within(float a, float most) {
#if defined(__aarch64__)
    return fmaxf(fminf(a, most), -most);
#else
    return a < -most ? -most : a > most ? most : a;
#endif
}

#include "noise.h"
#include "stored.h"
#include "votes.h"
#include "tokens.h"
#include "mean.h"
#include "moves.h"

/* ------------------------------------------------------------------------------------------------ threads */

typedef int64_t Work(const void *job, int64_t from, int64_t to);

/* A job cut into parts of `step` rows, which several threads take one by one. `total` sums what the work returns. */
typedef struct {
    Work *work;
    const void *job;
    int64_t rows, step, next, total;
} Parts;

/* What each thread runs: it takes parts until none is left, so one that is late, or never comes, holds up nobody. */
void gft_take_parts(Parts *parts) {
    for (;;) {
        int64_t from = __atomic_fetch_add(&parts->next, parts->step, __ATOMIC_RELAXED);
        if (from >= parts->rows) return;
        int64_t left = parts->rows - from, count = left < parts->step ? left : parts->step;
        __atomic_fetch_add(&parts->total, parts->work(parts->job, from, from + count), __ATOMIC_RELAXED);
    }
}

/* ------------------------------------------------------------------------------------------------ activations.quantize */

/* Part of a row, whose noise is one byte of each number, above `shift` bits. Squares are added by feature. Returns how many
 * values are not finite. */
static inline int32_t quantize_part(const float *restrict values, const float *restrict factor, const uint16_t *restrict noise,
                                    int shift, int8_t *restrict q, double *restrict squares, int count, float top,
                                    float largest_squared) {
    int32_t wrong = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        int32_t finite = (bits & 0x7F800000u) != 0x7F800000u;
        wrong += !finite;
        float v = finite ? values[i] : 0.0f;
        int32_t chance = (noise[i] >> shift & 255) << 8 | 128;
        q[i] = (int8_t)(((int32_t)within(v * factor[i], top) + chance) >> 16);
        double bounded = within(v, largest_squared);
        squares[i] += bounded * bounded;
    }
    return wrong;
}

/* Rows `from` to `to` of values, of which `from` begins a piece. Returns how many values are not finite. */
int64_t gft_quantize(const QuantizeJob *job, int64_t from, int64_t to) {
    _Alignas(64) uint16_t room[ROOM];
    int64_t columns = job->columns, not_finite = 0;
    int64_t at_once = columns < BLOCK ? BLOCK / columns : 1; /* pairs of rows, which share their noise */
    for (int64_t row = from; row < to;) {
        int64_t pair = row / 2, end = 2 * (pair + at_once) < to ? 2 * (pair + at_once) : to;
        int pairs = (int)((end - 1) / 2 - pair + 1);
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            const uint16_t *noise = noise_of(room, pair * columns + start, pairs * count, job->key, VOTE_ROUNDS);
            for (int64_t r = row; r < end; r++) {
                int64_t at = r * columns + start;
                not_finite += quantize_part(job->values + at, job->factor + start, noise + (r / 2 - pair) * count,
                                            r % 2 ? 8 : 0, job->out + at, job->squares + r / job->piece * columns + start,
                                            count, job->top, job->largest_squared);
            }
        }
        row = end;
    }
    return not_finite;
}

/* ------------------------------------------------------------------------------------------------ memory */

/* Ask for new memory in pages of 2 MB rather than 4 kB: handing it out page by page can take longer than to fill it. */
void gft_huge_pages(void *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 2 << 20, first = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE); /* may fail: it is advice */
#else
    (void)memory, (void)bytes;
#endif
}

/* ------------------------------------------------------------------------------------------------ conversions */

/* Whole numbers held as floats, to int32 in their own place. */
int64_t gft_to_int(float *const *job, int64_t from, int64_t to) {
    float *values = *job;
    for (int64_t i = from; i < to; i++) {
        int32_t whole = (int32_t)values[i];
        memcpy(values + i, &whole, 4);
    }
    return 0;
}
