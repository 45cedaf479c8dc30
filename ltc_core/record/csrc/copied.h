// A copy of small memory of the CPU without the dispatcher: of what scripts upload and read each step.
#pragma once
#include "objects.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace ltc {

constexpr int64_t kMostCopiedBytes = 1 << 19; // the GIL is held while memory is copied: 50 us

// Whether the values of a tensor are those of its memory, which is the CPU's: no bit changes them.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
}

// A packed tensor with the values at an address.
inline at::Tensor copy_of(const void* first, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor made = at::detail::empty_cpu(sizes, dtype, false, std::nullopt);
  if (made.nbytes() > 0)
    std::memcpy(made.mutable_data_ptr(), first, made.nbytes());
  return made;
}

// Whether a tensor that a script gives is small packed memory as a meta says, and wraps no other tensor.
inline bool may_copy(const at::Tensor& tensor, PyObject* meta) {
  const bool is_memory = tensor.has_storage() && !tensor._is_zerotensor() &&
      !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  if (!is_memory || !is_plain(tensor) || !tensor.is_contiguous() || meta_of.contiguous.of(meta) != Py_True)
    return false;
  return tensor.scalar_type() == reinterpret_cast<THPDtype*>(meta_of.dtype.of(meta))->scalar_type &&
      tensor.numel() == meta_of.numel.number(meta) && static_cast<int64_t>(tensor.nbytes()) <= kMostCopiedBytes;
}

// copied(tensor, meta): a copy with this dtype and these strides; None where that is left to PyTorch.
inline PyObject* copied(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "a tensor and a meta");
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(given[0]);
  if (!may_copy(tensor, given[1]))
    Py_RETURN_NONE;
  const c10::InferenceMode no_inference{false}; // a value of the device, whatever mode the script is in
  return THPVariable_Wrap(copy_of(tensor.const_data_ptr(), tensor.sizes(), tensor.scalar_type()));
}

} // namespace ltc
