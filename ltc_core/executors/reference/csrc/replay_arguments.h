// Numbers, constants and lists as the parameters of an op take them.
//
// Callers hold the GIL, except of `as_type` and `list_of`, which touch no Python object.
#pragma once
#include "replay_program.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

namespace ltc {

using c10::TypeKind;

inline bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// ---- numbers -------------------------------------------------------------------------------------------------------

inline std::optional<c10::Scalar> number_of(PyObject* object) {
  if (PyBool_Check(object))
    return c10::Scalar(object == Py_True);
  if (PyLong_Check(object)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow ? std::nullopt : std::optional<c10::Scalar>(static_cast<int64_t>(value));
  }
  if (PyFloat_Check(object))
    return c10::Scalar(PyFloat_AS_DOUBLE(object));
  if (PyComplex_Check(object))
    return c10::Scalar(c10::complex<double>(PyComplex_RealAsDouble(object), PyComplex_ImagAsDouble(object)));
  return std::nullopt;
}

// A number as a parameter of this type takes it; None where it does not.
inline std::optional<IValue> as_type(const c10::Scalar& number, const c10::Type& type) {
  switch (type.kind()) {
    case TypeKind::TensorType: {
      auto tensor = c10::scalar_to_tensor(number);
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
      return IValue(std::move(tensor));
    }
    case TypeKind::NumberType:
      return IValue(number);
    case TypeKind::FloatType:
      return number.isComplex() ? std::nullopt : std::optional<IValue>(number.toDouble());
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return number.isIntegral(false) ? std::optional<IValue>(number.toLong()) : std::nullopt;
    case TypeKind::BoolType:
      return number.isBoolean() ? std::optional<IValue>(number.toBool()) : std::nullopt;
    default:
      return std::nullopt;
  }
}

// ---- building ------------------------------------------------------------------------------------------------------

inline const c10::Type& without_optional(const c10::Type& type) {
  return type.kind() == TypeKind::OptionalType ? *type.castRaw<c10::OptionalType>()->getElementType() : type;
}

template <typename Item>
IValue typed_list(const std::vector<IValue>& items) {
  c10::List<Item> list;
  list.reserve(items.size());
  for (const auto& item : items)
    list.push_back(item.to<Item>());
  return IValue(std::move(list));
}

inline std::optional<IValue> list_of(const std::vector<IValue>& items, const c10::Type& element) {
  switch (element.kind()) {
    case TypeKind::TensorType:
      for (const auto& item : items)
        if (!item.isTensor())
          return std::nullopt;
      return typed_list<at::Tensor>(items);
    case TypeKind::OptionalType: {
      if (without_optional(element).kind() != TypeKind::TensorType)
        return std::nullopt;
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(items.size());
      for (const auto& item : items)
        list.push_back(item.isTensor() ? std::optional<at::Tensor>(item.toTensor()) : std::nullopt);
      return IValue(std::move(list));
    }
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return typed_list<int64_t>(items);
    case TypeKind::FloatType:
      return typed_list<double>(items);
    case TypeKind::BoolType:
      return typed_list<bool>(items);
    case TypeKind::NumberType: {
      c10::impl::GenericList list(c10::NumberType::get());
      list.reserve(items.size());
      for (const auto& item : items)
        list.push_back(item);
      return IValue(std::move(list));
    }
    default:
      return std::nullopt;
  }
}

// A constant of a node as a parameter of this type takes it.
inline std::optional<IValue> constant_of(PyObject* object, const c10::Type& given, std::optional<int32_t> length) {
  if (object == Py_None) {
    if (given.kind() == TypeKind::TensorType)
      return IValue(at::Tensor());
    return given.kind() == TypeKind::OptionalType ? std::optional<IValue>(IValue()) : std::nullopt;
  }
  const auto& type = without_optional(given);
  if (type.kind() == TypeKind::ListType) {
    const auto& element = *type.castRaw<c10::ListType>()->getElementType();
    std::vector<IValue> items;
    if (PyList_Check(object) || PyTuple_Check(object)) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
      for (Py_ssize_t i = 0; i < count; ++i) {
        auto item = constant_of(PySequence_Fast_GET_ITEM(object, i), element, std::nullopt);
        if (!item)
          return std::nullopt;
        items.push_back(std::move(*item));
      }
    } else { // one number for a list of a known length
      auto item = length ? constant_of(object, element, std::nullopt) : std::nullopt;
      if (!item)
        return std::nullopt;
      items.assign(*length, *item);
    }
    return list_of(items, element);
  }
  if (is_tensor(object))
    return type.kind() == TypeKind::TensorType ? std::optional<IValue>(THPVariable_Unpack(object)) : std::nullopt;
  if (auto number = number_of(object))
    return as_type(*number, type);
  const bool takes_int = type.kind() == TypeKind::IntType;
  if (THPDtype_Check(object))
    return takes_int ? std::optional<IValue>(static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type))
                     : std::nullopt;
  if (THPLayout_Check(object))
    return takes_int ? std::optional<IValue>(static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout))
                     : std::nullopt;
  if (THPMemoryFormat_Check(object))
    return takes_int
        ? std::optional<IValue>(static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format))
        : std::nullopt;
  if (THPDevice_Check(object))
    return type.kind() == TypeKind::DeviceObjType
        ? std::optional<IValue>(reinterpret_cast<THPDevice*>(object)->device)
        : std::nullopt;
  if (PyUnicode_Check(object) && type.kind() == TypeKind::StringType) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    return text ? std::optional<IValue>(std::string(text, size)) : std::nullopt;
  }
  return std::nullopt;
}

inline bool ints_of(PyObject* object, std::vector<int32_t>& numbers) {
  PyObject* items = PySequence_Fast(object, "expected a sequence of ints");
  if (!items)
    return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && !PyErr_Occurred(); ++i)
    numbers.push_back(static_cast<int32_t>(PyLong_AsLong(PySequence_Fast_GET_ITEM(items, i))));
  Py_DECREF(items);
  return !PyErr_Occurred();
}

} // namespace ltc
