/* Quantizing activations, summing votes and moving weights, on a CPU, in one pass each. Built when first needed (build.py).
 *
 * Every function works on a range of rows, so that threads can share a matrix, and equals the torch definition bit for
 * bit: integers throughout, and float products that are followed by no addition (built with -ffp-contract=off). Loops are
 * written for the compiler to vectorise: over short arrays, in the narrowest type that holds the numbers, without branches.
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
#include "votes.h"

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

/* Rows `from` to `to` of values (n, features). squares[piece][feature] get the sums over pieces of `piece` rows, of which
 * `from` begins one. Returns how many values are not finite. */
int64_t gft_quantize(const float *values, const float *factor, int8_t *out, double *squares, int64_t from, int64_t to,
                     int64_t features, int64_t piece, float top, float largest_squared, NoiseKey key) {
    _Alignas(64) uint16_t room[ROOM];
    int64_t not_finite = 0, at_once = features < BLOCK ? BLOCK / features : 1; /* pairs of rows, which share their noise */
    for (int64_t row = from; row < to;) {
        int64_t pair = row / 2, end = 2 * (pair + at_once) < to ? 2 * (pair + at_once) : to;
        int pairs = (int)((end - 1) / 2 - pair + 1);
        for (int64_t start = 0; start < features; start += BLOCK) {
            int count = at_most(features - start, BLOCK);
            const uint16_t *noise = noise_of(room, pair * features + start, pairs * count, key, VOTE_ROUNDS);
            for (int64_t r = row; r < end; r++) {
                int64_t at = r * features + start;
                not_finite += quantize_part(values + at, factor + start, noise + (r / 2 - pair) * count, r % 2 ? 8 : 0,
                                            out + at, squares + r / piece * features + start, count, top, largest_squared);
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

/* ------------------------------------------------------------------------------------------------ stored values */

/* Packed values, `width` bits each, to int8 and back. `width` is a constant where these are inlined, so they vectorise. The
 * last byte is read and written in full: `values` has room for it. */
static inline void unpack(int8_t *values, const uint8_t *bytes, int count, int width, int lowest) {
    int per_byte = 8 / width, mask = (1 << width) - 1;
    for (int b = 0; b < (count + per_byte - 1) / per_byte; b++)
        for (int place = 0; place < per_byte; place++)
            values[b * per_byte + place] = (int8_t)(((bytes[b] >> (width * place)) & mask) + lowest);
}

static inline void pack(uint8_t *bytes, int8_t *values, int count, int width, int lowest) {
    int per_byte = 8 / width;
    for (int i = count; i % per_byte; i++) values[i] = (int8_t)lowest; /* a short last byte is filled with zero bits */
    for (int b = 0; b < (count + per_byte - 1) / per_byte; b++) {
        int byte = 0;
        for (int place = 0; place < per_byte; place++) byte |= (values[b * per_byte + place] - lowest) << (width * place);
        bytes[b] = (uint8_t)byte;
    }
}

static void read_values(int8_t *values, const uint8_t *bytes, int count, Storage storage) {
    switch (storage.memory ? 0 : storage.field_bits) {
    case 2: unpack(values, bytes, count, 2, storage.lowest); break;
    case 4: unpack(values, bytes, count, 4, storage.lowest); break;
    case 8: unpack(values, bytes, count, 8, storage.lowest); break;
    default: memcpy(values, bytes, (size_t)count);
    }
}

static void write_values(uint8_t *bytes, int8_t *values, int count, Storage storage) {
    switch (storage.memory ? 0 : storage.field_bits) {
    case 2: pack(bytes, values, count, 2, storage.lowest); break;
    case 4: pack(bytes, values, count, 4, storage.lowest); break;
    case 8: pack(bytes, values, count, 8, storage.lowest); break;
    default: memcpy(bytes, values, (size_t)count);
    }
}

/* Rows `from` to `to` of a stored matrix as floats, times a factor: Storage.levels. */
void gft_levels(const uint8_t *stored, float *out, int64_t columns, int64_t from, int64_t to, float factor,
                Storage storage) {
    _Alignas(64) int8_t values[BLOCK];
    int bits = storage.low_bits, half = (1 << bits) / 2;
    int64_t bytes_per_row = (columns * storage.field_bits + 7) / 8;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            float *level = out + row * columns + start;
            const uint8_t *bytes = stored + row * bytes_per_row + start * storage.field_bits / 8;
            const int8_t *value = storage.memory ? (const int8_t *)bytes : values;
            if (!storage.memory) read_values(values, bytes, count, storage);
            for (int i = 0; i < count; i++) level[i] = (float)((value[i] + half) >> bits) * factor;
        }
    }
}

/* ------------------------------------------------------------------------------------------------ conversions */

/* Whole numbers held as floats, to int32 in their own place. */
void gft_to_int(float *values, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        int32_t whole = (int32_t)values[i];
        memcpy(values + i, &whole, 4);
    }
}

/* ------------------------------------------------------------------------------------------------ rounding.rounding_plan */

/* Votes >> shift, which fit int32. Returns the largest size among them. */
static uint32_t shifted(int32_t *small, const int32_t *narrow, const int64_t *broad, int count, int shift) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        small[i] = broad ? (int32_t)(broad[i] >> shift) : narrow[i] >> shift;
        uint32_t size = small[i] < 0 ? 0u - (uint32_t)small[i] : (uint32_t)small[i];
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Squares are added to the sums of their columns, and summed up. Those that fit 32 bits are the faster. */
static int64_t add_squares(int64_t *column_sums, const int32_t *small, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; i++) {
        uint32_t square = (uint32_t)small[i] * (uint32_t)small[i];
        total += square;
        column_sums[i] += square;
    }
    return total;
}

static int64_t add_large_squares(int64_t *column_sums, const int32_t *small, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; i++) {
        int64_t square = (int64_t)small[i] * small[i];
        total += square;
        column_sums[i] += square;
    }
    return total;
}

/* Sums of squares of votes >> shift, written by row and added by column. Votes are int32, or int64 if `wide`. */
void gft_squares(const void *votes, int wide, int64_t *row_sums, int64_t *column_sums, int64_t from, int64_t to,
                 int64_t columns, int shift) {
    for (int64_t row = from; row < to; row++) {
        row_sums[row] = 0;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            _Alignas(64) int32_t small[BLOCK];
            uint32_t largest = wide ? shifted(small, NULL, (const int64_t *)votes + at, count, shift)
                                    : shifted(small, (const int32_t *)votes + at, NULL, count, shift);
            row_sums[row] += largest < 1u << 16 ? add_squares(column_sums + start, small, count)
                                                : add_large_squares(column_sums + start, small, count);
        }
    }
}

/* A running second moment, renewed: what has been 0 takes the new one in full. */
static double renewed(float *moment, double newest, double share) {
    double old = *moment;
    *moment = (float)(old > 0 ? old + (newest - old) * share : newest);
    return *moment;
}

/* The factors from those sums. `moments`, of rows, of columns and of all, are renewed in place. Division and square root of
   doubles are correctly rounded. */
void gft_factors(const int64_t *row_sums, const int64_t *column_sums, int64_t rows, int64_t columns, Moments how,
                 float *moments, float *row_factor, float *column_factor) {
    int64_t high = 0, low = 0; /* rounding._sum_as_double */
    for (int64_t r = 0; r < rows; r++) {
        high += row_sums[r] >> 32;
        low += row_sums[r] & 0xFFFFFFFF;
    }
    double unit = (double)((int64_t)1 << how.shift) * (double)((int64_t)1 << how.shift);
    double total = (double)(high + (low >> 32)) * 4294967296.0 + (double)(low & 0xFFFFFFFF);
    double own = total / (double)(rows * columns) * unit;
    double running = renewed(moments + rows + columns, own, how.share), overall = sqrt(running);
    if (how.rescale_step)
        overall = running / (own > 0 ? sqrt((double)(float)own) : 1.0);
    for (int64_t r = 0; r < rows; r++) {
        double moment = renewed(moments + r, (double)row_sums[r] / (double)columns * unit, how.share);
        row_factor[r] = (float)((moment > 0 ? 1.0 / sqrt(moment) : 0.0) * overall * (double)how.size);
    }
    for (int64_t c = 0; c < columns; c++) {
        double moment = renewed(moments + rows + c, (double)column_sums[c] / (double)rows * unit, how.share);
        column_factor[c] = (float)(moment > 0 ? 1.0 / sqrt(moment) : 0.0);
    }
}

/* ------------------------------------------------------------------------------------------------ rounding.round_weights */

/* Moves, values and levels are small: with 16 bits a number a vector holds twice as many as with 32. */
static inline int16_t clip(int16_t a, int16_t low, int16_t high) {
    a = a < low ? low : a;
    return a > high ? high : a;
}

static inline int32_t between(int32_t a, int32_t low, int32_t high) {
    a = a < low ? low : a;
    return a > high ? high : a;
}

enum { FARTHEST = 512 }; /* stored values: no move needs to be larger to carry any of them across the whole grid */
static const float LARGEST_INT32 = 2147483520.0f; /* that is a float */

/* floor(move + noise), computed in 32 bits, which wrap round as torch's do, and kept in 16. */
static void rounded_moves(int16_t *move, const int32_t *narrow, const int64_t *broad, int count, const uint16_t *noise,
                          float by_row, const float *by_column, float cap, int32_t dead_zone) {
    for (int i = 0; i < count; i++) {
        float share = (broad ? (float)broad[i] : (float)narrow[i]) * by_row * by_column[i];
        int32_t whole = (int32_t)within(share, cap);
        whole -= between(whole, -dead_zone, dead_zone);
        whole = (int32_t)((uint32_t)whole + noise[i]) >> 16;
        move[i] = (int16_t)between(whole, -FARTHEST, FARTHEST);
    }
}

/* One level for the chosen: topk.topk_weights. */
static void topk_moves(int16_t *move, const int32_t *narrow, const int64_t *broad, int count, const uint16_t *noise,
                       const TopKPlan *plan, int16_t unit) {
    int64_t span = plan->largest - plan->least;
    for (int i = 0; i < count; i++) {
        int64_t vote = broad ? broad[i] : narrow[i], size = vote < 0 ? -vote : vote;
        int64_t p = span > 0 ? (size - plan->least) * 65536 / span : 65536;
        p = p < plan->p_min ? plan->p_min : p > 65536 ? 65536 : p;
        int moves = size >= plan->least && size > 0 && noise[i] < p;
        move[i] = (int16_t)(moves ? (vote > 0 ? unit : -unit) : 0);
    }
}

/* Levels follow their values at once. Returns how many changed. */
static inline int move_values(int8_t *new, const int8_t *old, const int16_t *move, int count, Storage storage, int bits) {
    int16_t half = (int16_t)((1 << bits) / 2), changed = 0;
    int16_t lowest = (int16_t)storage.lowest, limit = (int16_t)storage.limit;
    for (int i = 0; i < count; i++) {
        int16_t now = clip((int16_t)(old[i] - move[i]), lowest, limit);
        changed += (int16_t)((now + half) >> bits) != (int16_t)((old[i] + half) >> bits);
        new[i] = (int8_t)now;
    }
    return changed;
}

/* Levels wait and follow by chance. Returns how many changed. */
static inline int move_with_inertia(int8_t *new, const int8_t *old, const int16_t *move, const uint16_t *noise, int count,
                                    Storage storage, int16_t follow, int bits) {
    int shift = bits - 1;
    int16_t half = (int16_t)((1 << bits) / 2), reach = (int16_t)(storage.largest * half), middle = half / 2, changed = 0;
    for (int i = 0; i < count; i++) {
        int16_t level = (int16_t)((int16_t)(old[i] + half) >> bits), centre = (int16_t)(level * half);
        int16_t z = clip((int16_t)(old[i] - centre - move[i]), (int16_t)-reach, reach);
        z = clip(z, (int16_t)(centre - half), (int16_t)(centre + half - 1));
        int16_t above = (int16_t)(z + middle), nearest = (int16_t)((int16_t)(above - ((above >> shift) & 1)) >> shift);
        int16_t now = (int16_t)(noise[i] & 255) < follow ? nearest : level;
        changed += now != level;
        new[i] = (int8_t)(now * half + z);
    }
    return changed;
}

/* Either, with `bits` for constant: by a shift that is known the compiler need not make the numbers wider. */
static int moved_block(int8_t *new, const int8_t *old, const int16_t *move, const uint16_t *noise, int count, Storage storage,
                       int follow) {
#define MOVED(bits) \
    case bits: \
        return follow < 0 ? move_values(new, old, move, count, storage, bits) \
                          : move_with_inertia(new, old, move, noise, count, storage, (int16_t)follow, bits);
    switch (storage.low_bits) {
        MOVED(1) MOVED(2) MOVED(3) MOVED(4) MOVED(5) MOVED(6)
    default: return move_values(new, old, move, count, storage, 0);
    }
#undef MOVED
}

/* Rows `from` to `to` of a stored matrix, in place, by rounding or else by topk; returns how many levels changed. */
static int64_t moved(uint8_t *stored, const void *votes, int wide, int64_t columns, int64_t from, int64_t to,
                     Storage storage, const RoundingPlan *rounding, const TopKPlan *topk, NoiseKey key) {
    _Alignas(64) uint16_t room[ROOM];
    _Alignas(64) int16_t move[BLOCK];
    _Alignas(64) int8_t old[BLOCK], new[BLOCK];
    int64_t bytes_per_row = (columns * storage.field_bits + 7) / 8, flips = 0;
    float cap = rounding && rounding->cap < LARGEST_INT32 ? rounding->cap : LARGEST_INT32;
    int32_t dead_zone = rounding ? (int32_t)(cap * rounding->threshold_share) : 0;
    int follow = -1; /* all do, at once */
    if (rounding && storage.inertia) follow = cap > 0 ? rounding->follow : 0; /* at lr = 0 nothing follows */
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) { /* BLOCK is a multiple of what a byte holds */
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            uint8_t *bytes = stored + row * bytes_per_row + start * storage.field_bits / 8;
            const int32_t *narrow = wide ? 0 : (const int32_t *)votes + at;
            const int64_t *broad = wide ? (const int64_t *)votes + at : 0;
            const uint16_t *noise = noise_of(room, at, count, key, ROUNDS);
            if (rounding)
                rounded_moves(move, narrow, broad, count, noise, rounding->row[row], rounding->column + start, cap,
                              dead_zone);
            else
                topk_moves(move, narrow, broad, count, noise, topk, (int16_t)(1 << storage.low_bits));
            read_values(old, bytes, count, storage);
            flips += moved_block(new, old, move, noise, count, storage, follow);
            write_values(bytes, new, count, storage);
        }
    }
    return flips;
}

int64_t gft_round(uint8_t *stored, const void *votes, int32_t wide, int64_t columns, int64_t from, int64_t to,
                  Storage storage, RoundingPlan plan, NoiseKey key) {
    return moved(stored, votes, wide, columns, from, to, storage, &plan, NULL, key);
}

int64_t gft_topk(uint8_t *stored, const void *votes, int32_t wide, int64_t columns, int64_t from, int64_t to,
                 Storage storage, TopKPlan plan, NoiseKey key) {
    return moved(stored, votes, wide, columns, from, to, storage, NULL, &plan, key);
}
