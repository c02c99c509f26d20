#include "c_api.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string_view>

#include "files.h"
#include "manifest.h"

namespace relax_grad {

namespace {

thread_local std::string last_error;
thread_local bool has_no_memory_for_error = false;

}  // namespace

// It is not destroyed: other threads may call while the program ends.
Handles<relax_grad_trainer>& Trainers() {
  static auto* trainers = new Handles<relax_grad_trainer>();
  return *trainers;
}

void Note(const char* reason) noexcept {
  try {
    last_error = reason;
    has_no_memory_for_error = false;
  } catch (...) {
    has_no_memory_for_error = true;
  }
}

size_t Place(int64_t index, size_t number, const char* what) {
  if (index < 0 || static_cast<uint64_t>(index) >= number) {
    throw Error("there is no " + std::string(what) + " " + std::to_string(index) + ", but " +
                std::to_string(number) + " from 0");
  }
  return static_cast<size_t>(index);
}

relax_grad_tensor View(const std::string& name, const Tensor& tensor) {
  const Dtype* dtype = DtypeOf(DtypeName(tensor));
  if (dtype == nullptr) {
    throw Error(name + " has the dtype " + DtypeName(tensor) + ", which C does not get");
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

namespace {

/// Copies a tensor of the caller, whose parts are examined first.
Tensor Copy(const relax_grad_tensor& buffer, const std::string& name) {
  const Dtype* dtype = DtypeOf(Pointer(buffer.dtype, (name + ": dtype").c_str()));
  if (dtype == nullptr) throw Error(name + ": there is no dtype " + buffer.dtype);
  if (buffer.num_axes < 0 || buffer.num_axes > Number(kMostAxes)) {
    throw Error(name + ": num_axes must be from 0 to " + std::to_string(kMostAxes) +
                ", but it is " + std::to_string(buffer.num_axes));
  }
  std::vector<int64_t> shape;
  if (buffer.num_axes) {
    Pointer(buffer.shape, (name + ": shape").c_str());
    shape.assign(buffer.shape, buffer.shape + buffer.num_axes);
  }
  for (int64_t extent : shape) {
    if (extent < 0) throw Error(name + " cannot have the shape " + ShapeText(shape));
  }
  auto size = Bytes(shape, dtype->bytes);
  if (!size || static_cast<uint64_t>(*size) != buffer.num_bytes) {
    throw Error(name + ": num_bytes is " + std::to_string(buffer.num_bytes) + ", but a tensor of " +
                dtype->name + " and shape " + ShapeText(shape) + " has " +
                (size ? std::to_string(*size) : "more than memory can hold"));
  }
  if (*size) Pointer(buffer.data, (name + ": data").c_str());
  const auto* bytes = static_cast<const unsigned char*>(buffer.data);
  if (dtype->name == std::string("bool")) {
    for (int64_t i = 0; i < *size; ++i) {
      if (bytes[i] > 1) throw Error(name + " has booleans that are neither 0 nor 1");
    }
  }
  Tensor tensor = MakeTensor(shape, dtype->name);
  if (*size) std::memcpy(tensor.data_ptr(), bytes, static_cast<size_t>(*size));
  return tensor;
}

}  // namespace

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

namespace {

Options OptionsOf(const relax_grad_options* options) {
  Options chosen;
  if (options) {
    chosen.num_threads = options->num_threads;
    chosen.skip_nonfinite = options->skip_nonfinite != 0;
    chosen.check_inputs = options->check_inputs != 0;
    if (options->level) chosen.level = options->level;
  }
  return chosen;
}

/// Gives a trainer to the caller.
void Give(std::unique_ptr<relax_grad_trainer> opened, relax_grad_trainer** trainer) {
  Trainers().Add(opened.get());
  *trainer = opened.release();
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

}  // namespace

}  // namespace relax_grad

using namespace relax_grad;

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
    std::string path = Pointer(folder, "folder");
    Give(std::make_unique<relax_grad_trainer>(path, OptionsOf(options)), trainer);
  });
}

int32_t relax_grad_open_memory(const void* manifest, uint64_t manifest_bytes, const void* library,
                               uint64_t library_bytes, const void* state, uint64_t state_bytes,
                               const relax_grad_options* options, relax_grad_trainer** trainer) {
  return Run([&] {
    *Pointer(trainer, "trainer") = nullptr;
    auto bytes = [](const void* data, uint64_t size, const char* what) {
      return std::string_view(static_cast<const char*>(Pointer(data, what)),
                              static_cast<size_t>(size));
    };
    MemoryFolder files{bytes(manifest, manifest_bytes, "manifest"),
                       bytes(library, library_bytes, "library"),
                       bytes(state, state_bytes, "state")};
    Give(std::make_unique<relax_grad_trainer>(files, OptionsOf(options)), trainer);
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
    own.step_outputs.clear();
    own.groups.clear();
    StepResult done = own.trainer.Step(tensors, chosen);
    own.metrics.swap(done.metrics);
    own.step_outputs.swap(done.outputs);
    *result = {done.loss, done.applied ? 1 : 0};
  });
}

int32_t relax_grad_evaluate(relax_grad_trainer* trainer, const relax_grad_tensor* batch,
                            int64_t number, double* loss) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    Pointer(loss, "loss");
    *loss = own.trainer.Evaluate(InOrder(own.batch, batch, number, "batch"));
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
    own.step_outputs.clear();
    std::vector<Tensor> outputs = own.trainer.Predict(tensors);
    for (const Tensor& output : outputs) {
      own.outputs.emplace_back("output" + std::to_string(own.outputs.size()), output);
    }
  });
}

int32_t relax_grad_num_outputs(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    const relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    *Pointer(number, "number") = Number(own.outputs.size() + own.step_outputs.size());
  });
}

int32_t relax_grad_output(relax_grad_trainer* trainer, int64_t index, relax_grad_tensor* output) {
  return Run([&] {
    const relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    size_t place = Place(index, own.outputs.size() + own.step_outputs.size(), "output");
    Pointer(output, "output");
    if (!own.outputs.empty()) {
      *output = View(own.outputs[place].first, own.outputs[place].second);
    } else {
      auto at = std::next(own.step_outputs.begin(), static_cast<ptrdiff_t>(place));
      *output = View(at->first, at->second);
    }
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
    size_t place = Place(index, metrics.size(), "metric");
    auto at = std::next(metrics.begin(), static_cast<ptrdiff_t>(place));
    Pointer(value, "value");
    *Pointer(name, "name") = at->first.c_str();
    *value = at->second;
  });
}
