#include "trainer.h"

#include "cpu_levels.h"

#include <fcntl.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

namespace relax_grad {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kVersion = 1;
constexpr const char* kMetadata = "relax_grad.training";
// VirtualMachine.POOLED_ALLOCATOR of TVM.
constexpr int kPooledAllocator = 2;
const char* const kGroups[] = {"params", "frozen", "states", "optimizer_state"};

/// Runs a function; an error of TVM becomes one of ours.
template <typename F>
auto Guarded(const std::string& where, F function) -> decltype(function()) {
  try {
    return function();
  } catch (const ffi::Error& error) {
    throw Error(where + ": " + error.what());
  }
}

struct HostAllocator {
  void AllocData(DLTensor* tensor) {
    size_t size = ffi::GetDataSize(*tensor);
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, size ? size : kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << ")";
  return text.str();
}

std::vector<int64_t> ShapeOf(const Tensor& tensor) {
  auto shape = tensor.shape();
  return std::vector<int64_t>(shape.begin(), shape.end());
}

struct Dtype {
  const char* name;
  const char* in_file;
};

const Dtype kDtypes[] = {
    {"bool", "BOOL"},    {"uint8", "U8"},     {"int8", "I8"},     {"uint16", "U16"},
    {"int16", "I16"},    {"uint32", "U32"},   {"int32", "I32"},   {"uint64", "U64"},
    {"int64", "I64"},    {"float16", "F16"},  {"bfloat16", "BF16"}, {"float32", "F32"},
    {"float64", "F64"},
};

std::string ReadFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw Error(path + " cannot be read: it is a folder");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + " cannot be read: " + std::strerror(errno));
  std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) throw Error(path + " cannot be read to its end");
  return data;
}

/// Writes a file under another name and renames it, so that it is complete or absent.
void WriteFile(const std::string& path, const std::vector<std::pair<const void*, size_t>>& parts) {
  std::string part = path + ".XXXXXX";
  int handle = mkstemp(part.data());
  if (handle < 0) throw Error(path + " cannot be written: " + std::strerror(errno));
  auto fail = [&](const char* step) {
    std::string reason = std::strerror(errno);
    close(handle);
    unlink(part.c_str());
    throw Error(path + " cannot be " + step + ": " + reason);
  };
  for (const auto& [data, size] : parts) {
    const char* at = static_cast<const char*>(data);
    size_t left = size;
    while (left) {
      ssize_t written = write(handle, at, left);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("written");
      at += written;
      left -= static_cast<size_t>(written);
    }
  }
  if (fsync(handle) != 0) fail("written");
  if (fchmod(handle, 0644) != 0) fail("written");
  if (rename(part.c_str(), path.c_str()) != 0) fail("replaced");
  close(handle);
}

// JSON, with errors that name the file and the key.

template <typename T>
T Get(const json::Object& object, const std::string& key, const std::string& where) {
  auto found = object.find(ffi::String(key));
  if (found == object.end()) throw Error(where + " has no " + key);
  auto value = (*found).second.template as<T>();
  if (!value.has_value()) throw Error(where + ": " + key + " has another type than expected");
  return *value;
}

std::string GetText(const json::Object& object, const std::string& key, const std::string& where) {
  return std::string(Get<ffi::String>(object, key, where));
}

json::Object ParseObject(const std::string& text, const std::string& where) {
  ffi::String message;
  json::Value value = json::Parse(ffi::String(text), &message);
  if (message.size() != 0) throw Error(where + " is damaged: " + std::string(message));
  auto object = value.as<json::Object>();
  if (!object.has_value()) throw Error(where + " is damaged: no JSON object");
  return *object;
}

struct File {
  Tensors tensors;
  std::map<std::string, std::string> metadata;
};

File ReadTensors(const std::string& path) {
  std::string data = ReadFile(path);
  auto damaged = [&](const std::string& reason) {
    throw Error(path + " is damaged, or no file of safetensors: " + reason);
  };
  uint64_t length = 0;
  if (data.size() < 8) damaged("it has " + std::to_string(data.size()) + " bytes");
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(data[i]);
  if (length > data.size() - 8) damaged("its header is longer than the file");
  json::Object header = ParseObject(data.substr(8, length), path);
  const char* start = data.data() + 8 + length;
  size_t size = data.size() - 8 - length, used = 0;
  File file;
  for (const auto& [key, value] : header) {
    std::string name(key.cast<ffi::String>());
    auto object = value.as<json::Object>();
    if (!object.has_value()) damaged(name + " is no object");
    if (name == "__metadata__") {
      for (const auto& [k, v] : *object) {
        auto text = v.as<ffi::String>();
        if (!text.has_value()) damaged("metadata that is no text");
        file.metadata[std::string(k.cast<ffi::String>())] = std::string(*text);
      }
      continue;
    }
    std::string where = path + ": " + name, dtype;
    std::string in_file = GetText(*object, "dtype", where);
    for (const Dtype& each : kDtypes) {
      if (in_file == each.in_file) dtype = each.name;
    }
    if (dtype.empty()) throw Error(where + " has the dtype " + in_file + ", which is not supported");
    std::vector<int64_t> shape;
    uint64_t count = 1;
    for (const json::Value& each : Get<json::Array>(*object, "shape", where)) {
      auto extent = each.as<int64_t>();
      if (!extent.has_value() || *extent < 0) damaged(name + " has no valid shape");
      shape.push_back(*extent);
      if (*extent != 0 && count > size / static_cast<uint64_t>(*extent) + 1) damaged(name + " is larger than the file");
      count *= static_cast<uint64_t>(*extent);
    }
    json::Array offsets = Get<json::Array>(*object, "data_offsets", where);
    if (offsets.size() != 2) damaged(name + " has no valid offsets");
    auto begin = offsets[0].as<int64_t>(), end = offsets[1].as<int64_t>();
    if (!begin.has_value() || !end.has_value() || *begin < 0 || *end < *begin ||
        static_cast<uint64_t>(*end) > size) {
      damaged(name + " is not within the file");
    }
    size_t width = (ffi::StringToDLDataType(ffi::String(dtype)).bits + 7) / 8;
    if (static_cast<uint64_t>(*end - *begin) != count * width) damaged(name + " has another size than its shape");
    Tensor tensor = MakeTensor(shape, dtype);
    std::memcpy(tensor.data_ptr(), start + *begin, static_cast<size_t>(*end - *begin));
    used += static_cast<size_t>(*end - *begin);
    file.tensors[name] = tensor;
  }
  if (used != size) damaged("its tensors have " + std::to_string(used) + " bytes, but it has " + std::to_string(size));
  return file;
}

void WriteTensors(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata) {
  json::Object header;
  if (!metadata.empty()) {
    json::Object more;
    for (const auto& [key, value] : metadata) more.Set(ffi::String(key), ffi::String(value));
    header.Set(ffi::String("__metadata__"), more);
  }
  std::vector<std::pair<const void*, size_t>> parts(2);
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    std::string dtype = DtypeName(tensor), in_file;
    for (const Dtype& each : kDtypes) {
      if (dtype == each.name) in_file = each.in_file;
    }
    if (in_file.empty()) throw Error(name + " has the dtype " + dtype + ", which files do not support");
    json::Object entry;
    json::Array shape, offsets;
    for (int64_t extent : ShapeOf(tensor)) shape.push_back(extent);
    int64_t size = static_cast<int64_t>(ffi::GetDataSize(*tensor.GetDLTensorPtr()));
    offsets.push_back(offset);
    offsets.push_back(offset + size);
    offset += size;
    entry.Set(ffi::String("dtype"), ffi::String(in_file));
    entry.Set(ffi::String("shape"), shape);
    entry.Set(ffi::String("data_offsets"), offsets);
    header.Set(ffi::String(name), entry);
    parts.emplace_back(tensor.data_ptr(), static_cast<size_t>(size));
  }
  std::string text(json::Stringify(header));
  while (text.size() % 8) text += ' ';
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  parts[0] = {length, 8};
  parts[1] = {text.data(), text.size()};
  WriteFile(path, parts);
}

/// The type of a tensor in the manifest. An extent is a number, or the name of a symbol.
struct Spec {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<std::string> symbols;
};

Spec SpecOf(const json::Value& value, const std::string& where) {
  auto object = value.as<json::Object>();
  if (!object.has_value()) throw Error(where + " is damaged: a tensor is no object");
  Spec spec{GetText(*object, "name", where), GetText(*object, "dtype", where), {}, {}};
  for (const json::Value& each : Get<json::Array>(*object, "shape", where)) {
    auto number = each.as<int64_t>();
    auto symbol = each.as<ffi::String>();
    if (!number.has_value() && !symbol.has_value()) throw Error(where + " is damaged: the shape of " + spec.name);
    spec.shape.push_back(number.has_value() ? *number : -1);
    spec.symbols.push_back(number.has_value() ? "" : std::string(*symbol));
  }
  return spec;
}

std::vector<Spec> SpecsOf(const json::Object& object, const std::string& key, const std::string& where) {
  std::vector<Spec> specs;
  for (const json::Value& each : Get<json::Array>(object, key, where)) specs.push_back(SpecOf(each, where));
  return specs;
}

std::vector<std::string> TextsOf(const json::Object& object, const std::string& key, const std::string& where) {
  std::vector<std::string> texts;
  for (const json::Value& each : Get<json::Array>(object, key, where)) {
    auto text = each.as<ffi::String>();
    if (!text.has_value()) throw Error(where + " is damaged: " + key);
    texts.emplace_back(*text);
  }
  return texts;
}

/// Throws if a tensor has another type; symbols get their values from the first tensor that has them.
void Check(const std::string& what, const Tensor& tensor, const Spec& spec,
           std::map<std::string, int64_t>* symbols) {
  if (!tensor.defined()) throw Error(what + " is no tensor");
  std::vector<int64_t> shape = ShapeOf(tensor);
  bool fits = shape.size() == spec.shape.size() && DtypeName(tensor) == spec.dtype;
  std::ostringstream wanted;
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    wanted << (i ? ", " : "");
    spec.symbols[i].empty() ? wanted << spec.shape[i] : wanted << spec.symbols[i];
    if (!fits) continue;
    if (spec.symbols[i].empty()) {
      fits = shape[i] == spec.shape[i];
    } else {
      fits = symbols->emplace(spec.symbols[i], shape[i]).first->second == shape[i];
    }
  }
  if (!fits) {
    throw Error(what + " must have shape (" + wanted.str() + ") and dtype " + spec.dtype + ", but it has " +
                ShapeText(shape) + " and " + DtypeName(tensor));
  }
}

double Scalar(const Tensor& tensor) {
  std::string dtype = DtypeName(tensor);
  if (dtype == "float64") return *static_cast<const double*>(tensor.data_ptr());
  if (dtype == "float32") return *static_cast<const float*>(tensor.data_ptr());
  uint16_t bits = *static_cast<const uint16_t*>(tensor.data_ptr());
  if (dtype == "bfloat16") {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  if (dtype == "float16") {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return exponent ? sign * std::ldexp(1024 + fraction, exponent - 25) : sign * std::ldexp(fraction, -24);
  }
  throw Error("a scalar has the dtype " + dtype);
}

std::vector<Tensor> TensorsOf(const ffi::Any& value) {
  if (auto tensor = value.as<Tensor>()) return {*tensor};
  std::vector<Tensor> found;
  for (const ffi::Any& each : value.cast<ffi::Array<ffi::Any>>()) {
    for (const Tensor& tensor : TensorsOf(each)) found.push_back(tensor);
  }
  return found;
}

template <typename T>
const char* NameOf();
template <>
const char* NameOf<float>() { return "float32"; }
template <>
const char* NameOf<double>() { return "float64"; }
template <>
const char* NameOf<int32_t>() { return "int32"; }
template <>
const char* NameOf<int64_t>() { return "int64"; }
template <>
const char* NameOf<uint8_t>() { return "uint8"; }

}  // namespace

Tensor MakeTensor(const std::vector<int64_t>& shape, const std::string& dtype) {
  for (int64_t extent : shape) {
    if (extent < 0) throw Error("a tensor cannot have the shape " + ShapeText(shape));
  }
  return Guarded("MakeTensor", [&] {
    DLDataType type = ffi::StringToDLDataType(ffi::String(dtype));
    return Tensor::FromNDAlloc(HostAllocator(), ffi::ShapeView(shape.data(), shape.size()), type, DLDevice{kDLCPU, 0});
  });
}

template <typename T>
Tensor MakeTensor(const std::vector<int64_t>& shape, const std::vector<T>& values) {
  Tensor tensor = MakeTensor(shape, std::string(NameOf<T>()));
  if (static_cast<size_t>(tensor.numel()) != values.size()) {
    throw Error("a tensor of shape " + ShapeText(shape) + " has " + std::to_string(tensor.numel()) +
                " elements, but " + std::to_string(values.size()) + " values were given");
  }
  if (!values.empty()) std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

template <typename T>
std::vector<T> Values(const Tensor& tensor) {
  if (DtypeName(tensor) != NameOf<T>()) {
    throw Error(std::string("the values of a tensor of ") + DtypeName(tensor) + " cannot be read as " + NameOf<T>());
  }
  if (!tensor.IsContiguous()) throw Error("the values of a tensor with strides cannot be read");
  const T* data = static_cast<const T*>(tensor.data_ptr());
  return std::vector<T>(data, data + tensor.numel());
}

#define RELAX_GRAD_INSTANTIATE(T)                                                         \
  template Tensor MakeTensor<T>(const std::vector<int64_t>&, const std::vector<T>&); \
  template std::vector<T> Values<T>(const Tensor&);
RELAX_GRAD_INSTANTIATE(float)
RELAX_GRAD_INSTANTIATE(double)
RELAX_GRAD_INSTANTIATE(int32_t)
RELAX_GRAD_INSTANTIATE(int64_t)
RELAX_GRAD_INSTANTIATE(uint8_t)
#undef RELAX_GRAD_INSTANTIATE

std::string DtypeName(const Tensor& tensor) { return std::string(ffi::DLDataTypeToString(tensor.dtype())); }

Tensors LoadTensors(const std::string& path) {
  return Guarded(path, [&] { return ReadTensors(path).tensors; });
}

void SaveTensors(const std::string& path, const Tensors& tensors) {
  Guarded(path, [&] { WriteTensors(path, tensors, {}); });
}

class Trainer::Impl {
 public:
  Impl(const std::string& folder, const Options& options) : options_(options) {
    std::string where = folder + "/manifest.json";
    json::Object manifest = ParseObject(ReadFile(where), where);
    if (GetText(manifest, "format", where) != kMetadata) throw Error(where + " is of another format");
    int64_t version = Get<int64_t>(manifest, "version", where);
    if (version != kVersion) {
      throw Error(where + " has version " + std::to_string(version) + " of the format, but this program reads version " +
                  std::to_string(kVersion));
    }
    batch_ = SpecsOf(manifest, "batch", where);
    for (const Spec& each : batch_) batch_names_.push_back(each.name);
    for (const json::Value& each : Get<json::Array>(manifest, "hyperparameters", where)) {
      auto object = each.as<json::Object>();
      if (!object.has_value()) throw Error(where + " is damaged: hyperparameters");
      std::string name = GetText(*object, "name", where);
      order_.push_back(name);
      hyperparameters_[name] = Get<double>(*object, "default", where);
    }
    for (const char* group : kGroups) specs_[group] = SpecsOf(manifest, group, where);
    metrics_ = TextsOf(manifest, "metrics", where);
    outputs_ = TextsOf(manifest, "outputs", where);
    accumulate_ = Get<int64_t>(manifest, "accumulate", where);
    levels_ = TextsOf(manifest, "levels", where);
    auto found = manifest.find(ffi::String("forward"));
    if (found != manifest.end()) {
      if (auto forward = (*found).second.as<json::Object>()) {
        forward_ = GetText(*forward, "name", where);
        inputs_ = SpecsOf(*forward, "inputs", where);
        for (const Spec& each : inputs_) input_names_.push_back(each.name);
        values_ = TextsOf(*forward, "values", where);
      }
    }
    std::string library = folder + "/" + GetText(manifest, "library", where);
    std::error_code reason;
    auto size = std::filesystem::file_size(library, reason);
    if (reason) throw Error(library + " cannot be read: " + reason.message());
    // A library that was cut short ends the process when it is loaded.
    int64_t expected = Get<int64_t>(manifest, "library_bytes", where);
    if (size != static_cast<uint64_t>(expected)) {
      throw Error(library + " is damaged: it has " + std::to_string(size) + " bytes, but " + std::to_string(expected) + " were exported");
    }
    Guarded(library, [&] { Start(library); });
    Load(folder + "/" + GetText(manifest, "state", where));
  }

  StepResult Step(const std::vector<Tensor>& batch, const std::map<std::string, double>& given) {
    if (batch.size() != batch_.size()) {
      std::string names;
      for (const Spec& each : batch_) names += (names.empty() ? "" : ", ") + each.name;
      throw Error("the step takes " + std::to_string(batch_.size()) + " tensors (" + names + "), but " +
                  std::to_string(batch.size()) + " were given");
    }
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < batch.size(); ++i) {
      Check(batch_[i].name, batch[i], batch_[i], &symbols);
      arguments.emplace_back(batch[i]);
    }
    std::map<std::string, double> scalars = hyperparameters_;
    for (const auto& [name, value] : given) {
      if (!scalars.count(name)) throw Error("the step has no hyperparameter " + name);
      if (!std::isfinite(value)) throw Error(name + " must be finite, but it is " + std::to_string(value));
      scalars[name] = value;
    }
    for (const std::string& name : order_) arguments.emplace_back(MakeTensor<double>({}, {scalars[name]}));
    int64_t seed = counters_.seed << 32 | (counters_.steps & 0xFFFFFFFF);
    arguments.emplace_back(MakeTensor<int64_t>({}, {seed}));
    for (const char* group : kGroups) arguments.emplace_back(groups_.at(group));
    bool updates = (counters_.steps + 1) % accumulate_ == 0;
    ffi::Array<ffi::Any> results = Guarded("the step failed", [&] {
      return Call(updates ? *step_ : *accumulate_step_, arguments).cast<ffi::Array<ffi::Any>>();
    });
    StepResult result{Scalar(results[0].cast<Tensor>()), {}, {}, true};
    ffi::Array<Tensor> metrics = results[1].cast<ffi::Array<Tensor>>();
    for (size_t i = 0; i < metrics_.size(); ++i) result.metrics[metrics_[i]] = Scalar(metrics[i]);
    ffi::Array<Tensor> outputs = results[2].cast<ffi::Array<Tensor>>();
    for (size_t i = 0; i < outputs_.size(); ++i) result.outputs[outputs_[i]] = outputs[i];
    // The same cases as in Trainer.step of Python.
    bool applied = !updates || !result.metrics.count("applied") || result.metrics["applied"] == 1.0;
    bool is_scaled = result.metrics.count("loss_scale") != 0;
    bool keeps = std::isfinite(result.loss) && (applied || is_scaled);
    if (!keeps && !options_.skip_nonfinite) {
      throw NotFiniteError((std::isfinite(result.loss) ? "a gradient is not finite" : "the loss is " + std::to_string(result.loss)) +
                           std::string(" in step ") + std::to_string(counters_.steps) + "; everything is as before the step");
    }
    counters_.steps += 1;
    if (!keeps || !applied) counters_.skipped += 1;
    if (keeps || is_scaled) {
      groups_["params"] = results[3].cast<ffi::Array<Tensor>>();
      groups_["states"] = results[4].cast<ffi::Array<Tensor>>();
      groups_["optimizer_state"] = results[5].cast<ffi::Array<Tensor>>();
    }
    if (updates && keeps && applied) counters_.updates += 1;
    result.applied = keeps && applied;
    return result;
  }

  std::vector<Tensor> Predict(const std::vector<Tensor>& inputs) {
    if (forward_.empty()) throw Error("the exported model has no function for prediction");
    if (inputs.size() != inputs_.size()) {
      throw Error("the model takes " + std::to_string(inputs_.size()) + " inputs, but " +
                  std::to_string(inputs.size()) + " were given");
    }
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Check(inputs_[i].name, inputs[i], inputs_[i], &symbols);
      arguments.emplace_back(inputs[i]);
    }
    std::map<std::string, Tensor> known;
    for (const char* group : {"params", "frozen", "states"}) {
      for (const auto& [name, tensor] : Group(group)) known[name] = tensor;
    }
    for (const std::string& name : values_) arguments.emplace_back(known.at(name));
    return Guarded("the prediction failed", [&] { return TensorsOf(Call(*predict_, arguments)); });
  }

  Tensors Group(const std::string& name) const {
    auto found = groups_.find(name);
    if (found == groups_.end()) throw Error("there is no group " + name + ": params, frozen, states, optimizer_state");
    Tensors tensors;
    const std::vector<Spec>& specs = specs_.at(name);
    for (size_t i = 0; i < specs.size(); ++i) tensors[specs[i].name] = found->second[i];
    return tensors;
  }

  void Save(const std::string& path) const {
    Tensors tensors;
    for (const char* group : kGroups) {
      for (const auto& [name, tensor] : Group(group)) tensors[std::string(group) + "/" + name] = tensor;
    }
    json::Object counters;
    auto set = [&](const char* name, int64_t value) { counters.Set(ffi::String(name), value); };
    set("seed", counters_.seed);
    set("steps", counters_.steps);
    set("updates", counters_.updates);
    set("skipped", counters_.skipped);
    set("epoch", counters_.epoch);
    set("batch", counters_.batch);
    json::Object described;
    described.Set(ffi::String("version"), kVersion);
    described.Set(ffi::String("counters"), counters);
    described.Set(ffi::String("history"), history_);
    described.Set(ffi::String("more"), more_);
    Guarded(path, [&] { WriteTensors(path, tensors, {{kMetadata, std::string(json::Stringify(described))}}); });
  }

  void Load(const std::string& path) {
    File file = Guarded(path, [&] { return ReadTensors(path); });
    auto text = file.metadata.find(kMetadata);
    if (text == file.metadata.end()) throw Error(path + " has no state of training");
    json::Object described = ParseObject(text->second, path);
    int64_t version = Get<int64_t>(described, "version", path);
    if (version != kVersion) {
      throw Error(path + " has version " + std::to_string(version) + " of the format, but this program reads version " +
                  std::to_string(kVersion));
    }
    json::Object counters = Get<json::Object>(described, "counters", path);
    Counters read;
    read.seed = Get<int64_t>(counters, "seed", path);
    read.steps = Get<int64_t>(counters, "steps", path);
    read.updates = Get<int64_t>(counters, "updates", path);
    read.skipped = Get<int64_t>(counters, "skipped", path);
    read.epoch = Get<int64_t>(counters, "epoch", path);
    read.batch = Get<int64_t>(counters, "batch", path);
    std::map<std::string, ffi::Array<Tensor>> groups;
    size_t count = 0;
    for (const char* group : kGroups) {
      ffi::Array<Tensor> tensors;
      for (const Spec& spec : specs_.at(group)) {
        std::string name = std::string(group) + "/" + spec.name;
        auto found = file.tensors.find(name);
        if (found == file.tensors.end()) throw Error(path + " lacks " + name + "; it was written by a trainer of another step");
        Check(path + ": " + name, found->second, spec, nullptr);
        tensors.push_back(found->second);
        ++count;
      }
      groups[group] = tensors;
    }
    if (count != file.tensors.size()) throw Error(path + " has tensors that the step does not; it was written by a trainer of another step");
    json::Object history = Get<json::Object>(described, "history", path);
    json::Object more = Get<json::Object>(described, "more", path);
    groups_ = groups;
    counters_ = read;
    history_ = history;
    more_ = more;
  }

  Counters counters_;
  std::vector<std::string> batch_names_, input_names_;
  std::string level_;
  std::map<std::string, double> hyperparameters_;

 private:
  void Start(const std::string& library) {
    if (options_.num_threads > 0) {
      auto configure = ffi::Function::GetGlobal("runtime.config_threadpool");
      if (!configure.has_value()) throw Error("TVM's runtime has no runtime.config_threadpool");
      // 1: the fastest cores first, one thread on each.
      (*configure)(1, options_.num_threads);
    }
    // dlopen searches the system's folders for a name without a slash.
    std::string path = library.find('/') == std::string::npos ? "./" + library : library;
    ffi::Module module = ffi::Module::LoadFromFile(ffi::String(path));
    ffi::Function load = Function(Version(module, library), "vm_load_executable");
    machine_ = load().cast<ffi::Module>();
    Function(*machine_, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    step_ = Function(*machine_, "step");
    if (accumulate_ > 1) accumulate_step_ = Function(*machine_, "accumulate");
    if (!forward_.empty()) predict_ = Function(*machine_, forward_);
  }

  /// Returns the executable of a library that this processor runs, and notes its level.
  ffi::Module Version(const ffi::Module& module, const std::string& library) {
    if (levels_.empty()) {
      if (!options_.level.empty()) throw Error(library + " was compiled for one processor, and has no version for " + options_.level);
      return module;
    }
    std::vector<ffi::Module> versions{module};
    for (bool has_more = true; has_more;) {
      has_more = false;
      for (const ffi::Any& each : versions.back()->imports()) {
        auto imported = each.cast<ffi::Module>();
        if (imported->kind() != std::string("relax.VMExecutable")) continue;
        versions.push_back(imported);
        has_more = true;
        break;
      }
    }
    if (versions.size() != levels_.size()) {
      throw Error(library + " has " + std::to_string(versions.size()) + " versions, but the manifest names " +
                  std::to_string(levels_.size()));
    }
    std::set<std::string> found = CpuLevels();
    std::string names;
    for (size_t i = levels_.size(); i-- > 0;) {
      bool is_wanted = options_.level.empty() || options_.level == levels_[i];
      if (is_wanted && found.count(levels_[i])) {
        level_ = levels_[i];
        return versions[i];
      }
      names = levels_[i] + (names.empty() ? "" : ", ") + names;
    }
    if (options_.level.empty()) throw Error(library + " has versions for " + names + ", but the processor has none of these levels");
    bool is_there = std::count(levels_.begin(), levels_.end(), options_.level) != 0;
    throw Error(is_there ? "the processor has no " + options_.level
                         : library + " has no version for " + options_.level + ", but for " + names);
  }

  static ffi::Function Function(const ffi::Module& module, const std::string& name) {
    auto found = module->GetFunction(ffi::String(name));
    if (!found.has_value()) throw Error("the library has no function " + name);
    return *found;
  }

  static ffi::Any Call(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    function.CallPacked(views.data(), static_cast<int>(views.size()), &result);
    return result;
  }

  Options options_;
  std::vector<Spec> batch_, inputs_;
  std::vector<std::string> order_, metrics_, outputs_, values_, levels_;
  std::map<std::string, std::vector<Spec>> specs_;
  std::map<std::string, ffi::Array<Tensor>> groups_;
  int64_t accumulate_ = 1;
  std::string forward_;
  // The module owns the functions' machine.
  std::optional<ffi::Module> machine_;
  std::optional<ffi::Function> step_, accumulate_step_, predict_;
  json::Object history_, more_;
};

Trainer::Trainer(const std::string& folder, const Options& options) : impl_(new Impl(folder, options)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

StepResult Trainer::Step(const std::vector<Tensor>& batch, const std::map<std::string, double>& hyperparameters) {
  return impl_->Step(batch, hyperparameters);
}
std::vector<Tensor> Trainer::Predict(const std::vector<Tensor>& inputs) { return impl_->Predict(inputs); }
void Trainer::Save(const std::string& path) const { impl_->Save(path); }
void Trainer::Load(const std::string& path) { impl_->Load(path); }
const std::string& Trainer::level() const { return impl_->level_; }
const std::vector<std::string>& Trainer::batch_names() const { return impl_->batch_names_; }
const std::vector<std::string>& Trainer::input_names() const { return impl_->input_names_; }
const std::map<std::string, double>& Trainer::hyperparameters() const { return impl_->hyperparameters_; }
Tensors Trainer::group(const std::string& name) const { return impl_->Group(name); }
Counters& Trainer::counters() { return impl_->counters_; }
const Counters& Trainer::counters() const { return impl_->counters_; }

}  // namespace relax_grad
