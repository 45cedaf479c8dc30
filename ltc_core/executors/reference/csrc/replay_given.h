// What the recording thread gives to a run that has begun (replay_begun.h): Python's object of it.
#pragma once
#include "replay_arguments.h"
#include "replay_begun.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <structmember.h>

#include <memory>

namespace ltc {

// Runs `function`, whose C++ exceptions become Python's; nullptr then.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

inline PyObject* wrap(std::vector<at::Tensor> tensors) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; list && i < tensors.size(); ++i) {
    PyObject* item = THPVariable_Wrap(std::move(tensors[i]));
    if (item)
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
    else
      Py_CLEAR(list);
  }
  return list;
}

inline bool is_same_number(const c10::Scalar& a, const c10::Scalar& b) {
  if (a.type() != b.type())
    return false;
  if (a.isFloatingPoint())
    return a.toDouble() == b.toDouble();
  return a.isComplex() ? a.toComplexDouble() == b.toComplexDouble() : a.toLong() == b.toLong();
}

// Whether the tensors that were given so far are those of a list.
inline bool are_same(const std::vector<at::Tensor>& given, PyObject* list) {
  for (size_t i = 0; i < given.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    if (given[i].defined() && !(is_tensor(item) && given[i].is_same(THPVariable_Unpack(item))))
      return false;
  }
  return true;
}

// The running thread holds the run, too, in a forked child for ever.
struct BegunObject {
  // The step that is recorded.
  struct Step {
    PyObject *path, *slots, *ends; // steps of the trace; rows of the inputs; counts of values
    Py_ssize_t epoch, num_values, size, due;
  };

  PyObject_HEAD
  std::shared_ptr<Begun> begun;
  Step step;
  size_t num_inputs; // given so far
  std::vector<c10::Scalar> scalars; // given so far

  static inline PyTypeObject* type = nullptr;

  static PyObject* make(size_t num_inputs, const Step& step, std::vector<int32_t> watched, int32_t watched_at) {
    auto run = std::make_shared<Begun>(num_inputs, std::move(watched), watched_at);
    auto* made = reinterpret_cast<BegunObject*>(type->tp_alloc(type, 0));
    if (!made)
      return nullptr;
    new (&made->begun) std::shared_ptr<Begun>(std::move(run));
    new (&made->scalars) std::vector<c10::Scalar>();
    made->step = step;
    for (PyObject* held : {step.path, step.slots, step.ends})
      Py_INCREF(held);
    return reinterpret_cast<PyObject*>(made);
  }

  void dealloc() {
    for (PyObject* held : {step.path, step.slots, step.ends})
      Py_DECREF(held);
    begun.~shared_ptr();
    scalars.~vector();
  }

  // Gives what the trace holds by now. The count of values at which to give more; 0: at none, -1: the trace has left the
  // path, or an input has failed, -2: an error is set. Runs no Python, but where a buffer is of another class than ours.
  Py_ssize_t give(PyObject* cursor, Py_ssize_t epoch, Py_ssize_t count, PyObject* rows, PyObject* numbers) {
    const int is_on_path = epoch == step.epoch ? PySet_Contains(step.path, cursor) : 0;
    if (is_on_path != 1)
      return is_on_path - 1;
    std::vector<std::pair<int32_t, at::Tensor>> inputs;
    bool is_there = true; // else the step before still runs, which makes some of them
    const auto num_slots = static_cast<size_t>(PyTuple_GET_SIZE(step.slots));
    for (size_t k = num_inputs; k < num_slots; ++k) {
      const Py_ssize_t row = PyLong_AsSsize_t(PyTuple_GET_ITEM(step.slots, static_cast<Py_ssize_t>(k)));
      if (row >= PyList_GET_SIZE(rows))
        break;
      PyObject* input = row < 0 ? nullptr : PyList_GET_ITEM(rows, row);
      if (!input || !PyTuple_Check(input) || PyTuple_GET_SIZE(input) < 3) {
        PyErr_Format(PyExc_TypeError, "row %zd is none of a trace", row);
        return -2;
      }
      PyObject* buffer = PyTuple_GET_ITEM(input, 2);
      THPObjectPtr error(PyObject_GetAttr(buffer, name_error));
      THPObjectPtr data(error ? PyObject_GetAttr(buffer, name_data) : nullptr);
      if (!data)
        return -2;
      if (error.get() != Py_None)
        return -1;
      is_there &= is_tensor(data.get());
      if (is_there)
        inputs.emplace_back(static_cast<int32_t>(k), THPVariable_Unpack(data.get()));
    }
    if (is_there) {
      std::vector<c10::Scalar> more;
      for (auto i = static_cast<Py_ssize_t>(scalars.size()); i < PyList_GET_SIZE(numbers); ++i) {
        const auto number = number_of(PyList_GET_ITEM(numbers, i));
        if (!number) {
          begun->close();
          return step.due = 0;
        }
        more.push_back(*number);
      }
      if (!begun->give(inputs, more, end_at(count)))
        return step.due = 0;
      num_inputs += inputs.size();
      scalars.insert(scalars.end(), more.begin(), more.end());
    }
    const Py_ssize_t next = count + step.size;
    return step.due = next < step.num_values ? next : 0;
  }

  // The watched values, if they are there, and are those of a run with these inputs and scalars.
  std::vector<at::Tensor> outputs_of(PyObject* inputs, PyObject* numbers) const {
    const bool is_same = PyList_GET_SIZE(numbers) >= static_cast<Py_ssize_t>(scalars.size()) &&
        PyList_GET_SIZE(inputs) == static_cast<Py_ssize_t>(begun->inputs.size());
    if (!is_same)
      return {};
    for (size_t i = 0; i < scalars.size(); ++i) {
      const auto number = number_of(PyList_GET_ITEM(numbers, static_cast<Py_ssize_t>(i)));
      if (!number || !is_same_number(*number, scalars[i]))
        return {};
    }
    return are_same(begun->inputs, inputs) ? begun->take_published() : std::vector<at::Tensor>();
  }

  static inline PyObject *name_error = nullptr, *name_data = nullptr;

 private:
  // How many instructions end at this count of values or before.
  int32_t end_at(Py_ssize_t count) const {
    Py_ssize_t first = 0, last = PyList_GET_SIZE(step.ends);
    while (first < last) {
      const Py_ssize_t middle = (first + last) / 2;
      if (PyLong_AsSsize_t(PyList_GET_ITEM(step.ends, middle)) <= count)
        first = middle + 1;
      else
        last = middle;
    }
    return static_cast<int32_t>(first);
  }
};

inline PyObject* begun_give(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  auto& object = *reinterpret_cast<BegunObject*>(self);
  if (n != 6 || !PyList_Check(given[4]) || !PyList_Check(given[5])) {
    PyErr_SetString(PyExc_TypeError, "give(cursor, epoch, limit, count, inputs, scalars)");
    return nullptr;
  }
  const Py_ssize_t epoch = PyLong_AsSsize_t(given[1]), limit = PyLong_AsSsize_t(given[2]), count = PyLong_AsSsize_t(given[3]);
  if (PyErr_Occurred())
    return nullptr;
  if (limit != object.step.due)
    Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t next = object.give(given[0], epoch, count, given[4], given[5]);
    return next == -2 ? nullptr : PyLong_FromSsize_t(next);
  });
}

inline PyObject* begun_outputs(PyObject* self, PyObject* args) {
  PyObject *inputs, *numbers;
  if (!PyArg_ParseTuple(args, "O!O!:outputs", &PyList_Type, &inputs, &PyList_Type, &numbers))
    return nullptr;
  return guarded([&] { return wrap(reinterpret_cast<BegunObject*>(self)->outputs_of(inputs, numbers)); });
}

inline PyObject* begun_close(PyObject* self, PyObject*) {
  reinterpret_cast<BegunObject*>(self)->begun->close();
  Py_RETURN_NONE;
}

inline PyObject* begun_num_run(PyObject* self, PyObject*) {
  return PyLong_FromLong(reinterpret_cast<BegunObject*>(self)->begun->next);
}

inline void begun_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<BegunObject*>(self)->dealloc();
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMethodDef begun_methods[] = {
    {"give", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(begun_give)), METH_FASTCALL,
     "give(cursor, epoch, limit, count, inputs, scalars): let run what a trace holds by now. Returns the count of values "
     "at which to give more; 0: at none; -1: the run is to be dropped; None: the trace has its limit from somebody else."},
    {"outputs", begun_outputs, METH_VARARGS,
     "outputs(inputs, scalars): the watched values, if the run has computed them with these; an empty list otherwise."},
    {"num_run", begun_num_run, METH_NOARGS, "num_run(): how many instructions have run."},
    {"close", begun_close, METH_NOARGS, "close(): nothing more will be given; the thread that follows ends."},
    {nullptr, nullptr, 0, nullptr},
};
inline PyMemberDef begun_members[] = {
    {"due", T_PYSSIZET, offsetof(BegunObject, step) + offsetof(BegunObject::Step, due), 0,
     "count of values at which more is to be given; 0: at none"},
    {nullptr, 0, 0, 0, nullptr},
};
inline PyType_Slot begun_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(begun_dealloc)},
    {Py_tp_methods, begun_methods},
    {Py_tp_members, begun_members},
    {0, nullptr},
};
inline PyType_Spec begun_spec = {
    "_ltc_replay.Begun", sizeof(BegunObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, begun_slots};

} // namespace ltc
