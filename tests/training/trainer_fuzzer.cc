// A target of libFuzzer for the readers of the C++ trainer: any exception but relax_grad::Error
// ends the process.
//
// The first byte chooses the reader of the rest: that of manifests, of headers of safetensors, or
// of descriptions of states. test_damaged_folders.py builds and runs it where clang++ is installed.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "error.h"
#include "manifest.h"
#include "safetensors.h"
#include "state.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 3) {
      case 0:
        relax_grad::ParseManifest(text, "manifest.json");
        break;
      case 1:
        relax_grad::ParseHeader(text, 64, "state.safetensors");
        break;
      default:
        relax_grad::DescribedText(relax_grad::ParseDescribed(text, "state.safetensors"));
    }
  } catch (const relax_grad::Error&) {
  }
  return 0;
}
