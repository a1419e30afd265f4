// One step of a Llama model: all layers in one parallel region, seven barriers a layer, eight with a cache of bytes.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "clock.h"
#include "products.h"
#include "sampling.h"
#include "threads.h"

// Norms are [hidden_size] floats. Pieces of `gate_up` alternate: 32 rows of gate, the same 32 of up.
struct Layer {
    const float* input_norm;
    const float* feed_forward_norm;
    Matrix query, key, value, output, gate_up, down;
};

struct Model {
    const Layer* layers;
    const float* norm;
    const float* rotations;  // [positions, head_size]: cosine and sine of each pair
    Matrix embedding, head;
    int32_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_size, block_size, num_positions,
        cache_kind;  // a `CacheKind`
    float eps;
};

// Rows one after the other, as in the engine's ModelInputs.
struct Step {
    int32_t num_tokens, num_rows, table_width, num_blocks;
    const int64_t *token_ids, *positions, *block_ids, *offsets;  // [num_tokens]
    const int64_t *row_starts, *seq_lens, *block_tables;         // [num_rows + 1], [num_rows], [num_rows, table_width]
    uint8_t* const* caches;                                      // one a layer
    float* hidden;                                               // out: [num_tokens, hidden_size], before the last norm
};

class Engine {
  public:
    Engine(const Model& model, int num_threads, int max_tokens)
        : model_(model),
          max_tokens_(max_tokens),
          cache_shape_{model.cache_kind, model.num_kv_heads, model.block_size, model.head_size},
          threads_(num_threads),
          score_scale_(1.0f / std::sqrt(static_cast<float>(model.head_size))),
          scratch_(num_threads) {
        const int attended = model.num_heads * model.head_size;
        queries_ = room<float>(size_t(max_tokens) * attended);
        if (model.cache_kind == BYTE_LINES)
            keys_values_ = room<float>(size_t(max_tokens) * 2 * model.num_kv_heads * model.head_size);
        // At least what the products' own rate is measured with.
        hidden_in_ = activations(std::max(max_tokens, RATED_ROWS), model.hidden_size);
        attended_ = activations(max_tokens, attended);
        inner_ = activations(max_tokens, model.inner_size);
    }

    // Whether all that a step names is there: a wrong index would be a write to somebody else's memory.
    bool is_valid(const Step& step) const {
        auto below = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
        for (int n = 0; n < step.num_tokens; n++)
            if (!below(step.token_ids[n], model_.embedding.rows) || !below(step.positions[n], model_.num_positions) ||
                !below(step.block_ids[n], step.num_blocks) || !below(step.offsets[n], model_.block_size))
                return false;
        for (int row = 0; row < step.num_rows; row++) {
            const int64_t first = step.row_starts[row], last = step.row_starts[row + 1], length = step.seq_lens[row];
            const int64_t blocks = (length + model_.block_size - 1) / model_.block_size;
            if (!below(first, last) || last > step.num_tokens || length < last - first || blocks > step.table_width)
                return false;
            for (int64_t n = first; n < last; n++)
                if (step.positions[n] != length - (last - n)) return false;
            for (int64_t i = 0; i < blocks; i++)
                if (!below(step.block_tables[row * step.table_width + i], step.num_blocks)) return false;
        }
        return true;
    }

    void forward(const Step& step, double* seconds) {
        plan(step);
        threads_.run([&](int thread) {
            const amx::Registers registers;
            Clock clock(thread == 0 ? seconds : nullptr);
            for (int i = 0; i < model_.num_layers; i++) layer(step, i, thread, clock);
        });
    }

    int max_tokens() const { return max_tokens_; }

    // Scores of the vocabulary for rows of hidden states: out [count, rows of the head].
    void logits(const float* hidden, int count, float* out, double* seconds) {
        const Matrix& head = model_.head;
        threads_.run([&](int thread) {
            const amx::Registers registers;
            Clock clock(thread == 0 ? seconds : nullptr);
            threads_.share_rows(count,
                                [&](int n) { normalize(hidden + size_t(n) * model_.hidden_size, model_.norm, n); });
            threads_.share(head.num_pieces(), [&](int piece) {
                const int first = piece * PIECE, size = std::min(PIECE, head.rows - first);
                multiply<1>(head, piece, hidden_in_, count, [&](int row, const float* values) {
                    std::memcpy(out + size_t(row) * head.rows + first, values, sizeof(float) * size);
                });
            });
            clock.spent(HEAD);
        });
    }

    // Choose a token for each row of logits [num_rows, size], a row a thread; `drawing_of(row)` tells how.
    template <class DrawingOf>
    void sample(const float* logits, int num_rows, int size, DrawingOf drawing_of, int64_t* token_ids) {
        samplers_.resize(threads_.count());
        for (RowSampler& sampler : samplers_) sampler.make_room(size);
        threads_.run([&](int thread) {
            threads_.share(num_rows, [&](int row) {
                token_ids[row] = samplers_[thread].choose(logits + size_t(row) * size, size, drawing_of(row));
            });
        });
    }

    // Operations a second of the products' own loop on data in the first cache, two for each product.
    double dot_rate() {
        const Matrix& w = model_.layers[0].gate_up;  // the largest
        float ramp[GROUP];
        for (int i = 0; i < GROUP; i++) ramp[i] = static_cast<float>(i);
        for (int m = 0; m < RATED_ROWS; m++)
            for (int g = 0; g < w.num_groups(); g++) hidden_in_.put(m, g, ramp);
        constexpr int ROUNDS = 1000;
        auto run = [&](int) {
            const amx::Registers registers;
            volatile float seen = 0;
            for (int i = 0; i < ROUNDS; i++)
                multiply<1>(w, 0, hidden_in_, RATED_ROWS, [&](int, const float* values) { seen = values[0]; });
        };
        double best = 0;
        for (int i = 0; i < 5; i++) {
            const auto begin = std::chrono::steady_clock::now();
            threads_.run(run);
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            best = std::max(best, 2.0 * threads_.count() * ROUNDS * RATED_ROWS * w.cols * PIECE / seconds);
        }
        return best;
    }

  private:
    static constexpr int RATED_ROWS = 16;  // of the loop whose rate counts as the best

    struct alignas(64) Line {
        char bytes[64];
    };

    // Some of a row's tokens under some key heads; or, `span` >= 0, one span of a single token's keys under one head.
    struct Task {
        int row, head, num_heads, token, num_tokens, span, slot;
    };

    // Memory that begins with a cache line: what two threads write must not share one.
    template <class Number>
    Number* room(size_t count) {
        const size_t lines = (count * sizeof(Number) + sizeof(Line) - 1) / sizeof(Line);
        memory_.emplace_back(new Line[lines]);
        return reinterpret_cast<Number*>(memory_.back().get());
    }

    Activations activations(int rows, int cols) {
        // An odd number of cache lines, or all groups of a row would compete for the same few places in the cache.
        const int stride = ((rows + 15) / 16 | 1) * 16;
        const size_t scales = size_t(cols / GROUP) * stride;
        // Products take whole registers of rows.
        return {room<int8_t>(size_t(rows + amx::ROWS - 1) * cols),
                room<float>(scales),
                room<float>(scales),
                room<int32_t>(2 * scales),
                cols,
                stride};
    }

    void plan(const Step& step) {
        tasks_.clear();
        const int heads = model_.num_kv_heads, group = model_.num_heads / heads;
        const int most_tokens = std::max(1, std::min(16, MAX_QUERIES / group)),
                  most_heads = std::min(heads, MAX_QUERIES / group);
        // Few rows of one token cannot keep all threads busy: their heads and keys are shared out.
        const bool split = step.num_rows < 4 * threads_.count();
        int num_slots = 0;
        for (int row = 0; row < step.num_rows; row++) {
            const int first = static_cast<int>(step.row_starts[row]), last = static_cast<int>(step.row_starts[row + 1]);
            const int spans = static_cast<int>((step.seq_lens[row] + SPAN - 1) / SPAN);
            if (last - first == 1 && !split) {
                for (int head = 0; head < heads; head += most_heads)
                    tasks_.push_back({row, head, std::min(most_heads, heads - head), first, 1, -1, 0});
                continue;
            }
            for (int head = 0; head < heads; head++) {
                if (last - first == 1) {
                    for (int span = 0; span < spans; span++)
                        tasks_.push_back({row, head, 1, first, 1, span, num_slots});
                    num_slots += spans;
                } else {
                    for (int token = first; token < last; token += most_tokens)
                        tasks_.push_back({row, head, 1, token, std::min(most_tokens, last - token), -1, 0});
                }
            }
        }
        if (partials_.size() < static_cast<size_t>(num_slots) * group)
            partials_.resize(static_cast<size_t>(num_slots) * group);
        if (done_.size() < static_cast<size_t>(num_slots)) done_ = std::vector<std::atomic<int>>(num_slots);
    }

    void layer(const Step& step, int index, int thread, Clock& clock) {
        const Layer& layer = model_.layers[index];
        const int tokens = step.num_tokens, hidden_size = model_.hidden_size;
        threads_.share_rows(tokens, [&](int n) {
            float* hidden = step.hidden + size_t(n) * hidden_size;
            if (index == 0) read_row(model_.embedding, static_cast<int>(step.token_ids[n]), hidden);
            normalize(hidden, layer.input_norm, n);
        });
        clock.spent(GLUE);
        const Matrix* const parts[] = {&layer.query, &layer.key, &layer.value};
        threads_.share(layer.query.num_pieces() + layer.key.num_pieces() + layer.value.num_pieces(), [&](int piece) {
            int kind = 0;
            for (; piece >= parts[kind]->num_pieces(); kind++) piece -= parts[kind]->num_pieces();
            Place places[PIECE / LANES];
            for (int i = 0; i < PIECE / LANES; i++)
                places[i] = place_of(kind, piece * PIECE + i * LANES, parts[kind]->rows);
            multiply<1>(*parts[kind], piece, hidden_in_, tokens, [&](int n, const float* values) {
                for (int i = 0; i < PIECE / LANES; i++)
                    put(step, step.caches[index], n, places[i], simd::load(values + i * LANES));
            });
        });
        clock.spent(PRODUCTS);
        if (cache_shape_.kind == BYTE_LINES)
            threads_.share_rows(tokens, [&](int n) { put_lines(step, step.caches[index], n); });
        threads_.share(static_cast<int>(tasks_.size()),
                       [&](int i) { attend_to(step, step.caches[index], i, scratch_[thread]); });
        clock.spent(ATTENTION);
        auto add_to_hidden = [&](int piece) {
            return [&step, hidden_size, piece](int n, const float* values) {
                float* hidden = step.hidden + size_t(n) * hidden_size + piece * PIECE;
                for (int i = 0; i < PIECE; i += LANES)
                    simd::store(hidden + i, simd::add(simd::load(hidden + i), simd::load(values + i)));
            };
        };
        threads_.share(layer.output.num_pieces(),
                       [&](int piece) { multiply<1>(layer.output, piece, attended_, tokens, add_to_hidden(piece)); });
        clock.spent(PRODUCTS);
        threads_.share_rows(
            tokens, [&](int n) { normalize(step.hidden + size_t(n) * hidden_size, layer.feed_forward_norm, n); });
        clock.spent(GLUE);
        // Two groups at a time: 64 codes are a cache line.
        const int pairs = layer.gate_up.num_pieces() / 2;
        threads_.share((pairs + 1) / 2, [&](int two) {
            for (int pair = 2 * two; pair < std::min(2 * two + 2, pairs); pair++) gate(layer.gate_up, pair, tokens);
        });
        threads_.share(layer.down.num_pieces(),
                       [&](int piece) { multiply<1>(layer.down, piece, inner_, tokens, add_to_hidden(piece)); });
        clock.spent(PRODUCTS);
    }

    // silu(gate) * up of one group, quantized.
    void gate(const Matrix& gate_up, int pair, int tokens) {
        multiply<2>(gate_up, 2 * pair, hidden_in_, tokens, [&](int n, const float* values) {
            float gated[PIECE];
            for (int i = 0; i < PIECE; i += LANES) {
                const Floats x = simd::load(values + i), up = simd::load(values + PIECE + i);
                const Floats denominator = simd::add(simd::all(1.0f), simd::exp(simd::sub(simd::zero(), x)));
                simd::store(gated + i, simd::div(simd::mul(x, up), denominator));
            }
            inner_.put(n, pair, gated);
        });
    }

    // RMSNorm of one row, quantized into row n of `hidden_in_`.
    void normalize(const float* row, const float* weight, int n) {
        const int size = model_.hidden_size;
        Floats squares = simd::zero();
        for (int i = 0; i < size; i += LANES) squares = simd::fma(simd::load(row + i), simd::load(row + i), squares);
        const Floats scale = simd::all(1.0f / std::sqrt(simd::sum(squares) / size + model_.eps));
        for (int g = 0; g < size / GROUP; g++) {
            float values[GROUP];
            for (int i = 0; i < GROUP; i += LANES) {
                const int at = g * GROUP + i;
                simd::store(values + i, simd::mul(simd::mul(simd::load(row + at), scale), simd::load(weight + at)));
            }
            hidden_in_.put(n, g, values);
        }
    }

    // Where outputs of the products for attention belong: kind 0 query, 1 key, 2 value, 3 padding; head and element.
    struct Place {
        int kind, head, element;
    };

    Place place_of(int kind, int column, int end) const {
        return {column < end ? kind : 3, column / model_.head_size, column % model_.head_size};
    }

    // LANES outputs of one token: rotated, scaled, and put where they belong; on the way into a cache of bytes, beside
    // the rest of their head.
    void put(const Step& step, uint8_t* cache, int n, Place place, Floats x) {
        const int size = model_.head_size;
        if (place.kind < 2)
            x = simd::rotate_pairs(x, simd::load(model_.rotations + step.positions[n] * size + place.element));
        if (place.kind == 0) {
            float* to = queries_ + (size_t(n) * model_.num_heads + place.head) * size + place.element;
            simd::store(to, simd::mul(x, simd::all(score_scale_)));
        } else if (place.kind < 3) {
            const int side = place.kind - 1;
            if (cache_shape_.kind == BYTE_LINES)
                simd::store(key_or_value(n, side, place.head) + place.element, x);
            else
                put_halves(cache + cache_shape_.at(step.block_ids[n], side, place.head, step.offsets[n]) +
                               place.element * sizeof(Half),
                           x);
        }
    }

    float* key_or_value(int n, int side, int head) const {
        return keys_values_ + ((size_t(n) * 2 + side) * model_.num_kv_heads + head) * model_.head_size;
    }

    // All heads' keys and values of one token, into a cache of bytes.
    void put_lines(const Step& step, uint8_t* cache, int n) {
        for (int side = 0; side < 2; side++)
            for (int head = 0; head < model_.num_kv_heads; head++)
                put_bytes(cache + cache_shape_.at(step.block_ids[n], side, head, step.offsets[n]),
                          key_or_value(n, side, head), model_.head_size);
    }

    Pages pages_of(const Step& step, const uint8_t* cache, const Task& task) const {
        const int64_t* table = step.block_tables + size_t(task.row) * step.table_width;
        return {cache, table, cache_shape_, static_cast<int>(step.seq_lens[task.row])};
    }

    void attend_to(const Step& step, const uint8_t* cache, int index, AttentionScratch& scratch) {
        const Task& task = tasks_[index];
        const int group = model_.num_heads / model_.num_kv_heads, size = model_.head_size,
                  stride = model_.num_heads * size;
        const Pages pages = pages_of(step, cache, task);
        const float* queries = queries_ + size_t(task.token) * stride + task.head * group * size;
        const int position = static_cast<int>(step.positions[task.token]);
        if (task.span < 0) {
            // Most likely this thread's next one: others take those between.
            const size_t later = static_cast<size_t>(index) + threads_.count();
            Pages next{};
            if (later < tasks_.size()) next = pages_of(step, cache, tasks_[later]);
            attend(pages, task.head, task.num_heads, position, task.num_tokens, queries, stride, group, scratch,
                   later < tasks_.size() && tasks_[later].row != task.row ? &next : nullptr,
                   [&](int token, int head, const Partial* sums) { finish(task.token + token, head, sums); });
            return;
        }
        const float* lines[MAX_QUERIES];
        int num_keys[MAX_QUERIES];
        const int start = task.span * SPAN, num_spans = position / SPAN + 1;
        for (int i = 0; i < group; i++) {
            lines[i] = queries + i * size;
            num_keys[i] = std::min(SPAN, position + 1 - start);
        }
        Partial* partials = partials_.data() + size_t(task.slot) * group;
        Ahead none;
        attend_span(pages, task.head, start, lines, num_keys, group, scratch, partials + size_t(task.span) * group,
                    none);
        // Whoever comes last puts the spans together, in their order.
        if (done_[task.slot].fetch_add(1, std::memory_order_acq_rel) + 1 < num_spans) return;
        done_[task.slot].store(0, std::memory_order_relaxed);
        for (int span = 1; span < num_spans; span++)
            for (int i = 0; i < group; i++) merge(partials[i], partials[size_t(span) * group + i], size);
        finish(task.token, task.head, partials);
    }

    // Divide by the softmax's sum and quantize the heads of a group, [group * head_size].
    void finish(int token, int key_head, const Partial* sums) {
        const int group = model_.num_heads / model_.num_kv_heads, size = model_.head_size;
        alignas(64) float values[GROUP + MAX_HEAD];
        int filled = 0, to = key_head * group * size / GROUP;
        for (int i = 0; i < group; i++) {
            const Floats inverse = simd::all(1.0f / sums[i].total);
            for (int d = 0; d < size; d += LANES, filled += LANES)
                simd::store(values + filled, simd::mul(simd::load(sums[i].values + d), inverse));
            int used = 0;
            for (; used + GROUP <= filled; used += GROUP) attended_.put(token, to++, values + used);
            std::memmove(values, values + used, sizeof(float) * (filled - used));
            filled -= used;
        }
    }

    const Model& model_;
    const int max_tokens_;
    const CacheShape cache_shape_;
    Threads threads_;
    const float score_scale_;
    std::vector<std::unique_ptr<Line[]>> memory_;
    float *queries_ = nullptr, *keys_values_ = nullptr;
    Activations hidden_in_{}, attended_{}, inner_{};
    std::vector<Task> tasks_;
    std::vector<Partial> partials_;
    std::vector<std::atomic<int>> done_;
    std::vector<AttentionScratch> scratch_;
    std::vector<RowSampler> samplers_;
};
