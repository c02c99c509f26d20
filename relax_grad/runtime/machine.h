/// The compiled functions of an exported step.
#ifndef RELAX_GRAD_RUNTIME_MACHINE_H_
#define RELAX_GRAD_RUNTIME_MACHINE_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.h"

namespace relax_grad {

class Machine {
 public:
  /// Loads a library from its bytes, after they are examined.
  ///
  /// @param where The file that the bytes are from, for errors.
  /// @param level The level of x86-64 whose version runs; empty for the highest one.
  Machine(const Manifest& manifest, std::string_view data, const std::string& where,
          const std::string& level);

  /// The level whose version runs; empty if the library was compiled for one processor.
  const std::string& level() const { return level_; }
  const tvm::ffi::Function& step(bool updates) const { return updates ? *step_ : *accumulate_; }
  /// The function that takes the memory of a step, with the same arguments; none in older folders.
  const std::optional<tvm::ffi::Function>& memory(bool updates) const {
    return updates ? step_memory_ : accumulate_memory_;
  }
  const tvm::ffi::Function& predict() const { return *predict_; }

 private:
  std::string level_;
  // The module owns the functions' machine.
  std::optional<tvm::ffi::Module> machine_;
  std::optional<tvm::ffi::Function> step_, accumulate_, predict_, step_memory_, accumulate_memory_;
};

tvm::ffi::Any Call(const tvm::ffi::Function& function, const std::vector<tvm::ffi::Any>& arguments);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_MACHINE_H_
