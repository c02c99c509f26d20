/// The tensors that compiled functions take and return.
#ifndef RELAX_GRAD_RUNTIME_ARGUMENTS_H_
#define RELAX_GRAD_RUNTIME_ARGUMENTS_H_

#include <tvm/ffi/any.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer.h"

namespace relax_grad {

/// Throws if a tensor has another type; symbols get their values from the first tensor that has
/// them.
void Check(const std::string& what, const Tensor& tensor, const TensorType& spec,
           std::map<std::string, int64_t>* symbols);

/// Returns the value of a tensor of floating-point numbers at a place.
double ValueAt(const Tensor& tensor, size_t place);

/// Returns the tensors of a result: a tensor, or nested tuples of them.
std::vector<Tensor> TensorsOf(const tvm::ffi::Any& value);

/// Returns a tensor with a copy of the values of another one.
Tensor CopyOf(const Tensor& tensor);

/// Returns a copy of a tensor of floating-point numbers in float32.
Tensor Float32Of(const Tensor& tensor);

/// Throws if a tensor of booleans has a byte that is none.
void CheckBooleans(const std::string& name, const Tensor& tensor);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_ARGUMENTS_H_
