// A read whose cut has been made before: of a number or of a small tensor, from the call of `item()` or `cpu()` to the
// result without a call of Python; for Python, of the memory of a tensor.
//
// It does what `special._item`, `devices.fetch`, `DeviceContext.value_data` and `DeviceContext._cut_known` do. Python
// says when it may, and what of that has to stay as it is (`runtime/known_reads.py`); what it leaves out, Python makes up
// for when it cuts or reads the next time, or when a counter is read.
#pragma once
#include "copied.h"
#include "known_cut.h"
#include "operands.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

namespace ltc {

struct KnownReads {
  PyObject_HEAD
  std::vector<Fact>* facts; // a read is Python's if one has changed since `resume`
  Slot probe_is_chosen, probe_least; // of the probes of runtime/probe.py
  Py_ssize_t facts_number; // another one after each change that `resume` has found
  PyObject *trace_memory, *failures, *checks; // of the device
  PyObject* cut; // programs whose runs nobody has counted: a list
  PyObject* last; // the program of the last read that cut
  PyObject* unfinished; // (program, what `CutInCpp::make` returned, reason): an op failed, or has to run in Python
  unsigned long thread; // that called `resume`; 0: every read is Python's
  Py_ssize_t num_reads; // since Python was last told
  Py_ssize_t num_cuts;
  long long last_ns; // when the last one ended
  // Since a counter was read: bytes, numbers and tensors that were read.
  Py_ssize_t num_bytes, num_numbers, num_tensors, num_checks;
  Py_ssize_t epoch; // which began when the last of these reads cut

  // Whether C++ may do in this thread what Python has let it do.
  bool may_read() const {
    if (thread != PyThread_get_thread_ident() || PyObject_Size(failures) != 0)
      return false;
    if (at::impl::PythonTorchFunctionTLS::stack_len() > 0)
      return false;
    for (const auto& fact : *facts)
      if (!fact.is_unchanged())
        return false;
    return true;
  }
};
inline PyTypeObject known_reads_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.KnownReads", sizeof(KnownReads)};
inline PyObject *name_known_cut, *name_popleft, *name_item, *name_to_cpu, *name_check;

inline void free_known_reads(PyObject* self) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  if (reads->facts)
    for (const auto& fact : *reads->facts) {
      Py_DECREF(fact.dict);
      Py_DECREF(fact.name);
      Py_XDECREF(fact.value);
    }
  delete reads->facts;
  for (PyObject* each :
       {reads->trace_memory, reads->failures, reads->checks, reads->cut, reads->last, reads->unfinished})
    Py_XDECREF(each);
  Py_TYPE(self)->tp_free(self);
}

inline long long now_ns() { // the clock of `time.perf_counter_ns`
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One read of a lazy tensor.
class KnownRead {
 public:
  KnownRead(KnownReads& reads, PyObject* trace, PyObject* handle)
      : reads(reads),
        trace(trace),
        view(is_type(handle, view_type) ? handle : nullptr),
        cell(view ? view_of.base.of(view) : handle) {}

  // The number; none if the read is Python's, and then an error may be set.
  std::optional<c10::Scalar> number() {
    const at::Tensor* data = computed(name_item);
    const auto found = data ? number_in(*data) : std::nullopt;
    if (!found)
      return std::nullopt;
    ++reads.num_numbers;
    note(found->second);
    return found->first;
  }

  // A copy on the CPU of a tensor of some sizes and strides; undefined if the read is Python's, and then an error may be
  // set. The GIL is held while memory is copied: larger tensors are Python's.
  at::Tensor copy(const at::Tensor& of) {
    const bool is_packed = of.is_contiguous() && (!view || meta_of.contiguous.of(view_of.meta.of(view)) == Py_True);
    if (!is_packed || of.requires_grad() || of.numel() * of.element_size() > kMostCopiedBytes)
      return {};
    const at::Tensor* data = computed(name_to_cpu);
    if (!data || !data->is_contiguous() || data->scalar_type() != of.scalar_type() ||
        (!view && data->sizes() != of.sizes()))
      return {};
    at::Tensor made = copy_of(first_of(*data), of.sizes(), of.scalar_type());
    ++reads.num_tensors;
    note(static_cast<Py_ssize_t>(made.nbytes()));
    return made;
  }

  // Whether the codes of an op's errors are all zero; false, too, if the read is Python's.
  bool is_sound(const at::Tensor& codes) {
    const at::Tensor* data = view ? nullptr : computed(name_check);
    if (!data || !data->is_contiguous() || data->scalar_type() != at::kInt || data->numel() != codes.numel())
      return false;
    const auto* first = static_cast<const int32_t*>(data->const_data_ptr());
    if (!std::all_of(first, first + data->numel(), [](int32_t code) { return code == 0; }))
      return false;
    ++reads.num_checks;
    note(0);
    return true;
  }

  // The memory of the cell, for Python: not to be written. Null if the read is Python's, and then an error may be set.
  PyObject* data(PyObject* reason) {
    const at::Tensor* found = computed(reason);
    if (!found)
      return nullptr;
    note(0);
    return Py_NewRef(buffer_data.of(value_of.buffer.of(cell_of.value.of(cell))));
  }

 private:
  using Number = std::pair<c10::Scalar, Py_ssize_t>; // and its bytes

  KnownReads& reads;
  PyObject* const trace;
  PyObject* const view; // null for the whole of the cell
  PyObject* const cell;

  // The memory of the cell, whose value is cut if it is pending; null if the read is Python's.
  const at::Tensor* computed(PyObject* reason) {
    if (!reads.may_read() || (view && !(has_packed_cell() && is_of_elements(view))))
      return nullptr;
    PyObject* value = cell_of.value.of(cell);
    if ((value_of.buffer.is_none(value) && !cut(value, reason)) || !look_at_checks())
      return nullptr;
    PyObject* data = buffer_data.of(value_of.buffer.of(value));
    if (!data || !THPVariable_Check(data))
      return nullptr;
    const at::Tensor& tensor = THPVariable_Unpack(data);
    if (!is_plain(tensor) || (view && !is_packed_memory(tensor)))
      return nullptr;
    return &tensor;
  }

  // As `LaterChecks.look`; false if Python has to look, because a check fails.
  bool look_at_checks() const {
    while (PyObject_Size(reads.checks) > 0) {
      const Object check(PySequence_GetItem(reads.checks, 0)); // (cell, what makes the error)
      if (!check)
        return false;
      PyObject* value = cell_of.value.of(PyTuple_GET_ITEM(check.get(), 0));
      if (value_of.buffer.is_none(value) || buffer_data.is_none(value_of.buffer.of(value)))
        return true; // not computed yet: nor are those after it
      PyObject* data = buffer_data.of(value_of.buffer.of(value));
      if (!THPVariable_Check(data) || !is_true(THPVariable_Unpack(data)))
        return false;
      const Object seen(PyObject_CallMethodNoArgs(reads.checks, name_popleft));
      if (!seen)
        return false;
    }
    return true;
  }

  static bool is_true(const at::Tensor& data) {
    return is_plain(data) && data.numel() == 1 && data.scalar_type() == at::kBool &&
        *static_cast<const bool*>(data.const_data_ptr());
  }

  bool has_packed_cell() const {
    return meta_of.contiguous.of(cell_of.meta.of(cell)) == Py_True;
  }

  // Whether the memory of the cell is as the view's meta supposes.
  bool is_packed_memory(const at::Tensor& data) const {
    PyObject* dtype = meta_of.dtype.of(view_of.meta.of(view));
    return data.is_contiguous() && data.numel() == meta_of.numel.number(cell_of.meta.of(cell)) &&
        data.scalar_type() == reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  }

  // The address of the first element that is read.
  const void* first_of(const at::Tensor& data) const {
    const auto* memory = static_cast<const char*>(data.const_data_ptr());
    if (!view)
      return memory;
    return memory + meta_of.offset.number(view_of.meta.of(view)) * static_cast<Py_ssize_t>(data.itemsize());
  }

  void note(Py_ssize_t num_bytes) {
    ++reads.num_reads;
    reads.num_bytes += num_bytes;
    reads.last_ns = now_ns();
  }

  // Cuts what is recorded, and runs it; false if that is left to Python.
  bool cut(PyObject* value, PyObject* reason) {
    PyObject* step = trace_of.cursor.of(trace);
    if (value_of.epoch.number(value) != trace_of.epoch.number(trace) || step_of.known.is_none(step) ||
        needs_probe(step, value))
      return false;
    const Object compiled(Py_NewRef(step_of.known.of(step)));
    const Object object(PyObject_GetAttr(compiled.get(), name_known_cut));
    if (!object || Py_TYPE(object.get()) != &known_cut_type)
      return false;
    auto& known = *reinterpret_cast<KnownCut*>(object.get());
    if (known.left <= 0 || known.facts != reads.facts_number)
      return false;
    CutInCpp cut(known, trace, reads.trace_memory);
    if (!cut.is_known())
      return false;
    const Object program(Py_NewRef(known.program));
    const auto started_ns = now_ns();
    const Object made(cut.make(program.get()));
    if (!made)
      return false;
    reads.last_ns = now_ns();
    if (!cut.is_whole) {
      Py_XSETREF(reads.unfinished, Py_BuildValue("(OOO)", compiled.get(), made.get(), reason));
      return false;
    }
    if (known.num_runs == 0 && PyList_Append(reads.cut, compiled.get()) < 0)
      return false;
    if (!count_run(known, reason, reads.last_ns - started_ns))
      return false;
    --known.left;
    ++reads.num_cuts;
    reads.epoch = trace_of.epoch.number(trace);
    Py_XSETREF(reads.last, Py_NewRef(compiled.get()));
    return true;
  }

  // Whether it is not known that the value needs a cut: it may need little of what is recorded (`runtime/probe.py`). The
  // script waits for its steps, else reads are Python's.
  bool needs_probe(PyObject* step, PyObject* value) const {
    PyObject* probes = step_of.probes.of(step);
    if (!probes || !PyDict_Check(probes))
      return true;
    const Object index(PyLong_FromSsize_t(value_of.index.number(value)));
    PyObject* probe = index ? PyDict_GetItem(probes, index.get()) : nullptr;
    if (!probe || probe == Py_None)
      return !probe; // nobody has looked; or it has none
    return reads.probe_is_chosen.of(probe) == Py_True ||
        reads.probe_least.number(probe) <= trace_of.count.number(trace);
  }

  std::optional<Number> number_in(const at::Tensor& tensor) const {
    const bool is_one = view ? meta_of.numel.number(view_of.meta.of(view)) == 1 : tensor.numel() == 1;
    if (!is_one)
      return std::nullopt;
    const void* memory = first_of(tensor);
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return Number(static_cast<double>(*static_cast<const float*>(memory)), sizeof(float));
      case at::kDouble:
        return Number(*static_cast<const double*>(memory), sizeof(double));
      case at::kLong:
        return Number(*static_cast<const int64_t*>(memory), sizeof(int64_t));
      case at::kInt:
        return Number(static_cast<int64_t>(*static_cast<const int32_t*>(memory)), sizeof(int32_t));
      case at::kByte:
        return Number(static_cast<int64_t>(*static_cast<const uint8_t*>(memory)), sizeof(uint8_t));
      case at::kBool:
        return Number(*static_cast<const bool*>(memory), sizeof(bool));
      case at::kBFloat16:
        return Number(static_cast<double>(*static_cast<const at::BFloat16*>(memory)), sizeof(at::BFloat16));
      case at::kHalf:
        return Number(static_cast<double>(*static_cast<const at::Half*>(memory)), sizeof(at::Half));
      default:
        return std::nullopt;
    }
  }
};

// known_reads(memory, failures, checks, ((dict, name), ...), Probe)
inline PyObject* known_reads(PyObject*, PyObject* given) {
  PyObject *memory, *failures, *checks, *facts, *probe;
  if (!PyArg_ParseTuple(given, "OOOO!O", &memory, &failures, &checks, &PyTuple_Type, &facts, &probe))
    return nullptr;
  Object made(PyType_GenericAlloc(&known_reads_type, 0));
  if (!made)
    return nullptr;
  auto* reads = reinterpret_cast<KnownReads*>(made.get());
  reads->facts = new std::vector<Fact>();
  reads->trace_memory = Py_NewRef(memory);
  reads->failures = Py_NewRef(failures);
  reads->checks = Py_NewRef(checks);
  if (!reads->probe_is_chosen.find(probe, "is_chosen") || !reads->probe_least.find(probe, "least_recorded"))
    return nullptr;
  reads->cut = PyList_New(0);
  if (!reads->cut)
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(facts); ++i) {
    PyObject *dict, *name;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(facts, i), "O!O!", &PyDict_Type, &dict, &PyUnicode_Type, &name))
      return nullptr;
    reads->facts->push_back({Py_NewRef(dict), Py_NewRef(name), nullptr});
  }
  return made.release();
}

// reads.resume(): numbers may be read without Python, in this thread, until `pause` or a fact changes.
inline PyObject* resume_reads(PyObject* self, PyObject*) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  for (auto& fact : *reads->facts) {
    PyObject* value = PyDict_GetItem(fact.dict, fact.name);
    if (value == fact.value)
      continue;
    Py_XSETREF(fact.value, Py_XNewRef(value));
    ++reads->facts_number;
  }
  reads->thread = PyThread_get_thread_ident();
  Py_RETURN_NONE;
}

// reads.let_run(known cut, program, count): reads may make this cut and run the program, so many times until Python looks
// again, and as long as no fact changes.
inline PyObject* let_reads_run(PyObject* self, PyObject* given) {
  PyObject *cut, *program;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(given, "O!On", &known_cut_type, &cut, &program, &count))
    return nullptr;
  auto* known = reinterpret_cast<KnownCut*>(cut);
  known->left = count;
  known->facts = reinterpret_cast<KnownReads*>(self)->facts_number;
  Py_XSETREF(known->program, Py_NewRef(program));
  Py_RETURN_NONE;
}

// reads.pause(): (cuts since the last call, when the last read ended, the program of the last cut, what is unfinished).
// None if there were no reads.
inline PyObject* pause_reads(PyObject* self, PyObject*) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  reads->thread = 0;
  if (reads->num_reads == 0 && reads->num_cuts == 0 && !reads->unfinished)
    Py_RETURN_NONE;
  const Object last(reads->last ? std::exchange(reads->last, nullptr) : Py_NewRef(Py_None));
  const Object unfinished(reads->unfinished ? std::exchange(reads->unfinished, nullptr) : Py_NewRef(Py_None));
  PyObject* told =
      Py_BuildValue("(nLOO)", reads->num_cuts, reads->last_ns, last.get(), unfinished.get());
  reads->num_reads = reads->num_cuts = 0;
  return told;
}

// reads.take_counts(): (numbers, tensors and codes of errors that were read since the last call, the bytes of the first two,
// the programs that were run).
inline PyObject* take_read_counts(PyObject* self, PyObject*) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  const Object fresh(PyList_New(0));
  if (!fresh)
    return nullptr;
  const Object cut(std::exchange(reads->cut, Py_NewRef(fresh.get())));
  PyObject* taken =
      Py_BuildValue("(nnnnO)", reads->num_numbers, reads->num_tensors, reads->num_checks, reads->num_bytes, cut.get());
  reads->num_numbers = reads->num_tensors = reads->num_checks = reads->num_bytes = 0;
  return taken;
}

// reads.data(cell, reason): the memory of a cell, not to be written; None if the read is Python's.
inline PyObject* read_data(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  if (count != 2 || !is_type(given[0], cell_type)) {
    PyErr_SetString(PyExc_TypeError, "a cell and a reason");
    return nullptr;
  }
  if (!reads->thread)
    Py_RETURN_NONE;
  PyObject* trace = cell_of.trace.of(given[0]);
  const Locked locked(trace);
  PyObject* data = locked.is_taken ? KnownRead(*reads, trace, given[0]).data(given[1]) : nullptr;
  return data || PyErr_Occurred() ? data : Py_NewRef(Py_None);
}

inline PyMethodDef known_reads_methods[] = {
    {"data", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(read_data)), METH_FASTCALL, nullptr},
    {"resume", resume_reads, METH_NOARGS, nullptr},
    {"pause", pause_reads, METH_NOARGS, nullptr},
    {"let_run", let_reads_run, METH_VARARGS, nullptr},
    {"take_counts", take_read_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace ltc
