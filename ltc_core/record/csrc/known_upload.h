// An upload of small memory, from the call of `to()` or `copy_()` to the tensor without a call of Python.
//
// It does what `special._copy_in` and `DeviceContext.upload` do, where the upload ends no step
// (`FoundSteps.before_upload`): the script marks its steps; or nothing has been recorded since the last cut of a script
// that trains, or since the last read, if C++ made the cut; or ops run at once, and there are no steps.
#pragma once
#include "known_read.h"

#include <ATen/core/stack.h>

namespace ltc {

struct KnownUploads {
  PyObject_HEAD
  PyObject* trace_memory; // of the device
  Variable *watched, *trains; // if not None, somebody looks at each upload; else, whether the script trains
  std::vector<Variable>* marks; // one of them is true if the script marks its steps
  // Since a counter was read: their number, bytes and time.
  Py_ssize_t num_uploads, num_bytes;
  long long elapsed_ns;

  // Whether an upload into this trace ends no step. Called under the lock of the trace.
  bool ends_no_step(PyObject* trace) const {
    if (!trace_of.at_once.is_none(trace))
      return true;
    for (const auto& mark : *marks)
      if (mark.value() == Py_True)
        return true;
    if (trace_of.count.number(trace) != 0)
      return false;
    if (trains->value() != Py_None)
      return true;
    PyObject* reads = trace_of.reads.of(trace);
    return reads && reads != Py_None && reinterpret_cast<KnownReads*>(reads)->epoch == trace_of.epoch.number(trace);
  }
};
inline PyTypeObject known_uploads_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.KnownUploads", sizeof(KnownUploads)};

inline void free_known_uploads(PyObject* self) {
  auto* uploads = reinterpret_cast<KnownUploads*>(self);
  Py_XDECREF(uploads->trace_memory);
  delete uploads->watched;
  delete uploads->trains;
  delete uploads->marks;
  Py_TYPE(self)->tp_free(self);
}

// known_uploads(memory, (dict, name) of what looks on, of what is None if nothing is trained, (those of marks, ...))
inline PyObject* known_uploads(PyObject*, PyObject* given) {
  PyObject *memory, *watched, *watched_name, *trains, *trains_name, *marks;
  if (!PyArg_ParseTuple(
          given, "O(O!U)(O!U)O!", &memory, &PyDict_Type, &watched, &watched_name, &PyDict_Type, &trains, &trains_name,
          &PyTuple_Type, &marks))
    return nullptr;
  Object made(PyType_GenericAlloc(&known_uploads_type, 0));
  if (!made)
    return nullptr;
  auto* uploads = reinterpret_cast<KnownUploads*>(made.get());
  uploads->trace_memory = Py_NewRef(memory);
  uploads->watched = new Variable(watched, watched_name);
  uploads->trains = new Variable(trains, trains_name);
  uploads->marks = new std::vector<Variable>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(marks); ++i) {
    PyObject *dict, *name;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(marks, i), "O!U", &PyDict_Type, &dict, &name))
      return nullptr;
    uploads->marks->emplace_back(dict, name);
  }
  return made.release();
}

// uploads.take_counts(): (uploads since the last call, their bytes, their nanoseconds).
inline PyObject* take_upload_counts(PyObject* self, PyObject*) {
  auto* uploads = reinterpret_cast<KnownUploads*>(self);
  PyObject* taken = Py_BuildValue("(nnL)", uploads->num_uploads, uploads->num_bytes, uploads->elapsed_ns);
  uploads->num_uploads = uploads->num_bytes = 0;
  uploads->elapsed_ns = 0;
  return taken;
}

inline PyMethodDef known_uploads_methods[] = {
    {"take_counts", take_upload_counts, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

// Replaces the value of a lazy tensor by a copy of a CPU tensor; false if the upload is Python's.
inline bool upload(const at::Tensor& destination, const at::Tensor& host) {
  if (!lock_type || c10::InferenceMode::is_enabled() || destination.is_inference())
    return false;
  const auto started_ns = now_ns();
  const Gil gil;
  const Object handle(handle_of(destination));
  if (!handle || !is_type(handle.get(), cell_type))
    return false;
  const Object trace(Py_NewRef(trace_of_handle(handle.get()))), meta(Py_NewRef(cell_of.meta.of(handle.get())));
  if (trace_of.uploads.is_none(trace.get()) || destination.sizes() != host.sizes() || !may_copy(host, meta.get()))
    return false;
  const Object object(Py_NewRef(trace_of.uploads.of(trace.get())));
  auto& uploads = *reinterpret_cast<KnownUploads*>(object.get());
  const Locked locked(trace.get());
  if (!locked.is_taken)
    throw_python_error();
  if (uploads.watched->value() != Py_None || !uploads.ends_no_step(trace.get()))
    return false;
  const at::Tensor copy = copy_of(host.const_data_ptr(), host.sizes(), host.scalar_type());
  const auto num_bytes = static_cast<Py_ssize_t>(copy.nbytes());
  const Object data(THPVariable_Wrap(copy));
  const Object buffer(data ? native_functions.ready_buffer(uploads.trace_memory, data.get(), num_bytes) : nullptr);
  const Object value(buffer ? new_value(-1, -1, buffer.get()) : nullptr);
  if (!value || !rebind(handle.get(), value.get()))
    throw_python_error();
  ++uploads.num_uploads;
  uploads.num_bytes += num_bytes;
  uploads.elapsed_ns += now_ns() - started_ns;
  return true;
}

// Calls `upload` for a call of `copy_`, whose arguments it takes from the stack if it was done.
inline bool upload_on(torch::jit::Stack& stack) {
  const auto args = torch::jit::last(stack, 3); // self, src, non_blocking
  const at::Tensor destination = args[0].toTensor();
  if (!may_handle() || !args[1].toTensor().is_cpu() || !upload(destination, args[1].toTensor()))
    return false;
  torch::jit::drop(stack, 3);
  stack.emplace_back(destination);
  return true;
}

// The kernel of `copy_` at the key of the device, where `torch.tensor` calls it.
class Upload final : public c10::OperatorKernel {
 public:
  Upload(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!upload_on(*stack))
      python.callBoxed(handle, keys, stack);
  }

 private:
  const c10::SafeKernelFunction python;
};

} // namespace ltc
