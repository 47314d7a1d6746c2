/* One vector type for x86 (AVX2, AVX-512) and ARM (NEON), with operations that round in the same way everywhere: an
 * explicit fused multiply-add, sums in a fixed order, exp. The vectors' width only affects the speed. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define NV (16 / LANES) /* vectors in 16 floats: a panel's width, a KV block's positions */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define EACH_VEC UNROLL for (int c = 0; c < NV; c++)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf where(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf max_v(vf a, vf b) { return where(a > b, a, b); }

/* a * b + c, rounded once. */
INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* e^x for x <= 88, to 2 ulp; 1 at 0; 0 below -87.3 (there are no subnormals). */
INLINE vf exp_v(vf x) {
    const float round = 12582912.f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vf shifted = fma_v(x, splat(1.44269504089f), splat(round)), n = shifted - round;
    vf r = fma_v(n, splat(-0.693145751953125f), x);
    r = fma_v(n, splat(-1.42860682030941723212e-6f), r);
    vf p = fma_v(r, splat(0x1.0F9F9Cp-7f), splat(0x1.573A1Ap-5f));
    p = fma_v(p, r, splat(0x1.555A80p-3f));
    p = fma_v(p, r, splat(0x1.FFFDC6p-2f));
    p = fma_v(p, r, splat(0x1.FFFFF6p-1f));
    p = fma_v(p, r, splat(1));
    vf scaled = (vf)((vi)p + ((vi)shifted << 23)); /* n to the exponent: the bits of `round` are shifted out */
    return where(x < -87.3f, (vf){0}, scaled);
}

/* The sum and the maximum of 16 lanes, by halving. */
INLINE float sum16(vf v[NV]) {
    float t[LANES];
    UNROLL for (int half = NV / 2; half; half /= 2) UNROLL for (int c = 0; c < half; c++) v[c] += v[c + half];
    store(t, v[0]);
    UNROLL for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}
INLINE float max16(vf v[NV]) {
    float t[LANES];
    UNROLL for (int half = NV / 2; half; half /= 2) UNROLL for (int c = 0; c < half; c++)
        v[c] = max_v(v[c], v[c + half]);
    store(t, v[0]);
    UNROLL for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++)
        t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
}

/* Thread-local memory for at least num_floats, reused by the next call. */
static float *scratch(size_t num_floats) {
    static _Thread_local float *memory;
    static _Thread_local size_t have;
    if (have < num_floats) {
        free(memory);
        have = num_floats + num_floats / 2;
        memory = aligned_alloc(64, (have * sizeof(float) + 63) / 64 * 64);
        if (!memory) abort();
    }
    return memory;
}
