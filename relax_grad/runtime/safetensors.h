/// The header of a file of safetensors.
#ifndef RELAX_GRAD_RUNTIME_SAFETENSORS_H_
#define RELAX_GRAD_RUNTIME_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.h"

namespace relax_grad {

/// A tensor's offset after the header.
struct Entry {
  std::string name;
  const Dtype* dtype;
  std::vector<int64_t> shape;
  int64_t begin, end;
};

struct Header {
  /// The tensors in the order of their bytes, which are those of the file: they neither overlap nor
  /// leave any out.
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
};

/// The largest header, which is that of the library safetensors.
inline constexpr uint64_t kMaxHeader = 100'000'000;

/// Reads a header, without the eight bytes of its length.
///
/// @param size The number of bytes after the header.
/// @param where The file, for errors.
Header ParseHeader(std::string_view text, int64_t size, const std::string& where);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_SAFETENSORS_H_
