// Attention without Python, where eager runs it as one op on the CPU.
#pragma once
#include "operands.h"

#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace ltc {

// The kernel of `scaled_dot_product_attention` at the dispatcher's keys of the device: `_attention` of ops/attention.py
// for plain operands. All other calls are Python's.
class Attention final : public c10::OperatorKernel {
 public:
  // Calls are C++'s only while a setting is what it is now. `given`: the dict of the settings, the name of this one. False
  // after an error.
  static bool go_by(PyObject* given) {
    PyObject *dict, *name;
    if (!PyArg_ParseTuple(given, "O!O!", &PyDict_Type, &dict, &PyUnicode_Type, &name))
      return false;
    device = {Py_NewRef(dict), Py_NewRef(name), Py_XNewRef(PyDict_GetItem(dict, name))};
    return true;
  }

  Attention(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, kArguments);
    if (!is_flash(args))
      return python.callBoxed(op, keys, stack);
    const at::Tensor& query = args[kQuery].toTensor();
    at::Tensor out = std::get<0>(at::_ops::_scaled_dot_product_flash_attention_for_cpu::call(
        query, args[kKey].toTensor(), args[kValue].toTensor(), 0.0, args[kIsCausal].toBool(), added(args[kMask], query),
        args[kScale].toOptional<double>()));
    torch::jit::drop(*stack, kArguments);
    stack->emplace_back(std::move(out));
  }

 private:
  inline static Fact device; // set by `go_by`

  enum { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kGroups, kArguments };
  const c10::SafeKernelFunction python;

  static bool is_flash(c10::ArrayRef<IValue> args) {
    if (!may_handle() || !at::globalContext().userEnabledFlashSDP() || !is_of_that_device())
      return false;
    const at::Tensor &q = args[kQuery].toTensor(), &k = args[kKey].toTensor(), &v = args[kValue].toTensor();
    if (!is_lazy(q) || !is_lazy(k) || !is_lazy(v) || args[kDropout].toDouble() > 0 || args[kGroups].toBool())
      return false;
    if (!are_of_one_dtype(q, k, v) || !have_sizes(q, k, v))
      return false;
    return args[kMask].isNone() || fits(args[kMask].toTensor(), q, k);
  }

  static bool is_of_that_device() {
    const Gil gil;
    return device.is_unchanged();
  }

  static bool are_of_one_dtype(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const auto dtype = q.scalar_type();
    const bool is_known = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
    return is_known && k.scalar_type() == dtype && v.scalar_type() == dtype;
  }

  static bool have_sizes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes() && q.numel() > 0 && k.numel() > 0 &&
        q.size(0) == k.size(0) && q.size(1) == k.size(1) && q.size(3) == k.size(3);
  }

  // As `_fits_mask` there.
  static bool fits(const at::Tensor& mask, const at::Tensor& q, const at::Tensor& k) {
    if (!is_lazy(mask) || mask.requires_grad() || (mask.dim() != 2 && mask.dim() != 4))
      return false;
    const int64_t wanted[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
    for (int64_t d = 1; d <= mask.dim(); ++d)
      if (mask.size(-d) != 1 && mask.size(-d) != wanted[4 - d])
        return false;
    return mask.scalar_type() == at::kBool || mask.scalar_type() == at::kFloat || mask.scalar_type() == q.scalar_type();
  }

  // The mask as what is added to the products.
  static std::optional<at::Tensor> added(const IValue& given, const at::Tensor& query) {
    if (given.isNone())
      return std::nullopt;
    const at::Tensor& mask = given.toTensor();
    if (mask.scalar_type() != at::kBool)
      return mask;
    const at::Tensor zero = at::zeros({}, query.options());
    return at::where(mask, zero, -std::numeric_limits<double>::infinity());
  }
};

} // namespace ltc
