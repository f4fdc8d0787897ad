/* Products of bytes as the instructions that votes.h is written for do them, in plain C: so that a processor which has none
 * of them, or others, runs the packing, the tiles and the edges of each. */
#include <arm_neon.h>
#include <string.h>

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
typedef int32_t __m512i __attribute__((vector_size(64)));
typedef int32_t __m256i __attribute__((vector_size(32)));

/* sums += x0 · g0 + x1 · g1 + x2 · g2 + x3 · g3, of x without and g with a sign. */
static inline void dot_fours(uint32_t *sums, const uint8_t *x, const int8_t *grad, int count) {
    for (int i = 0; i < 4 * count; i++) sums[i / 4] += (uint32_t)(x[i] * grad[i]);
}

static inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i x, __m512i grad) {
    dot_fours((uint32_t *)&sums, (const uint8_t *)&x, (const int8_t *)&grad, 16);
    return sums;
}

static inline __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i x, __m256i grad) {
    dot_fours((uint32_t *)&sums, (const uint8_t *)&x, (const int8_t *)&grad, 8);
    return sums;
}
#elif defined(EMULATE_SMMLA)
#undef __ARM_FEATURE_MATMUL_INT8
#define __ARM_FEATURE_MATMUL_INT8 1 /* only now: arm_neon.h sets it anew */
/* A (2, 8) matrix by the transpose of another, added to a (2, 2) one. */
static inline int32x4_t emulated_vmmlaq_s32(int32x4_t sums, int8x16_t a, int8x16_t b) {
    uint32x4_t wrapping = vreinterpretq_u32_s32(sums);
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < 8; k++) wrapping[2 * i + j] += (uint32_t)(a[8 * i + k] * b[8 * j + k]);
    return vreinterpretq_s32_u32(wrapping);
}
#define vmmlaq_s32 emulated_vmmlaq_s32
#endif
