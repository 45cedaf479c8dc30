// A run that begins while its graph is recorded: the recording thread gives what it has, the running thread takes it.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ltc {

constexpr std::chrono::microseconds kFirstLook{50}, kLastLook{10000};

struct Begun {
  // Of the running thread.
  std::vector<c10::IValue> values;
  std::vector<c10::Scalar> scalars; // the first ones
  std::atomic<int32_t> next{0};     // instruction
  std::atomic<bool> is_lost{false}; // an instruction has failed: the run begins anew
  std::atomic<bool> is_running{false};

  // The recording thread fills places that the running thread does not look at yet.
  std::vector<at::Tensor> inputs;   // those given so far, by their positions

  // Set by either thread: nothing more is taken, and the rest waits for the whole run.
  std::atomic<bool> is_over{false};

  // Values that somebody waits for, and how many instructions must have run for them; no later one writes to them.
  const std::vector<int32_t> watched;
  const int32_t watched_at;

  Begun(size_t num_inputs, std::vector<int32_t> watched, int32_t watched_at)
      : inputs(num_inputs), watched(std::move(watched)), watched_at(watched_at) {}

  // In the recording thread: inputs that are there now, by their positions, further scalars, and that instructions
  // before `end` may run. False if nothing is taken.
  bool give(
      const std::vector<std::pair<int32_t, at::Tensor>>& more_inputs, const std::vector<c10::Scalar>& more_scalars,
      int32_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_over)
      return false;
    for (const auto& [position, input] : more_inputs) {
      inputs.at(position) = input;
      new_inputs.push_back(position);
    }
    new_scalars.insert(new_scalars.end(), more_scalars.begin(), more_scalars.end());
    given_until = end;
    return true;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      is_over = true;
    }
    is_closed.notify_one();
  }

  // In the running thread: the watched values are there.
  void publish(std::vector<at::Tensor> found) {
    const std::lock_guard<std::mutex> lock(mutex);
    published = std::move(found);
  }

  // In the recording thread: those values; none if they are not there yet.
  std::vector<at::Tensor> take_published() {
    const std::lock_guard<std::mutex> lock(mutex);
    return is_lost ? std::vector<at::Tensor>() : std::move(published);
  }

  // In the running thread: waits until instructions from `end` on may run, and moves `end` on; false if none ever will.
  // Leaves the positions of the inputs that have come. It looks from time to time: to be woken would cost the recording
  // thread 20 us and more, each time.
  bool take(int32_t& end, std::vector<int32_t>& positions) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto has_come = [&] { return is_over || given_until > end; };
    for (auto look = kFirstLook; !is_closed.wait_for(lock, look, has_come);)
      look = std::min(look + look / 4, kLastLook);
    positions.clear();
    positions.swap(new_inputs);
    scalars.insert(scalars.end(), new_scalars.begin(), new_scalars.end());
    new_scalars.clear();
    end = given_until;
    return !is_over;
  }

 private:
  std::mutex mutex; // held for moments, and never while a thread waits for the GIL
  std::condition_variable is_closed;
  std::vector<int32_t> new_inputs;
  std::vector<at::Tensor> published;
  std::vector<c10::Scalar> new_scalars;
  int32_t given_until = 0;
};

} // namespace ltc
