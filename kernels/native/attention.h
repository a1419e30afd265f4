// Causal attention over the paged KV cache (PagedAttention, vLLM; partial softmax over spans, FlashDecoding).
//
// Keys are taken in spans that begin at fixed places of the sequence. Within a span the softmax is plain; spans are
// merged in their order. A query's result therefore depends on nothing but its own keys: not on the rows beside it, the
// chunk it came in, or how the spans were shared among threads.
#pragma once

#include <type_traits>

#include "kv_cache.h"

constexpr int MAX_HEAD = 256;  // elements of a head
constexpr int STRIP = 16;      // keys that are widened at a time for several queries
constexpr int MAX_QUERIES = 64;

// A softmax in the making: sum of exponentials relative to the largest score, and the values weighted by them.
struct Partial {
    float largest, total;
    float values[MAX_HEAD];
};

// Add a later span to an earlier sum.
inline void merge(Partial& into, const Partial& span, int head_size) {
    const float largest = into.largest > span.largest ? into.largest : span.largest;
    const float keep = simd::exp_of(into.largest - largest), take = simd::exp_of(span.largest - largest);
    into.largest = largest;
    into.total = into.total * keep + span.total * take;
    for (int d = 0; d < head_size; d += LANES) {
        const Floats scaled = simd::mul(simd::load(into.values + d), simd::all(keep));
        simd::store(into.values + d, simd::fma(simd::load(span.values + d), simd::all(take), scaled));
    }
}

constexpr int WIDE = 4;  // vectors of a value that are summed together

// How often a strip of keys and of values asks for more.
inline int steps_of_strip(int head_size) { return STRIP / 4 + 2 * (head_size / (WIDE * LANES)); }

// Scores of Q queries with four keys. The sum of one query and key is formed alike in every combination.
template <int Q, class Number>
inline void score_four(const float* const* queries, const Number* const* keys, int head_size, float* const* scores) {
    Floats sums[Q][4];
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) sums[q][k] = simd::zero();
    for (int d = 0; d < head_size; d += LANES) {
        Floats x[Q];
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) x[q] = simd::load(queries[q] + d);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const Floats key = simd::load(keys[k] + d);
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++) sums[q][k] = simd::fma(x[q], key, sums[q][k]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) simd::sums_of_four(sums[q][0], sums[q][1], sums[q][2], sums[q][3], scores[q]);
}

// Add weights[q][k] * values[k] for `count` keys to Q running sums.
template <int Q, class Number>
inline void add_values(const float* const* weights, const Number* const* values, int count, int head_size,
                       Partial* const* sums, Ahead& ahead) {
    for (int d = 0; d < head_size; d += WIDE * LANES) {
        const int wide = std::min(WIDE, (head_size - d) / LANES);
        if (wide == WIDE) {
            Floats s[Q][WIDE];
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++) s[q][i] = simd::load(sums[q]->values + d + i * LANES);
            for (int k = 0; k < count; k++) {
                if (k % (STRIP / 2) == 0) ahead.step();
                Floats v[WIDE];
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++) v[i] = simd::load(values[k] + d + i * LANES);
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++) {
                    const Floats w = simd::all(weights[q][k]);
#pragma GCC unroll 4
                    for (int i = 0; i < WIDE; i++) s[q][i] = simd::fma(w, v[i], s[q][i]);
                }
            }
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++) simd::store(sums[q]->values + d + i * LANES, s[q][i]);
        } else {
            for (int i = 0; i < wide; i++)
                for (int q = 0; q < Q; q++) {
                    Floats s = simd::load(sums[q]->values + d + i * LANES);
                    for (int k = 0; k < count; k++)
                        s = simd::fma(simd::all(weights[q][k]), simd::load(values[k] + d + i * LANES), s);
                    simd::store(sums[q]->values + d + i * LANES, s);
                }
        }
    }
}

// Call `f.operator()<Q>(first)` for runs of at most QUERIES of `count` queries, as even as can be.
template <class F>
inline void in_runs(int count, F f) {
    constexpr int MOST = simd::QUERIES;
    for (int first = 0, runs = (count + MOST - 1) / MOST; runs > 0; runs--) {
        const int size = (count - first + runs - 1) / runs;
        if (size == 1) f.template operator()<1>(first);
        if (size == 2) f.template operator()<2>(first);
        if (size == 3) f.template operator()<3>(first);
        if constexpr (MOST > 3)
            if (size == 4) f.template operator()<4>(first);
        first += size;
    }
}

// Scratch of one thread.
struct AttentionScratch {
    alignas(64) float strip[STRIP * MAX_HEAD];
    alignas(64) float scores[MAX_QUERIES][SPAN + LANES];
    alignas(64) float scales[2][SPAN];  // of keys and values in a cache of bytes
    Partial span[MAX_QUERIES], sums[MAX_QUERIES];
};

// Exponentials of a span's scores relative to the largest, in their place; gives that and their sum to `out`.
inline void softmax(float* scores, int num_keys, int most, Partial& out) {
    if (num_keys == 0) {
        std::memset(scores, 0, sizeof(float) * most);
        return;
    }
    for (int k = num_keys; k % LANES != 0; k++) scores[k] = -INFINITY;
    Floats most_of = simd::all(-INFINITY), total = simd::zero();
    for (int k = 0; k < num_keys; k += LANES) most_of = simd::max(most_of, simd::load(scores + k));
    out.largest = simd::largest(most_of);
    for (int k = 0; k < num_keys; k += LANES) {
        Floats e = simd::exp(simd::sub(simd::load(scores + k), simd::all(out.largest)));
        simd::store(scores + k, e);
    }
    for (int k = num_keys; k % LANES != 0; k++) scores[k] = 0.0f;
    for (int k = 0; k < num_keys; k += LANES) total = simd::add(total, simd::load(scores + k));
    out.total = simd::sum(total);
    // A weight of zero adds nothing, not even a sign: what lies beyond is finite, it was written by this sequence.
    for (int k = (num_keys + LANES - 1) / LANES * LANES; k < most; k++) scores[k] = 0.0f;
}

// As `attend_span`, of a cache of these numbers: halves, or bytes with a scale at the end of each line. What has a
// scale is taken as it lies, and its scale goes into the score of a key, or into the weight of a value.
template <class Number>
inline void attend_lines(const Pages& pages, int head, int start, const float* const* queries, const int* num_keys,
                         int count, AttentionScratch& scratch, Partial* out, Ahead& ahead) {
    constexpr bool SCALED = std::is_same_v<Number, int8_t>;
    int most = 0;
    for (int i = 0; i < count; i++) most = std::max(most, num_keys[i]);
    const bool widen = count > simd::QUERIES;
    const int head_size = pages.shape.head_size;
    for (int side = 0; SCALED && side < 2; side++)
        pages.lines(side, head, start, most, [&](int i, const uint8_t* line) {
            std::memcpy(&scratch.scales[side][i], line + head_size, sizeof(float));
        });
    auto scale = [&](float* values, int side, int size) {
        for (int k = 0; SCALED && k < size; k += LANES)
            simd::store(values + k, simd::mul(simd::load(values + k), simd::load(scratch.scales[side] + k)));
    };

    // Keys and values strip by strip; what a query must not see is computed with the rest and then not looked at.
    auto strips = [&](int side, auto use) {
        for (int k = 0; k < most; k += STRIP) {
            const int size = std::min(STRIP, most - k);
            const Number* lines[STRIP];
            pages.lines(side, head, start + k, size,
                        [&](int i, const uint8_t* line) { lines[i] = reinterpret_cast<const Number*>(line); });
            for (int i = size; i < STRIP; i++) lines[i] = lines[size - 1];
            if (!widen) {
                use(k, size, lines);
                continue;
            }
            const float* wide[STRIP];
            for (int i = 0; i < STRIP; i++) {
                float* to = scratch.strip + i * head_size;
                if (i < size)
                    for (int d = 0; d < head_size; d += LANES) simd::store(to + d, simd::load(lines[i] + d));
                wide[i] = i < size ? to : wide[size - 1];
            }
            use(k, size, wide);
        }
    };

    Ahead none;
    strips(0, [&](int k, int size, const auto* lines) {
        in_runs(count, [&]<int Q>(int first) {
            for (int i = 0; i < size; i += 4) {
                float* to[Q];
                if (first == 0) ahead.step();
                for (int q = 0; q < Q; q++) to[q] = scratch.scores[first + q] + k + i;
                score_four<Q>(queries + first, lines + i, head_size, to);
            }
        });
    });
    for (int i = 0; i < count; i++) {
        std::memset(out[i].values, 0, sizeof(float) * head_size);
        scale(scratch.scores[i], 0, num_keys[i]);
        softmax(scratch.scores[i], num_keys[i], most, out[i]);
        scale(scratch.scores[i], 1, num_keys[i]);
    }
    strips(1, [&](int k, int size, const auto* lines) {
        in_runs(count, [&]<int Q>(int first) {
            const float* weights[Q];
            Partial* sums[Q];
            for (int q = 0; q < Q; q++) {
                weights[q] = scratch.scores[first + q] + k;
                sums[q] = out + first + q;
            }
            add_values<Q>(weights, lines, size, head_size, sums, first == 0 ? ahead : none);
        });
    });
}

// Attend to one span of keys for `count` queries of one key head, at most MAX_QUERIES.
//
// Query i sees keys [start, start + num_keys[i]), num_keys[i] <= SPAN; its partial means nothing where that is 0.
inline void attend_span(const Pages& pages, int head, int start, const float* const* queries, const int* num_keys,
                        int count, AttentionScratch& scratch, Partial* out, Ahead& ahead) {
    if (pages.shape.kind == HALF_LINES)
        attend_lines<Half>(pages, head, start, queries, num_keys, count, scratch, out, ahead);
    else
        attend_lines<int8_t>(pages, head, start, queries, num_keys, count, scratch, out, ahead);
}

// The causal attention of neighbouring tokens of one sequence under neighbouring key heads, tokens * heads * group of
// them at most MAX_QUERIES.
//
// Args: position: of the first token. queries: [tokens][stride], from the first head's on, scaled already; `group` of
// each key head. next: what will be attended to afterwards, or null. finish(token, head, sums): takes the `group`
// finished partials of each token and head.
template <class Finish>
inline void attend(const Pages& pages, int first_head, int heads, int position, int tokens, const float* queries,
                   int stride, int group, AttentionScratch& scratch, const Pages* next, Finish finish) {
    const float* lines[MAX_QUERIES];
    int num_keys[MAX_QUERIES];
    const int count = tokens * group, end = position + tokens;
    Ahead ahead;
    for (int start = 0; start < end; start += SPAN) {
        const int steps =
            heads * steps_of_strip(pages.shape.head_size) * ((std::min(SPAN, end - start) + STRIP - 1) / STRIP);
        if (start + SPAN < end)
            ahead.aim(pages, start + SPAN, steps);
        else if (next != nullptr)
            ahead.aim(*next, 0, steps);
        for (int head = 0; head < heads; head++) {
            for (int i = 0; i < count; i++) {
                lines[i] = queries + static_cast<size_t>(i / group) * stride +
                           (head * group + i % group) * pages.shape.head_size;
                num_keys[i] = std::clamp(position + i / group + 1 - start, 0, SPAN);
            }
            Partial *sums = scratch.sums + head * count, *span = start == 0 ? sums : scratch.span;
            attend_span(pages, first_head + head, start, lines, num_keys, count, scratch, span, ahead);
            for (int i = 0; start > 0 && i < count; i++)
                if (num_keys[i] > 0) merge(sums[i], span[i], pages.shape.head_size);
        }
    }
    for (int head = 0; head < heads; head++)
        for (int token = 0; token < tokens; token++)
            finish(token, first_head + head, scratch.sums + head * count + token * group);
}
