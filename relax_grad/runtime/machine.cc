#include "machine.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "checksum.h"
#include "cpu_levels.h"
#include "error.h"
#include "library.h"
#include "private_library.h"

namespace relax_grad {

namespace {

namespace ffi = tvm::ffi;

// VirtualMachine.POOLED_ALLOCATOR of TVM.
constexpr int kPooledAllocator = 2;

void CheckLibrary(const Manifest& manifest, std::string_view data, const std::string& library) {
  // A library that was cut short ends the process when it is loaded.
  if (data.size() != static_cast<uint64_t>(manifest.library_bytes)) {
    throw Error(library + " is damaged: it has " + std::to_string(data.size()) + " bytes, but " +
                std::to_string(manifest.library_bytes) + " were exported");
  }
  CheckArchitecture(data, library);
  if (!manifest.library_checksum.empty()) {
    CheckChecksum(Crc32(data.data(), data.size()), manifest.library_checksum, library);
  }
}

/// Returns the executable of a library that this processor runs, and notes its level.
ffi::Module SelectVersion(const ffi::Module& module, const Manifest& manifest,
                          const std::string& library, const std::string& wanted,
                          std::string* level) {
  if (manifest.levels.empty()) {
    if (!wanted.empty())
      throw Error(library + " was compiled for one processor, and has no version for " + wanted);
    return module;
  }
  std::vector<ffi::Module> versions{module};
  for (bool has_more = true; has_more;) {
    has_more = false;
    for (const ffi::Any& member : versions.back()->imports()) {
      auto imported = member.cast<ffi::Module>();
      if (imported->kind() != std::string("relax.VMExecutable")) continue;
      versions.push_back(imported);
      has_more = true;
      break;
    }
  }
  if (versions.size() != manifest.levels.size()) {
    throw Error(library + " has " + std::to_string(versions.size()) +
                " versions, but the manifest names " + std::to_string(manifest.levels.size()));
  }
  std::set<std::string> levels = CpuLevels();
  std::string names;
  for (size_t i = manifest.levels.size(); i-- > 0;) {
    bool is_wanted = wanted.empty() || wanted == manifest.levels[i];
    if (is_wanted && levels.count(manifest.levels[i])) {
      *level = manifest.levels[i];
      return versions[i];
    }
    names = manifest.levels[i] + (names.empty() ? "" : ", ") + names;
  }
  if (wanted.empty())
    throw Error(library + " has versions for " + names +
                ", but the processor has none of these levels");
  bool is_there = std::count(manifest.levels.begin(), manifest.levels.end(), wanted) != 0;
  throw Error(is_there ? "the processor has no " + wanted
                       : library + " has no version for " + wanted + ", but for " + names);
}

ffi::Function GetFunction(const ffi::Module& module, const std::string& name,
                          const std::string& library) {
  auto function = module->GetFunction(ffi::String(name));
  if (!function.has_value()) throw Error(library + " has no function " + name);
  return *function;
}

/// Returns a function of a machine; throws if it takes another number of arguments.
ffi::Function FunctionOf(const ffi::Module& machine, const std::string& name, size_t count,
                         const std::string& library) {
  ffi::Function function = GetFunction(machine, name, library);
  ffi::Function arity = GetFunction(machine, "get_function_arity", library);
  int64_t taken = arity(ffi::String(name)).cast<int64_t>();
  if (taken != static_cast<int64_t>(count)) {
    throw Error(library + ": the function " + name + " takes " + std::to_string(taken) +
                " arguments, but the manifest has " + std::to_string(count));
  }
  return function;
}

}  // namespace

Machine::Machine(const Manifest& manifest, std::string_view data, const std::string& where,
                 const std::string& level) {
  CheckLibrary(manifest, data, where);
  ffi::Module module = SelectVersion(LoadPrivately(data, where), manifest, where, level, &level_);
  machine_ = GetFunction(module, "vm_load_executable", where)().cast<ffi::Module>();
  GetFunction(*machine_, "vm_initialization", where)(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  // The seed, and the groups.
  size_t count = manifest.batch.size() + manifest.hyperparameters.size() + 1 + std::size(kGroups);
  step_ = FunctionOf(*machine_, "step", count, where);
  if (manifest.accumulate > 1) accumulate_ = FunctionOf(*machine_, "accumulate", count, where);
  auto memory_of = [&](const std::string& name) -> std::optional<ffi::Function> {
    if (!(*machine_)->GetFunction(ffi::String(name)).has_value()) return std::nullopt;
    return FunctionOf(*machine_, name, count, where);
  };
  step_memory_ = memory_of("step_memory");
  if (manifest.accumulate > 1) accumulate_memory_ = memory_of("accumulate_memory");
  if (!manifest.forward.empty()) {
    predict_ = FunctionOf(*machine_, manifest.forward,
                          manifest.inputs.size() + manifest.values.size(), where);
  }
}

ffi::Any Call(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
  std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
  ffi::Any result;
  function.CallPacked(views.data(), static_cast<int>(views.size()), &result);
  return result;
}

}  // namespace relax_grad
