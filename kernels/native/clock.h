// Where the time of a step goes.
#pragma once

#include <chrono>

// In seconds of the calling thread, its waiting for the others included.
enum Part { GLUE, PRODUCTS, ATTENTION, HEAD, NUM_PARTS };

class Clock {
  public:
    // Args: seconds: [NUM_PARTS], added to; or null, and nothing is measured.
    explicit Clock(double* seconds) : seconds_(seconds), last_(now()) {}

    // What went since the last call of this went into `part`.
    void spent(Part part) {
        if (seconds_ == nullptr) return;
        const auto time = now();
        seconds_[part] += std::chrono::duration<double>(time - last_).count();
        last_ = time;
    }

  private:
    static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

    double* seconds_;
    std::chrono::steady_clock::time_point last_;
};
