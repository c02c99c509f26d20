/// The objects of C and the calls that all functions for C share.
#ifndef RELAX_GRAD_RUNTIME_C_API_H_
#define RELAX_GRAD_RUNTIME_C_API_H_

#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "handles.h"
#include "relax_grad_trainer.h"
#include "tensor_type.h"
#include "trainer.h"

namespace relax_grad {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// The types of inputs, with the pointers of C.
class Types {
 public:
  explicit Types(const std::vector<TensorType>& types) : types_(types), symbols_(types.size()) {
    for (size_t i = 0; i < types.size(); ++i) {
      for (const std::string& symbol : types[i].symbols) {
        symbols_[i].push_back(symbol.empty() ? nullptr : symbol.c_str());
      }
    }
  }
  const std::vector<TensorType>& all() const { return types_; }
  relax_grad_type At(size_t index) const {
    const TensorType& type = types_[index];
    return {type.name.c_str(), type.dtype.c_str(), static_cast<int64_t>(type.shape.size()),
            type.shape.data(), symbols_[index].data()};
  }

 private:
  // A vector in the trainer, which stays.
  const std::vector<TensorType>& types_;
  std::vector<std::vector<const char*>> symbols_;
};

}  // namespace relax_grad

struct relax_grad_trainer {
  /// @param files The path of a folder, or its files in memory.
  template <typename T>
  relax_grad_trainer(const T& files, const relax_grad::Options& options)
      : trainer(files, options),
        batch(trainer.batch_types()),
        inputs(trainer.input_types()),
        hyperparameters(trainer.hyperparameters().begin(), trainer.hyperparameters().end()) {}

  relax_grad::Trainer trainer;
  relax_grad::Types batch, inputs;
  std::vector<std::pair<std::string, double>> hyperparameters;
  /// Those of the last step. They are moved here, which needs no memory: the step is done.
  std::map<std::string, double> metrics;
  relax_grad::Tensors step_outputs;
  /// Those of the last prediction.
  relax_grad::NamedTensors outputs;
  /// The tensors of groups that were asked for since the last step.
  std::map<std::string, relax_grad::NamedTensors> groups;
  /// The further values that were asked for.
  std::vector<std::pair<std::string, std::string>> properties;
};

struct relax_grad_file {
  relax_grad::NamedTensors tensors;
};

namespace relax_grad {

Handles<relax_grad_trainer>& Trainers();

/// Keeps the reason of a failure for the thread that calls.
void Note(const char* reason) noexcept;

/// Runs a function; returns a code instead of an exception.
template <typename F>
int32_t Run(F function) noexcept {
  try {
    function();
    return RELAX_GRAD_OK;
  } catch (const NotFiniteError& error) {
    Note(error.what());
    return RELAX_GRAD_NOT_FINITE;
  } catch (const std::bad_alloc&) {
    Note("there is not enough memory");
  } catch (const std::exception& error) {
    Note(error.what());
  } catch (...) {
    Note("an exception of unknown type");
  }
  return RELAX_GRAD_ERROR;
}

template <typename T>
T* Pointer(T* pointer, const char* what) {
  if (pointer == nullptr) throw Error(std::string(what) + " is a null pointer");
  return pointer;
}

inline int64_t Number(size_t size) { return static_cast<int64_t>(size); }

size_t Place(int64_t index, size_t number, const char* what);

/// Returns a tensor with the pointers of C.
relax_grad_tensor View(const std::string& name, const Tensor& tensor);

/// Copies tensors of the caller, each of another name.
Tensors CopyAll(const relax_grad_tensor* buffers, int64_t number, const char* what);

/// Returns the inputs in the order of their types.
std::vector<Tensor> InOrder(const Types& types, const relax_grad_tensor* buffers, int64_t number,
                            const char* what);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_C_API_H_
