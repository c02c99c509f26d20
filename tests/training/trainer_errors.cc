// Calls relax_grad::Trainer in ways that do not fit, and examines the errors and the trainer after
// each.
//
// The argument is the folder of a step with the inputs x (6, 3) and y (6), both in float32.

#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <thread>

#include <tvm/ffi/function.h>

#include "trainer.h"

using relax_grad::MakeTensor;
using relax_grad::Tensor;

/// A tensor in the memory of the caller.
static Tensor View(void* data, const std::vector<int64_t>& shape, int64_t* strides) {
  struct Borrowed {
    std::vector<int64_t> shape, strides;
    DLManagedTensor managed;
  };
  auto* own = new Borrowed{shape, {}, {}};
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= shape[i])
    own->strides.insert(own->strides.begin(), strides ? strides[i] : step);
  own->managed.dl_tensor = {data,
                            {kDLCPU, 0},
                            static_cast<int32_t>(shape.size()),
                            {kDLFloat, 32, 1},
                            own->shape.data(),
                            own->strides.data(),
                            0};
  own->managed.manager_ctx = own;
  own->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<Borrowed*>(self->manager_ctx);
  };
  return Tensor::FromDLPack(&own->managed);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::string folder = argv[1];
  relax_grad::Trainer trainer(folder);
  Tensor x = MakeTensor<float>({6, 3}, std::vector<float>(18, 0.5f)),
         y = MakeTensor<float>({6}, std::vector<float>(6, 1.f));
  Tensor nan =
      MakeTensor<float>({6, 3}, std::vector<float>(18, std::numeric_limits<float>::quiet_NaN()));
  trainer.Step({x, y});
  int count = 0, wrong = 0;
  auto state = [&] {
    std::string text = std::to_string(trainer.counters().steps);
    for (const char* group : {"params", "frozen", "states", "optimizer_state"}) {
      for (const auto& [name, tensor] : trainer.group(group)) {
        text += name + std::string(static_cast<const char*>(tensor.data_ptr()),
                                   tensor.numel() * tensor.dtype().bits / 8);
      }
    }
    return text;
  };
  auto expect = [&](const std::string& message, const std::function<void()>& call) {
    std::string before = state();
    try {
      call();
      std::cout << "no error: " << message << "\n";
      ++wrong;
      return;
    } catch (const relax_grad::Error& error) {
      if (std::string(error.what()).find(message) == std::string::npos) {
        std::cout << "expected: " << message << "\nfound: " << error.what() << "\n";
        ++wrong;
      }
    }
    if (state() != before) {
      std::cout << "the state has changed: " << message << "\n";
      ++wrong;
    }
    ++count;
  };
  expect("the step takes 2 tensors (x, y), but 1 were given", [&] { trainer.Step({x}); });
  expect("x must have shape (6, 3) and dtype float32, but it has (6) and float32",
         [&] { trainer.Step({y, y}); });
  expect("but it has (6, 3) and float64",
         [&] { trainer.Step({MakeTensor<double>({6, 3}, std::vector<double>(18)), y}); });
  expect(
      "but it has (5, 3) and float32; the step was exported for 6 rows: give batches of 6 rows, or "
      "export it with a symbolic first extent, as from_module(..., dynamic_shapes=...)",
      [&] { trainer.Step({MakeTensor<float>({5, 3}, std::vector<float>(15)), y}); });
  expect("y is no tensor", [&] { trainer.Step({x, Tensor()}); });
  expect("the step has no hyperparameter rate", [&] { trainer.Step({x, y}, {{"rate", 0.1}}); });
  expect("lr must be finite", [&] { trainer.Step({x, y}, {{"lr", NAN}}); });
  expect("the exported model has no function for prediction", [&] { trainer.Predict({x}); });
  expect("there is no group weights", [&] { trainer.group("weights"); });
  expect("cannot be read: No such file", [&] { trainer.Load(folder + "/none"); });
  expect("is damaged, or no file of safetensors", [&] { trainer.Load(folder + "/manifest.json"); });
  expect("has no state of training", [&] { trainer.Load(folder + "/data.safetensors"); });
  expect("cannot be written", [&] { trainer.Save(folder + "/none/state"); });
  expect("cannot be read", [&] { relax_grad::Trainer(folder + "/none"); });
  expect("cannot be read as", [&] { relax_grad::Values<double>(x); });
  expect("has 6 elements, but 5 values were given",
         [&] { MakeTensor<float>({2, 3}, std::vector<float>(5)); });
  expect("cannot have the shape (2, -1)", [&] { MakeTensor({2, -1}, "float32"); });
  expect("MakeTensor", [&] { MakeTensor({2}, "float31x"); });
  expect("cannot have the shape (4611686018427387904, 4)",
         [&] { MakeTensor({int64_t{1} << 62, 4}, "float32"); });
  expect("cannot have the shape (2305843009213693952)",
         [&] { MakeTensor({int64_t{1} << 61}, "float64"); });
  std::vector<float> memory(64, 0.5f);
  expect("x must be in memory that is aligned to 64 bytes",
         [&] { trainer.Step({View(memory.data() + 1, {6, 3}, nullptr), y}); });
  int64_t strides[] = {1, 6};
  Tensor turned = View(x.data_ptr(), {6, 3}, strides);
  expect("x has strides", [&] { trainer.Step({turned, y}); });
  expect("cannot be read", [&] { relax_grad::Values<float>(turned); });
  expect("x has strides, which files do not support",
         [&] { relax_grad::SaveTensors(folder + "/strides", {{"x", turned}}); });
  expect("__metadata__ cannot be the name of a tensor",
         [&] { relax_grad::SaveTensors(folder + "/name", {{"__metadata__", x}}); });
  expect("cannot be read", [&] { relax_grad::LoadTensors(folder); });
  relax_grad::Options threads;
  threads.num_threads = -1;
  expect("num_threads must not be negative, but it is -1",
         [&] { relax_grad::Trainer(folder, threads); });
  int64_t seed = trainer.counters().seed;
  trainer.counters().seed = int64_t{1} << 31;
  expect("the step: the counter seed must be from 0 to 2147483647, but it is 2147483648",
         [&] { trainer.Step({x, y}); });
  trainer.counters().seed = -1;
  expect("saved: the counter seed must be from 0", [&] { trainer.Save(folder + "/saved"); });
  trainer.counters().seed = seed;
  expect("the loss is nan in step 1; everything is as before", [&] { trainer.Step({nan, y}); });
  relax_grad::Options options;
  options.skip_nonfinite = true;
  relax_grad::Trainer other(folder, options);
  auto values = relax_grad::Values<float>(other.group("params").at("w"));
  bool applied = other.Step({x, y}).applied && !other.Step({nan, y}).applied;
  if (!applied || other.counters().skipped != 1 ||
      relax_grad::Values<float>(other.group("params").at("w")) != values) {
    std::cout << "a step that is not finite was not skipped\n";
    ++wrong;
  }
  expect("x must have", [&] { trainer.Step({MakeTensor({7, 3}, "float32"), y}); });
  // Each thread that calls has a pool of its own in TVM's runtime.
  options.num_threads = 2;
  relax_grad::Trainer parallel(folder, options);
  auto threads_of_step = [&] {
    parallel.Step({x, y});
    return (*tvm::ffi::Function::GetGlobal("runtime.NumThreads"))().cast<int>();
  };
  int here = threads_of_step(), there = 0;
  std::thread([&] { there = threads_of_step(); }).join();
  if (here != 2 || there != 2) {
    std::cout << "steps had " << here << " and " << there << " threads\n";
    ++wrong;
  }
  std::cout << count << " errors as expected\n";
  return wrong;
}
