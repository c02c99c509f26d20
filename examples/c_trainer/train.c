/* Trains an exported model on examples in a file, in C.
 *
 *   train_c FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE [OUTPUTS]
 *
 * FOLDER was written by TrainStep.export. DATA is a file of safetensors with a tensor for each
 * input and target of the step, whose first axis counts the examples. The last examples that fill
 * no batch are left out. STATE gets the state of training, and OUTPUTS the model's outputs for all
 * examples, in evaluation mode.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relax_grad_trainer.h"

#define MOST_AXES 64

/* Leaves a function with a code that is not RELAX_GRAD_OK. */
#define TRY(call)                             \
  do {                                        \
    int32_t code_ = (call);                   \
    if (code_ != RELAX_GRAD_OK) return code_; \
  } while (0)

typedef struct arguments {
  const char *folder, *data, *state, *outputs;
  int64_t epochs, rows;
  double learning_rate;
} arguments;

static int32_t refuse(const char* reason, const char* text) {
  fprintf(stderr, "error: %s%s\n", reason, text);
  return -1;
}

/* Finds the tensor of a file by its name. */
static int32_t find(relax_grad_file* file, const char* name, relax_grad_tensor* tensor) {
  int64_t number, i;
  TRY(relax_grad_num_file_tensors(file, &number));
  for (i = 0; i < number; ++i) {
    TRY(relax_grad_file_tensor(file, i, tensor));
    if (strcmp(tensor->name, name) == 0) return RELAX_GRAD_OK;
  }
  return refuse("the data have no tensor ", name);
}

/* Runs the steps of an epoch. `all` has the inputs for all examples, `batch` and `shapes` room. */
static int32_t train_epoch(relax_grad_trainer* trainer, const relax_grad_tensor* all,
                           int64_t inputs, relax_grad_tensor* batch, int64_t (*shapes)[MOST_AXES],
                           int64_t rows, double* loss) {
  int64_t batches = all[0].shape[0] / rows, i, k;
  relax_grad_result result;
  *loss = 0;
  for (k = 0; k < batches; ++k) {
    for (i = 0; i < inputs; ++i) {
      uint64_t row = all[i].num_bytes / (uint64_t)all[i].shape[0];
      batch[i] = all[i];
      memcpy(shapes[i], all[i].shape, (size_t)all[i].num_axes * sizeof(int64_t));
      shapes[i][0] = rows;
      batch[i].shape = shapes[i];
      batch[i].data = (char*)all[i].data + (uint64_t)(k * rows) * row;
      batch[i].num_bytes = (uint64_t)rows * row;
    }
    TRY(relax_grad_step(trainer, batch, inputs, &result));
    *loss += result.loss / (double)batches;
  }
  return RELAX_GRAD_OK;
}

/* Writes the outputs for all examples. */
static int32_t predict(relax_grad_trainer* trainer, relax_grad_file* file, const char* path) {
  int64_t inputs, outputs, i;
  relax_grad_type type;
  relax_grad_tensor *given, *found;
  int32_t code = RELAX_GRAD_OK;
  TRY(relax_grad_num_inputs(trainer, &inputs));
  given = calloc((size_t)inputs + 1, sizeof *given);
  if (given == NULL) return refuse("there is not enough memory", "");
  for (i = 0; i < inputs && code == RELAX_GRAD_OK; ++i) {
    code = relax_grad_input(trainer, i, &type);
    if (code == RELAX_GRAD_OK) code = find(file, type.name, &given[i]);
  }
  if (code == RELAX_GRAD_OK) code = relax_grad_predict(trainer, given, inputs);
  free(given);
  TRY(code);
  TRY(relax_grad_num_outputs(trainer, &outputs));
  found = calloc((size_t)outputs + 1, sizeof *found);
  if (found == NULL) return refuse("there is not enough memory", "");
  for (i = 0; i < outputs && code == RELAX_GRAD_OK; ++i) {
    code = relax_grad_output(trainer, i, &found[i]);
  }
  if (code == RELAX_GRAD_OK) code = relax_grad_write_file(path, found, outputs);
  free(found);
  return code;
}

static int32_t train(relax_grad_trainer* trainer, relax_grad_file* file, const arguments* given) {
  relax_grad_tensor all[16], batch[16];
  int64_t shapes[16][MOST_AXES];
  relax_grad_type type;
  relax_grad_counters counters;
  int64_t inputs, i;
  TRY(relax_grad_num_batch(trainer, &inputs));
  if (inputs < 1 || inputs > 16) return refuse("this program is for 1 to 16 inputs", "");
  for (i = 0; i < inputs; ++i) {
    TRY(relax_grad_batch(trainer, i, &type));
    TRY(find(file, type.name, &all[i]));
    if (all[i].num_axes < 1 || all[i].num_axes > MOST_AXES || all[i].shape[0] < given->rows ||
        all[i].shape[0] != all[0].shape[0]) {
      return refuse("too few rows, or another number of rows than the first input: ", type.name);
    }
  }
  TRY(relax_grad_set_hyperparameter(trainer, "lr", given->learning_rate));
  TRY(relax_grad_get_counters(trainer, &counters));
  while (counters.epoch < given->epochs) {
    double loss;
    TRY(train_epoch(trainer, all, inputs, batch, shapes, given->rows, &loss));
    /* The step has counted itself; epochs are counted here. */
    TRY(relax_grad_get_counters(trainer, &counters));
    counters.epoch += 1;
    TRY(relax_grad_set_counters(trainer, &counters));
    printf("epoch %ld: mean loss %g\n", (long)counters.epoch, loss);
  }
  TRY(relax_grad_save(trainer, given->state));
  return given->outputs ? predict(trainer, file, given->outputs) : RELAX_GRAD_OK;
}

/* Returns 0 for a text that is no integer from 1. */
static int64_t positive(const char* text) {
  char* end;
  long value;
  errno = 0;
  value = strtol(text, &end, 10);
  return *text && !*end && errno == 0 && value > 0 ? value : 0;
}

int main(int argc, char** argv) {
  arguments given = {NULL, NULL, NULL, NULL, 0, 0, 0};
  relax_grad_trainer* trainer = NULL;
  relax_grad_file* file = NULL;
  char* end = NULL;
  int32_t code;
  if (argc != 7 && argc != 8) {
    refuse("usage: train_c FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE [OUTPUTS]", "");
    return 2;
  }
  given.folder = argv[1];
  given.data = argv[2];
  given.epochs = positive(argv[3]);
  given.rows = positive(argv[4]);
  given.learning_rate = strtod(argv[5], &end);
  given.state = argv[6];
  given.outputs = argc == 8 ? argv[7] : NULL;
  if (!given.epochs || !given.rows || !*argv[5] || *end) {
    refuse("EPOCHS and ROWS must be integers from 1, and LEARNING_RATE a number", "");
    return 2;
  }
  code = relax_grad_open(given.folder, NULL, &trainer);
  if (code == RELAX_GRAD_OK) code = relax_grad_read_file(given.data, &file);
  if (code == RELAX_GRAD_OK) code = train(trainer, file, &given);
  if (code > RELAX_GRAD_OK) refuse(relax_grad_last_error(), "");
  relax_grad_close_file(file);
  relax_grad_close(trainer);
  return code == RELAX_GRAD_OK ? 0 : 1;
}
