// How many OpenMP threads a run in the worker computes with, where it has one on each core.
//
// Recording needs a core, too. With a thread on each, one of them shares its core with the thread that records, and each
// parallel loop waits for it. So a run that shares computes with one thread less while a step is recorded, and with all
// while somebody waits for a program. Looked at before each instruction; see `executors/core_sharing.py`.
#pragma once
#include <atomic>

namespace ltc {

struct Team {
  using Set = void (*)(int);
  using Pause = int (*)(int);
  static inline Set set_openmp = nullptr; // of the calling thread; null: nothing is shared
  static inline Set set_mkl = nullptr;
  static inline Pause pause = nullptr; // frees the threads of the calling thread's team
  static inline std::atomic<int> num_waiting{0};

  // Of the calling thread: threads that it may compute with, 0 if it does not share, and those that it computes with.
  static inline thread_local int all = 0, now = 0;

  static void share(int count) {
    if (all && now != all)
      use(all);
    all = set_openmp ? count : 0;
    now = count;
  }

  static void fit() {
    if (!all)
      return;
    const int wanted = num_waiting.load(std::memory_order_relaxed) > 0 ? all : all - 1;
    if (wanted != now)
      use(wanted);
  }

private:
  static void use(int count) {
    constexpr int kSoft = 1;
    if (count == 1 && pause)
      pause(kSoft); // a thread that has nothing to do would spin on the core of the thread that records
    set_openmp(count);
    if (set_mkl)
      set_mkl(count);
    now = count;
  }
};

} // namespace ltc
