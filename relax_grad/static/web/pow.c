/* pow of float64 for WebAssembly: the bias correction of Adam needs it in every step. Engines of
 * JavaScript differ in the last bits of Math.pow. This function computes with pairs of float64, so
 * that its results are those of a correctly rounded function but for about one in a million.
 *
 * T. J. Dekker, "A floating-point technique for extending the available precision", 1971. The
 * compiler must not contract products and sums. */
#include <math.h>
#include <stdint.h>

/* The sum of two numbers, of which the second one is at most half a last place of the first one. */
typedef struct {
  double high, low;
} pair;

static pair normal(double large, double small) {
  pair sum;
  sum.high = large + small;
  sum.low = small - (sum.high - large);
  return sum;
}

static pair exact_sum(double one, double other) {
  pair sum;
  double part;
  sum.high = one + other;
  part = sum.high - one;
  sum.low = (one - (sum.high - part)) + (other - part);
  return sum;
}

static pair exact_product(double one, double other) {
  const double split = 134217729; /* 2**27 + 1 */
  double a = split * one, b = split * other, a_low, b_low;
  pair product;
  a = a - (a - one);
  b = b - (b - other);
  a_low = one - a;
  b_low = other - b;
  product.high = one * other;
  product.low = ((a * b - product.high) + a * b_low + a_low * b) + a_low * b_low;
  return product;
}

static pair add(pair one, pair other) {
  pair high = exact_sum(one.high, other.high), low = exact_sum(one.low, other.low);
  high = normal(high.high, high.low + low.high);
  return normal(high.high, high.low + low.low);
}

static pair multiply(pair one, pair other) {
  pair product = exact_product(one.high, other.high);
  return normal(product.high, product.low + (one.high * other.low + one.low * other.high));
}

static pair number(double value) {
  pair made = {0, 0};
  made.high = value;
  return made;
}

static pair divide(pair one, pair other) {
  double first = one.high / other.high, second;
  pair rest = multiply(other, number(-first));
  rest = add(one, rest);
  second = rest.high / other.high;
  rest = add(rest, multiply(other, number(-second)));
  return add(normal(first, second), number(rest.high / other.high));
}

static double of_bits(uint64_t bits) {
  union {
    uint64_t bits;
    double value;
  } both;
  both.bits = bits;
  return both.value;
}

static uint64_t bits_of(double value) {
  union {
    double value;
    uint64_t bits;
  } both;
  both.value = value;
  return both.bits;
}

/* Returns 2**power for a power from -1022 to 1023. */
static double power_of_two(int32_t power) { return of_bits((uint64_t)(power + 1023) << 52); }

static const pair log_of_two = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};

/* Returns the natural logarithm of a positive finite number. */
static pair log_of(double value) {
  int32_t power = 0, i;
  pair ratio, square, sum;
  double tail = 0;
  if (value < 0x1p-1022) {
    value *= 0x1p54;
    power = -54;
  }
  power += (int32_t)(bits_of(value) >> 52) - 1023;
  value = of_bits((bits_of(value) & 0xfffffffffffffu) | (uint64_t)1023 << 52);
  if (value > 1.4142135623730951) {
    value /= 2;
    power += 1;
  }
  /* log(v) = 2 atanh((v - 1) / (v + 1)), whose argument is at most 0.172. */
  ratio = divide(number(value - 1), exact_sum(value, 1));
  square = multiply(ratio, ratio);
  for (i = 33; i >= 11; i -= 2) tail = tail * square.high + 1.0 / i;
  sum = number(tail);
  for (i = 9; i >= 1; i -= 2) sum = add(multiply(sum, square), divide(number(1), number(i)));
  sum = multiply(sum, ratio);
  sum.high *= 2;
  sum.low *= 2;
  return add(multiply(log_of_two, number(power)), sum);
}

/* Returns the exponential of a number between -746 and 710. */
static double exp_of(pair value) {
  double scaled = value.high * 1.4426950408889634;
  int32_t power = (int32_t)(scaled + (scaled < 0 ? -0.5 : 0.5)), half, i;
  pair rest = add(value, multiply(log_of_two, number(-power))), square, sum;
  double tail = 0;
  rest.high *= 0x1p-4;
  rest.low *= 0x1p-4;
  /* exp(r) - 1 by its series, and four times exp(2r) - 1 = (exp(r) - 1)(exp(r) + 1). */
  for (i = 12; i >= 4; --i) tail = (tail * rest.high + 1) / i;
  square = multiply(rest, rest);
  sum = add(divide(number(1), number(6)), number(rest.high * tail / 6));
  sum = multiply(multiply(square, rest), sum);
  square.high *= 0.5;
  square.low *= 0.5;
  sum = add(add(rest, square), sum);
  for (i = 0; i < 4; ++i) sum = multiply(sum, add(number(2), sum));
  sum = add(number(1), sum);
  half = power / 2;
  return sum.high * power_of_two(half) * power_of_two(power - half);
}

static int32_t is_integer(double value) {
  if (value >= 0x1p53 || value <= -0x1p53) return 1;
  return (double)(int64_t)value == value;
}

static int32_t is_odd(double value) {
  if (value >= 0x1p53 || value <= -0x1p53) return 0;
  return is_integer(value) && ((int64_t)value & 1);
}

double pow(double base, double exponent) {
  const double infinity = of_bits((uint64_t)2047 << 52);
  double size = base < 0 ? -base : base, sign = 1, about;
  pair log;
  if (exponent == 0 || base == 1) return 1;
  if (base != base || exponent != exponent) return base + exponent;
  if (exponent == infinity || exponent == -infinity) {
    if (size == 1) return 1;
    return (size > 1) == (exponent > 0) ? infinity : 0;
  }
  if (bits_of(base) >> 63 && is_odd(exponent)) sign = -1;
  if (size == 0 || size == infinity) return sign * ((size == 0) == (exponent > 0) ? 0 : infinity);
  if (base < 0 && !is_integer(exponent)) return of_bits((uint64_t)0x7ff8 << 48);
  log = log_of(size);
  about = log.high * exponent;
  if (about > 710) return sign * infinity;
  if (about < -746) return sign * 0;
  if (about < 0x1p-60 && about > -0x1p-60) return sign * (1 + about);
  return sign * exp_of(multiply(log, number(exponent)));
}
