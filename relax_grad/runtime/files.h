/// Files of tensors, for trainer.cc. Errors name the file.
#ifndef RELAX_GRAD_RUNTIME_FILES_H_
#define RELAX_GRAD_RUNTIME_FILES_H_

#include <tvm/ffi/error.h>

#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "trainer.h"

namespace relax_grad {

namespace ffi = tvm::ffi;

/// Runs a function; any other exception, such as those of TVM, becomes an Error.
template <typename F>
auto Guarded(const std::string& where, F function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw Error(where + ": there is not enough memory");
  } catch (const std::exception& error) {
    throw Error(where + ": " + error.what());
  }
}

/// The alignment in bytes of tensors whose memory compiled functions read.
constexpr size_t kAlignment = 64;

std::string ShapeText(const std::vector<int64_t>& shape);
std::vector<int64_t> ShapeOf(const Tensor& tensor);

/// Returns the bytes of a file; throws before it reads one with more than `most`.
std::string ReadFile(const std::string& path, int64_t most);

/// A file of safetensors.
struct File {
  Tensors tensors;
  std::map<std::string, std::string> metadata;
  /// Whether the file has a checksum, which is that of its bytes.
  bool has_checksum = false;
};

File ReadTensors(const std::string& path);

/// Writes a file of safetensors under another name and renames it, so that it is complete or
/// absent.
void WriteTensors(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_FILES_H_
