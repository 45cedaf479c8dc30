// A read of a number or of a small tensor, whose cut has been made before: from the call of `item()` or `cpu()` to the
// result without a call of Python.
//
// It does what `special._item`, `devices.fetch`, `DeviceContext.value_data` and `DeviceContext._cut_known` do. Python says when it may, and
// what of that has to stay as it is (`runtime/known_reads.py`); what it leaves out, Python makes up for when it cuts or
// reads the next time, or when a counter is read.
#pragma once
#include "known_cut.h"
#include "operands.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

namespace ltc {

struct KnownReads {
  PyObject_HEAD
  // A variable of a module, or a setting: a read is Python's if it has changed since `resume`.
  struct Fact {
    PyObject *dict, *name, *value;
  };
  std::vector<Fact>* facts;
  Py_ssize_t facts_number; // another one after each change that `resume` has found
  PyObject *trace_memory, *failures; // of the device
  PyObject* cut; // programs whose runs nobody has counted: a list
  PyObject* last; // the program of the last read that cut
  PyObject* unfinished; // (program, what `CutInCpp::make` returned, reason): an op failed, or has to run in Python
  unsigned long thread; // that called `resume`; 0: every read is Python's
  Py_ssize_t num_reads; // since Python was last told
  Py_ssize_t num_cuts;
  long long last_ns; // when the last one ended
  // Since a counter was read: bytes, numbers and tensors that were read.
  Py_ssize_t num_bytes, num_numbers, num_tensors;
};
inline PyTypeObject known_reads_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.KnownReads", sizeof(KnownReads)};
inline PyObject* name_known_cut;

inline void free_known_reads(PyObject* self) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  if (reads->facts)
    for (const auto& fact : *reads->facts) {
      Py_DECREF(fact.dict);
      Py_DECREF(fact.name);
      Py_XDECREF(fact.value);
    }
  delete reads->facts;
  for (PyObject* each : {reads->trace_memory, reads->failures, reads->cut, reads->last, reads->unfinished})
    Py_XDECREF(each);
  Py_TYPE(self)->tp_free(self);
}

inline long long now_ns() { // the clock of `time.perf_counter_ns`
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One call of `item()` or `cpu()` on a lazy tensor.
class KnownRead {
 public:
  KnownRead(KnownReads& reads, PyObject* trace, PyObject* cell) : reads(reads), trace(trace), cell(cell) {}

  // The number; none if the read is Python's, and then an error may be set.
  std::optional<c10::Scalar> number() {
    PyObject* buffer = computed(false);
    const auto found = buffer ? number_in(buffer) : std::nullopt;
    if (!found)
      return std::nullopt;
    ++reads.num_numbers;
    note(found->second);
    return found->first;
  }

  // A copy on the CPU of a tensor of some sizes and strides; undefined if the read is Python's, and then an error may be
  // set. The GIL is held while memory is copied: larger tensors are Python's.
  at::Tensor copy(const at::Tensor& of) {
    if (!of.is_contiguous() || of.requires_grad() || of.numel() * of.element_size() > kMostBytes)
      return {};
    PyObject* buffer = computed(true);
    PyObject* data = buffer ? buffer_data.of(buffer) : nullptr;
    if (!data || !THPVariable_Check(data))
      return {};
    const at::Tensor& tensor = THPVariable_Unpack(data);
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
    if (!is_plain || !tensor.is_contiguous() || tensor.scalar_type() != of.scalar_type() || tensor.sizes() != of.sizes())
      return {};
    at::Tensor made = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type(), false, std::nullopt);
    std::memcpy(made.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    ++reads.num_tensors;
    note(static_cast<Py_ssize_t>(tensor.nbytes()));
    return made;
  }

 private:
  using Number = std::pair<c10::Scalar, Py_ssize_t>; // and its bytes
  static constexpr int64_t kMostBytes = 1 << 16;

  KnownReads& reads;
  PyObject *const trace, *const cell;

  bool may_read() const {
    if (reads.thread != PyThread_get_thread_ident() || PyObject_Size(reads.failures) != 0)
      return false;
    if (at::impl::PythonTorchFunctionTLS::stack_len() > 0)
      return false;
    for (const auto& fact : *reads.facts)
      if (PyDict_GetItem(fact.dict, fact.name) != fact.value)
        return false;
    return true;
  }

  // The buffer of the value, which is cut if it is pending; null if the read is Python's.
  PyObject* computed(bool is_copy) {
    if (!may_read())
      return nullptr;
    PyObject* value = cell_of.value.of(cell);
    if (value_of.buffer.is_none(value) && !cut(value, is_copy))
      return nullptr;
    return value_of.buffer.of(value);
  }

  void note(Py_ssize_t num_bytes) {
    ++reads.num_reads;
    reads.num_bytes += num_bytes;
    reads.last_ns = now_ns();
  }

  // Cuts what is recorded, and runs it; false if that is left to Python.
  bool cut(PyObject* value, bool is_copy) {
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
      Py_XSETREF(reads.unfinished, Py_BuildValue("(OOs)", compiled.get(), made.get(), is_copy ? "ToCpu" : "Item"));
      return false;
    }
    if (known.num_runs == 0 && PyList_Append(reads.cut, compiled.get()) < 0)
      return false;
    --known.left;
    ++known.num_runs;
    known.num_copies += is_copy;
    known.elapsed_ns += reads.last_ns - started_ns;
    ++reads.num_cuts;
    Py_XSETREF(reads.last, Py_NewRef(compiled.get()));
    return true;
  }

  // Whether it is not known that the value needs a cut: it may need little of what is recorded (`runtime/probe.py`).
  static bool needs_probe(PyObject* step, PyObject* value) {
    PyObject* probes = step_of.probes.of(step);
    if (!probes || !PyDict_Check(probes))
      return true;
    const Object index(PyLong_FromSsize_t(value_of.index.number(value)));
    return !index || PyDict_GetItem(probes, index.get()) != Py_None;
  }

  static std::optional<Number> number_in(PyObject* buffer) {
    PyObject* data = buffer_data.of(buffer);
    if (!data || !THPVariable_Check(data))
      return std::nullopt;
    const at::Tensor& tensor = THPVariable_Unpack(data);
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() != 1 || tensor.is_conj() || tensor.is_neg())
      return std::nullopt;
    const void* memory = tensor.const_data_ptr();
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return Number(static_cast<double>(*static_cast<const float*>(memory)), sizeof(float));
      case at::kDouble:
        return Number(*static_cast<const double*>(memory), sizeof(double));
      case at::kLong:
        return Number(*static_cast<const int64_t*>(memory), sizeof(int64_t));
      case at::kBool:
        return Number(*static_cast<const bool*>(memory), sizeof(bool));
      default:
        return std::nullopt;
    }
  }
};

// known_reads(memory, failures, ((dict, name), ...))
inline PyObject* known_reads(PyObject*, PyObject* given) {
  PyObject *memory, *failures, *facts;
  if (!PyArg_ParseTuple(given, "OOO!", &memory, &failures, &PyTuple_Type, &facts))
    return nullptr;
  Object made(PyType_GenericAlloc(&known_reads_type, 0));
  if (!made)
    return nullptr;
  auto* reads = reinterpret_cast<KnownReads*>(made.get());
  reads->facts = new std::vector<KnownReads::Fact>();
  reads->trace_memory = Py_NewRef(memory);
  reads->failures = Py_NewRef(failures);
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

// reads.take_counts(): (numbers and tensors that were read since the last call, their bytes, the programs that were run).
inline PyObject* take_read_counts(PyObject* self, PyObject*) {
  auto* reads = reinterpret_cast<KnownReads*>(self);
  const Object fresh(PyList_New(0));
  if (!fresh)
    return nullptr;
  const Object cut(std::exchange(reads->cut, Py_NewRef(fresh.get())));
  PyObject* taken = Py_BuildValue("(nnnO)", reads->num_numbers, reads->num_tensors, reads->num_bytes, cut.get());
  reads->num_numbers = reads->num_tensors = reads->num_bytes = 0;
  return taken;
}

inline PyMethodDef known_reads_methods[] = {
    {"resume", resume_reads, METH_NOARGS, nullptr},
    {"pause", pause_reads, METH_NOARGS, nullptr},
    {"let_run", let_reads_run, METH_VARARGS, nullptr},
    {"take_counts", take_read_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace ltc
