// Causal attention over the paged KV cache (PagedAttention, vLLM; partial softmax over spans, FlashDecoding).
//
// Keys are taken in spans that begin at fixed places of the sequence. Within a span the softmax is plain; spans are
// merged in their order. A query's result therefore depends on nothing but its own keys: not on the rows beside it, the
// chunk it came in, or how the spans were shared among threads.
#pragma once

#include "simd.h"

using simd::Floats;
using simd::Half;
using simd::LANES;

constexpr int SPAN = 128;      // keys
constexpr int MAX_HEAD = 256;  // elements of a head
constexpr int STRIP = 16;      // keys that are widened at a time for several queries
constexpr int MAX_QUERIES = 64;

// Keys and values of one layer, [blocks, 2, kv_heads, block_size, head_size]: where a sequence's are found.
struct Pages {
    const Half* cache;
    const int64_t* table;
    int kv_heads, block_size, head_size;
    int num_keys;  // of the sequence

    size_t block_elements() const { return size_t(2) * kv_heads * block_size * head_size; }

    // Call `use(i, line)` with the keys (side 0) or values (side 1) of a head for `count` positions from `first` on.
    template <class Use>
    void lines(int side, int head, int first, int count, Use use) const {
        int block = first / block_size, offset = first % block_size;
        for (int i = 0; i < count; block++, offset = 0) {
            const Half* line = cache + table[block] * block_elements() +
                               ((size_t(side) * kv_heads + head) * block_size + offset) * head_size;
            for (; offset < block_size && i < count; offset++, i++, line += head_size) use(i, line);
        }
    }
};

// Asks for blocks in the order of memory, some lines at a time between pieces of arithmetic.
//
// Blocks lie scattered, which the processor does not foresee; a whole block is one long run, which memory is fastest
// at.
class Ahead {
  public:
    static constexpr int LINE = 64 / sizeof(Half);

    // All heads' keys and values from position `first` on, as many as a span has, in about `steps` steps.
    void aim(const Pages& pages, int first, int steps) {
        pages_ = &pages;
        block_ = first / pages.block_size;
        end_ = (std::min(first + SPAN, pages.num_keys) + pages.block_size - 1) / pages.block_size;
        left_ = 0;
        const int lines = std::max(0, end_ - block_) * static_cast<int>(pages.block_elements() / LINE);
        per_step_ = lines / std::max(steps, 1) + 1;
    }

    void step() {
        for (int wanted = per_step_; wanted > 0;) {
            if (left_ == 0) {
                if (block_ >= end_) return;
                at_ = pages_->cache + pages_->table[block_++] * pages_->block_elements();
                left_ = static_cast<int>(pages_->block_elements() / LINE);
            }
            const int count = std::min(wanted, left_);
            for (int i = 0; i < count; i++) __builtin_prefetch(at_ + i * LINE, 0, 2);
            at_ += count * LINE;
            left_ -= count;
            wanted -= count;
        }
    }

  private:
    const Pages* pages_ = nullptr;
    const Half* at_ = nullptr;
    int left_ = 0, block_ = 0, end_ = 0, per_step_ = 0;
};

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
                       Partial* const* sums) {
    constexpr int WIDE = 4;
    for (int d = 0; d < head_size; d += WIDE * LANES) {
        const int wide = std::min(WIDE, (head_size - d) / LANES);
        if (wide == WIDE) {
            Floats s[Q][WIDE];
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++) s[q][i] = simd::load(sums[q]->values + d + i * LANES);
            for (int k = 0; k < count; k++) {
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
    Partial span[MAX_QUERIES], sums[MAX_QUERIES];
};

// Attend to one span of keys for `count` queries of one key head, at most MAX_QUERIES.
//
// Query i sees keys [start, start + num_keys[i]), num_keys[i] <= SPAN; its partial means nothing where that is 0.
inline void attend_span(const Pages& pages, int head, int start, const float* const* queries, const int* num_keys,
                        int count, AttentionScratch& scratch, Partial* out, Ahead& ahead) {
    int most = 0;
    for (int i = 0; i < count; i++) most = std::max(most, num_keys[i]);
    const bool widen = count > simd::QUERIES;
    const int head_size = pages.head_size;

    // Keys and values strip by strip; what a query must not see is computed with the rest and then not looked at.
    auto strips = [&](int side, auto use) {
        for (int k = 0; k < most; k += STRIP) {
            const int size = std::min(STRIP, most - k);
            const Half* lines[STRIP];
            pages.lines(side, head, start + k, size, [&](int i, const Half* line) { lines[i] = line; });
            for (int i = size; i < STRIP; i++) lines[i] = lines[size - 1];
            ahead.step();
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

    strips(0, [&](int k, int size, const auto* lines) {
        in_runs(count, [&]<int Q>(int first) {
            for (int i = 0; i < size; i += 4) {
                float* to[Q];
                for (int q = 0; q < Q; q++) to[q] = scratch.scores[first + q] + k + i;
                score_four<Q>(queries + first, lines + i, head_size, to);
            }
        });
    });
    for (int i = 0; i < count; i++) {
        float* scores = scratch.scores[i];
        std::memset(out[i].values, 0, sizeof(float) * head_size);
        if (num_keys[i] == 0) {
            std::memset(scores, 0, sizeof(float) * most);
            continue;
        }
        for (int k = num_keys[i]; k % LANES != 0; k++) scores[k] = -INFINITY;
        Floats most_of = simd::all(-INFINITY), total = simd::zero();
        for (int k = 0; k < num_keys[i]; k += LANES) most_of = simd::max(most_of, simd::load(scores + k));
        out[i].largest = simd::largest(most_of);
        for (int k = 0; k < num_keys[i]; k += LANES) {
            Floats e = simd::exp(simd::sub(simd::load(scores + k), simd::all(out[i].largest)));
            simd::store(scores + k, e);
        }
        for (int k = num_keys[i]; k % LANES != 0; k++) scores[k] = 0.0f;
        for (int k = 0; k < num_keys[i]; k += LANES) total = simd::add(total, simd::load(scores + k));
        out[i].total = simd::sum(total);
        // A weight of zero adds nothing, not even a sign: what lies beyond is finite, it was written by this sequence.
        for (int k = (num_keys[i] + LANES - 1) / LANES * LANES; k < most; k++) scores[k] = 0.0f;
    }
    strips(1, [&](int k, int size, const auto* lines) {
        in_runs(count, [&]<int Q>(int first) {
            const float* weights[Q];
            Partial* sums[Q];
            for (int q = 0; q < Q; q++) {
                weights[q] = scratch.scores[first + q] + k;
                sums[q] = out + first + q;
            }
            add_values<Q>(weights, lines, size, head_size, sums);
        });
    });
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
        const int steps = 2 * heads * ((std::min(SPAN, end - start) + STRIP - 1) / STRIP);
        if (start + SPAN < end)
            ahead.aim(pages, start + SPAN, steps);
        else if (next != nullptr)
            ahead.aim(*next, 0, steps);
        for (int head = 0; head < heads; head++) {
            for (int i = 0; i < count; i++) {
                lines[i] =
                    queries + static_cast<size_t>(i / group) * stride + (head * group + i % group) * pages.head_size;
                num_keys[i] = std::clamp(position + i / group + 1 - start, 0, SPAN);
            }
            Partial *sums = scratch.sums + head * count, *span = start == 0 ? sums : scratch.span;
            attend_span(pages, first_head + head, start, lines, num_keys, count, scratch, span, ahead);
            for (int i = 0; start > 0 && i < count; i++)
                if (num_keys[i] > 0) merge(sums[i], span[i], pages.head_size);
        }
    }
    for (int head = 0; head < heads; head++)
        for (int token = 0; token < tokens; token++)
            finish(token, first_head + head, scratch.sums + head * count + token * group);
}
