// What a decoder layer does besides its matrices: norms, rotation, attention over K/V of any lengths.
#pragma once
#include "vectors.hpp"
#include <algorithm>
#include <limits>

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
#else
    return F4{sum(a), sum(b), sum(c), sum(d)};
#endif
}

constexpr int TILE = 4; // query rows that go over K and V together

struct Queries {
    const float *q;   // first row
    int64_t stride;   // between rows
    int rows;         // 1..TILE
    int64_t first[TILE], end[TILE]; // keys first..end-1 are seen by each row
    float *out;
    int64_t out_stride;
};

// One head: softmax(q . K * scale) V for up to TILE rows; keys, values [n, width] of this head, width a multiple of W.
// scores: room for TILE * (keys seen + 2 W). What a row gives does not depend on the other rows.
static void attend(const Queries &s, const float *keys, const float *values, int width, float scale, float *scores) {
    int64_t low = s.first[0], high = s.end[0];
    for (int r = 1; r < s.rows; r++) low = std::min(low, s.first[r]), high = std::max(high, s.end[r]);
    low -= low % W; // a key's place in the vectors below depends on its position only
    const int64_t span = (high - low + W - 1) / W * W;
    const int parts = width / W;
    for (int64_t j = low; j < low + span; j += 4) {
        for (int r = 0; r < s.rows; r++) {
            float *to = scores + r * span + (j - low);
            if (j >= s.end[r] || j + 4 <= s.first[r]) {
                for (int i = 0; i < 4; i++) to[i] = -std::numeric_limits<float>::infinity();
                continue;
            }
            V products[4] = {};
            for (int i = 0; i < 4; i++) {
                const float *key = keys + std::min(j + i, high - 1) * width;
                for (int p = 0; p < parts; p++) products[i] += load<V>(s.q + r * s.stride + p * W) * load<V>(key + p * W);
            }
            const F4 four = four_sums(products[0], products[1], products[2], products[3]) * scale;
            for (int i = 0; i < 4; i++) {
                const bool seen = j + i >= s.first[r] && j + i < s.end[r];
                to[i] = seen ? four[i] : -std::numeric_limits<float>::infinity();
            }
        }
    }
    float inverse[TILE];
    for (int r = 0; r < s.rows; r++) {
        float *row = scores + r * span;
        float largest = row[0];
        for (int64_t j = 1; j < span; j++) largest = std::max(largest, row[j]);
        V total = {};
        for (int64_t j = 0; j < span; j += W) {
            const V e = exponential(load<V>(row + j) - largest);
            store(row + j, e);
            total += e;
        }
        inverse[r] = 1.0f / sum(total);
    }
    for (int p = 0; p < parts; p++) {
        V sums[TILE] = {};
        for (int64_t j = low; j < high; j++) {
            const V value = load<V>(values + j * width + p * W);
            for (int r = 0; r < TILE; r++) sums[r] += scores[(r < s.rows ? r : 0) * span + (j - low)] * value;
        }
        for (int r = 0; r < s.rows; r++) store(s.out + r * s.out_stride + p * W, sums[r] * inverse[r]);
    }
}
