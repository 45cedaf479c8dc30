// Instructions from the nodes of a graph (`graph/ir.py`).
//
// A node whose arguments do not fit the parameters of its op, or whose op is no kernel of PyTorch's, stays in Python: its
// call is -1. Callers hold the GIL; after an error false is returned, and the Python error is set.
#pragma once
#include "replay_arguments.h"

#include <algorithm>

namespace ltc {

// What is known of an op. It is asked for once.
struct OpFacts {
  std::optional<c10::OperatorHandle> op; // none: it stays in Python
  How how = How::boxed;
};

inline PyObject *ref_type, *scalar_type, *write_type; // `Ref`, `Scalar`, `Write`; set by `setup`, never released
inline PyObject* facts_of; // (op) -> (name, overload name, how), or None
inline PyObject *name_op, *name_args, *name_kwargs, *name_first, *name_outs, *name_writes, *name_result, *name_dtype,
    *name_uses_default_dtype;

class Reference { // owned
 public:
  explicit Reference(PyObject* object) : object(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object); }
  PyObject* get() const { return object; }
  explicit operator bool() const { return object != nullptr; }

 private:
  PyObject* const object;
};

inline bool is_a(PyObject* object, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type;
}
inline bool is_sequence(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

// The facts about an op; null after an error.
inline const OpFacts* facts(PyObject* op) {
  static auto* known = new std::unordered_map<PyObject*, OpFacts>(); // ops are never freed
  const auto found = known->find(op);
  if (found != known->end())
    return &found->second;
  const Reference told(PyObject_CallOneArg(facts_of, op));
  if (!told)
    return nullptr;
  OpFacts made;
  if (told.get() != Py_None) {
    const char *name, *overload;
    int how;
    if (!PyArg_ParseTuple(told.get(), "ssi", &name, &overload, &how))
      return nullptr;
    made.op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    made.how = static_cast<How>(how);
  }
  Py_INCREF(op);
  return &known->emplace(op, std::move(made)).first->second;
}

// Makes the instruction of one node.
class NodeReader {
 public:
  NodeReader(Program& program, PyObject* device) : program(program), device(device) {}

  // `in_place`: of each write. `frees`, `needs`: numbers of values. `roots`, `given`: whose memory a value has, and the
  // inputs. Returns whether the call is native, or -1 after an error.
  int read(PyObject* node, PyObject* in_place, PyObject* frees, PyObject* needs, PyObject* roots, PyObject* given, bool with_grad) {
    const Reference op(PyObject_GetAttr(node, name_op)), args(PyObject_GetAttr(node, name_args)),
        kwargs(PyObject_GetAttr(node, name_kwargs)), number(PyObject_GetAttr(node, name_first)),
        outs(PyObject_GetAttr(node, name_outs)), writes(PyObject_GetAttr(node, name_writes)),
        result(PyObject_GetAttr(node, name_result)), follows(PyObject_GetAttr(node, name_uses_default_dtype));
    if (!op || !args || !kwargs || !number || !outs || !writes || !result || !follows)
      return -1;
    const OpFacts* of_op = facts(op.get());
    if (!of_op)
      return -1;
    first = static_cast<int32_t>(PyLong_AsLong(number.get()));
    const Py_ssize_t num_writes = PyTuple_GET_SIZE(writes.get()), num_outs = PyTuple_GET_SIZE(outs.get());
    first_write = first + static_cast<int32_t>(num_outs - num_writes);
    Instruction instruction;
    Call call;
    call.with_grad = with_grad;
    if (of_op->op && read_call(*of_op, args.get(), kwargs.get(), call)) {
      instruction.call = static_cast<int32_t>(program.calls.size());
      if (!read_results(result.get(), outs.get(), call.op->schema().returns().size() == 1, instruction))
        return -1;
      program.calls.push_back(std::move(call));
    }
    if (PyErr_Occurred())
      return -1;
    for (Py_ssize_t k = 0; k < num_writes; ++k) {
      PyObject* old = PyTuple_GET_ITEM(writes.get(), k);
      auto place = Place::copy;
      if (PySequence_Fast_GET_ITEM(in_place, k) == Py_True) {
        PyObject* root = PyDict_GetItemWithError(roots, old);
        const int is_input = root ? PySet_Contains(given, root) : -1;
        if (is_input < 0)
          return -1;
        place = is_input ? Place::input : Place::in_place;
      }
      instruction.writes.push_back(
          {static_cast<int32_t>(PyLong_AsLong(old)), first_write + static_cast<int32_t>(k), place});
    }
    for (Py_ssize_t k = 0; k < num_outs; ++k)
      if (PyTuple_GET_ITEM(outs.get(), k) != Py_None)
        instruction.makes.push_back(first + static_cast<int32_t>(k));
    if (!ints_of(frees, instruction.frees) || !ints_of(needs, instruction.needs))
      return -1;
    auto& needed = instruction.needs;
    for (auto at = needed.begin(); at != needed.end();)
      at = std::find(needed.begin(), at, *at) == at ? at + 1 : needed.erase(at);
    instruction.draws = draws;
    if (follows.get() == Py_True) {
      const Reference dtype(PyObject_GetAttr(PyTuple_GET_ITEM(outs.get(), 0), name_dtype));
      if (!dtype)
        return -1;
      instruction.dtype = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
      instruction.default_dtype = c10::toRealValueType(*instruction.dtype);
    }
    const bool is_native = instruction.call >= 0;
    program.code.push_back(std::move(instruction));
    return is_native;
  }

 private:
  Program& program;
  PyObject* const device; // of the hardware; null on the CPU
  int32_t first = 0, first_write = 0, draws = -1;

  // False, without an error, if the call stays in Python.
  bool read_call(const OpFacts& of_op, PyObject* args, PyObject* kwargs, Call& call) {
    call.op = of_op.op;
    call.how = of_op.how;
    const auto& parameters = call.op->schema().arguments();
    call.arguments.resize(parameters.size());
    const bool is_native = PyTuple_GET_SIZE(args) <= static_cast<Py_ssize_t>(parameters.size());
    find_draws(kwargs);
    for (size_t i = 0; is_native && i < parameters.size(); ++i) {
      PyObject* item = nullptr;
      if (static_cast<Py_ssize_t>(i) < PyTuple_GET_SIZE(args))
        item = PyTuple_GET_ITEM(args, i);
      else if (device && parameters[i].name() == "device")
        item = device;
      else if (PyDict_GET_SIZE(kwargs))
        item = PyDict_GetItemString(kwargs, parameters[i].name().c_str());
      if (!read_argument(item, &parameters[i], parameters[i].type(), call.arguments[i]))
        return false;
    }
    return is_native;
  }

  void find_draws(PyObject* kwargs) {
    PyObject* generator = PyDict_GET_SIZE(kwargs) ? PyDict_GetItemString(kwargs, "generator") : nullptr;
    if (generator && is_a(generator, write_type))
      draws = first_write + static_cast<int32_t>(PyLong_AsLong(PyTuple_GET_ITEM(generator, 0)));
  }

  // Whether a list has values or scalars in it.
  static bool is_filled(PyObject* item) {
    if (is_a(item, ref_type) || is_a(item, scalar_type) || is_a(item, write_type))
      return true;
    if (is_sequence(item))
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(item); ++i)
        if (is_filled(PySequence_Fast_GET_ITEM(item, i)))
          return true;
    return false;
  }

  // `parameter`: null for an item of a list. `item`: null where the node does not give it.
  bool read_argument(PyObject* item, const c10::Argument* parameter, const c10::TypePtr& given, Argument& made) {
    const auto& type = without_optional(*given);
    if (!item) {
      if (parameter && parameter->default_value())
        made.constant = *parameter->default_value();
      else
        return given->kind() == TypeKind::OptionalType;
      return true;
    }
    if (is_a(item, ref_type) || is_a(item, write_type))
      return type.kind() == TypeKind::GeneratorType ? read_generator(item, made)
                                                    : type.kind() == TypeKind::TensorType && read_value(item, made);
    if (is_a(item, scalar_type)) {
      made.from = From::scalar;
      made.slot = static_cast<int32_t>(PyLong_AsLong(item));
      made.type = given->kind() == TypeKind::OptionalType
          ? c10::TypePtr(given->castRaw<c10::OptionalType>()->getElementType())
          : given;
      return true;
    }
    if (is_sequence(item) && is_filled(item)) {
      if (type.kind() != TypeKind::ListType)
        return false;
      made.from = From::list;
      made.type = type.castRaw<c10::ListType>()->getElementType();
      made.items.resize(PySequence_Fast_GET_SIZE(item));
      for (size_t i = 0; i < made.items.size(); ++i)
        if (!read_argument(PySequence_Fast_GET_ITEM(item, i), nullptr, made.type, made.items[i]))
          return false;
      return true;
    }
    auto constant = constant_of(item, *given, parameter ? parameter->N() : std::nullopt);
    if (constant)
      made.constant = std::move(*constant);
    return constant.has_value();
  }

  bool read_generator(PyObject* item, Argument& made) const {
    made.from = From::generator;
    return is_a(item, write_type);
  }

  bool read_value(PyObject* item, Argument& made) {
    made.from = From::value;
    if (is_a(item, ref_type)) {
      made.slot = static_cast<int32_t>(PyLong_AsLong(item));
      return true;
    }
    made.slot = first_write + static_cast<int32_t>(PyLong_AsLong(PyTuple_GET_ITEM(item, 0)));
    PyObject* lens = PyTuple_GET_ITEM(item, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lens); ++i) {
      made.from = From::lens;
      const int32_t step = read_step(PyTuple_GET_ITEM(lens, i));
      if (step < 0)
        return false;
      made.steps.push_back(step);
    }
    return true;
  }

  // The call of a step of a lens, (op, arguments, which); -1 if it stays in Python.
  int32_t read_step(PyObject* step) {
    const OpFacts* of_op = facts(PyTuple_GET_ITEM(step, 0));
    PyObject *args = PyTuple_GET_ITEM(step, 1), *which = PyTuple_GET_ITEM(step, 2);
    if (!of_op || !of_op->op)
      return -1;
    Call call;
    call.op = of_op->op;
    call.how = of_op->how;
    call.which = which == Py_None ? -1 : static_cast<int32_t>(PyLong_AsLong(which));
    const auto& parameters = call.op->schema().arguments();
    call.arguments.resize(parameters.size());
    for (size_t i = 1; i < parameters.size(); ++i) {
      PyObject* item = static_cast<Py_ssize_t>(i) <= PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, i - 1) : nullptr;
      if (!read_argument(item, &parameters[i], parameters[i].type(), call.arguments[i]))
        return -1;
    }
    program.calls.push_back(std::move(call));
    return static_cast<int32_t>(program.calls.size() - 1);
  }

  // `Node.result`: an int, or a tuple or list of ints, lists and names of written arguments.
  bool read_results(PyObject* spec, PyObject* outs, bool is_one, Instruction& instruction) const {
    const auto add = [&](Py_ssize_t position, Py_ssize_t item, PyObject* number) {
      instruction.results.push_back(
          {static_cast<int32_t>(position), static_cast<int32_t>(item), first + static_cast<int32_t>(PyLong_AsLong(number))});
    };
    if (PyLong_CheckExact(spec))
      add(0, -1, spec);
    if (!is_sequence(spec))
      return true;
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(spec); ++k) {
      PyObject* each = PySequence_Fast_GET_ITEM(spec, k);
      if (PyLong_CheckExact(each)) {
        if (is_one) // a list of tensors
          add(0, k, each);
        else if (PyTuple_GET_ITEM(outs, PyLong_AsSsize_t(each)) != Py_None)
          add(k, -1, each);
      } else if (is_sequence(each) && !is_one) {
        for (Py_ssize_t item = 0; item < PySequence_Fast_GET_SIZE(each); ++item)
          if (PyLong_CheckExact(PySequence_Fast_GET_ITEM(each, item)))
            add(k, item, PySequence_Fast_GET_ITEM(each, item));
      }
    }
    return !PyErr_Occurred();
  }
};

} // namespace ltc
