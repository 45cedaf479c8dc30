// Autograd's view functions after an op such as `t_` has given a tensor other sizes in place.
//
// Where eager PyTorch finds a view by its strides (`as_strided` of the base), a tensor with Python's key keeps the view
// op, and autograd calls it again when the base was written. `t_`, `transpose_`, `squeeze_` and `unsqueeze_` change what
// that call has to do: that of a view has one step more, and those of the views of a base begin with a step back.
// `ops/in_place_view.py` calls `rename_view` for both.
#pragma once
#include "tensors.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <vector>

namespace ltc {

// A view op that has an inverse: the transposition of two dims, or other sizes for the same elements in their order.
struct Renaming {
  bool transposes;
  std::vector<int64_t> there, back; // two dims; or the sizes after it and before it

  at::Tensor operator()(const at::Tensor& t) const {
    return transposes ? t.transpose(there[0], there[1]) : t.view(there);
  }
  Renaming inverse() const {
    return {transposes, back, there};
  }
  // Whether `next` undoes this. Each `x.t_()` of a loop would else make the function of a view longer.
  bool is_undone_by(const Renaming& next) const {
    return transposes == next.transposes && there == next.back && back == next.there;
  }
};

// A view function with a renaming after it, or before it.
class RenamedView final : public torch::autograd::ViewFunc {
 public:
  using Pointer = std::unique_ptr<torch::autograd::ViewFunc>;
  using ToBase = std::function<at::Tensor(const at::Tensor&)>; // from the view to its base

  RenamedView(Pointer view, ToBase to_base, Renaming renaming, bool is_first)
      : view(std::move(view)), to_base(std::move(to_base)), renaming(std::move(renaming)), is_first(is_first) {}

  std::vector<c10::SymInt> get_symints() const override {
    return view->get_symints();
  }
  size_t num_symints() const override {
    return view->num_symints();
  }
  std::vector<at::Tensor> get_tensors() const override {
    return view->get_tensors();
  }
  size_t num_tensors() const override {
    return view->num_tensors();
  }
  at::Tensor operator()(const at::Tensor& base) const override {
    return is_first ? (*view)(renaming(base)) : renaming((*view)(base));
  }
  Pointer clone_and_set(
      std::optional<std::vector<c10::SymInt>> symints = std::nullopt,
      std::optional<std::vector<at::Tensor>> tensors = std::nullopt) const override {
    return std::make_unique<RenamedView>(
        view->clone_and_set(std::move(symints), std::move(tensors)), to_base, renaming, is_first);
  }

  const Pointer view; // without the renaming, as is `to_base`
  const ToBase to_base;
  const Renaming renaming;
  const bool is_first;
};

// rename_view(tensor, is_first, transposes, there, back): autograd's function of a view gets a renaming after it, or
// with `is_first` before it. A tensor that is no view, or that autograd finds by its strides, stays as it is.
inline PyObject* rename_view(PyObject*, PyObject* args) {
  PyObject *tensor, *there, *back;
  int is_first, transposes;
  if (!PyArg_ParseTuple(args, "OppO!O!", &tensor, &is_first, &transposes, &PyTuple_Type, &there, &PyTuple_Type, &back))
    return nullptr;
  Renaming renaming{transposes != 0, {}, {}};
  if (!read_dims(there, renaming.there) || !read_dims(back, renaming.back))
    return nullptr;
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(THPVariable_Unpack(tensor));
  if (meta == nullptr || !meta->has_bw_view() || !meta->get_backward_view().has_view_fn())
    Py_RETURN_NONE;
  auto& info = const_cast<torch::autograd::ViewInfo&>(meta->get_backward_view()); // there is no setter
  const auto* last = dynamic_cast<const RenamedView*>(&info.view_fn());
  if (last != nullptr && last->is_first == (is_first != 0) && last->renaming.is_undone_by(renaming)) {
    info = {info.base_, last->view->clone_and_set(), last->to_base};
    Py_RETURN_NONE;
  }
  const auto to_base = info.rev_view_fn();
  const auto renamed_to_base = [to_base, inverse = renaming.inverse(), is_first](const at::Tensor& view) {
    return is_first ? inverse(to_base(view)) : to_base(inverse(view));
  };
  auto function = std::make_unique<RenamedView>(info.view_fn().clone_and_set(), to_base, renaming, is_first != 0);
  info = {info.base_, std::move(function), renamed_to_base};
  Py_RETURN_NONE;
}

} // namespace ltc
