// From plain float weights to the panels of matrix.hpp, and whether they come out the same.
#pragma once
#include "matrix.hpp"
#include <algorithm>

static uint16_t to_half(float value) {
    const _Float16 rounded = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    return bits;
}
static float from_half(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static uint16_t to_bfloat16(float value) { // to the nearest, ties to even
    const uint32_t bits = bits_of(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40); // rounding could carry out of it
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// The scale, minimum and 32 numbers of a GGUF block that give exactly these weights; false when there are none.
static bool block_q4_1(const float *w, uint16_t &d, uint16_t &m, uint8_t *q) {
    const auto [low, high] = std::minmax_element(w, w + BLOCK);
    m = to_half(*low);
    const float least = from_half(m);
    for (int steps = 15; steps; steps--) { // the largest weight is some steps above the least
        d = to_half((*high - least) / steps);
        const float step = from_half(d);
        bool same = true;
        for (int k = 0; k < BLOCK && same; k++) {
            const float number = step > 0 ? std::nearbyint((w[k] - least) / step) : 0;
            same = number >= 0 && number <= 15 && step * number + least == w[k];
            q[k] = (uint8_t)number;
        }
        if (same) return true;
    }
    return false;
}
static bool block_q8_0(const float *w, uint16_t &d, int8_t *q) {
    float largest = 0;
    for (int k = 0; k < BLOCK; k++) largest = std::max(largest, std::fabs(w[k]));
    d = to_half(largest / 127);
    const float step = from_half(d);
    for (int k = 0; k < BLOCK; k++) {
        const float number = step > 0 ? std::nearbyint(w[k] / step) : 0;
        if (!(std::fabs(number) <= 127 && step * number == w[k])) return false;
        q[k] = (int8_t)number;
    }
    return true;
}

// One block (32 inputs from `start`) of a panel's output `o`, from its weights w [32]. Returns whether it is exact.
static bool pack_block(int format, const float *w, uint8_t *block, int o, float scale) {
    bool exact = true;
    auto put16 = [&](int place, uint16_t bits) { memcpy(block + 2 * place, &bits, 2); };
    switch (format) {
    case F32:
        for (int k = 0; k < BLOCK; k++) memcpy(block + 4 * (k * PANEL + o), w + k, 4);
        return true;
    case F16:
        for (int k = 0; k < BLOCK; k++) {
            put16(k * PANEL + o, to_half(w[k]));
            exact &= from_half(to_half(w[k])) == w[k];
        }
        return exact;
    case BF16:
        for (int k = 0; k < BLOCK; k++) {
            put16(2 * (k / 2 * PANEL + o) + k % 2, to_bfloat16(w[k]));
            exact &= from_bfloat16(to_bfloat16(w[k])) == w[k];
        }
        return exact;
    case INT8:
        for (int k = 0; k < BLOCK; k++) {
            const float number = scale > 0 && std::isfinite(scale) ? std::nearbyint(w[k] / scale) : 0;
            block[k * PANEL + o] = (uint8_t)(int8_t)number;
            exact &= number * scale == w[k];
        }
        return exact;
    case Q8_0: {
        uint16_t d;
        int8_t q[BLOCK];
        exact = block_q8_0(w, d, q);
        put16(o, d);
        for (int k = 0; exact && k < BLOCK; k++) block[2 * PANEL + k * PANEL + o] = (uint8_t)q[k];
        return exact;
    }
    default: {
        uint16_t d, m;
        uint8_t q[BLOCK];
        exact = block_q4_1(w, d, m, q);
        put16(o, d);
        put16(PANEL + o, m);
        for (int k = 0; exact && k < BLOCK; k++) {
            uint8_t &byte = block[4 * PANEL + 64 * (k / 8) + 4 * o + k % 8 / 2];
            byte = (uint8_t)(k % 2 ? byte | q[k] << 4 : q[k]);
        }
        return exact;
    }
    }
}

static int64_t block_bytes(int format) {
    switch (format) {
    case F32: return FormatF32::BYTES;
    case F16: return FormatF16::BYTES;
    case BF16: return FormatBF16::BYTES;
    case INT8: return FormatInt8::BYTES;
    case Q8_0: return FormatQ8_0::BYTES;
    default: return FormatQ4_1::BYTES;
    }
}

// A panel of weights [16, inputs] (rows of zeros past the last output). False at the first block that is not exact,
// unless `rounded`.
static bool pack_panel(int format, const float *weight, int outputs, int inputs, int panel, uint8_t *data, float *scales,
                       bool rounded) {
    bool exact = true;
    const float zeros[BLOCK] = {};
    for (int o = 0; o < PANEL; o++) {
        const int row = panel * PANEL + o;
        const float *w = weight + (int64_t)row * inputs;
        float largest = 0;
        for (int k = 0; format == INT8 && row < outputs && k < inputs; k++)
            if (!(std::fabs(w[k]) <= largest)) largest = largest != largest ? largest : std::fabs(w[k]); // keeps a NaN
        if (format == INT8) scales[row] = largest / 127;
        for (int start = 0; start < inputs; start += BLOCK) {
            uint8_t *block = data + ((int64_t)panel * (inputs / BLOCK) + start / BLOCK) * block_bytes(format);
            exact &= pack_block(format, row < outputs ? w + start : zeros, block, o, largest / 127);
            if (!exact && !rounded) return false;
        }
    }
    return exact;
}
