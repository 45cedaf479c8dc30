// Compares a call with the next step of its trace, and records it if they are the same.
#pragma once
#include "expected.h"

namespace ltc {

inline constexpr Py_ssize_t kMostWays = 1024; // known steps after one, among which a call is looked for;
inline constexpr size_t kMostCompared = 64; // it is compared with so many of its op

// Known steps after one but the first, with their keys: those that `takes` takes, none where there are too many to look
// at. A comparison with one may run Python, which changes the dict.
template <typename Takes>
std::vector<std::pair<Object, Object>> other_ways(PyObject* cursor, Takes&& takes) {
  std::vector<std::pair<Object, Object>> found;
  PyObject* children = step_of.children.of(cursor);
  if (!children || children == Py_None || PyDict_GET_SIZE(children) > kMostWays)
    return found;
  PyObject *key, *step;
  for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &step);)
    if (takes(step))
      found.emplace_back(Object(Py_NewRef(step)), Object(Py_NewRef(key)));
  return found;
}

// `is_next` changes nothing, and leaves an interrupt set. If `make` fails, it rewinds the trace.
class NextStep : Operands {
 public:
  NextStep(const Op& op, PyObject* trace, c10::ArrayRef<IValue> args) : Operands(op, trace, args) {}

  bool is_next() {
    return is_at(step_of.next.of(trace_of.cursor.of(trace)));
  }

  // Whether the call is that of a step after the cursor.
  bool is_at(PyObject* given) {
    PyObject* cursor = trace_of.cursor.of(trace);
    step = given;
    if (!step || step == Py_None || step_of.expected.is_none(step))
      return false;
    const auto* expected = reinterpret_cast<Expected*>(step_of.expected.of(step));
    is_dynamic = expected->last;
    if (expected->op != &op || (op.kind == kView && !is_dynamic && step_of.lenses.is_none(step)))
      return false;
    if (expected->default_dtype && *expected->default_dtype != c10::get_default_dtype_as_scalartype())
      return false;
    wants = expected->wants;
    for (size_t i = 0; i < args.size(); ++i) {
      if (!is_as_expected(args[i], op.writes[i]))
        return false;
    }
    const bool is_same =
        (!op.draws || stream_is_next()) && shares_as_expected() && (!is_dynamic || find_entry(*expected->last));
    return is_same && trace_of.cursor.of(trace) == cursor; // a signal handler may have recorded ops meanwhile
  }

  // Records the call as the next step. Returns what the op returns, or nothing after an error.
  std::optional<IValue> make() {
    const Object kept(Py_NewRef(step)); // a finalizer may run and cut the trace
    std::optional<IValue> result;
    if (bind_inputs()) {
      trace_of.cursor.set(trace, step); // from here on, `rewind` completes the step
      if (add_numbers())
        result = op.kind == kView ? views() : results();
    }
    if (result && trace_of.count.set_number(trace, count))
      return result;
    rewind();
    return std::nullopt;
  }

  // Records what stale operands need, as `view_recorder.make_operands` does, if these are the next steps: memory that
  // nobody wrote yet, and views of memory that was written since. Returns whether it recorded any. An error is left set.
  bool make_operands() {
    bool is_any_stale = false, made = false;
    for_each_operand([&](PyObject* handle, bool is_written) {
      const bool is_part = is_type(handle, view_type);
      // A part that is written enters by its cell.
      is_any_stale |= is_unwritten(is_part ? view_of.base.of(handle) : handle) ||
          (is_part && !is_written && !is_fresh(handle));
    });
    bool goes_on = is_any_stale; // Python records those after the first that is no known step, too
    for_each_operand([&](PyObject* handle, bool) {
      const bool is_part = is_type(handle, view_type);
      PyObject* memory = is_part ? view_of.base.of(handle) : handle;
      const auto make = [&](bool is_stale, bool (NextStep::*record)(PyObject*), PyObject* operand) {
        goes_on = goes_on && !PyErr_Occurred();
        if (goes_on && is_stale)
          made |= goes_on = (this->*record)(operand);
      };
      make(is_unwritten(memory), &NextStep::begin_memory, memory);
      make(is_part && !is_fresh(handle), &NextStep::renew_view, handle);
    });
    return made;
  }

 private:
  PyObject* step = nullptr;
  const std::vector<Want>* wants = nullptr;
  size_t at_want = 0;
  Written written;
  struct Read {
    const Want* want;
    PyObject* handle; // its tensor holds it
  };
  std::vector<Read> reads; // operands that may share memory with written cells
  bool is_dynamic = false;
  c10::SmallVector<PyObject*, 8> metas; // of a dynamic step: of the operands
  c10::SmallVector<int64_t, 8> sizes; // and those that may be any
  Object entry; // what it returns for these

  // -- comparing

  // Finds the results of a dynamic step for the metas and the sizes of this call; false if Python has to infer them.
  bool find_entry(LastCall& last) {
    const auto same = [](const auto& a, const auto& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
    const bool is_closed = !dynamic_of.closed.is_none(step_of.dynamic.of(step)); // to some calls
    if (is_closed || !last.entry || !same(last.metas, metas) || !same(last.sizes, sizes)) {
      const auto count = static_cast<Py_ssize_t>(metas.size());
      const Object key(PyTuple_New(count + static_cast<Py_ssize_t>(sizes.size())));
      for (Py_ssize_t i = 0; key && i < count; ++i)
        PyTuple_SET_ITEM(key.get(), i, Py_NewRef(metas[i]));
      for (size_t i = 0; key && i < sizes.size(); ++i)
        PyTuple_SET_ITEM(key.get(), count + static_cast<Py_ssize_t>(i), PyLong_FromLongLong(sizes[i]));
      if (is_closed && key && PySet_Contains(dynamic_of.closed.of(step_of.dynamic.of(step)), key.get()) != 0)
        return false;
      Object found(key ? find_known(step_of.dynamic.of(step), key.get()) : nullptr);
      if (!found || found.get() == Py_None || (op.kind == kView && entry_of.lenses.is_none(found.get())))
        return false;
      last.metas.assign(metas.begin(), metas.end());
      last.sizes.assign(sizes.begin(), sizes.end());
      last.entry = std::move(found);
    }
    entry = Object(Py_NewRef(last.entry.get()));
    if (!step_of.dynamic.is_none(step_of.parent.of(step)))
      return true;
    const Py_ssize_t uses = entry_of.uses.number(entry.get()) + 1; // the first step of a dynamic way
    return uses < often && entry_of.uses.set_number(entry.get(), uses);
  }

  // An entry of a step, or one that Python infers; None or null, with an error set, if there is none.
  static PyObject* find_known(PyObject* dynamic, PyObject* key) {
    if (PyObject* found = PyDict_GetItemWithError(dynamic_of.known.of(dynamic), key))
      return Py_NewRef(found);
    if (PyErr_Occurred())
      return nullptr;
    PyObject* infer = dynamic_of.infer.of(dynamic);
    return infer == Py_None ? Py_NewRef(Py_None) : PyObject_CallOneArg(infer, key);
  }

  // Whether an argument is equal to the expected one except for sizes, which are taken.
  bool is_sized_as(const IValue& a, const Want& want) {
    if (!a.isIntList()) {
      if (!a.isInt())
        return false;
      sizes.push_back(a.toInt());
      return true;
    }
    const auto items = a.toIntList(), wanted = want.value.toIntList();
    if (items.size() != want.sizes.size())
      return false;
    for (size_t i = 0; i < items.size(); ++i) {
      if (want.sizes[i])
        sizes.push_back(items.get(i));
      else if (items.get(i) != wanted.get(i))
        return false;
    }
    return true;
  }

  bool is_as_expected(const IValue& a, bool is_written) {
    const Want& want = (*wants)[at_want++];
    switch (want.what) {
      case Want::kSame:
        return want.sizes.empty() ? same_value(a, want.value) : is_sized_as(a, want);
      case Want::kType:
        numbers.push_back(number_of(a));
        return numbers.back() && same_type(*numbers.back(), want.value);
      case Want::kItems:
        if (!a.isList() || static_cast<Py_ssize_t>(a.toListRef().size()) != want.number)
          return false;
        for (const IValue& item : a.toListRef()) {
          if (!is_as_expected(item, is_written))
            return false;
        }
        return true;
      default:
        return a.isTensor() && tensor_is(a.toTensor(), want, is_written);
    }
  }

  bool tensor_is(const at::Tensor& tensor, const Want& want, bool is_written) {
    const Object handle(handle_of(tensor));
    if (!handle)
      return false;
    PyObject* whole = handle.get();
    if (is_dynamic)
      metas.push_back(is_type(whole, cell_type) ? cell_of.meta.of(whole) : view_of.meta.of(whole));
    if (want.may_share)
      reads.push_back({&want, whole});
    if (is_written) {
      const bool is_part = is_type(whole, view_type);
      if (is_part != (want.lens != nullptr) || (is_part && !equal(view_of.lens.of(whole), want.lens)))
        return false;
      whole = is_part ? view_of.base.of(whole) : whole;
      if (written.add(whole) != want.cell)
        return false;
    }
    return operand_is(whole, want);
  }

  bool stream_is_next() {
    const Object cell = stream();
    if (!cell)
      return false;
    const Want& want = (*wants)[at_want++];
    return written.add(cell.get()) == want.cell && operand_is(cell.get(), want);
  }

  // Whether the operands that are read share memory with the written cells as in the step.
  bool shares_as_expected() const {
    for (const Read& read : reads) {
      const bool is_part = is_type(read.handle, view_type);
      const Py_ssize_t cell = written.find(is_part ? view_of.base.of(read.handle) : read.handle);
      PyObject* lens = read.want->lens;
      if (cell != read.want->cell)
        return false;
      if (cell >= 0 && (is_part ? !lens || !equal(view_of.lens.of(read.handle), lens) : lens != nullptr))
        return false;
    }
    return true;
  }

  bool operand_is(PyObject* whole, const Want& want) {
    PyObject* value = value_of_handle(whole);
    if (!value)
      return false;
    if (want.what == Want::kNumbered) {
      if (is_of_this_epoch(value))
        return value_of.index.number(value) == want.number;
      return input_number(value) == want.number;
    }
    PyObject* meta = cell_of.meta.of(whole);
    return !is_of_this_epoch(value) && !input_number(value) && (is_dynamic || meta == want.meta) &&
        first_read(value, meta);
  }

  // -- making

  // Calls a function with the handle of each operand of this trace, and with whether it is written.
  template <typename Function>
  void for_each_operand(const Function& function) const {
    const auto call = [&](const IValue& a, bool is_written) {
      const Object handle(a.isTensor() ? handle_of(a.toTensor()) : nullptr);
      if (handle && trace_of_handle(handle.get()) == trace)
        function(handle.get(), is_written);
    };
    for (size_t i = 0; i < args.size(); ++i) {
      if (!args[i].isList())
        call(args[i], op.writes[i]);
      else
        for (const IValue& item : args[i].toListRef())
          call(item, op.writes[i]);
    }
  }

  bool is_unwritten(PyObject* cell) const {
    PyObject* value = cell_of.value.of(cell);
    return !is_of_this_epoch(value) && value_of.buffer.is_none(value);
  }

  bool is_fresh(PyObject* view) const {
    return is_of_this_epoch(view_of.value.of(view)) &&
        view_of.version.number(view) == cell_of.version.number(view_of.base.of(view));
  }

  bool begin_memory(PyObject* cell) {
    if (!is_unwritten(cell))
      return false;
    PyObject* cursor = trace_of.cursor.of(trace);
    PyObject* next_key = step_of.next_key.of(cursor);
    if (!next_key || !PyTuple_CheckExact(next_key) || PyTuple_GET_ITEM(next_key, 0) != empty_op)
      return false;
    PyObject* next = step_of.next.of(cursor);
    PyObject* outs = node_of.outs.of(step_of.node.of(next));
    if (!step_of.dynamic.is_none(next) || PyTuple_GET_ITEM(outs, 0) != cell_of.meta.of(cell))
      return false;
    const Object made(define());
    if (!made || !trace_of.count.set_number(trace, count) ||
        !cell_of.version.set_number(cell, cell_of.version.number(cell) + 1)) {
      rewind();
      return false;
    }
    trace_of.cursor.set(trace, step_of.next.of(cursor));
    cell_of.value.set(cell, made.get());
    return true;
  }

  // A view step that a stale part needs.
  struct Renewed {
    Object step, entry; // the entry of a dynamic step
    std::vector<int64_t> sizes;
    PyObject* outs() const { return entry ? entry_of.outs.of(entry.get()) : node_of.outs.of(step_of.node.of(step.get())); }
  };

  // Records the view steps of a part whose memory was written since, if all of them are known steps.
  bool renew_view(PyObject* view) {
    PyObject *base = view_of.base.of(view), *whole = cell_of.value.of(base), *lens = view_of.lens.of(view);
    if (is_fresh(view) || !PyTuple_CheckExact(lens))
      return false;
    const bool is_input = !is_of_this_epoch(whole);
    PyObject *meta = cell_of.meta.of(base), *cursor = trace_of.cursor.of(trace);
    if (is_input && !first_read(whole, meta))
      return false;
    Py_ssize_t number = is_input ? -1 : value_of.index.number(whole), after = count + is_input;
    std::vector<Renewed> renewed;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lens); ++i) {
      auto& each = renewed.emplace_back();
      PyObject* before = i ? renewed[static_cast<size_t>(i) - 1].step.get() : cursor;
      const Py_ssize_t which = is_next_view(before, PyTuple_GET_ITEM(lens, i), meta, number, each);
      if (which < 0 || which >= PyTuple_GET_SIZE(each.outs())) {
        inputs.clear();
        return false;
      }
      number = after + which;
      meta = PyTuple_GET_ITEM(each.outs(), which);
      after += PyTuple_GET_SIZE(each.outs());
    }
    if (renewed.empty() || cursor != trace_of.cursor.of(trace) || !bind_inputs()) {
      inputs.clear();
      return false;
    }
    inputs.clear();
    trace_of.cursor.set(trace, renewed.back().step.get()); // from here on, `rewind` completes the steps
    const Object value(ltc::new_value(epoch, number, Py_None));
    bool is_made = static_cast<bool>(value);
    for (const auto& each : renewed) {
      PyObject* of_node = node_of.outs.of(step_of.node.of(each.step.get()));
      for (Py_ssize_t k = 0; is_made && k < PyTuple_GET_SIZE(of_node); ++k)
        is_made = note_size(PyTuple_GET_ITEM(each.outs(), k), PyTuple_GET_ITEM(of_node, k)) && take_number(Py_None);
      is_made = is_made && add_sizes(each.sizes);
    }
    if (!is_made || !trace_of.count.set_number(trace, count) ||
        !view_of.version.set_number(view, cell_of.version.number(base))) {
      rewind();
      return false;
    }
    view_of.value.set(view, value.get());
    return true;
  }

  // Which result of a step after `cursor` the step of a lens leads to; -1: it is none of them.
  // `number`: of the operand, or -1 if it is an input that is first read there. `meta`: the operand's.
  Py_ssize_t is_next_view(PyObject* cursor, PyObject* view, PyObject* meta, Py_ssize_t number, Renewed& found) const {
    if (!PyTuple_Check(view) || PyTuple_GET_SIZE(view) != 3)
      return -1;
    const Py_ssize_t which =
        is_view(cursor, step_of.next.of(cursor), step_of.next_key.of(cursor), view, meta, number, found);
    if (which >= 0)
      return which;
    const auto ways = other_ways(
        cursor, [&](PyObject* step) { return node_of.op.of(step_of.node.of(step)) == PyTuple_GET_ITEM(view, 0); });
    for (size_t i = 0; i < ways.size() && i < kMostCompared; ++i) {
      const Py_ssize_t found_there =
          is_view(cursor, ways[i].first.get(), ways[i].second.get(), view, meta, number, found);
      if (found_there >= 0)
        return found_there;
    }
    return -1;
  }

  // The same for the step `next` with a key.
  Py_ssize_t is_view(
      PyObject* cursor, PyObject* next, PyObject* key, PyObject* view, PyObject* meta, Py_ssize_t number,
      Renewed& found) const {
    if (!key || !PyTuple_CheckExact(key))
      return -1;
    const bool is_open = !step_of.dynamic.is_none(next);
    if (is_open && step_of.dynamic.is_none(cursor))
      return -1; // where a dynamic way begins, Python counts its calls
    PyObject *op = PyTuple_GET_ITEM(view, 0), *given = PyTuple_GET_ITEM(view, 1), *which = PyTuple_GET_ITEM(view, 2);
    PyObject* node = step_of.node.of(next);
    if (node_of.op.of(node) != op || node_of.view.of(node) != Py_True || !PyTuple_CheckExact(given) ||
        PyTuple_GET_SIZE(key) != PyTuple_GET_SIZE(given) + 2)
      return -1;
    found.step = Object(Py_NewRef(next)); // a comparison may run Python
    found.sizes.clear();
    PyObject* operand = PyTuple_GET_ITEM(key, 1);
    if (number < 0 ? operand != meta && !is_of_form(meta, operand)
                   : !PyLong_CheckExact(operand) || PyLong_AsSsize_t(operand) != number)
      return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i)
      if (!fits(PyTuple_GET_ITEM(key, i + 2), PyTuple_GET_ITEM(given, i), found.sizes))
        return -1;
    if (is_open && !find_view(next, meta, found))
      return -1;
    return which == Py_None ? 0 : PyLong_AsSsize_t(which);
  }

  // Finds the results of a dynamic view step.
  bool find_view(PyObject* dynamic_step, PyObject* meta, Renewed& found) const {
    PyObject* dynamic = step_of.dynamic.of(dynamic_step);
    const Object key(PyTuple_New(1 + static_cast<Py_ssize_t>(found.sizes.size())));
    if (!key || !dynamic_of.closed.is_none(dynamic))
      return false;
    PyTuple_SET_ITEM(key.get(), 0, Py_NewRef(meta));
    for (size_t i = 0; i < found.sizes.size(); ++i)
      PyTuple_SET_ITEM(key.get(), static_cast<Py_ssize_t>(i) + 1, PyLong_FromLongLong(found.sizes[i]));
    found.entry = Object(find_known(dynamic, key.get()));
    return found.entry && found.entry.get() != Py_None;
  }

  static bool is_of_form(PyObject* meta, PyObject* form) { // `AnyMeta`
    return is_type(form, any_meta) && PyTuple_GET_ITEM(form, 0) == meta_of.dtype.of(meta) &&
        PyLong_AsSsize_t(PyTuple_GET_ITEM(form, 1)) == PyTuple_GET_SIZE(meta_of.size.of(meta));
  }

  // Whether a part of a call's key fits a part of a step's, which leaves sizes open.
  static bool fits(PyObject* want, PyObject* part, std::vector<int64_t>& sizes) {
    if (want == any_size) {
      sizes.push_back(PyLong_CheckExact(part) ? PyLong_AsLongLong(part) : 0);
      return PyLong_CheckExact(part);
    }
    if (!PyTuple_CheckExact(want) || !PyTuple_CheckExact(part))
      return equal(want, part);
    bool is_fit = PyTuple_GET_SIZE(want) == PyTuple_GET_SIZE(part);
    for (Py_ssize_t i = 0; is_fit && i < PyTuple_GET_SIZE(want); ++i)
      is_fit = fits(PyTuple_GET_ITEM(want, i), PyTuple_GET_ITEM(part, i), sizes);
    return is_fit;
  }

  // Calls `Trace.rewind` after an error, which stays set.
  void rewind() {
    const ErrorAside aside;
    const Object rewound(PyObject_CallMethodNoArgs(trace, name_rewind));
    if (!rewound)
      PyErr_WriteUnraisable(trace);
  }

  bool bind_inputs() {
    for (const Input& input : inputs) {
      const Object index(PyLong_FromSsize_t(count));
      if (!index)
        return false;
      const Object row(PyTuple_Pack(4, index.get(), input.value, value_of.buffer.of(input.value), input.meta));
      if (!row || PyList_Append(trace_of.inputs.of(trace), row.get()) < 0 || !take_number(Py_None))
        return false;
      if (!value_of.epoch.set_number(input.value, epoch) || !value_of.index.set_number(input.value, count - 1))
        return false;
    }
    return true;
  }

  bool add_numbers() {
    for (const IValue* number : numbers) {
      const Object made(python_number(*number));
      if (!made || PyList_Append(trace_of.scalars.of(trace), made.get()) < 0)
        return false;
    }
    return add_sizes(sizes);
  }

  bool add_sizes(c10::ArrayRef<int64_t> given) const {
    for (const int64_t size : given) {
      const Object made(PyLong_FromLongLong(size));
      if (!made || PyList_Append(trace_of.scalars.of(trace), made.get()) < 0)
        return false;
    }
    return true;
  }

  // Notes the meta of the trace's next value if it is not that of the step's node.
  bool note_size(PyObject* meta, PyObject* of_node) {
    if (meta == of_node)
      return true;
    const Object index(PyLong_FromSsize_t(count));
    return index && PyDict_SetItem(trace_of.sized.of(trace), index.get(), meta) == 0;
  }

  // Counts one more value of the trace; `value` is None for an input, a view, an undefined one.
  bool take_number(PyObject* value) {
    ++count;
    return PyList_Append(trace_of.values.of(trace), value) == 0;
  }

  PyObject* new_value() {
    return ltc::new_value(epoch, count, Py_None);
  }

  PyObject* define() {
    Object value(new_value());
    return value && take_number(value.get()) ? value.release() : nullptr;
  }

  at::Tensor new_result(PyObject* meta) {
    const Object value(define());
    const Object cell(value ? new_cell(trace, value.get(), meta) : nullptr);
    return cell ? wrap(meta, trace_of.device.of(trace), cell.get()) : at::Tensor();
  }

  at::Tensor new_view(PyObject* base, PyObject* lens, PyObject* meta) {
    const Object value(new_value());
    const Object view(value && take_number(Py_None) ? ltc::new_view(base, lens, meta, value.get()) : nullptr);
    return view ? wrap(meta, trace_of.device.of(trace), view.get()) : at::Tensor();
  }

  std::optional<IValue> results() {
    PyObject* node = step_of.node.of(step);
    PyObject *of_node = node_of.outs.of(node), *spec = node_of.result.of(node); // `make` holds the step
    PyObject* outs = is_dynamic ? entry_of.outs.of(entry.get()) : of_node;
    std::vector<at::Tensor> made;
    const Py_ssize_t n = PyTuple_GET_SIZE(outs) - static_cast<Py_ssize_t>(written.cells.size());
    made.reserve(n);
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* meta = PyTuple_GET_ITEM(outs, i);
      const bool is_undefined = meta == Py_None;
      if (is_dynamic && !note_size(meta, PyTuple_GET_ITEM(of_node, i)))
        return std::nullopt;
      made.push_back(is_undefined ? at::Tensor() : new_result(meta));
      if (is_undefined ? !take_number(Py_None) : !made.back().defined())
        return std::nullopt;
    }
    Py_ssize_t at = n;
    for (PyObject* cell : written.cells) {
      if (is_dynamic && !note_size(cell_of.meta.of(cell), PyTuple_GET_ITEM(of_node, at++)))
        return std::nullopt;
      const Object value(define());
      if (!value || !rebind(cell, value.get()))
        return std::nullopt;
    }
    return arrange(spec, made);
  }

  // `spec` is `Node.result`: a position among the results, the name of a written argument, or a tuple or list of these.
  IValue arrange(PyObject* spec, const std::vector<at::Tensor>& made) {
    if (spec == Py_None)
      return {};
    if (PyLong_CheckExact(spec))
      return made[PyLong_AsSsize_t(spec)];
    if (PyUnicode_Check(spec))
      return args[*op.handle.schema().argumentIndexWithName(PyUnicode_AsUTF8(spec))];
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(spec);
    if (PyTuple_CheckExact(spec)) {
      std::vector<IValue> arranged;
      for (Py_ssize_t i = 0; i < n; ++i)
        arranged.push_back(arrange(PyTuple_GET_ITEM(spec, i), made));
      return c10::ivalue::Tuple::create(std::move(arranged));
    }
    std::vector<at::Tensor> arranged;
    for (Py_ssize_t i = 0; i < n; ++i)
      arranged.push_back(arrange(PyList_GET_ITEM(spec, i), made).toTensor());
    return arranged;
  }

  std::optional<IValue> views() {
    PyObject* node = step_of.node.of(step);
    PyObject* spec = node_of.result.of(node); // `make` holds the step
    PyObject* outs = is_dynamic ? entry_of.outs.of(entry.get()) : node_of.outs.of(node);
    PyObject* lenses = is_dynamic ? entry_of.lenses.of(entry.get()) : step_of.lenses.of(step);
    const Object handle(handle_of(args[0].toTensor()));
    if (!handle)
      return std::nullopt;
    const bool is_whole = is_type(handle.get(), cell_type);
    PyObject* base = is_whole ? handle.get() : view_of.base.of(handle.get());
    std::vector<at::Tensor> made;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outs); ++i) {
      if (is_dynamic && !note_size(PyTuple_GET_ITEM(outs, i), PyTuple_GET_ITEM(node_of.outs.of(node), i)))
        return std::nullopt;
      PyObject* last = PyTuple_GET_ITEM(lenses, i);
      const Object lens(is_whole ? Py_NewRef(last) : PySequence_Concat(view_of.lens.of(handle.get()), last));
      made.push_back(lens ? new_view(base, lens.get(), PyTuple_GET_ITEM(outs, i)) : at::Tensor());
      if (!made.back().defined())
        return std::nullopt;
    }
    return arrange(spec, made);
  }
};

} // namespace ltc
