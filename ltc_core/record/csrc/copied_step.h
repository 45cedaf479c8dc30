// A step for a call that was recorded at another place of the trie: a copy of the step there, with other numbers.
//
// Layers repeat each other, and so do the first steps of a training loop. Where the operands of a call have the metas
// of an earlier call of the op, and its other arguments are equal, Python would infer the same results and make the same
// node. Only the numbers of its operands, its scalars and its results differ. `Originals` keeps the steps that Python
// made; `CopiedStep` puts the copy of one after the cursor, where `NextStep` then finds it.
#pragma once
#include "next_step.h"

#include <memory>
#include <string>

namespace ltc {

// An operand of a call.
struct Operand {
  PyObject* handle; // its tensor holds it
  PyObject* whole; // the cell
  PyObject* meta; // of what is read; of the whole cell if a part is written
  const void* tensor;
  bool is_written, is_part;
  Py_ssize_t cell = -1; // index of the written cell that it is, or is a part of
  bool is_twin = false; // it is read, and the same tensor is written
};

// The operands of a call, in order.
class OperandList {
 public:
  c10::SmallVector<Operand, 8> items;
  std::vector<PyObject*> metas;

  // False, without an error, if one of the tensors is none of this trace.
  bool find(const Op& op, PyObject* trace, c10::ArrayRef<IValue> args) {
    Written written;
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].isTensor() && !add(args[i].toTensor(), trace, op.writes[i], written))
        return false;
      if (!args[i].isTensorList() && !args[i].isOptionalTensorList())
        continue;
      for (const IValue& item : args[i].toListRef())
        if (item.isTensor() && !add(item.toTensor(), trace, op.writes[i], written))
          return false;
    }
    for (Operand& each : items) {
      metas.push_back(each.meta);
      if (each.is_written || (each.cell = written.find(each.whole)) < 0)
        continue;
      for (const Operand& other : items)
        each.is_twin |= other.is_written && other.tensor == each.tensor;
    }
    return true;
  }

 private:
  bool add(const at::Tensor& tensor, PyObject* trace, bool is_written, Written& written) {
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number())
      return true;
    const Object handle(handle_of(tensor));
    if (!handle || trace_of_handle(handle.get()) != trace)
      return false;
    const bool is_part = is_type(handle.get(), view_type);
    PyObject* whole = is_part ? view_of.base.of(handle.get()) : handle.get();
    PyObject* meta = is_part && !is_written ? view_of.meta.of(handle.get()) : cell_of.meta.of(whole);
    const Py_ssize_t cell = is_written ? written.add(whole) : -1;
    items.push_back({handle.get(), whole, meta, tensor.unsafeGetTensorImpl(), is_written, is_part, cell});
    return true;
  }
};

// Where an operand or a scalar stands in the key of a step and in its node.
struct Place {
  size_t want;
  size_t argument;
  Py_ssize_t item; // in a list; -1: it is the argument itself
  bool is_ref = false; // a `Ref` in the node: an operand that is read
  bool is_part = false; // of its cell: `clone` of a whole one records nothing

  bool is_like(const Place& other) const { return is_ref == other.is_ref && is_part == other.is_part; }
};

// The user's line (`source.user_line`), without running Python: a signal handler would run while the trace is locked.
// Null, without an error, where a frame is not known yet: Python records the call, and has learned it then.
inline PyObject* user_line() {
  Object frame(Py_XNewRef(PyEval_GetFrame()));
  bool in_backward = false;
  while (frame) {
    auto* of_frame = reinterpret_cast<PyFrameObject*>(frame.get());
    const Object code(reinterpret_cast<PyObject*>(PyFrame_GetCode(of_frame))), id(PyLong_FromVoidPtr(code.get()));
    PyObject* known = id ? PyDict_GetItemWithError(user_codes, id.get()) : nullptr;
    if (!known) {
      PyErr_Clear();
      return nullptr;
    }
    if (PyTuple_GET_ITEM(known, 0) == Py_True) {
      const Object number(PyLong_FromLong(PyFrame_GetLineNumber(of_frame)));
      const Object key(number ? PyTuple_Pack(2, id.get(), number.get()) : nullptr);
      PyObject* described = key ? PyDict_GetItemWithError(described_lines, key.get()) : nullptr;
      PyErr_Clear();
      if (!described)
        return nullptr;
      PyObject* text = PyTuple_GET_ITEM(described, 0);
      return in_backward ? PyUnicode_Concat(text, words_in_backward) : Py_NewRef(text);
    }
    in_backward |= code.get() == backward_code;
    frame = Object(reinterpret_cast<PyObject*>(PyFrame_GetBack(of_frame)));
  }
  return PyUnicode_FromString("");
}

// Whether a report asks for the modules that call ops.
inline bool modules_are_on() {
  return PyDict_GetItemString(PyModule_GetDict(modules), "is_on") != Py_False;
}

// A step that Python made.
struct Original {
  Object key, node, lenses, expected;
  PyObject* trace; // where it was recorded: an argument may name the device; never freed
  std::vector<PyObject*> metas; // of the operands; never freed
  std::vector<bool> is_left_out; // argument -> whether Python did not get it
  std::vector<Py_ssize_t> key_at; // argument -> its place in the key; -1: it has none
  std::vector<Place> operands, scalars;

  const std::vector<Want>& wants() const { return *reinterpret_cast<Expected*>(expected.get())->wants; }
};

// The node's value of an argument, borrowed: by position, or by name. Null if the node has none.
inline PyObject* node_argument(const Op& op, PyObject* args, PyObject* kwargs, size_t argument) {
  if (static_cast<Py_ssize_t>(argument) < PyTuple_GET_SIZE(args))
    return PyTuple_GET_ITEM(args, argument);
  return PyDict_GetItemString(kwargs, op.handle.schema().arguments()[argument].name().c_str());
}

// The steps that Python made for the calls of one op.
class Originals {
 public:
  using Row = std::vector<std::shared_ptr<const Original>>;

  // Those whose operands may have these metas; null if there are none.
  std::shared_ptr<const Row> find(const std::vector<PyObject*>& metas) const {
    const auto found = rows.find(hash_of(metas));
    return found == rows.end() ? nullptr : found->second;
  }

  // Keeps a step, unless its key or its node is not what a call like this makes: a handler may have changed the call.
  void add(const Op& op, const Noted& noted, PyObject* step, PyObject* key) {
    auto made = std::make_shared<Original>();
    made->trace = noted.trace.get();
    made->metas = noted.operands;
    made->is_left_out = noted.is_left_out;
    made->node = Object(Py_NewRef(step_of.node.of(step)));
    made->key = Object(Py_NewRef(key));
    made->expected = Object(Py_NewRef(step_of.expected.of(step)));
    if (!step_of.lenses.is_none(step))
      made->lenses = Object(Py_NewRef(step_of.lenses.of(step)));
    if (!find_places(op, noted, *made))
      return;
    if (const auto known = find(made->metas))
      for (const auto& other : *known)
        if (are_alike(*other, *made)) // beside a known step, Python records what could be copied elsewhere
          return;
    if (++count > kMost) {
      rows.clear();
      count = 1;
    }
    auto& row = rows[hash_of(made->metas)];
    auto longer = row ? std::make_shared<Row>(*row) : std::make_shared<Row>();
    longer->push_back(std::move(made));
    row = std::move(longer);
  }

 private:
  static constexpr size_t kMost = 2048;
  std::unordered_map<size_t, std::shared_ptr<const Row>> rows;
  size_t count = 0;

  static size_t hash_of(const std::vector<PyObject*>& metas) {
    size_t hash = metas.size();
    for (PyObject* meta : metas)
      hash = hash * 1000003 ^ (reinterpret_cast<size_t>(meta) >> 4);
    return hash;
  }

  // Whether two steps are of calls that differ in numbers only.
  static bool are_alike(const Original& a, const Original& b) {
    const auto dtype = [](const Original& each) {
      return reinterpret_cast<Expected*>(each.expected.get())->default_dtype;
    };
    const auto is_value = [](const Want& want) { return want.what == Want::kNumbered || want.what == Want::kFirstRead; };
    if (a.trace != b.trace || a.metas != b.metas || a.is_left_out != b.is_left_out || a.key_at != b.key_at ||
        dtype(a) != dtype(b) || a.wants().size() != b.wants().size())
      return false;
    for (size_t i = 0; i < a.operands.size(); ++i) // as many as there are metas
      if (!a.operands[i].is_like(b.operands[i]))
        return false;
    for (size_t i = 0; i < a.wants().size(); ++i) {
      const Want &one = a.wants()[i], &other = b.wants()[i];
      if (is_value(one) && is_value(other)) {
        if (one.cell != other.cell || !one.lens != !other.lens || (one.lens && !equal(one.lens, other.lens)))
          return false;
      } else if (one.what != other.what || one.number != other.number ||
                 (one.what == Want::kSame && !same_value(one.value, other.value)) ||
                 (one.what == Want::kType && !same_type(one.value, other.value))) {
        return false;
      }
    }
    return true;
  }

  static bool is_dropped(const std::string& name) { // as `signature.DROPPED`
    return name == "device" || name == "pin_memory" || name == "non_blocking" || name == "generator";
  }

  // As `recorder._signature` and `view_recorder.record_view` put the arguments into the key.
  static bool find_places(const Op& op, const Noted& noted, Original& made) {
    PyObject* key = made.key.get();
    if (!PyTuple_CheckExact(key) || PyTuple_GET_ITEM(key, 0) != op.schema || !PyTuple_CheckExact(args_of(made)))
      return false;
    const auto& arguments = op.handle.schema().arguments();
    Py_ssize_t at = 1;
    for (size_t i = 0; i < arguments.size(); ++i) {
      made.key_at.push_back(-1);
      const bool is_named = arguments[i].kwarg_only() && op.kind != kView;
      if (noted.is_left_out[i] || (is_named && is_dropped(arguments[i].name())))
        continue;
      at += is_named;
      made.key_at.back() = at++;
    }
    size_t want = 0;
    const auto add = [&](size_t argument, Py_ssize_t item) {
      const Want& each = made.wants()[want];
      const Place place{want++, argument, item};
      if (each.what == Want::kSame)
        return true;
      if (each.what == Want::kType)
        return add_scalar(op, made, place);
      const size_t operand = made.operands.size();
      if (operand == noted.operands.size())
        return false;
      const bool is_written = noted.are_written[operand];
      at += !is_written && each.cell >= 0; // it is in the key again, as a `SharedRead`
      return add_operand(op, made, place, is_written, noted.are_parts[operand]);
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
      const Want& each = made.wants()[want];
      want += each.what == Want::kItems;
      for (Py_ssize_t item = 0; each.what == Want::kItems && item < each.number; ++item)
        if (!add(i, item))
          return false;
      if (each.what != Want::kItems && !add(i, -1))
        return false;
    }
    at += op.draws;
    at += node_of.uses_default_dtype.of(made.node.get()) == Py_True;
    return at == PyTuple_GET_SIZE(key);
  }

  static PyObject* args_of(const Original& made) { return node_of.args.of(made.node.get()); }

  // What stands at a place, borrowed; null where the key or the node has nothing there.
  struct Found {
    PyObject *part, *argument;
  };
  static Found found_at(const Op& op, const Original& made, const Place& place) {
    PyObject* key = made.key.get();
    const Py_ssize_t key_at = made.key_at[place.argument];
    PyObject* part = key_at < 0 || key_at >= PyTuple_GET_SIZE(key) ? nullptr : PyTuple_GET_ITEM(key, key_at);
    PyObject* argument = node_argument(op, args_of(made), node_of.kwargs.of(made.node.get()), place.argument);
    if (!part || !argument || place.item < 0)
      return {part, argument};
    const bool are_lists = PyTuple_CheckExact(part) && PyTuple_GET_SIZE(part) > place.item &&
        PyList_CheckExact(argument) && PyList_GET_SIZE(argument) > place.item;
    if (!are_lists)
      return {nullptr, nullptr};
    return {PyTuple_GET_ITEM(part, place.item), PyList_GET_ITEM(argument, place.item)};
  }

  static bool add_scalar(const Op& op, Original& made, const Place& place) {
    const auto [part, argument] = found_at(op, made, place);
    made.scalars.push_back(place);
    return part && argument && PyType_Check(part) && is_type(argument, scalar_type);
  }

  static bool add_operand(const Op& op, Original& made, Place place, bool is_written, bool is_part) {
    const auto [part, argument] = found_at(op, made, place);
    if (!part || !argument)
      return false;
    const Want& want = made.wants()[place.want];
    place.is_ref = is_type(argument, ref_type);
    place.is_part = is_part;
    made.operands.push_back(place);
    if (is_written && (place.is_ref || (want.lens != nullptr && !PyTuple_CheckExact(part))))
      return false;
    PyObject* number = PyTuple_CheckExact(part) ? PyTuple_GET_ITEM(part, 0) : part;
    if (want.what == Want::kFirstRead)
      return number == want.meta;
    return PyLong_CheckExact(number) &&
        (PyLong_AsSsize_t(number) == want.number || (is_written && PyLong_AsSsize_t(number) == ~want.cell));
  }
};

// Copies a step for a call.
class CopiedStep : Operands {
 public:
  CopiedStep(const Op& op, PyObject* trace, c10::ArrayRef<IValue> args) : Operands(op, trace, args) {}

  // Puts the copy of a step after the cursor, if that has no next one and an original is known. An error is left set.
  bool put(const Originals& originals) {
    const Object cursor(Py_NewRef(trace_of.cursor.of(trace)));
    if (!is_tip(cursor.get()) || !operands.find(op, trace, args))
      return false;
    const auto original = find(originals);
    const Object line(original && !modules_are_on() ? user_line() : nullptr);
    if (!line)
      return false;
    // This runs Python, and so signal handlers, which may record ops.
    const Object stream_cell(op.draws ? stream().release() : nullptr);
    if (op.draws && !stream_cell)
      return false;
    if (trace_of.cursor.of(trace) != cursor.get() || trace_of.epoch.number(trace) != epoch ||
        trace_of.count.number(trace) != count || !is_tip(cursor.get()))
      return false;
    return take_numbers(stream_cell.get()) && link(*original, cursor.get(), line.get());
  }

 private:
  struct Number {
    Py_ssize_t value;
    PyObject* meta; // where it is read for the first time, else null
  };
  OperandList operands;
  c10::SmallVector<Number, 8> taken; // of the operands, and of the stream after them

  static bool is_tip(PyObject* step) {
    return step_of.next.is_none(step) && step_of.children.is_none(step) && step_of.patterns.is_none(step) &&
        step_of.dynamic.is_none(step);
  }

  // -- comparing

  // A step that can be copied for this call; null if none is known.
  std::shared_ptr<const Original> find(const Originals& originals) {
    const auto row = originals.find(operands.metas);
    if (!row)
      return nullptr;
    const auto is_left_out = left_out(op, args);
    for (const auto& original : *row)
      if (original->trace == trace && original->metas == operands.metas && original->is_left_out == is_left_out &&
          is_like(*original))
        return original;
    return nullptr;
  }

  bool is_like(const Original& original) {
    const auto& expected = *reinterpret_cast<Expected*>(original.expected.get());
    if (expected.default_dtype && *expected.default_dtype != c10::get_default_dtype_as_scalartype())
      return false;
    numbers.clear();
    size_t at_want = 0;
    for (const IValue& a : args)
      if (!is_like(a, original.wants(), at_want))
        return false;
    for (size_t k = 0; k < operands.items.size(); ++k)
      if (!is_like(operands.items[k], original, original.operands[k]))
        return false;
    return true;
  }

  // Whether an argument is equal, apart from tensors.
  bool is_like(const IValue& a, const std::vector<Want>& wants, size_t& at_want) {
    const Want& want = wants[at_want++];
    switch (want.what) {
      case Want::kSame:
        return same_value(a, want.value);
      case Want::kType:
        numbers.push_back(number_of(a));
        return numbers.back() && same_type(*numbers.back(), want.value);
      case Want::kItems:
        if (!a.isList() || static_cast<Py_ssize_t>(a.toListRef().size()) != want.number)
          return false;
        for (const IValue& item : a.toListRef())
          if (!is_like(item, wants, at_want))
            return false;
        return true;
      default:
        return a.isTensor() && a.toTensor().defined() && !is_wrapped_number(a);
    }
  }

  // Whether an operand shares memory with those that are written as the original's does.
  static bool is_like(const Operand& operand, const Original& original, const Place& place) {
    const Want& want = original.wants()[place.want];
    if (operand.cell != want.cell || operand.is_part != place.is_part ||
        place.is_ref == (operand.is_written || operand.is_twin))
      return false;
    if (!operand.is_part || operand.cell < 0)
      return !want.lens;
    return want.lens && equal(view_of.lens.of(operand.handle), want.lens);
  }

  // -- numbers

  bool take_numbers(PyObject* stream_cell) {
    for (const Operand& each : operands.items)
      if (!take_number(each.is_written ? each.whole : each.handle))
        return false;
    return !stream_cell || take_number(stream_cell);
  }

  bool take_number(PyObject* handle) {
    PyObject* value = value_of_handle(handle);
    if (!value)
      return false;
    if (is_of_this_epoch(value)) {
      taken.push_back({value_of.index.number(value), nullptr});
    } else if (const auto known = input_number(value)) {
      taken.push_back({*known, nullptr});
    } else {
      PyObject* meta = cell_of.meta.of(handle); // a part would be of this epoch
      taken.push_back({count + static_cast<Py_ssize_t>(inputs.size()), meta});
      return first_read(value, meta);
    }
    return true;
  }

  // -- making

  // What the garbage collector need not see: it lives as long as the trie, and `Trace.forget` ends the cycles in it.
  static PyObject* untracked(PyObject* object) {
    if (object && PyObject_GC_IsTracked(object))
      PyObject_GC_UnTrack(object);
    return object;
  }

  static PyObject* copy_of(PyObject* tuple) {
    const Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    PyObject* copy = PyTuple_New(n);
    for (Py_ssize_t i = 0; copy && i < n; ++i)
      PyTuple_SET_ITEM(copy, i, Py_NewRef(PyTuple_GET_ITEM(tuple, i)));
    return untracked(copy);
  }

  // A `Ref` or a `Scalar`. They are kept: each graph has those of the same numbers.
  static PyObject* numbered(PyObject* type, std::vector<PyObject*>& known, Py_ssize_t number) {
    const auto at = static_cast<size_t>(number);
    if (at >= known.size())
      known.resize(at + 64);
    if (!known[at]) {
      const Object value(PyLong_FromSsize_t(number));
      known[at] = value ? PyObject_CallOneArg(type, value.get()) : nullptr;
    }
    return Py_XNewRef(known[at]);
  }
  static PyObject* ref(Py_ssize_t number) {
    static auto* known = new std::vector<PyObject*>();
    return numbered(ref_type, *known, number);
  }
  static PyObject* scalar(Py_ssize_t number) {
    static auto* known = new std::vector<PyObject*>();
    return numbered(scalar_type, *known, number);
  }

  static PyObject* number_part(const Number& number) {
    return number.meta ? Py_NewRef(number.meta) : PyLong_FromSsize_t(number.value);
  }

  // The part of the key for an operand, in place of the original's.
  static PyObject* key_part(PyObject* original, const Operand& operand, const Number& number) {
    PyObject* was = PyTuple_CheckExact(original) ? PyTuple_GET_ITEM(original, 0) : original;
    if (operand.is_written && PyLong_CheckExact(was) && PyLong_AsSsize_t(was) < 0)
      return Py_NewRef(original); // a written cell that comes again
    Object part(number_part(number));
    if (part && PyTuple_CheckExact(original))
      part = Object(untracked(PyTuple_Pack(2, part.get(), PyTuple_GET_ITEM(original, 1))));
    return part.release();
  }

  struct Made {
    Object key, args, kwargs;
    size_t last_list; // the argument whose list was copied last
  };

  // Key and arguments of the copy.
  bool copy_arguments(const Original& original, Made& made) const {
    PyObject* node = original.node.get();
    made.key = Object(copy_of(original.key.get()));
    made.args = Object(copy_of(node_of.args.of(node)));
    made.kwargs = Object(Py_NewRef(node_of.kwargs.of(node)));
    made.last_list = args.size();
    if (!made.key || !made.args)
      return false;
    for (size_t k = 0; k < original.operands.size(); ++k) {
      PyObject** part = place_in(original, made, original.operands[k]);
      PyObject* in_key = part ? key_part(*part, operands.items[k], taken[k]) : nullptr;
      if (!in_key)
        return false;
      Py_SETREF(*part, in_key);
      // A `Write` names its cell by position.
      if (original.operands[k].is_ref && !set(made, original.operands[k], Object(ref(taken[k].value))))
        return false;
    }
    Py_ssize_t next_scalar = PyList_GET_SIZE(trace_of.scalars.of(trace));
    for (const Place& place : original.scalars)
      if (!place_in(original, made, place) || !set(made, place, Object(scalar(next_scalar++))))
        return false;
    return true;
  }

  // The part of the copied key at a place. What holds it and the node's argument there is copied first.
  PyObject** place_in(const Original& original, Made& made, const Place& place) const {
    PyObject** part = &PyTuple_GET_ITEM(made.key.get(), original.key_at[place.argument]);
    const bool is_named = static_cast<Py_ssize_t>(place.argument) >= PyTuple_GET_SIZE(made.args.get());
    PyObject* kwargs = node_of.kwargs.of(original.node.get());
    if (is_named && made.kwargs.get() == kwargs && !(made.kwargs = Object(PyDict_Copy(kwargs))))
      return nullptr;
    if (place.item < 0)
      return part;
    if (made.last_list != place.argument) {
      PyObject* list = node_argument(op, made.args.get(), made.kwargs.get(), place.argument);
      Object tuple(copy_of(*part)), copied(PyList_GetSlice(list, 0, PyList_GET_SIZE(list)));
      if (!tuple || !copied || !set_argument(made, place.argument, copied.get()))
        return nullptr;
      Py_SETREF(*part, tuple.release());
      made.last_list = place.argument;
    }
    return &PyTuple_GET_ITEM(*part, place.item);
  }

  // Sets what stands at a place of the copied arguments.
  bool set(const Made& made, const Place& place, Object value) const {
    if (!value)
      return false;
    if (place.item < 0)
      return set_argument(made, place.argument, value.get());
    PyObject* list = node_argument(op, made.args.get(), made.kwargs.get(), place.argument);
    return PyList_SetItem(list, place.item, value.release()) == 0;
  }

  bool set_argument(const Made& made, size_t argument, PyObject* value) const {
    if (static_cast<Py_ssize_t>(argument) >= PyTuple_GET_SIZE(made.args.get()))
      return PyDict_SetItemString(
                 made.kwargs.get(), op.handle.schema().arguments()[argument].name().c_str(), value) == 0;
    Py_SETREF(PyTuple_GET_ITEM(made.args.get(), argument), Py_NewRef(value));
    return true;
  }

  // The stream's part of the key comes after those of the arguments.
  bool set_stream(const Original& original, PyObject* key) const {
    if (!op.draws)
      return true;
    Py_ssize_t at = 0;
    for (const Py_ssize_t each : original.key_at)
      at = std::max(at, each);
    PyObject*& part = PyTuple_GET_ITEM(key, at + 1);
    if (PyLong_CheckExact(part) && PyLong_AsSsize_t(part) < 0)
      return true;
    PyObject* now = number_part(taken.back());
    if (now)
      Py_SETREF(part, now);
    return now != nullptr;
  }

  // Makes the step and has the cursor lead to it.
  bool link(const Original& original, PyObject* cursor, PyObject* line) {
    Made made;
    if (!copy_arguments(original, made) || !set_stream(original, made.key.get()))
      return false;
    auto numbers_of = written_numbers();
    const Object rows(input_rows()), written(tuple_of(numbers_of));
    for (size_t k = 0; k < original.operands.size(); ++k)
      if (original.operands[k].is_ref)
        numbers_of.push_back(taken[k].value);
    const Object reads(tuple_of(numbers_of)); // `ir.references`: what it writes, and what it reads
    const Py_ssize_t first = count + static_cast<Py_ssize_t>(inputs.size());
    const Object node(rows && written && reads ? untracked(new_object(node_type)) : nullptr);
    const Object number(PyLong_FromSsize_t(first));
    const Object step(node && number ? untracked(new_object(step_type)) : nullptr);
    if (!step)
      return false;
    PyObject* from = original.node.get();
    for (const Slot* slot : {&node_of.op, &node_of.outs, &node_of.view, &node_of.result, &node_of.uses_default_dtype})
      slot->set(node.get(), slot->of(from));
    node_of.args.set(node.get(), made.args.get());
    node_of.kwargs.set(node.get(), made.kwargs.get());
    node_of.first.set(node.get(), number.get());
    node_of.writes.set(node.get(), written.get());
    node_of.line.set(node.get(), line);
    node_of.module.set(node.get(), node_of.module.of(from)); // '', while no report asks for modules
    node_of.reads.set(node.get(), reads.get());
    for (const Slot* slot :
         {&step_of.children, &step_of.next_key, &step_of.next, &step_of.programs, &step_of.known, &step_of.probes,
          &step_of.lenses, &step_of.dynamic, &step_of.patterns})
      slot->set(step.get(), Py_None);
    step_of.parent.set(step.get(), cursor);
    step_of.node.set(step.get(), node.get());
    step_of.inputs.set(step.get(), rows.get());
    if (original.lenses)
      step_of.lenses.set(step.get(), original.lenses.get());
    const Py_ssize_t end = first + PyTuple_GET_SIZE(node_of.outs.of(from));
    const Py_ssize_t num_scalars = step_of.num_scalars.number(cursor) + static_cast<Py_ssize_t>(numbers.size());
    const Object expected(expectation(original));
    if (!expected || !step_of.end.set_number(step.get(), end) ||
        !step_of.num_scalars.set_number(step.get(), num_scalars) ||
        !trace_of.steps.set_number(trace, trace_of.steps.number(trace) + 1))
      return false;
    step_of.expected.set(step.get(), expected.get());
    step_of.next.set(cursor, step.get());
    step_of.next_key.set(cursor, made.key.get());
    return true;
  }

  // `Step.inputs`: number and meta of each value that is first read here.
  PyObject* input_rows() const {
    Object rows(PyTuple_New(static_cast<Py_ssize_t>(inputs.size())));
    for (size_t i = 0; rows && i < inputs.size(); ++i) {
      const Object number(PyLong_FromSsize_t(count + static_cast<Py_ssize_t>(i)));
      PyObject* row = number ? untracked(PyTuple_Pack(2, number.get(), inputs[i].meta)) : nullptr;
      if (!row)
        return nullptr;
      PyTuple_SET_ITEM(rows.get(), static_cast<Py_ssize_t>(i), row);
    }
    return untracked(rows.release());
  }

  // The numbers of the written cells, the stream's last.
  std::vector<Py_ssize_t> written_numbers() const {
    std::vector<Py_ssize_t> found;
    for (size_t k = 0; k < operands.items.size(); ++k)
      if (operands.items[k].is_written && operands.items[k].cell == static_cast<Py_ssize_t>(found.size()))
        found.push_back(taken[k].value);
    if (op.draws)
      found.push_back(taken.back().value);
    return found;
  }

  static PyObject* tuple_of(const std::vector<Py_ssize_t>& given) {
    Object made(PyTuple_New(static_cast<Py_ssize_t>(given.size())));
    for (size_t i = 0; made && i < given.size(); ++i) {
      PyObject* number = PyLong_FromSsize_t(given[i]);
      if (!number)
        return nullptr;
      PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), number);
    }
    return untracked(made.release());
  }

  // What to expect of a repetition of this call: what the original expects, with the numbers of this call.
  PyObject* expectation(const Original& original) const {
    Object made(expected_type.tp_alloc(&expected_type, 0));
    if (!made)
      return nullptr;
    const auto& from = *reinterpret_cast<Expected*>(original.expected.get());
    auto* to = reinterpret_cast<Expected*>(made.get());
    to->op = from.op;
    new (&to->default_dtype) std::optional<at::ScalarType>(from.default_dtype);
    to->last = nullptr;
    to->wants = new std::vector<Want>(*from.wants);
    for (Want& want : *to->wants)
      Py_XINCREF(want.lens);
    const auto number = [](Want& want, const Number& given) {
      want.number = given.value;
      want.meta = given.meta;
      want.what = given.meta ? Want::kFirstRead : Want::kNumbered;
    };
    for (size_t k = 0; k < original.operands.size(); ++k)
      number((*to->wants)[original.operands[k].want], taken[k]);
    if (op.draws)
      number(to->wants->back(), taken.back());
    if (!op.writes_any)
      return made.release();
    const auto written = written_numbers();
    for (size_t k = 0; k < original.operands.size(); ++k) { // as `Noter::note_shared_reads`
      const Operand& each = operands.items[k];
      Want& want = (*to->wants)[original.operands[k].want];
      if (!each.is_written)
        want.may_share = each.is_part || std::find(written.begin(), written.end(), want.number) != written.end();
    }
    return made.release();
  }
};

} // namespace ltc
