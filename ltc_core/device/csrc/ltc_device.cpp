// The device as PyTorch's C++ sees it: N device indices, one stream each, events, generators, a pinned host allocator
// and the memory figures behind torch.accelerator. The logic is in the Python object that init() gets
// (module.DeviceHooks); this file forwards calls to it. No device tensor is allocated here.
//
// Rules of this file: Python is called only through Call (takes the GIL, throws once the interpreter is shutting down)
// and in ~LtcGenerator, and never while one of our own locks is held.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gloo_threads.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kLtc = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;
constexpr int64_t kFirstUserGenerator = 1024; // ids below are the default generators: id == device index

std::atomic<int> num_devices{0};
PyObject* hooks = nullptr; // leaked: generators may outlive the module
std::array<at::Generator, kMaxDevices>& default_generators() {
  static auto* all = new std::array<at::Generator, kMaxDevices>(); // leaked: threads read it until the process ends
  return *all;
}

bool python_is_gone() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Calls one method of the hooks object with the GIL held. A Python exception is thrown as pybind11's C++ exception,
// which PyTorch turns back into the same Python object.
struct Gil {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};
bool python_answers(const char* method) {
  TORCH_CHECK(!python_is_gone(), "the Python interpreter is shutting down: device hook ", method, " was not called");
  return true;
}
struct Call {
  const bool alive; // initialized before `gil`: the check must come before the GIL is acquired
  const Gil gil;
  PyObject* result = nullptr;
  template <typename... Args>
  Call(const char* method, const char* format, Args... args) : alive(python_answers(method)) {
    result = PyObject_CallMethod(hooks, method, format, args...);
    if (!result)
      fail();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { Py_XDECREF(result); }
  uint64_t as_uint64() {
    uint64_t value = PyLong_AsUnsignedLongLongMask(result);
    if (PyErr_Occurred())
      fail();
    return value;
  }
  template <size_t N>
  std::array<uint64_t, N> as_figures() {
    std::array<uint64_t, N> figures{};
    PyObject* items = PySequence_Tuple(result);
    if (items && PyTuple_GET_SIZE(items) != N)
      PyErr_Format(PyExc_TypeError, "device hook returned %zd figures, expected %zu", PyTuple_GET_SIZE(items), N);
    for (size_t i = 0; items && !PyErr_Occurred() && i < N; ++i)
      figures[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(items, i));
    Py_XDECREF(items);
    if (PyErr_Occurred())
      fail();
    return figures;
  }
  [[noreturn]] void fail() {
    pybind11::error_already_set error; // takes the Python error out of the interpreter
    Py_CLEAR(result);
    throw error;
  }
};

// ---- current device, streams, events -------------------------------------------------------------------------------

thread_local DeviceIndex current_index = 0;

void check_index(int index) {
  TORCH_CHECK_INDEX(
      index >= 0 && index < num_devices.load(),
      "device index ", index, " is out of range: ", num_devices.load(), " device(s), legal are 0 to ",
      num_devices.load() - 1);
}
DeviceIndex exchange_index(DeviceIndex index) {
  const auto previous = current_index;
  if (index >= 0) {
    check_index(index);
    current_index = index;
  }
  return previous;
}
DeviceIndex index_or_current(DeviceIndex index) {
  if (index < 0)
    return current_index;
  check_index(index);
  return index;
}
void synchronize(DeviceIndex index) {
  Call("synchronize", "i", static_cast<int>(index_or_current(index)));
}

// The recorder orders the work, not streams: to wait for an event is to wait for the whole device.
struct Event {
  DeviceIndex device;
  std::chrono::steady_clock::time_point recorded_at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream default_stream(DeviceIndex index) {
    return Stream(Stream::DEFAULT, Device(kLtc, index_or_current(index)));
  }
  c10::DeviceType type() const override { return kLtc; }
  Device exchangeDevice(Device d) const override { return Device(kLtc, exchange_index(d.index())); }
  Device getDevice() const override { return Device(kLtc, current_index); }
  void setDevice(Device d) const override { exchange_index(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0)
      current_index = d.index();
  }
  Stream getStream(Device d) const override { return default_stream(d.index()); }
  Stream getDefaultStream(Device d) const override { return default_stream(d.index()); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return default_stream(d.index()); }
  Stream getNewStream(Device d, int) const override { return default_stream(d.index()); }
  Stream exchangeStream(Stream s) const override { return default_stream(s.device_index()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { synchronize(s.device_index()); }
  void synchronizeDevice(const DeviceIndex index) const override { synchronize(index); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices.load()); }
#if __has_include(<c10/core/DeviceCapability.h>) // not in torch 2.9
  c10::DeviceCapability getDeviceCapability(Device) const { return {}; } // every dtype: ATen kernels run the ops
#endif
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event)
      *event = new Event();
    *static_cast<Event*>(*event) = {s.device_index(), std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event)
      synchronize(static_cast<Event*>(event)->device);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end, "both events must be recorded before elapsed_time is read");
    const std::chrono::duration<double, std::milli> ms =
        static_cast<Event*>(end)->recorded_at - static_cast<Event*>(start)->recorded_at;
    return ms.count();
  }
};

// ---- generators ----------------------------------------------------------------------------------------------------

// PyTorch calls a generator with mutex_ locked, often holding the GIL. While Python code runs, another thread may take
// the GIL and wait for the same mutex: a deadlock. So the mutex is unlocked while Python runs; the hooks have their own
// locks. A caller may come without the lock if no other thread knows the generator yet. Unlocking an ordinary mutex
// that the thread does not hold is undefined; an error-checking one (`make_checked`) returns an error.
struct Unlocked {
  pthread_mutex_t* const mutex;
  const bool was_mine;
  explicit Unlocked(std::mutex& m) : mutex(m.native_handle()), was_mine(pthread_mutex_unlock(mutex) == 0) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (was_mine)
      pthread_mutex_lock(mutex); // no deadlock: the thread that holds it now does not wait for the GIL, see above
  }
};
void make_checked(std::mutex& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
  pthread_mutex_destroy(mutex.native_handle());
  pthread_mutex_init(mutex.native_handle(), &attributes);
  pthread_mutexattr_destroy(&attributes);
}

int64_t next_generator_id() {
  static std::atomic<int64_t> next{kFirstUserGenerator};
  return next++;
}

struct LtcGenerator final : c10::GeneratorImpl {
  const int64_t id;
  LtcGenerator(DeviceIndex device, int64_t id, bool announce)
      : GeneratorImpl(Device(kLtc, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), id(id) {
    make_checked(mutex_);
    if (announce)
      Call("generator_new", "Li", static_cast<long long>(id), static_cast<int>(device));
  }
  ~LtcGenerator() override {
    if (python_is_gone())
      return;
    const Gil gil;
    PyObject *type, *value, *trace; // a destructor may run while a Python exception is set
    PyErr_Fetch(&type, &value, &trace);
    PyObject* result = PyObject_CallMethod(hooks, "generator_free", "L", static_cast<long long>(id));
    if (!result)
      PyErr_WriteUnraisable(hooks);
    Py_XDECREF(result);
    PyErr_Restore(type, value, trace);
  }
  void set_current_seed(uint64_t seed) override {
    Unlocked unlocked(mutex_);
    Call("generator_manual_seed", "LK", static_cast<long long>(id), static_cast<unsigned long long>(seed));
  }
  uint64_t current_seed() const override {
    return Call("generator_initial_seed", "L", static_cast<long long>(id)).as_uint64();
  }
  uint64_t seed() override {
    Unlocked unlocked(mutex_);
    return Call("generator_seed", "L", static_cast<long long>(id)).as_uint64();
  }
  // The offset is part of the state tensor; pickling a generator still reads and writes an offset.
  uint64_t get_offset() const override { return 0; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK_NOT_IMPLEMENTED(offset == 0, "this device keeps no separate offset: use get_state and set_state");
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Unlocked unlocked(const_cast<std::mutex&>(mutex_));
    Call call("generator_get_state", "L", static_cast<long long>(id));
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(call.result, &bytes, &size) < 0)
      call.fail();
    c10::Storage storage(c10::Storage::use_byte_size_t(), size, c10::GetCPUAllocator(), /*resizable=*/false);
    std::memcpy(storage.mutable_data(), bytes, size);
    auto state = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
    state->set_sizes_contiguous({size});
    return state;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(
        state.is_cpu() && state.has_storage() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
            state.is_contiguous(),
        "RNG state must be a contiguous torch.ByteTensor on the CPU");
    Unlocked unlocked(mutex_);
    Call("generator_set_state", "Ly#", static_cast<long long>(id), static_cast<const char*>(state.data()),
         static_cast<Py_ssize_t>(state.numel()));
  }
  LtcGenerator* clone_impl() const override {
    Unlocked unlocked(const_cast<std::mutex&>(mutex_));
    auto copy = std::make_unique<LtcGenerator>(device_.index(), next_generator_id(), true);
    Call("generator_clone", "LL", static_cast<long long>(id), static_cast<long long>(copy->id));
    return copy.release();
  }
};

// ---- memory --------------------------------------------------------------------------------------------------------

// Pinned memory is plain host memory; its address ranges are kept, so that is_pinned() is true for it.
struct PinnedAllocator final : at::HostAllocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator(); // leaked: tensors may be freed after static destructors ran
    return *allocator;
  }
  static void release(void* block) {
    auto& self = get();
    {
      std::lock_guard<std::mutex> lock(self.mutex);
      self.blocks.erase(static_cast<const char*>(block));
    }
    c10::GetCPUAllocator()->raw_deallocate(block);
  }
  at::DataPtr allocate(size_t size) override {
    void* block = size ? c10::GetCPUAllocator()->raw_allocate(size) : nullptr;
    if (block) {
      std::lock_guard<std::mutex> lock(mutex);
      blocks[static_cast<const char*>(block)] = size;
    }
    return {block, block, block ? &release : nullptr, Device(c10::DeviceType::CPU)};
  }
  bool contains(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(address);
    return after != blocks.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {} // nothing is cached
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct DeviceMemory final : c10::DeviceAllocator {
  // Device tensors are Python wrappers without storage: PyTorch allocates at most 0 bytes.
  at::DataPtr allocate(size_t size) override {
    TORCH_CHECK(
        size == 0, "a tensor of this device has no memory of its own: ", size, " bytes were asked for it from C++");
    return {nullptr, Device(kLtc, current_index)};
  }
  void copy_data(void*, const void*, std::size_t count) const override {
    TORCH_CHECK(count == 0, "a tensor of this device has no memory of its own to copy");
  }
  bool initialized() override { return num_devices.load() > 0; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { Call("empty_cache", nullptr); }
  void recordStream(const at::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const auto figures = Call("memory_stats", "i", static_cast<int>(index_or_current(device))).as_figures<4>();
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[all].current = static_cast<int64_t>(figures[0]);
      (*bytes)[all].peak = static_cast<int64_t>(figures[1]);
    }
    stats.reserved_bytes[all].current = static_cast<int64_t>(figures[2]);
    stats.reserved_bytes[all].peak = static_cast<int64_t>(figures[3]);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override { index_or_current(device); } // we keep no running totals
  void resetPeakStats(DeviceIndex device) override {
    Call("reset_peak_memory_stats", "i", static_cast<int>(index_or_current(device)));
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) { // no override: not in torch 2.9
    const auto figures = Call("memory_info", "i", static_cast<int>(index_or_current(device))).as_figures<2>();
    return {figures[0], figures[1]};
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices.load() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices.load()); }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_index(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_index(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange_index(index); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::get().contains(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generators()[index_or_current(index)];
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<LtcGenerator>(index_or_current(index), next_generator_id(), true);
  }
};

// ---- the Python module ---------------------------------------------------------------------------------------------

template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const c10::IndexError& error) {
    PyErr_SetString(PyExc_IndexError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The default generators are made before the count grows, so that no thread sees an index without its generator.
void grow(int count) {
  for (int index = num_devices.load(); index < count; ++index)
    default_generators()[index] = at::make_generator<LtcGenerator>(index, index, true);
  num_devices.store(count);
}

PyObject* py_init(PyObject*, PyObject* args) {
  int count = 0;
  PyObject* object = nullptr;
  if (!PyArg_ParseTuple(args, "iO:init", &count, &object))
    return nullptr;
  return guarded([&]() -> PyObject* {
    TORCH_CHECK(!hooks, "init() was already called in this process");
    TORCH_CHECK(!at::isPrivateUse1HooksRegistered(), "another extension already registered PrivateUse1 hooks");
    TORCH_CHECK_INDEX(count > 0 && count <= kMaxDevices, "number of devices must be 1 to ", kMaxDevices);
    Py_INCREF(object);
    hooks = object;
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    static c10::impl::DeviceGuardImplRegistrar guard(kLtc, new Guard());
    c10::SetAllocator(kLtc, new DeviceMemory());
    at::setHostAllocator(kLtc, &PinnedAllocator::get());
    // A fork while another thread holds the lock would leave it locked in the child for ever.
    pthread_atfork(
        [] { PinnedAllocator::get().mutex.lock(); },
        [] { PinnedAllocator::get().mutex.unlock(); },
        [] { PinnedAllocator::get().mutex.unlock(); });
    grow(count);
    Py_RETURN_NONE;
  });
}

PyObject* py_set_num_devices(PyObject*, PyObject* arg) {
  const long count = PyLong_AsLong(arg);
  if (count == -1 && PyErr_Occurred())
    return nullptr;
  return guarded([&]() -> PyObject* {
    TORCH_CHECK(hooks, "init() was not called yet");
    TORCH_CHECK_INDEX(
        count >= num_devices.load() && count <= kMaxDevices, "number of devices can only grow, up to ", kMaxDevices);
    grow(static_cast<int>(count));
    Py_RETURN_NONE;
  });
}

PyObject* py_device_count(PyObject*, PyObject*) { return PyLong_FromLong(num_devices.load()); }
PyObject* py_current_device(PyObject*, PyObject*) { return PyLong_FromLong(current_index); }

PyObject* py_exchange_device(PyObject*, PyObject* arg) {
  const long index = PyLong_AsLong(arg);
  if (index == -1 && PyErr_Occurred())
    return nullptr;
  return guarded([&] {
    check_index(static_cast<int>(index));
    return PyLong_FromLong(exchange_index(static_cast<DeviceIndex>(index)));
  });
}

PyObject* py_set_device(PyObject* self, PyObject* arg) {
  PyObject* previous = py_exchange_device(self, arg);
  if (!previous)
    return nullptr;
  Py_DECREF(previous);
  Py_RETURN_NONE;
}

PyObject* py_generator_id(PyObject*, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    const int is_generator = THPGenerator_Check(arg);
    if (is_generator < 0)
      return nullptr;
    auto* ours = is_generator
        ? dynamic_cast<LtcGenerator*>(reinterpret_cast<THPGenerator*>(arg)->cdata.unsafeGetGeneratorImpl())
        : nullptr;
    if (!ours)
      return PyErr_Format(PyExc_TypeError, "expected a torch.Generator of this device, got %R", arg);
    return PyLong_FromLongLong(ours->id);
  });
}

PyObject* py_default_generator(PyObject*, PyObject* arg) {
  const long index = PyLong_AsLong(arg);
  if (index == -1 && PyErr_Occurred())
    return nullptr;
  return guarded([&] {
    check_index(static_cast<int>(index));
    return THPGenerator_Wrap(default_generators()[index]);
  });
}

// Sets whether calls reach the class's __torch_dispatch__: the one part of a tensor that `t.data = other` does not set.
// The tensor is passed by address (`t._cdata`): the header that unpacks a Python tensor would triple the build time.
PyObject* py_set_python_dispatch(PyObject*, PyObject* args) {
  unsigned long long address = 0;
  int is_on = 0;
  if (!PyArg_ParseTuple(args, "Kp:set_python_dispatch", &address, &is_on))
    return nullptr;
  reinterpret_cast<c10::TensorImpl*>(static_cast<uintptr_t>(address))->set_python_dispatch(is_on);
  Py_RETURN_NONE;
}

PyObject* py_hold_gloo_threads(PyObject*, PyObject* arg) {
  const double seconds = PyFloat_AsDouble(arg);
  if (PyErr_Occurred())
    return nullptr;
  ltc::hold_gloo_threads(seconds);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"init", py_init, METH_VARARGS, "init(num_devices, hooks): register with PyTorch, once per process."},
    {"set_num_devices", py_set_num_devices, METH_O, "Let the number of devices grow."},
    {"device_count", py_device_count, METH_NOARGS, "Number of devices."},
    {"current_device", py_current_device, METH_NOARGS, "Device index of the calling thread."},
    {"set_device", py_set_device, METH_O, "Set the device index of the calling thread."},
    {"exchange_device", py_exchange_device, METH_O, "Set the device index, return the previous one."},
    {"generator_id", py_generator_id, METH_O, "Id of a torch.Generator of this device."},
    {"default_generator", py_default_generator, METH_O, "Default torch.Generator of a device index."},
    {"set_python_dispatch", py_set_python_dispatch, METH_VARARGS, "Set whether calls reach __torch_dispatch__."},
    {"hold_gloo_threads", py_hold_gloo_threads, METH_O, "Seconds for which a thread of gloo stops before it aborts."},
    {nullptr, nullptr, 0, nullptr},
};

// When DistributedDataParallel does what, by the clock of the host: here ops are recorded, and run later. Without a timer
// for the device PyTorch warns that it measures nothing.
class DistributedTimer final : public c10d::Timer {
 public:
  explicit DistributedTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    return from == c10d::kUnsetTime || to < from ? std::nullopt : std::optional(to - from);
  }
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ltc_device", "The device seen by PyTorch.", -1, methods};

} // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, kLtc, DistributedTimer)
}

PyMODINIT_FUNC PyInit__ltc_device() {
  return PyModule_Create(&module);
}
