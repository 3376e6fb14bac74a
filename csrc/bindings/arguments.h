// Tensor arguments as checked pointers, and new result tensors. std::invalid_argument becomes ValueError in Python.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "scalar.h"

namespace specdec::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void reject(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Throws ValueError with the joined parts unless `good`. Write "op: name is <got>, expected <what>; <remedy>".
#define SPECDEC_CHECK(good, ...)                                      \
  do {                                                                \
    if (__builtin_expect(!(good), 0)) ::specdec::bindings::reject(__VA_ARGS__); \
  } while (0)

inline Scalar scalar_of(const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Scalar::Float32;
    case ScalarType::BFloat16:
      return Scalar::BFloat16;
    case ScalarType::Half:
      return Scalar::Half;
    case ScalarType::Double:
      return Scalar::Float64;
    default:
      reject(what, " has an unsupported dtype, expected float32, bfloat16, float16 or float64");
  }
}

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

// "int64 [3]" or "strided int32 [3]", for messages about a tensor that has another dtype or layout than expected.
inline std::string described(const Tensor& tensor) {
  const char* name = "another dtype";
  switch (tensor.scalar_type()) {
    case ScalarType::Float: name = "float32"; break;
    case ScalarType::Double: name = "float64"; break;
    case ScalarType::Half: name = "float16"; break;
    case ScalarType::BFloat16: name = "bfloat16"; break;
    case ScalarType::Int: name = "int32"; break;
    case ScalarType::Long: name = "int64"; break;
    case ScalarType::Bool: name = "bool"; break;
    default: break;
  }
  return (tensor.is_contiguous() ? "" : "strided ") + std::string(name) + " " + shape_of(tensor);
}

template <class T>
struct TorchType;
template <>
struct TorchType<float> {
  static constexpr ScalarType type = ScalarType::Float;
  static constexpr const char* name = "float32";
};
template <>
struct TorchType<double> {
  static constexpr ScalarType type = ScalarType::Double;
  static constexpr const char* name = "float64";
};
template <>
struct TorchType<int32_t> {
  static constexpr ScalarType type = ScalarType::Int;
  static constexpr const char* name = "int32";
};
template <>
struct TorchType<int64_t> {
  static constexpr ScalarType type = ScalarType::Long;
  static constexpr const char* name = "int64";
};
template <>
struct TorchType<int8_t> {
  static constexpr ScalarType type = ScalarType::Char;
  static constexpr const char* name = "int8";
};
template <>
struct TorchType<bool> {
  static constexpr ScalarType type = ScalarType::Bool;
  static constexpr const char* name = "bool";
};

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

constexpr size_t kMostDimensions = 8;

// Uninitialised contiguous CPU tensor, through the C shim: an operator call of new_empty costs several times as much.
inline Tensor empty_on_cpu(const int64_t* sizes, size_t rank, int32_t dtype) {
  int64_t strides[kMostDimensions], step = 1;
  for (size_t i = rank; i-- > 0; step *= sizes[i]) strides[i] = step;
  static const int32_t device = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(rank), sizes, strides, dtype, device, 0, &handle));
  return Tensor(handle);
}
inline Tensor empty_on_cpu(std::initializer_list<int64_t> sizes, int32_t dtype) { return empty_on_cpu(sizes.begin(), sizes.size(), dtype); }

inline int32_t dtype_code(ScalarType type) {
  static const int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64(),
                       int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
  return type == ScalarType::Float ? float32 : type == ScalarType::Double ? float64 : type == ScalarType::Int ? int32 : int64;
}

// The same, of float32, float64, int32 or int64.
inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType type) { return empty_on_cpu(sizes, dtype_code(type)); }

// Pointer to a contiguous tensor of T; ValueError otherwise.
template <class T>
const T* input(const Tensor& tensor, const char* what) {
  SPECDEC_CHECK(tensor.scalar_type() == TorchType<T>::type, what, " has the wrong dtype, expected ", TorchType<T>::name);
  SPECDEC_CHECK(tensor.is_contiguous(), what, " is not contiguous (shape ", shape_of(tensor), "); call .contiguous()");
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* output(const Tensor& tensor, const char* what) {
  return const_cast<T*>(input<T>(tensor, what));
}

}  // namespace specdec::bindings
