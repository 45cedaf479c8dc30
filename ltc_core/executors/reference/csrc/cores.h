// Has threads that compute together run on cores of their own, where the kernel does not see to it.
//
// The kernel of a virtual machine may start and wake a thread on a core that another one computes on, although one is
// idle, and move it after 4 to 32 ms. The others of its team spin for so long: they wait for it.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#ifdef __linux__
#include <sched.h>
#endif

namespace ltc {

// Cores that threads have taken.
class Cores {
 public:
#ifdef __linux__
  Cores() {
    CPU_ZERO(&taken);
  }

  // Takes one for the calling thread, which moves to one that is free if it runs on one that is taken.
  // Cost: 0.1 us; 30 us if it moves.
  void take() {
    if (is_taken(sched_getcpu()))
      move();
    const int core = sched_getcpu();
    if (is_known(core))
      CPU_SET(core, &taken);
  }

 private:
  cpu_set_t taken;

  static bool is_known(int core) {
    return core >= 0 && core < CPU_SETSIZE;
  }

  bool is_taken(int core) const {
    return is_known(core) && CPU_ISSET(core, &taken);
  }

  void move() {
    cpu_set_t allowed, used, free;
    if (sched_getaffinity(0, sizeof(cpu_set_t), &allowed) != 0)
      return;
    CPU_AND(&used, &allowed, &taken);
    CPU_XOR(&free, &allowed, &used);
    if (CPU_COUNT(&free) && sched_setaffinity(0, sizeof(cpu_set_t), &free) == 0)
      sched_setaffinity(0, sizeof(cpu_set_t), &allowed); // it stays where it is
  }
#else
  void take() {}
#endif
};

// A parallel region in which each thread of a new team takes a core.
class Gathering {
 public:
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

  // Cost: what it takes to start the threads.
  static void run(Parallel parallel, int count) {
    Gathering gathering(count - 1);
    parallel(arrive, &gathering, static_cast<unsigned>(count), 0);
  }

 private:
  const std::thread::id first = std::this_thread::get_id();
  std::atomic<int> missing;
  std::mutex mutex;
  std::condition_variable all_here;
  Cores cores;
  static constexpr std::chrono::microseconds kSpin{60};
  static constexpr std::chrono::milliseconds kMost{2};

  explicit Gathering(int others) : missing(others) {
    cores.take();
  }

  static void arrive(void* given) {
    auto& gathering = *static_cast<Gathering*>(given);
    if (std::this_thread::get_id() == gathering.first)
      return gathering.await_others();
    const std::lock_guard<std::mutex> lock(gathering.mutex);
    gathering.cores.take();
    --gathering.missing;
    gathering.all_here.notify_one();
  }

  // A thread that was started on the core of this one arrives once this one sleeps.
  void await_others() {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (missing > 0)
      if (std::chrono::steady_clock::now() > end) {
        std::unique_lock<std::mutex> lock(mutex);
        all_here.wait_for(lock, kMost, [this] { return missing == 0; });
        return;
      }
  }
};

} // namespace ltc
