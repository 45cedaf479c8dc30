// Launch a compiled graph: a library that AOTInductor wrote, called with a Python list of tensors, without the GIL.
// PyTorch's own Python binding of this runner keeps the GIL for the whole run, so that nothing could be recorded
// meanwhile. Device-neutral: PyTorch's registry makes the runner for the device's name.
//
// Rules of this file: every tensor is checked before anything runs; nothing touches Python while the GIL is away; the
// GIL is taken again by a plain call and never in a destructor, since at exit Python ends the thread right there.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <dlfcn.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::inductor::AOTIModelContainerRunner;

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

at::Tensor make_empty(c10::DeviceType type) {
  auto* allocator = c10::GetAllocator(c10::DeviceType::CPU);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator, false),
      c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type))),
      caffe2::TypeMeta::Make<float>());
  return at::Tensor(std::move(impl));
}

// ---- what a program expects ----------------------------------------------------------------------------------------

struct Expected {
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  c10::ScalarType dtype;

  bool fits(const c10::TensorImpl& tensor) const {
    if (c10::typeMetaToScalarType(tensor.dtype()) != dtype || tensor.sizes() != c10::IntArrayRef(size))
      return false;
    const auto strides = tensor.strides();
    if (strides == c10::IntArrayRef(stride) || tensor.numel() == 0)
      return true;
    for (size_t dim = 0; dim < size.size(); ++dim)
      if (size[dim] != 1 && strides[dim] != stride[dim]) // no address depends on the stride of a dim of size 1
        return false;
    return true;
  }
};

bool parse_numbers(PyObject* object, std::vector<int64_t>& numbers) {
  PyObject* items = PySequence_Tuple(object);
  if (!items)
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items) && !PyErr_Occurred(); ++i)
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(items, i)));
  Py_DECREF(items);
  return !PyErr_Occurred();
}

bool parse_expected(PyObject* row, Expected& expected) {
  PyObject *size, *stride, *dtype;
  if (!PyArg_ParseTuple(row, "OOO!", &size, &stride, &THPDtypeType, &dtype))
    return false;
  expected.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  return parse_numbers(size, expected.size) && parse_numbers(stride, expected.stride);
}

// ---- the model -----------------------------------------------------------------------------------------------------

struct Model {
  std::unique_ptr<AOTIModelContainerRunner> runner;
  std::vector<Expected> expected;
  c10::Device device{c10::DeviceType::CPU};
  uint64_t plain_keys; // what a plain tensor of the device has: no subclass, no conjugate bit, not sparse

  bool takes(const c10::TensorImpl& tensor) const {
    return !(tensor.key_set().raw_repr() & ~plain_keys) && !tensor.requires_grad() &&
        (!device.has_index() || tensor.device() == device);
  }
};
struct ModelObject {
  PyObject_HEAD
  Model* model;
};

// Calls `function`; a C++ exception becomes the text of a RuntimeError, to be set once the GIL is held.
template <typename Function>
std::optional<std::string> problem_of(Function function) {
  std::string text;
  try {
    function();
    return std::nullopt;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.substr(0, text.find("\nException raised from ")); // the C++ stack of an op of the library
}

// The runner does not tell how many inputs its library takes, and reads beyond the end of a list that is shorter.
struct Opened : AOTIModelContainerRunner {
  static size_t num_inputs(AOTIModelContainerRunner& runner, const std::string& path) {
    using GetNumInputs = decltype(&AOTInductorModelContainerGetNumInputs);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    TORCH_CHECK(library, "cannot be opened: ", dlerror());
    auto* get = reinterpret_cast<GetNumInputs>(dlsym(library, "AOTInductorModelContainerGetNumInputs"));
    size_t count = 0;
    const bool done = get && get(runner.*(&Opened::container_handle_), &count) == AOTI_RUNTIME_SUCCESS;
    dlclose(library);
    TORCH_CHECK(done, "does not tell how many inputs it takes");
    return count;
  }
};

void open(Model& model, const std::string& path, const std::string& device) {
  auto& registry = torch::inductor::getAOTIModelRunnerRegistry();
  const auto entry = registry.find(device.substr(0, device.find(':')));
  TORCH_CHECK(entry != registry.end(), "this torch runs no compiled programs on ", device);
  model.device = c10::Device(device);
  model.plain_keys = make_empty(model.device.type()).key_set().raw_repr();
  const std::string directory = path.substr(0, path.rfind('/'));
  model.runner = entry->second(path, /*num_models=*/1, device, directory, /*run_single_threaded=*/false);
  const auto count = Opened::num_inputs(*model.runner, path);
  TORCH_CHECK(count == model.expected.size(), "takes ", count, " inputs, not ", model.expected.size());
}

Py_ssize_t not_plain(Py_ssize_t position, PyObject* item, const c10::TensorImpl* impl) {
  const std::string what = !impl ? "" : impl->requires_grad() ? " that requires grad" : c10::toString(impl->key_set());
  PyErr_Format(
      PyExc_TypeError, "input %zd must be a plain tensor of the program's device, without grad; got %s%s%s", position,
      Py_TYPE(item)->tp_name, impl && !impl->requires_grad() ? " with " : "", what.c_str());
  return -2;
}

// Reads the list. Gives the position of the first tensor that does not fit, -1 if all do, -2 with an error set.
// `inputs` then owns its tensors while the GIL is away: else PyTorch would ask for it at the first and last reference
// to a Python tensor that the run takes and drops.
Py_ssize_t unpack(const Model& model, PyObject* list, std::vector<at::Tensor>& inputs) {
  const auto count = static_cast<Py_ssize_t>(model.expected.size());
  if (!PyList_Check(list) || PyList_GET_SIZE(list) != count) {
    PyErr_Format(
        PyExc_TypeError, "expected a list of %zd tensors, got %zd in a %s", count, PyObject_Size(list),
        Py_TYPE(list)->tp_name);
    return -2;
  }
  inputs.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    c10::TensorImpl* impl = is_tensor(item) ? THPVariable_Unpack(item).unsafeGetTensorImpl() : nullptr;
    if (!impl || !model.takes(*impl))
      return not_plain(i, item, impl);
    if (!model.expected[i].fits(*impl))
      return i;
    inputs.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  }
  return -1;
}

PyObject* wrap(const std::vector<at::Tensor>& outputs) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(outputs.size()));
  for (size_t i = 0; list && i < outputs.size(); ++i) {
    PyObject* item = THPVariable_Wrap(outputs[i]);
    if (item)
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
    else
      Py_CLEAR(list);
  }
  return list;
}

// ---- the Python module ---------------------------------------------------------------------------------------------

PyObject* py_run(PyObject* self, PyObject* list) {
  Model& model = *reinterpret_cast<ModelObject*>(self)->model;
  std::vector<at::Tensor> inputs, outputs;
  const Py_ssize_t position = unpack(model, list, inputs);
  if (position == -2)
    return nullptr;
  if (position != -1)
    return PyLong_FromSsize_t(position);
  PyThreadState* state = PyEval_SaveThread();
  const auto problem = problem_of([&] {
    const c10::AutoGradMode no_grad(false);
    outputs = model.runner->run(inputs);
    for (const auto& output : outputs) // torch 2.9 goes on after an op of the proxy executor has failed
      TORCH_CHECK(output.defined(), "an op of the library failed; PyTorch has written to stderr which one, and why");
  });
  PyEval_RestoreThread(state);
  if (problem) {
    PyErr_SetString(PyExc_RuntimeError, problem->c_str());
    return nullptr;
  }
  return wrap(outputs);
}

void py_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<ModelObject*>(self)->model;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef model_methods[] = {
    {"run", py_run, METH_O, "run(list): the list of outputs, or the position of the first tensor that does not fit."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot model_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(py_dealloc)},
    {Py_tp_methods, model_methods},
    {0, nullptr},
};
PyType_Spec model_spec = {
    "_ltc_launch.Model", sizeof(ModelObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, model_slots};
PyTypeObject* model_type = nullptr;

PyObject* py_load(PyObject*, PyObject* args) {
  const char *path, *device;
  PyObject* rows;
  if (!PyArg_ParseTuple(args, "ssO!:load", &path, &device, &PyTuple_Type, &rows))
    return nullptr;
  auto model = std::make_unique<Model>();
  model->expected.resize(PyTuple_GET_SIZE(rows));
  for (size_t i = 0; i < model->expected.size(); ++i)
    if (!parse_expected(PyTuple_GET_ITEM(rows, static_cast<Py_ssize_t>(i)), model->expected[i]))
      return nullptr;
  const std::string path_text = path, device_text = device;
  PyThreadState* state = PyEval_SaveThread(); // a library is some megabytes to read
  const auto problem = problem_of([&] { open(*model, path_text, device_text); });
  PyEval_RestoreThread(state);
  if (problem) {
    PyErr_SetString(PyExc_RuntimeError, problem->c_str());
    return nullptr;
  }
  auto* object = reinterpret_cast<ModelObject*>(model_type->tp_alloc(model_type, 0));
  if (object)
    object->model = model.release();
  return reinterpret_cast<PyObject*>(object);
}

PyMethodDef methods[] = {
    {"load", py_load, METH_VARARGS, "load(path, device, ((size, stride, dtype), ...)): a Model."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ltc_launch", "Launch compiled graphs.", -1, methods};

} // namespace

PyMODINIT_FUNC PyInit__ltc_launch() {
  model_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&model_spec));
  return model_type ? PyModule_Create(&module) : nullptr;
}
