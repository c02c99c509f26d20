/* Loads states with changed bytes, whose checksum is removed. The arguments are the file of a state
 * and the number of changes. An accepted state must be one that the trainer reads again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

#define MOST (1 << 20)

static unsigned char memory[RELAX_GRAD_STEP_MEMORY], file[MOST], saved[MOST], changed[MOST];
static uint64_t seed = 88172645463325252u;

static uint64_t number_below(uint64_t end) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (seed >> 11) % end;
}

/* Makes the file one of version 1, which has no checksum. */
static void remove_checksum(uint64_t size) {
  static const char key[] = "\"crc32\"", version[] = "version\\\": 2";
  uint64_t i;
  for (i = 0; i + sizeof version < size; ++i) {
    if (memcmp(file + i, key, sizeof key - 1) == 0) file[i + 5] = '9';
    if (memcmp(file + i, version, sizeof version - 1) == 0) file[i + sizeof version - 2] = '1';
  }
}

static void change(uint64_t size, uint64_t header) {
  static const char characters[] = "{}[]\":,\\u0n19-.e tx";
  uint64_t changes = 1 + number_below(3);
  memcpy(changed, file, (size_t)size);
  while (changes-- > 0) {
    uint64_t at = number_below(4) > 0 ? 8 + number_below(header) : number_below(size);
    unsigned char byte = (unsigned char)number_below(256);
    if (number_below(2) > 0) byte = (unsigned char)characters[number_below(sizeof characters - 1)];
    if (at < size) changed[at] = byte;
  }
}

/* Loads bytes that end at the end of their memory, so that a sanitizer finds reads behind them. */
static int32_t load(relax_grad_trainer* trainer, const unsigned char* data, uint64_t size) {
  unsigned char* exact = malloc((size_t)size + 1);
  int32_t code;
  memcpy(exact + 1, data, (size_t)size);
  code = relax_grad_load_state(trainer, exact + 1, size);
  free(exact);
  return code;
}

int main(int count, char** arguments) {
  relax_grad_trainer* trainer;
  uint64_t size, header = 0, out;
  long left = count > 2 ? atol(arguments[2]) : 0;
  FILE* opened = fopen(arguments[1], "rb");
  int32_t i;
  size = fread(file, 1, sizeof file, opened);
  fclose(opened);
  remove_checksum(size);
  for (i = 7; i >= 0; --i) header = header << 8 | file[i];
  if (relax_grad_open_static(&RELAX_GRAD_MODEL, memory, sizeof memory, file, size, NULL,
                             &trainer) != RELAX_GRAD_OK) {
    printf("%s\n", relax_grad_last_error());
    return 1;
  }
  for (; left > 0; --left) {
    change(size, header);
    if (load(trainer, changed, number_below(8) > 0 ? size : number_below(size)) != RELAX_GRAD_OK)
      continue;
    if (relax_grad_save_state(trainer, saved, sizeof saved, &out) != RELAX_GRAD_OK ||
        load(trainer, saved, out) != RELAX_GRAD_OK) {
      printf("an accepted state is refused after it was saved: %s\n", relax_grad_last_error());
      return 1;
    }
  }
  return 0;
}
