/* Random numbers: philox.noise16 and its kin of fewer rounds, several counters side by side.
 *
 * A round is two products of 32 by 32 bits, of which both halves are used. Vectors of x86 multiply the low halves of 64-bit
 * lanes, those of ARM all lanes of half a vector: so a counter's words lie in 64-bit lanes there, and in 32-bit lanes here.
 */
#define ROUNDS 10 /* for the moves of weights */
#define VOTE_ROUNDS 7 /* for x and grad_output */
#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u

#if defined(__aarch64__)
enum { VECTORS = 2, LANES = 4 * VECTORS }; /* one vector waits for its products while the other is mixed */

static inline uint32x4_t front_times(uint32x4_t words, uint32_t by) {
    return vreinterpretq_u32_u64(vmull_u32(vget_low_u32(words), vdup_n_u32(by)));
}

static inline uint32x4_t back_times(uint32x4_t words, uint32_t by) {
    return vreinterpretq_u32_u64(vmull_high_u32(words, vdupq_n_u32(by)));
}

/* The four words of four counters, counter by counter. */
static inline void write_counters(uint16_t *out, uint32x4_t c0, uint32x4_t c1, uint32x4_t c2, uint32x4_t c3) {
    uint64x2_t low[2] = {vreinterpretq_u64_u32(vzip1q_u32(c0, c1)), vreinterpretq_u64_u32(vzip2q_u32(c0, c1))};
    uint64x2_t high[2] = {vreinterpretq_u64_u32(vzip1q_u32(c2, c3)), vreinterpretq_u64_u32(vzip2q_u32(c2, c3))};
    for (int i = 0; i < 2; i++) {
        vst1q_u16(out + 16 * i, vreinterpretq_u16_u64(vzip1q_u64(low[i], high[i])));
        vst1q_u16(out + 16 * i + 8, vreinterpretq_u16_u64(vzip2q_u64(low[i], high[i])));
    }
}

/* 16-bit noise of `count` counters from `first` on, eight numbers each, and up to LANES - 1 counters more. */
static inline void noise_of_counters(uint16_t *out, uint64_t first, int count, NoiseKey key, int rounds) {
    const uint32x4_t zero_to_three = {0, 1, 2, 3};
    for (int start = 0; start < count; start += LANES) {
        uint32x4_t c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS];
        uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
        for (int v = 0; v < VECTORS; v++) {
            c0[v] = vaddq_u32(vdupq_n_u32((uint32_t)first + (uint32_t)(start + 4 * v)), zero_to_three);
            c1[v] = vdupq_n_u32(key.call);
            c2[v] = vdupq_n_u32(key.step);
            c3[v] = vdupq_n_u32(key.stream);
        }
        for (int round = 0; round < rounds; round++) {
            for (int v = 0; v < VECTORS; v++) {
                uint32x4_t front_0 = front_times(c0[v], MULTIPLIER_0), back_0 = back_times(c0[v], MULTIPLIER_0);
                uint32x4_t front_1 = front_times(c2[v], MULTIPLIER_1), back_1 = back_times(c2[v], MULTIPLIER_1);
                c0[v] = veorq_u32(vuzp2q_u32(front_1, back_1), veorq_u32(c1[v], vdupq_n_u32(k0)));
                c2[v] = veorq_u32(vuzp2q_u32(front_0, back_0), veorq_u32(c3[v], vdupq_n_u32(k1)));
                c1[v] = vuzp1q_u32(front_1, back_1);
                c3[v] = vuzp1q_u32(front_0, back_0);
            }
            k0 += WEYL_0;
            k1 += WEYL_1;
        }
        for (int v = 0; v < VECTORS; v++) write_counters(out + 8 * (start + 4 * v), c0[v], c1[v], c2[v], c3[v]);
    }
}
#else
/* A lane is 64 bits wide for the sake of the product, and holds a 32-bit word in its low half; the product takes no notice
 * of what is above, so nothing clears it. */
#if defined(__AVX512F__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef uint64_t Words __attribute__((vector_size(8 * LANES)));

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
static inline void noise_of_counters(uint16_t *out, uint64_t first, int count, NoiseKey key, int rounds) {
    Words counter = all(first);
    for (int i = 0; i < LANES; i++) counter[i] += (uint64_t)i;
    for (int start = 0; start < count; start += LANES, counter += all(LANES)) {
        Words c0 = counter, c1 = all(key.call), c2 = all(key.step), c3 = all(key.stream);
        uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
        for (int round = 0; round < rounds; round++) {
            Words p0 = times(c0, MULTIPLIER_0), p1 = times(c2, MULTIPLIER_1);
            c0 = p1 >> 32 ^ c1 ^ all(k0);
            c2 = p0 >> 32 ^ c3 ^ all(k1);
            c1 = p1;
            c3 = p0;
            k0 += WEYL_0;
            k1 += WEYL_1;
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
#endif

enum { ROOM = BLOCK + 16 + 8 * LANES }; /* elements: a block's noise begins and ends within a counter, in whole vectors */

/* Noise of `count` elements from `first` on, at most BLOCK of them; `room` holds ROOM. Returns where it begins. */
static inline const uint16_t *noise_of(uint16_t *room, int64_t first, int count, NoiseKey key, int rounds) {
    first += (int64_t)key.first;
    int lead = (int)(first % 8);
    noise_of_counters(room, (uint64_t)(first / 8), (lead + count + 7) / 8, key, rounds);
    return room + lead;
}
