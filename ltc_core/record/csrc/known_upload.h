// An upload of small memory, from the call of `to()` or `copy_()` to the tensor without a call of Python.
//
// It does what `special._copy_in` and `DeviceContext.upload` do, where C++ reads as well (known_read.h): the script reads
// a value in each step, and a read of C++'s has cut the step before. Nothing has been recorded since, so no step has to be
// looked for (`FoundSteps.before_upload`), and none is due to end. Or ops run at once, and there are no steps.
#pragma once
#include "known_read.h"

#include <ATen/core/stack.h>

namespace ltc {

// Replaces the value of a lazy tensor by a copy of a CPU tensor; false if the upload is Python's.
inline bool upload(const at::Tensor& destination, const at::Tensor& host) {
  if (!lock_type || !is_lazy(destination) || c10::InferenceMode::is_enabled() || destination.is_inference())
    return false;
  const auto started_ns = now_ns();
  const Gil gil;
  const Object handle(handle_of(destination));
  if (!handle || !is_type(handle.get(), cell_type))
    return false;
  const Object trace(Py_NewRef(trace_of_handle(handle.get()))), meta(Py_NewRef(cell_of.meta.of(handle.get())));
  if (trace_of.reads.is_none(trace.get()) || destination.sizes() != host.sizes() || !may_copy(host, meta.get()))
    return false;
  const Object object(Py_NewRef(trace_of.reads.of(trace.get())));
  auto& reads = *reinterpret_cast<KnownReads*>(object.get());
  const Locked locked(trace.get());
  if (!locked.is_taken)
    throw_python_error();
  const bool is_first = reads.epoch == trace_of.epoch.number(trace.get()) && trace_of.count.number(trace.get()) == 0;
  const bool ends_no_step = is_first || !trace_of.at_once.is_none(trace.get());
  if (!ends_no_step || !reads.may_read())
    return false;
  const at::Tensor copy = copy_of(host.const_data_ptr(), host.sizes(), host.scalar_type());
  const auto num_bytes = static_cast<Py_ssize_t>(copy.nbytes());
  const Object data(THPVariable_Wrap(copy));
  const Object buffer(data ? native_functions.ready_buffer(reads.trace_memory, data.get(), num_bytes) : nullptr);
  const Object value(buffer ? new_value(-1, -1, buffer.get()) : nullptr);
  if (!value || !rebind(handle.get(), value.get()))
    throw_python_error();
  ++reads.num_uploads;
  reads.uploaded_bytes += num_bytes;
  reads.upload_ns += now_ns() - started_ns;
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
