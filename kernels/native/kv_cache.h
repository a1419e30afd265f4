// The paged KV cache of one layer, [blocks, 2, kv_heads, block_size, line]: keys, then values, of whole blocks of
// tokens.
//
// A line is what one head keeps of a token: head_size numbers of sixteen bits, or as many bytes and the float that they
// are multiplied with.
#pragma once

#include "simd.h"

using simd::Floats;
using simd::Half;
using simd::LANES;

constexpr int SPAN = 128;  // keys that are attended to at a time

enum CacheKind : int32_t { HALF_LINES = 0, BYTE_LINES = 1 };

struct CacheShape {
    int32_t kind, kv_heads, block_size, head_size;

    size_t line_bytes() const { return kind == HALF_LINES ? head_size * sizeof(Half) : head_size + sizeof(float); }
    size_t block_bytes() const { return size_t(2) * kv_heads * block_size * line_bytes(); }
    // Where the key (side 0) or value (side 1) of a head lies, of the token at `offset` of a block.
    size_t at(int64_t block, int side, int head, int64_t offset) const {
        return block * block_bytes() + ((size_t(side) * kv_heads + head) * block_size + offset) * line_bytes();
    }
};

// Some of a line of halves. What they cannot hold is held at their ends; what is no number stays none.
inline void put_halves(uint8_t* to, Floats x) {
    const Floats most = simd::all(65504.0f);
    simd::store(reinterpret_cast<Half*>(to), simd::max(simd::sub(simd::zero(), most), simd::min(most, x)));
}

// A line of bytes, in equal steps up to the largest. What is not finite makes the scale NaN, so that it is seen.
inline void put_bytes(uint8_t* line, const float* values, int size) {
    Floats most = simd::zero(), spoiled = simd::zero();
    for (int i = 0; i < size; i += LANES) {
        const Floats x = simd::load(values + i);
        most = simd::max(most, simd::abs(x));
        spoiled = simd::fma(x, simd::zero(), spoiled);
    }
    const float amax = simd::largest(most), scale = amax / 127.0f + simd::sum(spoiled);
    const Floats inverse = simd::all(amax > 0.0f ? 127.0f / amax : 0.0f);
    for (int i = 0; i < size; i += LANES)
        simd::store_codes(reinterpret_cast<int8_t*>(line + i), simd::mul(simd::load(values + i), inverse));
    std::memcpy(line + size, &scale, sizeof scale);
}

// Where a sequence's keys and values are found.
struct Pages {
    const uint8_t* cache;
    const int64_t* table;
    CacheShape shape;
    int num_keys;  // of the sequence

    // Call `use(i, line)` with the keys (side 0) or values (side 1) of a head for `count` positions from `first` on.
    template <class Use>
    void lines(int side, int head, int first, int count, Use use) const {
        const size_t line_bytes = shape.line_bytes();
        int block = first / shape.block_size, offset = first % shape.block_size;
        for (int i = 0; i < count; block++, offset = 0) {
            const uint8_t* line = cache + shape.at(table[block], side, head, offset);
            for (; offset < shape.block_size && i < count; offset++, i++, line += line_bytes) use(i, line);
        }
    }
};

// Asks for blocks in the order of memory, a few cache lines at a time between pieces of arithmetic.
//
// Blocks lie scattered, which the processor does not foresee; a whole block is one long run, which memory is fastest
// at. Of many lines asked for at once the processor forgets those that it has no room to note.
class Ahead {
  public:
    static constexpr int LINE = 64;

    // All heads' keys and values from position `first` on, as many as a span has, in about `steps` steps.
    void aim(const Pages& pages, int first, int steps) {
        pages_ = &pages;
        block_ = first / pages.shape.block_size;
        end_ = (std::min(first + SPAN, pages.num_keys) + pages.shape.block_size - 1) / pages.shape.block_size;
        left_ = 0;
        lines_ = static_cast<int>(pages.shape.block_bytes() / LINE);
        per_step_ = std::max(0, end_ - block_) * lines_ / std::max(steps, 1) + 1;
    }

    void step() {
        for (int wanted = per_step_; wanted > 0;) {
            if (left_ == 0) {
                if (block_ >= end_) return;
                at_ = pages_->cache + pages_->table[block_++] * pages_->shape.block_bytes();
                left_ = lines_;
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
    const uint8_t* at_ = nullptr;
    int lines_ = 0, left_ = 0, block_ = 0, end_ = 0, per_step_ = 0;
};
