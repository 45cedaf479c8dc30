// How many OpenMP threads a run in the worker computes with, where it has one on each core.
//
// Recording needs a core, too. With a thread on each, one of them shares its core with the thread that records, and each
// parallel loop waits for it. So a run that shares computes with one thread less while a step is recorded, and with all
// while somebody waits for a program. Looked at before each instruction; see `executors/core_sharing.py`.
//
// Who has waited goes on once no run computes with all threads: it would take the core of one of them in the middle of an
// instruction, and the others would spin until the kernel moves it to another core (4 to 15 ms of a step of 13).
#pragma once
#include "cores.h"

namespace ltc {

struct Team {
  using Set = void (*)(int);
  using Pause = int (*)(int);
  static inline Set set_openmp = nullptr; // of the calling thread; null: nothing is shared
  static inline Set set_mkl = nullptr;
  static inline Pause pause = nullptr; // frees the threads of the calling thread's team
  static inline Gathering::Parallel parallel = nullptr; // calls a function in each thread of a team
  static inline std::chrono::milliseconds most_wait{0}; // for a core
  static inline std::chrono::nanoseconds large_op{0}; // on average: a thread less costs more than recording does

  // Of the calling thread: threads that it may compute with, 0 if it does not share, and those that it computes with.
  static inline thread_local int all = 0, now = 0;

  // A run begins that shares so many threads; 0: it ends.
  static void share(int count) {
    if (all && now != all)
      use(all);
    if (is_wide)
      narrow();
    all = set_openmp ? count : 0;
    now = count;
  }

  // Before an instruction.
  static void fit() {
    if (!all)
      return;
    if (num_waiting > 0 && !is_wide) {
      is_wide = true;
      ++num_wide; // before the next look: either it sees who goes on, or who goes on sees this
    }
    const int wanted = num_waiting > 0 ? all : all - 1;
    if (wanted != now)
      use(wanted);
    gather(now);
    if (wanted < all && is_wide)
      narrow();
  }

  static void begin_wait() {
    ++num_waiting;
  }

  static void end_waits(int count) {
    if ((num_waiting -= count) < 0)
      num_waiting = 0; // a forked child ends the parent's jobs
  }

  // Whether a thread that has waited would take a core that a run computes on.
  static bool is_crowded() {
    return num_waiting == 0 && num_wide > 0;
  }

  // Before the calling thread computes with so many threads: has each of a new team take a core.
  static void gather(int count) {
    if (count <= 1 || count == gathered || !parallel)
      return;
    gathered = count;
    Gathering::run(parallel, count);
  }

  // Frees the threads of the calling thread's team.
  static void release() {
    gathered = 0;
    if (pause)
      pause(kSoft);
  }

  // Waits until there is a core for the calling thread, but not for long: an instruction may take longer, or block.
  static void await_core() {
    std::unique_lock<std::mutex> lock(waiting->mutex);
    waiting->narrowed.wait_for(lock, most_wait, [] { return !is_crowded(); });
  }

  // In a forked child, where no other thread is.
  static void after_fork() {
    num_waiting = num_wide = 0;
    waiting = new Waiting(); // the parent's may be locked
  }

 private:
  struct Waiting {
    std::mutex mutex;
    std::condition_variable narrowed;
  };
  static inline Waiting* waiting = new Waiting();
  static inline std::atomic<int> num_waiting{0};
  static inline std::atomic<int> num_wide{0}; // runs that compute with all threads
  static inline thread_local bool is_wide = false;
  static inline thread_local int gathered = 0; // threads of the team that have a core each; 0: there may be none
  static constexpr int kSoft = 1; // omp_pause_soft

  static void narrow() {
    is_wide = false;
    {
      const std::lock_guard<std::mutex> lock(waiting->mutex);
      --num_wide;
    }
    waiting->narrowed.notify_all();
  }

  static void use(int count) {
    if (count == 1)
      release(); // a thread that has nothing to do would spin on the core of the thread that records
    set_openmp(count);
    if (set_mkl)
      set_mkl(count);
    now = count;
  }
};

} // namespace ltc
