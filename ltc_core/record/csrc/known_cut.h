// A cut that has been made before, made again: a trace is taken apart and its program run, without a call of Python.
//
// It does what `Trace.cut`, `DeviceContext._output_buffers` and `DeviceContext._run_in_cpp` do. A program that a read
// waits for takes a few microseconds, and these would take ten times as long.
#pragma once
#include "locked.h"

#include <vector>

namespace ltc {

// What a cut found, and what its program makes of it.
struct KnownCut {
  PyObject_HEAD
  std::vector<Py_ssize_t>* alive; // numbers of the values that are alive
  std::vector<bool>* donated; // whether nobody but the trace holds an input, for each of them
  std::vector<Py_ssize_t>* slots; // positions of the inputs that the program reads
  struct Output {
    Py_ssize_t nbytes;
    Py_ssize_t taken; // position of the program's input whose memory it takes, or -1
  };
  std::vector<Output>* outputs;
  Py_ssize_t peak_bytes; // of the program, beside the buffers
  // Of a program that takes any sizes: the bytes of all values whose sizes vary, for which `peak_bytes` is enough.
  bool takes_any_size;
  Py_ssize_t largest;
  // For known_read.h: the program that a read may run, how often before Python looks again, as long as the facts are those
  // of this number; and what nobody has counted.
  PyObject* program;
  Py_ssize_t left, facts, num_runs;
  PyObject* reasons; // why a read cut -> how often: a dict, or null
  long long elapsed_ns;
};
inline PyTypeObject known_cut_type = {PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.KnownCut", sizeof(KnownCut)};

inline void free_known_cut(PyObject* self) {
  auto* known = reinterpret_cast<KnownCut*>(self);
  delete known->alive;
  delete known->donated;
  delete known->slots;
  delete known->outputs;
  Py_XDECREF(known->program);
  Py_XDECREF(known->reasons);
  Py_TYPE(self)->tp_free(self);
}

inline bool numbers_of(PyObject* tuple, std::vector<Py_ssize_t>& found) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
    found.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i)));
  return !PyErr_Occurred();
}

// known_cut(alive, donated, slots, nbytes, taken, peak_bytes, takes_any_size)
inline PyObject* known_cut(PyObject*, PyObject* given) {
  PyObject *alive, *donated, *slots, *nbytes, *taken;
  Py_ssize_t peak_bytes;
  int takes_any_size;
  if (!PyArg_ParseTuple(
          given, "O!O!O!O!O!np", &PyTuple_Type, &alive, &PyTuple_Type, &donated, &PyTuple_Type, &slots, &PyTuple_Type,
          &nbytes, &PyTuple_Type, &taken, &peak_bytes, &takes_any_size))
    return nullptr;
  Object made(PyType_GenericAlloc(&known_cut_type, 0));
  if (!made)
    return nullptr;
  auto* known = reinterpret_cast<KnownCut*>(made.get());
  known->alive = new std::vector<Py_ssize_t>();
  known->donated = new std::vector<bool>();
  known->slots = new std::vector<Py_ssize_t>();
  known->outputs = new std::vector<KnownCut::Output>();
  known->peak_bytes = peak_bytes;
  known->takes_any_size = takes_any_size;
  std::vector<Py_ssize_t> sizes, places;
  if (!numbers_of(alive, *known->alive) || !numbers_of(slots, *known->slots) || !numbers_of(nbytes, sizes) ||
      !numbers_of(taken, places))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(donated); ++i)
    known->donated->push_back(PyTuple_GET_ITEM(donated, i) == Py_True);
  for (size_t i = 0; i < sizes.size() && i < places.size(); ++i)
    known->outputs->push_back({sizes[i], places[i]});
  if (known->outputs->size() != known->alive->size()) {
    PyErr_SetString(PyExc_ValueError, "not as many outputs as values that are alive");
    return nullptr;
  }
  return made.release();
}

class CutInCpp {
 public:
  CutInCpp(const KnownCut& known, PyObject* trace, PyObject* memory) : known(known), trace(trace), memory(memory) {}

  // Whether the trace holds what it held then.
  bool is_known() const {
    PyObject *values = trace_of.values.of(trace), *inputs = trace_of.inputs.of(trace);
    if (PyList_GET_SIZE(inputs) != static_cast<Py_ssize_t>(known.donated->size()) || !has_known_sizes())
      return false;
    size_t at = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); ++i) {
      PyObject* value = PyList_GET_ITEM(values, i);
      if (value == Py_None || Py_REFCNT(value) == 1)
        continue;
      if (at == known.alive->size() || (*known.alive)[at++] != i)
        return false;
    }
    if (at != known.alive->size())
      return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
      PyObject* row = PyList_GET_ITEM(inputs, i);
      if ((Py_REFCNT(PyTuple_GET_ITEM(row, 1)) == 1) != (*known.donated)[i] || buffer_data.is_none(buffer_of(i)))
        return false;
    }
    return true;
  }

  // Whether the program has made all outputs.
  bool is_whole = false;

  // (what the program returned, its inputs, its scalars, the output buffers, the metas of values of other sizes than the
  // graph has): see `DeviceContext._cut_known`.
  PyObject* make(PyObject* program) {
    sized = Object(Py_NewRef(trace_of.sized.of(trace)));
    if (!take_inputs() || !make_buffers() || !restart())
      return nullptr;
    native_functions.count_bytes(memory, 0, known.peak_bytes);
    PyObject* const given[] = {program, data.get(), scalars.get()};
    Object found(PyObject_VectorcallMethod(name_run, given, 3, nullptr));
    if (!found) { // Python fills the buffers with it
      PyObject *type, *error, *traceback;
      PyErr_Fetch(&type, &error, &traceback);
      PyErr_NormalizeException(&type, &error, &traceback);
      Py_XDECREF(type);
      Py_XDECREF(traceback);
      found = Object(error);
    }
    const auto count = static_cast<Py_ssize_t>(known.outputs->size());
    is_whole = PyList_Check(found.get()) && PyList_GET_SIZE(found.get()) == count;
    if (is_whole)
      for (Py_ssize_t i = 0; i < count; ++i)
        native_functions.fill_buffer(PyList_GET_ITEM(buffers.get(), i), PyList_GET_ITEM(found.get(), i));
    return PyTuple_Pack(5, found.get(), data.get(), scalars.get(), buffers.get(), sized.get());
  }

 private:
  const KnownCut& known;
  PyObject *const trace, *const memory;
  Object data, scalars, buffers, sized;

  PyObject* buffer_of(Py_ssize_t input) const {
    return PyTuple_GET_ITEM(PyList_GET_ITEM(trace_of.inputs.of(trace), input), 2);
  }

  // Whether no value has another size than in the graph; or the graph takes any, and they need no more memory than before.
  bool has_known_sizes() const {
    PyObject *sized = trace_of.sized.of(trace), *inputs = trace_of.inputs.of(trace);
    if (!known.takes_any_size)
      return PyDict_GET_SIZE(sized) == 0;
    Py_ssize_t num_bytes = 0, at = 0;
    PyObject *number, *meta;
    while (PyDict_Next(sized, &at, &number, &meta))
      num_bytes += meta_of.nbytes.number(meta);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i)
      num_bytes += meta_of.nbytes.number(PyTuple_GET_ITEM(PyList_GET_ITEM(inputs, i), 3));
    return num_bytes <= known.largest;
  }

  // Bytes of an output in this run; -1 with an error set.
  Py_ssize_t bytes_of(size_t output) const {
    if (PyDict_GET_SIZE(sized.get()) > 0) {
      const Object number(PyLong_FromSsize_t((*known.alive)[output]));
      if (!number)
        return -1;
      if (PyObject* meta = PyDict_GetItemWithError(sized.get(), number.get()))
        return meta_of.nbytes.number(meta);
      if (PyErr_Occurred())
        return -1;
    }
    return (*known.outputs)[output].nbytes;
  }

  bool take_inputs() {
    data = Object(PyList_New(static_cast<Py_ssize_t>(known.slots->size())));
    scalars = Object(Py_NewRef(trace_of.scalars.of(trace)));
    if (!data)
      return false;
    Py_ssize_t at = 0;
    for (const Py_ssize_t slot : *known.slots)
      PyList_SET_ITEM(data.get(), at++, Py_NewRef(buffer_data.of(buffer_of(slot))));
    return true;
  }

  bool make_buffers() {
    buffers = Object(PyList_New(static_cast<Py_ssize_t>(known.outputs->size())));
    if (!buffers)
      return false;
    Py_ssize_t more_bytes = 0;
    for (size_t i = 0; i < known.outputs->size(); ++i) {
      const Py_ssize_t num_bytes = bytes_of(i);
      PyObject* buffer = num_bytes < 0 ? nullptr : native_functions.pending_buffer(memory, num_bytes);
      if (!buffer)
        return false;
      PyList_SET_ITEM(buffers.get(), static_cast<Py_ssize_t>(i), buffer);
      more_bytes += num_bytes;
    }
    for (size_t i = 0; i < known.outputs->size(); ++i) {
      const auto& output = (*known.outputs)[i];
      if (output.taken >= 0)
        more_bytes -= native_functions.donate_buffer(buffer_of((*known.slots)[output.taken]));
      PyObject* value = PyList_GET_ITEM(trace_of.values.of(trace), (*known.alive)[i]);
      value_of.buffer.set(value, PyList_GET_ITEM(buffers.get(), static_cast<Py_ssize_t>(i)));
    }
    native_functions.count_bytes(memory, more_bytes, 0);
    return true;
  }

  // As `Trace._restart`. What only the trace held dies, less the data that the program takes.
  bool restart() const {
    const Object epoch(PyIter_Next(epochs));
    const Object values(PyList_New(0)), inputs(PyList_New(0)), numbers(PyList_New(0));
    if (!epoch || !values || !inputs || !numbers)
      return false;
    if (PyDict_GET_SIZE(sized.get()) > 0) {
      const Object none(PyDict_New());
      if (!none)
        return false;
      trace_of.sized.set(trace, none.get());
    }
    trace_of.epoch.set(trace, epoch.get());
    trace_of.cursor.set(trace, trace_of.root.of(trace));
    trace_of.limit.set(trace, trace_of.first_limit.of(trace));
    trace_of.values.set(trace, values.get());
    trace_of.inputs.set(trace, inputs.get());
    trace_of.scalars.set(trace, numbers.get());
    return trace_of.count.set_number(trace, 0);
  }
};

// known.make(step, trace, memory, program): None if the trace is not at this step, or does not hold what it held then.
inline PyObject* make_known_cut(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "a step, a trace, a counter of memory, a program");
    return nullptr;
  }
  PyObject* trace = given[1];
  const Locked locked(trace);
  if (!locked.is_taken)
    return nullptr;
  CutInCpp cut(*reinterpret_cast<KnownCut*>(self), trace, given[2]);
  if (trace_of.cursor.of(trace) != given[0] || !cut.is_known())
    Py_RETURN_NONE;
  return cut.make(given[3]);
}

// known.note_sizes(largest, peak_bytes): the peak is that of runs whose values of varying sizes have so many bytes.
inline PyObject* note_sizes(PyObject* self, PyObject* given) {
  auto* known = reinterpret_cast<KnownCut*>(self);
  if (!PyArg_ParseTuple(given, "nn", &known->largest, &known->peak_bytes))
    return nullptr;
  Py_RETURN_NONE;
}

// known.take_runs(): (runs that reads have made since the last call, how many for each reason, their duration in
// nanoseconds).
inline PyObject* take_runs(PyObject* self, PyObject*) {
  auto* known = reinterpret_cast<KnownCut*>(self);
  PyObject* reasons = known->reasons ? std::exchange(known->reasons, nullptr) : PyDict_New();
  if (!reasons)
    return nullptr;
  PyObject* taken = Py_BuildValue("(nNL)", known->num_runs, reasons, known->elapsed_ns);
  known->num_runs = known->elapsed_ns = 0;
  return taken;
}

// Counts a run that a read has made; false after an error.
inline bool count_run(KnownCut& known, PyObject* reason, long long elapsed_ns) {
  if (!known.reasons && !(known.reasons = PyDict_New()))
    return false;
  PyObject* before = PyDict_GetItemWithError(known.reasons, reason);
  if (!before && PyErr_Occurred())
    return false;
  const Object now(PyLong_FromSsize_t(before ? PyLong_AsSsize_t(before) + 1 : 1));
  if (!now || PyDict_SetItem(known.reasons, reason, now.get()) < 0)
    return false;
  ++known.num_runs;
  known.elapsed_ns += elapsed_ns;
  return true;
}

inline PyMemberDef known_cut_members[] = {
    {"num_runs", T_PYSSIZET, offsetof(KnownCut, num_runs), READONLY, nullptr}, // since the last `take_runs`
    {nullptr, 0, 0, 0, nullptr}};
inline PyMethodDef known_cut_methods[] = {
    {"take_runs", take_runs, METH_NOARGS, nullptr},
    {"note_sizes", note_sizes, METH_VARARGS, nullptr},
    {"make", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_known_cut)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace ltc
