// Dropout without Python: the kernel of `native_dropout` at the dispatcher's key for Python.
#pragma once
#include "unwritten.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/mul_ops.h>

namespace ltc {

// `native_dropout` of ops/composites.py, whose ops are recorded one by one.
class Dropout final : public c10::OperatorKernel {
 public:
  Dropout(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {}

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
