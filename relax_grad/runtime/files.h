/// Files of tensors and of JSON, for trainer.cc. Errors name the file.
#ifndef RELAX_GRAD_RUNTIME_FILES_H_
#define RELAX_GRAD_RUNTIME_FILES_H_

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/json.h>

#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "trainer.h"

namespace relax_grad {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

/// Runs a function; an error of TVM, and of memory that cannot be allocated, becomes one of ours.
template <typename F>
auto Guarded(const std::string& where, F function) -> decltype(function()) {
  try {
    return function();
  } catch (const ffi::Error& error) {
    throw Error(where + ": " + error.what());
  } catch (const std::bad_alloc&) {
    throw Error(where + ": there is not enough memory");
  }
}

/// The alignment in bytes of tensors whose memory compiled functions read.
constexpr size_t kAlignment = 64;

std::string ShapeText(const std::vector<int64_t>& shape);
std::vector<int64_t> ShapeOf(const Tensor& tensor);

/// Returns the bytes of a file.
std::string ReadFile(const std::string& path);

/// Returns the object that a text is. The texts of lists and objects may be nested 64 deep.
json::Object ParseObject(const std::string& text, const std::string& where);

/// Returns the value of a key.
template <typename T>
T Get(const json::Object& object, const std::string& key, const std::string& where) {
  auto found = object.find(ffi::String(key));
  if (found == object.end()) throw Error(where + " has no " + key);
  auto value = (*found).second.template as<T>();
  if (!value.has_value()) throw Error(where + ": " + key + " has another type than expected");
  return *value;
}

std::string GetText(const json::Object& object, const std::string& key, const std::string& where);

/// A file of safetensors.
struct File {
  Tensors tensors;
  std::map<std::string, std::string> metadata;
};

File ReadTensors(const std::string& path);

/// Writes a file of safetensors under another name and renames it, so that it is complete or absent.
void WriteTensors(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_FILES_H_
