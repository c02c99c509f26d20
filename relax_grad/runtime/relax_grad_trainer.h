/* Training without Python, for C and for languages that call C.
 *
 * The functions run a step that relax_grad.training.TrainStep.export wrote to a folder. They are in
 * the library relax_grad_trainer_c, which the target of this name in CMakeLists.txt builds.
 *
 * Rules for all functions:
 * - A function returns RELAX_GRAD_OK or another code; after another one, relax_grad_last_error()
 *   has the reason. The trainer and the results are then as before the call, except that outputs
 *   of an earlier step or prediction are gone. No C++ exception leaves the library.
 * - A step is atomic: after an error, the state is as before the step. The step allocates its
 *   memory before it writes the first tensor. If it fails after that, every later call but
 *   relax_grad_load and relax_grad_close is an error.
 * - Texts are UTF-8 and end with a zero byte. The names of tensors are examined when they are set,
 *   paths are any bytes.
 * - Pointers that the library returns belong to it. The comments say how long they are valid.
 * - A trainer is used by one thread at a time, and best by one thread alone: TVM's runtime starts
 *   a pool of threads for each thread that calls it. Different trainers may be used at once.
 */
#ifndef RELAX_GRAD_TRAINER_H_
#define RELAX_GRAD_TRAINER_H_

#include <stdint.h>

#if defined(__GNUC__)
#define RELAX_GRAD_API __attribute__((visibility("default")))
#else
#define RELAX_GRAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface: a new one is not compatible with the old one. */
#define RELAX_GRAD_API_VERSION 1

/* The results of functions. */
enum {
  RELAX_GRAD_OK = 0,
  /* A call that does not fit, a file that is damaged, or a step that failed. */
  RELAX_GRAD_ERROR = 1,
  /* A loss or a gradient that is infinite or NaN; everything is as before the step. */
  RELAX_GRAD_NOT_FINITE = 2
};

/* A model in training. */
typedef struct relax_grad_trainer relax_grad_trainer;
/* The tensors of a file. */
typedef struct relax_grad_file relax_grad_file;

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
  /* Extents; -1 where every extent fits that is the same wherever the axis has the same symbol. */
  const int64_t* shape;
  /* The name of the symbol of each axis; null where the extent is a number. */
  const char* const* symbols;
} relax_grad_type;

typedef struct relax_grad_options {
  /* The threads of TVM's runtime; 0 leaves them as they are. */
  int32_t num_threads;
  /* Whether a step that is not finite is skipped; otherwise it is RELAX_GRAD_NOT_FINITE. */
  int32_t skip_nonfinite;
  /* Whether an index or a class out of range is an error before the step. */
  int32_t check_inputs;
  /* The level of x86-64 whose version runs, such as "x86-64-v3"; null for the highest one that the
   * processor has. */
  const char* level;
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

/* Returns RELAX_GRAD_API_VERSION of the library. */
RELAX_GRAD_API int32_t relax_grad_api_version(void);

/* Returns the reason of the last failure of a call by this thread; empty without one. The text is
 * valid until the next failure of a call by this thread. */
RELAX_GRAD_API const char* relax_grad_last_error(void);

/* Fills options with the defaults: 0, 0, 1 and null. */
RELAX_GRAD_API int32_t relax_grad_init_options(relax_grad_options* options);

/* Loads a folder, with its first state: the files of one export, even if it is exported anew
 * meanwhile. The state may be one that was saved later by a trainer of the same step. Null options
 * are the defaults. */
RELAX_GRAD_API int32_t relax_grad_open(const char* folder, const relax_grad_options* options,
                                       relax_grad_trainer** trainer);

/* Loads the files manifest.json, step.so and state.safetensors of such a folder from memory, which
 * may be freed after the call. */
RELAX_GRAD_API int32_t relax_grad_open_memory(const void* manifest, uint64_t manifest_bytes,
                                              const void* library, uint64_t library_bytes,
                                              const void* state, uint64_t state_bytes,
                                              const relax_grad_options* options,
                                              relax_grad_trainer** trainer);

/* Frees a trainer; null is allowed. */
RELAX_GRAD_API int32_t relax_grad_close(relax_grad_trainer* trainer);

/* Gives the level of x86-64 whose version runs; an empty text if the step was compiled for one
 * processor. The text is valid until the trainer is closed. */
RELAX_GRAD_API int32_t relax_grad_level(relax_grad_trainer* trainer, const char** level);

/* Gives the number of inputs and targets of a step, or the type of one by its position. Pointers
 * are valid until the trainer is closed. */
RELAX_GRAD_API int32_t relax_grad_num_batch(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_batch(relax_grad_trainer* trainer, int64_t index,
                                        relax_grad_type* type);

/* The same for the inputs of a prediction: 0 if the model has no function for it. */
RELAX_GRAD_API int32_t relax_grad_num_inputs(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_input(relax_grad_trainer* trainer, int64_t index,
                                        relax_grad_type* type);

/* Gives the number of hyperparameters, such as "lr", or the name of one by its position. The name
 * is valid until the trainer is closed. */
RELAX_GRAD_API int32_t relax_grad_num_hyperparameters(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_hyperparameter_name(relax_grad_trainer* trainer, int64_t index,
                                                      const char** name);

/* Gets a hyperparameter, or sets it for all further steps. Files do not contain it. */
RELAX_GRAD_API int32_t relax_grad_get_hyperparameter(relax_grad_trainer* trainer, const char* name,
                                                     double* value);
RELAX_GRAD_API int32_t relax_grad_set_hyperparameter(relax_grad_trainer* trainer, const char* name,
                                                     double value);

/* Runs a step on the inputs and targets, in any order. Their values are copied: the buffers are
 * only read, need no alignment, and may be freed after the call. */
RELAX_GRAD_API int32_t relax_grad_step(relax_grad_trainer* trainer, const relax_grad_tensor* batch,
                                       int64_t number, relax_grad_result* result);

/* Gives the loss that a step would have, without an update: in training mode. It takes the time of
 * a step, and memory for a copy of the state. The loss may be infinite or NaN. */
RELAX_GRAD_API int32_t relax_grad_evaluate(relax_grad_trainer* trainer,
                                           const relax_grad_tensor* batch, int64_t number,
                                           double* loss);

/* Computes the model's outputs in evaluation mode. The inputs are given as for a step. */
RELAX_GRAD_API int32_t relax_grad_predict(relax_grad_trainer* trainer,
                                          const relax_grad_tensor* inputs, int64_t number);

/* Gives the number of outputs of the last step or prediction, or one by its position. A prediction
 * names them output0, output1 and so on. A step has outputs if it was made with outputs=True.
 * Pointers are valid until the next step, prediction, loading or closing. */
RELAX_GRAD_API int32_t relax_grad_num_outputs(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_output(relax_grad_trainer* trainer, int64_t index,
                                         relax_grad_tensor* output);

/* Gives the number of metrics of the last step, such as "grad_norm", or one by its position. The
 * name is valid until the next step, loading or closing. */
RELAX_GRAD_API int32_t relax_grad_num_metrics(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_metric(relax_grad_trainer* trainer, int64_t index,
                                         const char** name, double* value);

/* Gives the number of tensors of a group, or one by its position: "params", "frozen", "states" or
 * "optimizer_state". A change of the values changes the model. Pointers are valid until the next
 * step, loading or closing. */
RELAX_GRAD_API int32_t relax_grad_num_group_tensors(relax_grad_trainer* trainer, const char* group,
                                                    int64_t* number);
RELAX_GRAD_API int32_t relax_grad_group_tensor(relax_grad_trainer* trainer, const char* group,
                                               int64_t index, relax_grad_tensor* tensor);

RELAX_GRAD_API int32_t relax_grad_get_counters(relax_grad_trainer* trainer,
                                               relax_grad_counters* counters);
RELAX_GRAD_API int32_t relax_grad_set_counters(relax_grad_trainer* trainer,
                                               const relax_grad_counters* counters);

/* Writes everything that training needs to go on, or goes on from such a file. Trainers of Python,
 * C++ and C read the files of one another. */
RELAX_GRAD_API int32_t relax_grad_save(relax_grad_trainer* trainer, const char* path);
RELAX_GRAD_API int32_t relax_grad_load(relax_grad_trainer* trainer, const char* path);

/* Writes parameters, frozen parameters and states by their names to a file of safetensors, without
 * the optimizer's state; or reads such a file, after which the optimizer's state and the counters
 * are as before. Copies of parameters in float32, from which parameters in half precision are
 * updated, get the new values. */
RELAX_GRAD_API int32_t relax_grad_save_model(relax_grad_trainer* trainer, const char* path);
RELAX_GRAD_API int32_t relax_grad_load_model(relax_grad_trainer* trainer, const char* path);

/* Gives the bytes of all tensors of a group, copies the tensors to one buffer of this size, or from
 * one: in the order of relax_grad_group_tensor, without gaps. Copies of parameters in float32
 * change as in relax_grad_load_model. */
RELAX_GRAD_API int32_t relax_grad_group_bytes(relax_grad_trainer* trainer, const char* group,
                                              uint64_t* size);
RELAX_GRAD_API int32_t relax_grad_copy_group(relax_grad_trainer* trainer, const char* group,
                                             void* data, uint64_t size);
RELAX_GRAD_API int32_t relax_grad_set_group(relax_grad_trainer* trainer, const char* group,
                                            const void* data, uint64_t size);

/* Properties are further values of the state, which save and load keep: those that the argument
 * `more` of Trainer.save in Python has. The functions give the number of properties, or the name
 * and the text of one by its position, after the number was asked for; they set one to a text, or
 * remove it by null. A value that Python set and that is no text is given as its JSON. Pointers are
 * valid until a property is set, the number is asked for, loading or closing. */
RELAX_GRAD_API int32_t relax_grad_num_properties(relax_grad_trainer* trainer, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_property(relax_grad_trainer* trainer, int64_t index,
                                           const char** name, const char** value);
RELAX_GRAD_API int32_t relax_grad_set_property(relax_grad_trainer* trainer, const char* name,
                                               const char* value);

/* Reads a file of safetensors, or frees what was read; null is allowed there. */
RELAX_GRAD_API int32_t relax_grad_read_file(const char* path, relax_grad_file** file);
RELAX_GRAD_API int32_t relax_grad_close_file(relax_grad_file* file);

/* Gives the number of tensors of a file, or one by its position. Pointers are valid until the file
 * is closed. */
RELAX_GRAD_API int32_t relax_grad_num_file_tensors(relax_grad_file* file, int64_t* number);
RELAX_GRAD_API int32_t relax_grad_file_tensor(relax_grad_file* file, int64_t index,
                                              relax_grad_tensor* tensor);

/* Writes a file of safetensors; an older one is replaced when the new one is complete. */
RELAX_GRAD_API int32_t relax_grad_write_file(const char* path, const relax_grad_tensor* tensors,
                                             int64_t number);

#ifdef __cplusplus
}
#endif

#endif /* RELAX_GRAD_TRAINER_H_ */
