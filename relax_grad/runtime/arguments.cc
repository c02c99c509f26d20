#include "arguments.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "files.h"

namespace relax_grad {

namespace {

/// Returns the remedy for another number of rows than the step was exported for; empty for other
/// shapes.
std::string RemedyForRows(const TensorType& spec, const std::vector<int64_t>& shape) {
  if (shape.empty() || shape.size() != spec.shape.size() || !spec.symbols[0].empty()) return "";
  if (shape[0] == spec.shape[0]) return "";
  for (size_t i = 1; i < shape.size(); ++i) {
    if (spec.symbols[i].empty() && shape[i] != spec.shape[i]) return "";
  }
  std::string rows = std::to_string(spec.shape[0]);
  return "; the step was exported for " + rows + " rows: give batches of " + rows +
         " rows, or export it with a symbolic first extent, as from_module(..., dynamic_shapes=...)"
         " makes it";
}

}  // namespace

void Check(const std::string& what, const Tensor& tensor, const TensorType& spec,
           std::map<std::string, int64_t>* symbols) {
  if (!tensor.defined()) throw Error(what + " is no tensor");
  if (tensor.device().device_type != kDLCPU) throw Error(what + " must be on the CPU");
  if (!tensor.IsContiguous()) throw Error(what + " has strides; give a copy without them");
  if (tensor.byte_offset() != 0 ||
      reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment != 0) {
    throw Error(what + " must be in memory that is aligned to " + std::to_string(kAlignment) +
                " bytes, as that of MakeTensor");
  }
  std::vector<int64_t> shape = ShapeOf(tensor);
  bool fits = shape.size() == spec.shape.size() && DtypeName(tensor) == spec.dtype;
  std::ostringstream wanted;
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    wanted << (i ? ", " : "");
    wanted << (spec.symbols[i].empty() ? std::to_string(spec.shape[i]) : spec.symbols[i]);
    if (!fits) continue;
    if (spec.symbols[i].empty()) {
      fits = shape[i] == spec.shape[i];
    } else {
      fits = symbols->emplace(spec.symbols[i], shape[i]).first->second == shape[i];
    }
  }
  if (!fits) {
    throw Error(what + " must have shape (" + wanted.str() + ") and dtype " + spec.dtype +
                ", but it has " + ShapeText(shape) + " and " + DtypeName(tensor) +
                RemedyForRows(spec, shape));
  }
}

double ValueAt(const Tensor& tensor, size_t place) {
  std::string dtype = DtypeName(tensor);
  if (dtype == "float64") return static_cast<const double*>(tensor.data_ptr())[place];
  if (dtype == "float32") return static_cast<const float*>(tensor.data_ptr())[place];
  if (dtype != "bfloat16" && dtype != "float16") throw Error("a number has the dtype " + dtype);
  uint16_t bits = static_cast<const uint16_t*>(tensor.data_ptr())[place];
  if (dtype == "bfloat16") {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return exponent ? sign * std::ldexp(1024 + fraction, exponent - 25)
                  : sign * std::ldexp(fraction, -24);
}

std::vector<Tensor> TensorsOf(const ffi::Any& value) {
  if (auto tensor = value.as<Tensor>()) return {*tensor};
  std::vector<Tensor> tensors;
  for (const ffi::Any& field : value.cast<ffi::Array<ffi::Any>>()) {
    for (const Tensor& tensor : TensorsOf(field)) tensors.push_back(tensor);
  }
  return tensors;
}

Tensor CopyOf(const Tensor& tensor) {
  Tensor copy = MakeTensor(ShapeOf(tensor), DtypeName(tensor));
  size_t size = ffi::GetDataSize(*tensor.GetDLTensorPtr());
  if (size) std::memcpy(copy.data_ptr(), tensor.data_ptr(), size);
  return copy;
}

Tensor Float32Of(const Tensor& tensor) {
  Tensor copy = MakeTensor(ShapeOf(tensor), "float32");
  for (int64_t i = 0; i < copy.numel(); ++i) {
    static_cast<float*>(copy.data_ptr())[i] =
        static_cast<float>(ValueAt(tensor, static_cast<size_t>(i)));
  }
  return copy;
}

void CheckBooleans(const std::string& name, const Tensor& tensor) {
  if (DtypeName(tensor) != "bool") return;
  const auto* bytes = static_cast<const unsigned char*>(tensor.data_ptr());
  if (std::any_of(bytes, bytes + tensor.numel(), [](unsigned char byte) { return byte > 1; }))
    throw Error(name + " has booleans that are neither 0 nor 1");
}

}  // namespace relax_grad
