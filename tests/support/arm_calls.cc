// Calls functions of a compiled library with tensors from a file, on a machine or an emulator
// without Python.
//
//   arm_calls LIBRARY TENSORS RESULTS
//
// LIBRARY has tensor functions, or a program of Relax. TENSORS is a file of safetensors with
// NAME/in/NUMBER for the arguments of the function NAME, and NAME/out/NUMBER for the results that a
// tensor function writes. RESULTS gets NAME/out/NUMBER.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <iostream>
#include <string>

#include "trainer.h"

namespace ffi = tvm::ffi;
using relax_grad::Tensor;
using relax_grad::Tensors;

namespace {

struct Call {
  std::map<int, Tensor> in, out;
};

std::map<std::string, Call> CallsIn(const Tensors& tensors) {
  std::map<std::string, Call> calls;
  for (const auto& [key, tensor] : tensors) {
    size_t last = key.rfind('/'), first = key.rfind('/', last - 1);
    Call& call = calls[key.substr(0, first)];
    (key.substr(first, last - first) == "/in" ? call.in
                                              : call.out)[std::stoi(key.substr(last + 1))] = tensor;
  }
  return calls;
}

ffi::Function Find(const ffi::Module& module, const std::string& name) {
  auto found = module->GetFunction(ffi::String(name));
  if (!found.has_value()) throw relax_grad::Error("the library has no function " + name);
  return *found;
}

void Flatten(const ffi::Any& value, const std::string& name, Tensors* results) {
  if (auto tensor = value.as<Tensor>()) {
    size_t number = 0;
    while (results->count(name + "/out/" + std::to_string(number))) ++number;
    results->emplace(name + "/out/" + std::to_string(number), *tensor);
    return;
  }
  for (const ffi::Any& each : value.cast<ffi::Array<ffi::Any>>()) Flatten(each, name, results);
}

void Run(const std::string& library, const std::string& given, const std::string& written) {
  ffi::Module module = ffi::Module::LoadFromFile(ffi::String(library));
  auto load = module->GetFunction(ffi::String("vm_load_executable"));
  if (load.has_value()) {
    module = (*load)().cast<ffi::Module>();
    Find(module, "vm_initialization")(static_cast<int>(kDLCPU), 0, 2);
  }
  Tensors results;
  for (const auto& [name, call] : CallsIn(relax_grad::LoadTensors(given))) {
    std::vector<ffi::AnyView> arguments;
    for (const auto& each : call.in) arguments.emplace_back(each.second);
    for (const auto& each : call.out) arguments.emplace_back(each.second);
    ffi::Any result;
    std::cerr << name << std::endl;  // the last line names the function that ends the process
    Find(module, name).CallPacked(arguments.data(), static_cast<int>(arguments.size()), &result);
    for (const auto& [number, each] : call.out)
      results.emplace(name + "/out/" + std::to_string(number), each);
    if (load.has_value()) Flatten(result, name, &results);
  }
  relax_grad::SaveTensors(written, results);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    Run(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
