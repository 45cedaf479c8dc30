// The fast path of recording: record a call that repeats a known step of its trace, without running Python.
//
// record/recorder.py and record/view_recorder.py define what recording is (docs/recording.md). In a training loop
// nearly every call repeats the step that followed here last time, or one that did before. This file registers a kernel
// (`Follower`) for each op at the dispatcher's key for Python. When Python records a call, the kernel keeps with the
// step what to expect of a repetition (`Expected`, expected.h). A call that meets it moves the cursor, and its results
// are made in C++ (`NextStep`, next_step.h). So are those of a call that was recorded at another place: its step is a copy
// (`CopiedStep`, copied_step.h). Every other call goes to Python unchanged: a new step, or a stale operand.
#include "at_once.h"
#include "attention.h"
#include "composite.h"
#include "copied.h"
#include "copied_step.h"
#include "dropout.h"
#include "known_read.h"
#include "known_upload.h"
#include "locked.h"
#include "view_function.h"
#include "whole_op.h"

#include <ATen/core/stack.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

namespace ltc {
namespace {

// ---- kernels at the dispatcher's key for Python --------------------------------------------------------------------

constexpr size_t kMostHints = 1000;

bool copies = true; // read and changed under the GIL

// What PyTorch warns of where a kernel takes the place of another one: those of factories do, and call it.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
thread_local bool is_for_python = false; // `Follower` leaves the last call to Python because of `is_of_other_mode`

// Lets a step that runs while it is recorded (runtime/early_run.py) run on, if it has come so far. An error is left set.
void give_more(PyObject* trace) {
  if (trace_of.give_more.is_none(trace))
    return;
  const Py_ssize_t count = trace_of.count.number(trace), limit = trace_of.limit.number(trace);
  const Py_ssize_t first_limit = trace_of.first_limit.number(trace);
  if (count < limit || count >= first_limit)
    return;
  const Object give(Py_NewRef(trace_of.give_more.of(trace))), cursor(Py_NewRef(trace_of.cursor.of(trace)));
  const Object epoch(PyLong_FromSsize_t(trace_of.epoch.number(trace))), at(PyLong_FromSsize_t(count));
  const Object due(PyLong_FromSsize_t(limit));
  if (!epoch || !at || !due)
    return;
  PyObject* const given[] = {
      cursor.get(), epoch.get(), due.get(), at.get(), trace_of.inputs.of(trace), trace_of.scalars.of(trace)};
  const Object next(PyObject_Vectorcall(give.get(), given, 6, nullptr));
  if (!next || !PyLong_Check(next.get()))
    return;
  const Py_ssize_t then = PyLong_AsSsize_t(next.get());
  if (then >= 0)
    trace_of.limit.set_number(trace, then ? std::min(then, first_limit) : first_limit);
}

// Calls `read`, under the lock of the trace, with the read of a tensor that C++ may make; throws the error that it leaves.
template <typename Read>
void read_known(const at::Tensor& tensor, Read&& read) {
  const Object handle(handle_of(tensor));
  if (!handle || !(is_type(handle.get(), cell_type) || is_type(handle.get(), view_type)))
    return;
  const Object trace(Py_NewRef(trace_of_handle(handle.get())));
  if (trace_of.reads.is_none(trace.get()))
    return;
  const Object reads(Py_NewRef(trace_of.reads.of(trace.get())));
  bool is_read = false;
  {
    const Locked locked(trace.get());
    if (locked.is_taken)
      is_read = read(KnownRead(*reinterpret_cast<KnownReads*>(reads.get()), trace.get(), handle.get()));
  }
  if (!is_read && PyErr_Occurred())
    throw_python_error();
}

// The kernel of one op: records a call that repeats a known step, else calls Python.
class Follower final : public c10::OperatorKernel {
 public:
  explicit Follower(Op given)
      : op(std::move(given)),
        writes_list(op.writes_list()),
        takes_masks(op.handle.schema().name() == "aten::index"),
        copies_in(op.handle.schema().name() == "aten::copy_"),
        copies_out(op.handle.schema().name() == "aten::_to_copy"),
        may_run_at_once(op.kind != kShare && !op.has_out()),
        python(op.handle.getComputedKernelForDispatchKey(key_of(op))) {}

  // Factories have no tensor that would bring them to the key for Python.
  static c10::DispatchKey key_of(const Op& op) {
    return op.is_factory ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::Python;
  }

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!may_handle())
      return python.callBoxed(handle, keys, stack);
    if (copies_in && torch::jit::peek(*stack, 1, op.codes.size()).toTensor().is_cpu()) { // an upload: nothing is recorded
      if (!upload_on(*stack))
        python.callBoxed(handle, keys, stack);
      return;
    }
    if (copies_out && is_to_cpu(*stack)) { // a read: nothing is recorded
      at::Tensor copied = read_copy(*stack);
      if (!copied.defined())
        return python.callBoxed(handle, keys, stack);
      torch::jit::drop(*stack, op.codes.size());
      stack->emplace_back(std::move(copied));
      return;
    }
    if (op.takes_number)
      use_number(op, stack->data() + (stack->size() - op.codes.size()));
    Noted noted;
    {
      const Gil gil;
      ++num_called;
      if (may_run_at_once && num_at_once.load(std::memory_order_relaxed) > 0 && run_at_once(*stack))
        return;
      if ((op.kind == kShare || (records && op.kind != kNever)) && follow(*stack, noted))
        return;
    }
    python.callBoxed(handle, keys, stack);
    noted.keep(torch::jit::last(*stack, op.handle.schema().returns().size()), [&](PyObject* step, PyObject* key) {
      if (!op.is_factory && op.kind != kNever)
        originals.add(op, noted, step, key);
    });
  }

 private:
  const Op op;
  Originals& originals = *new Originals(); // read and changed under the GIL; leaked: kernels outlive the interpreter
  const bool writes_list, takes_masks, copies_in, copies_out, may_run_at_once;
  const c10::SafeKernelFunction python;
  // A step -> which of the ways after it is compared first: a hint, also where the step is another one by now.
  std::unordered_map<PyObject*, size_t>& first_ways = *new std::unordered_map<PyObject*, size_t>(); // leaked, too

  static void count_writes(c10::ArrayRef<IValue> tensors) {
    for (const IValue& item : tensors) {
      auto* tensor = item.toTensor().unsafeGetTensorImpl();
      if (!tensor->is_inference())
        tensor->bump_version();
    }
  }

  // Whether Python must handle the call because of inference mode. Outside of it, inference tensors of a list must not be
  // written.
  bool is_of_other_mode(const IValue& first) const {
    const bool is_inference = c10::InferenceMode::is_enabled();
    if (op.kind == kShare)
      return is_inference || (first.isTensor() && first.toTensor().is_inference());
    if (!writes_list || is_inference)
      return false;
    for (const IValue& item : first.toListRef())
      if (item.toTensor().is_inference())
        return true;
    return false;
  }

  // Whether something is indexed by a mask, in whose place Python records the positions where it is true.
  static bool has_mask(const IValue& indices) {
    for (const IValue& item : indices.toListRef())
      if (item.isTensor() && item.toTensor().defined() && item.toTensor().scalar_type() == at::kBool)
        return true;
    return false;
  }

  // Whether a call of `_to_copy` asks for nothing but a copy on the CPU.
  bool is_to_cpu(const torch::jit::Stack& stack) const {
    const auto args = torch::jit::last(stack, op.codes.size()); // self, dtype, layout, device, pin_memory, non_blocking, format
    if (!args[3].isDevice() || !args[3].toDevice().is_cpu())
      return false;
    const bool is_same_dtype = args[1].isNone() || args[1].toScalarType() == args[0].toTensor().scalar_type();
    const bool is_strided = args[2].isNone() || args[2].toLayout() == at::kStrided;
    const bool is_plain = args[6].isNone() || args[6].toMemoryFormat() == at::MemoryFormat::Preserve;
    return is_same_dtype && is_strided && is_plain && !(args[4].isBool() && args[4].toBool());
  }

  at::Tensor read_copy(const torch::jit::Stack& stack) const {
    const at::Tensor of = torch::jit::peek(stack, 0, op.codes.size()).toTensor();
    at::Tensor copied;
    const Gil gil;
    read_known(of, [&](KnownRead read) {
      copied = read.copy(of);
      return copied.defined();
    });
    return copied;
  }

  // Whether Python is asked before the next op (`Trace.on_limit`). What the operands of a call need belongs to the call.
  static bool is_full(PyObject* trace) {
    return trace_of.count.number(trace) >= trace_of.limit.number(trace);
  }

  // Whether the call is a step after the cursor, once its operands are recorded, or becomes one. An error is left set.
  bool is_step(PyObject* trace, c10::ArrayRef<IValue> args, std::optional<NextStep>& call) {
    bool is_next = call.emplace(op, trace, args).is_next() || (!PyErr_Occurred() && is_other(trace, args, call));
    if (!is_next && !PyErr_Occurred() && NextStep(op, trace, args).make_operands() && !PyErr_Occurred())
      is_next = call.emplace(op, trace, args).is_next() || (!PyErr_Occurred() && is_other(trace, args, call));
    if (!is_next && !PyErr_Occurred() && copies && !op.is_factory && CopiedStep(op, trace, args).put(originals))
      is_next = call.emplace(op, trace, args).is_next();
    return is_next;
  }

  // Runs the call now, if ops of its trace run at once (at_once.h) and its operands are there.
  bool run_at_once(torch::jit::Stack& stack) {
    const auto args = torch::jit::last(stack, op.codes.size());
    const Object handle(op.is_factory ? nullptr : first_handle(args));
    const Object trace(Py_XNewRef(
        handle ? trace_of_handle(handle.get()) : op.is_factory ? trace_of_device(args[op.device_at]) : nullptr));
    if (!trace || trace_of.at_once.is_none(trace.get()) || is_other_mode_at_once(args[0]))
      return false;
    const Object state(Py_NewRef(trace_of.at_once.of(trace.get())));
    OpAtOnce call(op, *reinterpret_cast<AtOnce*>(state.get()), trace.get(), args);
    torch::jit::Stack results;
    bool is_done = call.is_ready();
    if (is_done && call.changes_cells()) {
      const Locked locked(trace.get());
      is_done = locked.is_taken && call.run(results);
    } else if (is_done) {
      is_done = call.run(results);
    }
    if (PyErr_Occurred())
      throw_python_error();
    if (!is_done)
      return false;
    ++num_ran;
    if (writes_list)
      count_writes(args[0].toListRef());
    look_after(*reinterpret_cast<AtOnce*>(state.get()));
    torch::jit::drop(stack, op.codes.size());
    for (IValue& result : results)
      stack.push_back(std::move(result));
    return true;
  }

  static void look_after(AtOnce& state) {
    if (--state.next_look != 0)
      return;
    const Object seen(PyObject_CallNoArgs(state.look));
    if (!seen) // a signal handler may raise there
      throw_python_error();
  }

  // As `is_of_other_mode`, but that a view is made here if it is to be what the mode says.
  bool is_other_mode_at_once(const IValue& first) const {
    if (op.kind != kView)
      return is_of_other_mode(first);
    return !first.isTensor() || first.toTensor().is_inference() != c10::InferenceMode::is_enabled();
  }

  // Records the call and returns true if it is a known step of its trace. Else notes what to expect of it.
  bool follow(torch::jit::Stack& stack, Noted& noted) {
    const auto args = torch::jit::last(stack, op.codes.size());
    const Object handle(op.is_factory ? nullptr : first_handle(args));
    is_for_python = is_of_other_mode(args[0]);
    if (is_for_python || (takes_masks && has_mask(args[1])))
      return false;
    const Object of_factory(op.is_factory ? Py_XNewRef(trace_of_device(args[op.device_at])) : nullptr);
    if (!handle && !of_factory)
      return false;
    PyObject* trace = of_factory ? of_factory.get() : trace_of_handle(handle.get());
    std::optional<IValue> result;
    if (op.kind == kShare) {
      const at::Tensor tensor = share(handle.get());
      if (tensor.defined())
        result = tensor;
    } else {
      const Locked locked(trace);
      if (!locked.is_taken)
        throw_python_error();
      give_more(trace);
      std::optional<NextStep> call;
      const bool is_next = !PyErr_Occurred() && !is_full(trace) && is_step(trace, args, call);
      if (PyErr_Occurred())
        throw_python_error();
      if (!is_next) {
        Noter(op, trace, args).note(noted);
        if (PyErr_Occurred())
          throw_python_error();
        if (op.is_factory && noted.expected) // its dtype follows the default one where none is given
          reinterpret_cast<Expected*>(noted.expected.get())->default_dtype = c10::get_default_dtype_as_scalartype();
        return false;
      }
      // A view is an inference tensor if its base is one, in any mode.
      std::optional<c10::InferenceMode> mode;
      if (op.kind == kView && args[0].toTensor().is_inference() != c10::InferenceMode::is_enabled())
        mode.emplace(args[0].toTensor().is_inference());
      result = call->make();
    }
    if (!result)
      throw_python_error();
    ++num_followed;
    if (writes_list)
      count_writes(args[0].toListRef());
    torch::jit::drop(stack, op.codes.size());
    deliver(stack, std::move(*result));
    return true;
  }

  // Whether the call is that of another known step, where the script has gone on in several ways: those after a cut, or
  // the branches of an `if`. The trie stays as it is: to change it runs Python, and so signal handlers, which may record
  // ops. Calls of any size (`dynamic`) are left to Python. A loop takes its ways in the order in which it made them: that of
  // the last time and the one after it are compared first.
  bool is_other(PyObject* trace, c10::ArrayRef<IValue> args, std::optional<NextStep>& call) const {
    const Object cursor(Py_NewRef(trace_of.cursor.of(trace)));
    if (!step_of.dynamic.is_none(cursor.get()))
      return false;
    const auto ways = other_ways(cursor.get(), [&](PyObject* step) {
      return step_of.dynamic.is_none(step) && !step_of.expected.is_none(step) &&
          reinterpret_cast<Expected*>(step_of.expected.of(step))->op == &op;
    });
    const auto hint = first_ways.find(cursor.get());
    const size_t first = hint == first_ways.end() ? 0 : hint->second;
    for (size_t i = 0; i < ways.size() && i < kMostCompared; ++i) {
      if (trace_of.cursor.of(trace) != cursor.get())
        return false;
      const size_t at = (first + i) % ways.size();
      if (call.emplace(op, trace, args).is_at(ways[at].first.get())) {
        if (first_ways.size() >= kMostHints)
          first_ways.clear();
        first_ways[cursor.get()] = at;
        return true;
      }
      if (PyErr_Occurred())
        return false;
    }
    return false;
  }

  void deliver(torch::jit::Stack& stack, IValue result) const {
    const size_t n = op.handle.schema().returns().size();
    if (n == 1)
      stack.push_back(std::move(result));
    else if (n > 1)
      for (const IValue& item : result.toTupleRef().elements())
        stack.push_back(item);
  }
};

// The kernel of `item()`: reads a number whose cut has been made before (known_read.h), else calls Python.
class Reader final : public c10::OperatorKernel {
 public:
  Reader(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!may_handle())
      return python.callBoxed(handle, keys, stack);
    std::optional<c10::Scalar> number;
    {
      const Gil gil;
      number = read(torch::jit::last(*stack, 1));
    }
    if (!number)
      return python.callBoxed(handle, keys, stack);
    torch::jit::drop(*stack, 1);
    stack->emplace_back(*number);
  }

 private:
  const c10::SafeKernelFunction python;

  static std::optional<c10::Scalar> read(c10::ArrayRef<IValue> args) {
    std::optional<c10::Scalar> number;
    read_known(args[0].toTensor(), [&](KnownRead read) {
      number = read.number();
      return number.has_value();
    });
    return number;
  }
};

// The kernel of what solvers and factorizations check: whether the codes of their errors are zero. Reads them as `item()`
// does; an error is Python's.
class Checker final : public c10::OperatorKernel {
 public:
  Checker(const c10::OperatorHandle& op, c10::DispatchKey key) : python(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!may_handle() || !is_sound(torch::jit::peek(*stack, 0, 3).toTensor()))
      return python.callBoxed(handle, keys, stack);
    torch::jit::drop(*stack, 3);
  }

 private:
  const c10::SafeKernelFunction python;

  static bool is_sound(const at::Tensor& codes) {
    const Gil gil;
    bool found = false;
    read_known(codes, [&](KnownRead read) { return found = read.is_sound(codes); });
    return found;
  }
};

// Replaces `LazyTensor.__torch_dispatch__`. Handles `detach`, which autograd calls without the dispatcher when it saves
// the result of an op. Every other call goes to Python.
PyObject* dispatch(PyObject*, PyObject* const* given, Py_ssize_t n) {
  const bool is_detach = n == 4 && given[0] == detach && PyTuple_CheckExact(given[2]) &&
      PyTuple_GET_SIZE(given[2]) == 1 && is_type(PyTuple_GET_ITEM(given[2], 0), lazy_tensor);
  if (!is_on || !is_detach || is_for_python || c10::InferenceMode::is_enabled())
    return PyObject_Vectorcall(python_dispatch, given, n, nullptr);
  const Object handle(PyObject_GetAttr(PyTuple_GET_ITEM(given[2], 0), name_handle));
  const at::Tensor tensor = handle ? share(handle.get()) : at::Tensor();
  return tensor.defined() ? THPVariable_Wrap(tensor) : nullptr;
}

// ---- the module ----------------------------------------------------------------------------------------------------

// add(name, overload name, kind, draws, codes, writes, schema): register the kernel of an op.
PyObject* add(PyObject*, PyObject* given) {
  const char *name, *overload, *kind;
  int draws;
  PyObject *codes, *writes, *schema;
  if (!PyArg_ParseTuple(given, "ssspO!O!O", &name, &overload, &kind, &draws, &PyTuple_Type, &codes, &PyTuple_Type, &writes, &schema))
    return nullptr;
  const std::string word(kind);
  const Kind which = word == "view" ? kView : word == "share" ? kShare : word == "never" ? kNever : kRecorded;
  try {
    auto& dispatcher = c10::Dispatcher::singleton();
    Op op{which, draws != 0, {}, {}, dispatcher.findSchemaOrThrow(name, overload)};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(codes); ++i) {
      op.codes.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(codes, i))));
      op.writes.push_back(PyTuple_GET_ITEM(writes, i) == Py_True);
      op.writes_any |= op.writes.back();
    }
    if (PyErr_Occurred() || op.codes.size() != op.handle.schema().arguments().size()) {
      if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "not as many arguments as the op has");
      return nullptr;
    }
    op.schema = Py_NewRef(schema);
    op.note_numbers();
    if (word == "factory" && !op.note_factory()) {
      PyErr_SetString(PyExc_ValueError, "a factory without a device");
      return nullptr;
    }
    const auto key = Follower::key_of(op);
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard silent(&silence);
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Follower>(std::move(op)));
    static auto* all = new std::vector<c10::RegistrationHandleRAII>(); // leaked: ops are called until the very end
    all->push_back(dispatcher.registerImpl(
        {name, overload}, key, std::move(kernel), std::nullopt, nullptr, "ltc"));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// add_composite(name, overload name, keeps views): register the kernel of an op that consists of others.
PyObject* add_composite(PyObject*, PyObject* given) {
  const char *name, *overload;
  int keeps_views;
  if (!PyArg_ParseTuple(given, "ssp", &name, &overload, &keeps_views))
    return nullptr;
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>(); // leaked, as those of `add`
  try {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
        std::make_unique<Composite>(dispatcher.findSchemaOrThrow(name, overload), keeps_views != 0));
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard silent(&silence);
    registered->push_back(
        dispatcher.registerImpl({name, overload}, c10::DispatchKey::Python, std::move(kernel), std::nullopt, nullptr, "ltc"));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <typename Kernel>
bool add_kernel(const char* name, c10::DispatchKey key, const char* overload = "") {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>(); // leaked, as those of `add`
  try {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(dispatcher.findSchemaOrThrow(name, overload), key));
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard silent(&silence);
    registered->push_back(dispatcher.registerImpl({name, overload}, key, std::move(kernel), std::nullopt, nullptr, "ltc"));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
  return true;
}

// add_kernels(): register those of single ops.
PyObject* add_kernels(PyObject*, PyObject*) {
  const bool added = add_kernel<Reader>("aten::_local_scalar_dense", c10::DispatchKey::Python) &&
      add_kernel<Checker>("aten::_linalg_check_errors", c10::DispatchKey::Python) &&
      add_kernel<Unwritten>("aten::empty_like", c10::DispatchKey::Python) &&
      add_kernel<Unwritten>("aten::new_empty", c10::DispatchKey::Python) &&
      add_kernel<Unwritten>("aten::new_empty_strided", c10::DispatchKey::Python) &&
      add_kernel<Unwritten>("aten::empty_strided", c10::DispatchKey::PrivateUse1) &&
      add_kernel<Unwritten>("aten::empty", c10::DispatchKey::PrivateUse1, "memory_format") &&
      add_kernel<Upload>("aten::copy_", c10::DispatchKey::PrivateUse1) &&
      add_kernel<Dropout>("aten::native_dropout", c10::DispatchKey::Python) &&
      add_kernel<WholeLinear>("aten::linear", c10::DispatchKey::AutogradPrivateUse1);
  return added ? Py_NewRef(Py_None) : nullptr;
}

// add_attention(settings, name): register the kernels of attention, for as long as this setting is what it is.
PyObject* add_attention(PyObject*, PyObject* given) {
  if (!Attention::go_by(given))
    return nullptr;
  for (const auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1})
    if (!add_kernel<Attention>("aten::scaled_dot_product_attention", key))
      return nullptr;
  Py_RETURN_NONE;
}

PyObject* torch_function; // of `LazyTensor`; set by `setup`, never released

// PyTorch asks each operand of each call for `__torch_function__` by this slot, which Python itself does not read where
// there is `tp_getattro`; a look into the class would cost 0.1 us an operand.
PyObject* attribute_for_torch(PyObject* tensor, char* name) {
  if (std::strcmp(name, "__torch_function__") == 0 && is_type(tensor, lazy_tensor))
    return Py_NewRef(torch_function);
  const Object attribute(PyUnicode_FromString(name));
  return attribute ? PyObject_GetAttr(tensor, attribute.get()) : nullptr;
}

// setup(aten.detach.default, LazyTensor.__torch_dispatch__, make_empty, aten.empty_strided.default, stream, epochs,
//       LazyTensor, Trace, Step, Node, Cell, View, Value, Buffer, TensorMeta, Dynamic, Entry, Ref, Scalar, AnyMeta, OFTEN, ANY,
//       source's parts, modules)
PyObject* setup(PyObject*, PyObject* given) {
  PyObject *op, *python, *empty, *memory, *stream, *numbers, *tensor, *trace, *step, *node, *cell, *view, *value, *buffer, *meta, *dynamic, *entry, *ref, *scalar, *form, *any, *codes, *lines, *backward, *words, *of_modules;
  if (!PyArg_ParseTuple(given, "OOOOOOOOOOOOOOOOOOOOnO(OOOO)O", &op, &python, &empty, &memory, &stream, &numbers, &tensor, &trace, &step, &node, &cell, &view, &value, &buffer, &meta, &dynamic, &entry, &ref, &scalar, &form, &often, &any, &codes, &lines, &backward, &words, &of_modules))
    return nullptr;
  const auto find = [](PyObject* type, std::initializer_list<std::pair<Slot*, const char*>> slots) {
    for (const auto& [slot, name] : slots) {
      if (!slot->find(type, name))
        return false;
    }
    return true;
  };
  const bool found =
      find(trace, {{&trace_of.lock, "lock"}, {&trace_of.epoch, "epoch"}, {&trace_of.cursor, "cursor"},
                   {&trace_of.count, "count"}, {&trace_of.limit, "limit"}, {&trace_of.values, "values"},
                   {&trace_of.inputs, "inputs"}, {&trace_of.scalars, "scalars"}, {&trace_of.sized, "sized"}, {&trace_of.device, "device"},
                   {&trace_of.root, "root"}, {&trace_of.first_limit, "first_limit"},
                   {&trace_of.steps, "steps"}, {&trace_of.reads, "reads"}, {&trace_of.uploads, "uploads"}, {&trace_of.give_more, "give_more"},
                   {&trace_of.at_once, "at_once"}}) &&
      find(step, {{&step_of.parent, "parent"}, {&step_of.next, "next"},
                  {&step_of.next_key, "next_key"}, {&step_of.children, "children"}, {&step_of.node, "node"},
                  {&step_of.inputs, "inputs"}, {&step_of.num_scalars, "num_scalars"}, {&step_of.lenses, "lenses"},
                  {&step_of.expected, "expected"}, {&step_of.dynamic, "dynamic"}, {&step_of.end, "end"},
                  {&step_of.patterns, "patterns"}, {&step_of.programs, "programs"}, {&step_of.known, "known"},
                  {&step_of.probes, "probes"}}) &&
      find(dynamic, {{&dynamic_of.known, "known"}, {&dynamic_of.infer, "infer"}, {&dynamic_of.places, "places"},
                     {&dynamic_of.closed, "closed"}}) &&
      find(entry, {{&entry_of.outs, "outs"}, {&entry_of.lenses, "lenses"}, {&entry_of.uses, "uses"}}) &&
      find(node, {{&node_of.outs, "outs"}, {&node_of.result, "result"},
                  {&node_of.uses_default_dtype, "uses_default_dtype"}, {&node_of.op, "op"}, {&node_of.args, "args"},
                  {&node_of.kwargs, "kwargs"}, {&node_of.first, "first"}, {&node_of.writes, "writes"},
                  {&node_of.view, "view"}, {&node_of.line, "line"}, {&node_of.module, "module"},
                  {&node_of.reads, "_reads"}}) &&
      find(cell, {{&cell_of.trace, "trace"}, {&cell_of.value, "value"}, {&cell_of.meta, "meta"},
                  {&cell_of.version, "version"}}) &&
      find(view, {{&view_of.base, "base"}, {&view_of.lens, "lens"}, {&view_of.meta, "meta"},
                  {&view_of.trace, "trace"}, {&view_of.value, "value"}, {&view_of.version, "version"}}) &&
      find(value, {{&value_of.buffer, "buffer"}, {&value_of.epoch, "epoch"}, {&value_of.index, "index"}}) &&
      find(meta, {{&meta_of.size, "size"}, {&meta_of.stride, "stride"}, {&meta_of.offset, "offset"},
                  {&meta_of.dtype, "dtype"}, {&meta_of.maker, "_maker"}, {&meta_of.contiguous, "contiguous"},
                  {&meta_of.numel, "numel"}, {&meta_of.nbytes, "nbytes"}}) &&
      find(buffer, {{&buffer_error, "error"}, {&buffer_data, "data"}});
  if (!found)
    return nullptr;
  detach = Py_NewRef(op);
  python_dispatch = Py_NewRef(python);
  make_empty = Py_NewRef(empty);
  empty_op = Py_NewRef(memory);
  find_stream = Py_NewRef(stream);
  user_codes = Py_NewRef(codes);
  described_lines = Py_NewRef(lines);
  backward_code = Py_NewRef(backward);
  words_in_backward = Py_NewRef(words);
  modules = Py_NewRef(of_modules);
  step_type = Py_NewRef(step);
  node_type = Py_NewRef(node);
  ref_type = Py_NewRef(ref);
  scalar_type = Py_NewRef(scalar);
  any_meta = Py_NewRef(form);
  any_size = Py_NewRef(any);
  epochs = Py_NewRef(numbers);
  buffer_type = Py_NewRef(buffer);
  lazy_tensor = Py_NewRef(tensor);
  cell_type = Py_NewRef(cell);
  view_type = Py_NewRef(view);
  value_type = Py_NewRef(value);
  torch_function = PyObject_GetAttrString(tensor, "__torch_function__");
  if (!torch_function)
    return nullptr;
  reinterpret_cast<PyTypeObject*>(tensor)->tp_getattr = attribute_for_torch;
  const Object attribute(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(tensor), &handle_attribute));
  if (!attribute || PyObject_SetAttr(tensor, name_handle, attribute.get()) < 0)
    return nullptr;
  Py_RETURN_NONE;
}

// share_pauses(calls, paused): the lists of ltc_core/uninterrupted.py. Called before `setup`.
PyObject* share_pauses(PyObject*, PyObject* given) {
  PyObject *first, *second;
  if (!PyArg_ParseTuple(given, "O!O!", &PyList_Type, &first, &PyList_Type, &second))
    return nullptr;
  calls = Py_NewRef(first);
  paused = Py_NewRef(second);
  Py_RETURN_NONE;
}

// use_traces(traces): the traces of all devices, by index. Called before `add`.
PyObject* use_traces(PyObject*, PyObject* given) {
  if (!PyDict_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "a dict of traces is expected");
    return nullptr;
  }
  traces = Py_NewRef(given);
  Py_RETURN_NONE;
}

// use_view_ops((view op, ...), (view op, ...), as_strided): see `view_ops`.
PyObject* use_view_ops(PyObject*, PyObject* given) {
  PyObject *copying, *reshaping, *strided;
  if (!PyArg_ParseTuple(given, "O!O!O", &PyTuple_Type, &copying, &PyTuple_Type, &reshaping, &strided))
    return nullptr;
  view_ops = {Py_NewRef(copying), Py_NewRef(reshaping), Py_NewRef(strided)};
  Py_RETURN_NONE;
}

// note_elements(view): see `KnownParts`.
PyObject* note_elements(PyObject*, PyObject* view) {
  if (!is_type(view, view_type)) {
    PyErr_SetString(PyExc_TypeError, "a view");
    return nullptr;
  }
  KnownParts::add(view);
  Py_RETURN_NONE;
}

// run_at_once(trace, state): ops of the trace run at once from now on; with None no longer.
PyObject* use_at_once(PyObject*, PyObject* given) {
  PyObject *trace, *state;
  if (!PyArg_ParseTuple(given, "OO", &trace, &state))
    return nullptr;
  if (state != Py_None && !Py_IS_TYPE(state, &at_once_type)) {
    PyErr_SetString(PyExc_TypeError, "what at_once() made, or None");
    return nullptr;
  }
  num_at_once += (state != Py_None) - !trace_of.at_once.is_none(trace);
  trace_of.at_once.set(trace, state);
  Py_RETURN_NONE;
}

// after_fork(): called in a forked child.
PyObject* after_fork(PyObject*, PyObject*) {
  Pause::after_fork();
  Py_RETURN_NONE;
}
// use_objects(type of locks, functions): the types of tensor/csrc/ltc_objects.cpp are there, and used by these functions.
PyObject* use_objects(PyObject*, PyObject* given) {
  PyObject *type, *functions;
  if (!PyArg_ParseTuple(given, "OO", &type, &functions))
    return nullptr;
  const void* found = PyCapsule_GetPointer(functions, "functions");
  if (!found)
    return nullptr;
  memcpy(&native_functions, found, sizeof(native_functions));
  lock_type = Py_NewRef(type);
  Py_RETURN_NONE;
}

// enable(on, records): handle calls in C++, or leave all of them to Python; record them, or leave those that do not run at
// once to Python.
PyObject* enable(PyObject*, PyObject* given) {
  int on, and_records;
  if (!PyArg_ParseTuple(given, "pp", &on, &and_records))
    return nullptr;
  is_on = on;
  records = and_records;
  Py_RETURN_NONE;
}
// wrap(handle): a lazy tensor that holds the handle.
PyObject* wrap_handle(PyObject*, PyObject* handle) {
  const at::Tensor tensor = share(handle);
  return tensor.defined() ? THPVariable_Wrap(tensor) : nullptr;
}
// copy_steps(on): whether calls that were recorded elsewhere get copies of those steps. Returns the previous setting.
PyObject* copy_steps(PyObject*, PyObject* on) {
  const bool were_on = copies;
  copies = PyObject_IsTrue(on) == 1;
  return PyBool_FromLong(were_on);
}
// count(): the number of calls that the kernels have handled without Python so far.
PyObject* count(PyObject*, PyObject*) {
  return PyLong_FromSsize_t(num_followed);
}

// calls(): (calls of ops so far, those that Python has recorded).
PyObject* count_calls(PyObject*, PyObject*) {
  return Py_BuildValue("(nn)", num_called, num_called - num_followed - num_ran);
}

PyMethodDef methods[] = {
    {"share_pauses", share_pauses, METH_VARARGS, nullptr},
    {"use_traces", use_traces, METH_O, nullptr},
    {"after_fork", after_fork, METH_NOARGS, nullptr},
    {"use_objects", use_objects, METH_VARARGS, nullptr},
    {"setup", setup, METH_VARARGS, nullptr},
    {"add", add, METH_VARARGS, nullptr},
    {"enable", enable, METH_VARARGS, nullptr},
    {"copy_steps", copy_steps, METH_O, nullptr},
    {"wrap", wrap_handle, METH_O, nullptr},
    {"count", count, METH_NOARGS, nullptr},
    {"calls", count_calls, METH_NOARGS, nullptr},
    {"rename_view", rename_view, METH_VARARGS, nullptr},
    {"add_attention", add_attention, METH_VARARGS, nullptr},
    {"copied", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(copied)), METH_FASTCALL, nullptr},
    {"known_cut", known_cut, METH_VARARGS, nullptr},
    {"known_reads", known_reads, METH_VARARGS, nullptr},
    {"known_uploads", known_uploads, METH_VARARGS, nullptr},
    {"at_once", at_once, METH_VARARGS, nullptr},
    {"run_at_once", use_at_once, METH_VARARGS, nullptr},
    {"use_view_ops", use_view_ops, METH_VARARGS, nullptr},
    {"note_elements", note_elements, METH_O, nullptr},
    {"add_composite", add_composite, METH_VARARGS, nullptr},
    {"add_kernels", add_kernels, METH_NOARGS, nullptr},
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatch)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ltc_record", nullptr, -1, methods};


} // namespace
} // namespace ltc

PyMODINIT_FUNC PyInit__ltc_record() {
  using namespace ltc;
  name_acquire = PyUnicode_InternFromString("acquire");
  name_release = PyUnicode_InternFromString("release");
  name_handle = PyUnicode_InternFromString("_h");
  name_rewind = PyUnicode_InternFromString("rewind");
  name_run = PyUnicode_InternFromString("run");
  name_known_cut = PyUnicode_InternFromString("known_cut");
  name_popleft = PyUnicode_InternFromString("popleft");
  name_item = PyUnicode_InternFromString("Item");
  name_to_cpu = PyUnicode_InternFromString("ToCpu");
  name_check = PyUnicode_InternFromString("_linalg_check_errors");
  maker_type.tp_dealloc = free_maker;
  expected_type.tp_dealloc = free_expected;
  known_cut_type.tp_dealloc = free_known_cut;
  known_cut_type.tp_methods = known_cut_methods;
  known_cut_type.tp_members = known_cut_members;
  known_reads_type.tp_dealloc = free_known_reads;
  at_once_type.tp_dealloc = free_at_once;
  at_once_type.tp_members = at_once_members;
  known_reads_type.tp_methods = known_reads_methods;
  known_uploads_type.tp_dealloc = free_known_uploads;
  known_uploads_type.tp_methods = known_uploads_methods;
  for (PyTypeObject* type :
       {&maker_type, &expected_type, &known_cut_type, &known_reads_type, &known_uploads_type, &at_once_type}) {
    type->tp_flags = Py_TPFLAGS_DEFAULT;
    if (PyType_Ready(type) < 0)
      return nullptr;
  }
  return PyModule_Create(&definition);
}
