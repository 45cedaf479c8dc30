// Ops that PyTorch makes of others, in inference mode.
//
// Elsewhere autograd takes such an op apart, above Python. In inference mode there is no autograd, and the whole op
// comes to `__torch_dispatch__`: 40 to 800 us for each, where its parts take 2 each.
#pragma once
#include "operands.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace ltc {

// The kernel of such an op at the dispatcher's key for Python. See `_decomposed` in ops/dispatch.py.
class Composite final : public c10::OperatorKernel {
 public:
  // keeps_views: the op has a kernel of its own where autograd notes views.
  Composite(const c10::OperatorHandle& op, bool keeps_views)
      : keeps_views(keeps_views), python(op.getComputedKernelForDispatchKey(c10::DispatchKey::Python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, op.schema().arguments().size());
    if (!may_handle() || !c10::InferenceMode::is_enabled() || !are_ours(args))
      return python.callBoxed(op, keys, stack);
    std::optional<c10::impl::ForceDispatchKeyGuard> with_views;
    if (!keeps_views) {
      const auto now = c10::impl::tls_local_dispatch_key_set();
      with_views.emplace(now.included_, now.excluded_.remove(c10::DispatchKey::ADInplaceOrView));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
  }

 private:
  const bool keeps_views;
  const c10::SafeKernelFunction python;

  // Whether no tensor is one of another class of Python's.
  static bool are_ours(c10::ArrayRef<IValue> args) {
    for (const IValue& arg : args) {
      if (arg.isTensor() ? !is_ours(arg.toTensor()) : arg.isList() && !are_ours(arg.toListRef()))
        return false;
    }
    return true;
  }

  static bool is_ours(const at::Tensor& tensor) {
    return !tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python) || is_lazy(tensor);
  }
};

} // namespace ltc
