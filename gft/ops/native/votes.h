/* products.votes_product: votes = g^T · x with g = grad_output, some four times as fast as in float32.
 *
 * An instruction adds products of bytes to 32-bit sums, of GROUP tokens at once. A tile of votes is summed in registers; for
 * it g and x are packed, the tokens of a group of a row or column side by side. Sums may wrap round on the way; in the end
 * they are right.
 *
 *     x86   AMX    64 tokens of 16 columns by those of 16 rows, two such tiles by two
 *           VNNI   4 tokens of a column by those of a row. It takes x without a sign, so x + OFFSET stands for x and a
 *                  row's sums start at -OFFSET times the sum of its g.
 *     ARM   SDOT   4 tokens of four columns by those of a row
 *           SMMLA  8 tokens of two columns by those of two rows
 */
#if defined(__AMX_INT8__)
#define VOTES_OF_BYTES
enum { VECTOR = 16, TILE_VECTORS = 2, TILE_ROWS = 32, GROUP = 4, GROUPS_A_STEP = 16, OFFSET = 0 };
#elif defined(__AVX512VNNI__)
#define VOTES_OF_BYTES
#define DOT(sums, x, grad) (Sums) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(x), (__m512i)(grad))
/* VECTOR: int32 sums in one; all sums of a tile fit registers. */
enum { VECTOR = 16, TILE_VECTORS = 3, TILE_ROWS = 8, GROUP = 4, GROUPS_A_STEP = 1, OFFSET = 128 };
#elif defined(__AVXVNNI__)
#define VOTES_OF_BYTES
#define DOT(sums, x, grad) (Sums) _mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(x), (__m256i)(grad))
enum { VECTOR = 8, TILE_VECTORS = 3, TILE_ROWS = 4, GROUP = 4, GROUPS_A_STEP = 1, OFFSET = 128 };
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
#define VOTES_OF_BYTES
enum { VECTOR = 4, TILE_VECTORS = 4, TILE_ROWS = 4, GROUP = 8, GROUPS_A_STEP = 1, OFFSET = 0 };
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define VOTES_OF_BYTES
enum { VECTOR = 4, TILE_VECTORS = 4, TILE_ROWS = 4, GROUP = 4, GROUPS_A_STEP = 1, OFFSET = 0 };
#endif

#if defined(VOTES_OF_BYTES)
enum { TILE_COLUMNS = TILE_VECTORS * VECTOR, ROWS_AT_ONCE = 64, GROUPS_AT_ONCE = 512 / GROUP };

/* How many groups so many tokens are packed as: whole steps, of which the last may be filled up with zeros. */
static inline int64_t groups_of(int64_t tokens) {
    int64_t step = GROUP * GROUPS_A_STEP;
    return (tokens + step - 1) / step * GROUPS_A_STEP;
}

/* Where in a packed tile of `groups` a group of a row lies. */
static inline int64_t place_in_tile(int row, int64_t group, int64_t groups) {
    return (GROUPS_A_STEP > 1 ? row * groups + group : group * TILE_ROWS + row) * GROUP;
}

static inline void start_tiles(void);
static inline void end_tiles(void);

/* One group of tokens: packed[column][token], from `count` columns of each token of matrix (…, width). Of the tokens only
 * `some` are there; the others are 0. */
static inline void pack_group(uint8_t *packed, const int8_t *matrix, int64_t width, int some, int count, int offset) {
    static const int8_t none[ROWS_AT_ONCE];
    const int8_t *token[GROUP];
    for (int k = 0; k < GROUP; k++) token[k] = k < some ? matrix + k * width : none;
    for (int c = 0; c < count; c++)
        for (int k = 0; k < GROUP; k++) packed[c * GROUP + k] = (uint8_t)(token[k][c] + offset);
}

/* Panels `from` to `to` of x (tokens, columns): packed[panel][group][column][token of the group]. */
int64_t gft_pack_x(const VotesJob *job, int64_t from, int64_t to) {
    int64_t tokens = job->tokens, columns = job->columns, groups = groups_of(tokens);
    for (int64_t panel = from; panel < to; panel++) {
        int count = at_most(columns - panel * TILE_COLUMNS, TILE_COLUMNS);
        uint8_t *target = job->packed + panel * groups * TILE_COLUMNS * GROUP;
        if (count < TILE_COLUMNS || groups * GROUP > tokens) memset(target, 0, (size_t)groups * TILE_COLUMNS * GROUP);
        for (int64_t g = 0; g * GROUP < tokens; g++, target += TILE_COLUMNS * GROUP) {
            const int8_t *source = job->x + g * GROUP * columns + panel * TILE_COLUMNS;
            int some = at_most(tokens - g * GROUP, GROUP);
            if (count == TILE_COLUMNS)
                pack_group(target, source, columns, some, TILE_COLUMNS, OFFSET); /* a constant, for the compiler's sake */
            else
                pack_group(target, source, columns, some, count, OFFSET);
        }
    }
    return 0;
}

/* Rows `row` to `row + count` of g^T, tokens from `first` on: packed[tile], and there as place_in_tile says; what is missing
 * is 0. `start` gets where each row's sums start. */
static void pack_grad(int8_t *packed, int32_t *start, const int8_t *grad, int64_t tokens, int64_t rows, int64_t row,
                      int count, int64_t first, int groups) {
    uint8_t one_group[ROWS_AT_ONCE * GROUP] = {0};
    memset(start, 0, sizeof(int32_t) * ROWS_AT_ONCE);
    for (int g = 0; g < groups; g++) {
        const int8_t *source = grad + (first + g * GROUP) * rows + row;
        int some = at_most(tokens - first - g * GROUP, GROUP);
        if (some < 0) some = 0; /* of a step filled up */
        if (count == ROWS_AT_ONCE)
            pack_group(one_group, source, rows, some, ROWS_AT_ONCE, 0);
        else
            pack_group(one_group, source, rows, some, count, 0);
        for (int tile = 0; tile < count; tile += TILE_ROWS)
            for (int r = 0; r < TILE_ROWS; r++)
                memcpy(packed + tile * groups * GROUP + place_in_tile(r, g, groups), one_group + (tile + r) * GROUP, GROUP);
        for (int k = 0; OFFSET > 0 && k < some; k++)
            for (int r = 0; r < count; r++) start[r] -= OFFSET * source[k * rows + r];
    }
}

#if defined(__AMX_INT8__)
static inline void start_tiles(void) {
    struct { uint8_t palette, row; uint8_t none[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;
    _tile_loadconfig(&tiles);
}

static inline void end_tiles(void) { _tile_release(); }

/* One tile of votes, `stride` int32 from row to row; `add`: to what is there. */
static void tile_of_votes(int32_t *votes, int64_t stride, const int8_t *grad, const uint8_t *x, int groups,
                          const int32_t *start, int add) {
    enum { X_STRIDE = TILE_COLUMNS * GROUP, HALF = TILE_ROWS / 2 }; /* two of AMX's tiles by two */
    int32_t *below = votes + HALF * stride;
    const int8_t *grad_below = grad + (int64_t)HALF * groups * GROUP;
    (void)start; /* 0 */
    if (add) {
        _tile_loadd(0, votes, stride * 4);
        _tile_loadd(1, votes + VECTOR, stride * 4);
        _tile_loadd(2, below, stride * 4);
        _tile_loadd(3, below + VECTOR, stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int g = 0; g < groups; g += GROUPS_A_STEP) {
        _tile_loadd(4, grad + g * GROUP, groups * GROUP);
        _tile_loadd(6, x + g * X_STRIDE, X_STRIDE);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, x + g * X_STRIDE + VECTOR * GROUP, X_STRIDE);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, grad_below + g * GROUP, groups * GROUP);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, votes, stride * 4);
    _tile_stored(1, votes + VECTOR, stride * 4);
    _tile_stored(2, below, stride * 4);
    _tile_stored(3, below + VECTOR, stride * 4);
}
#else
static inline void start_tiles(void) {}
static inline void end_tiles(void) {}
#endif

#if defined(DOT)
typedef int32_t Sums __attribute__((vector_size(4 * VECTOR)));
typedef int32_t Unaligned __attribute__((vector_size(4 * VECTOR), aligned(1), may_alias));

/* One tile of votes, `stride` int32 from row to row; `add`: to what is there. */
static void tile_of_votes(int32_t *votes, int64_t stride, const int8_t *grad, const uint8_t *x, int groups,
                          const int32_t *start, int add) {
    Sums sums[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            sums[r][v] = (Sums){0} + start[r];
            if (add) sums[r][v] += *(const Unaligned *)(votes + r * stride + v * VECTOR);
        }
    for (int g = 0; g < groups; g++) {
        const uint8_t *columns = x + g * TILE_COLUMNS * GROUP;
        for (int r = 0; r < TILE_ROWS; r++) {
            int32_t four;
            memcpy(&four, grad + (g * TILE_ROWS + r) * GROUP, GROUP);
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = DOT(sums[r][v], *(const Unaligned *)(columns + v * VECTOR * GROUP), (Sums){0} + four);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) *(Unaligned *)(votes + r * stride + v * VECTOR) = sums[r][v];
}
#elif defined(__aarch64__)
static inline void write_sums(int32_t *votes, int32x4_t sums, int add) {
    vst1q_s32(votes, add ? vaddq_s32(vld1q_s32(votes), sums) : sums);
}

/* One tile of votes, `stride` int32 from row to row; `add`: to what is there. */
static void tile_of_votes(int32_t *votes, int64_t stride, const int8_t *grad, const uint8_t *x, int groups,
                          const int32_t *start, int add) {
    const int8_t *columns = (const int8_t *)x;
    (void)start; /* 0 */
#if defined(__ARM_FEATURE_MATMUL_INT8)
    int32x4_t sums[TILE_ROWS / 2][TILE_COLUMNS / 2]; /* two rows of two columns each */
    for (int r = 0; r < TILE_ROWS / 2; r++)
        for (int c = 0; c < TILE_COLUMNS / 2; c++) sums[r][c] = vdupq_n_s32(0);
    for (int g = 0; g < groups; g++, grad += TILE_ROWS * GROUP, columns += TILE_COLUMNS * GROUP) {
        int8x16_t rows[TILE_ROWS / 2];
        for (int r = 0; r < TILE_ROWS / 2; r++) rows[r] = vld1q_s8(grad + 16 * r);
        for (int c = 0; c < TILE_COLUMNS / 2; c++) {
            int8x16_t two = vld1q_s8(columns + 16 * c);
            for (int r = 0; r < TILE_ROWS / 2; r++) sums[r][c] = vmmlaq_s32(sums[r][c], rows[r], two);
        }
    }
    for (int r = 0; r < TILE_ROWS / 2; r++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            int64x2_t left = vreinterpretq_s64_s32(sums[r][2 * v]), right = vreinterpretq_s64_s32(sums[r][2 * v + 1]);
            int32_t *first = votes + 2 * r * stride + v * VECTOR;
            write_sums(first, vreinterpretq_s32_s64(vzip1q_s64(left, right)), add);
            write_sums(first + stride, vreinterpretq_s32_s64(vzip2q_s64(left, right)), add);
        }
#else
    int32x4_t sums[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = vdupq_n_s32(0);
    for (int g = 0; g < groups; g++, grad += TILE_ROWS * GROUP, columns += TILE_COLUMNS * GROUP) {
        int8x16_t rows = vld1q_s8(grad);
        for (int v = 0; v < TILE_VECTORS; v++) {
            int8x16_t four = vld1q_s8(columns + 16 * v);
            sums[0][v] = vdotq_laneq_s32(sums[0][v], four, rows, 0);
            sums[1][v] = vdotq_laneq_s32(sums[1][v], four, rows, 1);
            sums[2][v] = vdotq_laneq_s32(sums[2][v], four, rows, 2);
            sums[3][v] = vdotq_laneq_s32(sums[3][v], four, rows, 3);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) write_sums(votes + r * stride + v * VECTOR, sums[r][v], add);
#endif
}
#endif

/* A tile that may reach over the matrix' edge: `rows` and `columns` of it are inside. */
static void tile_at_edge(int32_t *votes, int64_t stride, const int8_t *grad, const uint8_t *x, int groups,
                         const int32_t *start, int add, int rows, int columns) {
    if (rows == TILE_ROWS && columns == TILE_COLUMNS) {
        tile_of_votes(votes, stride, grad, x, groups, start, add);
        return;
    }
    int32_t whole[TILE_ROWS * TILE_COLUMNS];
    tile_of_votes(whole, TILE_COLUMNS, grad, x, groups, start, 0);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            uint32_t before = add ? (uint32_t)votes[r * stride + c] : 0; /* that may wrap round */
            votes[r * stride + c] = (int32_t)(before + (uint32_t)whole[r * TILE_COLUMNS + c]);
        }
}

/* Rows `from` to `to` of votes (rows, columns) = g^T · x of g (tokens, rows) and packed x. */
int64_t gft_votes(const VotesJob *job, int64_t from, int64_t to) {
    _Alignas(64) int8_t packed_grad[ROWS_AT_ONCE * GROUPS_AT_ONCE * GROUP]; /* with a panel of x it stays in the second-level cache */
    int32_t start[ROWS_AT_ONCE];
    int64_t tokens = job->tokens, rows = job->rows, columns = job->columns, all_groups = groups_of(tokens);
    start_tiles();
    for (int64_t row = from; row < to; row += ROWS_AT_ONCE) {
        int some_rows = at_most(to - row, ROWS_AT_ONCE);
        for (int64_t group = 0; group < all_groups; group += GROUPS_AT_ONCE) {
            int groups = at_most(all_groups - group, GROUPS_AT_ONCE);
            pack_grad(packed_grad, start, job->grad, tokens, rows, row, some_rows, group * GROUP, groups);
            for (int64_t c = 0; c < columns; c += TILE_COLUMNS) {
                const uint8_t *x = job->packed + (c * all_groups + group * TILE_COLUMNS) * GROUP;
                for (int r = 0; r < some_rows; r += TILE_ROWS)
                    tile_at_edge(job->votes + (row + r) * columns + c, columns, packed_grad + r * groups * GROUP, x, groups,
                                 start + r, group > 0, at_most(some_rows - r, TILE_ROWS), at_most(columns - c, TILE_COLUMNS));
            }
        }
    }
    end_tiles();
    return 0;
}
#else /* __init__.py then takes a float product */
enum { TILE_COLUMNS = 0, TILE_ROWS = 0, GROUP = 0 };
int64_t gft_pack_x(const VotesJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
int64_t gft_votes(const VotesJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
static inline int64_t groups_of(int64_t tokens) { return tokens; }
#endif

/* How many columns a panel of packed x has, and how many tokens a group; 0 without such an instruction. */
int64_t gft_panel_columns(void) { return TILE_COLUMNS; }
int64_t gft_group_tokens(void) { return GROUP; }

/* As how many groups so many tokens are packed. */
int64_t gft_packed_groups(int64_t tokens) { return groups_of(tokens); }
