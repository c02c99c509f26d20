// Half precision and the fragments of tensor cores, for cuda_emulator.h.
//
// Each operation of a half rounds to the nearest, ties to even. A fragment is a whole matrix in
// each thread of a warp: all compute the same sums, in float32 and in ascending order.
#pragma once

namespace emulator {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Float16 {
  static float wide(uint16_t bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  template <typename T>
  static uint16_t narrow(T number) {
    _Float16 value = static_cast<_Float16>(number);
    uint16_t bits;
    std::memcpy(&bits, &value, 2);
    return bits;
  }
};

struct BFloat16 {
  static float wide(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fff;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

template <typename Format>
struct Half {
  uint16_t bits;
  Half() = default;
  Half(const Half&) = default;
  Half(const volatile Half& other) : bits(other.bits) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  Half(T value) : bits(Format::narrow(value)) {}
  Half& operator=(const Half&) = default;
  void operator=(const Half& other) volatile { bits = other.bits; }
  operator float() const { return Format::wide(bits); }
  operator float() const volatile { return Format::wide(bits); }
  Half operator-() const { return -static_cast<float>(*this); }
#define EMULATOR_OPERATOR(operation)                                    \
  friend Half operator operation(Half a, Half b) {                      \
    return Half(static_cast<float>(a) operation static_cast<float>(b)); \
  }
  EMULATOR_OPERATOR(+)
  EMULATOR_OPERATOR(-)
  EMULATOR_OPERATOR(*)
  EMULATOR_OPERATOR(/)
#undef EMULATOR_OPERATOR
};

template <typename T>
struct Pair {
  T x, y;
  Pair() = default;
  Pair(T x, T y) : x(x), y(y) {}
};

}  // namespace emulator

using half = emulator::Half<emulator::Float16>;
using __half = half;
using half2 = emulator::Pair<half>;
using __half2 = half2;
using nv_bfloat16 = emulator::Half<emulator::BFloat16>;
using __nv_bfloat16 = nv_bfloat16;
using nv_bfloat162 = emulator::Pair<nv_bfloat16>;

inline half2 make_half2(half x, half y) { return {x, y}; }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline float __half2float(half x) { return x; }
inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
inline float __bfloat162float(nv_bfloat16 x) { return x; }
template <typename Format>
bool __hgt(emulator::Half<Format> a, emulator::Half<Format> b) {
  return static_cast<float>(a) > static_cast<float>(b);
}
template <typename Format>
bool __hlt(emulator::Half<Format> a, emulator::Half<Format> b) {
  return static_cast<float>(a) < static_cast<float>(b);
}
#define EMULATOR_FUNCTION(name, function)                           \
  template <typename Format>                                        \
  emulator::Half<Format> name(emulator::Half<Format> x) {           \
    return emulator::Half<Format>(function(static_cast<float>(x))); \
  }
EMULATOR_FUNCTION(hexp, std::exp)
EMULATOR_FUNCTION(hlog, std::log)
EMULATOR_FUNCTION(hsqrt, std::sqrt)
EMULATOR_FUNCTION(hrsqrt, 1.0f / std::sqrt)
EMULATOR_FUNCTION(__habs, std::fabs)
#undef EMULATOR_FUNCTION

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
  static constexpr int rows = std::is_same<Use, matrix_b>::value ? k : m;
  static constexpr int columns = std::is_same<Use, matrix_a>::value ? k : n;
  T at[rows][columns];
};

template <typename Fragment>
void fill_fragment(Fragment& to, float value) {
  for (auto& row : to.at) {
    for (auto& element : row) element = value;
  }
}

template <typename Use, int m, int n, int k, typename T, typename Layout>
void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& to, const T* from, unsigned stride) {
  constexpr bool by_rows = std::is_same<Layout, row_major>::value;
  for (int i = 0; i < to.rows; ++i) {
    for (int j = 0; j < to.columns; ++j) {
      to.at[i][j] = by_rows ? from[i * stride + j] : from[j * stride + i];
    }
  }
}

template <typename T, int m, int n, int k>
void store_matrix_sync(T* to, const fragment<accumulator, m, n, k, T>& from, unsigned stride,
                       layout_t layout) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      to[layout == mem_row_major ? i * stride + j : j * stride + i] = from.at[i][j];
    }
  }
}

inline __attribute__((optimize("O3"))) void multiply(float* to, const float* a, const float* b,
                                                     int m, int n, int k) {
  for (int i = 0; i < m; ++i) {
    for (int l = 0; l < k; ++l) {
      for (int j = 0; j < n; ++j) to[i * n + j] += a[i * k + l] * b[l * n + j];
    }
  }
}

template <typename T, typename Half, int m, int n, int k, typename A, typename B>
void mma_sync(fragment<accumulator, m, n, k, T>& to, const fragment<matrix_a, m, n, k, Half, A>& a,
              const fragment<matrix_b, m, n, k, Half, B>& b,
              const fragment<accumulator, m, n, k, T>& from) {
  float sums[m * n], left[m * k], right[k * n];
  std::copy(&from.at[0][0], &from.at[0][0] + m * n, sums);
  std::copy(&a.at[0][0], &a.at[0][0] + m * k, left);
  std::copy(&b.at[0][0], &b.at[0][0] + k * n, right);
  multiply(sums, left, right, m, n, k);
  std::copy(sums, sums + m * n, &to.at[0][0]);
}

}  // namespace nvcuda::wmma
