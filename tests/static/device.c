/* Trains an exported step on a processor or in its emulator: reads the files state.safetensors and
 * batches, and writes losses, a prediction, the state and the reason of a refused batch to the file
 * written. ROWS is the batch size, STEPS the number of steps. */
#include <stdint.h>
#include <string.h>

#include "step.h"

#if defined(__arm__) && defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'

/* A program without an operating system: the vectors, and files of the host by semihosting. */
extern uint32_t stack_end[], data_begin[], data_end[], data_loaded[], bss_begin[], bss_end[];
int main(void);

static intptr_t host(intptr_t operation, const void* arguments) {
  register intptr_t r0 __asm__("r0") = operation;
  register const void* r1 __asm__("r1") = arguments;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

enum { OPEN = 1, CLOSE = 2, WRITE = 5, READ = 6, EXIT = 32 };
enum { FOR_READING = 1, FOR_WRITING = 5 };

static void end(int code) {
  const intptr_t arguments[2] = {0x20026, code};
  host(EXIT, arguments);
  for (;;) continue;
}

static intptr_t opened(const char* name, intptr_t mode) {
  const intptr_t arguments[3] = {(intptr_t)name, mode, (intptr_t)strlen(name)};
  return host(OPEN, arguments);
}

static uint64_t read_file(const char* name, void* data, uint64_t size) {
  const intptr_t arguments[3] = {opened(name, FOR_READING), (intptr_t)data, (intptr_t)size};
  uint64_t left = (uint64_t)host(READ, arguments);
  host(CLOSE, arguments);
  return size - left;
}

static void write_file(const char* name, const void* data, uint64_t size) {
  const intptr_t arguments[3] = {opened(name, FOR_WRITING), (intptr_t)data, (intptr_t)size};
  host(WRITE, arguments);
  host(CLOSE, arguments);
}

static void fault(void) { end(3); }

void reset(void);
void reset(void) {
  /* The floating-point unit and the vectors. */
  *(volatile uint32_t*)0xE000ED88 |= 0xFu << 20;
  __asm__ volatile("dsb\n isb");
  memcpy(data_begin, data_loaded, (uintptr_t)data_end - (uintptr_t)data_begin);
  memset(bss_begin, 0, (uintptr_t)bss_end - (uintptr_t)bss_begin);
  end(main());
}

__attribute__((section(".vectors"), used)) static void* const vectors[16] = {
    stack_end, (void*)reset, (void*)fault, (void*)fault, (void*)fault, (void*)fault, (void*)fault};

#else

#include <stdio.h>

static uint64_t read_file(const char* name, void* data, uint64_t size) {
  FILE* file = fopen(name, "rb");
  uint64_t read = file ? fread(data, 1, size, file) : 0;
  if (file) fclose(file);
  return read;
}

static void write_file(const char* name, const void* data, uint64_t size) {
  FILE* file = fopen(name, "wb");
  if (file && fwrite(data, 1, size, file) != size) remove(name);
  if (file) fclose(file);
}

#endif

typedef struct {
  float input[ROWS * 64];
  int64_t target[ROWS];
} batch;

static unsigned char memory[RELAX_GRAD_STEP_MEMORY];
static batch batches[STEPS];
static struct {
  double losses[STEPS];
  float prediction[ROWS * 10];
  char refused[128];
  unsigned char state[1 << 15];
} written;

static relax_grad_trainer* trainer;

static int32_t step(batch* given, relax_grad_result* result) {
  int64_t images[4] = {ROWS, 1, 8, 8}, labels[1] = {ROWS};
  relax_grad_tensor tensors[2] = {
      {"input", "float32", 4, images, given->input, sizeof given->input},
      {"target", "int64", 1, labels, given->target, sizeof given->target},
  };
  return relax_grad_step(trainer, tensors, 2, result);
}

static int32_t predict(batch* given, float* prediction, uint64_t size) {
  int64_t images[4] = {ROWS, 1, 8, 8};
  relax_grad_tensor input = {"input", "float32", 4, images, given->input, sizeof given->input};
  relax_grad_tensor output;
  int32_t code = relax_grad_predict_ema(trainer, &input, 1);
  if (code == RELAX_GRAD_OK) code = relax_grad_output(trainer, 0, &output);
  if (code == RELAX_GRAD_OK && output.num_bytes == size) memcpy(prediction, output.data, size);
  return code;
}

static int32_t train(void) {
  relax_grad_result result;
  uint64_t size = read_file("state.safetensors", written.state, sizeof written.state);
  int32_t code, i;
  if (read_file("batches", batches, sizeof batches) != sizeof batches) return 2;
  code = relax_grad_open_static(&RELAX_GRAD_MODEL, memory, sizeof memory, written.state, size, NULL,
                                &trainer);
  for (i = 0; i < STEPS && code == RELAX_GRAD_OK; ++i) {
    code = step(&batches[i], &result);
    written.losses[i] = result.loss;
  }
  if (code == RELAX_GRAD_OK)
    code = predict(&batches[0], written.prediction, sizeof written.prediction);
  if (code != RELAX_GRAD_OK) return code;
  batches[0].target[1] = 10; /* no such class */
  if (step(&batches[0], &result) != RELAX_GRAD_ERROR) return 2;
  strncpy(written.refused, relax_grad_last_error(), sizeof written.refused - 1);
  memset(written.state, 0, sizeof written.state);
  return relax_grad_save_state(trainer, written.state, sizeof written.state, &size);
}

int main(void) {
  int32_t code = train();
  if (code == RELAX_GRAD_OK)
    write_file("written", &written, sizeof written);
  else
    write_file("written", relax_grad_last_error(), strlen(relax_grad_last_error()));
  return code;
}
