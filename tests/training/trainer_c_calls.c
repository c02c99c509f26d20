/* Calls the functions of relax_grad_trainer.h in ways that do not fit, and examines the texts of
 * the errors and that the trainer still works; then trains, and writes the state.
 *
 * The arguments are the folder of a step with the inputs x (6, 3) and y (6) in float32, a file with
 * examples for it, a damaged folder, and the file for the state.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relax_grad_trainer.h"

static int right = 0, wrong = 0;

/* Examines that a call has failed with a text. */
static void expect_code(int32_t found, int32_t code, const char* message) {
  if (found != code || strstr(relax_grad_last_error(), message) == NULL) {
    printf("expected %d: %s\nfound %d: %s\n", (int)code, message, (int)found,
           relax_grad_last_error());
    ++wrong;
  } else {
    ++right;
  }
}

static void expect(int32_t found, const char* message) {
  expect_code(found, RELAX_GRAD_ERROR, message);
}

static void need(int32_t code, const char* call) {
  if (code == RELAX_GRAD_OK) return;
  printf("%s failed: %s\n", call, relax_grad_last_error());
  exit(1);
}
#define NEED(call) need(call, #call)

static relax_grad_tensor tensor_of(const char* name, int64_t axes, const int64_t* shape,
                                   void* data) {
  relax_grad_tensor tensor;
  int64_t i;
  tensor.name = name;
  tensor.dtype = "float32";
  tensor.num_axes = axes;
  tensor.shape = shape;
  tensor.data = data;
  tensor.num_bytes = 4;
  for (i = 0; i < axes; ++i) tensor.num_bytes *= (uint64_t)shape[i];
  return tensor;
}

static void wrong_handles(const char* folder, relax_grad_trainer* trainer) {
  relax_grad_trainer* other = NULL;
  relax_grad_file* file = NULL;
  relax_grad_result result;
  relax_grad_counters counters;
  int64_t number;
  expect(relax_grad_num_batch(NULL, &number), "trainer is a null pointer");
  expect(relax_grad_num_batch(trainer, NULL), "number is a null pointer");
  expect(relax_grad_step(NULL, NULL, 0, &result), "trainer is a null pointer");
  expect(relax_grad_save(NULL, "x"), "trainer is a null pointer");
  expect(relax_grad_save(trainer, NULL), "path is a null pointer");
  expect(relax_grad_load(trainer, NULL), "path is a null pointer");
  expect(relax_grad_get_counters(trainer, NULL), "counters is a null pointer");
  expect(relax_grad_open(NULL, NULL, &other), "folder is a null pointer");
  expect(relax_grad_open(folder, NULL, NULL), "trainer is a null pointer");
  expect(relax_grad_init_options(NULL), "options is a null pointer");
  expect(relax_grad_num_file_tensors(NULL, &number), "file is a null pointer");
  expect(relax_grad_read_file("/no/file", &file), "/no/file cannot be read");
  NEED(relax_grad_close(NULL));
  NEED(relax_grad_close_file(NULL));
  NEED(relax_grad_open(folder, NULL, &other));
  NEED(relax_grad_close(other));
  expect(relax_grad_close(other), "trainer is closed, or was never open");
  expect(relax_grad_get_counters(other, &counters), "trainer is closed, or was never open");
  expect(relax_grad_num_inputs((relax_grad_trainer*)&number, &number), "or was never open");
}

static void wrong_batches(relax_grad_trainer* trainer, const relax_grad_tensor* good) {
  relax_grad_tensor batch[3];
  relax_grad_result result;
  int64_t shape[65], i;
  float nans[18];
  memcpy(batch, good, 2 * sizeof *good);
  batch[2] = good[0];
  expect(relax_grad_step(trainer, good, 1, &result), "y is missing; the inputs are x, y");
  expect(relax_grad_step(trainer, NULL, 2, &result), "batch is a null pointer");
  expect(relax_grad_step(trainer, good, -1, &result), "number must not be negative, but it is -1");
  expect(relax_grad_step(trainer, batch, 3, &result), "x is given twice");
  expect(relax_grad_step(trainer, good, 2, NULL), "result is a null pointer");
  batch[2].name = "z";
  expect(relax_grad_step(trainer, batch, 3, &result), "there is no input z; the inputs are x, y");
  batch[2].name = NULL;
  expect(relax_grad_step(trainer, batch, 3, &result), "batch[2]: name is a null pointer");
  batch[0].dtype = "float64";
  expect(relax_grad_step(trainer, batch, 2, &result),
         "x: num_bytes is 72, but a tensor of float64 and shape (6, 3) has 144");
  batch[0].dtype = "int32";
  expect(relax_grad_step(trainer, batch, 2, &result),
         "x must have shape (6, 3) and dtype float32, but it has (6, 3) and int32");
  batch[0].dtype = "float31";
  expect(relax_grad_step(trainer, batch, 2, &result), "x: there is no dtype float31");
  batch[0].dtype = NULL;
  expect(relax_grad_step(trainer, batch, 2, &result), "x: dtype is a null pointer");
  batch[0] = good[0];
  batch[0].data = NULL;
  expect(relax_grad_step(trainer, batch, 2, &result), "x: data is a null pointer");
  batch[0] = good[0];
  batch[0].num_axes = -1;
  expect(relax_grad_step(trainer, batch, 2, &result), "x: num_axes must be from 0 to 64");
  batch[0].num_axes = 65;
  expect(relax_grad_step(trainer, batch, 2, &result),
         "num_axes must be from 0 to 64, but it is 65");
  batch[0].num_axes = 2;
  batch[0].shape = NULL;
  expect(relax_grad_step(trainer, batch, 2, &result), "x: shape is a null pointer");
  shape[0] = 3;
  shape[1] = 6;
  batch[0].shape = shape;
  expect(relax_grad_step(trainer, batch, 2, &result), "but it has (3, 6) and float32");
  shape[0] = -6;
  shape[1] = -3;
  expect(relax_grad_step(trainer, batch, 2, &result), "x cannot have the shape (-6, -3)");
  for (i = 0; i < 64; ++i) shape[i] = 4;
  batch[0].num_axes = 64;
  expect(relax_grad_step(trainer, batch, 2, &result), "has more than memory can hold");
  batch[0] = good[0];
  batch[0].num_bytes = 18;
  expect(relax_grad_step(trainer, batch, 2, &result), "x: num_bytes is 18, but");
  batch[0] = good[0];
  for (i = 0; i < 18; ++i) nans[i] = (float)NAN;
  batch[0].data = nans;
  expect_code(relax_grad_step(trainer, batch, 2, &result), RELAX_GRAD_NOT_FINITE,
              "the loss is nan in step 1; everything is as before the step");
}

static void wrong_names(relax_grad_trainer* trainer) {
  relax_grad_type type;
  relax_grad_tensor tensor;
  relax_grad_counters counters = {-1, 0, 0, 0, 0, 0};
  const char* name;
  double value;
  int64_t number;
  expect(relax_grad_batch(trainer, 2, &type), "there is no input of the step 2, but 2 from 0");
  expect(relax_grad_batch(trainer, -1, &type), "there is no input of the step -1");
  expect(relax_grad_input(trainer, 0, &type), "there is no input of the prediction 0, but 0");
  expect(relax_grad_batch(trainer, 0, NULL), "type is a null pointer");
  expect(relax_grad_predict(trainer, NULL, 0), "the exported model has no function for prediction");
  expect(relax_grad_set_hyperparameter(trainer, "rate", 1), "no hyperparameter rate, but lr");
  expect(relax_grad_set_hyperparameter(trainer, NULL, 1), "name is a null pointer");
  expect(relax_grad_set_hyperparameter(trainer, "lr", INFINITY),
         "lr must be finite, but it is inf");
  expect(relax_grad_get_hyperparameter(trainer, "lr", NULL), "value is a null pointer");
  expect(relax_grad_hyperparameter_name(trainer, 9, &name), "there is no hyperparameter 9");
  expect(relax_grad_metric(trainer, 99, &name, &value), "there is no metric 99");
  expect(relax_grad_output(trainer, 99, &tensor), "there is no output 99");
  expect(relax_grad_num_group_tensors(trainer, "weights", &number), "there is no group weights");
  expect(relax_grad_num_group_tensors(trainer, NULL, &number), "group is a null pointer");
  expect(relax_grad_group_tensor(trainer, "params", 2, &tensor), "no tensor of the group 2, but 2");
  expect(relax_grad_set_counters(trainer, &counters), "the counter seed must be from 0");
}

static void wrong_files(const char* data, const char* damaged, const char* folder,
                        relax_grad_trainer* trainer) {
  relax_grad_trainer* other = (relax_grad_trainer*)&right;
  relax_grad_options options;
  relax_grad_tensor flag;
  int64_t shape[1];
  unsigned char byte = 2;
  shape[0] = 1;
  expect(relax_grad_open(damaged, NULL, &other), "is damaged");
  if (other != NULL) ++wrong;
  expect(relax_grad_open("/no/folder", NULL, &other), "/no/folder/manifest.json cannot be read");
  expect(relax_grad_load(trainer, data), "has no state of training");
  expect(relax_grad_save(trainer, "/no/folder/state"), "cannot be written");
  NEED(relax_grad_init_options(&options));
  options.num_threads = -1;
  expect(relax_grad_open(folder, &options, &other), "num_threads must not be negative");
  NEED(relax_grad_init_options(&options));
  options.level = "x86-64-v9";
  expect(relax_grad_open(folder, &options, &other), "has no version for x86-64-v9");
  flag = tensor_of("flag", 1, shape, &byte);
  flag.dtype = "bool";
  flag.num_bytes = 1;
  expect(relax_grad_write_file("/no/folder/file", &flag, 1), "booleans that are neither 0 nor 1");
  byte = 1;
  expect(relax_grad_write_file("/no/folder/file", &flag, 1), "cannot be written");
  expect(relax_grad_write_file(NULL, &flag, 1), "path is a null pointer");
  flag.name = "half \xc3";
  expect(relax_grad_write_file("/no/folder/file", &flag, 1),
         "the name of a tensor must be UTF-8, but it is half \\xc3");
}

/* Trains on the rows of a file, from buffers without alignment that are changed after each step. */
static void train(relax_grad_trainer* trainer, relax_grad_file* file) {
  relax_grad_tensor x, y, batch[2];
  relax_grad_result result;
  int64_t number, shape_x[2] = {6, 3}, shape_y[1] = {6}, k, i;
  char room[1 + 18 * 4 + 6 * 4];
  const char* name;
  double value;
  NEED(relax_grad_num_file_tensors(file, &number));
  if (number != 2) ++wrong;
  NEED(relax_grad_file_tensor(file, 0, &x));
  NEED(relax_grad_file_tensor(file, 1, &y));
  for (k = 0; k < y.shape[0] / 6; ++k) {
    memcpy(room + 1, (const char*)x.data + k * 72, 72);
    memcpy(room + 73, (const char*)y.data + k * 24, 24);
    /* Their order does not matter. */
    batch[0] = tensor_of("y", 1, shape_y, room + 73);
    batch[1] = tensor_of("x", 2, shape_x, room + 1);
    NEED(relax_grad_step(trainer, batch, 2, &result));
    memset(room, 77, sizeof room);
    printf("loss %.17g\n", result.loss);
    if (!result.applied) ++wrong;
  }
  NEED(relax_grad_num_metrics(trainer, &number));
  for (i = 0; i < number; ++i) {
    NEED(relax_grad_metric(trainer, i, &name, &value));
    printf("metric %s %.17g\n", name, value);
  }
  NEED(relax_grad_num_outputs(trainer, &number));
  for (i = 0; i < number; ++i) {
    relax_grad_tensor output;
    NEED(relax_grad_output(trainer, i, &output));
    printf("output %s %s %d %.9g\n", output.name, output.dtype, (int)output.num_bytes,
           *(const float*)output.data);
  }
}

int main(int argc, char** argv) {
  relax_grad_trainer* trainer = NULL;
  relax_grad_file* file = NULL;
  relax_grad_options options;
  relax_grad_tensor good[2], params;
  relax_grad_type type;
  relax_grad_result result;
  relax_grad_counters counters;
  float x[18], y[6];
  int64_t shape_x[2] = {6, 3}, shape_y[1] = {6}, i;
  const char* level;
  double rate;
  if (argc != 5) return 2;
  if (relax_grad_api_version() != RELAX_GRAD_API_VERSION || *relax_grad_last_error()) return 3;
  for (i = 0; i < 18; ++i) x[i] = 0.5f;
  for (i = 0; i < 6; ++i) y[i] = 1;
  good[0] = tensor_of("x", 2, shape_x, x);
  good[1] = tensor_of("y", 1, shape_y, y);
  NEED(relax_grad_init_options(&options));
  options.num_threads = 1;
  NEED(relax_grad_open(argv[1], &options, &trainer));
  NEED(relax_grad_level(trainer, &level));
  NEED(relax_grad_batch(trainer, 0, &type));
  if (*level || strcmp(type.name, "x") || strcmp(type.dtype, "float32") || type.num_axes != 2 ||
      type.shape[0] != 6 || type.shape[1] != 3 || type.symbols[0] || type.symbols[1]) {
    printf("another type of x\n");
    ++wrong;
  }
  NEED(relax_grad_step(trainer, good, 2, &result));
  wrong_handles(argv[1], trainer);
  wrong_batches(trainer, good);
  wrong_names(trainer);
  wrong_files(argv[2], argv[3], argv[1], trainer);
  NEED(relax_grad_get_counters(trainer, &counters));
  if (counters.steps != 1) ++wrong;
  NEED(relax_grad_close(trainer));

  NEED(relax_grad_open(argv[1], &options, &trainer));
  NEED(relax_grad_set_hyperparameter(trainer, "lr", 0.25));
  NEED(relax_grad_get_hyperparameter(trainer, "lr", &rate));
  if (rate != 0.25) ++wrong;
  NEED(relax_grad_read_file(argv[2], &file));
  train(trainer, file);
  NEED(relax_grad_save(trainer, argv[4]));
  NEED(relax_grad_group_tensor(trainer, "params", 1, &params));
  printf("%s %.9g\n", params.name, ((const float*)params.data)[0]);
  NEED(relax_grad_close_file(file));
  expect(relax_grad_close_file(file), "file is closed, or was never open");
  NEED(relax_grad_close(trainer));
  printf("%d errors as expected\n", right);
  return wrong;
}
