/// A shared library that belongs to one trainer.
#ifndef RELAX_GRAD_RUNTIME_PRIVATE_LIBRARY_H_
#define RELAX_GRAD_RUNTIME_PRIVATE_LIBRARY_H_

#include <tvm/ffi/extra/module.h>

#include <string>
#include <string_view>

namespace relax_grad {

/// Loads a library from its bytes, as a copy of its own.
///
/// The dynamic linker knows libraries by their paths and files: of a path that it has loaded, it
/// returns the old library, whatever the file holds now. A library also has one variable for the
/// module of TVM that uses it, so that two modules of one library would share it.
///
/// @param where The file that the bytes are from, for errors.
tvm::ffi::Module LoadPrivately(std::string_view data, const std::string& where);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_PRIVATE_LIBRARY_H_
