// Products with weights in GGUF's blocks of 32: nibbles with scale and minimum (Q4_0, Q4_1) or bytes with a scale
// (Q8_0).
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

enum Kind : int32_t { NIBBLES = 0, BYTES = 1 };

// Weights [rows, cols], packed in tiles of LANES rows; see `pack`. Rows are padded with zeros to whole pieces.
struct Matrix {
    const uint8_t* tiles;
    int32_t kind, rows, cols;

    int num_groups() const { return cols / GROUP; }
    int num_pieces() const { return (rows + PIECE - 1) / PIECE; }
    static constexpr int code_bytes(int kind) { return GROUP * LANES / (kind == NIBBLES ? 2 : 1); }
    static constexpr int scales(int kind) { return LANES * (kind == NIBBLES ? 2 : 1); }
    size_t tile_bytes() const {
        const size_t bytes = static_cast<size_t>(num_groups()) * (code_bytes(kind) + sizeof(Half) * scales(kind));
        return (bytes + 63) / 64 * 64;
    }
    const uint8_t* tile(int index) const { return tiles + index * tile_bytes(); }
    const Half* tile_scales(const uint8_t* tile) const {
        return reinterpret_cast<const Half*>(tile + static_cast<size_t>(num_groups()) * code_bytes(kind));
    }
};

// Rows of activations as bytes: value = code * scale of its group; `sums` has scale * sum of the group's codes.
//
// codes are [rows, cols], scales and sums [groups, stride] with a column for each row: threads that quantize different
// groups write to different cache lines.
struct Activations {
    int8_t* codes;
    float* scales;
    float* sums;
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
        int total = 0;
        for (int i = 0; i < GROUP; i += LANES)
            total += simd::store_codes(out + i, simd::mul(simd::load(values + i), inverse));
        const size_t at = static_cast<size_t>(group) * stride + row;
        scales[at] = scale;
        sums[at] = scale * static_cast<float>(total);
    }
};

// Rearrange rows of a file's blocks: within a tile group by group, codes so that one vector holds four neighbouring
// inputs of every row of the tile; behind them the scales, a vector a group.
//
// A nibble vector's low halves are inputs 8i..8i+3 and its high halves 8i+4..8i+7.
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
                const uint8_t code = codes[block * GROUP + k];
                if (kind == BYTES)
                    to[(k / 4) * 4 * LANES + 4 * lane + k % 4] = code;
                else
                    to[(k / 8) * 4 * LANES + 4 * lane + k % 4] |= k % 8 < 4 ? code : static_cast<uint8_t>(code << 4);
            }
            tile_scales[g * Matrix::scales(kind) + lane] = scales[block];
            if (kind == NIBBLES) tile_scales[g * Matrix::scales(kind) + LANES + lane] = minima[block];
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
    for (int m = 0; m < M; m++) sums[m] = KIND == NIBBLES ? simd::begin_nibbles() : simd::begin_bytes(p);
    if (KIND == NIBBLES) {
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
        simd::Sums dots[M];
        dot_group<M, KIND>(tile + static_cast<size_t>(g) * Matrix::code_bytes(KIND), codes + g * GROUP, a.cols, dots);
        const Half* s = scales + static_cast<size_t>(g) * Matrix::scales(KIND);
        const size_t at = static_cast<size_t>(g) * a.stride + first;
        const Floats scale = simd::load(s), minimum = KIND == NIBBLES ? simd::load(s + LANES) : simd::zero();
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const Floats dot = KIND == NIBBLES ? simd::end_nibbles(dots[m]) : simd::end_bytes(dots[m]);
            sums[m] = simd::fma(dot, simd::mul(scale, simd::all(a.scales[at + m])), sums[m]);
            if (KIND == NIBBLES) sums[m] = simd::fma(minimum, simd::all(a.sums[at + m]), sums[m]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) simd::store(out + m * stride, sums[m]);
}

template <int M>
inline void multiply_tile(const Matrix& w, const uint8_t* tile, const Activations& a, int first, float* out,
                          int stride) {
    if (w.kind == NIBBLES)
        multiply_tile<M, NIBBLES>(w, tile, a, first, out, stride);
    else
        multiply_tile<M, BYTES>(w, tile, a, first, out, stride);
}

// M rows of PIECES neighbouring pieces: out [M][PIECES * PIECE].
template <int M, int PIECES>
inline void multiply_rows(const Matrix& w, int piece, const Activations& a, int first, float* out) {
    constexpr int TILES = PIECE / LANES;
    for (int t = 0; t < PIECES * TILES; t++)
        multiply_tile<M>(w, w.tile(piece * TILES + t), a, first, out + t * LANES, PIECES * PIECE);
}

// Neighbouring pieces for `count` rows of activations; `use(row, values [PIECES * PIECE])` takes them as they come.
template <int PIECES, class Use>
inline void multiply(const Matrix& w, int piece, const Activations& a, int count, Use use) {
    constexpr int ROWS = simd::ROWS;
    alignas(64) float out[ROWS * PIECES * PIECE];
    int done = 0;
    auto some = [&]<int M>() {
        for (; done + M <= count; done += M) {
            multiply_rows<M, PIECES>(w, piece, a, done, out);
            for (int m = 0; m < M; m++) use(done + m, out + m * PIECES * PIECE);
        }
    };
    some.template operator()<ROWS>();
    if constexpr (ROWS > 4) some.template operator()<4>();
    some.template operator()<2>();
    some.template operator()<1>();
}

// One row of a matrix as floats [cols], for embeddings.
inline void read_row(const Matrix& w, int row, float* out) {
    const uint8_t* tile = w.tile(row / LANES);
    const Half* scales = w.tile_scales(tile);
    const int lane = row % LANES;
    for (int g = 0; g < w.num_groups(); g++) {
        const uint8_t* p = tile + static_cast<size_t>(g) * Matrix::code_bytes(w.kind);
        const Half* s = scales + static_cast<size_t>(g) * Matrix::scales(w.kind);
        const float scale = static_cast<float>(s[lane]);
        for (int k = 0; k < GROUP; k++) {
            if (w.kind == BYTES) {
                out[g * GROUP + k] = scale * static_cast<int8_t>(p[(k / 4) * 4 * LANES + 4 * lane + k % 4]);
            } else {
                const uint8_t pair = p[(k / 8) * 4 * LANES + 4 * lane + k % 4];
                out[g * GROUP + k] = std::fma(scale, static_cast<float>(k % 8 < 4 ? pair & 15 : pair >> 4),
                                              static_cast<float>(s[LANES + lane]));
            }
        }
    }
}
