/* Parallel regions of OpenMP without work, by the entry point of GNU's library, which the process
   has loaded. */
extern void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);

static void nothing(void *data) { (void)data; }

/* Run `count` regions, one after the other. */
void regions(long count, unsigned threads) {
  for (long i = 0; i < count; i++) GOMP_parallel(nothing, 0, threads, 0);
}
