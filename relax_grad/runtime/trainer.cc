#include "trainer.h"

#include "cpu_levels.h"
#include "files.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>

namespace relax_grad {

namespace {

constexpr int64_t kVersion = 1;
constexpr const char* kMetadata = "relax_grad.training";
// VirtualMachine.POOLED_ALLOCATOR of TVM.
constexpr int kPooledAllocator = 2;
const char* const kGroups[] = {"params", "frozen", "states", "optimizer_state"};

/// The type of a tensor in the manifest. An extent is a number, or the name of a symbol.
struct Spec {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<std::string> symbols;
};

Spec SpecOf(const json::Value& value, const std::string& where) {
  auto object = value.as<json::Object>();
  if (!object.has_value()) throw Error(where + " is damaged: a tensor is no object");
  Spec spec{GetText(*object, "name", where), GetText(*object, "dtype", where), {}, {}};
  for (const json::Value& each : Get<json::Array>(*object, "shape", where)) {
    auto number = each.as<int64_t>();
    auto symbol = each.as<ffi::String>();
    if (!number.has_value() && !symbol.has_value()) throw Error(where + " is damaged: the shape of " + spec.name);
    spec.shape.push_back(number.has_value() ? *number : -1);
    spec.symbols.push_back(number.has_value() ? "" : std::string(*symbol));
  }
  return spec;
}

std::vector<Spec> SpecsOf(const json::Object& object, const std::string& key, const std::string& where) {
  std::vector<Spec> specs;
  for (const json::Value& each : Get<json::Array>(object, key, where)) specs.push_back(SpecOf(each, where));
  return specs;
}

std::vector<std::string> TextsOf(const json::Object& object, const std::string& key, const std::string& where) {
  std::vector<std::string> texts;
  for (const json::Value& each : Get<json::Array>(object, key, where)) {
    auto text = each.as<ffi::String>();
    if (!text.has_value()) throw Error(where + " is damaged: " + key);
    texts.emplace_back(*text);
  }
  return texts;
}

/// Throws if a tensor has another type; symbols get their values from the first tensor that has them.
void Check(const std::string& what, const Tensor& tensor, const Spec& spec,
           std::map<std::string, int64_t>* symbols) {
  if (!tensor.defined()) throw Error(what + " is no tensor");
  if (tensor.device().device_type != kDLCPU) throw Error(what + " must be on the CPU");
  if (!tensor.IsContiguous()) throw Error(what + " has strides; give a copy without them");
  if (tensor.byte_offset() != 0 || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment != 0) {
    throw Error(what + " must be in memory that is aligned to " + std::to_string(kAlignment) + " bytes, as that of MakeTensor");
  }
  std::vector<int64_t> shape = ShapeOf(tensor);
  bool fits = shape.size() == spec.shape.size() && DtypeName(tensor) == spec.dtype;
  std::ostringstream wanted;
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    wanted << (i ? ", " : "");
    spec.symbols[i].empty() ? wanted << spec.shape[i] : wanted << spec.symbols[i];
    if (!fits) continue;
    if (spec.symbols[i].empty()) {
      fits = shape[i] == spec.shape[i];
    } else {
      fits = symbols->emplace(spec.symbols[i], shape[i]).first->second == shape[i];
    }
  }
  if (!fits) {
    throw Error(what + " must have shape (" + wanted.str() + ") and dtype " + spec.dtype + ", but it has " +
                ShapeText(shape) + " and " + DtypeName(tensor));
  }
}

double Scalar(const Tensor& tensor) {
  std::string dtype = DtypeName(tensor);
  if (dtype == "float64") return *static_cast<const double*>(tensor.data_ptr());
  if (dtype == "float32") return *static_cast<const float*>(tensor.data_ptr());
  uint16_t bits = *static_cast<const uint16_t*>(tensor.data_ptr());
  if (dtype == "bfloat16") {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  if (dtype == "float16") {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return exponent ? sign * std::ldexp(1024 + fraction, exponent - 25) : sign * std::ldexp(fraction, -24);
  }
  throw Error("a scalar has the dtype " + dtype);
}

std::vector<Tensor> TensorsOf(const ffi::Any& value) {
  if (auto tensor = value.as<Tensor>()) return {*tensor};
  std::vector<Tensor> found;
  for (const ffi::Any& each : value.cast<ffi::Array<ffi::Any>>()) {
    for (const Tensor& tensor : TensorsOf(each)) found.push_back(tensor);
  }
  return found;
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(const std::string& folder, const Options& options) : options_(options) {
    std::string where = folder + "/manifest.json";
    json::Object manifest = ParseObject(ReadFile(where), where);
    if (GetText(manifest, "format", where) != kMetadata) throw Error(where + " is of another format");
    int64_t version = Get<int64_t>(manifest, "version", where);
    if (version != kVersion) {
      throw Error(where + " has version " + std::to_string(version) + " of the format, but this program reads version " +
                  std::to_string(kVersion));
    }
    batch_ = SpecsOf(manifest, "batch", where);
    for (const Spec& each : batch_) batch_names_.push_back(each.name);
    for (const json::Value& each : Get<json::Array>(manifest, "hyperparameters", where)) {
      auto object = each.as<json::Object>();
      if (!object.has_value()) throw Error(where + " is damaged: hyperparameters");
      std::string name = GetText(*object, "name", where);
      order_.push_back(name);
      hyperparameters_[name] = Get<double>(*object, "default", where);
    }
    for (const char* group : kGroups) specs_[group] = SpecsOf(manifest, group, where);
    metrics_ = TextsOf(manifest, "metrics", where);
    outputs_ = TextsOf(manifest, "outputs", where);
    accumulate_ = Get<int64_t>(manifest, "accumulate", where);
    levels_ = TextsOf(manifest, "levels", where);
    auto found = manifest.find(ffi::String("forward"));
    if (found != manifest.end()) {
      if (auto forward = (*found).second.as<json::Object>()) {
        forward_ = GetText(*forward, "name", where);
        inputs_ = SpecsOf(*forward, "inputs", where);
        for (const Spec& each : inputs_) input_names_.push_back(each.name);
        values_ = TextsOf(*forward, "values", where);
      }
    }
    std::string library = folder + "/" + GetText(manifest, "library", where);
    std::error_code reason;
    auto size = std::filesystem::file_size(library, reason);
    if (reason) throw Error(library + " cannot be read: " + reason.message());
    // A library that was cut short ends the process when it is loaded.
    int64_t expected = Get<int64_t>(manifest, "library_bytes", where);
    if (size != static_cast<uint64_t>(expected)) {
      throw Error(library + " is damaged: it has " + std::to_string(size) + " bytes, but " + std::to_string(expected) + " were exported");
    }
    Guarded(library, [&] { Start(library); });
    Load(folder + "/" + GetText(manifest, "state", where));
  }

  StepResult Step(const std::vector<Tensor>& batch, const std::map<std::string, double>& given) {
    if (batch.size() != batch_.size()) {
      std::string names;
      for (const Spec& each : batch_) names += (names.empty() ? "" : ", ") + each.name;
      throw Error("the step takes " + std::to_string(batch_.size()) + " tensors (" + names + "), but " +
                  std::to_string(batch.size()) + " were given");
    }
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < batch.size(); ++i) {
      Check(batch_[i].name, batch[i], batch_[i], &symbols);
      arguments.emplace_back(batch[i]);
    }
    std::map<std::string, double> scalars = hyperparameters_;
    for (const auto& [name, value] : given) {
      if (!scalars.count(name)) throw Error("the step has no hyperparameter " + name);
      if (!std::isfinite(value)) throw Error(name + " must be finite, but it is " + std::to_string(value));
      scalars[name] = value;
    }
    for (const std::string& name : order_) arguments.emplace_back(MakeTensor<double>({}, {scalars[name]}));
    int64_t seed = counters_.seed << 32 | (counters_.steps & 0xFFFFFFFF);
    arguments.emplace_back(MakeTensor<int64_t>({}, {seed}));
    for (const char* group : kGroups) arguments.emplace_back(groups_.at(group));
    // Skipped batches have no place among those of an accumulated gradient.
    bool updates = (counters_.steps - counters_.skipped + 1) % accumulate_ == 0;
    ffi::Array<ffi::Any> results = Guarded("the step failed", [&] {
      return Call(updates ? *step_ : *accumulate_step_, arguments).cast<ffi::Array<ffi::Any>>();
    });
    StepResult result{Scalar(results[0].cast<Tensor>()), {}, {}, true};
    ffi::Array<Tensor> metrics = results[1].cast<ffi::Array<Tensor>>();
    for (size_t i = 0; i < metrics_.size(); ++i) result.metrics[metrics_[i]] = Scalar(metrics[i]);
    ffi::Array<Tensor> outputs = results[2].cast<ffi::Array<Tensor>>();
    for (size_t i = 0; i < outputs_.size(); ++i) result.outputs[outputs_[i]] = outputs[i];
    // The same cases as in Trainer.step of Python.
    bool applied = !result.metrics.count("applied") || result.metrics["applied"] == 1.0;
    bool is_scaled = result.metrics.count("loss_scale") != 0;
    bool keeps = std::isfinite(result.loss) && (applied || is_scaled);
    if (!keeps && !options_.skip_nonfinite) {
      throw NotFiniteError((std::isfinite(result.loss) ? "a gradient is not finite" : "the loss is " + std::to_string(result.loss)) +
                           std::string(" in step ") + std::to_string(counters_.steps) + "; everything is as before the step");
    }
    counters_.steps += 1;
    if (!keeps || !applied) counters_.skipped += 1;
    if (keeps || is_scaled) {
      groups_["params"] = results[3].cast<ffi::Array<Tensor>>();
      groups_["states"] = results[4].cast<ffi::Array<Tensor>>();
      groups_["optimizer_state"] = results[5].cast<ffi::Array<Tensor>>();
    }
    if (updates && keeps && applied) counters_.updates += 1;
    result.applied = keeps && applied;
    return result;
  }

  std::vector<Tensor> Predict(const std::vector<Tensor>& inputs) {
    if (forward_.empty()) throw Error("the exported model has no function for prediction");
    if (inputs.size() != inputs_.size()) {
      throw Error("the model takes " + std::to_string(inputs_.size()) + " inputs, but " +
                  std::to_string(inputs.size()) + " were given");
    }
    std::map<std::string, int64_t> symbols;
    std::vector<ffi::Any> arguments;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Check(inputs_[i].name, inputs[i], inputs_[i], &symbols);
      arguments.emplace_back(inputs[i]);
    }
    std::map<std::string, Tensor> known;
    for (const char* group : {"params", "frozen", "states"}) {
      for (const auto& [name, tensor] : Group(group)) known[name] = tensor;
    }
    for (const std::string& name : values_) arguments.emplace_back(known.at(name));
    return Guarded("the prediction failed", [&] { return TensorsOf(Call(*predict_, arguments)); });
  }

  Tensors Group(const std::string& name) const {
    auto found = groups_.find(name);
    if (found == groups_.end()) throw Error("there is no group " + name + ": params, frozen, states, optimizer_state");
    Tensors tensors;
    const std::vector<Spec>& specs = specs_.at(name);
    for (size_t i = 0; i < specs.size(); ++i) tensors[specs[i].name] = found->second[i];
    return tensors;
  }

  void Save(const std::string& path) const {
    Tensors tensors;
    for (const char* group : kGroups) {
      for (const auto& [name, tensor] : Group(group)) tensors[std::string(group) + "/" + name] = tensor;
    }
    json::Object counters;
    auto set = [&](const char* name, int64_t value) { counters.Set(ffi::String(name), value); };
    set("seed", counters_.seed);
    set("steps", counters_.steps);
    set("updates", counters_.updates);
    set("skipped", counters_.skipped);
    set("epoch", counters_.epoch);
    set("batch", counters_.batch);
    json::Object described;
    described.Set(ffi::String("version"), kVersion);
    described.Set(ffi::String("counters"), counters);
    described.Set(ffi::String("history"), history_);
    described.Set(ffi::String("more"), more_);
    Guarded(path, [&] { WriteTensors(path, tensors, {{kMetadata, std::string(json::Stringify(described))}}); });
  }

  void Load(const std::string& path) {
    File file = Guarded(path, [&] { return ReadTensors(path); });
    auto text = file.metadata.find(kMetadata);
    if (text == file.metadata.end()) throw Error(path + " has no state of training");
    json::Object described = ParseObject(text->second, path);
    int64_t version = Get<int64_t>(described, "version", path);
    if (version != kVersion) {
      throw Error(path + " has version " + std::to_string(version) + " of the format, but this program reads version " +
                  std::to_string(kVersion));
    }
    json::Object counters = Get<json::Object>(described, "counters", path);
    Counters read;
    read.seed = Get<int64_t>(counters, "seed", path);
    read.steps = Get<int64_t>(counters, "steps", path);
    read.updates = Get<int64_t>(counters, "updates", path);
    read.skipped = Get<int64_t>(counters, "skipped", path);
    read.epoch = Get<int64_t>(counters, "epoch", path);
    read.batch = Get<int64_t>(counters, "batch", path);
    for (int64_t each : {read.seed, read.steps, read.updates, read.skipped, read.epoch, read.batch}) {
      if (each < 0) throw Error(path + " is damaged: a counter is " + std::to_string(each));
    }
    std::map<std::string, ffi::Array<Tensor>> groups;
    size_t count = 0;
    for (const char* group : kGroups) {
      ffi::Array<Tensor> tensors;
      for (const Spec& spec : specs_.at(group)) {
        std::string name = std::string(group) + "/" + spec.name;
        auto found = file.tensors.find(name);
        if (found == file.tensors.end()) throw Error(path + " lacks " + name + "; it was written by a trainer of another step");
        Check(path + ": " + name, found->second, spec, nullptr);
        tensors.push_back(found->second);
        ++count;
      }
      groups[group] = tensors;
    }
    if (count != file.tensors.size()) throw Error(path + " has tensors that the step does not; it was written by a trainer of another step");
    json::Object history = Get<json::Object>(described, "history", path);
    json::Object more = Get<json::Object>(described, "more", path);
    groups_ = groups;
    counters_ = read;
    history_ = history;
    more_ = more;
  }

  Counters counters_;
  std::vector<std::string> batch_names_, input_names_;
  std::string level_;
  std::map<std::string, double> hyperparameters_;

 private:
  void Start(const std::string& library) {
    if (options_.num_threads > 0) {
      auto configure = ffi::Function::GetGlobal("runtime.config_threadpool");
      if (!configure.has_value()) throw Error("TVM's runtime has no runtime.config_threadpool");
      // 1: the fastest cores first, one thread on each.
      (*configure)(1, options_.num_threads);
    }
    // dlopen searches the system's folders for a name without a slash.
    std::string path = library.find('/') == std::string::npos ? "./" + library : library;
    ffi::Module module = ffi::Module::LoadFromFile(ffi::String(path));
    ffi::Function load = Function(Version(module, library), "vm_load_executable");
    machine_ = load().cast<ffi::Module>();
    Function(*machine_, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    step_ = Function(*machine_, "step");
    if (accumulate_ > 1) accumulate_step_ = Function(*machine_, "accumulate");
    if (!forward_.empty()) predict_ = Function(*machine_, forward_);
  }

  /// Returns the executable of a library that this processor runs, and notes its level.
  ffi::Module Version(const ffi::Module& module, const std::string& library) {
    if (levels_.empty()) {
      if (!options_.level.empty()) throw Error(library + " was compiled for one processor, and has no version for " + options_.level);
      return module;
    }
    std::vector<ffi::Module> versions{module};
    for (bool has_more = true; has_more;) {
      has_more = false;
      for (const ffi::Any& each : versions.back()->imports()) {
        auto imported = each.cast<ffi::Module>();
        if (imported->kind() != std::string("relax.VMExecutable")) continue;
        versions.push_back(imported);
        has_more = true;
        break;
      }
    }
    if (versions.size() != levels_.size()) {
      throw Error(library + " has " + std::to_string(versions.size()) + " versions, but the manifest names " +
                  std::to_string(levels_.size()));
    }
    std::set<std::string> found = CpuLevels();
    std::string names;
    for (size_t i = levels_.size(); i-- > 0;) {
      bool is_wanted = options_.level.empty() || options_.level == levels_[i];
      if (is_wanted && found.count(levels_[i])) {
        level_ = levels_[i];
        return versions[i];
      }
      names = levels_[i] + (names.empty() ? "" : ", ") + names;
    }
    if (options_.level.empty()) throw Error(library + " has versions for " + names + ", but the processor has none of these levels");
    bool is_there = std::count(levels_.begin(), levels_.end(), options_.level) != 0;
    throw Error(is_there ? "the processor has no " + options_.level
                         : library + " has no version for " + options_.level + ", but for " + names);
  }

  static ffi::Function Function(const ffi::Module& module, const std::string& name) {
    auto found = module->GetFunction(ffi::String(name));
    if (!found.has_value()) throw Error("the library has no function " + name);
    return *found;
  }

  static ffi::Any Call(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    function.CallPacked(views.data(), static_cast<int>(views.size()), &result);
    return result;
  }

  Options options_;
  std::vector<Spec> batch_, inputs_;
  std::vector<std::string> order_, metrics_, outputs_, values_, levels_;
  std::map<std::string, std::vector<Spec>> specs_;
  std::map<std::string, ffi::Array<Tensor>> groups_;
  int64_t accumulate_ = 1;
  std::string forward_;
  // The module owns the functions' machine.
  std::optional<ffi::Module> machine_;
  std::optional<ffi::Function> step_, accumulate_step_, predict_;
  json::Object history_, more_;
};

Trainer::Trainer(const std::string& folder, const Options& options) : impl_(new Impl(folder, options)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

StepResult Trainer::Step(const std::vector<Tensor>& batch, const std::map<std::string, double>& hyperparameters) {
  return impl_->Step(batch, hyperparameters);
}
std::vector<Tensor> Trainer::Predict(const std::vector<Tensor>& inputs) { return impl_->Predict(inputs); }
void Trainer::Save(const std::string& path) const { impl_->Save(path); }
void Trainer::Load(const std::string& path) { impl_->Load(path); }
const std::string& Trainer::level() const { return impl_->level_; }
const std::vector<std::string>& Trainer::batch_names() const { return impl_->batch_names_; }
const std::vector<std::string>& Trainer::input_names() const { return impl_->input_names_; }
const std::map<std::string, double>& Trainer::hyperparameters() const { return impl_->hyperparameters_; }
Tensors Trainer::group(const std::string& name) const { return impl_->Group(name); }
Counters& Trainer::counters() { return impl_->counters_; }
const Counters& Trainer::counters() const { return impl_->counters_; }

}  // namespace relax_grad
