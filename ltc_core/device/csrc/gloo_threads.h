// A thread of gloo that gets a message of another size than it waits for throws, and nobody catches it: C++ would end the
// process at once, without a word about who sent what. Once `hold_gloo_threads` was called, such a thread stops where it
// is, so that the threads that wait for the message can find out what the other process is at, and raise.
#pragma once
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

namespace ltc {

inline std::terminate_handler terminate_before = nullptr;
inline std::atomic<double> held_s{0};

inline bool is_of_gloo(const std::exception_ptr& thrown) {
  if (!thrown)
    return false;
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return std::strstr(error.what(), "gloo/transport/") != nullptr;
  } catch (...) {
    return false;
  }
}

[[noreturn]] inline void stay_or_terminate() {
  using namespace std::chrono;
  if (is_of_gloo(std::current_exception())) {
    const auto begun = steady_clock::now();
    while (duration<double>(steady_clock::now() - begun).count() < held_s)
      std::this_thread::sleep_for(milliseconds(50));
  }
  terminate_before();
  std::abort();
}

inline void hold_gloo_threads(double seconds) {
  if (held_s.exchange(seconds) == 0)
    terminate_before = std::set_terminate(stay_or_terminate);
}

} // namespace ltc
