/// The levels of x86-64 that the processor has.
#ifndef RELAX_GRAD_RUNTIME_CPU_LEVELS_H_
#define RELAX_GRAD_RUNTIME_CPU_LEVELS_H_

#include <set>
#include <string>

namespace relax_grad {

/// Returns the levels, from "x86-64" to "x86-64-v4", that the processor and the operating system
/// support; none on other processors.
std::set<std::string> CpuLevels();

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_CPU_LEVELS_H_
