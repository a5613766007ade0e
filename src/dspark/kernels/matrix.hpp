// Weight matrices [outputs, inputs] in panels of 16 outputs, and products of few rows with them.
//
// Weights are widened to float in registers and every sum is a float sum over the inputs in one order, whatever the
// number of rows: a row's result never depends on the rows beside it.
#pragma once
#include "vectors.hpp"
#include <algorithm>

constexpr int PANEL = 16;
constexpr int P = PANEL / W;                  // vectors in a panel
constexpr int BLOCK = 32;                     // inputs that are packed together
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 16;                      // vectors of sums: half of the registers
#else
constexpr int SUMS = 8;
#endif
constexpr int SPLIT = W == 16 ? 2 : 1;        // sums an output is split into (inputs by turns), to hide latency
constexpr int MOST_ROWS = SUMS / (P * SPLIT); // rows whose sums fit the registers
constexpr int UNIT = 2;                       // panels that are computed together: a unit is 32 outputs

enum Format : int32_t { F32, F16, BF16, INT8, Q8_0, Q4_1 };

struct Matrix {
    int32_t format, outputs, inputs, padding;
    const uint8_t *data; // panels, one after another
    const float *scales; // INT8: one per output
    const float *bias;   // or null
};

// What a format does: bytes of a block of a panel, and how input k (of BLOCK) of its 16 outputs becomes P vectors. With
// SCALED, the numbers of a block share a scale d, and SHIFTED, also a shift m: weight = d number + m. Both are taken out of
// the sum: d (sum of number x) + m (sum of x).
struct FormatF32 {
    static constexpr int BYTES = BLOCK * PANEL * 4;
    static constexpr bool SCALED = false, SHIFTED = false;
    static V number(const uint8_t *block, int k, int v) { return load<V>(block + 64 * k + 4 * W * v); }
};
struct FormatF16 {
    static constexpr int BYTES = BLOCK * PANEL * 2;
    static constexpr bool SCALED = false, SHIFTED = false;
    static V number(const uint8_t *block, int k, int v) { return half(block + 32 * k + 2 * W * v); }
};
struct FormatBF16 { // 32-bit words: the even input's weight in the lower half, the odd one's in the upper
    static constexpr int BYTES = BLOCK * PANEL * 2;
    static constexpr bool SCALED = false, SHIFTED = false;
    static V number(const uint8_t *block, int k, int v) {
        const U both = load<U>(block + 64 * (k / 2) + 4 * W * v);
        return (V)(k % 2 ? both & 0xffff0000u : both << 16);
    }
};
struct FormatInt8 { // the output's scale multiplies its sum
    static constexpr int BYTES = BLOCK * PANEL;
    static constexpr bool SCALED = false, SHIFTED = false;
    static V number(const uint8_t *block, int k, int v) { return bytes(block + 16 * k + W * v); }
};
struct FormatQ8_0 { // GGUF: 32 inputs share a half-precision scale
    static constexpr int BYTES = 2 * PANEL + BLOCK * PANEL;
    static constexpr bool SCALED = true, SHIFTED = false;
    static V scale(const uint8_t *block, int v) { return half(block + 2 * W * v); }
    static V shift(const uint8_t *, int) { return V{}; }
    static V number(const uint8_t *block, int k, int v) { return bytes(block + 32 + 16 * k + W * v); }
};
struct FormatQ4_1 { // GGUF: 32 inputs share a scale d and a minimum m, weight = d q + m = d (q - 8) + (m + 8 d), which keeps
                    // the two sums small. A 32-bit word holds 8 inputs.
    static constexpr int BYTES = 4 * PANEL + BLOCK * PANEL / 2;
    static constexpr bool SCALED = true, SHIFTED = true;
    static V scale(const uint8_t *block, int v) { return half(block + 2 * W * v); }
    static V shift(const uint8_t *block, int v) { return half(block + 32 + 2 * W * v) + 8 * scale(block, v); }
    static V number(const uint8_t *block, int k, int v) {
        const U words = load<U>(block + 64 + 64 * (k / 8) + 4 * W * v) >> (4 * (k % 8));
#if defined(__AVX512F__)
        const V table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        return (V)_mm512_permutexvar_ps((__m512i)words, (__m512)table); // looks at the lowest 4 bits only
#else
        return __builtin_convertvector((I)(words & 15) - 8, V);
#endif
    }
};

// Rows of inputs, and for SHIFTED formats the sums of each of their blocks.
struct Rows {
    const float *x[8], *sums[8];
};

// ROWS rows of x times N panels that lie `panel_bytes` apart -> out[row][panel]. Input k goes to sum k % SPLIT.
// Weights are fetched some blocks before they are used (nothing is read past the end).
template <class F, int ROWS, int N>
static inline void tile(const uint8_t *data, int64_t panel_bytes, int inputs, const Rows &rows, V (&out)[ROWS][N][P]) {
    constexpr int AHEAD = F::BYTES < 600 ? 8192 : 4096;
    V sums[SPLIT][ROWS][N][P] = {}, total[ROWS][N][P] = {};
    for (int start = 0; start < inputs; start += BLOCK) {
        const uint8_t *block = data + (int64_t)(start / BLOCK) * F::BYTES;
        for (int n = 0; n < N; n++)
            for (int line = 0; line < F::BYTES; line += 64)
                __builtin_prefetch(block + n * panel_bytes + AHEAD + line, 0, 2);
#pragma GCC unroll 32
        for (int k = 0; k < BLOCK; k++) {
            V number[N][P];
            for (int n = 0; n < N; n++)
                for (int v = 0; v < P; v++) number[n][v] = F::number(block + n * panel_bytes, k, v);
            for (int r = 0; r < ROWS; r++) {
                const float value = rows.x[r][start + k];
                for (int n = 0; n < N; n++)
                    for (int v = 0; v < P; v++) {
                        V &to = sums[k % SPLIT][r][n][v];
                        to = F::SCALED && k < SPLIT ? value * number[n][v] : to + value * number[n][v];
                    }
            }
        }
        if constexpr (F::SCALED)
            for (int n = 0; n < N; n++)
                for (int v = 0; v < P; v++) {
                    const V scale = F::scale(block + n * panel_bytes, v), shift = F::shift(block + n * panel_bytes, v);
                    for (int r = 0; r < ROWS; r++) {
                        V whole = sums[0][r][n][v];
                        if (SPLIT == 2) whole += sums[SPLIT - 1][r][n][v];
                        total[r][n][v] += scale * whole;
                        if (F::SHIFTED) total[r][n][v] += shift * rows.sums[r][start / BLOCK];
                    }
                }
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++)
            for (int v = 0; v < P; v++) {
                out[r][n][v] = F::SCALED ? total[r][n][v] : sums[0][r][n][v];
                if (!F::SCALED && SPLIT == 2) out[r][n][v] += sums[SPLIT - 1][r][n][v];
            }
}

// One unit of outputs for up to MOST_ROWS rows -> out [rows, 32], scales and bias applied.
template <class F, int ROWS>
static void unit_rows(const Matrix &m, int unit, const Rows &rows, float (*out)[UNIT * PANEL]) {
    // Panels at a time: one after another they are a single stream to fetch. Two only where the sums of one would wait for
    // each other.
    constexpr int N = SPLIT == 1 && 2 * ROWS * P <= SUMS ? 2 : 1;
    const int64_t panel_bytes = (int64_t)(m.inputs / BLOCK) * F::BYTES;
    for (int first = 0; first < UNIT; first += N) {
        const int panel = unit * UNIT + first;
        V sums[ROWS][N][P];
        tile<F, ROWS, N>(m.data + panel * panel_bytes, panel_bytes, m.inputs, rows, sums);
        for (int n = 0; n < N; n++)
            for (int v = 0; v < P; v++) {
                const int place = (panel + n) * PANEL + v * W; // scales and bias are padded to whole units
                const V scale = m.scales ? load<V>(m.scales + place) : splat(1.0f);
                const V bias = m.bias ? load<V>(m.bias + place) : splat(-0.0f);
                for (int r = 0; r < ROWS; r++) // one expression: rounded once, or twice, for every number of rows
                    store(&out[r][(first + n) * PANEL + v * W], sums[r][n][v] * scale + bias);
            }
    }
}

template <class F>
static void unit_of(const Matrix &m, int unit, const Rows &rows, int count, float (*out)[UNIT * PANEL]) {
    if (count == 1) unit_rows<F, 1>(m, unit, rows, out);
    else if (count == 2) unit_rows<F, 2>(m, unit, rows, out);
    else if (count <= 4) unit_rows<F, std::min(4, MOST_ROWS)>(m, unit, rows, out);
    else unit_rows<F, MOST_ROWS>(m, unit, rows, out);
}

// Outputs 32 unit .. 32 unit + 31 of x [count, inputs], count <= MOST_ROWS -> out [MOST_ROWS, 32]. sums [count, blocks]:
// `block_sums` of the rows, where `needs_sums`.
static void compute_unit(const Matrix &m, int unit, const float *x, const float *sums, int count,
                         float (*out)[UNIT * PANEL]) {
    Rows rows;
    for (int r = 0; r < MOST_ROWS; r++) { // spare rows repeat the first
        rows.x[r] = x + (int64_t)(r < count ? r : 0) * m.inputs;
        rows.sums[r] = sums + (int64_t)(r < count ? r : 0) * (m.inputs / BLOCK);
    }
    switch (m.format) {
    case F32: return unit_of<FormatF32>(m, unit, rows, count, out);
    case F16: return unit_of<FormatF16>(m, unit, rows, count, out);
    case BF16: return unit_of<FormatBF16>(m, unit, rows, count, out);
    case INT8: return unit_of<FormatInt8>(m, unit, rows, count, out);
    case Q8_0: return unit_of<FormatQ8_0>(m, unit, rows, count, out);
    default: return unit_of<FormatQ4_1>(m, unit, rows, count, out);
    }
}

static bool needs_sums(const Matrix &m) { return m.format == Q4_1; }

static void block_sums(const float *x, int inputs, float *sums) {
    for (int start = 0; start < inputs; start += BLOCK) {
        V parts = load<V>(x + start);
        for (int i = W; i < BLOCK; i += W) parts += load<V>(x + start + i);
        sums[start / BLOCK] = sum(parts);
    }
}
