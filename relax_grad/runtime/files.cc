#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <tvm/ffi/dtype.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

#include "checksum.h"
#include "handle.h"
#include "json.h"
#include "safetensors.h"
#include "write.h"

namespace relax_grad {

namespace {

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

/// Bytes that are read from their beginning.
class Input {
 public:
  virtual ~Input() = default;
  virtual uint64_t size() const = 0;
  virtual void Read(void* data, size_t size) = 0;
};

class InputMemory : public Input {
 public:
  explicit InputMemory(std::string_view data) : data_(data) {}
  uint64_t size() const override { return data_.size() + read_; }
  void Read(void* data, size_t size) override {
    if (size) std::memcpy(data, data_.data(), size);
    data_.remove_prefix(size);
    read_ += size;
  }

 private:
  std::string_view data_;
  uint64_t read_ = 0;
};

class InputFile : public Input {
 public:
  /// @param folder The descriptor of the folder that the name is relative to.
  /// @param path The file, for errors.
  InputFile(int folder, const std::string& name, const std::string& path)
      : path_(path), handle_(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    struct stat status;
    if (handle_.number() < 0) throw Error(path + " cannot be read: " + std::strerror(errno));
    std::string reason;
    if (fstat(handle_.number(), &status) != 0)
      reason = std::strerror(errno);
    else if (S_ISDIR(status.st_mode))
      reason = "it is a folder";
    else if (!S_ISREG(status.st_mode))
      reason = "it is no regular file";
    if (!reason.empty()) throw Error(path + " cannot be read: " + reason);
    size_ = static_cast<uint64_t>(status.st_size);
  }

  uint64_t size() const override { return size_; }

  void Read(void* data, size_t size) override {
    char* at = static_cast<char*>(data);
    while (size) {
      ssize_t count = read(handle_.number(), at, size);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw Error(path_ + " cannot be read: " + std::strerror(errno));
      if (count == 0) throw Error(path_ + " was cut short while it was read");
      at += count;
      size -= static_cast<size_t>(count);
    }
  }

 private:
  std::string path_;
  Handle handle_;
  uint64_t size_ = 0;
};

template <typename T>
const char* NameOf();
template <>
const char* NameOf<float>() {
  return "float32";
}
template <>
const char* NameOf<double>() {
  return "float64";
}
template <>
const char* NameOf<int32_t>() {
  return "int32";
}
template <>
const char* NameOf<int64_t>() {
  return "int64";
}
template <>
const char* NameOf<uint8_t>() {
  return "uint8";
}

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

namespace {

std::string Text(Input* input, int64_t most, const std::string& path) {
  Input& file = *input;
  if (file.size() > static_cast<uint64_t>(most)) {
    throw Error(path + " is damaged: it has " + std::to_string(file.size()) +
                " bytes, but there should be at most " + std::to_string(most));
  }
  std::string data(file.size(), '\0');
  file.Read(data.data(), data.size());
  return data;
}

File TensorsIn(Input* bytes_of_file, const std::string& path) {
  Input& input = *bytes_of_file;
  auto damaged = [&](const std::string& reason) {
    throw Error(path + " is damaged, or no file of safetensors: " + reason);
  };
  unsigned char start[8];
  if (input.size() < sizeof start) damaged("it has " + std::to_string(input.size()) + " bytes");
  input.Read(start, sizeof start);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | start[i];
  if (length > input.size() - sizeof start) damaged("its header is longer than the file");
  if (length > kMaxHeader) damaged("its header has " + std::to_string(length) + " bytes");
  std::string text(length, '\0');
  input.Read(text.data(), text.size());
  Header header =
      ParseHeader(text, static_cast<int64_t>(input.size() - sizeof start - length), path);
  auto place = PlaceOfChecksum(text);
  File file{{}, std::move(header.metadata), place ? text.substr(*place, 8) : ""};
  uint32_t checksum = Crc32(start, sizeof start);
  if (place.has_value()) checksum = Crc32OfText(text, *place, checksum);
  for (const Entry& entry : header.entries) {
    Tensor tensor = MakeTensor(entry.shape, entry.dtype->name);
    size_t size = static_cast<size_t>(entry.end - entry.begin);
    input.Read(tensor.data_ptr(), size);
    const auto* bytes = static_cast<const unsigned char*>(tensor.data_ptr());
    bool is_boolean = entry.dtype->name == std::string_view("bool");
    if (is_boolean &&
        std::any_of(bytes, bytes + size, [](unsigned char value) { return value > 1; })) {
      damaged(Shown(entry.name) + " has booleans that are neither 0 nor 1");
    }
    if (place.has_value()) checksum = Crc32(bytes, size, checksum);
    file.tensors[entry.name] = tensor;
  }
  if (place.has_value()) CheckChecksum(checksum, file.checksum, path);
  return file;
}

/// Tells whether a file is that of a status: neither another one nor written anew.
bool IsSame(const struct stat& first, const struct stat& other) {
  return first.st_dev == other.st_dev && first.st_ino == other.st_ino &&
         first.st_size == other.st_size && first.st_mtime == other.st_mtime;
}

}  // namespace

File ReadTensors(const std::string& path) {
  InputFile input(AT_FDCWD, path, path);
  return TensorsIn(&input, path);
}

#ifdef O_PATH
// The folder is only searched, which its permissions may allow alone.
constexpr int kSearch = O_PATH;
#else
constexpr int kSearch = O_RDONLY;
#endif

Folder::Folder(const std::string& path, const std::string& first)
    : path_(path),
      first_(first),
      handle_(open(path.c_str(), kSearch | O_DIRECTORY | O_CLOEXEC)),
      first_handle_(handle_.number() < 0 ? -1
                                         : openat(handle_.number(), first.c_str(),
                                                  O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (first_handle_.number() < 0 || fstat(first_handle_.number(), &status_) != 0) {
    throw Error(PathOf(first) + " cannot be read: " + std::strerror(errno));
  }
}

std::string Folder::PathOf(const std::string& name) const { return path_ + "/" + name; }

std::string Folder::Read(const std::string& name, int64_t most) const {
  InputFile input(handle_.number(), name, PathOf(name));
  return Text(&input, most, PathOf(name));
}

File Folder::ReadTensors(const std::string& name) const {
  InputFile input(handle_.number(), name, PathOf(name));
  return TensorsIn(&input, PathOf(name));
}

std::string_view MemoryFiles::DataOf(const std::string& name) const {
  for (const auto& [own, data] : files_) {
    if (own == name) return data;
  }
  throw Error(PathOf(name) +
              " is missing; the files are manifest.json, step.so and "
              "state.safetensors");
}

std::string MemoryFiles::Read(const std::string& name, int64_t most) const {
  InputMemory input(DataOf(name));
  return Text(&input, most, PathOf(name));
}

File MemoryFiles::ReadTensors(const std::string& name) const {
  InputMemory input(DataOf(name));
  return TensorsIn(&input, PathOf(name));
}

bool Folder::HasChanged() const {
  struct stat now;
  return fstatat(handle_.number(), first_.c_str(), &now, 0) != 0 || !IsSame(status_, now);
}

bool Folder::IsReplaced() const {
  struct stat now;
  return stat(PathOf(first_).c_str(), &now) != 0 || !IsSame(status_, now);
}

namespace {

/// Returns a text for a message, with escapes for all that is not ASCII.
std::string Escaped(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string escaped;
  for (char character : text.substr(0, 100)) {
    auto byte = static_cast<unsigned char>(character);
    if (byte >= 0x20 && byte < 0x7f) {
      escaped += character;
    } else {
      escaped += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return escaped;
}

}  // namespace

void WriteTensors(const std::string& path, const Tensors& tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::string text;
  auto add = [&](const std::string& key, const std::string& value) {
    text += (text.empty() ? "{" : ",") + Quoted(key) + ":" + value;
  };
  std::string more = "{" + Quoted(kChecksum) + ":" + Quoted(kNoChecksum);
  for (const auto& [key, value] : metadata) more += "," + Quoted(key) + ":" + Quoted(value);
  add("__metadata__", more + "}");
  std::vector<std::pair<const void*, size_t>> parts(2);
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (name == "__metadata__") throw Error(name + " cannot be the name of a tensor in a file");
    if (!IsUtf8(name))
      throw Error("the name of a tensor must be UTF-8, but it is " + Escaped(name));
    if (!tensor.defined()) throw Error(name + " is no tensor");
    if (!tensor.IsContiguous()) throw Error(name + " has strides, which files do not support");
    std::string name_of_dtype = DtypeName(tensor);
    const Dtype* dtype = DtypeOf(name_of_dtype);
    if (!dtype)
      throw Error(name + " has the dtype " + name_of_dtype + ", which files do not support");
    std::string shape;
    for (int64_t extent : ShapeOf(tensor))
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    int64_t size = static_cast<int64_t>(ffi::GetDataSize(*tensor.GetDLTensorPtr()));
    add(name, "{\"dtype\":" + Quoted(dtype->in_file) + ",\"shape\":[" + shape +
                  "],\"data_offsets\":[" + std::to_string(offset) + "," +
                  std::to_string(offset + size) + "]}");
    offset += size;
    parts.emplace_back(tensor.data_ptr(), static_cast<size_t>(size));
  }
  text += "}";
  while (text.size() % 8) text += ' ';
  if (text.size() > kMaxHeader) {
    throw Error("its header would have " + std::to_string(text.size()) + " bytes, more than " +
                std::to_string(kMaxHeader));
  }
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  uint32_t checksum = Crc32(text.data(), text.size(), Crc32(length, sizeof length));
  for (size_t i = 2; i < parts.size(); ++i) {
    checksum = Crc32(parts[i].first, parts[i].second, checksum);
  }
  text.replace(*PlaceOfChecksum(text), 8, HexOf(checksum));
  parts[0] = {length, sizeof length};
  parts[1] = {text.data(), text.size()};
  WriteFile(path, parts);
}

Tensor MakeTensor(const std::vector<int64_t>& shape, const std::string& dtype) {
  for (int64_t extent : shape) {
    if (extent < 0) throw Error("a tensor cannot have the shape " + ShapeText(shape));
  }
  return Guarded("MakeTensor", [&] {
    DLDataType type = ffi::StringToDLDataType(ffi::String(dtype));
    if (!Bytes(shape, Width(type)).has_value())
      throw Error("a tensor of " + dtype + " cannot have the shape " + ShapeText(shape));
    return Tensor::FromNDAlloc(HostAllocator(), ffi::ShapeView(shape.data(), shape.size()), type,
                               DLDevice{kDLCPU, 0});
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
    throw Error(std::string("the values of a tensor of ") + DtypeName(tensor) +
                " cannot be read as " + NameOf<T>());
  }
  if (!tensor.IsContiguous()) throw Error("the values of a tensor with strides cannot be read");
  const T* data = static_cast<const T*>(tensor.data_ptr());
  return std::vector<T>(data, data + tensor.numel());
}

#define RELAX_GRAD_INSTANTIATE(T)                                                    \
  template Tensor MakeTensor<T>(const std::vector<int64_t>&, const std::vector<T>&); \
  template std::vector<T> Values<T>(const Tensor&);
RELAX_GRAD_INSTANTIATE(float)
RELAX_GRAD_INSTANTIATE(double)
RELAX_GRAD_INSTANTIATE(int32_t)
RELAX_GRAD_INSTANTIATE(int64_t)
RELAX_GRAD_INSTANTIATE(uint8_t)
#undef RELAX_GRAD_INSTANTIATE

std::string DtypeName(const Tensor& tensor) {
  return std::string(ffi::DLDataTypeToString(tensor.dtype()));
}

Tensors LoadTensors(const std::string& path) {
  return Guarded(path, [&] { return ReadTensors(path).tensors; });
}

void SaveTensors(const std::string& path, const Tensors& tensors) {
  Guarded(path, [&] { WriteTensors(path, tensors, {}); });
}

}  // namespace relax_grad
