// The lock of a trace, held by C++ while it changes the trace; no garbage is collected meanwhile.
#pragma once
#include "objects.h"

#include <optional>

namespace ltc {

// Pauses garbage collection while C++ records, as ltc_core/uninterrupted.py does for Python: a finalizer may record ops
// itself. `calls` has an item for each call of Python's that is under way, in any thread. Without one, a flag will do.
class Pause {
 public:
  Pause() {
    if (PyList_GET_SIZE(calls) == 0 && !is_flagged && PyGC_IsEnabled()) {
      PyGC_Disable();
      is_flagged = is_ours = true;
    } else {
      is_noted = PyList_Append(calls, Py_None) == 0;
      if (is_noted && PyGC_Disable() && PyList_Append(paused, Py_None) < 0)
        PyGC_Enable();
      PyErr_Clear(); // no memory for the note: collection stays on
    }
  }
  ~Pause() {
    const ErrorAside aside;
    if (is_ours) {
      is_flagged = false;
      // A call that another thread has begun meanwhile turns collection on again.
      if (PyList_GET_SIZE(calls) > 0 && PyList_Append(paused, Py_None) == 0)
        return;
      PyGC_Enable();
      return;
    }
    const Py_ssize_t num_calls = PyList_GET_SIZE(calls);
    if (is_noted && num_calls > 0)
      PyList_SetSlice(calls, num_calls - 1, num_calls, nullptr);
    if (PyList_GET_SIZE(calls) == 0 && PyList_GET_SIZE(paused) > 0) {
      PyList_SetSlice(paused, 0, PyList_GET_SIZE(paused), nullptr);
      if (!is_flagged)
        PyGC_Enable();
    }
  }

  // In a forked child: the call was another thread's, which is not in this process.
  static void after_fork() {
    if (is_flagged)
      PyGC_Enable();
    is_flagged = false;
  }

 private:
  inline static bool is_flagged = false; // a call in C++ has turned collection off, without an item of `calls`
  bool is_ours = false, is_noted = false;
};

// Holds the trace's lock; `is_taken` is false, with an error set, if that failed. No garbage is collected meanwhile.
class Locked {
 public:
  explicit Locked(PyObject* trace) : lock(Py_NewRef(trace_of.lock.of(trace))) {
    if (is_type(lock.get(), lock_type)) {
      is_taken = native_functions.take(lock.get()); // may wait, without the GIL
    } else {
      const Object taken(PyObject_CallMethodNoArgs(lock.get(), name_acquire));
      is_taken = static_cast<bool>(taken);
    }
    if (is_taken)
      pause.emplace();
  }
  ~Locked() {
    if (!is_taken)
      return;
    pause.reset();
    if (is_type(lock.get(), lock_type)) {
      native_functions.give(lock.get());
      return;
    }
    const ErrorAside aside;
    const Object released(PyObject_CallMethodNoArgs(lock.get(), name_release));
    if (!released)
      PyErr_WriteUnraisable(lock.get());
  }
  bool is_taken;

 private:
  const Object lock;
  std::optional<Pause> pause;
};

} // namespace ltc
