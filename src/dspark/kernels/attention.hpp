// What a decoder layer does besides its matrices: norms, rotation, attention over K/V of any lengths.
#pragma once
#include "vectors.hpp"
#include <algorithm>
#include <limits>
#include <type_traits>

// x / rms(x) * weight over `width` (any).
static void rms_norm(const float *x, const float *weight, int width, float eps, float *out) {
    V squares = {};
    float rest = 0;
    int i = 0;
    for (; i + W <= width; i += W) squares += load<V>(x + i) * load<V>(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / width + eps);
    for (i = 0; i + W <= width; i += W) store(out + i, load<V>(x + i) * scale * load<V>(weight + i));
    for (; i < width; i++) out[i] = x[i] * scale * weight[i];
}

// The halves-apart rotation of the first `dims` elements; the first half of sin carries the minus sign.
static void rotate(float *x, const float *cos, const float *sin, int dims) {
    for (int i = 0, half = dims / 2; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// Sums of four vectors, as the first elements of one of four.
typedef float F4 __attribute__((vector_size(16)));
static inline F4 four_sums(V a, V b, V c, V d) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    const __m512d x = (__m512d)ab, y = (__m512d)cd;
    const __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(all), (__m256)_mm512_extractf64x4_pd((__m512d)all, 1));
    return (F4)_mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
#elif defined(__AVX2__)
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    return (F4)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    return F4{sum(a), sum(b), sum(c), sum(d)};
#endif
}

constexpr int TILE = 8; // queries of one K/V head that go over its keys and values together

struct Queries {
    const float *q[TILE];
    float *out[TILE];
    int64_t first[TILE], end[TILE]; // keys first..end-1 are seen by each
};

static inline float largest_of(V value) {
    float parts[W];
    memcpy(parts, &value, sizeof parts);
    return *std::max_element(parts, parts + W);
}

constexpr int FEW = W == 16 ? 4 : 2; // queries times 4 keys, or 4 vectors of a value, whose sums fit the registers

// work(first, how many) for all of R queries, FEW at a time; how many is known when this is compiled.
template <int R, class Work> static inline void by_few(Work work) {
    for (int r = 0; r + FEW <= R; r += FEW) work(r, std::integral_constant<int, FEW>());
    if constexpr (R % FEW) work(R - R % FEW, std::integral_constant<int, R % FEW>());
}

// out[query] = inverse (sum of score value) for B queries whose scores lie `span` apart, N vectors of the values.
template <int B, int N>
static inline void weigh(const float *scores, int64_t span, const float *values, int64_t count, int width,
                         const float *inverse, float *const *out, int64_t start) {
    V sums[B][N] = {};
    for (int64_t j = 0; j < count; j++) {
        V value[N];
        for (int n = 0; n < N; n++) value[n] = load<V>(values + j * width + start + n * W);
        for (int b = 0; b < B; b++)
            for (int n = 0; n < N; n++) sums[b][n] += scores[b * span + j] * value[n];
    }
    for (int b = 0; b < B; b++)
        for (int n = 0; n < N; n++) store(out[b] + start + n * W, sums[b][n] * inverse[b]);
}

// softmax(q . K * scale) V for R queries of a head; keys, values [n, width], width a multiple of W. scores: room for
// R * (keys seen + 2 W). What a query gives does not depend on the others: sums run over the keys by their position.
template <int R>
static void attend(const Queries &s, const float *keys, const float *values, int width, float scale, float *scores) {
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    int64_t low = *std::min_element(s.first, s.first + R);
    const int64_t high = *std::max_element(s.end, s.end + R);
    low -= low % W;
    const int64_t span = (high - low + W - 1) / W * W;
    const int parts = width / W;
    for (int64_t j = low; j < low + span; j += 4) {
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + std::min(j + i, high - 1) * width;
        by_few<R>([&](int first, auto few) {
            constexpr int B = decltype(few)::value;
            V products[B][4] = {};
            for (int p = 0; p < parts; p++) {
                V part[4];
                for (int i = 0; i < 4; i++) part[i] = load<V>(key[i] + p * W);
                for (int b = 0; b < B; b++) {
                    const V q = load<V>(s.q[first + b] + p * W);
                    for (int i = 0; i < 4; i++) products[b][i] += q * part[i];
                }
            }
            for (int b = 0; b < B; b++) {
                const int r = first + b;
                F4 four = four_sums(products[b][0], products[b][1], products[b][2], products[b][3]) * scale;
                if (j < s.first[r] || j + 4 > s.end[r])
                    for (int i = 0; i < 4; i++)
                        if (j + i < s.first[r] || j + i >= s.end[r]) four[i] = HIDDEN;
                memcpy(scores + r * span + (j - low), &four, sizeof four);
            }
        });
    }
    float inverse[R];
    for (int r = 0; r < R; r++) {
        float *row = scores + r * span;
        V most = load<V>(row);
        for (int64_t j = W; j < span; j += W) {
            const V next = load<V>(row + j);
            most = next > most ? next : most;
        }
        const float largest = largest_of(most);
        V total = {};
        for (int64_t j = 0; j < span; j += W) {
            const V e = exponential(load<V>(row + j) - largest);
            store(row + j, e);
            total += e;
        }
        inverse[r] = 1.0f / sum(total);
    }
    by_few<R>([&](int first, auto few) {
        constexpr int B = decltype(few)::value;
        const float *row = scores + first * span, *value = values + low * width;
        int64_t start = 0;
        for (; start + 4 * W <= width; start += 4 * W)
            weigh<B, 4>(row, span, value, high - low, width, inverse + first, s.out + first, start);
        for (; start < width; start += W)
            weigh<B, 1>(row, span, value, high - low, width, inverse + first, s.out + first, start);
    });
}

static void attend_some(const Queries &s, int count, const float *keys, const float *values, int width, float scale,
                        float *scores) {
    switch (count) {
    case 1: return attend<1>(s, keys, values, width, scale, scores);
    case 2: return attend<2>(s, keys, values, width, scale, scores);
    case 3: return attend<3>(s, keys, values, width, scale, scores);
    case 4: return attend<4>(s, keys, values, width, scale, scores);
    case 5: return attend<5>(s, keys, values, width, scale, scores);
    case 6: return attend<6>(s, keys, values, width, scale, scores);
    case 7: return attend<7>(s, keys, values, width, scale, scores);
    default: return attend<TILE>(s, keys, values, width, scale, scores);
    }
}
