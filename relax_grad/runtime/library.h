/// The file of the compiled step.
#ifndef RELAX_GRAD_RUNTIME_LIBRARY_H_
#define RELAX_GRAD_RUNTIME_LIBRARY_H_

#include <string>
#include <string_view>

namespace relax_grad {

/// Throws if the bytes of a library are no library for the architecture of this program.
void CheckArchitecture(std::string_view data, const std::string& where);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_LIBRARY_H_
