#include "trainer.h"

#include "checksum.h"
#include "cpu_levels.h"
#include "files.h"
#include "index_ranges.h"
#include "library.h"
#include "manifest.h"
#include "outcome.h"
#include "safetensors.h"
#include "state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>

namespace relax_grad {

namespace {

// VirtualMachine.POOLED_ALLOCATOR of TVM.
constexpr int kPooledAllocator = 2;

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
    std::string where = folder + "/manifest.json";
    manifest_ = Guarded(where, [&] { return ParseManifest(ReadFile(where, kMaxHeader), where); });
    for (const TensorType& type : manifest_.batch) batch_names_.push_back(type.name);
    for (const TensorType& type : manifest_.inputs) input_names_.push_back(type.name);
    for (const auto& [name, value] : manifest_.hyperparameters) hyperparameters_[name] = value;
    std::string library = folder + "/" + manifest_.library;
    Guarded(library, [&] {
      CheckLibrary(library);
      Start(library);
    });
    Load(folder + "/" + manifest_.state);
  }

  StepResult Step(const std::vector<Tensor>& batch,
                  const std::map<std::string, double>& hyperparameters) {
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
    StepResult result{0, {}, {}, true};
    ffi::Array<ffi::Any> results = Guarded("the step failed", [&] {
      auto fields =
          Call(updates ? *step_ : *accumulate_step_, arguments).cast<ffi::Array<ffi::Any>>();
      result.loss = Scalar(fields[0].cast<Tensor>());
      auto metrics = fields[1].cast<ffi::Array<Tensor>>(),
           outputs = fields[2].cast<ffi::Array<Tensor>>();
      for (size_t i = 0; i < manifest_.metrics.size(); ++i) {
        result.metrics[manifest_.metrics[i]] = Scalar(metrics[i]);
      }
      for (size_t i = 0; i < manifest_.outputs.size(); ++i) {
        result.outputs[manifest_.outputs[i]] = outputs[i];
      }
      return fields;
    });
    bool is_finite = std::isfinite(result.loss);
    auto applied = result.metrics.find("applied");
    bool is_applied = applied == result.metrics.end() || applied->second == 1.0;
    Outcome outcome = OutcomeOf(is_finite, is_applied, result.metrics.count("loss_scale") != 0);
    if (outcome.raises && !options_.skip_nonfinite) {
      throw NotFiniteError(
          (is_finite ? "a gradient is not finite" : "the loss is " + std::to_string(result.loss)) +
          std::string(" in step ") + std::to_string(counters_.steps) +
          "; everything is as before the step");
    }
    counters_.steps += 1;
    if (outcome.is_skipped) counters_.skipped += 1;
    if (outcome.takes_results) {
      groups_["params"] = results[3].cast<ffi::Array<Tensor>>();
      groups_["states"] = results[4].cast<ffi::Array<Tensor>>();
      groups_["optimizer_state"] = results[5].cast<ffi::Array<Tensor>>();
    }
    if (updates && outcome.is_applied) counters_.updates += 1;
    result.applied = outcome.is_applied;
    return result;
  }

  std::vector<Tensor> Predict(const std::vector<Tensor>& inputs) {
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
    return Guarded("the prediction failed", [&] { return TensorsOf(Call(*predict_, arguments)); });
  }

  Tensors Group(const std::string& name) const {
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
    CheckCounters(counters_, path);
    std::string text = DescribedText({kVersion, counters_, history_, more_});
    Guarded(path, [&] { WriteTensors(path, tensors, {{kFormat, text}}); });
  }

  void Load(const std::string& path) {
    File file = Guarded(path, [&] { return ReadTensors(path); });
    auto text = file.metadata.find(kFormat);
    if (text == file.metadata.end()) throw Error(path + " has no state of training");
    Described described = Guarded(path, [&] { return ParseDescribed(text->second, path); });
    if (described.version >= kFirstWithChecksum && !file.has_checksum) {
      throw Error(path + " is damaged: it has no checksum");
    }
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
    groups_ = groups;
    counters_ = described.counters;
    history_ = described.history;
    more_ = described.more;
  }

  Manifest manifest_;
  Counters counters_;
  std::vector<std::string> batch_names_, input_names_;
  std::string level_;
  std::map<std::string, double> hyperparameters_;

 private:
  /// Prepares TVM's runtime for a call. The memory of tensors of other symbolic extents is freed,
  /// which TVM would keep for each size.
  void Begin(const std::map<std::string, int64_t>& extents) {
    SetThreads();
    if (extents == extents_) return;
    if (auto free = ffi::Function::GetGlobal("vm.builtin.memory_manager.clear")) (*free)();
    extents_ = extents;
  }

  void CheckLibrary(const std::string& library) const {
    std::string data = ReadFile(library, manifest_.library_bytes);
    // A library that was cut short ends the process when it is loaded.
    if (data.size() != static_cast<uint64_t>(manifest_.library_bytes)) {
      throw Error(library + " is damaged: it has " + std::to_string(data.size()) + " bytes, but " +
                  std::to_string(manifest_.library_bytes) + " were exported");
    }
    CheckArchitecture(data, library);
    if (!manifest_.library_checksum.empty()) {
      CheckChecksum(Crc32(data.data(), data.size()), manifest_.library_checksum, library);
    }
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

  void Start(const std::string& library) {
    SetThreads();
    // dlopen searches the system's folders for a name without a slash.
    std::string path = library.find('/') == std::string::npos ? "./" + library : library;
    ffi::Module module = ffi::Module::LoadFromFile(ffi::String(path));
    ffi::Function load = GetFunction(SelectVersion(module, library), "vm_load_executable", library);
    machine_ = load().cast<ffi::Module>();
    GetFunction(*machine_, "vm_initialization", library)(static_cast<int>(kDLCPU), 0,
                                                         kPooledAllocator);
    // The seed, and the groups.
    size_t count =
        manifest_.batch.size() + manifest_.hyperparameters.size() + 1 + std::size(kGroups);
    step_ = FunctionOf("step", count, library);
    if (manifest_.accumulate > 1) accumulate_step_ = FunctionOf("accumulate", count, library);
    if (!manifest_.forward.empty()) {
      predict_ =
          FunctionOf(manifest_.forward, manifest_.inputs.size() + manifest_.values.size(), library);
    }
  }

  /// Returns the executable of a library that this processor runs, and notes its level.
  ffi::Module SelectVersion(const ffi::Module& module, const std::string& library) {
    if (manifest_.levels.empty()) {
      if (!options_.level.empty())
        throw Error(library + " was compiled for one processor, and has no version for " +
                    options_.level);
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
    if (versions.size() != manifest_.levels.size()) {
      throw Error(library + " has " + std::to_string(versions.size()) +
                  " versions, but the manifest names " + std::to_string(manifest_.levels.size()));
    }
    std::set<std::string> levels = CpuLevels();
    std::string names;
    for (size_t i = manifest_.levels.size(); i-- > 0;) {
      bool is_wanted = options_.level.empty() || options_.level == manifest_.levels[i];
      if (is_wanted && levels.count(manifest_.levels[i])) {
        level_ = manifest_.levels[i];
        return versions[i];
      }
      names = manifest_.levels[i] + (names.empty() ? "" : ", ") + names;
    }
    if (options_.level.empty())
      throw Error(library + " has versions for " + names +
                  ", but the processor has none of these levels");
    bool is_there =
        std::count(manifest_.levels.begin(), manifest_.levels.end(), options_.level) != 0;
    throw Error(is_there
                    ? "the processor has no " + options_.level
                    : library + " has no version for " + options_.level + ", but for " + names);
  }

  /// Returns a function of the machine; throws if it takes another number of arguments.
  ffi::Function FunctionOf(const std::string& name, size_t count,
                           const std::string& library) const {
    ffi::Function function = GetFunction(*machine_, name, library);
    ffi::Function arity = GetFunction(*machine_, "get_function_arity", library);
    int64_t taken = arity(ffi::String(name)).cast<int64_t>();
    if (taken != static_cast<int64_t>(count)) {
      throw Error(library + ": the function " + name + " takes " + std::to_string(taken) +
                  " arguments, but the manifest has " + std::to_string(count));
    }
    return function;
  }

  static ffi::Function GetFunction(const ffi::Module& module, const std::string& name,
                                   const std::string& library) {
    auto function = module->GetFunction(ffi::String(name));
    if (!function.has_value()) throw Error(library + " has no function " + name);
    return *function;
  }

  static ffi::Any Call(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    function.CallPacked(views.data(), static_cast<int>(views.size()), &result);
    return result;
  }

  Options options_;
  std::map<std::string, int64_t> extents_;
  std::map<std::string, ffi::Array<Tensor>> groups_;
  // The module owns the functions' machine.
  std::optional<ffi::Module> machine_;
  std::optional<ffi::Function> step_, accumulate_step_, predict_;
  std::string history_, more_;
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
const std::string& Trainer::level() const { return impl_->level_; }
const std::vector<std::string>& Trainer::batch_names() const { return impl_->batch_names_; }
const std::vector<std::string>& Trainer::input_names() const { return impl_->input_names_; }
const std::vector<TensorType>& Trainer::batch_types() const { return impl_->manifest_.batch; }
const std::vector<TensorType>& Trainer::input_types() const { return impl_->manifest_.inputs; }
const std::map<std::string, double>& Trainer::hyperparameters() const {
  return impl_->hyperparameters_;
}
Tensors Trainer::group(const std::string& name) const { return impl_->Group(name); }
Counters& Trainer::counters() { return impl_->counters_; }
const Counters& Trainer::counters() const { return impl_->counters_; }

}  // namespace relax_grad
