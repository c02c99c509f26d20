/* The allocator of the C library, in which one allocation of a call fails. It is loaded before the
 * C library's own.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t number, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

/* The allocations until the one that fails; 0 for none. Others than the thread that calls are not
 * counted. */
static __thread int64_t left = 0;
static __thread int64_t count = 0;
/* The bytes of the smallest allocation that is counted. */
static __thread size_t least = 0;

static int fails(size_t size) {
  if (size < least) return 0;
  ++count;
  return left > 0 && --left == 0;
}

void* malloc(size_t size) { return fails(size) ? NULL : __libc_malloc(size); }
void* calloc(size_t number, size_t size) {
  return fails(number * size) ? NULL : __libc_calloc(number, size);
}
void* realloc(void* memory, size_t size) {
  return fails(size) ? NULL : __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  return fails(size) ? NULL : __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) {
  void* taken = memalign(alignment, size);
  if (taken == NULL) return ENOMEM;
  *memory = taken;
  return 0;
}

typedef int32_t (*step_of_trainer)(void* trainer, const void* batch, int64_t number, void* result);

/* Runs a step in which the allocation of a number fails, from 1, of those of at least so many
 * bytes; returns its code, and the number of these allocations. */
int32_t step_without_memory(step_of_trainer step, void* trainer, const void* batch, void* result,
                            int64_t failing, uint64_t smallest, int64_t* allocations) {
  int32_t code;
  count = 0;
  least = smallest;
  left = failing;
  code = step(trainer, batch, 1, result);
  left = 0;
  *allocations = count;
  return code;
}
