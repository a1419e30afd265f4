// Vectors of floats and the integer dot products of quantized weights, for AVX-512 with VNNI, AVX2, and any processor.
//
// Everything above this file is written once. The integer sums are exact and the float operations of the matrix
// products are the same lane by lane, so that those give the same bits on every processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace simd {

using Half = _Float16;

// Weights are quantized in groups of so many along the input dimension, as in GGUF's files.
constexpr int GROUP = 32;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)

constexpr const char* NAME = "AVX-512 VNNI";
constexpr int LANES = 16;
constexpr int ROWS = 8;     // activation rows that share the unpacked weights of a group
constexpr int QUERIES = 4;  // queries that share a loaded key
using Floats = __m512;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(Half* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a); }

inline void sums_of_four(Floats a, Floats b, Floats c, Floats d, float* out) {
    auto halves = [](Floats x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); };
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(halves(a), halves(b)), _mm256_hadd_ps(halves(c), halves(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

inline Floats rotate_pairs(Floats x, Floats cos_sin) {
    Floats swapped = _mm512_permute_ps(x, 0xB1);
    return _mm512_fmaddsub_ps(x, _mm512_moveldup_ps(cos_sin), mul(swapped, _mm512_movehdup_ps(cos_sin)));
}

// Round to nearest even, [-128, 127]; gives the sum of what was stored.
inline int store_codes(int8_t* p, Floats x) {
    __m512i q = _mm512_max_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(-128));
    q = _mm512_min_epi32(q, _mm512_set1_epi32(127));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(q));
    return _mm512_reduce_add_epi32(q);
}

using Codes = __m512i;
using Sums = __m512i;

inline int32_t four(const int8_t* a) {
    int32_t x;
    std::memcpy(&x, a, 4);
    return x;
}

inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Codes low_nibbles(Codes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Codes high_nibbles(Codes w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }
// Bits of each byte from `bit` on moved to 4, and codes joined with those of them that `mask` names.
inline Codes shift_to_4(Codes w, int bit) { return _mm512_slli_epi16(_mm512_srl_epi16(w, _mm_cvtsi32_si128(bit)), 4); }
inline Codes join(Codes w, Codes above, int mask) {
    return _mm512_or_si512(w, _mm512_and_si512(above, _mm512_set1_epi8(static_cast<char>(mask))));
}
inline Sums begin_nibbles() { return _mm512_setzero_si512(); }
inline Sums add_nibbles(Sums s, Codes w, const int8_t* a) {
    return _mm512_dpbusd_epi32(s, w, _mm512_set1_epi32(four(a)));
}
inline Floats end_nibbles(Sums s) { return _mm512_cvtepi32_ps(s); }

// Codes of up to six bits: eight inputs, four of them to each of two vectors.
inline Sums begin_at(int32_t x) { return _mm512_set1_epi32(x); }
inline Sums add_wide(Sums s, Codes low, Codes high, const int8_t* a) {
    s = _mm512_dpbusd_epi32(s, low, _mm512_set1_epi32(four(a)));
    return _mm512_dpbusd_epi32(s, high, _mm512_set1_epi32(four(a + 4)));
}

// The instruction wants its first factor unsigned: activations are lifted by 128, and what the weights make of that is
// taken off beforehand.
inline Sums begin_bytes(const uint8_t* p) {
    Sums lift = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) lift = _mm512_dpbusd_epi32(lift, _mm512_set1_epi8(-128), load_codes(p + 64 * i));
    return _mm512_sub_epi32(_mm512_setzero_si512(), lift);
}
inline Sums add_bytes(Sums s, Codes w, const int8_t* a) {
    return _mm512_dpbusd_epi32(s, _mm512_set1_epi32(four(a) ^ static_cast<int32_t>(0x80808080)), w);
}
inline Floats end_bytes(Sums s) { return _mm512_cvtepi32_ps(s); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr const char* NAME = "AVX2";
constexpr int LANES = 8;
constexpr int ROWS = 8;
constexpr int QUERIES = 3;
using Floats = __m256;

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Floats load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline void store(Half* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Floats round(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats a, Floats n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(a, _mm256_castsi256_ps(bits));
}
inline float sum(Floats a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Floats a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline void sums_of_four(Floats a, Floats b, Floats c, Floats d, float* out) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

inline Floats rotate_pairs(Floats x, Floats cos_sin) {
    Floats swapped = _mm256_permute_ps(x, 0xB1);
    return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(cos_sin), mul(swapped, _mm256_movehdup_ps(cos_sin)));
}

inline int store_codes(int8_t* p, Floats x) {
    __m256i q = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    __m128i codes = _mm_packs_epi16(words, words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), codes);
    // Lifted by 128 they have no signs, and one instruction adds eight.
    __m128i lifted = _mm_xor_si128(codes, _mm_set1_epi8(-128));
    return _mm_cvtsi128_si32(_mm_sad_epu8(lifted, _mm_setzero_si128())) - LANES * 128;
}

using Codes = __m256i;
using Sums = __m256i;

inline __m256i four(const int8_t* a) {
    int32_t x;
    std::memcpy(&x, a, 4);
    return _mm256_set1_epi32(x);
}

// Sums stay in their order: the compiler would rather have many products wait for few additions, and then it has no
// registers left to keep them in (gcc 12: 1.4 times the time).
inline Sums in_order(Sums s) {
    asm("" : "+x"(s));
    return s;
}

inline Codes load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Codes low_nibbles(Codes w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Codes high_nibbles(Codes w) { return low_nibbles(_mm256_srli_epi16(w, 4)); }
inline Codes shift_to_4(Codes w, int bit) { return _mm256_slli_epi16(_mm256_srl_epi16(w, _mm_cvtsi32_si128(bit)), 4); }
inline Codes join(Codes w, Codes above, int mask) {
    return _mm256_or_si256(w, _mm256_and_si256(above, _mm256_set1_epi8(static_cast<char>(mask))));
}

// Sixteen products of at most 15 * 128 fit in 16 bits, so the widening to 32 happens once a group.
inline Sums begin_nibbles() { return _mm256_setzero_si256(); }
inline Sums add_nibbles(Sums s, Codes w, const int8_t* a) {
    return in_order(_mm256_add_epi16(s, _mm256_maddubs_epi16(w, four(a))));
}
inline Floats end_nibbles(Sums s) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(s, _mm256_set1_epi16(1))); }

// Four products of at most 63 * 128 fit in 16 bits.
inline Sums begin_at(int32_t x) { return _mm256_set1_epi32(x); }
inline Sums add_wide(Sums s, Codes low, Codes high, const int8_t* a) {
    __m256i fours = _mm256_add_epi16(_mm256_maddubs_epi16(low, four(a)), _mm256_maddubs_epi16(high, four(a + 4)));
    return in_order(_mm256_add_epi32(s, _mm256_madd_epi16(fours, _mm256_set1_epi16(1))));
}

// The instruction wants its first factor unsigned: weights go in without their signs, activations with them.
inline Sums begin_bytes(const uint8_t*) { return _mm256_setzero_si256(); }
inline Sums add_bytes(Sums s, Codes w, const int8_t* a) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four(a), w));
    return in_order(_mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
inline Floats end_bytes(Sums s) { return _mm256_cvtepi32_ps(s); }

#else

constexpr const char* NAME = "plain C++";
constexpr int LANES = 8;
constexpr int ROWS = 4;
constexpr int QUERIES = 3;

struct Floats {
    float v[LANES];
};

template <class F>
inline Floats each(F f) {
    Floats r;
    for (int i = 0; i < LANES; i++) r.v[i] = f(i);
    return r;
}

inline Floats zero() {
    return each([](int) { return 0.0f; });
}
inline Floats all(float x) {
    return each([=](int) { return x; });
}
inline Floats load(const float* p) {
    return each([=](int i) { return p[i]; });
}
inline Floats load(const Half* p) {
    return each([=](int i) { return static_cast<float>(p[i]); });
}
inline Floats load(const int8_t* p) {
    return each([=](int i) { return static_cast<float>(p[i]); });
}
inline void store(float* p, Floats x) { std::memcpy(p, x.v, sizeof x.v); }
inline void store(Half* p, Floats x) {
    for (int i = 0; i < LANES; i++) p[i] = static_cast<Half>(x.v[i]);
}
inline Floats add(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
// Of a number and NaN the second operand is taken, as in the processors' own instructions.
inline Floats max(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats abs(Floats a) {
    return each([&](int i) { return std::fabs(a.v[i]); });
}
inline Floats round(Floats a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline Floats times_power_of_two(Floats a, Floats n) {
    return each([&](int i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}
inline float sum(Floats a) {
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
    return a.v[0];
}
inline float largest(Floats a) { return *std::max_element(a.v, a.v + LANES); }
inline void sums_of_four(Floats a, Floats b, Floats c, Floats d, float* out) {
    const float sums[4] = {sum(a), sum(b), sum(c), sum(d)};
    std::memcpy(out, sums, sizeof sums);
}
inline Floats rotate_pairs(Floats x, Floats cos_sin) {
    return each([&](int i) {
        const float cosine = cos_sin.v[i & ~1], sine = cos_sin.v[i | 1], other = x.v[i ^ 1] * sine;
        return std::fma(x.v[i], cosine, i & 1 ? other : -other);
    });
}
inline int store_codes(int8_t* p, Floats x) {
    int total = 0;
    for (int i = 0; i < LANES; i++) {
        // NaN fails both comparisons and becomes -128, as in the vector instructions.
        const float r = std::nearbyint(x.v[i]);
        p[i] = r >= 127.0f ? 127 : r > -128.0f ? static_cast<int8_t>(r) : -128;
        total += p[i];
    }
    return total;
}

struct Codes {
    int8_t v[4][LANES];
};
struct Sums {
    int32_t v[LANES];
};

inline Codes load_codes(const uint8_t* p) {
    Codes w;
    for (int k = 0; k < 4; k++)
        for (int n = 0; n < LANES; n++) w.v[k][n] = static_cast<int8_t>(p[4 * n + k]);
    return w;
}
inline Codes low_nibbles(Codes w) {
    for (auto& line : w.v)
        for (int8_t& code : line) code &= 15;
    return w;
}
inline Codes high_nibbles(Codes w) {
    for (auto& line : w.v)
        for (int8_t& code : line) code = static_cast<int8_t>(static_cast<uint8_t>(code) >> 4);
    return w;
}
inline Codes shift_to_4(Codes w, int bit) {
    for (auto& line : w.v)
        for (int8_t& code : line) code = static_cast<int8_t>(static_cast<uint8_t>(code) >> bit << 4);
    return w;
}
inline Codes join(Codes w, const Codes& above, int mask) {
    for (int k = 0; k < 4; k++)
        for (int n = 0; n < LANES; n++) w.v[k][n] = static_cast<int8_t>(w.v[k][n] | (above.v[k][n] & mask));
    return w;
}
inline Sums add_bytes(Sums s, const Codes& w, const int8_t* a) {
    for (int k = 0; k < 4; k++)
        for (int n = 0; n < LANES; n++) s.v[n] += w.v[k][n] * a[k];
    return s;
}
inline Floats end_bytes(const Sums& s) {
    return each([&](int n) { return static_cast<float>(s.v[n]); });
}
inline Sums begin_bytes(const uint8_t*) { return {}; }
inline Sums begin_nibbles() { return {}; }
inline Sums add_nibbles(const Sums& s, const Codes& w, const int8_t* a) { return add_bytes(s, w, a); }
inline Floats end_nibbles(const Sums& s) { return end_bytes(s); }
inline Sums begin_at(int32_t x) {
    Sums s;
    std::fill(s.v, s.v + LANES, x);
    return s;
}
inline Sums add_wide(const Sums& s, const Codes& low, const Codes& high, const int8_t* a) {
    return add_bytes(add_bytes(s, low, a), high, a + 4);
}

#endif

// e^x by its series on [-ln 2 / 2, ln 2 / 2], relative error below 3e-7; exact for 0.
inline Floats exp(Floats x) {
    x = max(all(-87.0f), min(all(88.0f), x));  // operands in this order let NaN pass
    const Floats n = round(mul(x, all(1.44269504f)));
    Floats f = fma(n, all(-0.693359375f), x);
    f = fma(n, all(2.12194440e-4f), f);
    Floats p = all(1.0f / 720);
    p = fma(p, f, all(1.0f / 120));
    p = fma(p, f, all(1.0f / 24));
    p = fma(p, f, all(1.0f / 6));
    p = fma(p, f, all(0.5f));
    p = fma(p, f, all(1.0f));
    p = fma(p, f, all(1.0f));
    return times_power_of_two(p, n);
}

inline float exp_of(float x) {
    float lanes[LANES];
    store(lanes, exp(all(x)));
    return lanes[0];
}

}  // namespace simd
