/// The type of a tensor of an exported step.
#ifndef RELAX_GRAD_RUNTIME_TENSOR_TYPE_H_
#define RELAX_GRAD_RUNTIME_TENSOR_TYPE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace relax_grad {

/// A name, a dtype such as "float32", and extents. An extent is a number and an empty symbol, or -1
/// and the name of a symbol: axes of the same symbol have the same extent.
struct TensorType {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<std::string> symbols;
};

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_TENSOR_TYPE_H_
