// Ops that PyTorch makes of others above autograd, recorded as one where nothing needs the others.
#pragma once
#include "operands.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace ltc {

// The kernel of `linear` at the dispatcher's key for autograd. ops/dispatch.py says which calls Python records as one.
class WholeLinear final : public c10::OperatorKernel {
 public:
  explicit WholeLinear(const c10::OperatorHandle& op)
      : composite(op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradCPU)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (is_on.load(std::memory_order_relaxed) && Py_IsInitialized() && is_whole(torch::jit::last(*stack, 3)))
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    else
      composite.callBoxed(op, keys, stack);
  }

 private:
  const c10::SafeKernelFunction composite;

  // Whether no gradient needs the parts, no mode sees them, and they would be a product of rows and at most one addition.
  static bool is_whole(c10::ArrayRef<IValue> args) {
    if (c10::impl::TorchDispatchModeTLS::stack_len() > 0)
      return false;
    const at::Tensor &x = args[0].toTensor(), &weight = args[1].toTensor();
    const at::Tensor bias = args[2].isTensor() ? args[2].toTensor() : at::Tensor();
    if (!is_plain(x) || !is_plain(weight) || (bias.defined() && !(is_plain(bias) && bias.dim() <= 1)))
      return false;
    return x.dim() >= 2 && weight.dim() == 2 && x.is_contiguous();
  }

  static bool is_plain(const at::Tensor& tensor) {
    const bool needs_grad = tensor.requires_grad() && at::GradMode::is_enabled();
    if (needs_grad || !tensor.is_privateuseone() || tensor._fw_grad(0).defined())
      return false;
    const Gil gil;
    return static_cast<bool>(Object(handle_of(tensor)));
  }
};

} // namespace ltc
