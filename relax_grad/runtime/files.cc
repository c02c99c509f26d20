#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace relax_grad {

namespace {

// The parser recurses.
constexpr int kMaxDepth = 64;

/// Returns the bytes of a tensor; none if it, or a tensor with 1 in the place of extents of 0, has more than 2 ** 63 - 1.
std::optional<int64_t> Bytes(const std::vector<int64_t>& shape, int64_t width) {
  int64_t bytes = width;
  bool is_empty = false;
  for (int64_t extent : shape) {
    is_empty |= extent == 0;
    if (__builtin_mul_overflow(bytes, extent == 0 ? 1 : extent, &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : bytes;
}

int64_t Width(DLDataType type) { return (int64_t{type.bits} * type.lanes + 7) / 8; }

struct HostAllocator {
  void AllocData(DLTensor* tensor) {
    size_t size = ffi::GetDataSize(*tensor);
    if (size > std::numeric_limits<size_t>::max() - kAlignment) throw std::bad_alloc();
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, size ? size : kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

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
  // Makes the rename durable, where the system can.
  std::string folder = std::filesystem::path(path).parent_path().string();
  int parent = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (parent < 0) return;
  fsync(parent);
  close(parent);
}

/// Returns whether lists and objects of a JSON text are nested at most kMaxDepth deep.
bool IsShallow(const std::string& text) {
  int depth = 0;
  bool is_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char each = text[i];
    if (is_text && each == '\\') ++i;
    if (each == '"') is_text = !is_text;
    if (is_text) continue;
    if (each == '[' || each == '{') ++depth;
    if (each == ']' || each == '}') --depth;
    if (depth > kMaxDepth) return false;
  }
  return true;
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

std::string ReadFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw Error(path + " cannot be read: it is a folder");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + " cannot be read: " + std::strerror(errno));
  std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) throw Error(path + " cannot be read to its end");
  return data;
}

std::string GetText(const json::Object& object, const std::string& key, const std::string& where) {
  return std::string(Get<ffi::String>(object, key, where));
}

json::Object ParseObject(const std::string& text, const std::string& where) {
  if (!IsShallow(text)) throw Error(where + " is damaged: its JSON is nested more than " + std::to_string(kMaxDepth) + " deep");
  ffi::String message;
  json::Value value = json::Parse(ffi::String(text), &message);
  if (message.size() != 0) throw Error(where + " is damaged: " + std::string(message));
  auto object = value.as<json::Object>();
  if (!object.has_value()) throw Error(where + " is damaged: no JSON object");
  return *object;
}

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
  size_t size = data.size() - 8 - length;
  File file;
  std::vector<std::pair<int64_t, int64_t>> places;
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
    for (const json::Value& each : Get<json::Array>(*object, "shape", where)) {
      auto extent = each.as<int64_t>();
      if (!extent.has_value() || *extent < 0) damaged(name + " has no valid shape");
      shape.push_back(*extent);
    }
    json::Array offsets = Get<json::Array>(*object, "data_offsets", where);
    if (offsets.size() != 2) damaged(name + " has no valid offsets");
    auto begin = offsets[0].as<int64_t>(), end = offsets[1].as<int64_t>();
    if (!begin.has_value() || !end.has_value() || *begin < 0 || *end < *begin ||
        static_cast<uint64_t>(*end) > size) {
      damaged(name + " is not within the file");
    }
    auto bytes = Bytes(shape, Width(ffi::StringToDLDataType(ffi::String(dtype))));
    if (!bytes.has_value()) damaged(name + " is larger than any file");
    if (*end - *begin != *bytes) damaged(name + " has another size than its shape");
    Tensor tensor = MakeTensor(shape, dtype);
    std::memcpy(tensor.data_ptr(), start + *begin, static_cast<size_t>(*end - *begin));
    places.emplace_back(*begin, *end);
    file.tensors[name] = tensor;
  }
  std::sort(places.begin(), places.end());
  int64_t used = 0;
  for (const auto& [begin, end] : places) {
    if (begin != used) damaged(begin < used ? "its tensors overlap" : "there are bytes of no tensor in it");
    used = end;
  }
  if (static_cast<uint64_t>(used) != size) {
    damaged("its tensors have " + std::to_string(used) + " bytes, but it has " + std::to_string(size));
  }
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
    if (!tensor.defined()) throw Error(name + " is no tensor");
    if (!tensor.IsContiguous()) throw Error(name + " has strides, which files do not support");
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

Tensor MakeTensor(const std::vector<int64_t>& shape, const std::string& dtype) {
  for (int64_t extent : shape) {
    if (extent < 0) throw Error("a tensor cannot have the shape " + ShapeText(shape));
  }
  return Guarded("MakeTensor", [&] {
    DLDataType type = ffi::StringToDLDataType(ffi::String(dtype));
    if (!Bytes(shape, Width(type)).has_value()) throw Error("a tensor of " + dtype + " cannot have the shape " + ShapeText(shape));
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

}  // namespace relax_grad
