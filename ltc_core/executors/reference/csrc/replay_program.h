// A program that is replayed: instructions over a vector of values. Built by `ltc_replay.cpp`, run by `replay_run.h`.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "replay_begun.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ltc {

using c10::IValue;

enum class From : uint8_t { constant, value, scalar, list, lens, generator };

struct Argument {
  From from = From::constant;
  IValue constant;
  int32_t slot = 0;                 // of a value, a scalar, or the whole tensor of a lens
  c10::TypePtr type;                // of a scalar, or of a list's elements
  std::vector<Argument> items;      // of a list
  std::vector<int32_t> steps;       // of a lens: calls of the program
};

// How a call is made on real tensors, whose strides may be others than those recorded (`graph/lens.py`).
enum class How : uint8_t { boxed, reshape, as_strided, conj, neg, view_dtype, view_as_complex };

struct Call {
  How how = How::boxed;
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> arguments;
  int32_t which = -1;               // of a step of a lens: the result it selects, of several
  bool with_grad = false;           // the kernel asks for the grad mode
};

enum class Place : uint8_t { copy, in_place, input }; // `input`: in place, in the memory of an input

struct Write {
  int32_t before, after;
  Place place;
};

struct Result {
  int32_t position, item, slot;     // on the stack; in the list there, or -1
};

struct Instruction {
  int32_t call = -1;                // -1: it runs in Python
  std::vector<Write> writes;
  std::vector<Result> results;
  std::vector<int32_t> frees, needs, makes; // `needs` and `makes`: values that a run in Python reads and leaves
  int32_t draws = -1;               // the value that is the state of the random generator
  std::optional<c10::ScalarType> default_dtype; // recorded: with another one it runs in Python
  std::optional<c10::ScalarType> dtype;         // of the result then
};

// Instructions that run together, on a few positions of their lists at a time (`element_groups.py`).
struct Group {
  int32_t last = 0;                 // one more than its last instruction
  std::vector<int32_t> ends;        // of its chunks: one more than the last position
  std::vector<std::vector<std::pair<int32_t, int32_t>>> frees; // of each instruction: (position, slot), in order
};

struct Output {
  int32_t slot;
  bool copied;
  c10::ScalarType dtype;
};

// Outputs that somebody waits for: `publish` gets them as soon as the instructions before `at` have run.
struct Watch {
  std::vector<int32_t> slots;
  int32_t at = 0;
  PyObject* publish = nullptr; // the caller of the run holds it
};

struct Program {
  std::vector<Call> calls;
  std::vector<Instruction> code;
  std::unordered_map<int32_t, Group> groups; // by their first instruction
  std::vector<int32_t> inputs;
  std::vector<bool> donated;
  std::vector<Output> outputs;
  size_t size = 0;
  bool has_large_ops = false;       // by the duration of the last run
  std::shared_ptr<Begun> begun;     // what has run of it before the rest was recorded
  at::Generator generator;          // draws for the nodes, each from a state of its own
  PyObject* in_python = nullptr;    // (position, {slot: tensor}, scalars): runs one instruction on that dict
};

} // namespace ltc
