// Replay a program: the instructions of the reference executor as a loop over boxed ATen kernels, without the GIL.
//
// A program is built once from the nodes of a graph. An instruction that cannot be a boxed call (a Python op, a lens that
// copies, a number that its parameter does not take) calls back into Python for itself alone. This file is the Python
// module; `replay_program.h` is what it builds, `replay_nodes.h` and `replay_arguments.h` of what, and `replay_run.h` how
// that runs.
#include "replay_given.h"
#include "replay_nodes.h"
#include "replay_run.h"

#include <torch/csrc/Generator.h>

#include <memory>

using namespace ltc;

namespace {

struct ProgramObject {
  PyObject_HEAD
  Program* program;
};

Program& program_of(PyObject* self) {
  return *reinterpret_cast<ProgramObject*>(self)->program;
}

PyObject* py_add(PyObject* self, PyObject* args) {
  int with_grad;
  PyObject *node, *in_place, *frees, *needs, *roots, *given, *device;
  if (!PyArg_ParseTuple(
          args, "OO!O!O!O!OpO:add", &node, &PyTuple_Type, &in_place, &PyTuple_Type, &frees, &PyTuple_Type, &needs,
          &PyDict_Type, &roots, &given, &with_grad, &device))
    return nullptr;
  return guarded([&]() -> PyObject* {
    NodeReader reader(program_of(self), device == Py_None ? nullptr : device);
    const int is_native = reader.read(node, in_place, frees, needs, roots, given, with_grad != 0);
    return is_native < 0 ? nullptr : PyBool_FromLong(is_native);
  });
}

PyObject* py_group(PyObject* self, PyObject* args) {
  int first;
  Group group;
  PyObject *ends, *frees;
  if (!PyArg_ParseTuple(args, "iiOO!:group", &first, &group.last, &ends, &PyList_Type, &frees))
    return nullptr;
  if (!ints_of(ends, group.ends))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(frees); ++i) {
    std::vector<int32_t> flat;
    if (!ints_of(PyList_GET_ITEM(frees, i), flat))
      return nullptr;
    auto& pairs = group.frees.emplace_back();
    for (size_t k = 0; k + 1 < flat.size(); k += 2)
      pairs.emplace_back(flat[k], flat[k + 1]);
  }
  program_of(self).groups.emplace(first, std::move(group));
  Py_RETURN_NONE;
}

// (position, exception, {slot: tensor}) of a run that failed. An exception is set.
PyObject* failure(const Run& run, int32_t position) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace && error)
    PyException_SetTraceback(error, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  PyObject* there = PyDict_New();
  bool done = there && error;
  for (size_t slot = 0; done && slot < run.values.size(); ++slot)
    done = run.put(there, static_cast<int32_t>(slot));
  PyObject* found = done ? Py_BuildValue("iOO", position, error, there) : nullptr;
  Py_XDECREF(error);
  Py_XDECREF(there);
  return found;
}

// Takes the run that was begun with these inputs and scalars; null if there is none.
std::shared_ptr<Begun> take_begun(Program& program, PyObject* inputs, const std::vector<c10::Scalar>& scalars) {
  auto begun = std::move(program.begun);
  if (!begun || begun->is_running || begun->is_lost || begun->scalars.size() > scalars.size() ||
      !std::equal(begun->scalars.begin(), begun->scalars.end(), scalars.begin(), is_same_number))
    return nullptr;
  if (!are_same(begun->inputs, inputs))
    return nullptr;
  return begun;
}

PyObject* py_begin(PyObject* self, PyObject* args) {
  BegunObject::Step step;
  PyObject* slots;
  int watched_at;
  if (!PyArg_ParseTuple(
          args, "O!O!O!nnnnOi:begin", &PySet_Type, &step.path, &PyTuple_Type, &step.slots, &PyList_Type, &step.ends,
          &step.epoch, &step.num_values, &step.size, &step.due, &slots, &watched_at))
    return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> watched;
    if (!ints_of(slots, watched))
      return nullptr;
    return BegunObject::make(program_of(self).inputs.size(), step, std::move(watched), watched_at);
  });
}

PyObject* py_follow(PyObject* self, PyObject* object) {
  if (!PyObject_TypeCheck(object, BegunObject::type))
    return PyErr_Format(PyExc_TypeError, "expected what `begin` has returned, got a %s", Py_TYPE(object)->tp_name);
  return guarded([&]() -> PyObject* {
    auto& program = program_of(self);
    const auto begun = reinterpret_cast<BegunObject*>(object)->begun;
    program.begun = begun;
    const StateOfANewThread state;
    Run run{program, begun->scalars, nullptr};
    run.stack.reserve(32);
    run.values.resize(program.size);
    begun->is_running = true;
    const int64_t took_ns = run.follow(*begun);
    begun->is_running = false;
    run.values.swap(begun->values);
    return PyLong_FromLongLong(took_ns);
  });
}

PyObject* py_drop(PyObject* self, PyObject*) {
  program_of(self).begun.reset();
  Py_RETURN_NONE;
}

PyObject* py_run(PyObject* self, PyObject* args) {
  PyObject *inputs, *numbers, *slots = nullptr;
  Watch watch;
  if (!PyArg_ParseTuple(
          args, "O!O!|OiO:run", &PyList_Type, &inputs, &PyList_Type, &numbers, &slots, &watch.at, &watch.publish))
    return nullptr;
  return guarded([&]() -> PyObject* {
    auto& program = program_of(self);
    if (slots && !ints_of(slots, watch.slots))
      return nullptr;
    if (PyList_GET_SIZE(inputs) != static_cast<Py_ssize_t>(program.inputs.size()))
      return PyErr_Format(PyExc_TypeError, "expected %zu inputs, got %zd", program.inputs.size(), PyList_GET_SIZE(inputs));
    std::vector<c10::Scalar> scalars;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); ++i) {
      const auto number = number_of(PyList_GET_ITEM(numbers, i));
      if (!number)
        Py_RETURN_NONE; // not of this kind: the caller runs it in Python
      scalars.push_back(*number);
    }
    const auto begun = take_begun(program, inputs, scalars);
    const StateOfANewThread state;
    Run run{program, scalars, numbers};
    if (begun)
      run.values.swap(begun->values);
    else
      run.values.resize(program.size);
    run.stack.reserve(32);
    std::vector<at::Tensor> held; // with the GIL: the last reference beside a Python object goes with it, too
    held.reserve(program.inputs.size());
    for (size_t i = 0; i < program.inputs.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(i));
      if (!is_tensor(item))
        return PyErr_Format(PyExc_TypeError, "input %zu is no tensor but a %s", i, Py_TYPE(item)->tp_name);
      if (begun && begun->inputs[i].defined()) {
        if (program.donated[i])
          begun->inputs[i].reset();
      } else if (program.donated[i]) {
        run.values[program.inputs[i]] = Run::unshared(THPVariable_Unpack(item));
      } else {
        held.push_back(THPVariable_Unpack(item));
        run.values[program.inputs[i]] = held.back();
      }
    }
    for (size_t i = 0; i < program.inputs.size(); ++i)
      if (program.donated[i]) { // it dies at its last use
        Py_INCREF(Py_None);
        PyList_SetItem(inputs, static_cast<Py_ssize_t>(i), Py_None);
      }
    std::vector<at::Tensor> outputs;
    const int32_t position = run.all(outputs, begun ? begun->next.load() : 0, slots ? &watch : nullptr);
    if (position >= 0)
      return failure(run, position);
    return wrap(std::move(outputs));
  });
}

void py_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* program = reinterpret_cast<ProgramObject*>(self)->program;
  if (program)
    Py_CLEAR(program->in_python);
  delete program;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef program_methods[] = {
    {"add", py_add, METH_VARARGS,
     "add(node, in_place, frees, needs, roots, inputs, with_grad, device): append the instruction of a node; whether it "
     "is a call of a kernel. `needs` are the values that it reads, `roots` the values whose memory values have."},
    {"group", py_group, METH_VARARGS,
     "group(first, last, ends, frees): run instructions of the code together, chunk by chunk of their lists."},
    {"begin", py_begin, METH_VARARGS,
     "begin(path, slots, ends, epoch, num_values, size, due, watched, at): a run that begins while the trace is recorded: one of this "
     "epoch, along this path, to so many values. The inputs are those that it reads at these rows, and the instructions "
     "end at these counts of values. What is recorded is given at the count `due`, then after `size` values each. The "
     "values of the slots `watched` are there once the instructions before `at` have run."},
    {"follow", py_follow, METH_O,
     "follow(begun): run what is given to it, as far as that changes no input, until it is closed; `run` does the rest. "
     "Returns the nanoseconds that it did not wait."},
    {"drop", py_drop, METH_NOARGS, "drop(): forget what was begun."},
    {"run", py_run, METH_VARARGS,
     "run(inputs, scalars[, slots, at, publish]): outputs; (position, exception, values) if an op failed; None for "
     "scalars of other types. `publish` is called with the values of the slots once the instructions before `at` have run."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot program_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(py_dealloc)},
    {Py_tp_methods, program_methods},
    {0, nullptr},
};
PyType_Spec program_spec = {
    "_ltc_replay.Program", sizeof(ProgramObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, program_slots};
PyTypeObject* program_type = nullptr;

PyObject* py_program(PyObject*, PyObject* args) {
  Py_ssize_t size;
  PyObject *inputs, *donated, *outputs, *dtypes, *in_python, *generator;
  if (!PyArg_ParseTuple(
          args, "nOOOO!OO:program", &size, &inputs, &donated, &outputs, &PyList_Type, &dtypes, &in_python, &generator))
    return nullptr;
  if (!THPGenerator_Check(generator)) {
    PyErr_SetString(PyExc_TypeError, "the last argument must be a torch.Generator");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    auto program = std::make_unique<Program>();
    std::vector<int32_t> is_donated, flat;
    if (!ints_of(inputs, program->inputs) || !ints_of(donated, is_donated) || !ints_of(outputs, flat))
      return nullptr;
    program->size = static_cast<size_t>(size);
    for (const int32_t yes : is_donated)
      program->donated.push_back(yes != 0);
    for (size_t i = 0; i + 1 < flat.size(); i += 2) {
      PyObject* dtype = PyList_GET_ITEM(dtypes, static_cast<Py_ssize_t>(i / 2));
      program->outputs.push_back({flat[i], flat[i + 1] != 0, reinterpret_cast<THPDtype*>(dtype)->scalar_type});
    }
    program->generator = reinterpret_cast<THPGenerator*>(generator)->cdata;
    program->in_python = Py_NewRef(in_python);
    auto* object = reinterpret_cast<ProgramObject*>(program_type->tp_alloc(program_type, 0));
    if (object)
      object->program = program.release();
    else
      Py_CLEAR(program->in_python);
    return reinterpret_cast<PyObject*>(object);
  });
}

// number(tensor): the Python number of a CPU tensor of one element; None where PyTorch has to be asked.
PyObject* py_number(PyObject*, PyObject* object) {
  if (!is_tensor(object))
    Py_RETURN_NONE;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() != 1 || tensor.is_conj() || tensor.is_neg())
    Py_RETURN_NONE;
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return PyFloat_FromDouble(*static_cast<const float*>(data));
    case at::kDouble:
      return PyFloat_FromDouble(*static_cast<const double*>(data));
    case at::kLong:
      return PyLong_FromLongLong(*static_cast<const int64_t*>(data));
    case at::kBool:
      return PyBool_FromLong(*static_cast<const bool*>(data));
    default:
      Py_RETURN_NONE;
  }
}

// setup(Ref, Scalar, Write, facts): the types of what stands in a node's arguments, and what tells about an op.
PyObject* py_setup(PyObject*, PyObject* args) {
  PyObject *ref, *scalar, *write, *told;
  if (!PyArg_ParseTuple(args, "OOOO:setup", &ref, &scalar, &write, &told))
    return nullptr;
  ref_type = Py_NewRef(ref);
  scalar_type = Py_NewRef(scalar);
  write_type = Py_NewRef(write);
  facts_of = Py_NewRef(told);
  Py_RETURN_NONE;
}

template <typename Function>
void read_address(PyObject* address, Function& function) {
  function = reinterpret_cast<Function>(PyLong_AsVoidPtr(address));
}

PyObject* py_set_team(PyObject*, PyObject* args) {
  PyObject *openmp, *mkl, *pause, *parallel;
  long most_ms, large_op_ns;
  if (!PyArg_ParseTuple(args, "OOOOll:set_team", &openmp, &mkl, &pause, &parallel, &most_ms, &large_op_ns))
    return nullptr;
  Team::most_wait = std::chrono::milliseconds(most_ms);
  Team::large_op = std::chrono::nanoseconds(large_op_ns);
  read_address(openmp, Team::set_openmp);
  read_address(mkl, Team::set_mkl);
  read_address(pause, Team::pause);
  read_address(parallel, Team::parallel);
  if (PyErr_Occurred())
    return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_after_fork(PyObject*, PyObject*) {
  Team::after_fork();
  Py_RETURN_NONE;
}

PyObject* py_release(PyObject*, PyObject*) {
  Team::release();
  Py_RETURN_NONE;
}

PyObject* py_share(PyObject*, PyObject* count) {
  const long num_threads = PyLong_AsLong(count);
  if (num_threads == -1 && PyErr_Occurred())
    return nullptr;
  Team::share(static_cast<int>(num_threads));
  Py_RETURN_NONE;
}

// Takes the last elements out of a list. Returns how many there were, at most `most`; -1 with an error.
Py_ssize_t take_out(PyObject* list, Py_ssize_t most) {
  const Py_ssize_t size = PyList_Size(list);
  const Py_ssize_t count = std::min(size, most);
  return count > 0 && PyList_SetSlice(list, size - count, size, nullptr) < 0 ? -1 : count;
}

PyObject* py_begin_wait(PyObject*, PyObject* waiting) {
  if (PyList_Append(waiting, Py_None) < 0)
    return nullptr;
  Team::begin_wait();
  Py_RETURN_NONE;
}

PyObject* py_wake(PyObject*, PyObject* waiting) {
  const Py_ssize_t count = take_out(waiting, PY_SSIZE_T_MAX);
  if (count < 0)
    return nullptr;
  Team::end_waits(static_cast<int>(count));
  Py_RETURN_NONE;
}

PyObject* py_end_wait(PyObject*, PyObject* waiting) {
  const Py_ssize_t count = take_out(waiting, 1);
  if (count < 0)
    return nullptr;
  Team::end_waits(static_cast<int>(count));
  if (Team::is_crowded()) {
    Py_BEGIN_ALLOW_THREADS
    Team::await_core();
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"set_team", py_set_team, METH_VARARGS,
     "set_team(omp_set_num_threads, MKL_Set_Num_Threads_Local, omp_pause_resource_all, GOMP_parallel, most_ms, large_op_ns):\n"
     "addresses, 0 where there is none; how long `end_wait` may take; what a run's ops take on average that needs all threads."},
    {"after_fork", py_after_fork, METH_NOARGS, "after_fork(): in a forked child, no thread waits and no run computes."},
    {"release", py_release, METH_NOARGS, "release(): frees the OpenMP threads of this thread's team."},
    {"share", py_share, METH_O,
     "share(count): this thread's runs compute with so many threads, one less while nobody waits; 0: as they are set."},
    {"begin_wait", py_begin_wait, METH_O,
     "begin_wait(waiting): a thread waits for a program, and needs no core; the list gets an element for it."},
    {"wake", py_wake, METH_O, "wake(waiting): those that wait are about to go on."},
    {"end_wait", py_end_wait, METH_O, "end_wait(waiting): one goes on, once no run computes with all threads."},
    {"setup", py_setup, METH_VARARGS, "setup(Ref, Scalar, Write, facts): called once, before `program`."},
    {"number", py_number, METH_O, "number(tensor): the number of a tensor of one element; None where PyTorch has to be asked."},
    {"program", py_program, METH_VARARGS, 
     "program(size, inputs, donated, (slot, copied, ...), dtypes of outputs, in_python, generator): a Program."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ltc_replay", "Replay programs.", -1, methods};

} // namespace

PyMODINIT_FUNC PyInit__ltc_replay() {
  for (const auto& [name, text] : std::initializer_list<std::pair<PyObject**, const char*>>{
           {&name_op, "op"}, {&name_args, "args"}, {&name_kwargs, "kwargs"}, {&name_first, "first"}, {&name_outs, "outs"},
           {&name_writes, "writes"}, {&name_result, "result"}, {&name_dtype, "dtype"},
           {&name_uses_default_dtype, "uses_default_dtype"}})
    *name = PyUnicode_InternFromString(text);
  program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
  BegunObject::name_error = PyUnicode_InternFromString("error");
  BegunObject::name_data = PyUnicode_InternFromString("data");
  BegunObject::type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&begun_spec));
  return program_type && BegunObject::type ? PyModule_Create(&module) : nullptr;
}
