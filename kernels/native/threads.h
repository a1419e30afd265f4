// A small pool: the caller and its helpers run the same function, meet at barriers, and claim work piece by piece.
//
// Whoever is held up by other work of the machine claims fewer pieces. A wait spins for some microseconds, which covers
// the usual case, and then sleeps: a thread that only spins would take the core from whoever it waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Threads {
  public:
    explicit Threads(int count) : count_(count) {
        try {
            for (int i = 1; i < count; i++) helpers_.emplace_back([this, i] { help(i); });
        } catch (...) {  // the system gives no more of them
            end();
            throw;
        }
    }

    ~Threads() { end(); }

    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // Run `work(thread)` on all threads; gives back when all have ended.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        if (count_ > 1) start();
        work(0);
        barrier();
    }

    // Call `piece(i)` for each i below `num_pieces`, shared among the threads; all of them come here, and leave
    // together.
    template <class Piece>
    void share(int num_pieces, Piece piece) {
        for (int i; (i = claimed_.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) piece(i);
        barrier([this] { claimed_.store(0, std::memory_order_relaxed); });
    }

    // The same for rows, several neighbours at a time where there are many: what belongs to sixteen of them may lie in
    // one cache line, and two threads that write to it take it from each other.
    template <class Row>
    void share_rows(int num_rows, Row row) {
        constexpr int RUN = 16;
        share((num_rows + RUN - 1) / RUN, [&](int piece) {
            for (int i = piece * RUN; i < std::min(num_rows, (piece + 1) * RUN); i++) row(i);
        });
    }

  private:
    static constexpr int SPINS = 1000;

    void start() {
        generation_.fetch_add(1);
        generation_.notify_all();
    }

    void end() {
        ending_ = true;
        start();
        for (auto& helper : helpers_) helper.join();
    }

    void help(int thread) {
        for (unsigned seen = 0;;) {
            wait_for_change(generation_, seen);
            seen = generation_.load(std::memory_order_acquire);
            if (ending_) return;
            (*work_)(thread);
            barrier();
        }
    }

    void barrier() {
        barrier([] {});
    }

    // The last to arrive calls `last` before the others go on.
    template <class Last>
    void barrier(Last last) {
        if (count_ == 1) return last();
        const unsigned round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            last();
            arrived_.store(0, std::memory_order_relaxed);
            // In one order with the look for sleepers that follows, or the last of them might be missed.
            round_.store(round + 1);
            round_.notify_all();
        } else {
            wait_for_change(round_, round);
        }
    }

    static void wait_for_change(const std::atomic<unsigned>& value, unsigned old) {
        for (int i = 0; i < SPINS; i++) {
            for (int look = 0; look < 32; look++)
                if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        value.wait(old, std::memory_order_acquire);
    }

    const int count_;
    std::vector<std::thread> helpers_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> ending_ = false;
    alignas(64) std::atomic<unsigned> generation_ = 0;
    alignas(64) std::atomic<unsigned> round_ = 0;
    alignas(64) std::atomic<int> arrived_ = 0;
    alignas(64) std::atomic<int> claimed_ = 0;
};
