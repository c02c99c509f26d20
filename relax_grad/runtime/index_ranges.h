/// The check of integers of a batch that select elements of an axis.
#ifndef RELAX_GRAD_RUNTIME_INDEX_RANGES_H_
#define RELAX_GRAD_RUNTIME_INDEX_RANGES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "manifest.h"
#include "trainer.h"

namespace relax_grad {

/// Throws if an element of an input selects no element.
///
/// @param specs, tensors The inputs.
/// @param symbols The symbolic extents by their names.
void CheckRanges(const std::vector<IndexRange>& ranges, const std::vector<TensorType>& specs,
                 const std::vector<Tensor>& tensors, const std::map<std::string, int64_t>& symbols);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_INDEX_RANGES_H_
