#include "private_library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "error.h"
#include "handle.h"

namespace relax_grad {

namespace {

namespace ffi = tvm::ffi;

void Write(int handle, std::string_view data, const std::string& where) {
  while (!data.empty()) {
    ssize_t written = write(handle, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw Error(where + " cannot be copied: " + std::strerror(errno));
    data.remove_prefix(static_cast<size_t>(written));
  }
}

ffi::Module Load(const std::string& path) {
  // Module::LoadFromFile takes the format from the name, which has no suffix here.
  auto load = ffi::Function::GetGlobal("ffi.Module.load_from_file.so");
  if (!load.has_value()) throw Error("TVM's runtime has no ffi.Module.load_from_file.so");
  return (*load)(ffi::String(path), ffi::String("so")).cast<ffi::Module>();
}

#ifdef __linux__
/// Tells whether the process has a library of this path, which may be of another file.
bool IsLoaded(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library) dlclose(library);
  return library != nullptr;
}

/// Returns the path of a file that is open; empty if the system has none.
std::string PathOf(int handle) {
  std::string path = "/proc/self/fd/" + std::to_string(handle);
  return access(path.c_str(), R_OK) == 0 ? path : "";
}
#endif

}  // namespace

ffi::Module LoadPrivately(std::string_view data, const std::string& where) {
#ifdef __linux__
  Handle memory(memfd_create("relax_grad step.so", MFD_CLOEXEC));
  if (memory.number() >= 0 && !PathOf(memory.number()).empty()) {
    Write(memory.number(), data, where);
    // The number of a file that was closed is given to the next one.
    std::vector<Handle> taken;
    int number = memory.number();
    while (IsLoaded(PathOf(number))) {
      taken.emplace_back(fcntl(memory.number(), F_DUPFD_CLOEXEC, number + 1));
      number = taken.back().number();
      if (number < 0) throw Error(where + " cannot be loaded: " + std::strerror(errno));
    }
    return Load(PathOf(number));
  }
#endif
  // Without memory for files, a file that has its name for a moment.
  std::error_code ignored;
  std::string path = std::filesystem::temp_directory_path(ignored).string();
  path = (path.empty() ? "/tmp" : path) + "/relax_grad_XXXXXX";
  Handle file(mkstemp(path.data()));
  if (file.number() < 0) throw Error(path + " cannot be written: " + std::strerror(errno));
  try {
    Write(file.number(), data, where);
    ffi::Module module = Load(path);
    unlink(path.c_str());
    return module;
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

}  // namespace relax_grad
