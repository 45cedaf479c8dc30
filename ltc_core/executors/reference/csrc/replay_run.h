// One run of a program, without the GIL.
//
// Nothing touches Python while the GIL is away, except in `in_python`; the GIL is taken again by a plain call and never
// in a destructor, since at exit Python ends the thread right there. Values are therefore tensors that no Python object
// stands for, or are held a second time until the GIL is back: PyTorch asks for the GIL where the last C++ reference
// beside a Python object goes.
#pragma once
#include "replay_arguments.h"
#include "team.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/neg.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>

namespace torch { // of torch/csrc/Exceptions.h, which brings all of pybind11
TORCH_PYTHON_API void translate_exception_to_python(const std::exception_ptr&);
}

namespace ltc {

using Stack = std::vector<IValue>;
using Values = std::vector<IValue>;

// So much of its inputs' memory an instruction of a run that was begun may overwrite in copies: statistics of batches,
// states of random generators, rows of an activation. Of more, as an optimizer's, it is overwritten when all is recorded.
constexpr size_t kMostCopiedBytes = 1 << 20;

struct InPython {}; // thrown where an instruction cannot be a boxed call this time

// The state of PyTorch's that a new thread has, with grad mode off: a run does not depend on the modes of its caller.
struct StateOfANewThread {
  const c10::impl::ForceDispatchKeyGuard keys{c10::default_included_set, c10::default_excluded_set};
  const c10::InferenceMode no_inference{false};
  const c10::AutoGradMode no_grad{false};
};

struct Run {
  Program& program;
  const std::vector<c10::Scalar>& scalars;
  PyObject* scalar_objects;
  PyThreadState* state = nullptr;
  c10::impl::LocalDispatchKeySet outside = c10::impl::tls_local_dispatch_key_set();
  Values values;
  Stack stack;
  bool keeps_inputs = false;        // nothing overwrites their memory

  // An argument; of a list only the items from `begin` to `end`, the latter not included.
  IValue fill(const Argument& argument, size_t begin = 0, size_t end = SIZE_MAX) {
    switch (argument.from) {
      case From::constant:
        return argument.constant;
      case From::value:
        return values[argument.slot];
      case From::generator:
        return program.generator;
      case From::scalar: {
        auto number = as_type(scalars[argument.slot], *argument.type);
        if (!number)
          throw InPython();
        return std::move(*number);
      }
      case From::list: {
        end = std::min(end, argument.items.size());
        std::vector<IValue> items;
        items.reserve(end - begin);
        for (size_t i = begin; i < end; ++i)
          items.push_back(fill(argument.items[i]));
        auto list = list_of(items, *argument.type);
        if (!list)
          throw InPython();
        return std::move(*list);
      }
      case From::lens:
        return seen(argument);
    }
    return {};
  }

  // The part of a tensor that a lens leads to. A step that copies needs Python, which writes the copy back.
  IValue seen(const Argument& argument) {
    at::Tensor part = values[argument.slot].toTensor();
    const auto* memory = part.storage().unsafeGetStorageImpl();
    Stack inner;
    for (const int32_t step : argument.steps) {
      const Call& call = program.calls[step];
      inner.clear();
      inner.emplace_back(part);
      for (size_t i = 1; i < call.arguments.size(); ++i)
        inner.push_back(fill(call.arguments[i]));
      invoke(call, inner);
      part = call.which < 0 ? inner[0].toTensor() : inner[0].toTensorList().get(call.which);
      if (part.storage().unsafeGetStorageImpl() != memory)
        throw InPython();
    }
    return part;
  }

  static void invoke(const Call& call, Stack& stack) {
    switch (call.how) {
      case How::view_dtype: {
        const auto to = static_cast<c10::ScalarType>(stack[1].toInt());
        if (c10::elementSize(to) == stack[0].toTensor().element_size())
          break;
        [[fallthrough]];
      }
      case How::view_as_complex:
        stack[0] = stack[0].toTensor().contiguous();
        break;
      case How::reshape:
        return leave(stack, stack[0].toTensor().reshape(stack[1].toIntVector()));
      case How::as_strided: {
        const auto packed = stack[0].toTensor().contiguous();
        const int64_t offset = stack[3].isInt() ? stack[3].toInt() : 0;
        return leave(
            stack,
            packed.as_strided(stack[1].toIntVector(), stack[2].toIntVector(), packed.storage_offset() + offset));
      }
      case How::conj:
        return leave(stack, at::conj_physical(stack[0].toTensor()));
      case How::neg:
        return leave(stack, at::neg(stack[0].toTensor()));
      case How::boxed:
        break;
    }
    const c10::AutoGradMode mode(call.with_grad);
    call.op->callBoxed(&stack);
  }

  static void leave(Stack& stack, at::Tensor result) {
    stack.clear();
    stack.emplace_back(std::move(result));
  }

  void native(const Instruction& instruction) {
    if (instruction.call < 0 || (instruction.default_dtype && *instruction.default_dtype != default_dtype()))
      throw InPython();
    Team::fit();
    const Call& call = program.calls[instruction.call];
    for (const auto& each : instruction.writes)
      write(each);
    stack.clear();
    for (const auto& argument : call.arguments)
      stack.push_back(fill(argument));
    if (instruction.draws >= 0) {
      const auto& position = values[instruction.draws].toTensor();
      program.generator.set_state(position);
      invoke(call, stack);
      position.copy_(program.generator.get_state());
    } else {
      invoke(call, stack);
    }
    if (instruction.dtype && stack.size() == 1 && stack[0].isTensor())
      stack[0] = stack[0].toTensor().to(*instruction.dtype);
    for (const auto& result : instruction.results) {
      if (result.item < 0)
        values[result.slot] = stack[result.position];
      else
        values[result.slot] = stack[result.position].toTensorList().get(result.item);
    }
    stack.clear();
  }

  // Runs the instructions of a group, chunk by chunk. `at`: of the instruction that runs, for an error.
  void grouped(const Group& group, int32_t first, int32_t& at) {
    for (at = first; at < group.last; ++at) // each number has the type that its parameter takes, or none of them runs
      for (const auto& argument : program.calls[program.code[at].call].arguments)
        check_numbers(argument);
    int32_t begin = 0;
    for (const int32_t end : group.ends) {
      Team::fit();
      for (at = first; at < group.last; ++at) {
        const auto& instruction = program.code[at];
        const Call& call = program.calls[instruction.call];
        if (!instruction.writes.empty())
          for (int32_t k = begin; k < end; ++k)
            write(instruction.writes[k]);
        stack.clear();
        for (const auto& argument : call.arguments)
          stack.push_back(fill(argument, begin, end));
        invoke(call, stack);
        for (const auto& result : instruction.results)
          if (result.item >= begin && result.item < end)
            values[result.slot] = stack[result.position].toTensorList().get(result.item - begin);
        stack.clear();
        const auto& frees = group.frees[at - first];
        for (auto free = std::lower_bound(frees.begin(), frees.end(), std::pair(begin, INT32_MIN));
             free != frees.end() && free->first < end; ++free)
          values[free->second] = IValue();
      }
      begin = end;
    }
  }

  // After a failure: positions that have run the failed instruction have freed the version before it. What it made is
  // not among the values that are left, so theirs stands for that version, as a list that is half written does in eager.
  void keep_versions(const Instruction& failed) {
    for (const auto& each : failed.writes)
      if (values[each.before].isNone())
        values[each.before] = values[each.after];
  }

  void check_numbers(const Argument& argument) const {
    if (argument.from == From::scalar && !as_type(scalars[argument.slot], *argument.type))
      throw InPython();
    for (const auto& item : argument.items)
      check_numbers(item);
  }

  void write(const Write& each) {
    const bool is_copied = each.place == Place::copy || (keeps_inputs && each.place == Place::input);
    values[each.after] = is_copied ? IValue(values[each.before].toTensor().clone()) : values[each.before];
  }

  bool overwrites_much_input(const Instruction& instruction) const {
    size_t num_bytes = 0;
    for (const Write& each : instruction.writes)
      if (each.place == Place::input)
        num_bytes += values[each.before].toTensor().nbytes();
    return num_bytes > kMostCopiedBytes;
  }

  static c10::ScalarType default_dtype() {
    return c10::typeMetaToScalarType(c10::get_default_dtype());
  }

  // Runs one instruction in Python; false with an exception set, and the GIL held, if it has failed.
  bool in_python(const Instruction& instruction, int32_t position) {
    stack.clear();
    const c10::impl::ForceDispatchKeyGuard as_outside(outside);
    PyEval_RestoreThread(state);
    PyObject* there = PyDict_New();
    bool done = there != nullptr;
    for (size_t i = 0; done && i < instruction.needs.size(); ++i)
      done = put(there, instruction.needs[i]);
    PyObject* left = done ? PyObject_CallFunction(program.in_python, "iOO", position, there, scalar_objects) : nullptr;
    done = left != nullptr;
    for (size_t i = 0; done && i < instruction.makes.size(); ++i) {
      PyObject* key = PyLong_FromLong(instruction.makes[i]);
      PyObject* item = key ? PyDict_GetItemWithError(there, key) : nullptr;
      Py_XDECREF(key);
      // The object may outlive the dict; its tensor gets a second impl, which no object stands for.
      values[instruction.makes[i]] = item && is_tensor(item) ? IValue(unshared(THPVariable_Unpack(item))) : IValue();
    }
    Py_XDECREF(left);
    Py_XDECREF(there);
    if (done)
      state = PyEval_SaveThread();
    return done;
  }

  static at::Tensor unshared(const at::Tensor& tensor) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return tensor.detach();
  }

  bool put(PyObject* dict, int32_t slot) const {
    if (!values[slot].isTensor() || !values[slot].toTensor().defined())
      return true;
    PyObject* key = PyLong_FromLong(slot);
    PyObject* item = key ? THPVariable_Wrap(values[slot].toTensor()) : nullptr;
    const bool done = item && PyDict_SetItem(dict, key, item) == 0;
    Py_XDECREF(key);
    Py_XDECREF(item);
    return done;
  }

  // Runs what the recording thread gives, as far as that leaves the inputs as they are and needs no Python. Returns the
  // nanoseconds that it did not wait. Begins and ends with the GIL.
  int64_t follow(Begun& begun) {
    keeps_inputs = true;
    int64_t took_ns = 0;
    state = PyEval_SaveThread();
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::vector<int32_t> given;
      int32_t end = 0;
      for (bool goes_on = true; goes_on;) {
        goes_on = begun.take(end, given);
        const auto started = std::chrono::steady_clock::now();
        for (const int32_t i : given)
          values[program.inputs[i]] = program.donated[i] ? unshared(begun.inputs[i]) : begun.inputs[i];
        while (begun.next < end && !begun.is_over)
          follow_one(begun);
        took_ns += (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
      }
    }
    PyEval_RestoreThread(state);
    return took_ns;
  }

  void follow_one(Begun& begun) {
    const int32_t position = begun.next;
    const auto& instruction = program.code[position];
    if (program.groups.count(position) || overwrites_much_input(instruction)) {
      begun.is_over = true;
      return;
    }
    try {
      native(instruction);
    } catch (const InPython&) {
      begun.is_over = true;
      return;
    } catch (...) { // it will fail again where the error can be raised
      begun.is_over = begun.is_lost = true;
      return;
    }
    for (const int32_t slot : instruction.frees)
      values[slot] = IValue();
    begun.next = position + 1;
    if (position + 1 == begun.watched_at && !begun.watched.empty())
      publish_early(begun);
  }

  // For the recording thread, which may be about to wait for them. No later instruction writes to their memory.
  void publish_early(Begun& begun) {
    std::vector<at::Tensor> found;
    for (const int32_t slot : begun.watched) {
      if (!values[slot].isTensor() || !values[slot].toTensor().defined())
        return;
      found.push_back(unshared(values[slot].toTensor()));
    }
    begun.publish(std::move(found));
  }

  // Gives the watched outputs to Python. No later instruction writes to their memory: they live to the end.
  void publish(const Watch& watch) {
    for (const int32_t slot : watch.slots)
      if (!values[slot].isTensor() || !values[slot].toTensor().defined())
        return;
    stack.clear();
    const c10::impl::ForceDispatchKeyGuard as_outside(outside);
    PyEval_RestoreThread(state);
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(watch.slots.size()));
    for (size_t i = 0; list && i < watch.slots.size(); ++i) {
      PyObject* item = THPVariable_Wrap(unshared(values[watch.slots[i]].toTensor()));
      if (item)
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
      else
        Py_CLEAR(list);
    }
    PyObject* told = list ? PyObject_CallOneArg(watch.publish, list) : nullptr;
    if (!told)
      PyErr_WriteUnraisable(watch.publish);
    Py_XDECREF(told);
    Py_XDECREF(list);
    state = PyEval_SaveThread();
  }

  // Runs all from `at` on; the position of the instruction that failed, or -1. Begins and ends with the GIL held.
  int32_t all(std::vector<at::Tensor>& outputs, int32_t at, const Watch* watch) {
    std::exception_ptr problem;
    state = PyEval_SaveThread();
    const auto started = std::chrono::steady_clock::now();
    const auto first = at;
    if (program.has_large_ops && !Team::all)
      Team::gather(at::get_num_threads());
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto count = static_cast<int32_t>(program.code.size());
      int32_t ungrouped = 0; // instructions before this one run one by one
      for (; at < count; ++at) {
        if (watch && at >= watch->at) {
          publish(*watch);
          watch = nullptr;
        }
        const auto group = at < ungrouped ? program.groups.end() : program.groups.find(at);
        if (group != program.groups.end()) {
          const int32_t first = at;
          try {
            grouped(group->second, first, at);
            --at;
            continue;
          } catch (const InPython&) {
            ungrouped = group->second.last;
            at = first;
          } catch (...) {
            problem = std::current_exception();
            keep_versions(program.code[at]);
            break;
          }
        }
        const auto& instruction = program.code[at];
        bool is_native = true;
        try {
          native(instruction);
        } catch (const InPython&) {
          is_native = false;
        } catch (...) {
          problem = std::current_exception();
          break;
        }
        if (!is_native && !in_python(instruction, at))
          return at; // the GIL is held
        for (const int32_t slot : instruction.frees)
          values[slot] = IValue();
      }
      if (!problem) {
        try {
          for (const auto& output : program.outputs) {
            const auto& value = values[output.slot].toTensor();
            const bool same = value.scalar_type() == output.dtype;
            outputs.push_back(!same ? value.to(output.dtype) : output.copied ? value.clone() : value);
          }
        } catch (...) {
          problem = std::current_exception();
        }
      }
    }
    program.has_large_ops = std::chrono::steady_clock::now() - started > Team::large_op * (at - first);
    PyEval_RestoreThread(state);
    if (!problem)
      return -1;
    torch::translate_exception_to_python(problem);
    return std::min(at, static_cast<int32_t>(program.code.size()) - 1);
  }
};

} // namespace ltc
