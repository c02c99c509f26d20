/// The manifest of an exported step.
#ifndef RELAX_GRAD_RUNTIME_MANIFEST_H_
#define RELAX_GRAD_RUNTIME_MANIFEST_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor_type.h"

namespace relax_grad {

/// The name of the format, which is the key of a state's metadata too.
inline constexpr const char* kFormat = "relax_grad.training";
/// The version that is written, and the oldest one that is read, whose files have no checksums.
inline constexpr int64_t kVersion = 2, kOldest = 1;

/// The groups of tensors.
inline constexpr const char* kGroups[] = {"params", "frozen", "states", "optimizer_state"};

/// The most axes of a tensor. DLPack has 32 bits for their number, and TVM's functions take far
/// fewer.
inline constexpr size_t kMostAxes = 64;

struct Dtype {
  const char* name;
  /// The name in files of safetensors.
  const char* in_file;
  int64_t bytes;
};

/// Returns a dtype by its name, or by that in files; null for other texts.
const Dtype* DtypeOf(std::string_view name);
const Dtype* DtypeInFile(std::string_view name);

/// Returns the bytes of a tensor; none if it, or a tensor with 1 instead of extents of 0, has
/// more than 2 ** 63 - 1.
std::optional<int64_t> Bytes(const std::vector<int64_t>& shape, int64_t width);

/// The range of the elements of an input that select elements of an axis: `v + shift` is at least
/// 0, or minus the extent if negative numbers count from the end, and below the extent.
struct IndexRange {
  std::string input;
  /// The extent, or -1 and the name of a symbol of the inputs.
  int64_t extent = 0;
  std::string symbol;
  int64_t shift = 0;
  bool from_end = false;
  /// Further values that an element may have.
  std::vector<int64_t> ignored;
  /// Along each axis, the first element, the number of elements after the last one, and the step;
  /// empty for all elements.
  std::vector<std::vector<int64_t>> slices;
};

/// A condition on the symbolic extents of the inputs.
struct ExtentCheck {
  /// A number, if the name is empty; otherwise a symbol or an operator.
  struct Part {
    int64_t number = 0;
    std::string name;
  };
  /// The condition in postfix notation.
  std::vector<Part> condition;
  /// The reason for it, for errors.
  std::string reason;
};

/// The manifest. Names of one list differ from one another, and all sizes are those of tensors that
/// memory could hold.
struct Manifest {
  std::vector<TensorType> batch, inputs;
  /// Those of the batch, and of the inputs of the function for prediction.
  std::vector<IndexRange> ranges, input_ranges;
  std::vector<ExtentCheck> checks, input_checks;
  /// Names and defaults, in order.
  std::vector<std::pair<std::string, double>> hyperparameters;
  /// Tensors of each of kGroups; their extents are numbers.
  std::map<std::string, std::vector<TensorType>> groups;
  std::vector<std::string> metrics, outputs, levels;
  int64_t accumulate = 1;
  /// The function for prediction, and the parameters, frozen parameters and states that it takes;
  /// empty without one.
  std::string forward;
  std::vector<std::string> values;
  /// Names of files in the folder of the manifest.
  std::string library, state;
  int64_t library_bytes = 0;
  /// The digits of the checksums of the library, and of the state that was exported with it; empty
  /// in version 1, and the second one in folders that were exported before it was added.
  std::string library_checksum, state_checksum;
  /// The digest of the step, which states that are saved later have too; empty like the checksum.
  std::string step;
};

/// Throws if a version of the format is none that is read.
void CheckVersion(int64_t version, const std::string& where);

/// Reads a manifest; whatever does not fit is an Error that names the file.
Manifest ParseManifest(std::string_view text, const std::string& where);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_MANIFEST_H_
