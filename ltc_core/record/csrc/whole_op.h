// Ops that PyTorch makes of others above autograd, recorded as one where nothing needs the others.
#pragma once
#include "operands.h"

#include <ATen/core/grad_mode.h>

namespace ltc {

// The kernel of `linear` at the dispatcher's key for autograd. ops/dispatch.py says which calls Python records as one.
class WholeLinear final : public c10::OperatorKernel {
 public:
  WholeLinear(const c10::OperatorHandle& op, c10::DispatchKey)
      : composite(op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradCPU)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (may_handle() && is_whole(torch::jit::last(*stack, 3)))
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    else
      composite.callBoxed(op, keys, stack);
  }

 private:
  const c10::SafeKernelFunction composite;

  // Whether no gradient needs the parts, and they would be a product of rows and at most one addition.
  static bool is_whole(c10::ArrayRef<IValue> args) {
    const at::Tensor &x = args[0].toTensor(), &weight = args[1].toTensor();
    const at::Tensor bias = args[2].isTensor() ? args[2].toTensor() : at::Tensor();
    if (needs_parts(x) || needs_parts(weight) || needs_parts(bias))
      return false;
    const bool has_sizes = x.dim() >= 2 && weight.dim() == 2 && (!bias.defined() || bias.dim() <= 1) && x.is_contiguous();
    return has_sizes && is_lazy(x) && is_lazy(weight) && (!bias.defined() || is_lazy(bias));
  }

  static bool needs_parts(const at::Tensor& tensor) {
    const bool needs_grad = tensor.defined() && tensor.requires_grad() && at::GradMode::is_enabled();
    return needs_grad || (tensor.defined() && tensor._fw_grad(0).defined());
  }
};

} // namespace ltc
