// Memory that nobody has written, without Python: the kernels of `empty_like` and its kin at the dispatcher's key for
// Python, and of `empty` and `empty_strided` at that of the device.
#pragma once
#include "operands.h"

#include <c10/core/DefaultDtype.h>

#include <map>

namespace ltc {

// Whether C++ may handle a call with this first operand in Python's place: a lazy tensor, and nobody else looks.
inline bool is_ours(const IValue& x) {
  return may_handle() && !c10::InferenceMode::is_enabled() && is_lazy(x.toTensor()) && !x.toTensor().is_inference();
}

// `_uninitialised` of ops/special.py, `_empty` and `_empty_strided` of ops/factories.py, for calls whose meta Python has found.
class Unwritten final : public c10::OperatorKernel {
 public:
  Unwritten(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {
    for (const auto& argument : op.schema().arguments())
      names.push_back(argument.name());
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, names.size());
    Key key;
    if (!may_take(args) || !read(args, key))
      return python.callBoxed(op, keys, stack);
    {
      const Gil gil;
      const Object handle(has_operand() ? handle_of(args[0].toTensor()) : nullptr);
      if (handle)
        key.first = is_type(handle.get(), cell_type) ? cell_of.meta.of(handle.get()) : view_of.meta.of(handle.get());
      const Object trace(Py_XNewRef(handle ? trace_of_handle(handle.get()) : trace_of_device(device_in(args))));
      at::Tensor made = trace ? again(key, trace.get()) : at::Tensor();
      if (made.defined()) {
        torch::jit::drop(*stack, names.size());
        stack->emplace_back(std::move(made));
        return;
      }
      Py_XINCREF(key.first);
    }
    python.callBoxed(op, keys, stack);
    const Gil gil;
    const Object of_operand(key.first);
    note(key, stack->back().toTensor());
  }

 private:
  // The operand's meta (of equal metas there is one object), the dtype, and what else is given: sizes, strides.
  using Key = std::pair<PyObject*, std::vector<int64_t>>;
  static constexpr size_t kMost = 10'000;
  const c10::SafeKernelFunction python;
  std::vector<std::string> names; // of the arguments
  // The meta that Python found. Read and changed under the GIL; holds both metas.
  std::map<Key, PyObject*>& found = *new std::map<Key, PyObject*>(); // leaked: kernels outlive the interpreter

  bool has_operand() const {
    return names[0] == "self";
  }
  bool may_take(c10::ArrayRef<IValue> args) const {
    return has_operand() ? is_ours(args[0]) : may_handle() && !c10::InferenceMode::is_enabled();
  }
  IValue device_in(c10::ArrayRef<IValue> args) const {
    for (size_t i = 0; i < args.size(); ++i)
      if (names[i] == "device")
        return args[i];
    return {};
  }

  // Reads the key of a call; false if its options ask for more than memory of the operand's device.
  bool read(c10::ArrayRef<IValue> args, Key& key) const {
    for (size_t i = has_operand(); i < args.size(); ++i) {
      const IValue& a = args[i];
      if (names[i] == "dtype") {
        key.second.push_back(a.isNone() ? -1 - static_cast<int64_t>(c10::get_default_dtype_as_scalartype()) : a.toInt());
      } else if (a.isIntList()) {
        const auto items = a.toIntVector();
        key.second.push_back(static_cast<int64_t>(items.size()));
        key.second.insert(key.second.end(), items.begin(), items.end());
      } else if (names[i] == "layout") {
        if (!a.isNone() && a.toLayout() != at::kStrided)
          return false;
      } else if (names[i] == "device") {
        if (has_operand() ? !a.isNone() && a.toDevice() != args[0].toTensor().device() : !a.isDevice())
          return false;
      } else if (!a.isNone() && !(names[i] == "pin_memory" && !a.toBool())) {
        return false;
      }
    }
    return true;
  }

  at::Tensor again(const Key& key, PyObject* trace) const {
    const auto known = found.find(key);
    if (known == found.end())
      return {};
    const Object value(new_value(-1, -1, Py_None));
    const Object cell(value ? new_cell(trace, value.get(), known->second) : nullptr);
    if (!cell)
      throw_python_error();
    at::Tensor made = wrap(known->second, trace_of.device.of(trace), cell.get());
    if (!made.defined())
      throw_python_error();
    return made;
  }

  void note(const Key& key, const at::Tensor& made) {
    const Object handle(handle_of(made));
    if (!handle || !is_type(handle.get(), cell_type))
      return;
    if (found.size() >= kMost) {
      for (const auto& [of, meta] : found) {
        Py_XDECREF(of.first);
        Py_DECREF(meta);
      }
      found.clear();
    }
    if (found.emplace(key, cell_of.meta.of(handle.get())).second) {
      Py_XINCREF(key.first);
      Py_INCREF(cell_of.meta.of(handle.get()));
    }
  }
};

} // namespace ltc
