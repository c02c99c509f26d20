/// Files of tensors, for trainer.cc. Errors name the file.
#ifndef RELAX_GRAD_RUNTIME_FILES_H_
#define RELAX_GRAD_RUNTIME_FILES_H_

#include <sys/stat.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "handle.h"
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

/// A file of safetensors.
struct File {
  Tensors tensors;
  std::map<std::string, std::string> metadata;
  /// The digits of the file's checksum, which is that of its bytes; empty without one.
  std::string checksum;
};

File ReadTensors(const std::string& path);

/// A folder that is read through one handle, so that all files are from the same folder, even if
/// another one takes its name meanwhile.
class Folder {
 public:
  /// @param first The file that describes the others, which is absent while they are replaced.
  Folder(const std::string& path, const std::string& first);
  std::string PathOf(const std::string& name) const;
  /// Returns the bytes of a file; throws before it reads one with more than `most`.
  std::string Read(const std::string& name, int64_t most) const;
  File ReadTensors(const std::string& name) const;
  /// Tells whether the first file of this folder was replaced or removed since it was opened.
  bool HasChanged() const;
  /// Tells whether the path has another first file, of this folder or of another one.
  bool IsReplaced() const;

 private:
  std::string path_, first_;
  // While a file is open, no other one gets its number.
  Handle handle_, first_handle_;
  struct stat status_;
};

/// Writes a file of safetensors under another name and renames it, so that it is complete or
/// absent.
void WriteTensors(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_FILES_H_
