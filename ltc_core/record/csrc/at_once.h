// An op that runs where it is called, on the memory of its operands, as eager PyTorch runs it: nothing is recorded.
//
// Where steps do not repeat, or their ops are tiny, to record them costs more than it gains; `runtime/at_once.py` says
// when that is so. Values stay what they are to the recorders: a tensor that is made here has a cell whose value has a
// buffer, and a view is a lens on a cell. So the next op may be recorded, and one that is left to the recorders here is.
#pragma once
#include "known_read.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <unordered_map>

namespace ltc {

// `Trace.at_once` of a device whose ops run so.
struct AtOnce {
  PyObject_HEAD
  PyObject *memory, *settle; // the device's counter of bytes; () -> None: cuts what is recorded, and waits for it
  PyObject* look; // () -> None: called once after `next_look` ops
  PyObject *make_meta, *find_lens, *find_part; // functions of record/at_once.py
  Py_ssize_t next_look;
  Py_ssize_t num_ops; // that ran here
  unsigned long long form; // a hash of the ops and of their operands' sizes and dtypes
  at::Generator* generator; // draws, each time from a state of the device's; used while the trace is locked
};
inline PyTypeObject at_once_type = {PyVarObject_HEAD_INIT(nullptr, 0) "_ltc_record.AtOnce", sizeof(AtOnce)};
inline std::atomic<int> num_at_once = 0; // traces with one; read without the GIL

inline void free_at_once(PyObject* self) {
  auto* state = reinterpret_cast<AtOnce*>(self);
  for (PyObject* each : {state->memory, state->settle, state->look, state->make_meta, state->find_lens, state->find_part})
    Py_XDECREF(each);
  delete state->generator;
  Py_TYPE(self)->tp_free(self);
}

// at_once(memory, settle, look, make_meta, find_lens, find_part)
inline PyObject* at_once(PyObject*, PyObject* given) {
  PyObject *memory, *settle, *look, *make_meta, *find_lens, *find_part;
  if (!PyArg_ParseTuple(given, "OOOOOO", &memory, &settle, &look, &make_meta, &find_lens, &find_part))
    return nullptr;
  PyObject* made = PyType_GenericAlloc(&at_once_type, 0);
  if (!made)
    return nullptr;
  auto* state = reinterpret_cast<AtOnce*>(made);
  state->memory = Py_NewRef(memory);
  state->generator = new at::Generator(at::detail::createCPUGenerator());
  state->settle = Py_NewRef(settle);
  state->look = Py_NewRef(look);
  state->make_meta = Py_NewRef(make_meta);
  state->find_lens = Py_NewRef(find_lens);
  state->find_part = Py_NewRef(find_part);
  return made;
}

// Metas by size, strides, offset and dtype, and the lens of a part by the metas of the whole and of the part.
class Layouts {
 public:
  // Borrowed; null after an error.
  static PyObject* meta_of(const AtOnce& state, const at::Tensor& tensor, int64_t offset) {
    Key key;
    key.push_back(static_cast<int64_t>(tensor.scalar_type()));
    key.push_back(offset);
    key.append(tensor.sizes().begin(), tensor.sizes().end());
    key.append(tensor.strides().begin(), tensor.strides().end());
    auto& known = metas();
    const auto found = known.find(key);
    if (found != known.end())
      return found->second;
    const Object size(tuple_of(tensor.sizes())), stride(tuple_of(tensor.strides()));
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
    const Object meta(
        size && stride ? PyObject_CallFunction(state.make_meta, "OOLO", size.get(), stride.get(), offset, dtype)
                       : nullptr);
    if (!meta)
      return nullptr;
    if (known.size() >= kMost)
      forget(known);
    return known.emplace(std::move(key), Py_NewRef(meta.get())).first->second;
  }

  // The lens that leads from memory with one meta to a part with another one, borrowed. None: there is none. Null after
  // an error.
  static PyObject* lens_of(const AtOnce& state, PyObject* whole, PyObject* part) {
    auto& known = lenses();
    const Key key{reinterpret_cast<int64_t>(whole), reinterpret_cast<int64_t>(part)}; // metas are never freed
    const auto found = known.find(key);
    if (found != known.end())
      return found->second;
    const Object lens(PyObject_CallFunctionObjArgs(state.find_lens, whole, part, nullptr));
    if (!lens)
      return nullptr;
    if (known.size() >= kMost)
      forget(known);
    return known.emplace(key, Py_NewRef(lens.get())).first->second;
  }

 private:
  using Key = c10::SmallVector<int64_t, 12>;
  struct Hash {
    size_t operator()(const Key& key) const {
      size_t hash = key.size();
      for (const int64_t each : key)
        hash = (hash ^ static_cast<size_t>(each)) * 0x9E3779B97F4A7C15ull;
      return hash ^ (hash >> 29);
    }
  };
  using Known = std::unordered_map<Key, PyObject*, Hash>;
  static constexpr size_t kMost = 100'000;

  static Known& metas() {
    static auto* known = new Known(); // leaked, as the next one: kernels outlive the interpreter
    return *known;
  }
  static Known& lenses() {
    static auto* known = new Known();
    return *known;
  }
  static void forget(Known& known) {
    for (const auto& [key, object] : known)
      Py_DECREF(object);
    known.clear();
  }
  static PyObject* tuple_of(at::IntArrayRef numbers) {
    PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
    for (size_t i = 0; made && i < numbers.size(); ++i)
      PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
    return made;
  }
};

// The memory of lazy tensors, for an op that runs now.
class Memory {
 public:
  Memory(AtOnce& state, PyObject* trace) : state(state), trace(trace) {}

  enum class Found { ready, pending, no };

  // Whether the memory of a handle is there. What nobody has written yet counts as there.
  Found look(PyObject* handle) const {
    if (trace_of_handle(handle) != trace)
      return Found::no;
    PyObject* value = cell_of.value.of(cell_of_handle(handle));
    if (value_of.buffer.is_none(value)) {
      const auto epoch = value_of.epoch.number(value);
      return epoch == -1 ? Found::ready : epoch == trace_of.epoch.number(trace) ? Found::pending : Found::no;
    }
    PyObject* buffer = value_of.buffer.of(value);
    if (!buffer_error.is_none(buffer))
      return Found::no;
    if (buffer_data.is_none(buffer))
      return Found::pending;
    PyObject* data = buffer_data.of(buffer);
    return THPVariable_Check(data) && is_plain(THPVariable_Unpack(data)) ? Found::ready : Found::no;
  }

  static PyObject* cell_of_handle(PyObject* handle) {
    return is_type(handle, cell_type) ? handle : view_of.base.of(handle);
  }

  // The memory of a cell; made if nobody has written it yet. Undefined after an error.
  at::Tensor whole(PyObject* cell) const {
    PyObject* value = cell_of.value.of(cell);
    if (value_of.buffer.is_none(value)) {
      const Maker* maker = maker_for(cell_of.meta.of(cell), trace_of.device.of(trace));
      if (!maker)
        return {};
      at::Tensor made = at::empty_strided(maker->size, maker->stride, at::TensorOptions(maker->dtype));
      return rebind(cell, made) ? made : at::Tensor();
    }
    return THPVariable_Unpack(buffer_data.of(value_of.buffer.of(value)));
  }

  // The elements of a handle; undefined, maybe with an error set, if they are no part of the cell's memory.
  at::Tensor part(PyObject* handle) const {
    PyObject* cell = cell_of_handle(handle);
    at::Tensor memory = whole(cell);
    if (!memory.defined() || cell == handle)
      return memory;
    PyObject* device = trace_of.device.of(trace);
    const Maker *of_whole = maker_for(cell_of.meta.of(cell), device), *of_part = maker_for(view_of.meta.of(handle), device);
    if (!of_whole || !of_part)
      return {};
    const bool is_as_recorded = memory.strides() == of_whole->stride && memory.sizes() == of_whole->size &&
        memory.storage_offset() == 0 && of_part->dtype == memory.dtype();
    if (is_as_recorded && (is_of_elements(handle) || has_known_lens(handle)))
      return viewed(memory, of_part->size, of_part->stride, of_part->offset);
    const Object whole(THPVariable_Wrap(memory));
    const Object found(
        whole ? PyObject_CallFunctionObjArgs(state.find_part, whole.get(), view_of.lens.of(handle), nullptr) : nullptr);
    return found && THPVariable_Check(found.get()) ? THPVariable_Unpack(found.get()) : at::Tensor();
  }

  // Has nobody else see what is written to the memory of a cell. False after an error.
  bool make_own(PyObject* cell) const {
    PyObject* value = cell_of.value.of(cell);
    if (value_of.buffer.is_none(value))
      return whole(cell).defined();
    PyObject* buffer = value_of.buffer.of(value);
    PyObject* data = buffer_data.of(buffer);
    const at::Tensor& memory = THPVariable_Unpack(data);
    const bool is_own = Py_REFCNT(value) == 1 && Py_REFCNT(buffer) == 1 && Py_REFCNT(data) == 1 &&
        memory.use_count() == 1 && memory.storage().use_count() == 1;
    return is_own || rebind(cell, memory.clone());
  }

  // A new value with this memory. Null after an error.
  Object value_with(const at::Tensor& memory) const {
    const Object data(THPVariable_Wrap(memory));
    if (data && PyObject_GC_IsTracked(data.get()))
      PyObject_GC_UnTrack(data.get()); // it refers to no other object
    const auto nbytes = static_cast<Py_ssize_t>(memory.numel() * memory.element_size());
    const Object buffer(data ? native_functions.ready_buffer(state.memory, data.get(), nbytes) : nullptr);
    return Object(buffer ? new_value(-1, -1, buffer.get()) : nullptr);
  }

  // The memory of a cell was written: it has another value now. False after an error.
  bool note_written(PyObject* cell) const {
    const Object value(new_value(-1, -1, value_of.buffer.of(cell_of.value.of(cell))));
    return value && ltc::rebind(cell, value.get());
  }

  bool rebind(PyObject* cell, const at::Tensor& memory) const {
    const Object value(value_with(memory));
    return value && ltc::rebind(cell, value.get());
  }

 private:
  AtOnce& state;
  PyObject* const trace;

  // Whether this class has made the view, on memory that is laid out as its cell's meta says.
  bool has_known_lens(PyObject* view) const {
    PyObject* known = Layouts::lens_of(state, cell_of.meta.of(view_of.base.of(view)), view_of.meta.of(view));
    PyErr_Clear();
    return known == view_of.lens.of(view);
  }

  static at::Tensor viewed(const at::Tensor& memory, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(memory.storage()), memory.key_set(), memory.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    return made;
  }
};

// The state of PyTorch's that a new thread has, below autograd: a call does not depend on the modes of its caller.
struct PlainState {
  const c10::impl::ForceDispatchKeyGuard keys{c10::default_included_set, c10::default_excluded_set};
  const c10::InferenceMode no_inference{false};
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode no_grad{false};
};

// One call, on the memory of its operands.
class OpAtOnce {
 public:
  OpAtOnce(const Op& op, AtOnce& state, PyObject* trace, c10::ArrayRef<IValue> args)
      : op(op), state(state), trace(trace), args(args), memory(state, trace) {}

  // Whether it may run: its operands are there. What is recorded of them is cut, and waited for. An error is left set.
  bool is_ready() {
    auto found = look();
    if (found == Memory::Found::pending && op.kind != kView) {
      const Object settled(PyObject_CallNoArgs(state.settle));
      found = settled ? look() : Memory::Found::no;
    }
    return found == Memory::Found::ready;
  }

  // Whether it changes what other threads may record: then the lock is held.
  bool changes_cells() const {
    return op.writes_any || op.draws;
  }

  // Runs it; false if it is left to the recorders. An error is left set.
  bool run(torch::jit::Stack& results) {
    if (changes_cells() && look() != Memory::Found::ready) // another thread had the lock meanwhile
      return false;
    {
      const PlainState plain;
      if (!make_written() || !fill() || !call() || !keep_written())
        return false;
    }
    if (!wrap_all(results))
      return false;
    ++state.num_ops;
    return true;
  }

 private:
  static constexpr int64_t kShort = 4096; // elements: to let another thread have the GIL meanwhile would cost more

  const Op& op;
  AtOnce& state;
  PyObject* const trace;
  const c10::ArrayRef<IValue> args;
  const Memory memory;
  Written written;
  torch::jit::Stack stack;
  int64_t num_elements = 0; // of the operands
  bool has_sizes = false; // among the arguments: what it makes may be large
  c10::SmallVector<at::Tensor, 6> held; // what is on the stack: the last reference to it goes while the GIL is held
  Object stream; // the state cell that the op draws from

  // Calls `see` with each tensor among the arguments, and whether the op writes it; stops where that returns false.
  template <typename See>
  bool each_tensor(See&& see) const {
    for (size_t i = 0; i < args.size(); ++i) {
      const IValue& a = args[i];
      if (a.isTensor()) {
        if (!see(a.toTensor(), op.writes[i]))
          return false;
      } else if (a.isList()) {
        for (const IValue& item : a.toListRef())
          if (item.isTensor() && !see(item.toTensor(), op.writes[i]))
            return false;
      }
    }
    return true;
  }

  Memory::Found look() {
    auto found = Memory::Found::ready;
    each_tensor([&](const at::Tensor& tensor, bool) {
      if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number())
        return true;
      const Object handle(handle_of(tensor));
      const auto one = handle ? memory.look(handle.get()) : Memory::Found::no;
      if (one != Memory::Found::ready)
        found = one;
      return one == Memory::Found::ready || one == Memory::Found::pending;
    });
    if (found == Memory::Found::ready && op.draws) {
      if (!stream)
        stream = Object(PyObject_CallFunctionObjArgs(find_stream, trace, Py_None, nullptr));
      found = stream ? memory.look(stream.get()) : Memory::Found::no;
    }
    return found;
  }

  bool make_written() {
    if (!op.writes_any)
      return true;
    return each_tensor([&](const at::Tensor& tensor, bool is_written) {
      const Object handle(is_written ? handle_of(tensor) : nullptr);
      if (!handle)
        return true;
      PyObject* cell = Memory::cell_of_handle(handle.get());
      if (written.find(cell) >= 0)
        return true;
      written.add(cell);
      return memory.make_own(cell);
    });
  }

  std::optional<at::Tensor> real(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number())
      return tensor;
    const Object handle(handle_of(tensor));
    at::Tensor part = memory.part(handle.get());
    if (!part.defined())
      return std::nullopt;
    held.push_back(part);
    num_elements += part.numel();
    note(static_cast<unsigned long long>(part.scalar_type()));
    for (const int64_t size : part.sizes())
      note(static_cast<unsigned long long>(size));
    return part;
  }

  void note(unsigned long long what) {
    state.form = (state.form ^ what) * 0x9E3779B97F4A7C15ull + 1;
  }

  // Puts the arguments on the stack, each lazy tensor as its memory.
  bool fill() {
    note(reinterpret_cast<unsigned long long>(&op));
    for (size_t i = 0; i < args.size(); ++i) {
      const IValue& a = args[i];
      if (a.isTensor()) {
        auto found = real(a.toTensor());
        if (!found)
          return false;
        stack.emplace_back(std::move(*found));
      } else if (op.codes[i] == kTensors && a.isList()) {
        if (!fill_list(a))
          return false;
      } else if (a.isDevice()) {
        const auto& given = a.toDevice();
        const auto& own = reinterpret_cast<THPDevice*>(trace_of.device.of(trace))->device;
        if (given.type() != own.type() || (given.has_index() && given.index() != own.index()))
          return false;
        stack.emplace_back(c10::Device(c10::kCPU));
      } else if (op.codes[i] == kGenerator) {
        if (!a.isNone())
          return false;
        if (op.draws) {
          stack.emplace_back(*state.generator);
        } else {
          stack.emplace_back();
        }
      } else {
        has_sizes |= a.isIntList();
        stack.push_back(a);
      }
    }
    return true;
  }

  bool fill_list(const IValue& list) {
    const auto& type = op.handle.schema().arguments()[stack.size()].type();
    const auto* optional = type->castRaw<c10::OptionalType>();
    const auto& element = *(optional ? optional->getElementType() : type)->castRaw<c10::ListType>()->getElementType();
    if (element.kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> made;
      for (const IValue& item : list.toListRef()) {
        auto found = item.isTensor() ? real(item.toTensor()) : std::optional<at::Tensor>(at::Tensor());
        if (!found)
          return false;
        made.push_back(found->defined() ? found : std::nullopt);
      }
      stack.emplace_back(std::move(made));
      return true;
    }
    c10::List<at::Tensor> made;
    for (const IValue& item : list.toListRef()) {
      auto found = real(item.toTensor());
      if (!found)
        return false;
      made.push_back(std::move(*found));
    }
    stack.emplace_back(std::move(made));
    return true;
  }

  bool call() {
    bool is_done = true;
    if (stream)
      held.push_back(memory.whole(stream.get()));
    const bool is_short = op.kind == kView || (!has_sizes && !op.is_factory && num_elements <= kShort);
    PyThreadState* thread = is_short ? nullptr : PyEval_SaveThread();
    try {
      const c10::AutoGradMode mode(op.asks_grad_mode() && args.back().isBool() && args.back().toBool());
      if (stream)
        state.generator->set_state(held.back());
      op.handle.callBoxed(&stack);
      if (stream)
        held.push_back(state.generator->get_state());
      settle_results();
    } catch (...) { // it will fail again where the recorders' op runs, which says so
      is_done = false;
    }
    if (thread)
      PyEval_RestoreThread(thread);
    if (is_done && stream)
      is_done = memory.rebind(stream.get(), held.back());
    return is_done;
  }

  // Has each new result own packed memory.
  void settle_results() {
    if (op.kind == kView)
      return;
    const auto& returns = op.handle.schema().returns();
    for (size_t i = 0; i < stack.size(); ++i) {
      if (returns[i].alias_info() && returns[i].alias_info()->isWrite())
        continue;
      if (stack[i].isTensor()) {
        stack[i] = packed(stack[i].toTensor());
      } else if (stack[i].isTensorList()) {
        c10::List<at::Tensor> made;
        for (const at::Tensor& each : stack[i].toTensorVector())
          made.push_back(packed(each));
        stack[i] = std::move(made);
      }
    }
  }

  static at::Tensor packed(const at::Tensor& made) {
    if (!made.defined() || made.layout() != at::kStrided || !made.is_cpu())
      return made;
    const at::Tensor plain = made.is_conj() || made.is_neg() ? made.resolve_conj().resolve_neg() : made;
    const bool is_dense = plain.is_non_overlapping_and_dense() && !plain._is_zerotensor();
    const bool is_own = plain.storage().use_count() == 1 && plain.storage_offset() == 0; // not so of `_unsafe_view`
    return is_dense && is_own ? plain : plain.clone(is_dense ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
  }

  bool keep_written() {
    for (PyObject* cell : written.cells)
      if (!memory.note_written(cell))
        return false;
    return true;
  }

  // Replaces the results on the stack by lazy tensors.
  bool wrap_all(torch::jit::Stack& results) {
    const auto& returns = op.handle.schema().returns();
    for (size_t i = 0; i < stack.size(); ++i) {
      if (returns[i].alias_info() && returns[i].alias_info()->isWrite()) {
        const IValue* original = written_as(returns[i]);
        if (!original)
          return false;
        results.push_back(*original);
      } else if (stack[i].isTensor()) {
        at::Tensor made;
        if (!wrap_one(stack[i].toTensor(), made))
          return false;
        results.emplace_back(std::move(made));
      } else if (stack[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : stack[i].toTensorVector()) {
          at::Tensor made;
          if (!wrap_one(each, made))
            return false;
          list.push_back(std::move(made));
        }
        results.emplace_back(std::move(list));
      } else {
        results.push_back(stack[i]);
      }
    }
    stack.clear();
    return true;
  }

  const IValue* written_as(const c10::Argument& result) const {
    const auto& arguments = op.handle.schema().arguments();
    for (size_t k = 0; k < arguments.size(); ++k)
      if (arguments[k].alias_info() && arguments[k].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return &args[k];
    return nullptr;
  }

  bool wrap_one(const at::Tensor& real, at::Tensor& made) {
    if (!real.defined())
      return true;
    if (real.layout() != at::kStrided || !real.is_cpu())
      return false;
    const Object handle(op.kind == kView ? view_on(real) : cell_with(real));
    if (!handle)
      return false;
    made = wrap(
        is_type(handle.get(), cell_type) ? cell_of.meta.of(handle.get()) : view_of.meta.of(handle.get()),
        trace_of.device.of(trace),
        handle.get());
    return made.defined();
  }

  Object cell_with(const at::Tensor& real) const {
    PyObject* meta = Layouts::meta_of(state, real, 0);
    const Object value(meta ? memory.value_with(real) : Object());
    return Object(value ? new_cell(trace, value.get(), meta) : nullptr);
  }

  // A view of the first operand's cell. Null, without an error, if it is no part of its memory.
  Object view_on(const at::Tensor& real) const {
    const Object handle(handle_of(args[0].toTensor()));
    PyObject* cell = Memory::cell_of_handle(handle.get());
    const at::Tensor whole = memory.whole(cell);
    const bool is_part = whole.defined() && is_plain(real) && real.dtype() == whole.dtype() &&
        real.storage().unsafeGetStorageImpl() == whole.storage().unsafeGetStorageImpl() && whole.storage_offset() == 0;
    const Maker* of_whole = is_part ? maker_for(cell_of.meta.of(cell), trace_of.device.of(trace)) : nullptr;
    if (!of_whole || whole.strides() != of_whole->stride || whole.sizes() != of_whole->size)
      return Object();
    PyObject* meta = Layouts::meta_of(state, real, real.storage_offset());
    PyObject* lens = meta ? Layouts::lens_of(state, cell_of.meta.of(cell), meta) : nullptr;
    if (!lens || lens == Py_None)
      return Object();
    const Object value(new_value(-1, -1, Py_None));
    return Object(value ? new_view(cell, lens, meta, value.get()) : nullptr);
  }
};

inline PyMemberDef at_once_members[] = {
    {"num_ops", T_PYSSIZET, offsetof(AtOnce, num_ops), READONLY, nullptr},
    {"next_look", T_PYSSIZET, offsetof(AtOnce, next_look), 0, nullptr},
    {"form", T_ULONGLONG, offsetof(AtOnce, form), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

} // namespace ltc
