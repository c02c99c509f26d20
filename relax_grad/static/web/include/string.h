/* The functions of C's library that the trainer uses, for WebAssembly without a library of C. */
#ifndef RELAX_GRAD_STRING_H_
#define RELAX_GRAD_STRING_H_

#include <stddef.h>

void* memcpy(void* to, const void* from, size_t size);
void* memmove(void* to, const void* from, size_t size);
void* memset(void* to, int value, size_t size);
int memcmp(const void* one, const void* other, size_t size);

#endif /* RELAX_GRAD_STRING_H_ */
