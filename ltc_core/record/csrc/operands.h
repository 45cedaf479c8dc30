// The arguments of one call: its operands, which are values of the trace, and its scalars.
#pragma once
#include "tensors.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

namespace ltc {

enum Kind { kRecorded, kView, kShare, kNever }; // kNever: it is not recorded, since its result depends on values
enum Code { kStatic, kTensor, kTensors, kNumber, kNumbers, kGenerator, kStaticNumber }; // `graph.op_schema.Arg`

using c10::IValue;

struct Op {
  Kind kind;
  bool draws; // from a random stream
  std::vector<int> codes; // of the arguments, in order
  std::vector<bool> writes;
  c10::OperatorHandle handle;
  bool writes_any = false;
  PyObject* schema = nullptr; // its `OpSchema`, with which its keys begin; never freed
  bool takes_number = false, commutes = false; // see `use_number`
  bool is_factory = false; // it has no operand, and makes a tensor of the device that it is given
  size_t device_at = 0; // position of that argument

  // False if the op has no argument for a device.
  bool note_factory() {
    const auto& arguments = handle.schema().arguments();
    while (device_at < arguments.size() && arguments[device_at].name() != "device")
      ++device_at;
    return is_factory = device_at < arguments.size();
  }

  void note_numbers() {
    const auto& name = handle.schema().name();
    const bool is_in_place = name.back() == '_';
    const auto plain = is_in_place ? name.substr(0, name.size() - 1) : name;
    takes_number = handle.schema().overload_name() == "Tensor" &&
        (plain == "aten::add" || plain == "aten::sub" || plain == "aten::mul" || plain == "aten::div");
    commutes = name == "aten::mul";
  }

  // Whether the call may be given the tensors that take its results: it may resize them.
  bool has_out() const {
    for (const auto& argument : handle.schema().arguments())
      if (argument.is_out())
        return true;
    return false;
  }

  // Whether the last argument says what the grad mode is for the kernel: see `graph.op_schema.runs_with_grad`.
  bool asks_grad_mode() const {
    return handle.schema().name() == "aten::mkldnn_rnn_layer";
  }

  // Whether the kernel must increment the tensors' version counters. Autograd does not for a list: it relies on the ops
  // that eager PyTorch calls for each tensor.
  bool writes_list() const {
    const auto& name = handle.schema().name();
    return name.rfind("aten::_foreach_", 0) == 0 && !writes.empty() && writes[0];
  }
};

inline bool is_number(const IValue& a) {
  return a.isDouble() || a.isInt() || a.isBool() || a.isComplexDouble();
}
// PyTorch passes a scalar as a tensor if the op has no overload that takes scalars. Python gets the scalar.
inline bool is_wrapped_number(const IValue& a) {
  return a.isTensor() && a.toTensor().defined() && a.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}
// A CPU tensor without dims is to a lazy tensor what a number is, for ops that take both: its dtype does not count. So it
// becomes one (`ops.cpu_numbers`), and nothing is uploaded. `first`: the operands of such an op.
inline void use_number(const Op& op, IValue* first) {
  const auto is_number_on_host = [](const IValue& a) {
    if (!a.isTensor() || !a.toTensor().defined())
      return false;
    const at::Tensor& t = a.toTensor();
    return t.is_cpu() && t.dim() == 0 && t.is_floating_point() && t.layout() == at::kStrided && !t.is_neg() &&
        !t.key_set().has(c10::DispatchKey::Python) && !t.unsafeGetTensorImpl()->is_wrapped_number();
  };
  const auto is_larger = [](const IValue& a) {
    return a.isTensor() && is_lazy(a.toTensor()) && a.toTensor().dim() > 0 && a.toTensor().is_floating_point();
  };
  // Of half precision, ATen rounds a first factor, and no second one.
  const bool is_turned = op.commutes && is_number_on_host(first[0]);
  if (is_turned && is_larger(first[1]) && first[1].toTensor().element_size() >= 4)
    std::swap(first[0], first[1]);
  if (is_number_on_host(first[1]) && is_larger(first[0]))
    first[1] = at::native::wrapped_scalar_tensor(first[1].toTensor().item());
}
inline PyObject* python_number(const IValue& a) {
  if (a.isDouble())
    return PyFloat_FromDouble(a.toDouble());
  if (a.isBool())
    return PyBool_FromLong(a.toBool());
  if (a.isInt())
    return PyLong_FromLongLong(a.toInt());
  const auto number = a.toComplexDouble();
  return PyComplex_FromDoubles(number.real(), number.imag());
}
// PyTorch cannot compare generators. Tensors are equal if both are undefined.
inline bool same_value(const IValue& a, const IValue& b) {
  if (a.isTensor() || b.isTensor())
    return a.isTensor() && b.isTensor() && !a.toTensor().defined() && !b.toTensor().defined();
  if (a.isNone() || b.isNone() || a.isGenerator() || b.isGenerator())
    return a.isNone() && b.isNone();
  return a == b;
}
inline bool same_type(const IValue& a, const IValue& b) {
  return a.isDouble() == b.isDouble() && a.isBool() == b.isBool() && a.isInt() == b.isInt();
}

// The handle of the first lazy tensor among values, an owned reference; null, without an error, if there is none.
inline PyObject* first_handle(c10::ArrayRef<IValue> values) {
  for (const IValue& a : values) {
    if (a.isTensor()) {
      if (PyObject* handle = handle_of(a.toTensor()))
        return handle;
    } else if (a.isList()) {
      for (const IValue& item : a.toListRef()) {
        if (PyObject* handle = item.isTensor() ? handle_of(item.toTensor()) : nullptr)
          return handle;
      }
    }
  }
  return nullptr;
}

// A value that becomes an input of the trace with this call.
struct Input {
  PyObject* value;
  PyObject* meta;
};

// The cells that a call writes, each once, in the order of the arguments.
class Written {
 public:
  // Index of a cell, which is added if it is new.
  Py_ssize_t add(PyObject* cell) {
    const auto [found, is_new] = positions.emplace(cell, static_cast<Py_ssize_t>(cells.size()));
    if (is_new)
      cells.push_back(cell); // its tensor, or the device, holds it
    return found->second;
  }
  // Index of a cell, -1 if it is not written.
  Py_ssize_t find(PyObject* cell) const {
    const auto found = positions.find(cell);
    return found == positions.end() ? -1 : found->second;
  }
  std::vector<PyObject*> cells;

 private:
  std::unordered_map<PyObject*, Py_ssize_t> positions;
};

// A call's inputs and scalars, as it is compared or noted.
class Operands {
 protected:
  Operands(const Op& op, PyObject* trace, c10::ArrayRef<IValue> args)
      : op(op), args(args), trace(trace), epoch(trace_of.epoch.number(trace)), count(trace_of.count.number(trace)) {}

  const Op& op;
  const c10::ArrayRef<IValue> args;
  PyObject* const trace;
  const Py_ssize_t epoch;
  Py_ssize_t count; // count of the trace's values so far
  c10::SmallVector<Input, 8> inputs;
  c10::SmallVector<const IValue*, 8> numbers;

  // The scalar of an argument; null if it is not one.
  const IValue* number_of(const IValue& a) {
    if (!is_wrapped_number(a))
      return is_number(a) ? &a : nullptr;
    unwrapped.emplace_back(a.toTensor().item());
    return &unwrapped.back();
  }

  // The value of a handle; null for a handle of another trace and for a stale view.
  PyObject* value_of_handle(PyObject* handle) const {
    if (is_type(handle, cell_type)) {
      PyObject* value = cell_of.value.of(handle);
      return cell_of.trace.of(handle) == trace ? value : nullptr;
    }
    PyObject* value = view_of.value.of(handle);
    const bool is_fresh = view_of.trace.of(handle) == trace && is_of_this_epoch(value) &&
        view_of.version.number(handle) == cell_of.version.number(view_of.base.of(handle));
    return is_fresh ? value : nullptr;
  }

  std::optional<Py_ssize_t> input_number(PyObject* value) const {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].value == value)
        return count + static_cast<Py_ssize_t>(i);
    }
    return std::nullopt;
  }

  bool first_read(PyObject* value, PyObject* meta) {
    if (value_of.buffer.is_none(value) || !buffer_error.is_none(value_of.buffer.of(value)))
      return false;
    inputs.push_back({value, meta});
    return true;
  }

  // The state cell of the default stream, which the op writes; null if there is none. An interrupt is left set.
  Object stream() const {
    Object cell(PyObject_CallFunctionObjArgs(find_stream, trace, Py_None, nullptr));
    if (!cell && PyErr_ExceptionMatches(PyExc_Exception))
      PyErr_Clear();
    return cell;
  }

  bool is_of_this_epoch(PyObject* value) const {
    return value_of.epoch.number(value) == epoch;
  }

 private:
  std::list<IValue> unwrapped; // scalars that came as tensors; an empty deque would allocate
};

} // namespace ltc
