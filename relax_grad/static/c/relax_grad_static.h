/* Training without a runtime: a training step as tables and kernels, in C99.
 *
 * Trainer.export(folder, runtime="none") writes a folder with this file, its sources, the tables of
 * the step and the kernels. Nothing here allocates memory, reads files or needs an operating
 * system, and one thread runs it all unless RELAX_GRAD_THREADS is another number: the caller gives
 * the memory of a trainer and the bytes of its state. Functions and types with the names of
 * relax_grad_trainer.h, the library with TVM's runtime, do the same as there, and states are the
 * same files.
 *
 * Rules for all functions:
 * - A function returns RELAX_GRAD_OK or another code; after another one, relax_grad_last_error()
 *   has the reason, and the trainer and the results are as before the call.
 * - A step is atomic. If a kernel fails, which needs an argument that no check
 *   finds, every later call but relax_grad_load_state is an error that says so.
 * - Texts are UTF-8 and end with a zero byte.
 * - Pointers that functions return point to the caller's memory or to constants.
 * - One call at a time: trainers share the workspace pointer of kernels and the text of the last
 *   error.
 */
#ifndef RELAX_GRAD_STATIC_H_
#define RELAX_GRAD_STATIC_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The results of functions. */
enum {
  RELAX_GRAD_OK = 0,
  /* A call that does not fit, a state that is damaged, or a step that failed. */
  RELAX_GRAD_ERROR = 1,
  /* A loss or a gradient that is infinite or NaN; everything is as before the step. */
  RELAX_GRAD_NOT_FINITE = 2
};

/* The tables of a step. step.h declares the tables of an exported step. */
typedef struct relax_grad_model relax_grad_model;
/* A model in training, in memory of the caller. */
typedef struct relax_grad_trainer relax_grad_trainer;

/* Values of a tensor, row by row and without gaps. */
typedef struct relax_grad_tensor {
  const char* name;
  /* Such as "float32", "int64", "bfloat16" or "bool", which has bytes of 0 and 1. */
  const char* dtype;
  int64_t num_axes;
  /* num_axes extents; may be null without axes. */
  const int64_t* shape;
  void* data;
  /* The size of data: the product of the extents, times the bytes of an element. */
  uint64_t num_bytes;
} relax_grad_tensor;

/* The type of an input. */
typedef struct relax_grad_type {
  const char* name;
  const char* dtype;
  int64_t num_axes;
  const int64_t* shape;
} relax_grad_type;

typedef struct relax_grad_options {
  /* Whether a step that is not finite is skipped; otherwise it is RELAX_GRAD_NOT_FINITE. */
  int32_t skip_nonfinite;
  /* Whether an index or a class out of range is an error before the step. */
  int32_t check_inputs;
  /* Whether a state whose history and properties do not fit the memory is loaded without them;
   * otherwise it is an error. */
  int32_t drop_history;
} relax_grad_options;

/* The numbers of batches, updates, skipped steps and complete epochs, and of batches in the epoch
 * that has begun. Callers count epochs and their batches. */
typedef struct relax_grad_counters {
  int64_t seed, steps, updates, skipped, epoch, batch;
} relax_grad_counters;

/* The results of a step. */
typedef struct relax_grad_result {
  /* The loss, from before the update. */
  double loss;
  /* 1, or 0 if the step was skipped. */
  int32_t applied;
} relax_grad_result;

/* Returns the reason of the last failure; empty without one. */
const char* relax_grad_last_error(void);

/* Fills options with the defaults: 0, 1 and 0. */
int32_t relax_grad_init_options(relax_grad_options* options);

/* Returns the bytes of memory that a trainer needs at least, with room for 2 KiB of history and
 * properties and a workspace for each thread. step.h has them as a constant. What a caller gives
 * beyond it is room for more. */
uint64_t relax_grad_memory_bytes(const relax_grad_model* model);

/* Makes a trainer in the memory of the caller, of any alignment, with the state in the bytes of a
 * file: state.safetensors, or one that any trainer of the same step saved. The memory belongs to
 * the trainer until the caller's last call; there is nothing to close. Null options are the
 * defaults. */
int32_t relax_grad_open_static(const relax_grad_model* model, void* memory, uint64_t memory_bytes,
                               const void* state, uint64_t state_bytes,
                               const relax_grad_options* options, relax_grad_trainer** trainer);

/* Gives the number of sizes that the step was exported for, such as batches of 32 and of 5. */
int32_t relax_grad_num_sizes(relax_grad_trainer* trainer, int64_t* number);

/* Gives the number of inputs and targets of a step, or the type of one by its position, for the
 * size at a position. */
int32_t relax_grad_num_batch(relax_grad_trainer* trainer, int64_t* number);
int32_t relax_grad_batch(relax_grad_trainer* trainer, int64_t size, int64_t index,
                         relax_grad_type* type);

/* The same for the inputs of a prediction: 0 if the model has no function for it. */
int32_t relax_grad_num_inputs(relax_grad_trainer* trainer, int64_t* number);
int32_t relax_grad_input(relax_grad_trainer* trainer, int64_t size, int64_t index,
                         relax_grad_type* type);

/* Gives the number of hyperparameters, such as "lr", or the name of one by its position. */
int32_t relax_grad_num_hyperparameters(relax_grad_trainer* trainer, int64_t* number);
int32_t relax_grad_hyperparameter_name(relax_grad_trainer* trainer, int64_t index,
                                       const char** name);

/* Gets a hyperparameter, or sets it for all further steps. Files do not contain it. */
int32_t relax_grad_get_hyperparameter(relax_grad_trainer* trainer, const char* name, double* value);
int32_t relax_grad_set_hyperparameter(relax_grad_trainer* trainer, const char* name, double value);

/* Runs a step on the inputs and targets, in any order. Their values are copied: the buffers are
 * only read, need no alignment, and may be freed after the call. */
int32_t relax_grad_step(relax_grad_trainer* trainer, const relax_grad_tensor* batch, int64_t number,
                        relax_grad_result* result);

/* Computes the model's outputs in evaluation mode. The second function takes the moving averages of
 * the parameters instead of these, if the step has them. */
int32_t relax_grad_predict(relax_grad_trainer* trainer, const relax_grad_tensor* inputs,
                           int64_t number);
int32_t relax_grad_predict_ema(relax_grad_trainer* trainer, const relax_grad_tensor* inputs,
                               int64_t number);

/* Gives the number of outputs of the last step or prediction, or one by its position. A prediction
 * names them output0, output1 and so on. A step has outputs if it was made with outputs=True.
 * Pointers are valid until the next step, prediction or loading. */
int32_t relax_grad_num_outputs(relax_grad_trainer* trainer, int64_t* number);
int32_t relax_grad_output(relax_grad_trainer* trainer, int64_t index, relax_grad_tensor* output);

/* Gives the number of metrics of the last step, such as "grad_norm", or one by its position. */
int32_t relax_grad_num_metrics(relax_grad_trainer* trainer, int64_t* number);
int32_t relax_grad_metric(relax_grad_trainer* trainer, int64_t index, const char** name,
                          double* value);

/* Gives the number of tensors of a group, or one by its position: "params", "frozen", "states" or
 * "optimizer_state". A change of the values changes the model. */
int32_t relax_grad_num_group_tensors(relax_grad_trainer* trainer, const char* group,
                                     int64_t* number);
int32_t relax_grad_group_tensor(relax_grad_trainer* trainer, const char* group, int64_t index,
                                relax_grad_tensor* tensor);

int32_t relax_grad_get_counters(relax_grad_trainer* trainer, relax_grad_counters* counters);
int32_t relax_grad_set_counters(relax_grad_trainer* trainer, const relax_grad_counters* counters);

/* Gives the size of the file that relax_grad_save_state writes. It is valid until the next call. */
int32_t relax_grad_state_bytes(relax_grad_trainer* trainer, uint64_t* size);

/* Writes everything that training needs to go on to a buffer, with the bytes of the file that
 * trainers of Python, C++ and C read; or goes on from the bytes of such a file. */
int32_t relax_grad_save_state(relax_grad_trainer* trainer, void* buffer, uint64_t buffer_bytes,
                              uint64_t* size);
int32_t relax_grad_load_state(relax_grad_trainer* trainer, const void* state, uint64_t state_bytes);

#ifdef __cplusplus
}
#endif

#endif /* RELAX_GRAD_STATIC_H_ */
