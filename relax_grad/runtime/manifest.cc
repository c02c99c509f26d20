#include "manifest.h"

#include <algorithm>
#include <limits>
#include <set>

#include "checksum.h"
#include "error.h"
#include "extent_checks.h"
#include "json.h"

namespace relax_grad {

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
// Steps count to it; a file with more would have been written by mistake.
constexpr int64_t kMostAccumulated = std::numeric_limits<int32_t>::max();
// Sums of indices and shifts do not overflow.
constexpr int64_t kMostIndex = int64_t{1} << 60;

const char* const kLevels[] = {"x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"};

const Dtype kDtypes[] = {
    {"bool", "BOOL", 1},   {"uint8", "U8", 1},    {"int8", "I8", 1},       {"uint16", "U16", 2},
    {"int16", "I16", 2},   {"uint32", "U32", 4},  {"int32", "I32", 4},     {"uint64", "U64", 8},
    {"int64", "I64", 8},   {"float16", "F16", 2}, {"bfloat16", "BF16", 2}, {"float32", "F32", 4},
    {"float64", "F64", 8},
};

class Reader {
 public:
  Reader(std::string_view text, const std::string& where) : json_(text, where) {}

  Manifest Read() {
    json_.Object(
        [&](const std::string& key) { Member(key); },
        {"batch", "hyperparameters", "params", "frozen", "states", "optimizer_state", "metrics",
         "outputs", "accumulate", "levels", "library", "library_bytes", "state"});
    json_.End();
    CheckValues();
    return std::move(found_);
  }

 private:
  void Member(const std::string& key) {
    bool is_group = std::count(std::begin(kGroups), std::end(kGroups), key) != 0;
    if (is_group) {
      found_.groups[key] = Specs(false);
    } else if (key == "batch") {
      found_.batch = Specs(true);
    } else if (key == "index_ranges") {
      found_.ranges = Ranges();
    } else if (key == "extent_checks") {
      found_.checks = Checks();
    } else if (key == "hyperparameters") {
      Hyperparameters();
    } else if (key == "metrics") {
      found_.metrics = Names();
    } else if (key == "outputs") {
      found_.outputs = Names();
    } else if (key == "levels") {
      Levels();
    } else if (key == "accumulate") {
      found_.accumulate = json_.Integer(1, kMostAccumulated);
    } else if (key == "forward" && !json_.IsNext('n')) {
      Forward();
    } else if (key == "library") {
      found_.library = FileName();
    } else if (key == "state") {
      found_.state = FileName();
    } else if (key == "library_bytes") {
      found_.library_bytes = json_.Integer(1, kMost);
    } else if (key == "library_crc32") {
      found_.library_checksum = json_.Name();
    } else if (key == "state_crc32") {
      found_.state_checksum = json_.Name();
    } else if (key == "step") {
      found_.step = json_.Name();
    } else {
      json_.Skip();
    }
  }

  std::vector<std::string> Names() {
    std::vector<std::string> names;
    json_.Array([&] { names.push_back(json_.Name()); });
    Unique(names);
    return names;
  }

  void Unique(const std::vector<std::string>& names) const {
    std::set<std::string> seen;
    for (const std::string& name : names) {
      if (!seen.insert(name).second) json_.Fail("has " + Shown(name) + " twice");
    }
  }

  std::string FileName() {
    std::string name = json_.Name();
    if (name == "." || name == ".." || name.find('/') != std::string::npos) {
      json_.Fail("must be the name of a file in the same folder, but it is " + Shown(name));
    }
    return name;
  }

  std::vector<TensorType> Specs(bool has_symbols) {
    std::vector<TensorType> specs;
    std::vector<std::string> names;
    json_.Array([&] {
      specs.push_back(Tensor(has_symbols));
      names.push_back(specs.back().name);
    });
    Unique(names);
    return specs;
  }

  TensorType Tensor(bool has_symbols) {
    TensorType spec;
    json_.Object(
        [&](const std::string& key) {
          if (key == "name") {
            spec.name = json_.Name();
          } else if (key == "dtype") {
            spec.dtype = json_.Name();
            if (!DtypeOf(spec.dtype)) json_.Fail(Shown(spec.dtype) + " is not supported");
          } else if (key == "shape") {
            json_.Array([&] { Extent(has_symbols, &spec); });
          } else {
            json_.Skip();
          }
        },
        {"name", "dtype", "shape"});
    if (spec.shape.size() > kMostAxes) {
      json_.Fail("has a tensor of " + std::to_string(spec.shape.size()) + " axes, more than " +
                 std::to_string(kMostAxes));
    }
    std::vector<int64_t> least;
    for (int64_t extent : spec.shape) least.push_back(extent < 0 ? 1 : extent);
    if (!Bytes(least, DtypeOf(spec.dtype)->bytes).has_value()) {
      json_.Fail("has a tensor that is larger than any memory: " + Shown(spec.name));
    }
    return spec;
  }

  void Extent(bool has_symbols, TensorType* spec) {
    bool is_symbol = json_.IsNext('"');
    if (is_symbol && !has_symbols)
      json_.Fail("must be an integer: only inputs have symbolic extents");
    spec->symbols.push_back(is_symbol ? json_.Name() : "");
    spec->shape.push_back(is_symbol ? -1 : json_.Integer(0, kMost));
  }

  std::vector<IndexRange> Ranges() {
    std::vector<IndexRange> ranges;
    json_.Array([&] { ranges.push_back(Range()); });
    return ranges;
  }

  IndexRange Range() {
    IndexRange range;
    json_.Object(
        [&](const std::string& key) {
          if (key == "input") {
            range.input = json_.Name();
          } else if (key == "extent") {
            bool is_symbol = json_.IsNext('"');
            if (is_symbol) range.symbol = json_.Name();
            range.extent = is_symbol ? -1 : json_.Integer(0, kMostIndex);
          } else if (key == "from_end") {
            range.from_end = json_.Integer(0, 1) == 1;
          } else if (key == "shift") {
            range.shift = json_.Integer(-kMostIndex, kMostIndex);
          } else if (key == "ignored") {
            json_.Array([&] { range.ignored.push_back(json_.Integer(-kMost, kMost)); });
          } else if (key == "slices") {
            json_.Array([&] { range.slices.push_back(Slice()); });
          } else {
            json_.Skip();
          }
        },
        {"input", "extent", "from_end", "shift", "ignored", "slices"});
    return range;
  }

  std::vector<int64_t> Slice() {
    std::vector<int64_t> slice;
    json_.Array([&] { slice.push_back(json_.Integer(slice.size() == 2, kMostIndex)); });
    if (slice.size() != 3) json_.Fail("must be three numbers");
    return slice;
  }

  std::vector<ExtentCheck> Checks() {
    std::vector<ExtentCheck> checks;
    json_.Array([&] {
      ExtentCheck check;
      json_.Object(
          [&](const std::string& key) {
            if (key == "condition") {
              json_.Array([&] { check.condition.push_back(Part()); });
            } else if (key == "reason") {
              check.reason = json_.Name();
            } else {
              json_.Skip();
            }
          },
          {"condition", "reason"});
      checks.push_back(std::move(check));
    });
    return checks;
  }

  ExtentCheck::Part Part() {
    ExtentCheck::Part part;
    if (json_.IsNext('"')) {
      part.name = json_.Name();
    } else {
      part.number = json_.Integer(-kMost, kMost);
    }
    return part;
  }

  void CheckConditions(const std::vector<ExtentCheck>& checks,
                       const std::vector<TensorType>& inputs) const {
    std::set<std::string> symbols;
    for (const TensorType& spec : inputs) symbols.insert(spec.symbols.begin(), spec.symbols.end());
    for (const ExtentCheck& check : checks) {
      size_t count = 0;
      for (const ExtentCheck::Part& part : check.condition) {
        bool is_operator = IsOperator(part.name);
        if (!part.name.empty() && !is_operator && !symbols.count(part.name)) {
          json_.Fail("extent_checks has " + Shown(part.name) +
                     ", which is no extent of an input and no operator");
        }
        if (is_operator && count < 2) json_.Fail("extent_checks has an operator without operands");
        count = is_operator ? count - 1 : count + 1;
      }
      if (count != 1) json_.Fail("extent_checks has a condition of several values, or of none");
    }
  }

  void CheckRanges(const std::vector<IndexRange>& ranges,
                   const std::vector<TensorType>& inputs) const {
    std::set<std::string> symbols;
    for (const TensorType& spec : inputs) symbols.insert(spec.symbols.begin(), spec.symbols.end());
    for (const IndexRange& range : ranges) {
      auto input = std::find_if(inputs.begin(), inputs.end(),
                                [&](const TensorType& spec) { return spec.name == range.input; });
      if (input == inputs.end() || input->dtype.find("int") == std::string::npos) {
        json_.Fail("index_ranges has " + Shown(range.input) + ", which is no input of integers");
      }
      if (range.extent < 0 && !symbols.count(range.symbol)) {
        json_.Fail("index_ranges has " + Shown(range.symbol) + ", which is no extent of an input");
      }
      if (!range.slices.empty() && range.slices.size() != input->shape.size()) {
        json_.Fail("index_ranges has slices of other axes than those of " + Shown(range.input));
      }
    }
  }

  void Hyperparameters() {
    std::vector<std::string> names;
    json_.Array([&] {
      std::string name;
      double value = 0;
      json_.Object(
          [&](const std::string& key) {
            if (key == "name") {
              name = json_.Name();
            } else if (key == "default") {
              value = json_.Number();
            } else {
              json_.Skip();
            }
          },
          {"name", "default"});
      names.push_back(name);
      found_.hyperparameters.emplace_back(name, value);
    });
    Unique(names);
  }

  void Levels() {
    found_.levels = Names();
    const char* const* last = std::begin(kLevels);
    for (const std::string& level : found_.levels) {
      last = std::find(last, std::end(kLevels), level);
      if (last == std::end(kLevels)) {
        json_.Fail("must be levels from x86-64 to x86-64-v4 in this order, but one is " +
                   Shown(level));
      }
    }
  }

  void Forward() {
    json_.Object(
        [&](const std::string& key) {
          if (key == "name") {
            found_.forward = json_.Name();
          } else if (key == "inputs") {
            found_.inputs = Specs(true);
          } else if (key == "index_ranges") {
            found_.input_ranges = Ranges();
          } else if (key == "extent_checks") {
            found_.input_checks = Checks();
          } else if (key == "values") {
            json_.Array([&] { found_.values.push_back(json_.Name()); });
          } else {
            json_.Skip();
          }
        },
        {"name", "inputs", "values"});
  }

  void CheckValues() const {
    CheckRanges(found_.ranges, found_.batch);
    CheckRanges(found_.input_ranges, found_.inputs);
    CheckConditions(found_.checks, found_.batch);
    CheckConditions(found_.input_checks, found_.inputs);
    std::set<std::string> known;
    for (const char* group : {"params", "frozen", "states"}) {
      for (const TensorType& spec : found_.groups.at(group)) known.insert(spec.name);
    }
    for (const std::string& name : found_.values) {
      if (!known.count(name))
        json_.Fail("forward.values has " + Shown(name) + ", which is no tensor of the step");
    }
  }

  JsonReader json_;
  Manifest found_;
};

/// Returns the version of a text; throws if it is of another format or version, whose keys may be
/// others.
int64_t ManifestVersion(std::string_view text, const std::string& where) {
  std::string format;
  int64_t version = 0;
  JsonReader json(text, where);
  json.Object(
      [&](const std::string& key) {
        if (key == "format") {
          format = json.Text();
        } else if (key == "version") {
          version = json.Integer(0, kMost);
        } else {
          json.Skip();
        }
      },
      {"format", "version"});
  json.End();
  if (format != kFormat) throw Error(where + " is of another format: " + Shown(format));
  CheckVersion(version, where);
  return version;
}

}  // namespace

const Dtype* DtypeOf(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
}

const Dtype* DtypeInFile(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.in_file) return &dtype;
  }
  return nullptr;
}

std::optional<int64_t> Bytes(const std::vector<int64_t>& shape, int64_t width) {
  int64_t bytes = width;
  bool is_empty = false;
  for (int64_t extent : shape) {
    is_empty |= extent == 0;
    if (__builtin_mul_overflow(bytes, extent == 0 ? 1 : extent, &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : bytes;
}

void CheckVersion(int64_t version, const std::string& where) {
  if (version < kOldest || version > kVersion) {
    throw Error(where + " has version " + std::to_string(version) +
                " of the format, but this program reads versions " + std::to_string(kOldest) +
                " to " + std::to_string(kVersion));
  }
}

Manifest ParseManifest(std::string_view text, const std::string& where) {
  auto place = PlaceOfChecksum(text);
  if (place.has_value()) CheckText(text, *place, where);
  int64_t version = ManifestVersion(text, where);
  Manifest manifest = Reader(text, where).Read();
  if (version >= kFirstWithChecksum && (!place.has_value() || manifest.library_checksum.empty())) {
    throw Error(where + " is damaged: it has no checksum of " +
                (place.has_value() ? manifest.library : "its own"));
  }
  return manifest;
}

}  // namespace relax_grad
