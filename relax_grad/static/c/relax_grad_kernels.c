/* What kernels need of TVM's runtime: workspaces in the order of a stack, parallel loops, and the
 * text of an error. Kernels call most of these functions by pointers, which their
 * object file defines weakly. */
#include <stdarg.h>

#include "relax_grad_model.h"

/* The workspaces of all threads; each thread has its own one and the bytes of it that are taken. */
static uint8_t* workspaces;
static uint64_t workspace_bytes;
#if RELAX_GRAD_THREADS > 1
static __thread uint8_t* workspace;
static __thread uint64_t workspace_top;
#else
static uint8_t* workspace;
static uint64_t workspace_top;
#endif
static char message[512];

const char* relax_grad_last_error(void) { return message; }

void relax_grad_use_workspaces(uint8_t* begin, uint64_t size) {
  workspaces = begin;
  workspace_bytes = size;
  relax_grad_use_workspace_of(0);
}

void relax_grad_use_workspace_of(int32_t thread) {
  workspace = workspaces + (uint64_t)thread * workspace_bytes;
  workspace_top = 0;
}

static uint64_t append(uint64_t at, const char* text) {
  while (text != NULL && *text != 0 && at + 1 < sizeof message) message[at++] = *text++;
  message[at] = 0;
  return at;
}

static uint64_t append_number(uint64_t at, int64_t number) {
  char digits[21];
  int32_t place = 20;
  uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
  digits[place] = 0;
  do {
    digits[--place] = (char)('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  if (number < 0) digits[--place] = '-';
  return append(at, digits + place);
}

int32_t relax_grad_fail(const char* format, ...) {
  uint64_t at = 0;
  va_list values;
  va_start(values, format);
  message[0] = 0;
  for (; *format != 0; ++format) {
    char one[2] = {*format, 0};
    if (*format != '%') {
      at = append(at, one);
    } else if (*++format == 's') {
      at = append(at, va_arg(values, const char*));
    } else {
      at = append_number(at, va_arg(values, int64_t));
    }
  }
  va_end(values);
  return RELAX_GRAD_ERROR;
}

static void* allocate(int device, int id, uint64_t bytes, int code, int bits) {
  uint64_t size = (bytes + RELAX_GRAD_ALIGNMENT - 1) / RELAX_GRAD_ALIGNMENT * RELAX_GRAD_ALIGNMENT;
  uint8_t* found = workspace + workspace_top;
  (void)device, (void)id, (void)code, (void)bits;
  if (size > workspace_bytes - workspace_top) return NULL;
  workspace_top += size;
  return found;
}

static int give_back(int device, int id, void* pointer) {
  (void)device, (void)id;
  workspace_top = (uint64_t)((uint8_t*)pointer - workspace);
  return 0;
}

#if RELAX_GRAD_THREADS == 1
static int relax_grad_launch(relax_grad_body* body, void* data, int tasks) {
  relax_grad_tasks one = {NULL, 1};
  (void)tasks;
  return body(0, &one, data);
}

static int relax_grad_barrier(int task, relax_grad_tasks* of) {
  (void)task, (void)of;
  return 0;
}
#endif

RELAX_GRAD_HIDDEN void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text);
RELAX_GRAD_HIDDEN void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts,
                                                         int32_t count);

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  relax_grad_fail("a kernel failed: %s: %s", kind, text);
}

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  uint64_t at = 0;
  int32_t i;
  relax_grad_fail("a kernel failed: %s: ", kind);
  while (message[at] != 0) ++at;
  for (i = 0; i < count; ++i) at = append(at, parts[i]);
}

RELAX_GRAD_HIDDEN void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
RELAX_GRAD_HIDDEN int (*__TVMBackendFreeWorkspace)(int, int, void*) = give_back;
RELAX_GRAD_HIDDEN int (*__TVMBackendParallelLaunch)(relax_grad_body*, void*,
                                                    int) = relax_grad_launch;
RELAX_GRAD_HIDDEN int (*__TVMBackendParallelBarrier)(int, relax_grad_tasks*) = relax_grad_barrier;
