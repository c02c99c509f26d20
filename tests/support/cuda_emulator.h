// Definitions for CUDA sources of TVM to run on a CPU, in the place of the headers that they
// include.
//
// The threads of a block are fibers that take turns: each runs until it waits, at a barrier or for
// the values of its warp, and goes on when all others have come as far. Blocks run one after the
// other. Threads and blocks run in ascending order or in descending order; a kernel whose result
// depends on it has a race. Threads that wait at different barriers, and a value taken from a
// thread that is not there, are errors.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace emulator {

struct Index {
  int x, y, z;
};

enum class State { kReady, kBarrier, kWarp, kDone };

struct Thread {
  ucontext_t context;
  State state;
  int line;  // where it waits
  Index index;
  unsigned count;  // of its exchanges with its warp, whose slots alternate
  uint64_t slots[2];
  unsigned stamps[2];  // the exchange that a slot belongs to
};

constexpr size_t kStack = 64 << 10;

inline Index thread_index, block_index, block_extent, grid_extent;
inline bool descending = false;
inline std::vector<Thread> threads;
inline std::vector<char> stacks;
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline const std::function<void()>* body = nullptr;
inline char failure[256] = "";

inline void fail(const char* message, int line) {
  if (!failure[0]) std::snprintf(failure, sizeof(failure), "%s (line %d)", message, line);
}

inline void wait(State state, int line) {
  current->state = state;
  current->line = line;
  swapcontext(&current->context, &scheduler);
}

inline void barrier(int line) { wait(State::kBarrier, line); }

inline void enter() {
  (*body)();
  current->state = State::kDone;
}

// Return the value of the thread `lane` of the warp; that of an inactive one stands out.
template <typename T>
T exchange(T value, int source, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a value has at most 64 bits");
  unsigned stamp = ++current->count, slot = stamp % 2;
  std::memcpy(&current->slots[slot], &value, sizeof(T));
  current->stamps[slot] = stamp;
  wait(State::kWarp, line);
  int self = static_cast<int>(current - threads.data());
  size_t from = self / 32 * 32 + source;
  if (from >= threads.size() || threads[from].stamps[slot] != stamp) {
    std::memset(&value, 0xff, sizeof(T));
    return value;
  }
  std::memcpy(&value, &threads[from].slots[slot], sizeof(T));
  return value;
}

inline int lane() { return static_cast<int>(current - threads.data()) % 32; }

inline void run_ready() {
  int count = static_cast<int>(threads.size());
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[descending ? count - 1 - i : i];
    if (thread.state != State::kReady) continue;
    current = &thread;
    thread_index = thread.index;
    swapcontext(&scheduler, &thread.context);
  }
}

// Let the threads of each warp that wait for each other go on; tell whether there were any.
inline bool release_warps() {
  bool any = false;
  for (size_t first = 0; first < threads.size(); first += 32) {
    int line = -1;
    for (size_t i = first; i < std::min(first + 32, threads.size()); ++i) {
      if (threads[i].state != State::kWarp) continue;
      if (line >= 0 && threads[i].line != line) fail("a warp exchanges values at two places", line);
      line = threads[i].line;
      threads[i].state = State::kReady;
      any = true;
    }
  }
  return any;
}

inline bool release_barrier() {
  int line = -1;
  for (Thread& thread : threads) {
    if (thread.state == State::kDone) continue;
    if (line >= 0 && thread.line != line) fail("threads wait at different barriers", line);
    line = thread.line;
    thread.state = State::kReady;
  }
  return line >= 0;
}

inline void run_block_of_fibers() {
  size_t count = static_cast<size_t>(block_extent.x) * block_extent.y * block_extent.z;
  threads.resize(count);
  stacks.resize(count * kStack);
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    int flat = static_cast<int>(i);
    thread.state = State::kReady;
    thread.line = thread.count = thread.stamps[0] = thread.stamps[1] = 0;
    thread.index = {flat % block_extent.x, flat / block_extent.x % block_extent.y,
                    flat / block_extent.x / block_extent.y};
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = &stacks[i * kStack];
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  do {
    run_ready();
  } while (!failure[0] && (release_warps() || release_barrier()));
}

inline void run_block_of_loops() {
  int count = block_extent.x * block_extent.y * block_extent.z;
  for (int i = 0; i < count; ++i) {
    int flat = descending ? count - 1 - i : i;
    thread_index = {flat % block_extent.x, flat / block_extent.x % block_extent.y,
                    flat / block_extent.x / block_extent.y};
    (*body)();
  }
}

// Run a kernel; return a message of its failure, or nullptr. Threads that never wait need no
// fibers.
inline const char* launch(const std::function<void()>& kernel, const int64_t* extents, bool waits,
                          bool descend) {
  failure[0] = 0;
  body = &kernel;
  descending = descend;
  grid_extent = {static_cast<int>(extents[0]), static_cast<int>(extents[1]),
                 static_cast<int>(extents[2])};
  block_extent = {static_cast<int>(extents[3]), static_cast<int>(extents[4]),
                  static_cast<int>(extents[5])};
  int64_t count = extents[0] * extents[1] * extents[2];
  for (int64_t i = 0; i < count && !failure[0]; ++i) {
    int64_t flat = descend ? count - 1 - i : i;
    block_index = {static_cast<int>(flat % extents[0]),
                   static_cast<int>(flat / extents[0] % extents[1]),
                   static_cast<int>(flat / extents[0] / extents[1])};
    waits ? run_block_of_fibers() : run_block_of_loops();
  }
  return failure[0] ? failure : nullptr;
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_extent
#define gridDim emulator::grid_extent

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define alignas(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))

#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp(...) emulator::exchange(0, 0, __LINE__)
#define __activemask() 0xffffffffu
// A lane beyond its segment of the warp gives a thread its own value back.
#define __shfl_sync(mask, value, from, width) \
  emulator::exchange(value, emulator::lane() / (width) * (width) + (from) % (width), __LINE__)
#define __shfl_down_sync(mask, value, delta, width)                                              \
  emulator::exchange(value,                                                                      \
                     emulator::lane() % (width) + (delta) < (width) ? emulator::lane() + (delta) \
                                                                    : emulator::lane(),          \
                     __LINE__)
#define __shfl_up_sync(mask, value, delta, width)                                            \
  emulator::exchange(                                                                        \
      value,                                                                                 \
      emulator::lane() % (width) >= (delta) ? emulator::lane() - (delta) : emulator::lane(), \
      __LINE__)

template <typename T>
T atomicAdd(T* at, T value) {
  T before = *at;
  *at = before + value;
  return before;
}

using std::isfinite;
using std::isinf;
using std::isnan;

template <typename A, typename B>
auto max(A a, B b) -> decltype(a + b) {
  if constexpr (std::is_floating_point<decltype(a + b)>::value) return std::fmax(a, b);
  return a > b ? a : b;
}
template <typename A, typename B>
auto min(A a, B b) -> decltype(a + b) {
  if constexpr (std::is_floating_point<decltype(a + b)>::value) return std::fmin(a, b);
  return a < b ? a : b;
}

inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::exp2(y * std::log2(x)); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}

#define CUDART_INF_F (__builtin_inff())
#define CUDART_INF (__builtin_inf())
#define CUDART_NAN_F (__builtin_nanf(""))
#define CUDART_NAN (__builtin_nan(""))

#define EMULATOR_VECTOR(type, name)                                \
  struct name##2 { type x, y; };                                   \
  struct name##4 { type x, y, z, w; };                             \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATOR_VECTOR(float, float)
EMULATOR_VECTOR(double, double)
EMULATOR_VECTOR(int, int)
EMULATOR_VECTOR(unsigned, uint)
EMULATOR_VECTOR(long long, longlong)
#undef EMULATOR_VECTOR

#include "cuda_halves.h"
