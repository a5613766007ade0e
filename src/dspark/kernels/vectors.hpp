// Vectors of the widest registers that this file is compiled for, in GCC's and Clang's own vector types: the same source
// becomes AVX-512, AVX2, NEON or plain code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef int8_t I8 __attribute__((vector_size(W)));

template <class T> static inline T load(const void *from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}
static inline void store(float *to, V value) { memcpy(to, &value, sizeof value); }
static inline V splat(float value) { return V{} + value; }

// Half precision to float, exactly.
static inline V half(const void *from) {
#if defined(__AVX512F__)
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    const U bits = __builtin_convertvector(load<U16>(from), U);
    const V scaled = (V)((bits & 0x7fff) << 13) * 0x1p112f; // moves the exponent; subnormals come out right too
    const U odd = (U)((bits & 0x7c00) == 0x7c00) & 0x7f800000; // infinite, or not a number
    return (V)((U)scaled | (bits & 0x8000) << 16 | odd);
#endif
}

// W signed bytes to float.
static inline V bytes(const void *from) {
#if defined(__AVX512F__)
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(load<I8>(from), V);
#endif
}

static inline float sum(V value) {
    float parts[W];
    memcpy(parts, &value, sizeof parts);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// e^x to about 1 part in 2^23; 0 below -87. Range reduction by ln 2 in two parts, then a polynomial of degree 6.
static inline V exponential(V x) {
    const I keep = x > -87.0f;
    x = keep ? x : splat(-87.0f);
    x = x < 88.0f ? x : splat(88.0f);
    const V shifted = x * 1.44269504f + 12582912.0f; // 1.5 * 2^23: rounds to the nearest integer
    const V whole = shifted - 12582912.0f;
    const V r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    V p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const V scale = (V)((__builtin_convertvector(whole, I) + 127) << 23);
    return (V)((I)(p * scale) & keep);
}
