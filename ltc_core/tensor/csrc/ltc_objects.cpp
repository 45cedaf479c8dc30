// `Value`, `Cell` and `View` of tensor/handles.py, `Buffer` and `MemoryCounter` of tensor/buffer.py, and the lock of
// record/trace.py, as C types: nearly every op makes a value and a handle, and takes the lock; every cut makes a buffer
// for each value that it leaves.
//
// The numbers of a handle are C integers, and the garbage collector does not know handles. It need not: what they refer
// to (a buffer, a trace, metas) does not refer to them. Values and cells of Python's kind made the collector run four
// times as often, over all tensors that a step keeps for backward.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <chrono>
#include <initializer_list>
#include <utility>

namespace {

// ---- handles and values --------------------------------------------------------------------------------------------

struct Value {
  PyObject_HEAD
  PyObject* buffer;
  Py_ssize_t epoch, index;
  PyObject* weak_references;
};
struct Cell {
  PyObject_HEAD
  PyObject *trace, *value, *meta;
  Py_ssize_t version;
};
struct View {
  PyObject_HEAD
  PyObject *base, *lens, *meta, *trace, *value;
  Py_ssize_t version;
};

PyTypeObject value_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.tensor.handles.Value", sizeof(Value)};
PyTypeObject cell_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.tensor.handles.Cell", sizeof(Cell)};
PyTypeObject view_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.tensor.handles.View", sizeof(View)};

void replace(PyObject*& place, PyObject* object) {
  PyObject* old = place;
  place = Py_NewRef(object);
  Py_XDECREF(old);
}

void free_value(PyObject* self) {
  auto* value = reinterpret_cast<Value*>(self);
  if (value->weak_references)
    PyObject_ClearWeakRefs(self);
  Py_XDECREF(value->buffer);
  Py_TYPE(self)->tp_free(self);
}
void free_cell(PyObject* self) {
  auto* cell = reinterpret_cast<Cell*>(self);
  Py_XDECREF(cell->value);
  Py_XDECREF(cell->meta);
  Py_XDECREF(cell->trace);
  Py_TYPE(self)->tp_free(self);
}
void free_view(PyObject* self) {
  auto* view = reinterpret_cast<View*>(self);
  Py_XDECREF(view->value);
  Py_XDECREF(view->base);
  Py_XDECREF(view->lens);
  Py_XDECREF(view->meta);
  Py_XDECREF(view->trace);
  Py_TYPE(self)->tp_free(self);
}

// Value(epoch, index)
int init_value(PyObject* self, PyObject* given, PyObject* named) {
  auto* value = reinterpret_cast<Value*>(self);
  static const char* names[] = {"epoch", "index", nullptr};
  if (!PyArg_ParseTupleAndKeywords(given, named, "nn", const_cast<char**>(names), &value->epoch, &value->index))
    return -1;
  replace(value->buffer, Py_None);
  return 0;
}
// Cell(trace, value, meta)
int init_cell(PyObject* self, PyObject* given, PyObject* named) {
  auto* cell = reinterpret_cast<Cell*>(self);
  static const char* names[] = {"trace", "value", "meta", nullptr};
  PyObject *trace, *value, *meta;
  if (!PyArg_ParseTupleAndKeywords(given, named, "OOO", const_cast<char**>(names), &trace, &value, &meta))
    return -1;
  replace(cell->trace, trace);
  replace(cell->value, value);
  replace(cell->meta, meta);
  cell->version = 0;
  return 0;
}
// View(base, lens, meta, value)
int init_view(PyObject* self, PyObject* given, PyObject* named) {
  auto* view = reinterpret_cast<View*>(self);
  static const char* names[] = {"base", "lens", "meta", "value", nullptr};
  PyObject *base, *lens, *meta, *value;
  if (!PyArg_ParseTupleAndKeywords(
          given, named, "O!OOO", const_cast<char**>(names), &cell_type, &base, &lens, &meta, &value))
    return -1;
  const auto* cell = reinterpret_cast<Cell*>(base);
  replace(view->trace, cell->trace);
  replace(view->base, base);
  replace(view->lens, lens);
  replace(view->meta, meta);
  replace(view->value, value);
  view->version = cell->version;
  return 0;
}

// Value.of(buffer): a value with a buffer.
PyObject* value_of(PyObject*, PyObject* buffer) {
  PyObject* self = value_type.tp_alloc(&value_type, 0);
  if (self) {
    auto* value = reinterpret_cast<Value*>(self);
    value->epoch = value->index = -1;
    value->buffer = Py_NewRef(buffer);
  }
  return self;
}
// cell.rebind(value): replace the value, and count that.
PyObject* rebind(PyObject* self, PyObject* value) {
  auto* cell = reinterpret_cast<Cell*>(self);
  replace(cell->value, value);
  ++cell->version;
  Py_RETURN_NONE;
}

PyMethodDef value_methods[] = {{"of", value_of, METH_O | METH_STATIC, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMethodDef cell_methods[] = {{"rebind", rebind, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyMemberDef value_members[] = {
    {"buffer", T_OBJECT, offsetof(Value, buffer), 0, nullptr},
    {"epoch", T_PYSSIZET, offsetof(Value, epoch), 0, nullptr},
    {"index", T_PYSSIZET, offsetof(Value, index), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyMemberDef cell_members[] = {
    {"trace", T_OBJECT_EX, offsetof(Cell, trace), 0, nullptr},
    {"value", T_OBJECT_EX, offsetof(Cell, value), 0, nullptr},
    {"meta", T_OBJECT_EX, offsetof(Cell, meta), 0, nullptr},
    {"version", T_PYSSIZET, offsetof(Cell, version), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyMemberDef view_members[] = {
    {"base", T_OBJECT_EX, offsetof(View, base), 0, nullptr},
    {"lens", T_OBJECT_EX, offsetof(View, lens), 0, nullptr},
    {"meta", T_OBJECT_EX, offsetof(View, meta), 0, nullptr},
    {"trace", T_OBJECT_EX, offsetof(View, trace), 0, nullptr},
    {"value", T_OBJECT_EX, offsetof(View, value), 0, nullptr},
    {"version", T_PYSSIZET, offsetof(View, version), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

// ---- buffers -------------------------------------------------------------------------------------------------------

// Bytes of the live buffers of a device. Its fields change under the GIL, between which no other code runs.
struct MemoryCounter {
  PyObject_HEAD
  Py_ssize_t used_bytes, peak_bytes;
};
struct Buffer {
  PyObject_HEAD
  MemoryCounter* memory;
  PyObject *data, *error, *job;
  Py_ssize_t nbytes;
  char is_pending, is_given;
  PyObject* weak_references;
};

PyTypeObject memory_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.tensor.buffer.MemoryCounter", sizeof(MemoryCounter)};
PyTypeObject buffer_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.tensor.buffer.Buffer", sizeof(Buffer)};
PyObject* to_raise = nullptr; // of errors.py: (error) -> the exception to raise

void count(MemoryCounter* memory, Py_ssize_t nbytes, Py_ssize_t beside) {
  memory->used_bytes += nbytes;
  if (memory->used_bytes + beside > memory->peak_bytes)
    memory->peak_bytes = memory->used_bytes + beside;
}
// counter.add(nbytes), counter.free(nbytes), counter.note_peak(nbytes)
template <int sign, bool is_beside>
PyObject* change(PyObject* self, PyObject* number) {
  const Py_ssize_t nbytes = PyLong_AsSsize_t(number);
  if (nbytes == -1 && PyErr_Occurred())
    return nullptr;
  count(reinterpret_cast<MemoryCounter*>(self), is_beside ? 0 : sign * nbytes, is_beside ? nbytes : 0);
  Py_RETURN_NONE;
}
PyObject* reset_peak(PyObject* self, PyObject*) {
  auto* memory = reinterpret_cast<MemoryCounter*>(self);
  memory->peak_bytes = memory->used_bytes;
  Py_RETURN_NONE;
}
PyObject* after_fork(PyObject*, PyObject*) {
  Py_RETURN_NONE; // there is no lock to renew
}

void free_buffer(PyObject* self) {
  auto* buffer = reinterpret_cast<Buffer*>(self);
  if (buffer->weak_references)
    PyObject_ClearWeakRefs(self);
  if (buffer->memory)
    count(buffer->memory, -buffer->nbytes, 0);
  Py_XDECREF(buffer->memory);
  Py_XDECREF(buffer->data);
  Py_XDECREF(buffer->error);
  Py_XDECREF(buffer->job);
  Py_TYPE(self)->tp_free(self);
}
Buffer* new_buffer(PyObject* memory, Py_ssize_t nbytes, bool is_pending) {
  if (!PyObject_TypeCheck(memory, &memory_type)) {
    PyErr_Format(PyExc_TypeError, "a buffer is counted by a MemoryCounter, got %R", memory);
    return nullptr;
  }
  auto* buffer = reinterpret_cast<Buffer*>(buffer_type.tp_alloc(&buffer_type, 0));
  if (buffer) {
    buffer->memory = reinterpret_cast<MemoryCounter*>(Py_NewRef(memory));
    buffer->nbytes = nbytes;
    buffer->is_pending = is_pending;
  }
  return buffer;
}
// Buffer(memory, nbytes, pending=True)
PyObject* make_buffer(PyTypeObject*, PyObject* given, PyObject* named) {
  static const char* names[] = {"memory", "nbytes", "pending", nullptr};
  PyObject* memory;
  Py_ssize_t nbytes;
  int is_pending = 1;
  if (!PyArg_ParseTupleAndKeywords(given, named, "On|p", const_cast<char**>(names), &memory, &nbytes, &is_pending))
    return nullptr;
  return reinterpret_cast<PyObject*>(new_buffer(memory, nbytes, is_pending));
}
PyObject* ready_buffer(PyObject* memory, PyObject* data, Py_ssize_t nbytes) {
  auto* buffer = new_buffer(memory, nbytes, false);
  if (buffer) {
    buffer->is_given = true;
    replace(buffer->data, data);
    count(buffer->memory, nbytes, 0);
  }
  return reinterpret_cast<PyObject*>(buffer);
}
// Buffer.ready(memory, data, nbytes)
PyObject* make_ready_buffer(PyObject*, PyObject* given) {
  PyObject *memory, *data;
  Py_ssize_t nbytes;
  if (!PyArg_ParseTuple(given, "OOn", &memory, &data, &nbytes))
    return nullptr;
  return ready_buffer(memory, data, nbytes);
}
// Buffer.failed(memory, error)
PyObject* failed_buffer(PyObject*, PyObject* given) {
  PyObject *memory, *error;
  if (!PyArg_ParseTuple(given, "OO", &memory, &error))
    return nullptr;
  auto* buffer = new_buffer(memory, 0, false);
  if (buffer)
    replace(buffer->error, error);
  return reinterpret_cast<PyObject*>(buffer);
}
Py_ssize_t donate(PyObject* self) {
  return std::exchange(reinterpret_cast<Buffer*>(self)->nbytes, 0);
}
PyObject* mark_donated(PyObject* self, PyObject*) {
  return PyLong_FromSsize_t(donate(self));
}
PyObject* made_by(PyObject* self, PyObject* job) {
  auto* buffer = reinterpret_cast<Buffer*>(self);
  if (buffer->is_pending)
    replace(buffer->job, job);
  Py_RETURN_NONE;
}
PyObject* wait_done(PyObject* self, PyObject*) {
  PyObject* job = reinterpret_cast<Buffer*>(self)->job;
  if (!job || job == Py_None)
    Py_RETURN_NONE;
  Py_INCREF(job);
  PyObject* waited = PyObject_CallMethod(job, "wait", nullptr);
  Py_DECREF(job);
  if (!waited)
    return nullptr;
  Py_DECREF(waited);
  Py_RETURN_NONE;
}
// buffer.set(data), buffer.fail(error)
template <PyObject* Buffer::* place>
void fill(PyObject* self, PyObject* object) {
  auto* buffer = reinterpret_cast<Buffer*>(self);
  buffer->is_pending = false;
  replace(buffer->*place, object);
  Py_CLEAR(buffer->job);
}
template <PyObject* Buffer::* place>
PyObject* settle(PyObject* self, PyObject* object) {
  fill<place>(self, object);
  Py_RETURN_NONE;
}
PyObject* check(PyObject* self, PyObject*) {
  PyObject* error = reinterpret_cast<Buffer*>(self)->error;
  if (!error || error == Py_None)
    Py_RETURN_NONE;
  PyObject* raised = PyObject_CallOneArg(to_raise, error);
  if (raised)
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised)), raised);
  Py_XDECREF(raised);
  return nullptr;
}
PyObject* take_data(PyObject* self, PyObject*) {
  PyObject* checked = check(self, nullptr);
  if (!checked)
    return nullptr;
  Py_DECREF(checked);
  PyObject* data = reinterpret_cast<Buffer*>(self)->data;
  return Py_NewRef(data ? data : Py_None);
}
// raise_by(function): what gives the exception that `take` and `check` raise for an error.
PyObject* raise_by(PyObject*, PyObject* function) {
  replace(to_raise, function);
  Py_RETURN_NONE;
}

PyMethodDef memory_methods[] = {
    {"add", change<1, false>, METH_O, nullptr},
    {"free", change<-1, false>, METH_O, nullptr},
    {"note_peak", change<0, true>, METH_O, nullptr},
    {"reset_peak", reset_peak, METH_NOARGS, nullptr},
    {"after_fork", after_fork, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef buffer_methods[] = {
    {"ready", make_ready_buffer, METH_VARARGS | METH_STATIC, nullptr},
    {"failed", failed_buffer, METH_VARARGS | METH_STATIC, nullptr},
    {"mark_donated", mark_donated, METH_NOARGS, nullptr},
    {"made_by", made_by, METH_O, nullptr},
    {"wait_done", wait_done, METH_NOARGS, nullptr},
    {"set", settle<&Buffer::data>, METH_O, nullptr},
    {"fail", settle<&Buffer::error>, METH_O, nullptr},
    {"take", take_data, METH_NOARGS, nullptr},
    {"check", check, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef memory_members[] = {
    {"used_bytes", T_PYSSIZET, offsetof(MemoryCounter, used_bytes), READONLY, nullptr},
    {"peak_bytes", T_PYSSIZET, offsetof(MemoryCounter, peak_bytes), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyMemberDef buffer_members[] = {
    {"data", T_OBJECT, offsetof(Buffer, data), 0, nullptr},
    {"error", T_OBJECT, offsetof(Buffer, error), 0, nullptr},
    {"job", T_OBJECT, offsetof(Buffer, job), READONLY, nullptr},
    {"nbytes", T_PYSSIZET, offsetof(Buffer, nbytes), READONLY, nullptr},
    {"is_pending", T_BOOL, offsetof(Buffer, is_pending), READONLY, nullptr},
    {"is_given", T_BOOL, offsetof(Buffer, is_given), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

// ---- what a cut takes ----------------------------------------------------------------------------------------------

// alive(values): [(index, value)] of the values that somebody beside the list holds. A weak reference would not tell: the
// garbage collector clears those to all garbage before it calls the first finalizer, and the others may record ops on it.
PyObject* alive(PyObject*, PyObject* values) {
  PyObject* found = PyList_New(0);
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(values); ++i) {
    PyObject* value = PyList_GET_ITEM(values, i);
    if (value == Py_None || Py_REFCNT(value) == 1)
      continue;
    PyObject* row = Py_BuildValue("nO", i, value);
    if (!row || PyList_Append(found, row) < 0)
      Py_CLEAR(found);
    Py_XDECREF(row);
  }
  return found;
}
// held(inputs): [(index, value, buffer)] of rows (index, value, buffer, meta); the value is None if only its row holds it.
PyObject* held(PyObject*, PyObject* inputs) {
  const Py_ssize_t size = PyList_GET_SIZE(inputs);
  PyObject* found = PyList_New(size);
  for (Py_ssize_t i = 0; found && i < size; ++i) {
    PyObject* row = PyList_GET_ITEM(inputs, i);
    PyObject* value = PyTuple_GET_ITEM(row, 1);
    PyObject* kept = Py_REFCNT(value) == 1 ? Py_None : value;
    PyObject* item = PyTuple_Pack(3, PyTuple_GET_ITEM(row, 0), kept, PyTuple_GET_ITEM(row, 2));
    if (item)
      PyList_SET_ITEM(found, i, item);
    else
      Py_CLEAR(found);
  }
  return found;
}

// pending_outputs(memory, [(number, value)], ((nbytes, taken), ...), inputs): as that of buffer.py.
PyObject* pending_outputs(PyObject*, PyObject* const* given, Py_ssize_t count_given) {
  if (count_given != 4 || !PyList_Check(given[1]) || !PyTuple_Check(given[2]) || !PyList_Check(given[3]) ||
      PyList_GET_SIZE(given[1]) != PyTuple_GET_SIZE(given[2])) {
    PyErr_SetString(PyExc_TypeError, "a counter of memory, a list of values, as many outputs in a tuple, a list of inputs");
    return nullptr;
  }
  const Py_ssize_t size = PyList_GET_SIZE(given[1]);
  PyObject* made = PyList_New(size);
  Py_ssize_t more_bytes = 0;
  for (Py_ssize_t i = 0; made && i < size; ++i) {
    PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(given[1], i), 1);
    PyObject* output = PyTuple_GET_ITEM(given[2], i);
    const Py_ssize_t nbytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(output, 0));
    const Py_ssize_t taken = PyLong_AsSsize_t(PyTuple_GET_ITEM(output, 1));
    Buffer* buffer = PyErr_Occurred() ? nullptr : new_buffer(given[0], nbytes, true);
    if (!buffer) {
      Py_CLEAR(made);
      break;
    }
    PyList_SET_ITEM(made, i, reinterpret_cast<PyObject*>(buffer));
    more_bytes += nbytes - (taken < 0 ? 0 : donate(PyList_GET_ITEM(given[3], taken)));
    replace(reinterpret_cast<Value*>(value)->buffer, reinterpret_cast<PyObject*>(buffer));
  }
  if (made)
    count(reinterpret_cast<MemoryCounter*>(given[0]), more_bytes, 0);
  return made;
}
// fill_pending(buffers, results): as that of buffer.py.
PyObject* fill_pending(PyObject*, PyObject* const* given, Py_ssize_t count_given) {
  if (count_given != 2 || !PyList_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "a list of buffers and their results");
    return nullptr;
  }
  PyObject* results = PySequence_Fast(given[1], "results of a program");
  if (!results)
    return nullptr;
  const bool is_whole = PyList_GET_SIZE(given[0]) == PySequence_Fast_GET_SIZE(results);
  for (Py_ssize_t i = 0; is_whole && i < PyList_GET_SIZE(given[0]); ++i)
    if (PyObject* buffer = PyList_GET_ITEM(given[0], i); reinterpret_cast<Buffer*>(buffer)->is_pending)
      fill<&Buffer::data>(buffer, PySequence_Fast_GET_ITEM(results, i));
  Py_DECREF(results);
  if (!is_whole)
    PyErr_SetString(PyExc_ValueError, "not as many results as buffers");
  return is_whole ? Py_NewRef(Py_None) : nullptr;
}

// ---- the lock of a trace -------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

// A thread that waits for a lock.
struct Waiter {
  const unsigned long thread = PyThread_get_thread_ident();
  const Clock::time_point since = Clock::now();
  const PyThread_type_lock gate = PyThread_allocate_lock(); // it waits for this one
  bool is_called = false; // the gate is open: the lock was free
  bool is_owner = false; // the lock was handed to it
  Waiter* next = nullptr;

  ~Waiter() {
    if (gate)
      PyThread_free_lock(gate);
  }
};

// A lock that its owner may take again, as threading.RLock. Its fields change under the GIL only, so that taking a free
// lock is two assignments. Whoever comes first takes it, but from the thread that gives it back it goes to one that has
// waited for `kPatience`: else that thread could take it again for ever, before another one has the GIL.
struct Lock {
  PyObject_HEAD
  unsigned long owner; // of `count` > 0
  Py_ssize_t count; // how often the owner has taken it
  Waiter* first; // of those that wait, in the order they came
};
PyTypeObject lock_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ltc_core.record.trace.Lock", sizeof(Lock)};
constexpr std::chrono::milliseconds kPatience{2};

bool take_now(Lock* lock) {
  const unsigned long me = PyThread_get_thread_ident();
  if (lock->count > 0 && lock->owner != me)
    return false;
  lock->owner = me;
  ++lock->count;
  return true;
}
void remove(Lock* lock, const Waiter* waiter) {
  Waiter** place = &lock->first;
  while (*place != waiter)
    place = &(*place)->next;
  *place = waiter->next;
}
void give(PyObject* self) {
  auto* lock = reinterpret_cast<Lock*>(self);
  Waiter* waiter = lock->first;
  if (--lock->count > 0 || !waiter)
    return;
  const unsigned long thread = waiter->thread;
  if (Clock::now() - waiter->since > kPatience) {
    lock->first = waiter->next;
    lock->owner = thread;
    lock->count = 1;
    waiter->is_owner = true;
  }
  // A thread that a signal handler interrupted may wait here a second time, in the handler: wherever it waits, it wakes.
  for (; waiter; waiter = waiter->next) {
    if (waiter->thread == thread && !waiter->is_called) {
      waiter->is_called = true;
      PyThread_release_lock(waiter->gate);
    }
  }
}
// Takes the lock, waiting for it so long at most (microseconds; -1: without a limit). Returns 1, 0 if it waited in vain,
// -1 with an error set if a signal handler raised.
int take_within(Lock* lock, PY_TIMEOUT_T limit_us) {
  if (take_now(lock))
    return 1;
  if (limit_us == 0)
    return 0;
  Waiter self;
  if (!self.gate) {
    PyErr_NoMemory();
    return -1;
  }
  PyThread_acquire_lock(self.gate, NOWAIT_LOCK);
  Waiter** last = &lock->first;
  while (*last)
    last = &(*last)->next;
  *last = &self;
  PY_TIMEOUT_T left_us = limit_us;
  for (;;) {
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(self.gate, left_us, 1);
    Py_END_ALLOW_THREADS
    if (self.is_owner)
      return 1;
    if (status == PY_LOCK_ACQUIRED)
      self.is_called = false;
    int result = take_now(lock);
    if (!result && status == PY_LOCK_INTR && PyErr_CheckSignals() < 0)
      result = -1;
    if (self.is_owner) { // a signal handler ran meanwhile, and others
      if (result < 0)
        give(reinterpret_cast<PyObject*>(lock));
      return result < 0 ? -1 : 1;
    }
    bool is_over = result != 0;
    if (!is_over && limit_us > 0) {
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - self.since);
      left_us = limit_us - waited.count();
      is_over = left_us <= 0;
    }
    if (is_over) {
      remove(lock, &self);
      return result;
    }
  }
}
// For C++: takes the lock, however long that takes. Returns false, with an error set, if a signal handler raised.
bool take(PyObject* self) {
  return take_within(reinterpret_cast<Lock*>(self), -1) > 0;
}
// For C++: a buffer that a program is to fill; the caller counts its bytes.
PyObject* pending_buffer(PyObject* memory, Py_ssize_t nbytes) {
  return reinterpret_cast<PyObject*>(new_buffer(memory, nbytes, true));
}
void count_bytes(PyObject* memory, Py_ssize_t nbytes, Py_ssize_t beside) {
  count(reinterpret_cast<MemoryCounter*>(memory), nbytes, beside);
}
const struct {
  bool (*take)(PyObject*);
  void (*give)(PyObject*);
  PyObject* (*pending_buffer)(PyObject*, Py_ssize_t);
  void (*fill_buffer)(PyObject*, PyObject*);
  Py_ssize_t (*donate_buffer)(PyObject*);
  void (*count_bytes)(PyObject*, Py_ssize_t, Py_ssize_t);
  PyObject* (*ready_buffer)(PyObject*, PyObject*, Py_ssize_t);
} functions_for_cpp = {take, give, pending_buffer, fill<&Buffer::data>, donate, count_bytes, ready_buffer};

// acquire(blocking=True, timeout=-1): as threading.RLock's.
PyObject* acquire(PyObject* self, PyObject* given, PyObject* named) {
  static const char* names[] = {"blocking", "timeout", nullptr};
  int blocks = 1;
  double timeout_s = -1;
  if (!PyArg_ParseTupleAndKeywords(given, named, "|pd", const_cast<char**>(names), &blocks, &timeout_s))
    return nullptr;
  const PY_TIMEOUT_T limit_us = !blocks ? 0 : timeout_s < 0 ? -1 : static_cast<PY_TIMEOUT_T>(timeout_s * 1e6);
  const int taken = take_within(reinterpret_cast<Lock*>(self), limit_us);
  return taken < 0 ? nullptr : PyBool_FromLong(taken);
}
PyObject* release(PyObject* self, PyObject*) {
  const auto* lock = reinterpret_cast<Lock*>(self);
  if (lock->count == 0 || lock->owner != PyThread_get_thread_ident()) {
    PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
    return nullptr;
  }
  give(self);
  Py_RETURN_NONE;
}
PyObject* enter(PyObject* self, PyObject*) {
  return take(self) ? Py_NewRef(self) : nullptr;
}
PyObject* leave(PyObject* self, PyObject* const*, Py_ssize_t) {
  return release(self, nullptr);
}

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}
PyMethodDef lock_methods[] = {
    {"acquire", method(acquire), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"release", release, METH_NOARGS, nullptr},
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", method(leave), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- the module ----------------------------------------------------------------------------------------------------

PyMethodDef functions_of_module[] = {
    {"raise_by", raise_by, METH_O, nullptr},
    {"alive", alive, METH_O, nullptr},
    {"held", held, METH_O, nullptr},
    {"pending_outputs", method(pending_outputs), METH_FASTCALL, nullptr},
    {"fill_pending", method(fill_pending), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ltc_objects", nullptr, -1, functions_of_module};

} // namespace

PyMODINIT_FUNC PyInit__ltc_objects() {
  const auto describe = [](PyTypeObject& type, destructor free, initproc init, PyMemberDef* members, PyMethodDef* methods) {
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_dealloc = free;
    type.tp_init = init;
    type.tp_new = PyType_GenericNew;
    type.tp_members = members;
    type.tp_methods = methods;
  };
  describe(value_type, free_value, init_value, value_members, value_methods);
  describe(cell_type, free_cell, init_cell, cell_members, cell_methods);
  describe(view_type, free_view, init_view, view_members, nullptr);
  describe(memory_type, nullptr, nullptr, memory_members, memory_methods);
  describe(buffer_type, free_buffer, nullptr, buffer_members, buffer_methods);
  describe(lock_type, nullptr, nullptr, nullptr, lock_methods);
  buffer_type.tp_new = make_buffer;
  value_type.tp_weaklistoffset = offsetof(Value, weak_references);
  buffer_type.tp_weaklistoffset = offsetof(Buffer, weak_references);
  PyObject* module = PyModule_Create(&definition);
  for (PyTypeObject* type : {&value_type, &cell_type, &view_type, &memory_type, &buffer_type, &lock_type}) {
    if (!module || PyModule_AddType(module, type) < 0) {
      Py_XDECREF(module);
      return nullptr;
    }
  }
  // What record/csrc/ltc_record.cpp takes the lock and fills buffers by.
  PyObject* functions = PyCapsule_New(const_cast<void*>(static_cast<const void*>(&functions_for_cpp)), "functions", nullptr);
  if (!functions || PyModule_AddObject(module, "functions", functions) < 0) {
    Py_XDECREF(functions);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
