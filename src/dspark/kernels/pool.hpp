// Threads that run one function side by side, stage by stage: the work of a stage is handed out in small items, and a
// barrier ends it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

static inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team {
  public:
    // Fewer than asked for when the system gives no more.
    explicit Team(int asked) : asked(asked) {
        std::lock_guard<std::mutex> hold(lock); // nobody serves before the size is known
        try {
            for (int i = 1; i < asked; i++) threads.emplace_back([this, i] { serve(i); });
        } catch (const std::system_error &) {
        }
        size = (int)threads.size() + 1;
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> hold(lock);
            ending = true;
            calls++;
        }
        wake.notify_all();
        for (std::thread &thread : threads) thread.join();
    }

    // Runs job(thread) on every thread, the caller among them.
    void run(const std::function<void(int)> &job) {
        if (size > 1) {
            std::lock_guard<std::mutex> hold(lock);
            current = &job;
            calls++;
        }
        if (size > 1) wake.notify_all();
        job(0);
        barrier();
    }

    // Inside a job, on every thread: do(item) once for each item of 0..items-1, by whichever thread is free, `grain`
    // items at a time; returns when all are done.
    template <class Do> void each(int64_t items, int64_t grain, Do work) {
        if (size == 1) {
            for (int64_t item = 0; item < items; item++) work(item);
            return;
        }
        std::atomic<int64_t> &next = counters[stage_parity()];
        for (int64_t first; (first = next.fetch_add(grain)) < items;)
            for (int64_t item = first; item < first + grain && item < items; item++) work(item);
        barrier();
    }

    const int asked;
    int size = 1;

  private:
    int stage_parity() const { return phase.load(std::memory_order_acquire) & 1; }

    void barrier() {
        if (size == 1) return;
        const uint32_t now = phase.load(std::memory_order_acquire);
        if (arrived.fetch_add(1) + 1 == size) {
            counters[now & 1].store(0); // this stage's: nobody looks at it any more
            arrived.store(0);
            phase.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++)
            spins < 20000 ? pause_briefly() : std::this_thread::yield();
    }

    void serve(int index) {
        uint64_t seen = 0;
        while (true) {
            for (int spins = 0; spins < 5000 && calls.load(std::memory_order_acquire) == seen; spins++) pause_briefly();
            const std::function<void(int)> *job;
            {
                std::unique_lock<std::mutex> hold(lock);
                wake.wait(hold, [&] { return calls.load() != seen; });
                seen = calls.load();
                if (ending) return;
                job = current;
            }
            (*job)(index);
            barrier();
        }
    }

    std::vector<std::thread> threads;
    std::mutex lock;
    std::condition_variable wake;
    std::atomic<uint64_t> calls{0};
    const std::function<void(int)> *current = nullptr;
    bool ending = false;
    std::atomic<int> arrived{0};
    std::atomic<uint32_t> phase{0};
    std::atomic<int64_t> counters[2] = {};
};
