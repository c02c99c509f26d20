/* Multiply-adds of float32 at the peak of a core: independent chains in registers, without memory.
   The compiler's flags (-march=native, or -mavx2 -mfma) name the instructions. */
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));

/* Two units with a latency of 4 or 5 cycles need 10 chains; 12 and their 2 operands fit in 16
 * registers. */
#define EACH_CHAIN(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
#define CHAINS 12

/* Compute `rounds` multiply-adds in each chain, and return the number of floating-point operations.
 */
double multiply_adds(long rounds, float factor, float addend, float *result) {
  const vector x = factor - (vector){0}, y = addend - (vector){0};
#define START(i) vector s##i = x * (float)i;
#define STEP(i) s##i = s##i * x + y;
#define ADD(i) total += s##i;
  EACH_CHAIN(START)
  for (long round = 0; round < rounds; round++) {
    EACH_CHAIN(STEP)
  }
  vector total = {0};
  EACH_CHAIN(ADD)
  *result = total[0];
  return 2.0 * LANES * CHAINS * (double)rounds;
}

static double nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

/* Let two threads, of ranks 0 and 1, pass a cache line to each other for about a millisecond, and
   return the nanoseconds of a way there and back. Both threads call it with the same line, which is
   0 before. */
double exchange(volatile int *line, int rank) {
  const double begin = nanoseconds();
  double now = begin;
  int trips = 0;
  for (; now - begin < 1e6; trips++) {
    if (rank == 0) {
      __atomic_store_n(line, 2 * trips + 1, __ATOMIC_RELEASE);
    }
    const int wanted = 2 * trips + 2 - rank;
    for (int tries = 1; __atomic_load_n(line, __ATOMIC_ACQUIRE) != wanted; tries++) {
      if (tries % 1024 == 0 && nanoseconds() - begin > 2e6) {
        return (nanoseconds() - begin) / (trips + 1);
      }
    }
    if (rank == 1) {
      __atomic_store_n(line, 2 * trips + 2, __ATOMIC_RELEASE);
    }
    if (trips % 16 == 0) {
      now = nanoseconds();
    }
  }
  return (now - begin) / trips;
}
