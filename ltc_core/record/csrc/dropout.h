// Dropout, and memory that nobody has written, without Python: the kernels of `native_dropout` and `empty_like` at the
// dispatcher's key for Python.
#pragma once
#include "operands.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/mul_ops.h>

#include <map>

namespace ltc {

// Whether C++ may handle a call with this first operand in Python's place: a lazy tensor, and nobody else looks.
inline bool is_ours(const IValue& x) {
  return may_handle() && !c10::InferenceMode::is_enabled() && is_lazy(x.toTensor()) && !x.toTensor().is_inference();
}

// `_uninitialised` of ops/special.py, for calls with no other option than a dtype.
class EmptyLike final : public c10::OperatorKernel {
 public:
  explicit EmptyLike(const c10::OperatorHandle& op) : python(op.getComputedKernelForDispatchKey(c10::DispatchKey::Python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, kArguments);
    const auto is_none = [](const IValue& a) { return a.isNone(); };
    if (!is_ours(args[0]) || !std::all_of(args.begin() + 2, args.end(), is_none))
      return python.callBoxed(op, keys, stack);
    const int64_t dtype = args[1].isNone() ? -1 : args[1].toInt();
    PyObject* like; // the operand's meta; of equal metas there is one object
    {
      const Gil gil;
      const Object handle(handle_of(args[0].toTensor()));
      const Slot& meta = is_type(handle.get(), cell_type) ? cell_of.meta : view_of.meta;
      Object of_operand(Py_NewRef(meta.of(handle.get())));
      at::Tensor made = again({of_operand.get(), dtype}, handle.get());
      if (made.defined()) {
        torch::jit::drop(*stack, kArguments);
        stack->emplace_back(std::move(made));
        return;
      }
      like = of_operand.release();
    }
    python.callBoxed(op, keys, stack);
    const Gil gil;
    const Object of_operand(like);
    note({like, dtype}, stack->back().toTensor());
  }

 private:
  using Key = std::pair<PyObject*, int64_t>;
  static constexpr size_t kArguments = 6, kMost = 10'000;
  const c10::SafeKernelFunction python;
  // The meta that Python found, by that of the operand and the dtype. Read and changed under the GIL; holds both metas.
  std::map<Key, PyObject*>& found = *new std::map<Key, PyObject*>(); // leaked: kernels outlive the interpreter

  at::Tensor again(const Key& key, PyObject* handle) const {
    const auto known = found.find(key);
    if (known == found.end())
      return {};
    PyObject* trace = trace_of_handle(handle);
    const Object value(new_object(value_type));
    if (!value || !value_of.epoch.set_number(value.get(), -1) || !value_of.index.set_number(value.get(), -1))
      throw_python_error();
    value_of.buffer.set(value.get(), Py_None);
    const Object cell(new_cell(trace, value.get(), known->second));
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
        Py_DECREF(of.first);
        Py_DECREF(meta);
      }
      found.clear();
    }
    if (found.emplace(key, cell_of.meta.of(handle.get())).second) {
      Py_INCREF(key.first);
      Py_INCREF(cell_of.meta.of(handle.get()));
    }
  }
};

// `native_dropout` of ops/composites.py, whose ops are recorded one by one.
class Dropout final : public c10::OperatorKernel {
 public:
  explicit Dropout(const c10::OperatorHandle& op) : python(op.getComputedKernelForDispatchKey(c10::DispatchKey::Python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, 3);
    if (!is_ours(args[0]) || !args[0].toTensor().is_floating_point() || (args[2].isBool() && !args[2].toBool()))
      return python.callBoxed(op, keys, stack);
    const at::Tensor& x = args[0].toTensor();
    const double keep = 1.0 - args[1].toDouble();
    at::Tensor mask = at::_ops::empty_like::call(x, at::kBool, {}, {}, {}, {});
    at::_ops::bernoulli__float::call(mask, keep, {});
    const at::Tensor scale = at::native::wrapped_scalar_tensor(keep == 0 ? 0.0 : 1.0 / keep);
    at::Tensor out = at::_ops::mul_Tensor::call(at::_ops::mul_Tensor::call(x, mask), scale);
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(out), std::move(mask));
  }

 private:
  const c10::SafeKernelFunction python;
};

} // namespace ltc
