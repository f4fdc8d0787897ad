/* The vote's rounding and the step, on a CPU, in one pass each. Built when first needed (native.py).
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
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define BLOCK 2048 /* elements at a time: noise, old and new values of them stay in the first-level cache */
#define ROUNDS 10

typedef struct {
    uint64_t seed;
    uint32_t step, stream, call;
} Stream;

static inline int at_most(int64_t a, int most) { return a < most ? (int)a : most; }

/* ------------------------------------------------------------------------------------------------ philox.noise16 */

/* Several counters side by side. A lane is 64 bits wide for the sake of the product, and holds a 32-bit word in its low
 * half; the product takes no notice of what is above, so nothing clears it. */
#if defined(__AVX512F__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef uint64_t Words __attribute__((vector_size(8 * LANES)));

enum { ROOM = BLOCK + 16 + 8 * LANES }; /* elements: a block's noise begins and ends within a counter, in whole vectors */

static inline Words all(uint64_t word) { return (Words){0} + word; }

/* The low word of each lane times a word. Compilers take a 64-bit product for it, which is several times slower. */
static inline Words times(Words words, uint32_t by) {
#if defined(__AVX512F__)
    return (Words)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(by));
#else
    return (words & all(0xFFFFFFFFu)) * all(by);
#endif
}

static inline Words joined(Words low, Words high) { return (low & all(0xFFFFFFFFu)) | high << 32; }

/* 16-bit noise of `count` counters from `first` on, eight numbers each, and up to LANES - 1 counters more. */
static void noise_of_counters(uint16_t *out, uint64_t first, int count, Stream s) {
    Words counter = all(first);
    for (int i = 0; i < LANES; i++) counter[i] += (uint64_t)i;
    for (int start = 0; start < count; start += LANES, counter += all(LANES)) {
        Words c0 = counter, c1 = all(s.call), c2 = all(s.step), c3 = all(s.stream);
        uint32_t k0 = (uint32_t)s.seed, k1 = (uint32_t)(s.seed >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            Words p0 = times(c0, 0xD2511F53u), p1 = times(c2, 0xCD9E8D57u);
            c0 = p1 >> 32 ^ c1 ^ all(k0);
            c2 = p0 >> 32 ^ c3 ^ all(k1);
            c1 = p1;
            c3 = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        Words front = joined(c0, c1), back = joined(c2, c3);
        uint64_t halves[2 * LANES]; /* four numbers each */
        for (int i = 0; i < LANES; i++) {
            halves[2 * i] = front[i];
            halves[2 * i + 1] = back[i];
        }
        memcpy(out + 8 * start, halves, sizeof halves);
    }
}

/* Noise of `count` elements from `first` on, at most BLOCK of them; `room` holds ROOM. Returns where it begins. */
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
    _Alignas(64) uint16_t room[ROOM];
    int64_t not_finite = 0;
    for (int64_t f = 0; f < features; f++) squares[f] = 0;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < features; start += BLOCK) {
            int count = at_most(features - start, BLOCK);
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

/* ------------------------------------------------------------------------------------------------ memory */

/* Ask for fresh memory in pages of 2 MB rather than 4 kB: handing it out page by page can take longer than to fill it. */
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

/* ------------------------------------------------------------------------------------------------ vote.tally */

/* votes = delta^T · x, some four times as fast as in float32, by an instruction that adds four products of bytes to a 32-bit
 * sum: sum += x0 · delta0 + x1 · delta1 + x2 · delta2 + x3 · delta3. It takes x without a sign, so x + 128 stands for x and
 * a row's sums start at -128 times the sum of its delta. On the way they may wrap round; in the end they are right.
 *
 * A tile of votes is summed in registers. For it delta and x are packed: four tokens of a row or column side by side. */
#if defined(__AVX512VNNI__)
#define DOT(sums, x, delta) (Sums) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(x), (__m512i)(delta))
enum { VECTOR = 16, TILE_ROWS = 8 }; /* int32 sums in a vector; rows of a tile, all of whose sums fit into registers */
#elif defined(__AVXVNNI__)
#define DOT(sums, x, delta) (Sums) _mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(x), (__m256i)(delta))
enum { VECTOR = 8, TILE_ROWS = 4 };
#endif
#if defined(DOT)
typedef int32_t Sums __attribute__((vector_size(4 * VECTOR)));
typedef int32_t Unaligned __attribute__((vector_size(4 * VECTOR), aligned(1), may_alias));
enum { TILE_VECTORS = 3, TILE_COLUMNS = TILE_VECTORS * VECTOR, ROWS_AT_ONCE = 64, FOURS_AT_ONCE = 128 };

/* Panels `from` to `to` of x (tokens, columns): packed[panel][four][column][token of the four]. */
void gft_pack_x(const int8_t *x, uint8_t *packed, int64_t tokens, int64_t columns, int64_t from, int64_t to) {
    int64_t fours = (tokens + 3) / 4;
    for (int64_t panel = from; panel < to; panel++) {
        const int8_t *source = x + panel * TILE_COLUMNS;
        int count = at_most(columns - panel * TILE_COLUMNS, TILE_COLUMNS);
        uint8_t *target = packed + panel * fours * TILE_COLUMNS * 4;
        memset(target, 0, (size_t)fours * TILE_COLUMNS * 4);
        for (int64_t t = 0; t < tokens; t++)
            for (int c = 0; c < count; c++)
                target[(t / 4 * TILE_COLUMNS + c) * 4 + t % 4] = (uint8_t)(source[t * columns + c] + 128);
    }
}

/* Rows `row` to `row + count` of delta^T, tokens from `first` on: packed[tile][four][row of the tile][token of the four];
 * what is missing is 0. `start` gets where each row's sums start. */
static void pack_delta(int8_t *packed, int32_t *start, const int8_t *delta, int64_t tokens, int64_t rows, int64_t row,
                       int count, int64_t first, int fours) {
    memset(packed, 0, (size_t)fours * 4 * ROWS_AT_ONCE);
    memset(start, 0, sizeof(int32_t) * ROWS_AT_ONCE);
    for (int t = 0; t < fours * 4 && first + t < tokens; t++) {
        const int8_t *source = delta + (first + t) * rows + row;
        for (int r = 0; r < count; r++) {
            packed[((r / TILE_ROWS * fours + t / 4) * TILE_ROWS + r % TILE_ROWS) * 4 + t % 4] = source[r];
            start[r] -= 128 * source[r];
        }
    }
}

/* One tile of votes, `stride` int32 from row to row; `add`: to what is there. */
static void tile_of_votes(int32_t *votes, int64_t stride, const int8_t *delta, const uint8_t *x, int fours,
                          const int32_t *start, int add) {
    Sums sums[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            sums[r][v] = (Sums){0} + start[r];
            if (add) sums[r][v] += *(const Unaligned *)(votes + r * stride + v * VECTOR);
        }
    for (int f = 0; f < fours; f++) {
        const uint8_t *columns = x + f * TILE_COLUMNS * 4;
        for (int r = 0; r < TILE_ROWS; r++) {
            int32_t four;
            memcpy(&four, delta + (f * TILE_ROWS + r) * 4, 4);
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = DOT(sums[r][v], *(const Unaligned *)(columns + v * VECTOR * 4), (Sums){0} + four);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) *(Unaligned *)(votes + r * stride + v * VECTOR) = sums[r][v];
}

/* A tile that may reach over the matrix' edge: `rows` and `columns` of it are inside. */
static void tile_at_edge(int32_t *votes, int64_t stride, const int8_t *delta, const uint8_t *x, int fours,
                         const int32_t *start, int add, int rows, int columns) {
    if (rows == TILE_ROWS && columns == TILE_COLUMNS) {
        tile_of_votes(votes, stride, delta, x, fours, start, add);
        return;
    }
    int32_t whole[TILE_ROWS * TILE_COLUMNS];
    tile_of_votes(whole, TILE_COLUMNS, delta, x, fours, start, 0);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            votes[r * stride + c] = (add ? votes[r * stride + c] : 0) + whole[r * TILE_COLUMNS + c];
}

/* Rows `from` to `to` of votes (rows, columns) = delta^T · x of delta (tokens, rows) and packed x. */
void gft_votes(const int8_t *delta, const uint8_t *packed_x, int32_t *votes, int64_t tokens, int64_t rows, int64_t columns,
               int64_t from, int64_t to) {
    int8_t packed_delta[ROWS_AT_ONCE * FOURS_AT_ONCE * 4]; /* with a panel of x it stays in the second-level cache */
    int32_t start[ROWS_AT_ONCE];
    int64_t all_fours = (tokens + 3) / 4;
    for (int64_t row = from; row < to; row += ROWS_AT_ONCE) {
        int some_rows = at_most(to - row, ROWS_AT_ONCE);
        for (int64_t four = 0; four < all_fours; four += FOURS_AT_ONCE) {
            int fours = at_most(all_fours - four, FOURS_AT_ONCE);
            pack_delta(packed_delta, start, delta, tokens, rows, row, some_rows, four * 4, fours);
            for (int64_t c = 0; c < columns; c += TILE_COLUMNS) {
                const uint8_t *x = packed_x + (c * all_fours + four * TILE_COLUMNS) * 4;
                for (int r = 0; r < some_rows; r += TILE_ROWS)
                    tile_at_edge(votes + (row + r) * columns + c, columns, packed_delta + r * fours * 4, x, fours, start + r,
                                 four > 0, at_most(some_rows - r, TILE_ROWS), at_most(columns - c, TILE_COLUMNS));
            }
        }
    }
}
#else /* native.py then takes a float product */
enum { TILE_COLUMNS = 0 };
void gft_pack_x(void) {}
void gft_votes(void) {}
#endif

/* How many columns a panel of packed x has; 0 without such an instruction. */
int64_t gft_panel_columns(void) { return TILE_COLUMNS; }

/* ------------------------------------------------------------------------------------------------ step._squares */

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

/* A running mean square, renewed: what has been 0 takes the fresh one in full. */
static double renewed(float *square, double fresh, double share) {
    double old = *square;
    *square = (float)(old > 0 ? old + (fresh - old) * share : fresh);
    return *square;
}

/* step.rounding_factors from those sums. `squares`, of rows, of columns and of all, are renewed in place. Division and square
   root of doubles are correctly rounded. */
void gft_factors(const int64_t *row_sums, const int64_t *column_sums, int64_t rows, int64_t columns, int shift, float gain,
                 float *squares, double share, int own_size, float *row_factor, float *column_factor) {
    int64_t high = 0, low = 0; /* step._sum_as_double */
    for (int64_t r = 0; r < rows; r++) {
        high += row_sums[r] >> 32;
        low += row_sums[r] & 0xFFFFFFFF;
    }
    double unit = (double)((int64_t)1 << shift) * (double)((int64_t)1 << shift);
    double total = (double)(high + (low >> 32)) * 4294967296.0 + (double)(low & 0xFFFFFFFF);
    double own = total / (double)(rows * columns) * unit;
    double running = renewed(squares + rows + columns, own, share), overall = sqrt(running);
    if (own_size)
        overall = running / (own > 0 ? sqrt((double)(float)own) : 1.0);
    for (int64_t r = 0; r < rows; r++) {
        double square = renewed(squares + r, (double)row_sums[r] / (double)columns * unit, share);
        row_factor[r] = (float)((square > 0 ? 1.0 / sqrt(square) : 0.0) * overall * (double)gain);
    }
    for (int64_t c = 0; c < columns; c++) {
        double square = renewed(squares + rows + c, (double)column_sums[c] / (double)rows * unit, share);
        column_factor[c] = (float)(square > 0 ? 1.0 / sqrt(square) : 0.0);
    }
}

/* ------------------------------------------------------------------------------------------------ step.rounding, step.topk */

/* Moves, values and levels are small: with 16 bits a number a vector holds twice as many as with 32. */
static inline int16_t clip(int16_t a, int16_t low, int16_t high) { return a < low ? low : a > high ? high : a; }

/* What no move needs to exceed, in 1/65536 of a stored value: it carries any value across the whole grid, and fits. */
static const float FARTHEST = 512 * 65536.0f;

/* How a matrix is stored: grid.Grid. */
typedef struct {
    int width; /* bits of a packed field, 0 if stored with memory */
    int low_bits; /* below the level: memory's, or spare ones */
    int top_level, follow;
    int16_t lowest, highest; /* of a value */
} Form;

/* What moves a weight: rounding by the factors, or topk by the bounds if `topk`. */
typedef struct {
    const float *row_factor, *column_factor;
    float cap;
    int32_t topk;
    int64_t least, largest, p_min;
} Rule;

static void rounded_moves(int16_t *move, const int32_t *narrow, const int64_t *broad, int count, const uint16_t *noise,
                          float by_row, const float *by_column, float cap, int32_t unheard) {
    for (int i = 0; i < count; i++) {
        float share = (broad ? (float)broad[i] : (float)narrow[i]) * by_row * by_column[i];
        int32_t whole = (int32_t)(share < -cap ? -cap : share > cap ? cap : share);
        whole -= whole < -unheard ? -unheard : whole > unheard ? unheard : whole;
        move[i] = (int16_t)((whole + (int32_t)noise[i]) >> 16);
    }
}

static void topk_moves(int16_t *move, const int32_t *narrow, const int64_t *broad, int count, const uint16_t *noise,
                       const Rule *rule, int16_t unit) {
    int64_t span = rule->largest - rule->least;
    for (int i = 0; i < count; i++) {
        int64_t vote = broad ? broad[i] : narrow[i], size = vote < 0 ? -vote : vote;
        int64_t p = span > 0 ? (size - rule->least) * 65536 / span : 65536;
        p = p < rule->p_min ? rule->p_min : p > 65536 ? 65536 : p;
        int moves = size >= rule->least && size > 0 && noise[i] < p;
        move[i] = (int16_t)(moves ? (vote > 0 ? unit : -unit) : 0);
    }
}

enum { FOLLOW_ALL = 256 }; /* as in step.py */

/* Levels follow their values at once. Returns how many changed. */
static int move_values(int8_t *new, const int8_t *old, const int16_t *move, int count, Form form) {
    int16_t half = (int16_t)((1 << form.low_bits) / 2), changed = 0;
    for (int i = 0; i < count; i++) {
        int16_t now = clip((int16_t)(old[i] - move[i]), form.lowest, form.highest);
        changed += (int16_t)((now + half) >> form.low_bits) != (int16_t)((old[i] + half) >> form.low_bits);
        new[i] = (int8_t)now;
    }
    return changed;
}

/* Levels wait and follow by chance. Returns how many changed. */
static int move_with_inertia(int8_t *new, const int8_t *old, const int16_t *move, const uint16_t *noise, int count,
                             Form form) {
    int16_t half = (int16_t)((1 << form.low_bits) / 2), reach = (int16_t)(form.top_level * half), middle = half / 2;
    int16_t follow = (int16_t)form.follow, changed = 0;
    int bits = form.low_bits, shift = form.low_bits - 1;
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

static void read_values(int8_t *values, const uint8_t *bytes, int count, Form form) {
    switch (form.width) {
    case 2: unpack(values, bytes, count, 2, form.lowest); break;
    case 4: unpack(values, bytes, count, 4, form.lowest); break;
    case 8: unpack(values, bytes, count, 8, form.lowest); break;
    default: memcpy(values, bytes, (size_t)count);
    }
}

static void write_values(uint8_t *bytes, int8_t *values, int count, Form form) {
    switch (form.width) {
    case 2: pack(bytes, values, count, 2, form.lowest); break;
    case 4: pack(bytes, values, count, 4, form.lowest); break;
    case 8: pack(bytes, values, count, 8, form.lowest); break;
    default: memcpy(bytes, values, (size_t)count);
    }
}

/* Rows `from` to `to` of a stored matrix, in place; returns how many levels changed. `width`: bits of a packed field, 0 if
 * stored with memory. */
int64_t gft_move(uint8_t *stored, const void *votes, int wide, const float *row_factor, const float *column_factor, float cap,
                 float quiet, int topk, int64_t least, int64_t largest, int64_t p_min, int64_t from, int64_t to, int64_t columns,
                 int64_t bytes_a_row, int width, int top_level, int memory_bits, int spare_bits, int follow, uint64_t seed,
                 uint32_t step, uint32_t stream, uint32_t call) {
    Stream s = {seed, step, stream, call};
    int low_bits = memory_bits + spare_bits, half = spare_bits ? 1 << (spare_bits - 1) : 0;
    int16_t edge = (int16_t)((top_level << low_bits) + half); /* with spare bits all that rounds to the level */
    Form form = {width, low_bits, top_level, follow, (int16_t)-edge, (int16_t)(edge - (half > 0))};
    Rule rule = {row_factor, column_factor, cap < FARTHEST ? cap : FARTHEST, topk, least, largest, p_min};
    _Alignas(64) uint16_t room[ROOM];
    _Alignas(64) int16_t move[BLOCK];
    _Alignas(64) int8_t old[BLOCK], new[BLOCK];
    int64_t flips = 0;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) { /* BLOCK is a multiple of what a byte holds */
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            uint8_t *bytes = stored + row * bytes_a_row + (width ? start * width / 8 : start);
            const int32_t *narrow = wide ? 0 : (const int32_t *)votes + at;
            const int64_t *broad = wide ? (const int64_t *)votes + at : 0;
            const uint16_t *noise = noise_of(room, at, count, s);
            if (topk)
                topk_moves(move, narrow, broad, count, noise, &rule, (int16_t)(1 << low_bits));
            else
                rounded_moves(move, narrow, broad, count, noise, row_factor[row], column_factor + start, rule.cap,
                              (int32_t)(cap * quiet));
            read_values(old, bytes, count, form);
            flips += topk || memory_bits == 0 || follow == FOLLOW_ALL
                         ? move_values(new, old, move, count, form)
                         : move_with_inertia(new, old, move, noise, count, form);
            write_values(bytes, new, count, form);
        }
    }
    return flips;
}
