/* lowprecision.round_tokens and multiply_tokens: x or grad_output in whole numbers, times integer levels.
 *
 *     q[t, i] = round(values[t, i] · largest / amax[t])     int8, or fixed point of 24 bits in int32
 *     y[t, o] = scale[t] · sum_i q[t, i] · level[o, i]
 *
 * A number of 24 bits is three digits of 8, q = 65536·d2 + 256·d1 + d0, and each digit takes part in a product of bytes of
 * its own, by votes.h's tiles: tokens stand where the rows of votes do, outputs where their columns do. Those sums are exact,
 * and so is their sum in a double: y is rounded once, to float32, whatever the threads, the processor or the other tokens of
 * the batch.
 */
enum { DIGITS = 3 };

/* ------------------------------------------------------------------------------------------------ round_tokens */

/* Values to be rounded, and the largest size among them as bits, which order sizes as they are; NaN and infinity are above. */
static uint32_t largest_bits(float *restrict at, const float *restrict values, const float *restrict by_feature, int count) {
    int32_t largest = 0;
    for (int i = 0; i < count; i++) at[i] = by_feature ? values[i] * by_feature[i] : values[i];
    for (int i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, &at[i], 4);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return (uint32_t)largest;
}

static void to_fixed(int32_t *restrict q, const float *restrict values, int64_t count, float by, float top) {
    for (int64_t i = 0; i < count; i++) q[i] = (int32_t)rintf(within(values[i] * by, top));
}

static void to_bytes(int8_t *restrict q, const float *restrict values, int64_t count, float by, float top) {
    for (int64_t i = 0; i < count; i++) q[i] = (int8_t)(((int32_t)within(values[i] * by, top) + 32768) >> 16);
}

/* Tokens `from` to `to`. One with a value that is not finite has q = 0, and NaN for its scale. */
int64_t gft_round_tokens(const TokensJob *job, int64_t from, int64_t to) {
    float at[BLOCK];
    int64_t features = job->features;
    for (int64_t t = from; t < to; t++) {
        const float *values = job->values + t * features;
        uint32_t bits = 0;
        for (int64_t i = 0; i < features; i += BLOCK) {
            const float *by_feature = job->by_feature ? job->by_feature + i : NULL;
            uint32_t some = largest_bits(at, values + i, by_feature, at_most(features - i, BLOCK));
            bits = some > bits ? some : bits;
        }
        int finite = bits < 0x7F800000u;
        float most = job->smallest;
        if (finite) {
            float found;
            memcpy(&found, &bits, 4);
            most = found > most ? found : most;
        }
        job->scale[t] = finite ? most / job->largest * job->factor : NAN;
        float by = (job->bytes ? job->largest * 65536.0f : job->largest) / most;
        for (int64_t i = 0; i < features; i += BLOCK) {
            int count = at_most(features - i, BLOCK);
            const float *source = values + i;
            if (!finite) {
                memset(at, 0, sizeof at);
                source = at;
            } else if (job->by_feature) {
                for (int k = 0; k < count; k++) at[k] = values[i + k] * job->by_feature[i + k];
                source = at;
            }
            if (job->bytes)
                to_bytes((int8_t *)job->q + t * features + i, source, count, by, job->largest * 65536.0f);
            else
                to_fixed((int32_t *)job->q + t * features + i, source, count, by, job->largest);
        }
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------ multiply_tokens */

#if defined(VOTES_OF_BYTES)
/* Panels `from` to `to` of levels (outputs, features), as gft_pack_x packs those of (features, outputs):
 * packed[panel][group][output][feature of the group]. */
int64_t gft_pack_levels(const ProductJob *job, int64_t from, int64_t to) {
    int64_t features = job->features, groups = groups_of(features), whole = features / GROUP;
    for (int64_t panel = from; panel < to; panel++) {
        int count = at_most(job->outputs - panel * TILE_COLUMNS, TILE_COLUMNS);
        uint8_t *target = job->packed_levels + panel * groups * TILE_COLUMNS * GROUP;
        if (count < TILE_COLUMNS || groups * GROUP > features) memset(target, OFFSET, (size_t)groups * TILE_COLUMNS * GROUP);
        for (int c = 0; c < count; c++) {
            const uint8_t *source = (const uint8_t *)job->levels + (panel * TILE_COLUMNS + c) * features;
            for (int64_t g = 0; g < whole; g++) {
                uint8_t group[GROUP];
                for (int k = 0; k < GROUP; k++) group[k] = source[g * GROUP + k] ^ OFFSET; /* + OFFSET, 128 or 0 */
                memcpy(target + (g * TILE_COLUMNS + c) * GROUP, group, GROUP);
            }
            for (int64_t i = whole * GROUP; i < features; i++)
                target[(whole * TILE_COLUMNS + c) * GROUP + i % GROUP] = source[i] ^ OFFSET;
        }
    }
    return 0;
}

static inline int digits_of(const ProductJob *job) { return job->bytes ? 1 : DIGITS; }

/* The digits of a row, lowest first, each -128..127. */
static void split(int8_t *restrict d0, int8_t *restrict d1, int8_t *restrict d2, const int32_t *restrict q, int count) {
    for (int i = 0; i < count; i++) {
        int32_t above = (q[i] + 128) >> 8;
        d0[i] = (int8_t)q[i];
        d1[i] = (int8_t)above;
        d2[i] = (int8_t)((above + 128) >> 8);
    }
}

/* Tiles `from` to `to` of tokens: packed_tokens[tile][digit], and there as place_in_tile says; and where each one's sums
 * start. What is missing is 0. */
int64_t gft_pack_tokens(const ProductJob *job, int64_t from, int64_t to) {
    int64_t features = job->features, groups = groups_of(features);
    int digits = digits_of(job);
    _Alignas(64) int8_t digit[DIGITS][BLOCK]; /* BLOCK is a multiple of GROUP */
    for (int64_t tile = from; tile < to; tile++) {
        int8_t *target = job->packed_tokens + tile * digits * groups * TILE_ROWS * GROUP;
        int32_t *starts = job->starts + tile * digits * TILE_ROWS;
        int count = at_most(job->tokens - tile * TILE_ROWS, TILE_ROWS);
        memset(starts, 0, sizeof(int32_t) * (size_t)(digits * TILE_ROWS));
        if (count < TILE_ROWS || groups * GROUP > features) memset(target, 0, (size_t)(digits * groups * TILE_ROWS * GROUP));
        for (int r = 0; r < count; r++)
            for (int64_t i = 0; i < features; i += BLOCK) {
                int64_t at = (tile * TILE_ROWS + r) * features + i;
                int some = at_most(features - i, BLOCK), padded = (some + GROUP - 1) / GROUP * GROUP;
                if (job->bytes)
                    memcpy(digit[0], (const int8_t *)job->q + at, (size_t)some);
                else
                    split(digit[0], digit[1], digit[2], (const int32_t *)job->q + at, some);
                for (int d = 0; d < digits; d++) {
                    memset(digit[d] + some, 0, (size_t)(padded - some));
                    int32_t sum = 0;
                    for (int k = 0; k < some; k++) sum += digit[d][k];
                    starts[d * TILE_ROWS + r] -= OFFSET * sum;
                    int8_t *place = target + d * groups * TILE_ROWS * GROUP;
                    for (int g = 0; g < padded / GROUP; g++)
                        memcpy(place + place_in_tile(r, i / GROUP + g, groups), digit[d] + g * GROUP, GROUP);
                }
            }
    }
    return 0;
}

/* A tile of y, of which `rows` and `columns` are inside. */
static void write_products(const ProductJob *job, const int32_t *sums, int64_t token, int64_t output, int rows, int columns) {
    enum { TILE = TILE_ROWS * TILE_COLUMNS };
    for (int r = 0; r < rows; r++) {
        const int32_t *d0 = sums + r * TILE_COLUMNS, *d1 = d0 + TILE, *d2 = d1 + TILE;
        float *y = job->out + (token + r) * job->outputs + output, scale = job->scale[token + r];
        if (job->bytes)
            for (int c = 0; c < columns; c++) y[c] = (float)d0[c] * scale;
        else
            for (int c = 0; c < columns; c++)
                y[c] = (float)((double)d2[c] * 65536.0 + (double)d1[c] * 256.0 + (double)d0[c]) * scale;
        if (job->by_output)
            for (int c = 0; c < columns; c++) y[c] *= job->by_output[output + c];
    }
}

/* Tiles `from` to `to` of tokens of y (tokens, outputs). */
int64_t gft_multiply_tokens(const ProductJob *job, int64_t from, int64_t to) {
    _Alignas(64) int32_t sums[DIGITS * TILE_ROWS * TILE_COLUMNS];
    int64_t groups = groups_of(job->features);
    int digits = digits_of(job);
    start_tiles();
    for (int64_t output = 0; output < job->outputs; output += TILE_COLUMNS) { /* a panel of levels stays in the cache */
        const uint8_t *levels = job->packed_levels + output * groups * GROUP;
        for (int64_t tile = from; tile < to; tile++) {
            for (int d = 0; d < digits; d++) {
                const int8_t *tokens = job->packed_tokens + (tile * digits + d) * groups * TILE_ROWS * GROUP;
                tile_of_votes(sums + d * TILE_ROWS * TILE_COLUMNS, TILE_COLUMNS, tokens, levels, (int)groups,
                              job->starts + (tile * digits + d) * TILE_ROWS, 0);
            }
            write_products(job, sums, tile * TILE_ROWS, output, at_most(job->tokens - tile * TILE_ROWS, TILE_ROWS),
                           at_most(job->outputs - output, TILE_COLUMNS));
        }
    }
    end_tiles();
    return 0;
}
#else
int64_t gft_pack_levels(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
int64_t gft_pack_tokens(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
int64_t gft_multiply_tokens(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
#endif

/* How many tokens a tile has. */
int64_t gft_tile_tokens(void) { return TILE_ROWS; }
