/* The two float products of a linear layer, with the weight read out on the way to them:
 *
 *     forward    y = x · W^T              (tokens, rows)     a sum over columns
 *     backward   grad_input = grad · W    (tokens, columns)  a sum over rows
 *
 * A tile of the result is summed in registers. For it the first factor is packed, PRODUCT_ROWS tokens side by side, and the
 * weight is made float panel by panel, PRODUCT_COLUMNS results wide and DEPTH summands deep, which stay in the second-level
 * cache. So no float weight is ever written to memory, and a result is summed in one order whatever the threads.
 */
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define FLOAT_PRODUCT
typedef __m512 Floats;
#define MULTIPLY_ADD(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define ALL(number) _mm512_set1_ps(number)
#define INTEGERS_OF(bytes) (Integers) _mm512_cvtepi8_epi32(bytes)
#define FLOATS_OF(integers) _mm512_cvtepi32_ps((__m512i)(integers))
enum { FLOATS = 16, PRODUCT_ROWS = 8, PRODUCT_VECTORS = 3 };
#elif defined(__AVX2__) && defined(__FMA__)
#define FLOAT_PRODUCT
typedef __m256 Floats;
#define MULTIPLY_ADD(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define ALL(number) _mm256_set1_ps(number)
#define INTEGERS_OF(bytes) (Integers) _mm256_cvtepi8_epi32(bytes) /* of the first eight */
#define FLOATS_OF(integers) _mm256_cvtepi32_ps((__m256i)(integers))
enum { FLOATS = 8, PRODUCT_ROWS = 6, PRODUCT_VECTORS = 2 };
#endif

#if defined(FLOAT_PRODUCT)
enum { PRODUCT_COLUMNS = PRODUCT_VECTORS * FLOATS, DEPTH = 256, SQUARE = 16 };
typedef int32_t Integers __attribute__((vector_size(4 * FLOATS)));
typedef float UnalignedFloats __attribute__((vector_size(4 * FLOATS), aligned(4), may_alias));

/* Tiles `from` to `to` of x (tokens, depth): packed[tile][depth][token of the tile]; what is missing is 0. */
int64_t gft_pack_floats(const ProductJob *job, int64_t from, int64_t to) {
    int64_t depth = job->depth;
    for (int64_t tile = from; tile < to; tile++) {
        float *target = job->packed + tile * depth * PRODUCT_ROWS;
        const float *source = job->x + tile * PRODUCT_ROWS * depth;
        int some = at_most(job->tokens - tile * PRODUCT_ROWS, PRODUCT_ROWS);
        if (some == PRODUCT_ROWS) {
            for (int64_t k = 0; k < depth; k++)
                for (int r = 0; r < PRODUCT_ROWS; r++) target[k * PRODUCT_ROWS + r] = source[r * depth + k];
        } else {
            for (int64_t k = 0; k < depth; k++)
                for (int r = 0; r < PRODUCT_ROWS; r++) target[k * PRODUCT_ROWS + r] = r < some ? source[r * depth + k] : 0;
        }
    }
    return 0;
}

/* The bytes of 16 fields. Past the end of the matrix there are none to read, and what stands for them is of no account. */
static inline __m128i bytes_of_sixteen(const uint8_t *bytes, const uint8_t *end, int width) {
    uint8_t last[SQUARE] = {0};
    if (end - bytes < 2 * width) {
        if (end > bytes) memcpy(last, bytes, (size_t)(end - bytes));
        bytes = last;
    }
    if (width == 8) return _mm_loadu_si128((const __m128i *)bytes);
    if (width == 4) return _mm_loadl_epi64((const __m128i *)bytes);
    int32_t four;
    memcpy(&four, bytes, 4);
    return _mm_cvtsi32_si128(four);
}

/* 16 stored values. `width`: field_bits, a constant. */
static inline __m128i sixteen(const uint8_t *stored, const uint8_t *end, const ProductJob *job, int width) {
    __m128i all = bytes_of_sixteen(stored, end, width);
    if (width == 8) return job->storage.memory ? all : _mm_add_epi8(all, _mm_set1_epi8((char)job->storage.lowest));
    __m128i mask = _mm_set1_epi8((char)((1 << width) - 1));
    __m128i fields = _mm_unpacklo_epi8(_mm_and_si128(all, mask), _mm_and_si128(_mm_srli_epi16(all, width), mask));
    if (width == 2) {
        __m128i third = _mm_and_si128(_mm_srli_epi16(all, 4), mask), fourth = _mm_and_si128(_mm_srli_epi16(all, 6), mask);
        fields = _mm_unpacklo_epi16(fields, _mm_unpacklo_epi8(third, fourth));
    }
    return _mm_add_epi8(fields, _mm_set1_epi8((char)job->storage.lowest));
}

/* 16 rows of 16 bytes, with rows and columns exchanged. */
static inline void turn(__m128i *rows) {
    for (int fold = 0; fold < 4; fold++) { /* each brings those together whose numbers differ in one bit */
        __m128i folded[SQUARE];
        for (int i = 0; i < SQUARE / 2; i++) {
            folded[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + SQUARE / 2]);
            folded[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + SQUARE / 2]);
        }
        memcpy(rows, folded, sizeof folded);
    }
}

/* 16 stored values as floats. */
static inline void write_floats(float *target, __m128i values, const ProductJob *job) {
    Integers half = (Integers){0} + (1 << job->storage.low_bits) / 2;
    Floats factor = ALL(job->factor);
    for (int i = 0; i < SQUARE; i += FLOATS, values = _mm_srli_si128(values, FLOATS & 15))
        *(UnalignedFloats *)(target + i) = FLOATS_OF((INTEGERS_OF(values) + half) >> job->storage.low_bits) * factor;
}

/* forward: panel[k][column] = W[start + column][first + k]; backward: W[first + k][start + column] */
static inline void panel_of_weight(float *panel, const ProductJob *job, int64_t start, int64_t first, int depth, int width,
                                   int back) {
    int64_t row = back ? first : start, column = back ? start : first, stride = (job->columns * width + 7) / 8;
    const uint8_t *stored = job->stored + row * stride + column * width / 8, *end = job->stored + job->rows * stride;
    for (int k = 0; back && k < depth; k++, stored += stride, panel += PRODUCT_COLUMNS)
        for (int c = 0; c < PRODUCT_COLUMNS; c += SQUARE)
            write_floats(panel + c, sixteen(stored + c * width / 8, end, job, width), job);
    for (int c = 0; !back && c < PRODUCT_COLUMNS; c += SQUARE)
        for (int k = 0; k < depth; k += SQUARE) {
            __m128i square[SQUARE];
            for (int i = 0; i < SQUARE; i++) square[i] = sixteen(stored + (c + i) * stride + k * width / 8, end, job, width);
            turn(square);
            for (int i = 0; i < SQUARE; i++) write_floats(panel + (k + i) * PRODUCT_COLUMNS + c, square[i], job);
        }
}

/* One tile of the result, or the first of its vectors, `stride` floats from row to row; `add`: to what is there. */
static inline void tile_of_product(float *out, int64_t stride, const float *x, const float *panel, int depth, int add,
                                   int vectors) {
    Floats sums[PRODUCT_ROWS][PRODUCT_VECTORS];
    for (int r = 0; r < PRODUCT_ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = ALL(0.0f);
    for (int k = 0; k < depth; k++, x += PRODUCT_ROWS, panel += PRODUCT_COLUMNS)
        for (int r = 0; r < PRODUCT_ROWS; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = MULTIPLY_ADD(ALL(x[r]), *(const UnalignedFloats *)(panel + v * FLOATS), sums[r][v]);
    for (int r = 0; r < PRODUCT_ROWS; r++)
        for (int v = 0; v < vectors; v++) {
            UnalignedFloats *target = (UnalignedFloats *)(out + r * stride + v * FLOATS);
            if (add) sums[r][v] += *target; /* sums of sums: their errors stay small */
            *target = sums[r][v];
        }
}

/* A tile that may reach over the result's edge: `rows` and `columns` of it are inside. */
static void product_at_edge(float *out, int64_t stride, const float *x, const float *panel, int depth, int add, int rows,
                            int columns) {
    if (rows == PRODUCT_ROWS && columns == PRODUCT_COLUMNS) {
        tile_of_product(out, stride, x, panel, depth, add, PRODUCT_VECTORS);
        return;
    }
    float whole[PRODUCT_ROWS * PRODUCT_COLUMNS] = {0};
    for (int r = 0; r < rows; r++)
        for (int c = 0; add && c < columns; c++) whole[r * PRODUCT_COLUMNS + c] = out[r * stride + c];
    if (columns <= FLOATS) /* a classifier of ten classes has no more */
        tile_of_product(whole, PRODUCT_COLUMNS, x, panel, depth, add, 1);
    else
        tile_of_product(whole, PRODUCT_COLUMNS, x, panel, depth, add, PRODUCT_VECTORS);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) out[r * stride + c] = whole[r * PRODUCT_COLUMNS + c];
}

static inline int64_t product(const ProductJob *job, int64_t from, int64_t to, int back, int width) {
    _Alignas(64) float panel[DEPTH * PRODUCT_COLUMNS];
    int64_t results = back ? job->columns : job->rows;
    for (int64_t start = from * PRODUCT_COLUMNS; start < to * PRODUCT_COLUMNS; start += PRODUCT_COLUMNS) {
        int some = at_most(results - start, PRODUCT_COLUMNS);
        for (int64_t first = 0; first < job->depth; first += DEPTH) {
            int depth = at_most(job->depth - first, DEPTH);
            panel_of_weight(panel, job, start, first, depth, width, back);
            for (int64_t token = 0; token < job->tokens; token += PRODUCT_ROWS)
                product_at_edge(job->out + token * results + start, results,
                                job->packed + token * job->depth + first * PRODUCT_ROWS, panel, depth, first > 0,
                                at_most(job->tokens - token, PRODUCT_ROWS), some);
        }
    }
    return 0;
}

#define BY_WIDTH(back) \
    switch (job->storage.field_bits) { \
    case 2: return product(job, from, to, back, 2); \
    case 4: return product(job, from, to, back, 4); \
    default: return product(job, from, to, back, 8); \
    }
/* Panels `from` to `to` of the results. */
int64_t gft_forward(const ProductJob *job, int64_t from, int64_t to) { BY_WIDTH(0) }
int64_t gft_backward(const ProductJob *job, int64_t from, int64_t to) { BY_WIDTH(1) }
#else /* __init__.py then leaves the products to torch */
enum { PRODUCT_ROWS = 0, PRODUCT_COLUMNS = 0 };
int64_t gft_pack_floats(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
int64_t gft_forward(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
int64_t gft_backward(const ProductJob *job, int64_t from, int64_t to) { return (void)job, from - to; }
#endif

/* How many tokens a tile has, and how many results a panel; 0 where there is no such product. */
int64_t gft_product_rows(void) { return PRODUCT_ROWS; }
int64_t gft_product_columns(void) { return PRODUCT_COLUMNS; }
