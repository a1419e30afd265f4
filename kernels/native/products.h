// Products of rows of activations with a matrix, with whatever instructions are best for so many.
#pragma once

#include "amx.h"

// M rows of PIECES neighbouring pieces: out [M][PIECES * PIECE].
template <int M, int PIECES>
inline void multiply_rows(const Matrix& w, int piece, const Activations& a, int first, float* out) {
    constexpr int TILES = PIECE / LANES;
    for (int t = 0; t < PIECES * TILES; t++)
        multiply_tile<M>(w, w.tile(piece * TILES + t), a, first, out + t * LANES, PIECES * PIECE);
}

// Neighbouring pieces for `count` rows of activations; `use(row, values [PIECES * PIECE])` takes them as they come.
//
// The caller's thread holds `amx::Registers`.
template <int PIECES, class Use>
inline void multiply(const Matrix& w, int piece, const Activations& a, int count, Use use) {
    constexpr int ROWS = simd::ROWS;
    alignas(64) float out[std::max(ROWS, amx::MOST) * PIECES * PIECE];
    int done = 0;
    auto take = [&](int rows) {
        for (int m = 0; m < rows; m++) use(done + m, out + m * PIECES * PIECE);
        done += rows;
        return rows > 0;
    };
    while (take(amx::multiply<PIECES>(w, piece, a, done, count - done, out))) {
    }
    auto some = [&]<int M>() {
        while (done + M <= count) {
            multiply_rows<M, PIECES>(w, piece, a, done, out);
            take(M);
        }
    };
    some.template operator()<ROWS>();
    if constexpr (ROWS > 4) some.template operator()<4>();
    some.template operator()<2>();
    some.template operator()<1>();
}
