// What to expect of a call that repeats a step, and how that is noted while Python records the step.
#pragma once
#include "operands.h"

#include <c10/core/DefaultDtype.h>

#include <unordered_set>

namespace ltc {

// What to expect of one argument, or of one item of a list.
struct Want {
  enum What { kSame, kType, kNumbered, kFirstRead, kItems };
  What what;
  IValue value; // kSame: equal to this. kType: a scalar of the type of this
  Py_ssize_t number = 0; // kNumbered, kFirstRead: the value's number. kItems: the count of items; their wants follow
  PyObject* meta = nullptr; // kFirstRead: the meta of the input; metas are never freed
  PyObject* lens = nullptr; // of a part of a written cell; null for a whole tensor
  Py_ssize_t cell = -1; // index of the written cell that the operand is, or is a part of; -1: none
  bool may_share = false; // it is read, and its number does not say whether it shares memory with a written cell
  std::vector<bool> sizes; // kSame, of a dynamic step: which of its items, or whether the number itself, may be any
};

// The last call of a dynamic step: what it was recorded with, and what it returned (`Entry` of dynamic_shapes.py).
struct LastCall {
  std::vector<PyObject*> metas; // never freed
  std::vector<int64_t> sizes;
  Object entry;
};

struct Expected {
  PyObject_HEAD
  const Op* op;
  std::vector<Want>* wants;
  std::optional<at::ScalarType> default_dtype; // torch's default dtype then, if the result's dtype follows it
  LastCall* last; // null if the step is not dynamic
};

inline void free_expected(PyObject* self) {
  auto* expected = reinterpret_cast<Expected*>(self);
  if (expected->wants) {
    for (const Want& want : *expected->wants)
      Py_XDECREF(want.lens);
    delete expected->wants;
  }
  delete expected->last;
  Py_TYPE(self)->tp_free(self);
}
inline PyTypeObject expected_type = {PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.Expected", sizeof(Expected)};

// For each argument, whether it has its default, and Python does not get it.
inline std::vector<bool> left_out(const Op& op, c10::ArrayRef<IValue> args) {
  const auto& arguments = op.handle.schema().arguments();
  std::vector<bool> found;
  for (size_t i = 0; i < args.size(); ++i)
    found.push_back(arguments[i].default_value() && same_value(*arguments[i].default_value(), args[i]));
  bool is_followed = false; // by a positional argument that is given
  for (size_t i = args.size(); i-- > 0;) {
    if (arguments[i].kwarg_only())
      continue;
    is_followed |= !found[i];
    found[i] = !is_followed;
  }
  return found;
}

// What was noted about a call before Python records it.
struct Noted {
  Object trace, before, expected;
  Object written; // the first cell it writes
  Py_ssize_t epoch = 0, count = 0;
  size_t numbers = 0;
  std::vector<PyObject*> metas; // of its inputs
  std::vector<size_t> want_of; // argument -> its want
  std::vector<bool> is_left_out; // argument -> whether Python does not get it
  std::vector<PyObject*> operands; // metas of its tensors: of what is read, of the whole cell that is written
  std::vector<bool> are_written, are_parts;

  ~Noted() {
    if (!expected)
      return;
    const Gil gil;
    for (Object* object : {&trace, &before, &expected, &written})
      *object = Object();
  }

  // Stores `expected` in the step that Python recorded for the call, which returned `returned`; calls `then` with that
  // step and its key, if it is not dynamic. Does neither unless exactly one step was recorded since, and this call
  // recorded it.
  template <typename Then>
  void keep(c10::ArrayRef<IValue> returned, const Then& then) {
    if (!trace)
      return;
    const Gil gil;
    PyObject* step = trace_of.cursor.of(trace.get());
    if (trace_of.epoch.number(trace.get()) != epoch || step_of.node.is_none(step) ||
        step_of.parent.of(step) != before.get() || step_of.next.of(before.get()) != step || !has_defined(returned))
      return;
    const bool is_dynamic = !step_of.dynamic.is_none(step);
    if (is_dynamic && !open(step_of.dynamic.of(step)))
      return;
    const Py_ssize_t more = step_of.num_scalars.number(step) - step_of.num_scalars.number(before.get());
    PyObject* inputs = step_of.inputs.of(step); // (number, meta) of each
    PyObject* bound = trace_of.inputs.of(trace.get()); // (number, value, buffer, meta) of each, with those before
    if (more != static_cast<Py_ssize_t>(numbers) || PyTuple_GET_SIZE(inputs) != static_cast<Py_ssize_t>(metas.size()))
      return;
    if (PyList_GET_SIZE(bound) < PyTuple_GET_SIZE(inputs))
      return;
    const Py_ssize_t first = PyList_GET_SIZE(bound) - PyTuple_GET_SIZE(inputs);
    for (size_t i = 0; i < metas.size(); ++i) {
      PyObject* row = PyTuple_GET_ITEM(inputs, i);
      PyObject* meta = PyTuple_GET_ITEM(PyList_GET_ITEM(bound, first + static_cast<Py_ssize_t>(i)), 3);
      if (PyLong_AsSsize_t(PyTuple_GET_ITEM(row, 0)) != count + static_cast<Py_ssize_t>(i) || meta != metas[i])
        return;
    }
    if (node_of.uses_default_dtype.of(step_of.node.of(step)) == Py_True)
      reinterpret_cast<Expected*>(expected.get())->default_dtype = c10::get_default_dtype_as_scalartype();
    step_of.expected.set(step, expected.get());
    if (!is_dynamic)
      then(step, step_of.next_key.of(before.get()));
  }

 private:
  // Marks the sizes that may be any; false if they are not where the recorder says.
  bool open(PyObject* dynamic) {
    PyObject* places = dynamic_of.places.of(dynamic); // (argument, item in the list or -1) of each
    if (!PyTuple_CheckExact(places))
      return false;
    auto* to = reinterpret_cast<Expected*>(expected.get());
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
      PyObject* place = PyTuple_GET_ITEM(places, i);
      const auto argument = static_cast<size_t>(PyLong_AsSsize_t(PyTuple_GET_ITEM(place, 0)));
      const Py_ssize_t item = PyLong_AsSsize_t(PyTuple_GET_ITEM(place, 1));
      if (argument >= want_of.size())
        return false;
      Want& want = (*to->wants)[want_of[argument]];
      const bool is_list = want.value.isIntList();
      const size_t length = is_list ? want.value.toIntVector().size() : 1;
      if (want.what != Want::kSame || (!is_list && !want.value.isInt()) || is_list != (item >= 0) ||
          (is_list && static_cast<size_t>(item) >= length))
        return false;
      want.sizes.resize(length);
      want.sizes[is_list ? item : 0] = true;
    }
    numbers += PyTuple_GET_SIZE(places);
    to->last = new LastCall();
    return true;
  }

  // Whether the call defined a value. If it did not, the one step since was recorded by another thread.
  bool has_defined(c10::ArrayRef<IValue> returned) const {
    if (written)
      return is_new(cell_of.value.of(written.get()));
    const Object handle(first_handle(returned));
    if (!handle)
      return false;
    const bool is_view = is_type(handle.get(), view_type);
    return is_new(is_view ? view_of.value.of(handle.get()) : cell_of.value.of(handle.get()));
  }
  bool is_new(PyObject* value) const {
    return value_of.epoch.number(value) == epoch &&
        value_of.index.number(value) >= count + static_cast<Py_ssize_t>(metas.size());
  }
};

// Notes what to expect of a repetition of a call.
class Noter : Operands {
 public:
  Noter(const Op& op, PyObject* trace, c10::ArrayRef<IValue> args) : Operands(op, trace, args) {}

  // Fills `noted`; leaves `noted.trace` null for a call that only Python can record.
  void note(Noted& noted) {
    noted.expected = Object(expected_type.tp_alloc(&expected_type, 0));
    if (!noted.expected)
      return PyErr_Clear();
    auto* expected = reinterpret_cast<Expected*>(noted.expected.get());
    expected->op = &op;
    wants = expected->wants = new std::vector<Want>();
    new (&expected->default_dtype) std::optional<at::ScalarType>();
    expected->last = nullptr;
    noted.is_left_out = left_out(op, args);
    for (size_t i = 0; i < args.size(); ++i) {
      noted.want_of.push_back(wants->size());
      if (noted.is_left_out[i])
        wants->push_back({Want::kSame, args[i]});
      else if (!note_argument(args[i], op.codes[i], op.writes[i]))
        return;
    }
    noted.operands = std::move(operands);
    noted.are_written = std::move(are_written);
    noted.are_parts = std::move(are_parts);
    if (op.draws && !note_stream())
      return;
    note_shared_reads();
    noted.trace = Object(Py_NewRef(trace));
    noted.before = Object(Py_NewRef(trace_of.cursor.of(trace)));
    noted.epoch = epoch;
    if (!written.cells.empty())
      noted.written = Object(Py_NewRef(written.cells[0]));
    noted.count = count;
    noted.numbers = numbers.size();
    for (const Input& input : inputs)
      noted.metas.push_back(input.meta);
  }

 private:
  struct Read {
    size_t want;
    PyObject* handle; // its tensor holds it
  };
  std::vector<Want>* wants = nullptr;
  Written written;
  std::vector<Read> reads;
  std::vector<PyObject*> operands;
  std::vector<bool> are_written, are_parts;

  bool note_argument(const IValue& a, int code, bool is_written) {
    if (code == kGenerator && !a.isNone())
      return false; // it has another stream than the default one
    if (a.isNone() || (!a.isTensor() && (code == kStatic || code == kStaticNumber || code == kGenerator))) {
      wants->push_back({Want::kSame, a});
      return true;
    }
    if (!a.isList())
      return note_item(a, is_written);
    wants->push_back({Want::kItems, {}, static_cast<Py_ssize_t>(a.toListRef().size())});
    for (const IValue& item : a.toListRef()) {
      if (!note_item(item, is_written))
        return false;
    }
    return true;
  }

  bool note_item(const IValue& a, bool is_written) {
    if (a.isNone()) {
      wants->push_back({Want::kSame, a});
      return true;
    }
    if (const IValue* number = number_of(a)) {
      wants->push_back({Want::kType, *number});
      numbers.push_back(number);
      return true;
    }
    if (!a.isTensor())
      return false;
    if (!a.toTensor().defined()) {
      wants->push_back({Want::kSame, a});
      return true;
    }
    const Object handle(handle_of(a.toTensor()));
    if (!handle)
      return false;
    const bool is_part = is_type(handle.get(), view_type);
    are_written.push_back(is_written);
    are_parts.push_back(is_part);
    if (!is_written) {
      operands.push_back(is_part ? view_of.meta.of(handle.get()) : cell_of.meta.of(handle.get()));
      if (op.writes_any)
        reads.push_back({wants->size(), handle.get()});
      return note_operand(handle.get(), nullptr, -1);
    }
    PyObject* whole = is_part ? view_of.base.of(handle.get()) : handle.get();
    operands.push_back(cell_of.meta.of(whole));
    return note_operand(whole, is_part ? view_of.lens.of(handle.get()) : nullptr, written.add(whole));
  }

  bool note_operand(PyObject* whole, PyObject* lens, Py_ssize_t cell) {
    PyObject* value = value_of_handle(whole);
    if (!value)
      return false;
    Want want{Want::kNumbered};
    if (is_of_this_epoch(value)) {
      want.number = value_of.index.number(value);
    } else if (const auto known = input_number(value)) {
      want.number = *known;
    } else {
      want.number = count + static_cast<Py_ssize_t>(inputs.size());
      if (!first_read(value, want.meta = cell_of.meta.of(whole)))
        return false;
      want.what = Want::kFirstRead;
    }
    want.lens = Py_XNewRef(lens);
    want.cell = cell;
    wants->push_back(std::move(want));
    return true;
  }

  bool note_stream() {
    const Object cell = stream();
    return cell && note_operand(cell.get(), nullptr, written.add(cell.get()));
  }

  // Notes which operands are read from written cells. A whole cell that is read and written has the same number both
  // times, so an operand with another number is not that cell. The number of a part says nothing about its cell.
  void note_shared_reads() {
    std::unordered_set<Py_ssize_t> numbers_written;
    for (const Want& want : *wants) {
      if (want.cell >= 0)
        numbers_written.insert(want.number);
    }
    for (const Read& read : reads) {
      Want& want = (*wants)[read.want];
      const bool is_part = is_type(read.handle, view_type);
      want.may_share = is_part || numbers_written.count(want.number);
      want.cell = written.find(is_part ? view_of.base.of(read.handle) : read.handle);
      if (is_part && want.cell >= 0)
        want.lens = Py_NewRef(view_of.lens.of(read.handle));
    }
  }
};

} // namespace ltc
