/* The vote's rounding and the step, on a CPU, in one pass each. Built when first needed (native.py).
 *
 * Every function works on a range of rows, so that threads can share a matrix, and equals the torch definition bit for
 * bit: integers throughout, and float products that are followed by no addition (built with -ffp-contract=off).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 2048 /* elements at a time: noise, old and new values of them stay in the first-level cache */
#define ROUNDS 10

typedef struct {
    uint64_t seed;
    uint32_t step, stream, call;
} Stream;

/* ------------------------------------------------------------------------------------------------ philox.noise16 */

/* 16-bit noise of `count` counters from `first` on, eight numbers each. */
static void noise_of_counters(uint16_t *out, uint64_t first, int count, Stream s) {
    enum { LANES = 16 };
    for (int start = 0; start < count; start += LANES) {
        uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
        for (int i = 0; i < LANES; i++) {
            c0[i] = (uint32_t)(first + start + i);
            c1[i] = s.call;
            c2[i] = s.step;
            c3[i] = s.stream;
        }
        uint32_t k0 = (uint32_t)s.seed, k1 = (uint32_t)(s.seed >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            for (int i = 0; i < LANES; i++) {
                uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u, p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
                uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
                c1[i] = (uint32_t)p1;
                c3[i] = (uint32_t)p0;
                c0[i] = n0;
                c2[i] = n2;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        int lanes = count - start < LANES ? count - start : LANES;
        for (int i = 0; i < lanes; i++) {
            uint16_t *to = out + 8 * (start + i);
            to[0] = (uint16_t)c0[i]; to[1] = (uint16_t)(c0[i] >> 16);
            to[2] = (uint16_t)c1[i]; to[3] = (uint16_t)(c1[i] >> 16);
            to[4] = (uint16_t)c2[i]; to[5] = (uint16_t)(c2[i] >> 16);
            to[6] = (uint16_t)c3[i]; to[7] = (uint16_t)(c3[i] >> 16);
        }
    }
}

/* Noise of `count` elements from `first` on, at most BLOCK of them; `room` holds BLOCK + 16. Returns where it begins. */
static const uint16_t *noise_of(uint16_t *room, int64_t first, int count, Stream s) {
    int lead = (int)(first % 8);
    noise_of_counters(room, (uint64_t)(first / 8), (lead + count + 7) / 8, s);
    return room + lead;
}

/* ------------------------------------------------------------------------------------------------ vote.quantize */

/* Rows `from` to `to` of values (n, features). `squares` and `bad` get the sums over these rows, by feature and in all. */
void gft_quantize(const float *values, const float *factor, int8_t *out, double *squares, int64_t *bad, int64_t from,
                  int64_t to, int64_t features, float top, float largest_squared, uint64_t seed, uint32_t step,
                  uint32_t stream, uint32_t call) {
    Stream s = {seed, step, stream, call};
    uint16_t room[BLOCK + 16];
    int64_t not_finite = 0;
    for (int64_t f = 0; f < features; f++) squares[f] = 0;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < features; start += BLOCK) {
            int count = (int)(features - start < BLOCK ? features - start : BLOCK);
            int64_t at = row * features + start;
            const uint16_t *noise = noise_of(room, at, count, s);
            const float *value = values + at, *scale = factor + start;
            double *square = squares + start;
            int8_t *q = out + at;
            int32_t wrong = 0;
            for (int i = 0; i < count; i++) {
                uint32_t bits;
                memcpy(&bits, &value[i], 4);
                int32_t finite = (bits & 0x7F800000u) != 0x7F800000u;
                wrong += !finite;
                float v = finite ? value[i] : 0.0f;
                float fixed = v * scale[i];
                fixed = fixed < -top ? -top : fixed > top ? top : fixed;
                q[i] = (int8_t)(((int32_t)fixed + (int32_t)noise[i]) >> 16);
                float bounded = v < -largest_squared ? -largest_squared : v > largest_squared ? largest_squared : v;
                square[i] += (double)bounded * bounded;
            }
            not_finite += wrong;
        }
    }
    *bad = not_finite;
}

/* ------------------------------------------------------------------------------------------------ conversions */

/* Levels of stored values, as floats: grid.values_to_levels. */
void gft_levels(const int8_t *stored, float *out, int64_t from, int64_t to, int memory_bits) {
    int32_t half = (1 << memory_bits) / 2;
    for (int64_t i = from; i < to; i++) out[i] = (float)((stored[i] + half) >> memory_bits);
}

/* Whole numbers held as floats, to int32 in their own place. */
void gft_to_int(float *values, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        int32_t whole = (int32_t)values[i];
        memcpy(values + i, &whole, 4);
    }
}

/* ------------------------------------------------------------------------------------------------ step._squares */

/* Votes are int32, or int64 if `wide`. */
int64_t gft_largest(const void *votes, int wide, int64_t from, int64_t to) {
    int64_t largest = 0;
    if (wide) {
        const int64_t *v = votes;
        for (int64_t i = from; i < to; i++) {
            int64_t size = v[i] < 0 ? -v[i] : v[i];
            largest = size > largest ? size : largest;
        }
        return largest;
    }
    const int32_t *v = votes;
    uint32_t most = 0;
    for (int64_t i = from; i < to; i++) {
        uint32_t size = v[i] < 0 ? 0u - (uint32_t)v[i] : (uint32_t)v[i];
        most = size > most ? size : most;
    }
    return most;
}

/* Sums of squares of votes >> shift: written by row, added by column. */
void gft_squares(const void *votes, int wide, int64_t *row_sums, int64_t *column_sums, int64_t from, int64_t to,
                 int64_t columns, int shift) {
    for (int64_t row = from; row < to; row++) {
        int64_t total = 0;
        for (int64_t c = 0; c < columns; c++) {
            int64_t vote = wide ? ((const int64_t *)votes)[row * columns + c] : ((const int32_t *)votes)[row * columns + c];
            int32_t small = (int32_t)(vote >> shift);
            int64_t square = (int64_t)small * small;
            total += square;
            column_sums[c] += square;
        }
        row_sums[row] = total;
    }
}

/* step.rounding_factors from those sums. Division and square root of doubles are correctly rounded. */
void gft_factors(const int64_t *row_sums, const int64_t *column_sums, int64_t rows, int64_t columns, int shift, float gain,
                 float *row_factor, float *column_factor) {
    int64_t total = 0;
    for (int64_t r = 0; r < rows; r++) total += row_sums[r];
    double overall = sqrt((double)total / (double)(rows * columns)) / (double)((int64_t)1 << shift);
    for (int64_t r = 0; r < rows; r++) {
        double inverse = row_sums[r] > 0 ? 1.0 / sqrt((double)row_sums[r] / (double)columns) : 0.0;
        row_factor[r] = (float)(inverse * overall * (double)gain);
    }
    for (int64_t c = 0; c < columns; c++)
        column_factor[c] = column_sums[c] > 0 ? (float)(1.0 / sqrt((double)column_sums[c] / (double)rows)) : 0.0f;
}

/* ------------------------------------------------------------------------------------------------ step.rounding, step.topk */

static inline int32_t clip(int32_t a, int32_t low, int32_t high) { return a < low ? low : a > high ? high : a; }

/* What moves a weight: rounding by the factors, or topk by the bounds if `topk`. */
typedef struct {
    const float *row_factor, *column_factor;
    float cap;
    int32_t topk;
    int64_t least, largest, p_min;
} Rule;

static void moves_of(int32_t *move, const void *votes, int wide, int64_t at, int64_t row, int64_t start, int count,
                     const uint16_t *noise, const Rule *rule, int32_t unit) {
    const int32_t *narrow = (const int32_t *)votes + at;
    const int64_t *broad = (const int64_t *)votes + at;
    if (rule->topk) {
        int64_t span = rule->largest - rule->least;
        for (int i = 0; i < count; i++) {
            int64_t vote = wide ? broad[i] : narrow[i], size = vote < 0 ? -vote : vote;
            int64_t p = span > 0 ? (size - rule->least) * 65536 / span : 65536;
            p = p < rule->p_min ? rule->p_min : p > 65536 ? 65536 : p;
            int moves = size >= rule->least && size > 0 && noise[i] < p;
            move[i] = moves ? (vote > 0 ? unit : -unit) : 0;
        }
        return;
    }
    float by_row = rule->row_factor[row], cap = rule->cap;
    const float *by_column = rule->column_factor + start;
    for (int i = 0; i < count; i++) {
        float share = (wide ? (float)broad[i] : (float)narrow[i]) * by_row * by_column[i];
        share = share < -cap ? -cap : share > cap ? cap : share;
        move[i] = ((int32_t)share + (int32_t)noise[i]) >> 16;
    }
}

/* Rows `from` to `to` of a stored matrix, in place; returns how many levels changed. `width`: bits of a packed level, 0 if
 * stored with memory. */
int64_t gft_move(uint8_t *stored, const void *votes, int wide, const float *row_factor, const float *column_factor, float cap,
                 int topk, int64_t least, int64_t largest, int64_t p_min, int64_t from, int64_t to, int64_t columns,
                 int64_t bytes_a_row, int width, int top_level, int memory_bits, int follow, uint64_t seed, uint32_t step,
                 uint32_t stream, uint32_t call) {
    Stream s = {seed, step, stream, call};
    Rule rule = {row_factor, column_factor, cap, topk, least, largest, p_min};
    uint16_t room[BLOCK + 16];
    int32_t move[BLOCK];
    int8_t old[BLOCK], new[BLOCK];
    int32_t unit = 1 << memory_bits, half = unit / 2, edge = top_level * unit;
    int per_byte = width ? 8 / width : 1, mask = (1 << (width ? width : 8)) - 1;
    int64_t flips = 0;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) { /* BLOCK is a multiple of what a byte holds */
            int count = (int)(columns - start < BLOCK ? columns - start : BLOCK);
            int64_t at = row * columns + start;
            uint8_t *bytes = stored + row * bytes_a_row + start / per_byte;
            const uint16_t *noise = noise_of(room, at, count, s);
            moves_of(move, votes, wide, at, row, start, count, noise, &rule, unit);
            if (width)
                for (int i = 0; i < count; i++)
                    old[i] = (int8_t)(((bytes[i / per_byte] >> (width * (i % per_byte))) & mask) - top_level);
            else
                memcpy(old, bytes, (size_t)count);
            int32_t changed = 0;
            if (topk || memory_bits == 0) {
                for (int i = 0; i < count; i++) {
                    new[i] = (int8_t)clip(old[i] - move[i], -edge, edge);
                    changed += ((new[i] + half) >> memory_bits) != ((old[i] + half) >> memory_bits);
                }
            } else {
                int32_t reach = top_level * half, shift = memory_bits - 1, middle = half / 2;
                for (int i = 0; i < count; i++) {
                    int32_t level = (old[i] + half) >> memory_bits;
                    int32_t z = clip(old[i] - level * half - move[i], -reach, reach);
                    z = clip(z, (level - 1) * half, (level + 1) * half - 1);
                    int32_t nearest = (z + middle - ((noise[i] >> 8) & 1)) >> shift;
                    int32_t now = (noise[i] & 255) < follow ? nearest : level;
                    changed += now != level;
                    new[i] = (int8_t)(now * half + z);
                }
            }
            flips += changed;
            if (!width) {
                memcpy(bytes, new, (size_t)count);
                continue;
            }
            for (int i = 0; i < count; i += per_byte) {
                int byte = 0;
                for (int place = 0; place < per_byte && i + place < count; place++)
                    byte |= (new[i + place] + top_level) << (width * place);
                bytes[i / per_byte] = (uint8_t)byte;
            }
        }
    }
    return flips;
}
