/* momentum.mean_amax and renew_mean: a running mean of votes in a byte a weight.
 *
 *     mean = m · scale · share + votes · rest              m int8, scale a float for each column
 *     m    = stochastic_round(mean / its new scale)        on the scale that the largest of a column sets
 *     move = round((mean · share + votes · rest) · per_move)
 *
 * Twice over the votes: once for the largest entries, once for all else. Each product and sum is rounded by itself.
 */

static inline float vote_at(const MeanJob *job, int64_t at) {
    return job->wide ? (float)((const int64_t *)job->votes)[at] : (float)((const int32_t *)job->votes)[at];
}

/* The mean with this step's votes in it, and their own part of it; `count` of a row from element `at` and column `column` on. */
static inline void means(float *restrict mean, float *restrict newest, const MeanJob *job, int64_t at, int64_t column,
                         int count) {
    const int8_t *restrict stored = job->stored + at;
    const float *restrict scale = job->scale + column;
    const int32_t *restrict narrow = (const int32_t *)job->votes + at;
    if (job->wide)
        for (int i = 0; i < count; i++) newest[i] = vote_at(job, at + i) * job->rest;
    else
        for (int i = 0; i < count; i++) newest[i] = (float)narrow[i] * job->rest;
    for (int i = 0; i < count; i++) mean[i] = (float)stored[i] * scale[i] * job->share + newest[i];
}

/* Rows `from` to `to`, of which `from` begins a piece: the largest |mean| of each column in the piece, and the largest |vote|. */
int64_t gft_mean_amax(const MeanJob *job, int64_t from, int64_t to) {
    _Alignas(64) float mean[BLOCK], newest[BLOCK];
    int64_t columns = job->columns;
    for (int64_t row = from; row < to; row++) {
        float *largest = job->amax + row / job->piece * columns;
        int64_t *vote = job->largest_vote + row / job->piece;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start, most = 0;
            means(mean, newest, job, at, start, count);
            for (int i = 0; i < count; i++) {
                float size = fabsf(mean[i]);
                largest[start + i] = size > largest[start + i] ? size : largest[start + i];
            }
            for (int i = 0; i < count; i++) {
                int64_t size = job->wide ? ((const int64_t *)job->votes)[at + i] : ((const int32_t *)job->votes)[at + i];
                size = size < 0 ? -size : size;
                most = size > most ? size : most;
            }
            *vote = most > *vote ? most : *vote;
        }
    }
    return 0;
}

/* Rows `from` to `to`: the mean in place, and the moves. Two rows of the whole matrix share their noise. */
int64_t gft_renew_mean(const MeanJob *job, int64_t from, int64_t to) {
    _Alignas(64) uint16_t room[ROOM];
    _Alignas(64) float mean[BLOCK], newest[BLOCK];
    int64_t columns = job->columns;
    const float top = 127.0f * 65536.0f;
    for (int64_t row = from; row < to;) {
        int64_t pair = (job->first_row + row) / 2, end = 2 * (pair + 1) - job->first_row;
        if (end > to) end = to;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            const uint16_t *noise = noise_of(room, pair * columns + start, count, job->key, VOTE_ROUNDS);
            const float *inverse = job->inverse + start;
            for (int64_t r = row; r < end; r++) {
                int shift = (job->first_row + r) % 2 ? 8 : 0;
                int64_t at = r * columns + start;
                int8_t *stored = job->stored + at;
                int32_t *move = job->moves + at;
                means(mean, newest, job, at, start, count);
                for (int i = 0; i < count; i++) {
                    int32_t chance = (noise[i] >> shift & 255) << 8 | 128;
                    stored[i] = (int8_t)(((int32_t)within(mean[i] * inverse[i], top) + chance) >> 16);
                }
                for (int i = 0; i < count; i++) move[i] = (int32_t)rintf((mean[i] * job->share + newest[i]) * job->per_move);
            }
        }
        row = end;
    }
    return 0;
}
