#include "library.h"

#include <string>

#include "error.h"

namespace relax_grad {

#ifdef __linux__
namespace {

// The fields of ELF's header: class, byte order, kind and machine.
constexpr size_t kClass = 4, kOrder = 5, kKind = 16, kMachine = 18, kHeader = 64;
constexpr int kShared = 3;

std::string NameOf(int machine) {
  switch (machine) {
    case 3:
      return "i386";
    case 20:
      return "ppc";
    case 21:
      return "ppc64";
    case 22:
      return "s390x";
    case 40:
      return "arm";
    case 62:
      return "x86_64";
    case 183:
      return "aarch64";
    case 243:
      return "riscv";
    case 258:
      return "loongarch";
    default:
      return "the machine " + std::to_string(machine) + " of ELF";
  }
}

/// Returns the ELF machine of this program; 0 if it is none of the usual ones.
constexpr int Here() {
#if defined(__x86_64__)
  return 62;
#elif defined(__aarch64__)
  return 183;
#elif defined(__riscv)
  return 243;
#elif defined(__arm__)
  return 40;
#elif defined(__i386__)
  return 3;
#else
  return 0;
#endif
}

std::string Bits(bool is_wide) { return is_wide ? "64 bits" : "32 bits"; }

}  // namespace

void CheckArchitecture(std::string_view data, const std::string& where) {
  if (data.size() < kHeader || data.substr(0, 4) !=
                                   "\x7f"
                                   "ELF") {
    throw Error(where + " is damaged: it is no shared library of ELF");
  }
  bool is_big = data[kOrder] == 2;
  auto half = [&](size_t at) {
    int first = static_cast<unsigned char>(data[at]),
        second = static_cast<unsigned char>(data[at + 1]);
    return is_big ? first << 8 | second : second << 8 | first;
  };
  constexpr bool is_big_here = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__,
                 is_wide_here = sizeof(void*) == 8;
  bool is_wide = data[kClass] == 2;
  int machine = half(kMachine);
  if ((Here() && machine != Here()) || is_big != is_big_here || is_wide != is_wide_here) {
    throw Error(where + " was compiled for " + NameOf(machine) + " (" + Bits(is_wide) +
                (is_big ? ", big endian" : "") + "), but this program is for " + NameOf(Here()) +
                " (" + Bits(is_wide_here) + "); export the step with the target of this machine");
  }
  if (half(kKind) != kShared) throw Error(where + " is damaged: it is no shared library of ELF");
}
#else
void CheckArchitecture(std::string_view, const std::string&) {}
#endif

}  // namespace relax_grad
