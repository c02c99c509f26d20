#include "trainer.h"

#include "arguments.h"
#include "checksum.h"
#include "files.h"
#include "extent_checks.h"
#include "index_ranges.h"
#include "machine.h"
#include "manifest.h"
#include "outcome.h"
#include "safetensors.h"
#include "state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

namespace relax_grad {

namespace {

// The folders that take the name of one another while they are opened, before that is an error.
constexpr int kMostReplaced = 20;

}  // namespace

class Trainer::Impl {
 public:
  Impl(const std::string& folder, const Options& options) : options_(options) {
    CheckOptions();
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
    NoteNames();
  }

  Impl(const MemoryFiles& files, const Options& options) : options_(options) {
    CheckOptions();
    Open(files);
    NoteNames();
  }

  double Evaluate(const std::vector<Tensor>& batch) {
    std::vector<ffi::Any> arguments = ArgumentsOf(batch, {});
    // The step writes to the memory of its last arguments.
    for (size_t i = arguments.size() - std::size(kGroups); i < arguments.size(); ++i) {
      ffi::Array<Tensor> copies;
      for (const Tensor& tensor : arguments[i].cast<ffi::Array<Tensor>>())
        copies.push_back(CopyOf(tensor));
      arguments[i] = copies;
    }
    bool updates = IsUpdate(counters_.steps, counters_.skipped, manifest_.accumulate);
    return Guarded("the evaluation failed", [&] {
      auto fields = Call(machine_->step(updates), arguments).cast<ffi::Array<ffi::Any>>();
      return ValueAt(fields[0].cast<Tensor>(), 0);
    });
  }

  StepResult Step(const std::vector<Tensor>& batch,
                  const std::map<std::string, double>& hyperparameters) {
    std::vector<ffi::Any> arguments = ArgumentsOf(batch, hyperparameters);
    bool updates = IsUpdate(counters_.steps, counters_.skipped, manifest_.accumulate);
    const ffi::Function& step = machine_->step(updates);
    StepResult result{0, {}, {}, true};
    for (const std::string& name : manifest_.metrics) result.metrics[name] = 0;
    for (const std::string& name : manifest_.outputs) result.outputs[name];
    ffi::Array<Tensor> params, states, optimizer_state;
    TakeMemory(updates, arguments);
    // The step writes new values to the memory of old ones.
    is_whole_ = false;
    try {
      Guarded("the step failed", [&] {
        auto fields = Call(step, arguments).cast<ffi::Array<ffi::Any>>();
        result.loss = ValueAt(fields[0].cast<Tensor>(), 0);
        auto metrics = fields[1].cast<ffi::Array<Tensor>>(),
             outputs = fields[2].cast<ffi::Array<Tensor>>();
        for (size_t i = 0; i < manifest_.metrics.size(); ++i) {
          result.metrics[manifest_.metrics[i]] = ValueAt(metrics[i], 0);
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
    CheckExtents(manifest_.input_checks, symbols);
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

  /// Parameters, frozen parameters and states by their names.
  Tensors Model() const {
    Tensors tensors;
    for (const char* group : kModel) {
      for (const auto& [name, tensor] : Group(group)) tensors[name] = tensor;
    }
    return tensors;
  }

  void LoadModel(const std::string& path) {
    CheckWhole();
    File file = Guarded(path, [&] { return ReadTensors(path); });
    std::map<std::string, ffi::Array<Tensor>> groups;
    size_t count = 0;
    for (const char* group : kModel) {
      for (const TensorType& spec : manifest_.groups.at(group)) {
        auto tensor = file.tensors.find(spec.name);
        if (tensor == file.tensors.end()) throw Error(path + " lacks " + spec.name);
        Check(path + ": " + spec.name, tensor->second, spec, nullptr);
        groups[group].push_back(tensor->second);
        ++count;
      }
    }
    if (count != file.tensors.size())
      throw Error(path + " has tensors that are no parameters or states of the step");
    TakeModel(&groups);
  }

  /// The bytes of the tensors of a group, in the order of their names.
  std::vector<std::pair<char*, size_t>> BytesOf(const std::string& name) const {
    std::vector<std::pair<char*, size_t>> parts;
    for (const auto& [own, tensor] : Group(name)) {
      parts.emplace_back(static_cast<char*>(tensor.data_ptr()),
                         ffi::GetDataSize(*tensor.GetDLTensorPtr()));
    }
    return parts;
  }

  void SetGroup(const std::string& name, const void* data, size_t size) {
    CheckSize(name, size);
    std::map<std::string, Tensor> copies;
    const char* at = static_cast<const char*>(data);
    for (const auto& [own, tensor] : Group(name)) {
      Tensor copy = CopyOf(tensor);
      size_t bytes = ffi::GetDataSize(*tensor.GetDLTensorPtr());
      if (bytes) std::memcpy(copy.data_ptr(), at, bytes);
      at += bytes;
      copies[own] = copy;
    }
    std::map<std::string, ffi::Array<Tensor>> groups;
    for (const TensorType& spec : manifest_.groups.at(name)) {
      CheckBooleans(spec.name, copies.at(spec.name));
      groups[name].push_back(copies.at(spec.name));
    }
    TakeModel(&groups);
  }

  void CheckSize(const std::string& name, size_t size) const {
    size_t own = 0;
    for (const auto& [data, bytes] : BytesOf(name)) own += bytes;
    if (own != size) {
      throw Error("the group " + name + " has " + std::to_string(own) +
                  " bytes, but the buffer has " + std::to_string(size));
    }
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
  /// An object of JSON.
  std::string more_ = "{}";

 private:
  static constexpr const char* kHalf =
      "it may have written a part of the new state, so that no call but Load works";

  /// Throws if the state may be that of no step.
  void CheckWhole() const {
    if (!is_whole_) throw Error(std::string("an earlier step failed: ") + kHalf);
  }

  /// Returns the arguments of a step.
  std::vector<ffi::Any> ArgumentsOf(const std::vector<Tensor>& batch,
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
    CheckExtents(manifest_.checks, symbols);
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
    return arguments;
  }

  void CheckOptions() const {
    if (options_.num_threads < 0) {
      throw Error("num_threads must not be negative, but it is " +
                  std::to_string(options_.num_threads));
    }
  }

  void NoteNames() {
    for (const TensorType& type : manifest_.batch) batch_names_.push_back(type.name);
    for (const TensorType& type : manifest_.inputs) input_names_.push_back(type.name);
    for (const auto& [name, value] : manifest_.hyperparameters) hyperparameters_[name] = value;
  }

  void Open(const Files& folder) {
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

  /// Replaces the groups of the same names. The copies of parameters in float32 that
  /// the optimizer updates get the values of the parameters.
  void TakeModel(std::map<std::string, ffi::Array<Tensor>>* groups) {
    if (groups->count("params") && !groups->count("optimizer_state")) {
      std::map<std::string, Tensor> params;
      const std::vector<TensorType>& specs = manifest_.groups.at("params");
      for (size_t i = 0; i < specs.size(); ++i)
        params[kMaster + specs[i].name] = (*groups)["params"][i];
      ffi::Array<Tensor> slots;
      for (size_t i = 0; i < manifest_.groups.at("optimizer_state").size(); ++i) {
        auto param = params.find(manifest_.groups.at("optimizer_state")[i].name);
        Tensor slot = groups_.at("optimizer_state")[i];
        slots.push_back(param == params.end() ? slot : Float32Of(param->second));
      }
      (*groups)["optimizer_state"] = slots;
    }
    for (auto& [name, tensors] : *groups) groups_.find(name)->second = std::move(tensors);
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
    if (auto free = ffi::Function::GetGlobal("vm.builtin.memory_manager.clear")) {
      (*free)();
      ++Frees();
    }
    extents_ = extents;
  }

  /// The number of times that the memory of TVM's allocator was freed.
  static std::atomic<int64_t>& Frees() {
    static std::atomic<int64_t> frees{0};
    return frees;
  }

  /// Lets TVM's allocator have the memory that a step takes, so that a lack of memory is an error
  /// before the step.
  void TakeMemory(bool updates, const std::vector<ffi::Any>& arguments) {
    const auto& memory = machine_->memory(updates);
    int64_t frees = Frees(), &taken = updates ? step_taken_ : accumulate_taken_;
    if (!memory.has_value() || taken == frees) return;
    Guarded("the step did not begin", [&] { Call(*memory, arguments); });
    taken = frees;
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

  static constexpr const char* kModel[] = {"params", "frozen", "states"};
  // As in relax_grad/training/_slots.py.
  static constexpr const char* kMaster = "master/";

  Options options_;
  std::map<std::string, int64_t> extents_;
  std::map<std::string, ffi::Array<Tensor>> groups_;
  Counters counters_;
  std::string history_;
  /// The number of Frees when the allocator had the memory of a step; -1 for never.
  int64_t step_taken_ = -1, accumulate_taken_ = -1;
  /// Whether the groups and the counters are those of one moment.
  bool is_whole_ = true;
};

Trainer::Trainer(const std::string& folder, const Options& options)
    : impl_(new Impl(folder, options)) {}
Trainer::Trainer(const MemoryFolder& files, const Options& options)
    : impl_(new Impl(MemoryFiles({{"manifest.json", files.manifest},
                                  {"step.so", files.library},
                                  {"state.safetensors", files.state}}),
                     options)) {}
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
double Trainer::Evaluate(const std::vector<Tensor>& batch) { return impl_->Evaluate(batch); }
void Trainer::SaveModel(const std::string& path) const { SaveTensors(path, impl_->Model()); }
void Trainer::LoadModel(const std::string& path) { impl_->LoadModel(path); }
size_t Trainer::GroupBytes(const std::string& name) const {
  size_t size = 0;
  for (const auto& [data, bytes] : impl_->BytesOf(name)) size += bytes;
  return size;
}
void Trainer::CopyGroup(const std::string& name, void* data, size_t size) const {
  impl_->CheckSize(name, size);
  char* at = static_cast<char*>(data);
  for (const auto& [from, bytes] : impl_->BytesOf(name)) {
    if (bytes) std::memcpy(at, from, bytes);
    at += bytes;
  }
}
void Trainer::SetGroup(const std::string& name, const void* data, size_t size) {
  impl_->SetGroup(name, data, size);
}
std::vector<std::pair<std::string, std::string>> Trainer::properties() const {
  impl_->Whole();
  auto members = MembersOf(impl_->more_);
  for (auto& [name, value] : members) value = TextOf(value);
  return members;
}
void Trainer::SetProperty(const std::string& name, const std::optional<std::string>& text) {
  impl_->Whole();
  std::string changed = WithMember(impl_->more_, name, text);
  impl_->more_.swap(changed);
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
