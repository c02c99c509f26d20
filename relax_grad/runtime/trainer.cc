#include "trainer.h"

#include "checksum.h"
#include "files.h"
#include "index_ranges.h"
#include "machine.h"
#include "manifest.h"
#include "outcome.h"
#include "safetensors.h"
#include "state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

namespace relax_grad {

namespace {

// The folders that take the name of one another while they are opened, before that is an error.
constexpr int kMostReplaced = 20;

/// Throws if a tensor has another type; symbols get their values from the first tensor that has
/// them.
void Check(const std::string& what, const Tensor& tensor, const TensorType& spec,
           std::map<std::string, int64_t>* symbols) {
  if (!tensor.defined()) throw Error(what + " is no tensor");
  if (tensor.device().device_type != kDLCPU) throw Error(what + " must be on the CPU");
  if (!tensor.IsContiguous()) throw Error(what + " has strides; give a copy without them");
  if (tensor.byte_offset() != 0 ||
      reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment != 0) {
    throw Error(what + " must be in memory that is aligned to " + std::to_string(kAlignment) +
                " bytes, as that of MakeTensor");
  }
  std::vector<int64_t> shape = ShapeOf(tensor);
  bool fits = shape.size() == spec.shape.size() && DtypeName(tensor) == spec.dtype;
  std::ostringstream wanted;
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    wanted << (i ? ", " : "");
    wanted << (spec.symbols[i].empty() ? std::to_string(spec.shape[i]) : spec.symbols[i]);
    if (!fits) continue;
    if (spec.symbols[i].empty()) {
      fits = shape[i] == spec.shape[i];
    } else {
      fits = symbols->emplace(spec.symbols[i], shape[i]).first->second == shape[i];
    }
  }
  if (!fits) {
    throw Error(what + " must have shape (" + wanted.str() + ") and dtype " + spec.dtype +
                ", but it has " + ShapeText(shape) + " and " + DtypeName(tensor));
  }
}

double Scalar(const Tensor& tensor) {
  std::string dtype = DtypeName(tensor);
  if (dtype == "float64") return *static_cast<const double*>(tensor.data_ptr());
  if (dtype == "float32") return *static_cast<const float*>(tensor.data_ptr());
  if (dtype != "bfloat16" && dtype != "float16") throw Error("a scalar has the dtype " + dtype);
  uint16_t bits = *static_cast<const uint16_t*>(tensor.data_ptr());
  if (dtype == "bfloat16") {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return exponent ? sign * std::ldexp(1024 + fraction, exponent - 25)
                  : sign * std::ldexp(fraction, -24);
}

std::vector<Tensor> TensorsOf(const ffi::Any& value) {
  if (auto tensor = value.as<Tensor>()) return {*tensor};
  std::vector<Tensor> tensors;
  for (const ffi::Any& field : value.cast<ffi::Array<ffi::Any>>()) {
    for (const Tensor& tensor : TensorsOf(field)) tensors.push_back(tensor);
  }
  return tensors;
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(const std::string& folder, const Options& options) : options_(options) {
    if (options_.num_threads < 0) {
      throw Error("num_threads must not be negative, but it is " +
                  std::to_string(options_.num_threads));
    }
    for (int left = kMostReplaced;; --left) {
      Folder files(folder, "manifest.json");
      try {
        Open(files);
        if (!files.HasChanged()) break;
      } catch (const Error&) {
        if (left == 0 || !files.IsReplaced()) throw;
        continue;
      }
      if (left == 0) throw Error(folder + " is replaced again and again while it is opened");
    }
    for (const TensorType& type : manifest_.batch) batch_names_.push_back(type.name);
    for (const TensorType& type : manifest_.inputs) input_names_.push_back(type.name);
    for (const auto& [name, value] : manifest_.hyperparameters) hyperparameters_[name] = value;
  }

  StepResult Step(const std::vector<Tensor>& batch,
                  const std::map<std::string, double>& hyperparameters) {
    CheckWhole();
    if (batch.size() != manifest_.batch.size()) {
      std::string names;
      for (const TensorType& type : manifest_.batch)
        names += (names.empty() ? "" : ", ") + type.name;
      throw Error("the step takes " + std::to_string(manifest_.batch.size()) + " tensors (" +
                  names + "), but " + std::to_string(batch.size()) + " were given");
    }
    CheckCounters(counters_, "the step");
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < batch.size(); ++i) {
      Check(manifest_.batch[i].name, batch[i], manifest_.batch[i], &symbols);
      arguments.emplace_back(batch[i]);
    }
    if (options_.check_inputs) CheckRanges(manifest_.ranges, manifest_.batch, batch, symbols);
    Begin(symbols);
    std::map<std::string, double> scalars = hyperparameters_;
    for (const auto& [name, value] : hyperparameters) {
      if (!scalars.count(name)) throw Error("the step has no hyperparameter " + name);
      if (!std::isfinite(value))
        throw Error(name + " must be finite, but it is " + std::to_string(value));
      scalars[name] = value;
    }
    for (const auto& [name, value] : manifest_.hyperparameters) {
      arguments.emplace_back(MakeTensor<double>({}, {scalars[name]}));
    }
    int64_t seed = counters_.seed << 32 | (counters_.steps & 0xFFFFFFFF);
    arguments.emplace_back(MakeTensor<int64_t>({}, {seed}));
    for (const char* group : kGroups) arguments.emplace_back(groups_.at(group));
    bool updates = IsUpdate(counters_.steps, counters_.skipped, manifest_.accumulate);
    const ffi::Function& step = machine_->step(updates);
    StepResult result{0, {}, {}, true};
    for (const std::string& name : manifest_.metrics) result.metrics[name] = 0;
    for (const std::string& name : manifest_.outputs) result.outputs[name];
    ffi::Array<Tensor> params, states, optimizer_state;
    // The step writes new values to the memory of old ones.
    is_whole_ = false;
    try {
      Guarded("the step failed", [&] {
        auto fields = Call(step, arguments).cast<ffi::Array<ffi::Any>>();
        result.loss = Scalar(fields[0].cast<Tensor>());
        auto metrics = fields[1].cast<ffi::Array<Tensor>>(),
             outputs = fields[2].cast<ffi::Array<Tensor>>();
        for (size_t i = 0; i < manifest_.metrics.size(); ++i) {
          result.metrics[manifest_.metrics[i]] = Scalar(metrics[i]);
        }
        for (size_t i = 0; i < manifest_.outputs.size(); ++i) {
          result.outputs[manifest_.outputs[i]] = outputs[i];
        }
        params = fields[3].cast<ffi::Array<Tensor>>();
        states = fields[4].cast<ffi::Array<Tensor>>();
        optimizer_state = fields[5].cast<ffi::Array<Tensor>>();
      });
    } catch (const Error& error) {
      throw Error(error.what() + std::string("; ") + kHalf);
    }
    bool is_finite = std::isfinite(result.loss);
    auto applied = result.metrics.find("applied");
    bool is_applied = applied == result.metrics.end() || applied->second == 1.0;
    Outcome outcome = OutcomeOf(is_finite, is_applied, result.metrics.count("loss_scale") != 0);
    bool raises = outcome.raises && !options_.skip_nonfinite;
    if (!raises) {
      // No exception ends the commit.
      counters_.steps += 1;
      if (outcome.is_skipped) counters_.skipped += 1;
      if (outcome.takes_results) {
        groups_.find("params")->second = std::move(params);
        groups_.find("states")->second = std::move(states);
        groups_.find("optimizer_state")->second = std::move(optimizer_state);
      }
      if (updates && outcome.is_applied) counters_.updates += 1;
    }
    is_whole_ = true;
    if (raises) {
      throw NotFiniteError(
          (is_finite ? "a gradient is not finite" : "the loss is " + std::to_string(result.loss)) +
          std::string(" in step ") + std::to_string(counters_.steps) +
          "; everything is as before the step");
    }
    result.applied = outcome.is_applied;
    return result;
  }

  std::vector<Tensor> Predict(const std::vector<Tensor>& inputs) {
    CheckWhole();
    if (manifest_.forward.empty()) throw Error("the exported model has no function for prediction");
    if (inputs.size() != manifest_.inputs.size()) {
      throw Error("the model takes " + std::to_string(manifest_.inputs.size()) + " inputs, but " +
                  std::to_string(inputs.size()) + " were given");
    }
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Check(manifest_.inputs[i].name, inputs[i], manifest_.inputs[i], &symbols);
      arguments.emplace_back(inputs[i]);
    }
    if (options_.check_inputs)
      CheckRanges(manifest_.input_ranges, manifest_.inputs, inputs, symbols);
    Begin(symbols);
    std::map<std::string, Tensor> known;
    for (const char* group : {"params", "frozen", "states"}) {
      for (const auto& [name, tensor] : Group(group)) known[name] = tensor;
    }
    for (const std::string& name : manifest_.values) arguments.emplace_back(known.at(name));
    return Guarded("the prediction failed",
                   [&] { return TensorsOf(Call(machine_->predict(), arguments)); });
  }

  Tensors Group(const std::string& name) const {
    CheckWhole();
    auto group = groups_.find(name);
    if (group == groups_.end())
      throw Error("there is no group " + name + ": params, frozen, states, optimizer_state");
    Tensors tensors;
    const std::vector<TensorType>& specs = manifest_.groups.at(name);
    for (size_t i = 0; i < specs.size(); ++i) tensors[specs[i].name] = group->second[i];
    return tensors;
  }

  void Save(const std::string& path) const {
    Tensors tensors;
    for (const char* group : kGroups) {
      for (const auto& [name, tensor] : Group(group))
        tensors[std::string(group) + "/" + name] = tensor;
    }
    CheckCounters(Whole(), path);
    std::string text = DescribedText({kVersion, manifest_.step, counters_, history_, more_});
    Guarded(path, [&] { WriteTensors(path, tensors, {{kFormat, text}}); });
  }

  void Load(const std::string& path) {
    File file = Guarded(path, [&] { return ReadTensors(path); });
    Take(file, DescribedIn(file, path), path);
  }

  /// The counters, unless a step has failed halfway.
  Counters& Whole() {
    CheckWhole();
    return counters_;
  }
  const Counters& Whole() const {
    CheckWhole();
    return counters_;
  }

  Manifest manifest_;
  std::vector<std::string> batch_names_, input_names_;
  std::map<std::string, double> hyperparameters_;
  // It comes before the tensors in its memory, which are freed first.
  std::optional<Machine> machine_;

 private:
  static constexpr const char* kHalf =
      "it may have written a part of the new state, so that no call but Load works";

  /// Throws if the state may be that of no step.
  void CheckWhole() const {
    if (!is_whole_) throw Error(std::string("an earlier step failed: ") + kHalf);
  }

  void Open(const Folder& folder) {
    std::string where = folder.PathOf("manifest.json");
    manifest_ = Guarded(
        where, [&] { return ParseManifest(folder.Read("manifest.json", kMaxHeader), where); });
    std::string library = folder.PathOf(manifest_.library);
    SetThreads();
    Guarded(library, [&] {
      std::string data = folder.Read(manifest_.library, manifest_.library_bytes);
      machine_.emplace(manifest_, data, library, options_.level);
    });
    std::string path = folder.PathOf(manifest_.state);
    File file = Guarded(path, [&] { return folder.ReadTensors(manifest_.state); });
    Described described = DescribedIn(file, path);
    bool is_own = manifest_.state_checksum.empty() || file.checksum == manifest_.state_checksum;
    if (!is_own && (manifest_.step.empty() || described.step != manifest_.step)) {
      throw Error(path + " is of another step than " + library + ": its checksum is " +
                  file.checksum + ", but " + manifest_.state_checksum +
                  " was exported; open a folder with its own state, and Load others after that");
    }
    Take(file, std::move(described), path);
  }

  static Described DescribedIn(const File& file, const std::string& path) {
    auto text = file.metadata.find(kFormat);
    if (text == file.metadata.end()) throw Error(path + " has no state of training");
    Described described = Guarded(path, [&] { return ParseDescribed(text->second, path); });
    if (described.version >= kFirstWithChecksum && file.checksum.empty()) {
      throw Error(path + " is damaged: it has no checksum");
    }
    return described;
  }

  /// Takes the state of a file.
  void Take(const File& file, Described described, const std::string& path) {
    std::map<std::string, ffi::Array<Tensor>> groups;
    size_t count = 0;
    for (const char* group : kGroups) {
      ffi::Array<Tensor> tensors;
      for (const TensorType& spec : manifest_.groups.at(group)) {
        std::string name = std::string(group) + "/" + spec.name;
        auto tensor = file.tensors.find(name);
        if (tensor == file.tensors.end())
          throw Error(path + " lacks " + name + "; it was written by a trainer of another step");
        Check(path + ": " + name, tensor->second, spec, nullptr);
        tensors.push_back(tensor->second);
        ++count;
      }
      groups[group] = tensors;
    }
    if (count != file.tensors.size())
      throw Error(
          path +
          " has tensors that the step does not; it was written by a trainer of another step");
    groups_.swap(groups);
    counters_ = described.counters;
    history_.swap(described.history);
    more_.swap(described.more);
    is_whole_ = true;
  }

  /// Prepares TVM's runtime for a call. The memory of tensors of other symbolic extents is freed,
  /// which TVM would keep for each size.
  void Begin(const std::map<std::string, int64_t>& extents) {
    SetThreads();
    if (extents == extents_) return;
    if (auto free = ffi::Function::GetGlobal("vm.builtin.memory_manager.clear")) (*free)();
    extents_ = extents;
  }

  /// Sets the number of threads that work for the calling thread.
  void SetThreads() const {
    // TVM's pool belongs to the thread that calls.
    static thread_local int set = 0;
    if (options_.num_threads == 0 || options_.num_threads == set) return;
    Guarded("num_threads", [&] {
      auto configure = ffi::Function::GetGlobal("runtime.config_threadpool");
      if (!configure.has_value()) throw Error("TVM's runtime has no runtime.config_threadpool");
      // 1: the fastest cores first, one thread on each.
      (*configure)(1, options_.num_threads);
    });
    set = options_.num_threads;
  }

  Options options_;
  std::map<std::string, int64_t> extents_;
  std::map<std::string, ffi::Array<Tensor>> groups_;
  Counters counters_;
  std::string history_, more_;
  /// Whether the groups and the counters are those of one moment.
  bool is_whole_ = true;
};

Trainer::Trainer(const std::string& folder, const Options& options)
    : impl_(new Impl(folder, options)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

StepResult Trainer::Step(const std::vector<Tensor>& batch,
                         const std::map<std::string, double>& hyperparameters) {
  return impl_->Step(batch, hyperparameters);
}
std::vector<Tensor> Trainer::Predict(const std::vector<Tensor>& inputs) {
  return impl_->Predict(inputs);
}
void Trainer::Save(const std::string& path) const { impl_->Save(path); }
void Trainer::Load(const std::string& path) { impl_->Load(path); }
const std::string& Trainer::level() const { return impl_->machine_->level(); }
const std::vector<std::string>& Trainer::batch_names() const { return impl_->batch_names_; }
const std::vector<std::string>& Trainer::input_names() const { return impl_->input_names_; }
const std::vector<TensorType>& Trainer::batch_types() const { return impl_->manifest_.batch; }
const std::vector<TensorType>& Trainer::input_types() const { return impl_->manifest_.inputs; }
const std::map<std::string, double>& Trainer::hyperparameters() const {
  return impl_->hyperparameters_;
}
Tensors Trainer::group(const std::string& name) const { return impl_->Group(name); }
Counters& Trainer::counters() { return impl_->Whole(); }
const Counters& Trainer::counters() const { return std::as_const(*impl_).Whole(); }

}  // namespace relax_grad
