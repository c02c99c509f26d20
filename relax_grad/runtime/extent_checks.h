/// The check of the symbolic extents of a batch.
#ifndef RELAX_GRAD_RUNTIME_EXTENT_CHECKS_H_
#define RELAX_GRAD_RUNTIME_EXTENT_CHECKS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "manifest.h"

namespace relax_grad {

/// Tells whether a part of a condition is an operator of two numbers.
bool IsOperator(const std::string& part);

/// Throws if extents do not fulfil a condition, with the reason for it.
///
/// @param symbols The symbolic extents by their names.
void CheckExtents(const std::vector<ExtentCheck>& checks,
                  const std::map<std::string, int64_t>& symbols);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_EXTENT_CHECKS_H_
