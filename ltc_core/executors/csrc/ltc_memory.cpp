// PyTorch's CPU allocator for large blocks: what a training step frees is kept for the next one.
// malloc maps every large block anew, and the page faults are a large part of a step. Told to keep memory (mallopt), it
// needs up to 2.3 times the memory: a block that posix_memalign gave is too small for the next request of its size.
// Here free memory is kept as extents, split and merged by address, and live and kept memory together never exceed
// the peak of what was live at once lately, plus a small slack: a process needs no more memory than without this.
//
// Rules of this file: the lock is held for bookkeeping and mapping only; nothing here knows Python but the module.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

#ifndef LARGE
#define LARGE (128 << 10)
#define GRAIN (16 << 10)
#define SLACK (16 << 20)
#define PART 16
#endif
constexpr size_t kLarge = LARGE; // below it malloc maps nothing
constexpr size_t kGrain = GRAIN; // of sizes, so that few slivers arise; a multiple of the page size
constexpr size_t kSlack = SLACK; // bytes kept beyond the peak, against fragmentation, and a part of the peak
constexpr size_t kSlackPart = PART;
constexpr int kWindow = 4096; // allocations after which the peak of the window before last is forgotten

class KeptMemory final : public c10::Allocator {
 public:
  static KeptMemory*& installed() {
    static KeptMemory* one = nullptr; // leaked: tensors are freed until the very end
    return one;
  }
  explicit KeptMemory(c10::Allocator* below) : below_(below) {}

  c10::DataPtr allocate(size_t size) override {
    void* data = size < kLarge ? nullptr : take((size + kGrain - 1) / kGrain * kGrain);
    if (data)
      c10::profiledCPUMemoryReporter().New(data, size);
    else
      data = below_->allocate(size).release_context(); // raises if there is no memory
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }

  // Gives what is kept back to the system.
  void release_kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    unmap(kept_);
  }
  std::array<size_t, 3> figures() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {live_, kept_, limit()};
  }
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  using Extents = std::map<char*, size_t>;

  static void release(void* context) {
    auto& self = *installed();
    auto* data = static_cast<char*>(context);
    // Ours begin at a page; of malloc's few do, and those are not among the live ones.
    const size_t size = reinterpret_cast<uintptr_t>(data) % kPage ? 0 : self.take_out(data);
    if (!size)
      return self.below_->raw_deleter()(data);
    c10::profiledCPUMemoryReporter().Delete(data); // before somebody else gets this address
    self.keep(data, size);
  }

  size_t limit() const {
    const size_t peak = std::max(peak_, last_peak_);
    return peak + peak / kSlackPart + kSlack;
  }

  char* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    note(size);
    char* data = reuse(size);
    if (!data)
      data = map(size);
    if (data) {
      blocks_[data] = size;
      live_ += size;
    }
    return data;
  }

  // Takes note that so many bytes more are about to be live.
  void note(size_t size) {
    peak_ = std::max(peak_, live_ + size);
    if (++count_ % kWindow == 0) {
      last_peak_ = std::exchange(peak_, live_ + size);
      shrink(size);
    }
  }
  void shrink(size_t size) {
    const size_t wanted = live_ + kept_ + size;
    if (wanted > limit())
      unmap(wanted - limit());
  }

  // Takes the smallest extent that is large enough.
  char* reuse(size_t size) {
    const auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end())
      return nullptr;
    const auto [have, data] = *found;
    remove(extents_.find(data));
    if (have > size)
      add(data + size, have - size);
    return data;
  }

  char* map(size_t size) {
    shrink(size);
    const auto attempt = [size] {
      return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    };
    void* data = attempt();
    if (data == MAP_FAILED && kept_) {
      unmap(kept_);
      data = attempt();
    }
    return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
  }

  // Gives so many kept bytes back, from the largest extents.
  void unmap(size_t size) {
    while (size && !by_size_.empty()) {
      const auto [have, data] = *by_size_.rbegin();
      remove(extents_.find(data));
      const size_t part = std::min(have, size);
      munmap(data + have - part, part);
      if (have > part)
        add(data, have - part);
      size -= part;
    }
  }

  // Gives the size of a block that is no longer live; 0 if it is none of ours.
  size_t take_out(char* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(data);
    if (block == blocks_.end())
      return 0;
    const size_t size = block->second;
    blocks_.erase(block);
    live_ -= size;
    return size;
  }

  void keep(char* data, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = extents_.lower_bound(data);
    if (after != extents_.end() && after->first == data + size) {
      size += after->second;
      after = remove(after);
    }
    if (after != extents_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == data) {
        data = before->first;
        size += before->second;
        remove(before);
      }
    }
    add(data, size);
  }

  void add(char* data, size_t size) {
    extents_[data] = size;
    by_size_.emplace(size, data);
    kept_ += size;
  }
  Extents::iterator remove(Extents::iterator extent) {
    by_size_.erase({extent->second, extent->first});
    kept_ -= extent->second;
    return extents_.erase(extent);
  }

  static constexpr size_t kPage = 4096;
  c10::Allocator* const below_; // PyTorch's own
  std::mutex mutex_;
  std::unordered_map<char*, size_t> blocks_; // live ones
  Extents extents_; // kept ones, none of which touch
  std::set<std::pair<size_t, char*>> by_size_; // the same
  size_t live_ = 0, kept_ = 0, peak_ = 0, last_peak_ = 0, count_ = 0;
};

// ---- the Python module ---------------------------------------------------------------------------------------------

PyObject* py_install(PyObject*, PyObject*) {
  auto& one = KeptMemory::installed();
  auto* current = c10::GetCPUAllocator();
  if (!one && current == c10::GetDefaultCPUAllocator()) { // somebody else's choice stays
    one = new KeptMemory(current);
    pthread_atfork(
        [] { KeptMemory::installed()->before_fork(); }, [] { KeptMemory::installed()->after_fork(); },
        [] { KeptMemory::installed()->after_fork(); });
    c10::SetAllocator(c10::DeviceType::CPU, one, 1);
  }
  return PyBool_FromLong(one && c10::GetCPUAllocator() == one);
}

PyObject* py_release_kept(PyObject*, PyObject*) {
  if (auto* one = KeptMemory::installed())
    one->release_kept();
  Py_RETURN_NONE;
}

PyObject* py_figures(PyObject*, PyObject*) {
  auto* one = KeptMemory::installed();
  const auto [live, kept, limit] = one ? one->figures() : std::array<size_t, 3>{};
  return Py_BuildValue("KKK", static_cast<unsigned long long>(live), static_cast<unsigned long long>(kept),
      static_cast<unsigned long long>(limit));
}

PyMethodDef methods[] = {
    {"install", py_install, METH_NOARGS, "Take over large blocks; False if another allocator is in place."},
    {"release_kept", py_release_kept, METH_NOARGS, "Give kept memory back to the system."},
    {"figures", py_figures, METH_NOARGS, "Bytes that are live, that are kept, and that both may be together."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ltc_memory", "Keep freed memory of CPU tensors.", -1, methods};

} // namespace

PyMODINIT_FUNC PyInit__ltc_memory() {
  return PyModule_Create(&module);
}
