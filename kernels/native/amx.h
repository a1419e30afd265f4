// Products on a processor with AMX: sixteen rows of activations meet sixteen outputs at once.
//
// The integer sums are exact and the float operations those of `multiply_tile`, in its order: the bits are the same.
#pragma once

#include "matrix.h"

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512VNNI__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int ROWS = 16;        // of activations in a register
constexpr int MOST = 4 * ROWS;  // rows that share a group's unpacked weights
constexpr int LEAST = 9;        // rows for which it is worth it
static_assert(LANES == ROWS);

// The system lets a process use these registers when it asks.
inline bool permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return granted;
}

// While it lives its thread has the registers: 0 for sums, 1 for activations and 2 for weights of a group, 3 and 4 for
// those of half a group.
class Registers {
  public:
    Registers() {
        if (!permitted()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, GROUP, 64, GROUP / 2, 64};
            uint8_t rows[16] = {ROWS, ROWS, GROUP / 4, ROWS, GROUP / 8};
        } config;
        asm volatile("" : : "r"(&config) : "memory");  // for the compiler the next one reads eight bytes of it
        _tile_loadconfig(&config);
    }
    ~Registers() {
        if (permitted()) _tile_release();
    }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

// The codes of a group as bytes, four neighbouring inputs of every output in a vector.
template <Kind KIND>
inline void unpack(const uint8_t* p, uint8_t* out) {
    constexpr int HIGH = KIND - NIBBLES, MASK = (16 << HIGH) - 16;
    simd::Codes above{};
#pragma GCC unroll 4
    for (int k = 0; k < GROUP; k += 8) {
        const simd::Codes w = simd::load_codes(p + k / 2 * LANES);
        simd::Codes low = simd::low_nibbles(w), high = simd::high_nibbles(w);
        if constexpr (HIGH > 0) {
            if (k % 16 == 0) above = simd::load_codes(p + GROUP / 2 * LANES + k / 16 * 4 * HIGH / 8 * 4 * LANES);
            const int bit = k / 4 * HIGH % 8;
            low = simd::join(low, simd::shift_to_4(above, bit), MASK);
            high = simd::join(high, simd::shift_to_4(above, bit + HIGH), MASK);
        }
        _mm512_store_si512(out + k * LANES, low);
        _mm512_store_si512(out + (k + 4) * LANES, high);
    }
}

// Integer sums of a group, or of one half of it, for some blocks of ROWS rows of activations from `codes` on.
template <Kind KIND>
inline void dot(const uint8_t* weights, const int8_t* codes, size_t cols, int blocks, int32_t* out) {
    // Sums begin as a line of zeros that is read: behind `tilezero` a product waits for the one before it (3 times the
    // time on Sapphire Rapids).
    alignas(64) static const int32_t zeros[LANES] = {};
    // The compiler does not know that the next instructions read memory.
    asm volatile("" ::: "memory");
    if constexpr (KIND == SIXES)
        _tile_loadd(4, weights, 4 * LANES);
    else
        _tile_loadd(2, weights, 4 * LANES);
    for (int block = 0; block < blocks; block++, codes += ROWS * cols, out += ROWS * LANES) {
        _tile_loadd(0, zeros, 0);
        if constexpr (KIND == SIXES) {
            _tile_loadd(3, codes, cols);
            _tile_dpbsud(0, 3, 4);
        } else {
            _tile_loadd(1, codes, cols);
            if constexpr (KIND == BYTES)
                _tile_dpbssd(0, 1, 2);
            else
                _tile_dpbsud(0, 1, 2);
        }
        _tile_stored(0, out, 4 * LANES);
    }
}

// One tile with `count` rows of activations from row `first` on, at most MOST; as `multiply_tile`.
//
// Sums take their way through memory, which is slow to give back what was just stored: meanwhile the next ones begin.
template <Kind KIND>
[[gnu::noinline]] void multiply_tile(const Matrix& w, const uint8_t* tile, const Activations& a, int first, int count,
                                     float* out, int stride) {
    constexpr int HALVES = KIND == SIXES ? 2 : 1, WIDTH = GROUP / HALVES;
    constexpr bool MINIMA = KIND == NIBBLES || KIND == FIVES;
    alignas(64) uint8_t unpacked[2][GROUP * LANES];
    alignas(64) int32_t dots[2][MOST * LANES];
    const int steps = a.num_groups() * HALVES, blocks = (count + ROWS - 1) / ROWS;
    const Half* scales = w.tile_scales(tile);
    auto codes_of = [&](int g) { return tile + static_cast<size_t>(g) * Matrix::code_bytes(KIND); };
    auto prepare = [&](int step) {
        const int g = step / HALVES;
        if (step % HALVES != 0 || step >= steps) return;
        prefetch<KIND>(tile + AHEAD, g);
        if constexpr (KIND != BYTES) unpack<KIND>(codes_of(g), unpacked[g % 2]);
    };
    auto begin = [&](int step) {
        const int g = step / HALVES, from = step % HALVES * WIDTH;
        const uint8_t* codes = KIND == BYTES ? codes_of(g) : unpacked[g % 2];
        dot<KIND>(codes + from * LANES, a.codes + static_cast<size_t>(first) * a.cols + step * WIDTH, a.cols, blocks,
                  dots[step % 2]);
    };
    auto end = [&](int step) {
        const int g = step / HALVES;
        const Half* s = scales + static_cast<size_t>(step) * LANES * (MINIMA ? 2 : 1);
        const Floats scale = simd::load(s), minimum = MINIMA ? simd::load(s + LANES) : simd::zero();
        const float* row_scales = a.scales + static_cast<size_t>(g) * a.stride + first;
        const float* row_sums = a.sums + static_cast<size_t>(g) * a.stride + first;
        const int32_t* lifts = a.lifts + static_cast<size_t>(step) * a.stride + first;
        const int32_t* from = dots[step % 2];
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            simd::Sums dot = _mm512_load_si512(from + m * LANES);
            if (KIND == SIXES) dot = _mm512_add_epi32(dot, simd::begin_at(lifts[m]));
            Floats sum = step == 0 ? simd::zero() : simd::load(out + m * stride);
            sum = simd::fma(simd::end_bytes(dot), simd::mul(scale, simd::all(row_scales[m])), sum);
            if (MINIMA) sum = simd::fma(minimum, simd::all(row_sums[m]), sum);
            simd::store(out + m * stride, sum);
        }
    };
    prepare(0);
    for (int step = 0; step < steps; step++) {
        prepare(step + 1);
        begin(step);
        if (step > 0) end(step - 1);
    }
    end(steps - 1);
}

// Neighbouring pieces for as many of `count` rows from row `first` on as are worth it; gives how many.
template <int PIECES>
inline int multiply(const Matrix& w, int piece, const Activations& a, int first, int count, float* out) {
    constexpr int TILES = PIECE / LANES;
    if (count < LEAST || !permitted()) return 0;
    count = std::min(count, MOST);
    for (int t = 0; t < PIECES * TILES; t++) {
        const uint8_t* tile = w.tile(piece * TILES + t);
        auto with = [&]<Kind KIND>() {
            multiply_tile<KIND>(w, tile, a, first, count, out + t * LANES, PIECES * PIECE);
        };
        if (w.kind == NIBBLES) with.template operator()<NIBBLES>();
        if (w.kind == FIVES) with.template operator()<FIVES>();
        if (w.kind == SIXES) with.template operator()<SIXES>();
        if (w.kind == BYTES) with.template operator()<BYTES>();
    }
    return count;
}

}  // namespace amx

#else

namespace amx {

constexpr int ROWS = 1, MOST = 0;
inline bool permitted() { return false; }
struct Registers {
    Registers() {}
};
template <int PIECES>
inline int multiply(const Matrix&, int, const Activations&, int, int, float*) {
    return 0;
}

}  // namespace amx

#endif
