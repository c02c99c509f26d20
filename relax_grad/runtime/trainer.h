/// Training without Python: runs a step that relax_grad.training.TrainStep.export wrote to a
/// folder.
///
/// Needs C++17, TVM's runtime (libtvm_runtime) and tvm_ffi (libtvm_ffi). A trainer is used by one
/// thread at a time.
#ifndef RELAX_GRAD_RUNTIME_TRAINER_H_
#define RELAX_GRAD_RUNTIME_TRAINER_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "tensor_type.h"

namespace relax_grad {

using Tensor = tvm::ffi::Tensor;
/// Tensors by their names.
using Tensors = std::map<std::string, Tensor>;

/// Returns a new tensor whose values are not set.
///
/// @param shape The extents.
/// @param dtype The name of the dtype, such as "float32", "int64" or "bfloat16".
Tensor MakeTensor(const std::vector<int64_t>& shape, const std::string& dtype);

/// Returns a tensor with a copy of values, of the dtype of T: float, double, int32_t,
/// int64_t or uint8_t.
template <typename T>
Tensor MakeTensor(const std::vector<int64_t>& shape, const std::vector<T>& values);

/// Returns the elements of a tensor, which must have the dtype of T.
template <typename T>
std::vector<T> Values(const Tensor& tensor);

/// Returns the name of a tensor's dtype.
std::string DtypeName(const Tensor& tensor);

/// Reads a file of safetensors.
Tensors LoadTensors(const std::string& path);

/// Writes a file of safetensors; it is replaced when the new one is complete.
void SaveTensors(const std::string& path, const Tensors& tensors);

/// The results of one step.
struct StepResult {
  /// The loss, from before the update.
  double loss;
  /// The metrics by their names, such as "grad_norm".
  std::map<std::string, double> metrics;
  /// The model's outputs, if the step returns them.
  Tensors outputs;
  /// Whether the step has updated parameters, states and the optimizer's state: it was not skipped.
  bool applied;
};

/// The numbers of batches, updates, skipped steps and complete epochs, and of batches in the epoch
/// that has begun.
struct Counters {
  int64_t seed = 0, steps = 0, updates = 0, skipped = 0, epoch = 0, batch = 0;
};

struct Options {
  /// The threads of TVM's runtime; 0 leaves them as they are. TVM's runtime starts a thread pool
  /// for each thread that calls it: call a trainer from one thread.
  int num_threads = 0;
  /// Whether a step that is not finite is skipped; otherwise it is a NotFiniteError.
  bool skip_nonfinite = false;
  /// The level of x86-64 whose version runs, such as "x86-64-v3"; empty for the highest one that
  /// the processor has.
  std::string level;
  /// Whether integers of a batch that select rows of a table, elements or classes are examined; one
  /// out of range is an Error. Without the check, the compiled step computes NaN.
  bool check_inputs = true;
};

/// The bytes of the files of an exported folder, which the constructor reads.
struct MemoryFolder {
  /// manifest.json, step.so and state.safetensors.
  std::string_view manifest, library, state;
};

/// A model in training.
class Trainer {
 public:
  /// Loads the folder that TrainStep.export wrote, with its first state: the files of one export,
  /// even if it is exported anew meanwhile. The state may be one that was saved later by a trainer
  /// of the same step.
  explicit Trainer(const std::string& folder, const Options& options = {});
  /// Loads the files of such a folder from memory, which may be freed after the call.
  explicit Trainer(const MemoryFolder& files, const Options& options = {});
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  /// Runs a step, which is atomic: after an error, the state is as before the step. The step
  /// allocates its memory before it writes the first tensor. If it fails after that, every later
  /// call but Load is an error.
  ///
  /// @param batch The inputs and targets in the order of batch_names().
  /// @param hyperparameters Values by their names, such as "lr"; the others have their defaults.
  StepResult Step(const std::vector<Tensor>& batch,
                  const std::map<std::string, double>& hyperparameters = {});

  /// Returns the loss that Step would return, without an update: in training mode, with the
  /// defaults of the hyperparameters. It takes the time of a step, and memory for a copy of the
  /// state. A loss may be infinite or NaN.
  double Evaluate(const std::vector<Tensor>& batch);

  /// Returns the model's outputs in evaluation mode.
  ///
  /// @param inputs In the order of input_names(). A model that draws random numbers in evaluation
  /// mode takes a seed first,
  ///               a number of int64 without axes.
  std::vector<Tensor> Predict(const std::vector<Tensor>& inputs);

  /// Writes everything that training needs to go on, to a file that
  /// relax_grad.training.Trainer.load reads too.
  void Save(const std::string& path) const;
  /// Goes on from a file that Save or relax_grad.training.Trainer.save wrote.
  void Load(const std::string& path);

  /// Writes parameters, frozen parameters and states by their names to a file of safetensors,
  /// without the optimizer's state.
  void SaveModel(const std::string& path) const;
  /// Reads such a file; the optimizer's state and the counters stay. Copies of parameters in
  /// float32, from which parameters in half precision are updated, get the new values.
  void LoadModel(const std::string& path);

  /// The bytes of all tensors of a group, in the order of group(), without gaps.
  size_t GroupBytes(const std::string& name) const;
  /// Copies them to a buffer, whose size must be GroupBytes.
  void CopyGroup(const std::string& name, void* data, size_t size) const;
  /// Copies them from a buffer. Copies of parameters in float32 change as in LoadModel.
  void SetGroup(const std::string& name, const void* data, size_t size);

  /// Further values of the state, which Save writes and Load reads: those that the argument `more`
  /// of Trainer.save in Python has. The value of one that is no text is its JSON.
  std::vector<std::pair<std::string, std::string>> properties() const;
  /// Sets a further value to a text, or removes it.
  void SetProperty(const std::string& name, const std::optional<std::string>& text);

  /// The level of x86-64 whose version runs; empty if the library was compiled for one processor.
  const std::string& level() const;
  /// The names of the inputs and targets.
  const std::vector<std::string>& batch_names() const;
  /// The names of the inputs of Predict; empty if the model has no function for prediction.
  const std::vector<std::string>& input_names() const;
  /// The types of the inputs and targets, and of the inputs of Predict, in the order of their
  /// names.
  const std::vector<TensorType>& batch_types() const;
  const std::vector<TensorType>& input_types() const;
  /// The defaults of the hyperparameters.
  const std::map<std::string, double>& hyperparameters() const;
  /// The tensors of a group: "params", "frozen", "states" or "optimizer_state". A step writes to
  /// their memory.
  Tensors group(const std::string& name) const;
  /// The counters. Callers count epochs and batches of an epoch themselves.
  Counters& counters();
  const Counters& counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_TRAINER_H_
