// Choosing the next token of a row. What is kept, and in which order, is said in engine/sampler.py, the plain version.
//
// Weights are e^((logit - largest) / temperature), so the likeliest token has exactly 1. Nothing is sorted: what a rule
// keeps reaches down to some weight, and that is found by histograms over the bits of the floats, which rise with them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

// How one row is drawn; a temperature of 0 takes the likeliest token, 0 of `top_k` and `min_p` and 1 of `top_p` keep
// all.
struct Drawing {
    float temperature;
    int64_t top_k;
    double top_p;
    float min_p;
    double noise;  // [0, 1)
};

// The noise of a token: a hash of its sequence's key and its position (SplitMix64), as `uniform` in engine/sampler.py.
inline double noise_of(uint64_t key, int64_t position) {
    constexpr uint64_t GOLDEN_RATIO = 0x9E3779B97F4A7C15;
    uint64_t word = key + (static_cast<uint64_t>(position) + 1) * GOLDEN_RATIO;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return static_cast<double>((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

// How the sequence of each seat is drawn, as columns.
struct Seats {
    const float* temperature;
    const int64_t* top_k;
    const double* top_p;
    const float* min_p;
    const uint64_t* key;

    Drawing drawing(int64_t seat, int64_t position) const {
        return {temperature[seat], top_k[seat], top_p[seat], min_p[seat], noise_of(key[seat], position)};
    }
};

class RowSampler {
  public:
    // Memory for rows of up to `size` tokens; what follows asks for none.
    void make_room(int size) {
        const size_t groups = (size_t(size) + TOKENS - 1) / TOKENS;
        if (groups <= sums_.size()) return;
        weights_.resize(groups * TOKENS);
        gathered_.resize(groups * TOKENS);
        largest_.resize(groups);
        kept_.resize(groups);
        sums_.resize(groups);
    }

    // The token, or -1 where the logits are no numbers or none is above -inf.
    int64_t choose(const float* logits, int size, const Drawing& drawing) {
        num_groups_ = (size + TOKENS - 1) / TOKENS;
        const Best best = likeliest(logits, size);
        if (best.token < 0 || !(drawing.temperature > 0)) return best.token;
        if (std::isinf(drawing.temperature)) return -1;  // it would make weights that are no numbers
        const double total = weigh(logits, size, best.logit, drawing.temperature);
        const float least = std::min(1.0f, std::max(drawing.min_p, least_kept(size, total, drawing)));
        return least > 0 ? pick(kept_sums(least), least, drawing.noise) : pick(sums_.data(), least, drawing.noise);
    }

  private:
    using Floats = simd::Floats;
    // The compiler makes of these what the processor has, be it two instructions.
    using Four = float __attribute__((vector_size(16)));
    using FourFlags = int32_t __attribute__((vector_size(16)));
    using FourDoubles = double __attribute__((vector_size(32)));
    static constexpr int LANES = simd::LANES;
    static constexpr int TOKENS = 64;  // of a group
    static constexpr int DIGIT = 10;   // bits; three make up a float between 0 and 1
    static constexpr float FIRST = std::numeric_limits<float>::denorm_min();

    struct Best {
        float logit;
        int64_t token;
    };

    struct Bin {
        double mass;
        int64_t count;
    };

    // A weight, how many have it, and what is above it.
    struct Border {
        float weight;
        int64_t equal;
        Bin above;
    };

    // A group's logits; the last one's are filled up in `room`.
    static const float* group_of(const float* logits, int size, int group, float* room) {
        const int first = group * TOKENS, count = std::min(TOKENS, size - first);
        if (count == TOKENS) return logits + first;
        std::fill(std::copy(logits + first, logits + size, room), room + TOKENS, -INFINITY);
        return room;
    }

    Best likeliest(const float* logits, int size) const {
        float room[TOKENS], best = -INFINITY;
        int found = 0;
        Floats broken = simd::zero();  // becomes NaN with the first one and stays so
        for (int group = 0; group < num_groups_; group++) {
            const float* values = group_of(logits, size, group, room);
            Floats most = simd::all(-INFINITY);
            for (int i = 0; i < TOKENS; i += LANES) {
                const Floats x = simd::load(values + i);
                most = simd::max(most, x);
                broken = simd::add(broken, simd::max(simd::zero(), simd::min(simd::all(1.0f), x)));
            }
            const float here = simd::largest(most);
            if (here > best) best = here, found = group;
        }
        if (std::isnan(simd::sum(broken)) || !std::isfinite(best)) return {best, -1};
        const float* values = logits + found * TOKENS;
        return {best, found * TOKENS + std::find(values, logits + size, best) - values};
    }

    // Fill in the weights, and each group's largest and sum; gives their total.
    double weigh(const float* logits, int size, float best, float temperature) {
        // Below e^-87 there is nothing: taken from larger weights the offset is lost in rounding.
        const Floats offset = simd::all(2e-38f), top = simd::all(best), divisor = simd::all(temperature);
        float room[TOKENS];
        double total = 0;
        for (int group = 0; group < num_groups_; group++) {
            const float* values = group_of(logits, size, group, room);
            float* weights = weights_.data() + group * TOKENS;
            Floats most = simd::zero();
            for (int i = 0; i < TOKENS; i += LANES) {
                const Floats power = simd::exp(simd::div(simd::sub(simd::load(values + i), top), divisor));
                const Floats weight = simd::max(simd::zero(), simd::sub(power, offset));
                simd::store(weights + i, weight);
                most = simd::max(most, weight);
            }
            largest_[group] = simd::largest(most);
            total += sums_[group] = sum_from(weights, 0);
        }
        return total;
    }

    // The smallest weight that top-k and then top-p keep; 0 where they keep all.
    float least_kept(int size, double total, const Drawing& drawing) {
        const bool by_mass = drawing.top_p < 1;
        const int64_t most = drawing.top_k > 0 && drawing.top_k < size ? drawing.top_k : 0;
        if (most == 0) {
            if (!by_mass) return 0;
            // All that weigh less than this come, together, to less than what top-p leaves out.
            const double little = 0.5 * (1 - drawing.top_p) * total / size;
            const int count = gather(std::max(drawing.min_p, static_cast<float>(little)));
            return border(count, INFINITY, drawing.top_p * total).weight;
        }
        float bound = by_mass ? 0.0f : drawing.min_p;
        if (most <= num_groups_) {  // so many groups have a token of this weight
            std::copy(largest_.begin(), largest_.begin() + num_groups_, gathered_.begin());
            bound = std::max(bound, border(num_groups_, static_cast<double>(most), INFINITY).weight);
        }
        const Border last = border(gather(bound), static_cast<double>(most), INFINITY);
        if (!by_mass) return last.weight;
        const int64_t equal = std::min(most - last.above.count, last.equal);
        const double goal = drawing.top_p * (last.above.mass + static_cast<double>(equal) * last.weight);
        return border(gather(last.weight), INFINITY, goal).weight;
    }

    // Weights from `bound` on, but no zeros, into `gathered_`; gives how many. A bound above 1 is taken as 1.
    int gather(float bound) {
        bound = std::min(1.0f, std::max(FIRST, bound));
        int count = 0;
        for (int group = 0; group < num_groups_; group++) {
            if (largest_[group] < bound) continue;
            const float* weights = weights_.data() + group * TOKENS;
            for (int i = 0; i < TOKENS; i++) {
                gathered_[count] = weights[i];
                count += weights[i] >= bound;
            }
        }
        return count;
    }

    // From the top of the first `count` of `gathered_`, which is lost: where so many or so much mass is reached, or the
    // smallest of them.
    Border border(int count, double goal_count, double goal_mass) {
        Bin above{0, 0};
        for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
            bins_.fill({0, 0});
            for (int i = 0; i < count; i++) {
                Bin& bin = bins_[digit(gathered_[i], shift)];
                bin.mass += gathered_[i];
                bin.count++;
            }
            uint32_t at = 0;
            Bin before = above;
            for (uint32_t i = bins_.size(); i-- > 0;) {
                if (bins_[i].count == 0) continue;
                at = i, above = before;
                before = {before.mass + bins_[i].mass, before.count + bins_[i].count};
                if (static_cast<double>(before.count) >= goal_count || before.mass >= goal_mass) break;
            }
            int inside = 0;
            for (int i = 0; i < count; i++) {
                gathered_[inside] = gathered_[i];
                inside += digit(gathered_[i], shift) == at;
            }
            count = inside;
        }
        return {gathered_[0], count, above};
    }

    static uint32_t digit(float weight, int shift) {
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return (bits >> shift) & ((1u << DIGIT) - 1);
    }

    // Each group's sum of what is kept.
    const double* kept_sums(float least) {
        for (int group = 0; group < num_groups_; group++)
            kept_[group] = largest_[group] >= least ? sum_from(weights_.data() + group * TOKENS, least) : 0;
        return kept_.data();
    }

    // The sum of those of a group's weights that are at least `least`.
    static double sum_from(const float* weights, float least) {
        const Four bound = {least, least, least, least};
        FourDoubles even = {}, odd = {};
        for (int i = 0; i < TOKENS; i += 8) {
            add_kept(even, weights + i, bound);
            add_kept(odd, weights + i + 4, bound);
        }
        even += odd;
        return (even[0] + even[1]) + (even[2] + even[3]);
    }

    static void add_kept(FourDoubles& sum, const float* weights, const Four& bound) {
        Four x;
        std::memcpy(&x, weights, sizeof x);
        const FourFlags is_kept = x >= bound;
        sum += __builtin_convertvector(reinterpret_cast<Four>(reinterpret_cast<FourFlags>(x) & is_kept), FourDoubles);
    }

    // Where the running sum of the kept passes `noise`, a share of all of it.
    int64_t pick(const double* sums, float least, double noise) const {
        double total = 0;
        for (int group = 0; group < num_groups_; group++) total += sums[group];
        // Rounding must not lift the goal to the total: the token found weighs something.
        const double goal = std::min(noise * total, std::nextafter(total, 0.0));
        int group = 0;
        double running = 0;
        while (group < num_groups_ - 1 && running + sums[group] <= goal) running += sums[group++];
        int64_t token = -1;
        for (int i = group * TOKENS; i < (group + 1) * TOKENS && (token < 0 || running <= goal); i++) {
            if (weights_[i] < least || weights_[i] <= 0) continue;
            running += weights_[i];
            token = i;
        }
        return token;
    }

    int num_groups_ = 0;
    std::vector<float> weights_, gathered_, largest_;
    std::vector<double> sums_, kept_;
    std::array<Bin, 1 << DIGIT> bins_;
};
