// Loads exported folders, runs a step of each that can be loaded, and prints a line for each.
//
// The argument is a file with the names of folders, one a line, of steps with the inputs x (6, 3)
// and y (6), both in float32.

#include <fstream>
#include <iostream>

#include "trainer.h"

static std::string Load(const std::string& folder) {
  try {
    relax_grad::Trainer trainer(folder);
    try {
      auto x = relax_grad::MakeTensor<float>({6, 3}, std::vector<float>(18, 0.5f));
      auto y = relax_grad::MakeTensor<float>({6}, std::vector<float>(6, 1.f));
      trainer.Step({x, y});
      trainer.Step({x, y});
      trainer.Save(folder + "/saved");
      trainer.Load(folder + "/saved");
      return "runs";
    } catch (const relax_grad::Error& error) {
      return std::string("loads: ") + error.what();
    }
  } catch (const relax_grad::Error& error) {
    return std::string("error: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream names(argv[1]);
  for (std::string folder; std::getline(names, folder);) {
    std::string outcome = Load(folder);
    for (char& each : outcome) each = each == '\n' ? ' ' : each;
    std::cout << outcome << std::endl;
  }
}
