/* The functions of C's library that move bytes, by the instructions of WebAssembly. */
#include <string.h>

void* memcpy(void* to, const void* from, size_t size) { return __builtin_memcpy(to, from, size); }

void* memmove(void* to, const void* from, size_t size) { return __builtin_memmove(to, from, size); }

void* memset(void* to, int value, size_t size) { return __builtin_memset(to, value, size); }

int memcmp(const void* one, const void* other, size_t size) {
  const unsigned char *a = one, *b = other;
  for (; size > 0; --size, ++a, ++b) {
    if (*a != *b) return *a < *b ? -1 : 1;
  }
  return 0;
}
