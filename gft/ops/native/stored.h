/* Stored weights: several values a byte, or a value and what votes it remembers in one (storage.Storage). */

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

/* Rows `from` to `to` of a stored matrix as floats, times a factor, or as bytes: Storage.levels. */
int64_t gft_levels(const LevelsJob *job, int64_t from, int64_t to) {
    _Alignas(64) int8_t values[BLOCK];
    Storage storage = job->storage;
    float factor = job->factor;
    int bits = storage.low_bits, half = (1 << bits) / 2;
    int64_t columns = job->columns, bytes_per_row = (columns * storage.field_bits + 7) / 8;
    for (int64_t row = from; row < to; row++) {
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int count = at_most(columns - start, BLOCK);
            int64_t at = row * columns + start;
            const uint8_t *bytes = job->stored + row * bytes_per_row + start * storage.field_bits / 8;
            const int8_t *value = storage.memory ? (const int8_t *)bytes : values;
            if (!storage.memory) read_values(values, bytes, count, storage);
            if (job->bytes) {
                int8_t *level = (int8_t *)job->out + at;
                for (int i = 0; i < count; i++) level[i] = (int8_t)((value[i] + half) >> bits);
            } else {
                float *level = (float *)job->out + at;
                for (int i = 0; i < count; i++) level[i] = (float)((value[i] + half) >> bits) * factor;
            }
        }
    }
    return 0;
}
