/* The tables of an exported step, and what the sources of the trainer share. */
#ifndef RELAX_GRAD_MODEL_H_
#define RELAX_GRAD_MODEL_H_

#include <stddef.h>
#include <stdint.h>

#include "relax_grad_static.h"

/* Functions and variables that only these sources use. */
#if defined(__GNUC__) && !defined(_WIN32)
#define RELAX_GRAD_HIDDEN __attribute__((visibility("hidden")))
#else
#define RELAX_GRAD_HIDDEN
#endif

/* The attribute of constants that kernels read with aligned accesses. */
#if defined(__GNUC__)
#define RELAX_GRAD_ALIGNED __attribute__((aligned(64)))
#else
#error "the constants of a step need a compiler with __attribute__((aligned(64)))"
#endif

/* The threads that share the loops of kernels, with POSIX threads if there are several. All sources
 * need the same number. */
#ifndef RELAX_GRAD_THREADS
#define RELAX_GRAD_THREADS 1
#endif

/* The alignment of tensors and workspaces, in bytes. */
#define RELAX_GRAD_ALIGNMENT 64
/* The room for history and properties that every trainer has, in bytes. */
#define RELAX_GRAD_TEXT_BYTES 2048

enum { RELAX_GRAD_STATE = 0, RELAX_GRAD_ARENA = 1, RELAX_GRAD_CONSTANTS = 2 };
enum { RELAX_GRAD_PLACE = 0, RELAX_GRAD_INTEGER = 1, RELAX_GRAD_REAL = 2 };
enum { RELAX_GRAD_STEP = 0, RELAX_GRAD_ACCUMULATE = 1, RELAX_GRAD_PREDICT = 2 };

/* A tensor: its area and offset, and the position of its extents in the model's list. */
typedef struct {
  uint64_t offset;
  uint32_t extents;
  uint8_t area, num_axes, code, bits;
} relax_grad_place;

/* An argument of a kernel: the position of a place, or a number. */
typedef struct {
  int32_t kind;
  union {
    int64_t integer;
    double real;
  } value;
} relax_grad_argument;

/* The calling convention of compiled functions: an object, arguments, their number, the result. */
typedef int32_t relax_grad_kernel(void*, void*, int32_t, void*);

typedef struct {
  relax_grad_kernel* kernel;
  uint32_t first, count;
} relax_grad_call;

typedef struct {
  uint32_t source, target;
} relax_grad_move;

/* A tensor with a name: of a batch or of a prediction. */
typedef struct {
  const char *name, *dtype;
  uint32_t place;
} relax_grad_named;

/* The range of the elements of an input that are indices; see IndexRange of Python. */
typedef struct {
  uint32_t input;
  int64_t low, high, extent;
  const int64_t* ignored;
  uint32_t num_ignored;
  /* Three numbers for each axis: the first element, those left out at the end, the step. Null for
   * all elements. */
  const int64_t* slices;
} relax_grad_range;

typedef struct {
  int32_t kind;
  const relax_grad_named* inputs;
  uint32_t num_inputs;
  /* The places of hyperparameters and of the seed, which only steps have. */
  const uint32_t* scalars;
  const relax_grad_call* calls;
  uint32_t num_calls;
  const relax_grad_named* results;
  uint32_t num_results;
  const relax_grad_move* moves;
  uint32_t num_moves;
  const relax_grad_range* ranges;
  uint32_t num_ranges;
} relax_grad_function;

/* A tensor of the state: its name in files and in its group, and its offset in a file. */
typedef struct {
  const char *key, *name, *dtype, *code;
  uint32_t place, group;
  uint64_t offset;
} relax_grad_entry;

/* A parameter and its moving average, by their offsets in the state. */
typedef struct {
  uint64_t param, average;
} relax_grad_average;

struct relax_grad_model {
  const char* digest;
  uint64_t state_bytes, arena_bytes, workspace_bytes;
  const uint8_t* constants;
  const relax_grad_place* places;
  const int64_t* extents;
  const relax_grad_argument* arguments;
  uint32_t most_arguments;
  const relax_grad_function* functions;
  uint32_t num_functions;
  const relax_grad_entry* entries;
  uint32_t num_entries;
  /* The bytes of all tensors in a file. */
  uint64_t data_bytes;
  /* A history without steps, as the text of a file. */
  const char* empty_history;
  const char* const* hyperparameters;
  const double* defaults;
  uint32_t num_hyperparameters;
  /* The results of a step are the loss, these metrics, and outputs. */
  uint32_t num_metrics;
  int32_t applied_metric, has_loss_scale;
  uint32_t accumulate;
  const relax_grad_average* averages;
  uint32_t num_averages;
};

/* The layouts of DLTensor and of tvm::ffi::AnyView. */
typedef struct {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t num_axes;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} relax_grad_dltensor;

typedef struct {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double real;
    void* pointer;
  } value;
} relax_grad_any;

struct relax_grad_trainer {
  const relax_grad_model* model;
  uint8_t* areas[2];
  /* One for each thread. */
  uint8_t* workspaces;
  relax_grad_dltensor* tensors;
  relax_grad_any* arguments;
  double* hyperparameters;
  /* The metrics of the last step, from before the moves to the state. */
  double* metrics;
  /* The offsets of the tensors in a file that is examined. */
  uint64_t* begins;
  /* History and properties, as the texts of a file. */
  uint8_t* texts;
  uint64_t room, history_bytes, more_bytes;
  relax_grad_options options;
  relax_grad_counters counters;
  /* The function whose results are valid, or null. */
  const relax_grad_function* last;
  int32_t is_broken;
};

/* Sets the text of the last error, with %s for texts and %i for int64_t; returns RELAX_GRAD_ERROR.
 */
RELAX_GRAD_HIDDEN int32_t relax_grad_fail(const char* format, ...);

/* Ends a function with an error if one of its arguments is null. */
#define NOT_NULL(pointer) \
  if ((pointer) == NULL) return relax_grad_fail("%s is a null pointer", #pointer)

RELAX_GRAD_HIDDEN int32_t relax_grad_same(const char* one, const char* other);
RELAX_GRAD_HIDDEN uint64_t relax_grad_size(const relax_grad_model* model,
                                           const relax_grad_place* place);
RELAX_GRAD_HIDDEN const relax_grad_place* relax_grad_place_at(const relax_grad_trainer* trainer,
                                                              uint32_t place);
RELAX_GRAD_HIDDEN uint8_t* relax_grad_data(const relax_grad_trainer* trainer,
                                           const relax_grad_place* place);

/* Returns the bytes of an element. */
RELAX_GRAD_HIDDEN uint64_t relax_grad_width(const relax_grad_place* place);

/* Returns an element of a tensor of integers; large ones of uint64 are above every range. */
RELAX_GRAD_HIDDEN int64_t relax_grad_element(const relax_grad_place* place, const uint8_t* data,
                                             uint64_t index);

/* Finds the function for inputs, checks these and copies them to the arena. */
RELAX_GRAD_HIDDEN int32_t relax_grad_take_inputs(relax_grad_trainer* trainer, int32_t kind,
                                                 const relax_grad_tensor* given, int64_t number,
                                                 const relax_grad_function** function);

/* Returns a function for the size at a position; null without one. */
RELAX_GRAD_HIDDEN const relax_grad_function* relax_grad_function_of(const relax_grad_model* model,
                                                                    int32_t kind, int64_t size);

/* Gives kernels workspaces of a size, one for each thread, for the calls that follow. */
RELAX_GRAD_HIDDEN void relax_grad_use_workspaces(uint8_t* begin, uint64_t size);

/* Gives this thread its workspace. */
RELAX_GRAD_HIDDEN void relax_grad_use_workspace_of(int32_t thread);

/* The tasks of a parallel loop, as TVM's runtime describes them, and its body for one of them. */
typedef struct {
  void* handle;
  int32_t tasks;
} relax_grad_tasks;
typedef int relax_grad_body(int task, relax_grad_tasks* of, void* data);

#if RELAX_GRAD_THREADS > 1
RELAX_GRAD_HIDDEN int relax_grad_launch(relax_grad_body* body, void* data, int tasks);
RELAX_GRAD_HIDDEN int relax_grad_barrier(int task, relax_grad_tasks* of);
#endif

/* Checks the counters of a caller or of a file. */
RELAX_GRAD_HIDDEN int32_t relax_grad_check_counters(const relax_grad_counters* counters);

#endif /* RELAX_GRAD_MODEL_H_ */
