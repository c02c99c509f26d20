#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "files.h"
#include "handles.h"
#include "manifest.h"
#include "relax_grad_trainer.h"
#include "state.h"
#include "trainer.h"

namespace {

using relax_grad::Error;
using relax_grad::Handles;
using relax_grad::Tensor;
using relax_grad::Tensors;
using relax_grad::TensorType;

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

}  // namespace

struct relax_grad_trainer {
  relax_grad_trainer(const std::string& folder, const relax_grad::Options& options)
      : trainer(folder, options),
        batch(trainer.batch_types()),
        inputs(trainer.input_types()),
        hyperparameters(trainer.hyperparameters().begin(), trainer.hyperparameters().end()) {}

  relax_grad::Trainer trainer;
  Types batch, inputs;
  std::vector<std::pair<std::string, double>> hyperparameters, metrics;
  NamedTensors outputs;
  /// The tensors of groups that were asked for since the last step.
  std::map<std::string, NamedTensors> groups;
};

struct relax_grad_file {
  NamedTensors tensors;
};

namespace {

thread_local std::string last_error;
thread_local bool has_no_memory_for_error = false;

// They are not destroyed: other threads may call while the program ends.
Handles<relax_grad_trainer>& Trainers() {
  static auto* trainers = new Handles<relax_grad_trainer>();
  return *trainers;
}
Handles<relax_grad_file>& FilesOpen() {
  static auto* files = new Handles<relax_grad_file>();
  return *files;
}

void Note(const char* reason) noexcept {
  try {
    last_error = reason;
    has_no_memory_for_error = false;
  } catch (...) {
    has_no_memory_for_error = true;
  }
}

/// Runs a function; returns a code in the place of an exception.
template <typename F>
int32_t Run(F function) noexcept {
  try {
    function();
    return RELAX_GRAD_OK;
  } catch (const relax_grad::NotFiniteError& error) {
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

int64_t Number(size_t size) { return static_cast<int64_t>(size); }

size_t Place(int64_t index, size_t number, const char* what) {
  if (index < 0 || static_cast<uint64_t>(index) >= number) {
    throw Error("there is no " + std::string(what) + " " + std::to_string(index) + ", but " +
                std::to_string(number) + " from 0");
  }
  return static_cast<size_t>(index);
}

relax_grad_tensor View(const std::pair<std::string, Tensor>& named) {
  const auto& [name, tensor] = named;
  const relax_grad::Dtype* dtype = relax_grad::DtypeOf(relax_grad::DtypeName(tensor));
  if (dtype == nullptr) {
    throw Error(name + " has the dtype " + relax_grad::DtypeName(tensor) +
                ", which C does not get");
  }
  if (!tensor.IsContiguous()) throw Error(name + " has strides, which C does not get");
  const DLTensor* view = tensor.GetDLTensorPtr();
  return {name.c_str(),
          dtype->name,
          view->ndim,
          view->shape,
          static_cast<char*>(view->data) + view->byte_offset,
          tvm::ffi::GetDataSize(*view)};
}

/// Copies a tensor of the caller, whose parts are examined first.
Tensor Copy(const relax_grad_tensor& buffer, const std::string& name) {
  const relax_grad::Dtype* dtype =
      relax_grad::DtypeOf(Pointer(buffer.dtype, (name + ": dtype").c_str()));
  if (dtype == nullptr) throw Error(name + ": there is no dtype " + buffer.dtype);
  if (buffer.num_axes < 0 || buffer.num_axes > Number(relax_grad::kMostAxes)) {
    throw Error(name + ": num_axes must be from 0 to " + std::to_string(relax_grad::kMostAxes) +
                ", but it is " + std::to_string(buffer.num_axes));
  }
  std::vector<int64_t> shape;
  if (buffer.num_axes) {
    Pointer(buffer.shape, (name + ": shape").c_str());
    shape.assign(buffer.shape, buffer.shape + buffer.num_axes);
  }
  for (int64_t extent : shape) {
    if (extent < 0) throw Error(name + " cannot have the shape " + relax_grad::ShapeText(shape));
  }
  auto size = relax_grad::Bytes(shape, dtype->bytes);
  if (!size || static_cast<uint64_t>(*size) != buffer.num_bytes) {
    throw Error(name + ": num_bytes is " + std::to_string(buffer.num_bytes) + ", but a tensor of " +
                dtype->name + " and shape " + relax_grad::ShapeText(shape) + " has " +
                (size ? std::to_string(*size) : "more than memory can hold"));
  }
  if (*size) Pointer(buffer.data, (name + ": data").c_str());
  const auto* bytes = static_cast<const unsigned char*>(buffer.data);
  if (dtype->name == std::string("bool")) {
    for (int64_t i = 0; i < *size; ++i) {
      if (bytes[i] > 1) throw Error(name + " has booleans that are neither 0 nor 1");
    }
  }
  Tensor tensor = relax_grad::MakeTensor(shape, dtype->name);
  if (*size) std::memcpy(tensor.data_ptr(), bytes, static_cast<size_t>(*size));
  return tensor;
}

/// Copies tensors of the caller, each of another name.
Tensors CopyAll(const relax_grad_tensor* buffers, int64_t number, const char* what) {
  if (number < 0) throw Error("number must not be negative, but it is " + std::to_string(number));
  if (number) Pointer(buffers, what);
  Tensors copies;
  for (int64_t i = 0; i < number; ++i) {
    std::string place = std::string(what) + "[" + std::to_string(i) + "]";
    std::string name = Pointer(buffers[i].name, (place + ": name").c_str());
    if (copies.count(name)) throw Error(name + " is given twice");
    copies[name] = Copy(buffers[i], name);
  }
  return copies;
}

/// Returns the inputs in the order of their types.
std::vector<Tensor> InOrder(const Types& types, const relax_grad_tensor* buffers, int64_t number,
                            const char* what) {
  Tensors copies = CopyAll(buffers, number, what);
  std::vector<Tensor> tensors;
  std::string names;
  for (const TensorType& type : types.all()) names += (names.empty() ? "" : ", ") + type.name;
  for (const TensorType& type : types.all()) {
    auto copy = copies.find(type.name);
    if (copy == copies.end()) throw Error(type.name + " is missing; the inputs are " + names);
    tensors.push_back(copy->second);
    copies.erase(copy);
  }
  if (!copies.empty()) {
    throw Error("there is no input " + copies.begin()->first + "; the inputs are " + names);
  }
  return tensors;
}

std::pair<std::string, double>& Hyperparameter(relax_grad_trainer& trainer, const char* name) {
  Pointer(name, "name");
  std::string names;
  for (auto& named : trainer.hyperparameters) {
    if (named.first == name) return named;
    names += (names.empty() ? "" : ", ") + named.first;
  }
  throw Error("the step has no hyperparameter " + std::string(name) + ", but " +
              (names.empty() ? "none" : names));
}

const NamedTensors& Group(relax_grad_trainer& trainer, const char* name) {
  auto group = trainer.groups.find(Pointer(name, "group"));
  if (group != trainer.groups.end()) return group->second;
  Tensors tensors = trainer.trainer.group(name);
  return trainer.groups[name] = NamedTensors(tensors.begin(), tensors.end());
}

}  // namespace

int32_t relax_grad_api_version(void) { return RELAX_GRAD_API_VERSION; }

const char* relax_grad_last_error(void) {
  return has_no_memory_for_error ? "there is not enough memory" : last_error.c_str();
}

int32_t relax_grad_init_options(relax_grad_options* options) {
  return Run([&] { *Pointer(options, "options") = {0, 0, 1, nullptr}; });
}

int32_t relax_grad_open(const char* folder, const relax_grad_options* options,
                        relax_grad_trainer** trainer) {
  return Run([&] {
    *Pointer(trainer, "trainer") = nullptr;
    relax_grad::Options chosen;
    if (options) {
      chosen.num_threads = options->num_threads;
      chosen.skip_nonfinite = options->skip_nonfinite != 0;
      chosen.check_inputs = options->check_inputs != 0;
      if (options->level) chosen.level = options->level;
    }
    auto opened = std::make_unique<relax_grad_trainer>(Pointer(folder, "folder"), chosen);
    Trainers().Add(opened.get());
    *trainer = opened.release();
  });
}

int32_t relax_grad_close(relax_grad_trainer* trainer) {
  return Run([&] {
    if (trainer == nullptr) return;
    Trainers().Remove(trainer, "trainer");
    delete trainer;
  });
}

int32_t relax_grad_level(relax_grad_trainer* trainer, const char** level) {
  return Run([&] {
    *Pointer(level, "level") = Trainers().Get(trainer, "trainer").trainer.level().c_str();
  });
}

int32_t relax_grad_num_batch(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Trainers().Get(trainer, "trainer").batch.all().size());
  });
}

int32_t relax_grad_batch(relax_grad_trainer* trainer, int64_t index, relax_grad_type* type) {
  return Run([&] {
    const Types& types = Trainers().Get(trainer, "trainer").batch;
    *Pointer(type, "type") = types.At(Place(index, types.all().size(), "input of the step"));
  });
}

int32_t relax_grad_num_inputs(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Trainers().Get(trainer, "trainer").inputs.all().size());
  });
}

int32_t relax_grad_input(relax_grad_trainer* trainer, int64_t index, relax_grad_type* type) {
  return Run([&] {
    const Types& types = Trainers().Get(trainer, "trainer").inputs;
    *Pointer(type, "type") = types.At(Place(index, types.all().size(), "input of the prediction"));
  });
}

int32_t relax_grad_num_hyperparameters(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Trainers().Get(trainer, "trainer").hyperparameters.size());
  });
}

int32_t relax_grad_hyperparameter_name(relax_grad_trainer* trainer, int64_t index,
                                       const char** name) {
  return Run([&] {
    const auto& hyperparameters = Trainers().Get(trainer, "trainer").hyperparameters;
    size_t place = Place(index, hyperparameters.size(), "hyperparameter");
    *Pointer(name, "name") = hyperparameters[place].first.c_str();
  });
}

int32_t relax_grad_get_hyperparameter(relax_grad_trainer* trainer, const char* name,
                                      double* value) {
  return Run([&] {
    double number = Hyperparameter(Trainers().Get(trainer, "trainer"), name).second;
    *Pointer(value, "value") = number;
  });
}

int32_t relax_grad_set_hyperparameter(relax_grad_trainer* trainer, const char* name, double value) {
  return Run([&] {
    double& number = Hyperparameter(Trainers().Get(trainer, "trainer"), name).second;
    if (!std::isfinite(value)) {
      throw Error(std::string(name) + " must be finite, but it is " + std::to_string(value));
    }
    number = value;
  });
}

int32_t relax_grad_step(relax_grad_trainer* trainer, const relax_grad_tensor* batch, int64_t number,
                        relax_grad_result* result) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    Pointer(result, "result");
    std::vector<Tensor> tensors = InOrder(own.batch, batch, number, "batch");
    std::map<std::string, double> chosen(own.hyperparameters.begin(), own.hyperparameters.end());
    // They would keep memory that the step needs.
    own.outputs.clear();
    own.groups.clear();
    relax_grad::StepResult done = own.trainer.Step(tensors, chosen);
    own.metrics.assign(done.metrics.begin(), done.metrics.end());
    own.outputs.assign(done.outputs.begin(), done.outputs.end());
    *result = {done.loss, done.applied ? 1 : 0};
  });
}

int32_t relax_grad_predict(relax_grad_trainer* trainer, const relax_grad_tensor* inputs,
                           int64_t number) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    // It comes before the inputs are examined, as there are none without a function.
    if (own.inputs.all().empty()) own.trainer.Predict({});
    std::vector<Tensor> tensors = InOrder(own.inputs, inputs, number, "inputs");
    own.outputs.clear();
    std::vector<Tensor> outputs = own.trainer.Predict(tensors);
    for (const Tensor& output : outputs) {
      own.outputs.emplace_back("output" + std::to_string(own.outputs.size()), output);
    }
  });
}

int32_t relax_grad_num_outputs(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Trainers().Get(trainer, "trainer").outputs.size());
  });
}

int32_t relax_grad_output(relax_grad_trainer* trainer, int64_t index, relax_grad_tensor* output) {
  return Run([&] {
    const NamedTensors& outputs = Trainers().Get(trainer, "trainer").outputs;
    *Pointer(output, "output") = View(outputs[Place(index, outputs.size(), "output")]);
  });
}

int32_t relax_grad_num_metrics(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Trainers().Get(trainer, "trainer").metrics.size());
  });
}

int32_t relax_grad_metric(relax_grad_trainer* trainer, int64_t index, const char** name,
                          double* value) {
  return Run([&] {
    const auto& metrics = Trainers().Get(trainer, "trainer").metrics;
    const auto& [metric_name, metric_value] = metrics[Place(index, metrics.size(), "metric")];
    Pointer(value, "value");
    *Pointer(name, "name") = metric_name.c_str();
    *value = metric_value;
  });
}

int32_t relax_grad_num_group_tensors(relax_grad_trainer* trainer, const char* group,
                                     int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Group(Trainers().Get(trainer, "trainer"), group).size());
  });
}

int32_t relax_grad_group_tensor(relax_grad_trainer* trainer, const char* group, int64_t index,
                                relax_grad_tensor* tensor) {
  return Run([&] {
    const NamedTensors& tensors = Group(Trainers().Get(trainer, "trainer"), group);
    *Pointer(tensor, "tensor") = View(tensors[Place(index, tensors.size(), "tensor of the group")]);
  });
}

int32_t relax_grad_get_counters(relax_grad_trainer* trainer, relax_grad_counters* counters) {
  return Run([&] {
    const relax_grad::Counters& own = Trainers().Get(trainer, "trainer").trainer.counters();
    *Pointer(counters, "counters") = {own.seed,    own.steps, own.updates,
                                      own.skipped, own.epoch, own.batch};
  });
}

int32_t relax_grad_set_counters(relax_grad_trainer* trainer, const relax_grad_counters* counters) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    Pointer(counters, "counters");
    relax_grad::Counters changed{counters->seed,    counters->steps, counters->updates,
                                 counters->skipped, counters->epoch, counters->batch};
    relax_grad::CheckCounters(changed, "counters");
    own.trainer.counters() = changed;
  });
}

int32_t relax_grad_save(relax_grad_trainer* trainer, const char* path) {
  return Run([&] { Trainers().Get(trainer, "trainer").trainer.Save(Pointer(path, "path")); });
}

int32_t relax_grad_load(relax_grad_trainer* trainer, const char* path) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    own.trainer.Load(Pointer(path, "path"));
    own.groups.clear();
    own.outputs.clear();
    own.metrics.clear();
  });
}

int32_t relax_grad_read_file(const char* path, relax_grad_file** file) {
  return Run([&] {
    *Pointer(file, "file") = nullptr;
    Tensors tensors = relax_grad::LoadTensors(Pointer(path, "path"));
    auto read = std::make_unique<relax_grad_file>();
    read->tensors.assign(tensors.begin(), tensors.end());
    FilesOpen().Add(read.get());
    *file = read.release();
  });
}

int32_t relax_grad_close_file(relax_grad_file* file) {
  return Run([&] {
    if (file == nullptr) return;
    FilesOpen().Remove(file, "file");
    delete file;
  });
}

int32_t relax_grad_num_file_tensors(relax_grad_file* file, int64_t* number) {
  return Run(
      [&] { *Pointer(number, "number") = Number(FilesOpen().Get(file, "file").tensors.size()); });
}

int32_t relax_grad_file_tensor(relax_grad_file* file, int64_t index, relax_grad_tensor* tensor) {
  return Run([&] {
    const NamedTensors& tensors = FilesOpen().Get(file, "file").tensors;
    *Pointer(tensor, "tensor") = View(tensors[Place(index, tensors.size(), "tensor of the file")]);
  });
}

int32_t relax_grad_write_file(const char* path, const relax_grad_tensor* tensors, int64_t number) {
  return Run([&] {
    Pointer(path, "path");
    relax_grad::SaveTensors(path, CopyAll(tensors, number, "tensors"));
  });
}
