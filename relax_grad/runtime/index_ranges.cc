#include "index_ranges.h"

#include <algorithm>
#include <sstream>

#include "error.h"
#include "files.h"

namespace relax_grad {

namespace {

template <typename T>
void CheckIndices(const IndexRange& range, const Tensor& tensor, int64_t extent) {
  const T* values = static_cast<const T*>(tensor.data_ptr());
  std::vector<int64_t> shape = ShapeOf(tensor), place(shape.size());
  int64_t low = (range.from_end ? -extent : 0) - range.shift, high = extent - range.shift;
  auto fits = [&](T value) {
    // An int64 holds all values of the types but large ones of uint64, which are above every range.
    if (sizeof(T) == 8 && value > T{0} &&
        static_cast<uint64_t>(value) > static_cast<uint64_t>(INT64_MAX))
      return false;
    int64_t number = static_cast<int64_t>(value);
    return (low <= number && number < high) ||
           std::find(range.ignored.begin(), range.ignored.end(), number) != range.ignored.end();
  };
  int64_t count = tensor.numel();
  for (int64_t i = 0; i < count; ++i) {
    if (fits(values[i])) continue;
    bool is_index = true;
    for (int64_t rest = i, axis = static_cast<int64_t>(shape.size()); axis-- > 0;
         rest /= shape[axis]) {
      place[axis] = rest % shape[axis];
      if (range.slices.empty()) continue;
      const std::vector<int64_t>& slice = range.slices[axis];
      is_index = is_index && place[axis] >= slice[0] && place[axis] < shape[axis] - slice[1] &&
                 (place[axis] - slice[0]) % slice[2] == 0;
    }
    if (!is_index) continue;
    std::ostringstream text;
    text << range.input;
    for (size_t axis = 0; axis < place.size(); ++axis) text << (axis ? ", " : "[") << place[axis];
    text << (place.empty() ? "" : "]") << " is " << +values[i] << ", but it selects one of "
         << extent << " elements, and ";
    low < high ? text << "must be from " << low << " to " << high - 1
               : text << "cannot be an index";
    for (int64_t value : range.ignored) text << " or the ignored " << value;
    text << "; Options::check_inputs = false leaves such values to the compiled step, whose "
            "results are then NaN";
    throw Error(text.str());
  }
}

}  // namespace

void CheckRanges(const std::vector<IndexRange>& ranges, const std::vector<TensorType>& specs,
                 const std::vector<Tensor>& tensors,
                 const std::map<std::string, int64_t>& symbols) {
  for (const IndexRange& range : ranges) {
    size_t at = 0;
    while (specs[at].name != range.input) ++at;
    auto symbol = symbols.find(range.symbol);
    if (!range.symbol.empty() && symbol == symbols.end()) continue;
    int64_t extent = range.symbol.empty() ? range.extent : symbol->second;
    const std::string& dtype = specs[at].dtype;
    if (dtype == "int64") CheckIndices<int64_t>(range, tensors[at], extent);
    if (dtype == "int32") CheckIndices<int32_t>(range, tensors[at], extent);
    if (dtype == "int16") CheckIndices<int16_t>(range, tensors[at], extent);
    if (dtype == "int8") CheckIndices<int8_t>(range, tensors[at], extent);
    if (dtype == "uint64") CheckIndices<uint64_t>(range, tensors[at], extent);
    if (dtype == "uint32") CheckIndices<uint32_t>(range, tensors[at], extent);
    if (dtype == "uint16") CheckIndices<uint16_t>(range, tensors[at], extent);
    if (dtype == "uint8") CheckIndices<uint8_t>(range, tensors[at], extent);
  }
}

}  // namespace relax_grad
