// Products with weights in groups of 32 inputs, as GGUF's blocks have them.
//
// Activations are quantized to bytes with a scale for each 32 of a row, so a product is a sum of exact integer sums:
// whatever rows it is computed beside, a row gives the same bits.
#pragma once

#include "simd.h"

using simd::Floats;
using simd::GROUP;
using simd::Half;
using simd::LANES;

// Outputs of one piece of work; whole groups, so that a piece can quantize what it made.
constexpr int PIECE = 32;

// By the bits of a code. Nibbles and five bits count from 0 and have a scale and a minimum for each group; six bits
// stand for -32..31 and have a scale for each half of a group; bytes have one for the group.
enum Kind : int32_t { NIBBLES = 4, FIVES = 5, SIXES = 6, BYTES = 8 };

// Weights [rows, cols], packed in tiles of LANES rows; see `pack`. Rows are padded with zeros to whole pieces.
struct Matrix {
    const uint8_t* tiles;
    int32_t kind, rows, cols;

    int num_groups() const { return cols / GROUP; }
    int num_pieces() const { return (rows + PIECE - 1) / PIECE; }
    static constexpr int code_bytes(int kind) { return GROUP * LANES * kind / 8; }
    static constexpr int scales(int kind) { return LANES * (kind == BYTES ? 1 : 2); }
    size_t tile_bytes() const {
        const size_t bytes = static_cast<size_t>(num_groups()) * (code_bytes(kind) + sizeof(Half) * scales(kind));
        return (bytes + 63) / 64 * 64;
    }
    const uint8_t* tile(int index) const { return tiles + index * tile_bytes(); }
    const Half* tile_scales(const uint8_t* tile) const {
        return reinterpret_cast<const Half*>(tile + static_cast<size_t>(num_groups()) * code_bytes(kind));
    }
};

// Rows of activations as bytes: value = code * scale of its group; `sums` has scale * sum of the group's codes, `lifts`
// what 32 for each code of half a group comes to, negative.
//
// codes are [rows, cols], scales and sums [groups, stride], lifts [2 * groups, stride] with a column for each row:
// threads that quantize different groups write to different cache lines.
struct Activations {
    int8_t* codes;
    float* scales;
    float* sums;
    int32_t* lifts;
    int cols, stride;

    int num_groups() const { return cols / GROUP; }

    // Quantize one group. What is not finite makes the whole group NaN, so that it is seen in the end.
    void put(int row, int group, const float* values) const {
        Floats most = simd::zero(), spoiled = simd::zero();
        for (int i = 0; i < GROUP; i += LANES) {
            const Floats x = simd::load(values + i);
            most = simd::max(most, simd::abs(x));
            spoiled = simd::fma(x, simd::zero(), spoiled);
        }
        const float amax = simd::largest(most);
        const float scale = amax / 127.0f + simd::sum(spoiled);
        const Floats inverse = simd::all(amax > 0.0f ? 127.0f / amax : 0.0f);
        int8_t* out = codes + static_cast<size_t>(row) * cols + group * GROUP;
        int totals[2] = {};
        for (int i = 0; i < GROUP; i += LANES)
            totals[i / 16] += simd::store_codes(out + i, simd::mul(simd::load(values + i), inverse));
        const size_t at = static_cast<size_t>(group) * stride + row;
        scales[at] = scale;
        sums[at] = scale * static_cast<float>(totals[0] + totals[1]);
        for (int half = 0; half < 2; half++)
            lifts[at + (static_cast<size_t>(group) + half) * stride] = -32 * totals[half];
    }
};

// Rearrange rows of a file's blocks: within a tile group by group, codes so that one vector holds four neighbouring
// inputs of every row of the tile; behind them the scales, a vector a group.
//
// A nibble vector's low halves are inputs 8i..8i+3 and its high halves 8i+4..8i+7. Behind a group's nibbles lie the
// bits above them, in vectors that are shared: the lowest bits of the first belong to inputs 0..3, the next to 4..7.
inline void pack(Kind kind, const uint8_t* const codes, const Half* scales, const Half* minima, int rows, int cols,
                 uint8_t* out) {
    const Matrix shape{out, kind, rows, cols};
    const int groups = shape.num_groups(), num_tiles = shape.num_pieces() * PIECE / LANES;
    std::memset(out, 0, num_tiles * shape.tile_bytes());
    for (int row = 0; row < rows; row++) {
        uint8_t* tile = out + (row / LANES) * shape.tile_bytes();
        Half* tile_scales = const_cast<Half*>(shape.tile_scales(tile));
        const int lane = row % LANES;
        for (int g = 0; g < groups; g++) {
            const size_t block = static_cast<size_t>(row) * groups + g;
            uint8_t* to = tile + g * Matrix::code_bytes(kind);
            for (int k = 0; k < GROUP; k++) {
                const int code = codes[block * GROUP + k] + (kind == SIXES ? 32 : 0);
                uint8_t* at = to + 4 * lane + k % 4;
                auto add = [&](int vector, int value) { at[vector * 4 * LANES] |= static_cast<uint8_t>(value); };
                if (kind == BYTES) {
                    add(k / 4, code);
                } else {
                    add(k / 8, (code & 15) << (k % 8 < 4 ? 0 : 4));
                    const int high = kind - 4, bit = k / 4 * high;
                    if (high > 0) add(4 + bit / 8, (code >> 4 & ((1 << high) - 1)) << bit % 8);
                }
            }
            Half* s = tile_scales + g * Matrix::scales(kind) + lane;
            s[0] = scales[kind == SIXES ? 2 * block : block];
            if (kind == SIXES) s[LANES] = scales[2 * block + 1];
            if (minima != nullptr) s[LANES] = minima[block];
        }
    }
}

// Weights come from memory in one long run, faster than the processor foresees: they are asked for so many bytes ahead.
constexpr size_t AHEAD = 8192;

// Fetch what lies where a tile's group `g` would; behind the end of the weights this does nothing.
template <Kind KIND>
inline void prefetch(const uint8_t* later, int g) {
    constexpr int BYTES_PER_GROUP = Matrix::code_bytes(KIND) + 2 * Matrix::scales(KIND);
#pragma GCC unroll 8
    for (int i = 0; i < BYTES_PER_GROUP; i += 64)
        __builtin_prefetch(later + static_cast<size_t>(g) * BYTES_PER_GROUP + i);
}

// Half of a group whose codes have more bits than four, with M rows of activations, `cols` apart; adds to `sums`.
//
// Where both halves are written out the shifts are constants: 1.2 to 1.4 times as fast on AVX2.
template <int M, Kind KIND>
inline void dot_half(const uint8_t* p, int half, const int8_t* x, size_t cols, simd::Sums (&sums)[M]) {
    constexpr int HIGH = KIND - NIBBLES, MASK = (16 << HIGH) - 16;
    const simd::Codes above = simd::load_codes(p + GROUP / 2 * LANES + half * 4 * HIGH / 8 * 4 * LANES);
#pragma GCC unroll 2
    for (int k = 16 * half; k < 16 * half + 16; k += 8) {
        const simd::Codes w = simd::load_codes(p + k / 2 * LANES);
        const int bit = k / 4 * HIGH % 8;
        const simd::Codes low = simd::join(simd::low_nibbles(w), simd::shift_to_4(above, bit), MASK),
                          high = simd::join(simd::high_nibbles(w), simd::shift_to_4(above, bit + HIGH), MASK);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) sums[m] = simd::add_wide(sums[m], low, high, x + m * cols + k);
    }
}

// One group of a tile with M rows of activations, `cols` apart: sums of integers.
//
// Each vector of weights meets all rows before the next one: few registers, and rows do not wait for their own sums.
template <int M, Kind KIND>
inline void dot_group(const uint8_t* p, const int8_t* x, size_t cols, simd::Sums (&sums)[M]) {
    auto with_rows = [&](auto add, simd::Codes w, int first) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) sums[m] = add(sums[m], w, x + m * cols + first);
    };
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m] = KIND == BYTES ? simd::begin_bytes(p) : simd::begin_nibbles();
    if constexpr (KIND == FIVES) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) dot_half<M, KIND>(p, half, x, cols, sums);
    } else if (KIND == NIBBLES) {
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k += 8) {
            const simd::Codes w = simd::load_codes(p + k / 2 * LANES);
            with_rows(simd::add_nibbles, simd::low_nibbles(w), k);
            with_rows(simd::add_nibbles, simd::high_nibbles(w), k + 4);
        }
    } else {
#pragma GCC unroll 8
        for (int k = 0; k < GROUP; k += 4) with_rows(simd::add_bytes, simd::load_codes(p + k * LANES), k);
    }
}

// One tile with M rows of activations from row `first` on; out[m] takes LANES outputs.
//
// A function of its own, with all registers for itself: within its callers it took a twentieth longer.
template <int M, Kind KIND>
[[gnu::noinline]] void multiply_tile(const Matrix& w, const uint8_t* tile, const Activations& a, int first, float* out,
                                     int stride) {
    const int groups = a.num_groups();
    const Half* scales = w.tile_scales(tile);
    const int8_t* codes = a.codes + static_cast<size_t>(first) * a.cols;
    Floats sums[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m] = simd::zero();
    for (int g = 0; g < groups; g++) {
        prefetch<KIND>(tile + AHEAD, g);
        const uint8_t* p = tile + static_cast<size_t>(g) * Matrix::code_bytes(KIND);
        const Half* s = scales + static_cast<size_t>(g) * Matrix::scales(KIND);
        const size_t at = static_cast<size_t>(g) * a.stride + first;
        simd::Sums dots[M];
        if constexpr (KIND == SIXES) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const int32_t* lifts = a.lifts + at + static_cast<size_t>(g + half) * a.stride;
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) dots[m] = simd::begin_at(lifts[m]);
                dot_half<M, KIND>(p, half, codes + g * GROUP, a.cols, dots);
                const Floats scale = simd::load(s + half * LANES);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++)
                    sums[m] =
                        simd::fma(simd::end_bytes(dots[m]), simd::mul(scale, simd::all(a.scales[at + m])), sums[m]);
            }
        } else {
            dot_group<M, KIND>(p, codes + g * GROUP, a.cols, dots);
            const Floats scale = simd::load(s), minimum = KIND == BYTES ? simd::zero() : simd::load(s + LANES);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                const Floats dot = KIND == NIBBLES ? simd::end_nibbles(dots[m]) : simd::end_bytes(dots[m]);
                sums[m] = simd::fma(dot, simd::mul(scale, simd::all(a.scales[at + m])), sums[m]);
                if (KIND != BYTES) sums[m] = simd::fma(minimum, simd::all(a.sums[at + m]), sums[m]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) simd::store(out + m * stride, sums[m]);
}

template <int M>
inline void multiply_tile(const Matrix& w, const uint8_t* tile, const Activations& a, int first, float* out,
                          int stride) {
    switch (w.kind) {
        case NIBBLES:
            return multiply_tile<M, NIBBLES>(w, tile, a, first, out, stride);
        case FIVES:
            return multiply_tile<M, FIVES>(w, tile, a, first, out, stride);
        case SIXES:
            return multiply_tile<M, SIXES>(w, tile, a, first, out, stride);
        default:
            return multiply_tile<M, BYTES>(w, tile, a, first, out, stride);
    }
}

// One row of a matrix as floats [cols], for embeddings.
inline void read_row(const Matrix& w, int row, float* out) {
    const uint8_t* tile = w.tile(row / LANES);
    const Half* scales = w.tile_scales(tile);
    const int lane = row % LANES;
    for (int g = 0; g < w.num_groups(); g++) {
        const uint8_t* p = tile + static_cast<size_t>(g) * Matrix::code_bytes(w.kind);
        const Half* s = scales + static_cast<size_t>(g) * Matrix::scales(w.kind);
        const float scale = static_cast<float>(s[lane]),
                    second = w.kind == BYTES ? 0 : static_cast<float>(s[LANES + lane]);
        for (int k = 0; k < GROUP; k++) {
            auto of = [&](int vector) -> int { return p[vector * 4 * LANES + 4 * lane + k % 4]; };
            float& to = out[g * GROUP + k];
            if (w.kind == BYTES) {
                to = scale * static_cast<int8_t>(of(k / 4));
                continue;
            }
            const int high = w.kind - 4, bit = k / 4 * high, low = k % 8 < 4 ? of(k / 8) & 15 : of(k / 8) >> 4;
            const int code = high == 0 ? low : low | (of(4 + bit / 8) >> bit % 8 & ((1 << high) - 1)) << 4;
            to = w.kind == SIXES ? (k < 16 ? scale : second) * (code - 32) : std::fma(scale, float(code), second);
        }
    }
}
