// Trains an exported model on examples in a file, without Python.
//
//   train FOLDER DATA [--epochs N] [--batch N] [--lr RATE] [--threads N] [--resume FILE] [--save
//   FILE] [--predict FILE]
//         [--level NAME]
//
// FOLDER was written by TrainStep.export. DATA is a file of safetensors with a tensor for each
// input and target of the step, whose first axis counts the examples. The last examples that fill
// no batch are left out. --predict writes the model's outputs for all examples, in evaluation mode,
// as output0, output1 and so on. --level chooses the version of a library with several, such as
// x86-64-v3.

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "trainer.h"

namespace {

constexpr int64_t kMostCount = int64_t{1} << 53;
// TVM takes as many as there are processors.
constexpr int64_t kMostThreads = 1 << 16;

const char* const kUsage =
    "usage: train FOLDER DATA [--epochs N] [--batch N] [--lr RATE] [--threads N] [--resume FILE] "
    "[--save FILE] [--predict FILE] [--level NAME]";

struct Arguments {
  std::string folder, data, resume, save, predict, level;
  int64_t epochs = 1, batch = 32, threads = 0;
  std::optional<double> lr;
};

int64_t Integer(const std::string& name, const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  auto [end, reason] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (reason != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw relax_grad::Error(name + " must be an integer from " + std::to_string(least) + " to " +
                            std::to_string(most) + ", but it is " + text);
  }
  return value;
}

double Rate(const std::string& name, const std::string& text) {
  std::istringstream stream(text);
  double value = 0;
  bool is_number = stream >> value && stream.peek() == std::istringstream::traits_type::eof();
  if (!is_number || !std::isfinite(value) || value < 0) {
    throw relax_grad::Error(name + " must be a number of at least 0, but it is " + text);
  }
  return value;
}

Arguments Parse(int argc, char** argv) {
  Arguments found;
  std::vector<std::string> positions;
  std::set<std::string> given;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      positions.push_back(name);
      continue;
    }
    std::map<std::string, std::string*> texts = {{"--resume", &found.resume},
                                                 {"--save", &found.save},
                                                 {"--predict", &found.predict},
                                                 {"--level", &found.level}};
    bool is_number =
        name == "--epochs" || name == "--batch" || name == "--lr" || name == "--threads";
    if (!is_number && !texts.count(name)) {
      throw relax_grad::Error("there is no option " + name + "\n" + kUsage);
    }
    if (!given.insert(name).second) throw relax_grad::Error(name + " is given twice");
    if (i + 1 == argc) throw relax_grad::Error(name + " needs a value\n" + kUsage);
    std::string value = argv[++i];
    if (value.empty()) throw relax_grad::Error(name + " has an empty value");
    if (name == "--epochs") found.epochs = Integer(name, value, 0, kMostCount);
    if (name == "--batch") found.batch = Integer(name, value, 1, kMostCount);
    if (name == "--threads") found.threads = Integer(name, value, 0, kMostThreads);
    if (name == "--lr") found.lr = Rate(name, value);
    if (texts.count(name)) *texts.at(name) = value;
  }
  if (positions.size() != 2) throw relax_grad::Error(kUsage);
  found.folder = positions[0];
  found.data = positions[1];
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
  options.num_threads = static_cast<int>(arguments.threads);
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
  if (inputs.empty()) throw relax_grad::Error("the step has no inputs");
  int64_t count = inputs[0].shape()[0] / arguments.batch;
  if (count == 0) throw relax_grad::Error("--batch is more than the examples in " + arguments.data);
  std::map<std::string, double> hyperparameters;
  if (arguments.lr) hyperparameters["lr"] = *arguments.lr;
  if (trainer.counters().batch > count) {
    throw relax_grad::Error(arguments.resume + " has " + std::to_string(trainer.counters().batch) +
                            " batches of an epoch, but there are " + std::to_string(count) +
                            " in " + arguments.data +
                            "; resume with the data and --batch of before");
  }
  for (auto& counters = trainer.counters(); counters.epoch < arguments.epochs;
       ++counters.epoch, counters.batch = 0) {
    // The file was saved after the last batch of an epoch.
    if (counters.batch == count) continue;
    auto start = std::chrono::steady_clock::now();
    double total = 0;
    int64_t first = counters.batch;
    for (; counters.batch < count; ++counters.batch) {
      std::vector<relax_grad::Tensor> batch;
      for (const auto& each : inputs)
        batch.push_back(Rows(each, counters.batch * arguments.batch, arguments.batch));
      total += trainer.Step(batch, hyperparameters).loss;
    }
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << "epoch " << counters.epoch + 1 << ": mean loss "
              << total / static_cast<double>(count - first) << ", " << seconds.count() << " s\n";
  }
  if (!arguments.save.empty()) trainer.Save(arguments.save);
  if (!arguments.predict.empty()) {
    std::vector<relax_grad::Tensor> given;
    for (const std::string& name : trainer.input_names()) {
      if (!data.count(name)) throw relax_grad::Error(arguments.data + " has no tensor " + name);
      given.push_back(data.at(name));
    }
    relax_grad::Tensors outputs;
    for (const auto& each : trainer.Predict(given))
      outputs.emplace("output" + std::to_string(outputs.size()), each);
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
