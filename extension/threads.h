// Threads that share loops: torch's own, by OpenMP, or a pool where the compiler lacks that (Apple's).
//
// `in_parallel(n, body)` runs body on up to n threads at once. All of them call the same `share`s in
// the same order, and each of these divides its loop among those that are there. A thread that comes
// late finds loops ended, and passes over them. Another program may keep a thread from running, so
// no loop waits for one that has taken nothing, only the end of the region does. (OpenMP's own loops
// wait for all threads, and with a busy core most of a step was waiting.) So beside its loops, a body may
// only compute what is the same in every thread. A region within a region is the same one.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

struct Waiting {  // spins, then gives way to other threads
    int64_t times = 0;
    void operator()() {
        if (++times > 1000) return std::this_thread::yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};

// Without OpenMP: calls `work` in n threads, of which one is the caller's.
class Pool {
    std::mutex lock;
    std::condition_variable changed;
    const std::function<void()>* work = nullptr;
    int workers = 0, wanted = 0, running = 0;  // threads that wait or work; that may still begin; that work

    void worker() {
        for (std::unique_lock<std::mutex> held(lock);;) {
            changed.wait(held, [&] { return wanted > 0; });
            wanted--, running++;
            held.unlock();
            (*work)();
            held.lock();
            if (--running == 0) changed.notify_all();
        }
    }

  public:
    void run(int threads, const std::function<void()>& f) {
        std::unique_lock<std::mutex> held(lock);
        try {
            for (; workers < threads - 1; workers++) std::thread(&Pool::worker, this).detach();
        } catch (const std::system_error&) {}  // the system gives no more of them
        wanted = threads - 1, work = &f;
        held.unlock();
        changed.notify_all();
        f();
        held.lock();
        wanted = 0;  // who comes late has nothing to do
        changed.wait(held, [&] { return running == 0; });
    }
};

// The threads of a region, and its loops.
class Team {
    // of the newest loop: its number in the upper half, items in the lower one
    alignas(64) std::atomic<uint64_t> taken{0};
    alignas(64) std::atomic<uint64_t> done{0};
    uint32_t first_loop = 0;  // of the region
    std::mutex busy;
    Pool pool;

    static uint64_t start_of(uint32_t loop) { return (uint64_t)loop << 32; }
    static int32_t ahead(uint64_t word, uint32_t loop) { return (int32_t)((uint32_t)(word >> 32) - loop); }

  public:
    struct Place {
        Team* team = nullptr;
        int threads = 1;
        uint32_t loop = 0;  // the last one
    };
    static Place& here() {
        static thread_local Place place;
        return place;
    }

    // Whether the region ran: another caller may have the team.
    bool run(int threads, const std::function<void()>& body) {
        std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
        if (!lock) return false;
        const uint32_t start = first_loop;
        std::atomic<uint32_t> end{start};
        auto work = [&] {
            here() = {this, threads, start};
            body();
            end = here().loop;
            here() = {};
        };
#if defined(_OPENMP)
        #pragma omp parallel num_threads(threads)
        work();
#else
        pool.run(threads, work);
#endif
        first_loop = end;
        return true;
    }

    // Items 0 to n - 1 of this thread's next loop, `chunk` at a time.
    template <typename F>
    void share(int64_t n, int64_t chunk, Place& place, F f) {
        const uint32_t loop = ++place.loop;
        uint64_t now = taken;
        if (ahead(now, loop) < 0) {  // the first to come
            uint64_t before = done;
            if (ahead(before, loop) < 0) done.compare_exchange_strong(before, start_of(loop));
            taken.compare_exchange_strong(now, start_of(loop));
        }
        for (now = taken; ahead(now, loop) == 0 && (int64_t)(uint32_t)now < n;) {
            const int64_t first = (uint32_t)now, last = std::min(first + chunk, n);
            if (!taken.compare_exchange_weak(now, start_of(loop) + last)) continue;
            for (int64_t i = first; i < last; i++) f(i);
            done += last - first;
            now = taken;
        }
        for (Waiting wait;; wait()) {
            uint64_t so_far = done;
            if (ahead(so_far, loop) > 0 || (int64_t)(uint32_t)so_far == n) return;
        }
    }
};

static void in_parallel(int64_t threads, const std::function<void()>& body) {
    static Team& team = *new Team;  // never deleted: its threads are not joined
    static std::atomic<bool> forked{false};  // into a process without them
    static const int noticed = pthread_atfork(nullptr, nullptr, [] { forked = true; });
    (void)noticed;
    if (threads <= 1 || forked || Team::here().team || !team.run(threads, body)) body();
}

static int64_t threads_here() { return Team::here().threads; }

// f(i) for i < n, `chunk` of them in a row by the same thread. No thread returns before all are done.
template <typename F>
static void share(int64_t n, int64_t chunk, F f) {
    if (n <= 0) return;
    Team::Place& place = Team::here();
    if (place.team) return place.team->share(n, chunk, place, f);
    for (int64_t i = 0; i < n; i++) f(i);
}

// The same in as few pieces as there are threads.
template <typename F>
static void share(int64_t n, F f) {
    share(n, (n + threads_here() - 1) / threads_here(), f);
}

// A region that is one loop.
template <typename F>
static void for_each(int64_t threads, int64_t n, int64_t chunk, F f) {
    in_parallel(threads, [&] { share(n, chunk, f); });
}
