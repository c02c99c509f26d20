// Trains an exported model on examples in a file, without Python.
//
//   train FOLDER DATA [--epochs N] [--batch N] [--lr RATE] [--threads N] [--resume FILE] [--save FILE] [--predict FILE]
//         [--level NAME]
//
// FOLDER was written by TrainStep.export. DATA is a file of safetensors with a tensor for each input and target of the step, whose
// first axis counts the examples. The last examples that fill no batch are left out. --predict writes the model's outputs for all examples,
// in evaluation mode, as output0, output1 and so on. --level chooses the version of a library with several, such as x86-64-v3.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "trainer.h"

namespace {

struct Arguments {
  std::string folder, data, resume, save, predict, level;
  int64_t epochs = 1, batch = 32;
  int threads = 0;
  double lr = -1;
};

double Number(const std::string& name, const char* text) {
  char* end = nullptr;
  double value = std::strtod(text, &end);
  if (end == text || *end != '\0') throw relax_grad::Error(name + " must be a number, but it is " + text);
  return value;
}

Arguments Parse(int argc, char** argv) {
  const char* usage =
      "usage: train FOLDER DATA [--epochs N] [--batch N] [--lr RATE] [--threads N] [--resume FILE] [--save FILE] [--predict FILE]"
      " [--level NAME]";
  Arguments found;
  int position = 0;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      if (position == 2) throw relax_grad::Error(usage);
      (position++ == 0 ? found.folder : found.data) = name;
      continue;
    }
    if (i + 1 == argc) throw relax_grad::Error(name + " needs a value\n" + usage);
    const char* value = argv[++i];
    if (name == "--epochs") found.epochs = static_cast<int64_t>(Number(name, value));
    else if (name == "--batch") found.batch = static_cast<int64_t>(Number(name, value));
    else if (name == "--lr") found.lr = Number(name, value);
    else if (name == "--threads") found.threads = static_cast<int>(Number(name, value));
    else if (name == "--resume") found.resume = value;
    else if (name == "--save") found.save = value;
    else if (name == "--predict") found.predict = value;
    else if (name == "--level") found.level = value;
    else throw relax_grad::Error("there is no option " + name + "\n" + usage);
  }
  if (position != 2) throw relax_grad::Error(usage);
  if (found.batch < 1) throw relax_grad::Error("--batch must be at least 1");
  return found;
}

/// Copies rows of a tensor.
relax_grad::Tensor Rows(const relax_grad::Tensor& all, int64_t first, int64_t count) {
  std::vector<int64_t> shape(all.shape().begin(), all.shape().end());
  int64_t row = all.numel() / shape[0] * ((all.dtype().bits + 7) / 8);
  shape[0] = count;
  relax_grad::Tensor part = relax_grad::MakeTensor(shape, relax_grad::DtypeName(all));
  std::memcpy(part.data_ptr(), static_cast<const char*>(all.data_ptr()) + first * row, count * row);
  return part;
}

void Run(const Arguments& arguments) {
  relax_grad::Options options;
  options.num_threads = arguments.threads;
  options.level = arguments.level;
  relax_grad::Trainer trainer(arguments.folder, options);
  if (!trainer.level().empty()) std::cout << "level " << trainer.level() << "\n";
  if (!arguments.resume.empty()) trainer.Load(arguments.resume);
  relax_grad::Tensors data = relax_grad::LoadTensors(arguments.data);
  std::vector<relax_grad::Tensor> inputs;
  for (const std::string& name : trainer.batch_names()) {
    auto found = data.find(name);
    if (found == data.end()) throw relax_grad::Error(arguments.data + " has no tensor " + name);
    inputs.push_back(found->second);
    if (inputs.back().ndim() == 0 || inputs.back().shape()[0] != inputs[0].shape()[0]) {
      throw relax_grad::Error(name + " must have as many rows as " + trainer.batch_names()[0]);
    }
  }
  int64_t count = inputs[0].shape()[0] / arguments.batch;
  if (count == 0) throw relax_grad::Error("--batch is more than the examples in " + arguments.data);
  std::map<std::string, double> hyperparameters;
  if (arguments.lr >= 0) hyperparameters["lr"] = arguments.lr;
  for (auto& counters = trainer.counters(); counters.epoch < arguments.epochs; ++counters.epoch, counters.batch = 0) {
    auto start = std::chrono::steady_clock::now();
    double total = 0;
    int64_t first = counters.batch;
    for (; counters.batch < count; ++counters.batch) {
      std::vector<relax_grad::Tensor> batch;
      for (const auto& each : inputs) batch.push_back(Rows(each, counters.batch * arguments.batch, arguments.batch));
      total += trainer.Step(batch, hyperparameters).loss;
    }
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << "epoch " << counters.epoch + 1 << ": mean loss " << total / static_cast<double>(count - first) << ", "
              << seconds.count() << " s\n";
  }
  if (!arguments.save.empty()) trainer.Save(arguments.save);
  if (!arguments.predict.empty()) {
    std::vector<relax_grad::Tensor> given;
    for (const std::string& name : trainer.input_names()) {
      if (!data.count(name)) throw relax_grad::Error(arguments.data + " has no tensor " + name);
      given.push_back(data.at(name));
    }
    relax_grad::Tensors outputs;
    for (const auto& each : trainer.Predict(given)) outputs.emplace("output" + std::to_string(outputs.size()), each);
    relax_grad::SaveTensors(arguments.predict, outputs);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(Parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
