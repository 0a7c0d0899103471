// A few threads that run one job together, a phase at a time. Work is taken piece by piece from a counter, and a phase
// ends when its pieces are done, not when every thread has arrived: a thread that is late, or asleep, delays nobody.
// Waiting spins for some tens of microseconds and then sleeps in the kernel, so an idle pool costs no CPU.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <memory>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

constexpr auto SPIN = std::chrono::microseconds(40);

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `done()` holds, or the time is up. Returns done().
template <class Done>
static bool spin(Done done) {
    auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

static inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::yield();
#endif
}

static inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

struct alignas(64) Phase {
    std::atomic<uint32_t> next{0};
    char apart[60];
    std::atomic<uint32_t> done{0};
    std::atomic<uint32_t> sleepers{0};
};

class Pool {
   public:
    explicit Pool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
        try {
            for (int id = 1; id < num_threads_; ++id) threads_.emplace_back([this, id] { work(id); });
        } catch (...) {  // the system has no more threads
            end();
            throw;
        }
    }

    ~Pool() { end(); }

    int num_threads() const { return num_threads_; }

    // Run job(thread id) on this thread, and on each of the others that is awake in time. A job has `num_phases` phases.
    template <class Job>
    void run(int num_phases, Job& job) {
        if (num_threads_ == 1) {
            job(0);
            return;
        }
        if (num_phases > num_phases_) {
            phases_.reset(new Phase[num_phases]);
            num_phases_ = num_phases;
        }
        for (int i = 0; i < num_phases; ++i) {
            phases_[i].next.store(0, std::memory_order_relaxed);
            phases_[i].done.store(0, std::memory_order_relaxed);
        }
        job_ = [](void* what, int id) { (*static_cast<Job*>(what))(id); };
        what_ = &job;
        epoch_.fetch_add(1);  // odd: open
        if (asleep_.load()) wake_all(epoch_);
        job(0);
        epoch_.fetch_add(1);  // even: closed to threads that come later
        while (inside_.load()) relax();
    }

    // Every thread of a job calls this with the same arguments. piece(i) for i in 0..count, each by one thread.
    template <class Piece>
    void phase(int index, int count, Piece piece) {
        if (num_threads_ == 1) {
            for (int i = 0; i < count; ++i) piece(i);
            return;
        }
        Phase& p = phases_[index];
        uint32_t total = static_cast<uint32_t>(count), mine = 0, i;
        while ((i = p.next.fetch_add(1, std::memory_order_relaxed)) < total) {
            piece(static_cast<int>(i));
            ++mine;
        }
        if (mine && p.done.fetch_add(mine) + mine == total) {
            if (p.sleepers.load()) wake_all(p.done);
            return;
        }
        if (spin([&] { return p.done.load(std::memory_order_acquire) == total; })) return;
        p.sleepers.fetch_add(1);
        for (uint32_t seen; (seen = p.done.load()) != total;) sleep_while(p.done, seen);
        p.sleepers.fetch_sub(1);
    }

   private:
    void end() {
        stop_ = true;
        epoch_.fetch_add(2);
        wake_all(epoch_);
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

    void work(int id) {
        uint32_t last = 0;
        while (true) {
            auto called = [&] {
                uint32_t now = epoch_.load(std::memory_order_acquire);
                return stop_.load() || (now != last && (now & 1));
            };
            if (!spin(called)) {
                asleep_.fetch_add(1);
                while (!called()) {
                    uint32_t now = epoch_.load();
                    if (!called()) sleep_while(epoch_, now);
                }
                asleep_.fetch_sub(1);
            }
            if (stop_.load()) return;
            inside_.fetch_add(1);
            uint32_t now = epoch_.load();
            if ((now & 1) && now != last) {
                job_(what_, id);
                last = now;
            }
            inside_.fetch_sub(1);
        }
    }

    const int num_threads_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Phase[]> phases_;
    int num_phases_ = 0;
    void (*job_)(void*, int) = nullptr;
    void* what_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    std::atomic<uint32_t> asleep_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace outrider
