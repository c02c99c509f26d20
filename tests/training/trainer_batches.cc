// Trains on the batches of a file, goes on behind each error, and prints the errors.
//
// The arguments are the folder of a step, the file, the rows of a batch, the file for the state,
// and "raise" or "skip" for steps that are not finite. With 0 rows, it trains on batches of the
// first rows of the file, all of them and then many numbers of rows, and prints the growth of the
// resident memory in bytes.

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <string>

#include "trainer.h"

/// Copies rows of a tensor.
static relax_grad::Tensor Rows(const relax_grad::Tensor& all, int64_t first, int64_t count) {
  std::vector<int64_t> shape(all.shape().begin(), all.shape().end());
  int64_t row = all.numel() / shape[0] * ((all.dtype().bits + 7) / 8);
  shape[0] = count;
  relax_grad::Tensor part = relax_grad::MakeTensor(shape, relax_grad::DtypeName(all));
  std::memcpy(part.data_ptr(), static_cast<const char*>(all.data_ptr()) + first * row, count * row);
  return part;
}

static int64_t Resident() {
  std::ifstream file("/proc/self/statm");
  int64_t whole = 0, resident = 0;
  file >> whole >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  relax_grad::Options options;
  options.skip_nonfinite = std::string(argv[5]) == "skip";
  relax_grad::Trainer trainer(argv[1], options);
  relax_grad::Tensors data = relax_grad::LoadTensors(argv[2]);
  int64_t rows = std::stoll(argv[3]), whole = data.begin()->second.shape()[0];
  if (rows == 0) {
    int64_t start = 0;
    for (int64_t i = 0; i < 200; ++i) {
      int64_t number = i < 3 ? whole : i * 37 % whole + 1;
      std::vector<relax_grad::Tensor> batch;
      for (const std::string& name : trainer.batch_names())
        batch.push_back(Rows(data.at(name), 0, number));
      trainer.Step(batch);
      if (i == 2) start = Resident();
    }
    std::cout << Resident() - start << "\n";
    return 0;
  }
  int64_t count = whole / rows;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<relax_grad::Tensor> batch;
    for (const std::string& name : trainer.batch_names())
      batch.push_back(Rows(data.at(name), i * rows, rows));
    try {
      trainer.Step(batch);
    } catch (const relax_grad::Error& error) {
      std::cout << "batch " << i << ": " << error.what() << "\n";
    }
  }
  trainer.Save(argv[4]);
  return 0;
}
