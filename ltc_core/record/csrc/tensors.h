// New lazy tensors, and the handle of a lazy tensor.
#pragma once
#include "objects.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <map>
#include <optional>
#include <typeinfo>
#include <vector>

namespace ltc {

// Whether C++ may handle a call in Python's place: it is on, and no dispatch mode looks at calls.
inline bool may_handle() {
  return is_on.load(std::memory_order_relaxed) && Py_IsInitialized() && c10::impl::TorchDispatchModeTLS::stack_len() == 0;
}

// Size, stride, offset, dtype and device for `new_tensor`, which makes what `Tensor._make_wrapper_subclass` makes.
struct Maker {
  PyObject_HEAD
  PyObject* device;
  at::IntArrayRef size, stride; // in `dims`
  std::vector<int64_t>* dims;
  int64_t offset;
  size_t bytes;
  caffe2::TypeMeta dtype;
};

inline void free_maker(PyObject* self) {
  auto* maker = reinterpret_cast<Maker*>(self);
  Py_XDECREF(maker->device);
  delete maker->dims;
  Py_TYPE(self)->tp_free(self);
}
inline PyTypeObject maker_type = {PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.Maker", sizeof(Maker)};

inline bool read_dims(PyObject* from, std::vector<int64_t>& dims) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from); ++i)
    dims.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(from, i)));
  return !PyErr_Occurred();
}
// The maker of a meta, cached in the meta for the last device. Borrowed.
inline Maker* maker_for(PyObject* meta, PyObject* device) {
  PyObject* known = meta_of.maker.of(meta);
  if (known && Py_IS_TYPE(known, &maker_type) && reinterpret_cast<Maker*>(known)->device == device)
    return reinterpret_cast<Maker*>(known);
  const Object made(maker_type.tp_alloc(&maker_type, 0));
  if (!made)
    return nullptr;
  auto* maker = reinterpret_cast<Maker*>(made.get());
  maker->device = Py_NewRef(device);
  maker->dims = new std::vector<int64_t>();
  if (!read_dims(meta_of.size.of(meta), *maker->dims) || !read_dims(meta_of.stride.of(meta), *maker->dims))
    return nullptr;
  const size_t rank = maker->dims->size() / 2;
  maker->size = {maker->dims->data(), rank};
  maker->stride = {maker->dims->data() + rank, rank};
  maker->offset = meta_of.offset.number(meta);
  maker->dtype = at::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(meta_of.dtype.of(meta))->scalar_type);
  int64_t span = 1;
  for (size_t i = 0; i < rank; ++i)
    span = maker->size[i] == 0 ? 0 : (span ? span + (maker->size[i] - 1) * maker->stride[i] : 0);
  maker->bytes = span ? (maker->offset + span) * maker->dtype.itemsize() : 0;
  meta_of.maker.set(meta, made.get());
  return maker;
}

inline PyObject* traces; // index of a device -> its trace

// The trace of the device that a factory is given, borrowed; null, without an error, if Python has to find it.
inline PyObject* trace_of_device(const c10::IValue& device) {
  if (!device.isDevice() || !c10::impl::hasDeviceGuardImpl(c10::kPrivateUse1))
    return nullptr;
  const c10::Device given = device.toDevice();
  const c10::DeviceIndex number =
      given.has_index() ? given.index() : c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->getDevice().index();
  const Object index(PyLong_FromLong(number));
  PyObject* found = index ? PyDict_GetItemWithError(traces, index.get()) : nullptr;
  if (!found)
    PyErr_Clear();
  return found;
}

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Holds the GIL while the bases after it are destroyed: autograd frees tensors without it, and each of handle, Python
// object and what autograd knows of the tensor would take it anew.
struct DyingWithGil {
  std::optional<Gil> gil;
};

// The `TensorImpl` of the lazy tensors that C++ makes. Autograd detaches each result that it saves for backward, and
// once more when backward reads it. A plain `TensorImpl` imports torch, looks `aten.detach.default` up by name and calls
// `__torch_dispatch__` for that: 8.1 instead of 4.6 us an op in a pointwise chain with autograd, one detach for each
// second op; 10.2 instead of 7.0 us with backward (thread time, least of 14 alternating rounds, two loaded cores).
//
// It holds the handle, `_h` in Python. A tensor of another `TensorImpl`, such as a parameter that was moved here, has its
// handle in its `__dict__`.
class LazyImpl final : DyingWithGil, public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
  ~LazyImpl() override {
    if (handle && Py_IsInitialized()) {
      gil.emplace();
      Py_CLEAR(handle);
    }
  }

  PyObject* handle = nullptr; // owned; a `Cell` or a `View`. Read and written under the GIL

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allows_changes)
      const override {
    auto made = is_shared() ? shared(allows_changes) : nullptr;
    if (!made)
      return TensorImpl::shallow_copy_and_detach(version, allows_changes);
    made->set_version_counter(version);
    return made;
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allows_changes)
      const override {
    auto made = is_shared() ? shared(allows_changes) : nullptr;
    if (!made)
      return TensorImpl::shallow_copy_and_detach(std::move(version), allows_changes);
    made->set_version_counter(std::move(version));
    return made;
  }

 private:
  // Whether `__torch_dispatch__` would return a tensor that holds the same handle.
  bool is_shared() const {
    return may_handle() && key_set().has(c10::DispatchKey::Python) &&
        !const_cast<LazyImpl*>(this)->is_inference() && !c10::InferenceMode::is_enabled() &&
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
  }
  c10::intrusive_ptr<TensorImpl> shared(bool allows_changes) const; // null: the tensor has no handle
};

// The implementation of a tensor if it is one of ours, else null.
inline LazyImpl* lazy_impl(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return typeid(*impl) == typeid(LazyImpl) ? static_cast<LazyImpl*>(impl) : nullptr;
}
inline bool is_handle(PyObject* object) {
  return is_type(object, cell_type) || is_type(object, view_type);
}
// Makes a lazy tensor that holds `handle`; returns an undefined tensor after an error.
inline at::Tensor wrap(PyObject* meta, PyObject* device, PyObject* handle) {
#if TORCH_VERSION_MINOR >= 13
  const Maker* maker = maker_for(meta, device);
  if (!maker)
    return {};
  const auto& where = reinterpret_cast<THPDevice*>(device)->device;
  at::Tensor tensor = at::detail::make_tensor<LazyImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), maker->bytes, c10::DataPtr(nullptr, where)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      maker->dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(maker->size, maker->stride, maker->offset);
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  static_cast<LazyImpl*>(tensor.unsafeGetTensorImpl())->handle = Py_NewRef(handle);
  const Object wrapped(THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(lazy_tensor)));
  return wrapped ? tensor : at::Tensor();
#else // older versions offer no other way to make tensors of a subclass
  const Object made(PyObject_CallFunctionObjArgs(make_empty, meta, device, nullptr));
  if (!made || PyObject_SetAttr(made.get(), name_handle, handle) < 0)
    return {};
  return THPVariable_Unpack(made.get());
#endif
}
inline PyObject* trace_of_handle(PyObject* handle) {
  return is_type(handle, cell_type) ? cell_of.trace.of(handle) : view_of.trace.of(handle);
}
// Makes another tensor that holds the same handle.
inline at::Tensor share(PyObject* handle) {
  PyObject* meta = is_type(handle, cell_type) ? cell_of.meta.of(handle) : view_of.meta.of(handle);
  return wrap(meta, trace_of.device.of(trace_of_handle(handle)), handle);
}
// The handle of a lazy tensor, an owned reference; null, without an error, for any other tensor.
inline PyObject* handle_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone())
    return nullptr;
  if (auto* impl = lazy_impl(tensor); impl && impl->handle)
    return Py_NewRef(impl->handle);
  const Object object(THPVariable_Wrap(tensor));
  PyObject* handle = object && is_type(object.get(), lazy_tensor) ? PyObject_GetAttr(object.get(), name_handle) : nullptr;
  if (!handle)
    PyErr_Clear();
  else if (!is_handle(handle))
    Py_CLEAR(handle);
  return handle;
}

// Takes the GIL.
inline bool is_lazy(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone())
    return false;
  const Gil gil;
  return static_cast<bool>(Object(handle_of(tensor)));
}
// A value with this number in the trace of an epoch, or with a buffer and no number (-1); null after an error.
inline PyObject* new_value(Py_ssize_t epoch, Py_ssize_t index, PyObject* buffer) {
  Object value(new_object(value_type));
  if (!value || !value_of.epoch.set_number(value.get(), epoch) || !value_of.index.set_number(value.get(), index))
    return nullptr;
  value_of.buffer.set(value.get(), buffer);
  return value.release();
}
// As `Cell.rebind`; false after an error.
inline bool rebind(PyObject* cell, PyObject* value) {
  if (!cell_of.version.set_number(cell, cell_of.version.number(cell) + 1))
    return false;
  cell_of.value.set(cell, value);
  return true;
}
// A part of a cell, whose present value this is; null after an error.
inline PyObject* new_view(PyObject* base, PyObject* lens, PyObject* meta, PyObject* value) {
  Object view(new_object(view_type));
  if (!view || !view_of.version.set_number(view.get(), cell_of.version.number(base)))
    return nullptr;
  view_of.trace.set(view.get(), cell_of.trace.of(base));
  view_of.base.set(view.get(), base);
  view_of.lens.set(view.get(), lens);
  view_of.meta.set(view.get(), meta);
  view_of.value.set(view.get(), value);
  return view.release();
}

// View ops whose parts are not elements of the memory that they see, and those that copy what is not packed: tuples.
// `strided` is one of the first, `as_strided`: its parts are elements of packed memory. Set by `use_view_ops`.
inline struct {
  PyObject *copying, *reshaping, *strided;
} view_ops;

inline bool has(PyObject* ops, PyObject* op) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ops); ++i)
    if (PyTuple_GET_ITEM(ops, i) == op)
      return true;
  return false;
}
// Views of which Python has seen that their elements lie where their metas say: those of equal steps and metas do so, too.
class KnownParts {
 public:
  static bool has(PyObject* view) {
    return known().count(key_of(view)) > 0;
  }
  static void add(PyObject* view) {
    if (known().size() >= kMost) {
      for (const auto& [key, lens] : known())
        Py_DECREF(lens);
      known().clear();
    }
    PyObject* lens = view_of.lens.of(view);
    if (known().emplace(key_of(view), lens).second)
      Py_INCREF(lens); // what the key has the addresses of
  }

 private:
  using Key = std::vector<PyObject*>; // metas of the cell and of the view, steps of the lens
  static constexpr size_t kMost = 10'000;

  static std::map<Key, PyObject*>& known() {
    static auto* all = new std::map<Key, PyObject*>(); // leaked: kernels outlive the interpreter
    return *all;
  }
  static Key key_of(PyObject* view) {
    PyObject* lens = view_of.lens.of(view);
    Key key{cell_of.meta.of(view_of.base.of(view)), view_of.meta.of(view)}; // metas are never freed
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lens); ++i)
      key.push_back(PyTuple_GET_ITEM(lens, i));
    return key;
  }
};

// Whether it is known that the elements of a view lie where its meta says, in memory that is laid out as its cell's meta
// says.
inline bool is_of_elements(PyObject* view) {
  PyObject* lens = view_of.lens.of(view);
  bool is_packed = meta_of.contiguous.of(cell_of.meta.of(view_of.base.of(view))) == Py_True; // what the step sees
  if (PyTuple_GET_SIZE(lens) == 1 && PyTuple_GET_ITEM(PyTuple_GET_ITEM(lens, 0), 0) == view_ops.strided)
    return is_packed;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lens); ++i) {
    PyObject* op = PyTuple_GET_ITEM(PyTuple_GET_ITEM(lens, i), 0);
    const bool reshapes = has(view_ops.reshaping, op);
    if (has(view_ops.copying, op) || (reshapes && !is_packed))
      return KnownParts::has(view);
    is_packed = reshapes;
  }
  return true;
}

// A cell of memory with this value; null after an error.
inline PyObject* new_cell(PyObject* trace, PyObject* value, PyObject* meta) {
  Object cell(new_object(cell_type));
  if (!cell || !cell_of.version.set_number(cell.get(), 0))
    return nullptr;
  cell_of.trace.set(cell.get(), trace);
  cell_of.value.set(cell.get(), value);
  cell_of.meta.set(cell.get(), meta);
  return cell.release();
}

constexpr const char* no_handle = "_h: the tensor has no handle";
// `LazyTensor._h`, an attribute of Python.
inline PyObject* get_handle(PyObject* self, void*) {
  if (auto* impl = lazy_impl(THPVariable_Unpack(self)); impl && impl->handle)
    return Py_NewRef(impl->handle);
  const Object attributes(PyObject_GenericGetDict(self, nullptr));
  PyObject* handle = attributes ? PyDict_GetItemWithError(attributes.get(), name_handle) : nullptr;
  if (!handle && !PyErr_Occurred())
    PyErr_SetString(PyExc_AttributeError, no_handle);
  return Py_XNewRef(handle);
}
// With null for `handle`, deletes the attribute.
inline int set_handle(PyObject* self, PyObject* handle, void*) {
  auto* impl = lazy_impl(THPVariable_Unpack(self));
  if (impl && impl->handle && (!handle || is_handle(handle))) {
    PyObject* old = impl->handle;
    impl->handle = Py_XNewRef(handle);
    Py_DECREF(old);
    return 0;
  }
  const Object attributes(PyObject_GenericGetDict(self, nullptr));
  if (!attributes)
    return -1;
  if (handle)
    return PyDict_SetItem(attributes.get(), name_handle, handle);
  const int result = PyDict_DelItem(attributes.get(), name_handle);
  if (result < 0 && PyErr_ExceptionMatches(PyExc_KeyError))
    PyErr_SetString(PyExc_AttributeError, no_handle);
  return result;
}
inline PyGetSetDef handle_attribute = {"_h", get_handle, set_handle, nullptr, nullptr};

inline c10::intrusive_ptr<c10::TensorImpl> LazyImpl::shared(bool allows_changes) const {
  const Gil gil;
  const at::Tensor self(c10::intrusive_ptr<TensorImpl>::unsafe_reclaim_from_nonowning(const_cast<LazyImpl*>(this)));
  const Object handle(handle_of(self));
  if (!handle)
    return nullptr;
  const at::Tensor made = share(handle.get());
  if (!made.defined())
    throw_python_error();
  made.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(allows_changes);
  return made.getIntrusivePtr();
}

} // namespace ltc
