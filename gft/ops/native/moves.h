/* How votes move weights: their squares, the factors of rows and columns made of them, and the moves. */

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

/* Sums of squares of votes >> shift, written by row and added by column. `from` begins a piece. */
int64_t gft_squares(const SquaresJob *job, int64_t from, int64_t to) {
    int64_t columns = job->columns;
    for (int64_t row = from; row < to; row++) {
        int64_t *by_column = job->by_column + row / job->piece * columns, by_row = 0;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            _Alignas(64) int32_t small[BLOCK];
            uint32_t largest = job->wide ? shifted(small, NULL, (const int64_t *)job->votes + at, count, job->shift)
                                         : shifted(small, (const int32_t *)job->votes + at, NULL, count, job->shift);
            by_row += largest < 1u << 16 ? add_squares(by_column + start, small, count)
                                         : add_large_squares(by_column + start, small, count);
        }
        job->by_row[row] = by_row;
    }
    return 0;
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
static int64_t moved(const MoveJob *job, int64_t from, int64_t to, const RoundingPlan *rounding, const TopKPlan *topk) {
    _Alignas(64) uint16_t room[ROOM];
    _Alignas(64) int16_t move[BLOCK];
    _Alignas(64) int8_t old[BLOCK], new[BLOCK];
    Storage storage = job->storage;
    int64_t columns = job->columns, bytes_per_row = (columns * storage.field_bits + 7) / 8, flips = 0;
    float cap = rounding && rounding->cap < LARGEST_INT32 ? rounding->cap : LARGEST_INT32;
    int32_t dead_zone = rounding ? (int32_t)(cap * rounding->threshold_share) : 0;
    int follow = -1; /* all do, at once */
    if (rounding && storage.inertia) follow = cap > 0 ? rounding->follow : 0; /* at lr = 0 nothing follows */
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) { /* BLOCK is a multiple of what a byte holds */
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            uint8_t *bytes = job->stored + row * bytes_per_row + start * storage.field_bits / 8;
            const int32_t *narrow = job->wide ? NULL : (const int32_t *)job->votes + at;
            const int64_t *broad = job->wide ? (const int64_t *)job->votes + at : NULL;
            const uint16_t *noise = noise_of(room, at, count, job->key, ROUNDS);
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

int64_t gft_round(const MoveJob *job, int64_t from, int64_t to) { return moved(job, from, to, &job->rounding, NULL); }

int64_t gft_topk(const MoveJob *job, int64_t from, int64_t to) { return moved(job, from, to, NULL, &job->topk); }
