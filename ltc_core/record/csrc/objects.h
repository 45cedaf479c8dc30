// Python objects of the recording (`Trace`, `Step`, `Cell`, ...), read and written through their slots.
//
// Callers hold the GIL. A function that makes something returns null or false after an error, and the Python error is
// set. Other functions set no error. No object is shared with a thread that does not hold the GIL.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <atomic>
#include <utility>

namespace ltc {

// An owned reference.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object(owned) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  Object(Object&& other) noexcept : object(other.release()) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Object() { Py_XDECREF(object); }
  PyObject* get() const { return object; }
  PyObject* release() {
    PyObject* owned = object;
    object = nullptr;
    return owned;
  }
  explicit operator bool() const { return object != nullptr; }

 private:
  PyObject* object = nullptr;
};

// The place of an attribute in the objects of a Python class; the attribute is in the class's __slots__.
class Slot {
 public:
  bool find(PyObject* type, const char* name) {
    const Object member(PyObject_GetAttrString(type, name));
    if (!member)
      return false;
    if (!Py_IS_TYPE(member.get(), &PyMemberDescr_Type)) {
      PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
      return false;
    }
    const PyMemberDef* found = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member;
    offset = found->offset;
    is_native = found->type == T_PYSSIZET;
    return true;
  }
  // Borrowed; null if the attribute is not set.
  PyObject* of(PyObject* object) const { return place(object); }
  bool is_none(PyObject* object) const { return !place(object) || place(object) == Py_None; }
  void set(PyObject* object, PyObject* value) const {
    PyObject* old = place(object);
    place(object) = Py_NewRef(value);
    Py_XDECREF(old);
  }
  // A number is a Python object in a class of Python's, a C integer in one of tensor/csrc/ltc_objects.cpp.
  Py_ssize_t number(PyObject* object) const {
    return is_native ? native_place(object) : PyLong_AsSsize_t(place(object));
  }
  bool set_number(PyObject* object, Py_ssize_t value) const {
    if (is_native) {
      native_place(object) = value;
      return true;
    }
    const Object number(PyLong_FromSsize_t(value));
    if (!number)
      return false;
    set(object, number.get());
    return true;
  }

 private:
  PyObject*& place(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
  Py_ssize_t& native_place(PyObject* object) const {
    return *reinterpret_cast<Py_ssize_t*>(reinterpret_cast<char*>(object) + offset);
  }
  Py_ssize_t offset = 0;
  bool is_native = false;
};

inline struct {
  Slot lock, epoch, cursor, count, limit, values, inputs, scalars, sized, device, root, first_limit, steps, reads,
      uploads, give_more, at_once;
} trace_of;
inline struct {
  Slot parent, next, next_key, children, node, inputs, end, num_scalars, lenses, expected, dynamic, patterns, programs,
      known, probes;
} step_of;
inline struct {
  Slot known, infer, places, closed;
} dynamic_of;
inline struct {
  Slot outs, lenses, uses;
} entry_of;
inline struct {
  Slot op, args, kwargs, first, outs, writes, view, result, line, uses_default_dtype, module, reads;
} node_of;
inline struct {
  Slot trace, value, meta, version;
} cell_of;
inline struct {
  Slot base, lens, meta, trace, value, version;
} view_of;
inline struct {
  Slot buffer, epoch, index;
} value_of;
inline struct {
  Slot size, stride, offset, dtype, maker, contiguous, numel, nbytes;
} meta_of;
inline Slot buffer_error, buffer_data;

inline PyObject *lazy_tensor, *cell_type, *view_type, *value_type, *buffer_type; // set by `setup`, never released
inline PyObject *name_acquire, *name_release, *name_handle, *name_rewind;
inline PyObject* name_run;
inline PyObject *step_type, *node_type, *ref_type, *scalar_type; // likewise
inline PyObject *any_meta, *any_size; // `AnyMeta`, `ANY` of dynamic_shapes.py
inline PyObject *detach, *python_dispatch; // the op; the Python function that `dispatch` replaces
inline std::atomic<bool> is_on = true; // also read without the GIL
inline bool records = true; // else C++ runs ops at once (at_once.h), or leaves them to Python
inline Py_ssize_t num_called = 0, num_followed = 0, num_ran = 0; // calls of ops: all, those that C++ recorded, or ran
inline Py_ssize_t often; // `OFTEN` of dynamic_steps.py: Python decides whether such a call gets an exact way
inline PyObject* make_empty; // (meta, device) -> a lazy tensor without a handle
inline PyObject* empty_op; // (empty_op, meta) is the key of the step for memory that nobody wrote yet
inline PyObject *calls, *paused; // lists of ltc_core/uninterrupted.py
inline PyObject* lock_type = nullptr; // of tensor/csrc/ltc_objects.cpp
inline struct { // of the same file; set where `lock_type` is
  bool (*take)(PyObject* lock);
  void (*give)(PyObject* lock);
  PyObject* (*pending_buffer)(PyObject* memory, Py_ssize_t nbytes);
  void (*fill_buffer)(PyObject* buffer, PyObject* data);
  Py_ssize_t (*donate_buffer)(PyObject* buffer);
  void (*count_bytes)(PyObject* memory, Py_ssize_t nbytes, Py_ssize_t beside);
  PyObject* (*ready_buffer)(PyObject* memory, PyObject* data, Py_ssize_t nbytes);
} native_functions;
inline PyObject* epochs; // an iterator over the numbers of traces
inline PyObject* find_stream; // (trace, generator) -> the cell of a random stream
inline PyObject *user_codes, *described_lines, *backward_code; // `_is_user`, `_described`, `_RUN_BACKWARD` of source.py
inline PyObject* words_in_backward; // `IN_BACKWARD` there
inline PyObject* modules; // record/modules.py

inline bool is_type(PyObject* object, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type;
}
inline PyObject* new_object(PyObject* type) {
  return PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
}
// Whether two objects are equal; false if the comparison raises.
inline bool equal(PyObject* a, PyObject* b) {
  const int answer = PyObject_RichCompareBool(a, b, Py_EQ);
  if (answer < 0)
    PyErr_Clear();
  return answer > 0;
}
// An attribute of a Python object or module with a dict, read each time it is needed.
class Variable {
 public:
  Variable(PyObject* dict, PyObject* name) : dict(Py_NewRef(dict)), name(Py_NewRef(name)) {}
  // Borrowed; None if there is no such attribute.
  PyObject* value() const {
    PyObject* found = PyDict_GetItem(dict.get(), name.get());
    return found ? found : Py_None;
  }

 private:
  Object dict, name;
};
// A variable of a module, or a setting, and what it was at some time. Holds the objects.
struct Fact {
  PyObject *dict, *name, *value;
  bool is_unchanged() const { return PyDict_GetItem(dict, name) == value; }
};
struct Gil {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};
// Saves the current Python error, and restores it at the end.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type, &value, &traceback); }
  ~ErrorAside() { PyErr_Restore(type, value, traceback); }

 private:
  PyObject *type, *value, *traceback;
};

} // namespace ltc
