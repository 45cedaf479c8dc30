// A copy of a small tensor of the CPU without the dispatcher, for what scripts upload each step.
#pragma once
#include "objects.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace ltc {

constexpr int64_t kMostCopiedBytes = 1 << 16; // the GIL is held while memory is copied

// Whether a tensor is packed memory of the CPU as a meta says: no wrapper of another tensor, and no bit that changes its
// values.
inline bool is_plain_as(const at::Tensor& tensor, PyObject* meta) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_conj() || tensor.is_neg() ||
      tensor._is_zerotensor() || tensor.unsafeGetTensorImpl()->is_python_dispatch())
    return false;
  if (tensor.scalar_type() != reinterpret_cast<THPDtype*>(meta_of.dtype.of(meta))->scalar_type || !tensor.is_contiguous() ||
      meta_of.contiguous.of(meta) != Py_True)
    return false;
  return tensor.numel() == meta_of.numel.number(meta) && static_cast<int64_t>(tensor.nbytes()) <= kMostCopiedBytes;
}

// copied(tensor, meta): a copy with this dtype and these strides; None where that is left to PyTorch.
inline PyObject* copied(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "a tensor and a meta");
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(given[0]);
  if (!is_plain_as(tensor, given[1]))
    Py_RETURN_NONE;
  at::Tensor made = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type(), false, std::nullopt);
  if (tensor.nbytes() > 0)
    std::memcpy(made.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return THPVariable_Wrap(made);
}

} // namespace ltc
