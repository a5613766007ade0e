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

constexpr int AHEAD = 4096;                   // bytes by which weights are fetched early; nothing is read past the end

enum Format : int32_t { F32, F16, BF16, INT8, Q8_0, Q4_1 };

struct Matrix {
    int32_t format, outputs, inputs, padding;
    const uint8_t *data; // panels, one after another
    const float *scales; // INT8: one per output
    const float *bias;   // or null
};

// What a format does: bytes of a block of a panel, and how input k (of BLOCK) of its 16 outputs becomes P vectors.
struct FormatF32 {
    static constexpr int BYTES = BLOCK * PANEL * 4;
    struct Scale {};
    static Scale scale(const uint8_t *, int) { return {}; }
    static V weight(const uint8_t *block, Scale, int k, int v) { return load<V>(block + 64 * k + 4 * W * v); }
};
struct FormatF16 {
    static constexpr int BYTES = BLOCK * PANEL * 2;
    struct Scale {};
    static Scale scale(const uint8_t *, int) { return {}; }
    static V weight(const uint8_t *block, Scale, int k, int v) { return half(block + 32 * k + 2 * W * v); }
};
struct FormatBF16 { // 32-bit words: the even input's weight in the lower half, the odd one's in the upper
    static constexpr int BYTES = BLOCK * PANEL * 2;
    struct Scale {};
    static Scale scale(const uint8_t *, int) { return {}; }
    static V weight(const uint8_t *block, Scale, int k, int v) {
        const U both = load<U>(block + 64 * (k / 2) + 4 * W * v);
        return (V)(k % 2 ? both & 0xffff0000u : both << 16);
    }
};
struct FormatInt8 { // the output's scale multiplies its sum
    static constexpr int BYTES = BLOCK * PANEL;
    struct Scale {};
    static Scale scale(const uint8_t *, int) { return {}; }
    static V weight(const uint8_t *block, Scale, int k, int v) {
        return bytes(block + 16 * k + W * v);
    }
};
struct FormatQ8_0 { // GGUF: 32 inputs share a half-precision scale; weight = d q
    static constexpr int BYTES = 2 * PANEL + BLOCK * PANEL;
    struct Scale { V d; };
    static Scale scale(const uint8_t *block, int v) { return {half(block + 2 * W * v)}; }
    static V weight(const uint8_t *block, Scale s, int k, int v) {
        return s.d * bytes(block + 32 + 16 * k + W * v);
    }
};
struct FormatQ4_1 { // GGUF: 32 inputs share a scale and a minimum; weight = d q + m. A 32-bit word holds 8 inputs.
    static constexpr int BYTES = 4 * PANEL + BLOCK * PANEL / 2;
    struct Scale { V d, m; };
    static Scale scale(const uint8_t *block, int v) { return {half(block + 2 * W * v), half(block + 32 + 2 * W * v)}; }
    static V weight(const uint8_t *block, Scale s, int k, int v) {
        const U words = load<U>(block + 64 + 64 * (k / 8) + 4 * W * v) >> (4 * (k % 8));
#if defined(__AVX512F__)
        const V table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const V q = (V)_mm512_permutexvar_ps((__m512i)words, (__m512)table); // looks at the lowest 4 bits only
#else
        const V q = __builtin_convertvector((I)(words & 15), V);
#endif
        return s.d * q + s.m;
    }
};

// `rows` rows of x times N panels that lie `panel_bytes` apart -> out[row][panel]. Input k goes to sum k % SPLIT.
template <class F, int ROWS, int N>
static inline void tile(const uint8_t *data, int64_t panel_bytes, int inputs, const float *const *x,
                        V (&out)[ROWS][N][P]) {
    V sums[SPLIT][ROWS][N][P] = {};
    for (int start = 0; start < inputs; start += BLOCK) {
        const uint8_t *block = data + (int64_t)(start / BLOCK) * F::BYTES;
        typename F::Scale scale[N][P];
        for (int n = 0; n < N; n++) {
            for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(block + n * panel_bytes + AHEAD + line, 0, 2);
            for (int v = 0; v < P; v++) scale[n][v] = F::scale(block + n * panel_bytes, v);
        }
#pragma GCC unroll 32
        for (int k = 0; k < BLOCK; k++) {
            V weight[N][P];
            for (int n = 0; n < N; n++)
                for (int v = 0; v < P; v++) weight[n][v] = F::weight(block + n * panel_bytes, scale[n][v], k, v);
            for (int r = 0; r < ROWS; r++) {
                const float value = x[r][start + k];
                for (int n = 0; n < N; n++)
                    for (int v = 0; v < P; v++) sums[k % SPLIT][r][n][v] += value * weight[n][v];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++)
            for (int v = 0; v < P; v++) {
                out[r][n][v] = sums[0][r][n][v];
                if (SPLIT == 2) out[r][n][v] += sums[SPLIT - 1][r][n][v];
            }
}

// One unit of outputs for up to MOST_ROWS rows -> out [rows, 32], scales and bias applied.
template <class F, int ROWS>
static void unit_rows(const Matrix &m, int unit, const float *const *x, float (*out)[UNIT * PANEL]) {
    constexpr int N = 2 * ROWS * P * SPLIT <= SUMS ? 2 : 1; // panels at a time
    const int64_t panel_bytes = (int64_t)(m.inputs / BLOCK) * F::BYTES;
    for (int first = 0; first < UNIT; first += N) {
        const int panel = unit * UNIT + first;
        V sums[ROWS][N][P];
        tile<F, ROWS, N>(m.data + panel * panel_bytes, panel_bytes, m.inputs, x, sums);
        for (int n = 0; n < N; n++)
            for (int v = 0; v < P; v++) {
                const int place = (panel + n) * PANEL + v * W; // scales and bias are padded to whole units
                for (int r = 0; r < ROWS; r++) {
                    V value = sums[r][n][v];
                    if (m.scales) value *= load<V>(m.scales + place);
                    if (m.bias) value += load<V>(m.bias + place);
                    store(&out[r][(first + n) * PANEL + v * W], value);
                }
            }
    }
}

template <class F> static void unit_of(const Matrix &m, int unit, const float *const *x, int rows, float (*out)[32]) {
    if (rows == 1) unit_rows<F, 1>(m, unit, x, out);
    else if (rows == 2) unit_rows<F, 2>(m, unit, x, out);
    else if (rows <= 4) unit_rows<F, std::min(4, MOST_ROWS)>(m, unit, x, out);
    else unit_rows<F, MOST_ROWS>(m, unit, x, out);
}

// Outputs 32 unit .. 32 unit + 31 of x [rows, stride], rows <= MOST_ROWS -> out [MOST_ROWS, 32].
static void compute_unit(const Matrix &m, int unit, const float *x, int64_t stride, int rows, float (*out)[32]) {
    const float *each[8];
    for (int r = 0; r < 8; r++) each[r] = x + (r < rows ? r : 0) * stride; // spare rows repeat the first
    switch (m.format) {
    case F32: return unit_of<FormatF32>(m, unit, each, rows, out);
    case F16: return unit_of<FormatF16>(m, unit, each, rows, out);
    case BF16: return unit_of<FormatBF16>(m, unit, each, rows, out);
    case INT8: return unit_of<FormatInt8>(m, unit, each, rows, out);
    case Q8_0: return unit_of<FormatQ8_0>(m, unit, each, rows, out);
    default: return unit_of<FormatQ4_1>(m, unit, each, rows, out);
    }
}

// A unit's weights as F32, for many rows: the same values, so the same sums.
static int64_t widened_bytes(const Matrix &m) { return (int64_t)UNIT * (m.inputs / BLOCK) * FormatF32::BYTES; }

template <class F> static void widen(const uint8_t *from, int64_t blocks, uint8_t *to) {
    for (; blocks; blocks--, from += F::BYTES, to += FormatF32::BYTES)
        for (int v = 0; v < P; v++) {
            const typename F::Scale scale = F::scale(from, v);
            for (int k = 0; k < BLOCK; k++) store((float *)to + PANEL * k + W * v, F::weight(from, scale, k, v));
        }
}

static Matrix widen_unit(const Matrix &m, int unit, uint8_t *to) {
    Matrix one = m;
    one.format = F32, one.outputs = UNIT * PANEL, one.data = to;
    if (m.scales) one.scales += unit * UNIT * PANEL;
    if (m.bias) one.bias += unit * UNIT * PANEL;
    const int64_t blocks = (int64_t)UNIT * (m.inputs / BLOCK);
    switch (m.format) {
    case F16: widen<FormatF16>(m.data + unit * blocks * FormatF16::BYTES, blocks, to); break;
    case BF16: widen<FormatBF16>(m.data + unit * blocks * FormatBF16::BYTES, blocks, to); break;
    case INT8: widen<FormatInt8>(m.data + unit * blocks * FormatInt8::BYTES, blocks, to); break;
    case Q8_0: widen<FormatQ8_0>(m.data + unit * blocks * FormatQ8_0::BYTES, blocks, to); break;
    default: widen<FormatQ4_1>(m.data + unit * blocks * FormatQ4_1::BYTES, blocks, to);
    }
    return one;
}
