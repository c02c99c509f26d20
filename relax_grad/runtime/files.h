/// Files of tensors, for trainer.cc. Errors name the file.
#ifndef RELAX_GRAD_RUNTIME_FILES_H_
#define RELAX_GRAD_RUNTIME_FILES_H_

#include <sys/stat.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <utility>
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

/// The files of an exported step.
class Files {
 public:
  virtual ~Files() = default;
  /// Returns the name of a file for errors.
  virtual std::string PathOf(const std::string& name) const = 0;
  /// Returns the bytes of a file; throws before it reads one with more than `most`.
  virtual std::string Read(const std::string& name, int64_t most) const = 0;
  virtual File ReadTensors(const std::string& name) const = 0;
};

/// Files in the memory of the caller, by their names.
class MemoryFiles : public Files {
 public:
  explicit MemoryFiles(std::vector<std::pair<std::string, std::string_view>> files)
      : files_(std::move(files)) {}
  std::string PathOf(const std::string& name) const override { return name + " in memory"; }
  std::string Read(const std::string& name, int64_t most) const override;
  File ReadTensors(const std::string& name) const override;

 private:
  std::string_view DataOf(const std::string& name) const;

  std::vector<std::pair<std::string, std::string_view>> files_;
};

/// A folder that is read through one handle, so that all files are from the same folder, even if
/// another one takes its name meanwhile.
class Folder : public Files {
 public:
  /// @param first The file that describes the others, which is absent while they are replaced.
  Folder(const std::string& path, const std::string& first);
  std::string PathOf(const std::string& name) const override;
  std::string Read(const std::string& name, int64_t most) const override;
  File ReadTensors(const std::string& name) const override;
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
