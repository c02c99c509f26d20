#include "cpu_levels.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace relax_grad {

#ifdef __x86_64__
namespace {

/// Tells whether all bits of a mask are set in the register ecx of a leaf of CPUID.
bool HasBits(unsigned leaf, unsigned mask) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(leaf, &eax, &ebx, &ecx, &edx) && (ecx & mask) == mask;
}

}  // namespace

std::set<std::string> CpuLevels() {
  // The features are those of the x86-64 psABI. Compilers know the newer ones by name only lately.
  constexpr unsigned kCx16 = 1u << 13, kMovbe = 1u << 22, kF16c = 1u << 29;
  constexpr unsigned kExtended = 0x80000001, kLahf = 1u << 0, kLzcnt = 1u << 5;
  std::set<std::string> levels{"x86-64"};
  __builtin_cpu_init();
  bool has = HasBits(1, kCx16) && HasBits(kExtended, kLahf) && __builtin_cpu_supports("popcnt") &&
             __builtin_cpu_supports("sse3") && __builtin_cpu_supports("ssse3") &&
             __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("sse4.2");
  if (has) levels.insert("x86-64-v2");
  // AVX includes the operating system's support of its registers.
  has = has && HasBits(1, kMovbe | kF16c) && HasBits(kExtended, kLzcnt) &&
        __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("fma");
  if (has) levels.insert("x86-64-v3");
  has = has && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl");
  if (has) levels.insert("x86-64-v4");
  return levels;
}
#else
std::set<std::string> CpuLevels() { return {}; }
#endif

}  // namespace relax_grad
