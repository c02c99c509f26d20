/* The trainer: memory, inputs, steps and predictions. */
#include <string.h>

#include "relax_grad_model.h"

int32_t relax_grad_same(const char* one, const char* other) {
  while (*one != 0 && *one == *other) ++one, ++other;
  return *one == *other;
}

uint64_t relax_grad_width(const relax_grad_place* place) {
  return (uint64_t)(place->bits < 8 ? 8 : place->bits) / 8;
}

uint64_t relax_grad_size(const relax_grad_model* model, const relax_grad_place* place) {
  uint64_t size = relax_grad_width(place);
  uint32_t axis;
  for (axis = 0; axis < place->num_axes; ++axis)
    size *= (uint64_t)model->extents[place->extents + axis];
  return size;
}

const relax_grad_place* relax_grad_place_at(const relax_grad_trainer* trainer, uint32_t place) {
  return trainer->model->places + place;
}

uint8_t* relax_grad_data(const relax_grad_trainer* trainer, const relax_grad_place* place) {
  /* Kernels only read constants. */
  if (place->area == RELAX_GRAD_CONSTANTS)
    return (uint8_t*)(uintptr_t)(trainer->model->constants + place->offset);
  return trainer->areas[place->area] + place->offset;
}

static uint64_t aligned(uint64_t size) {
  return (size + RELAX_GRAD_ALIGNMENT - 1) / RELAX_GRAD_ALIGNMENT * RELAX_GRAD_ALIGNMENT;
}

/* Memory */

uint64_t relax_grad_memory_bytes(const relax_grad_model* model) {
  return RELAX_GRAD_ALIGNMENT + aligned(sizeof(relax_grad_trainer)) +
         aligned(model->most_arguments * sizeof(relax_grad_dltensor)) +
         aligned(model->most_arguments * sizeof(relax_grad_any)) +
         aligned(model->num_hyperparameters * sizeof(double)) +
         aligned(model->num_metrics * sizeof(double)) +
         aligned(model->num_entries * sizeof(uint64_t)) + model->state_bytes + model->arena_bytes +
         RELAX_GRAD_THREADS * model->workspace_bytes + RELAX_GRAD_TEXT_BYTES;
}

static uint8_t* taken(uint8_t** next, uint64_t size) {
  uint8_t* begin = *next;
  *next += aligned(size);
  return begin;
}

static relax_grad_trainer* laid_out(const relax_grad_model* model, uint8_t* memory, uint64_t size) {
  uint8_t* next = memory + (RELAX_GRAD_ALIGNMENT - (uintptr_t)memory % RELAX_GRAD_ALIGNMENT) %
                               RELAX_GRAD_ALIGNMENT;
  relax_grad_trainer* trainer = (relax_grad_trainer*)(void*)taken(&next, sizeof *trainer);
  memset(trainer, 0, sizeof *trainer);
  trainer->model = model;
  trainer->tensors = (void*)taken(&next, model->most_arguments * sizeof(relax_grad_dltensor));
  trainer->arguments = (void*)taken(&next, model->most_arguments * sizeof(relax_grad_any));
  trainer->hyperparameters = (void*)taken(&next, model->num_hyperparameters * sizeof(double));
  trainer->metrics = (void*)taken(&next, model->num_metrics * sizeof(double));
  trainer->begins = (void*)taken(&next, model->num_entries * sizeof(uint64_t));
  trainer->areas[RELAX_GRAD_STATE] = taken(&next, model->state_bytes);
  trainer->areas[RELAX_GRAD_ARENA] = taken(&next, model->arena_bytes);
  trainer->workspaces = taken(&next, RELAX_GRAD_THREADS * model->workspace_bytes);
  trainer->texts = next;
  trainer->room = size - (uint64_t)(next - memory);
  return trainer;
}

int32_t relax_grad_init_options(relax_grad_options* options) {
  NOT_NULL(options);
  options->skip_nonfinite = 0;
  options->check_inputs = 1;
  options->drop_history = 0;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_open_static(const relax_grad_model* model, void* memory, uint64_t memory_bytes,
                               const void* state, uint64_t state_bytes,
                               const relax_grad_options* options, relax_grad_trainer** trainer) {
  relax_grad_trainer* made;
  uint32_t i;
  NOT_NULL(model);
  NOT_NULL(memory);
  NOT_NULL(state);
  NOT_NULL(trainer);
  if (memory_bytes < relax_grad_memory_bytes(model))
    return relax_grad_fail("memory must have at least %i bytes, but it has %i",
                           (int64_t)relax_grad_memory_bytes(model), (int64_t)memory_bytes);
  made = laid_out(model, memory, memory_bytes);
  if (options == NULL) {
    relax_grad_init_options(&made->options);
  } else {
    made->options = *options;
  }
  for (i = 0; i < model->num_hyperparameters; ++i) made->hyperparameters[i] = model->defaults[i];
  if (relax_grad_load_state(made, state, state_bytes) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  *trainer = made;
  return RELAX_GRAD_OK;
}

/* Numbers */

static double half(uint16_t bits, int32_t exponent_bits) {
  int32_t mantissa_bits = 15 - exponent_bits, i;
  int32_t exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  double value = (double)(bits & ((1 << mantissa_bits) - 1)) / (double)(1 << mantissa_bits);
  int32_t shift = exponent - ((1 << (exponent_bits - 1)) - 1);
  if (exponent == (1 << exponent_bits) - 1) {
    double infinite = 1e308 * 10;
    value = value > 0 ? infinite - infinite : infinite;
  } else {
    value = exponent == 0 ? value : value + 1;
    shift += exponent == 0;
    for (i = 0; i < shift; ++i) value *= 2;
    for (i = 0; i > shift; --i) value /= 2;
  }
  return bits >> 15 ? -value : value;
}

/* Returns the number in a tensor of one element. */
static double number_in(const relax_grad_trainer* trainer, uint32_t at) {
  const relax_grad_place* place = relax_grad_place_at(trainer, at);
  const uint8_t* data = relax_grad_data(trainer, place);
  double wide;
  float single;
  uint16_t bits;
  if (place->code != 2 && place->code != 4) return (double)relax_grad_element(place, data, 0);
  switch (place->bits) {
    case 64:
      memcpy(&wide, data, sizeof wide);
      return wide;
    case 32:
      memcpy(&single, data, sizeof single);
      return (double)single;
    default:
      memcpy(&bits, data, sizeof bits);
      return half(bits, place->code == 2 ? 5 : 8);
  }
}

static int32_t is_finite(double value) { return value - value == 0; }

/* Calls of kernels */

static const relax_grad_place* average_of(const relax_grad_model* model,
                                          const relax_grad_place* place, relax_grad_place* made) {
  uint32_t i;
  if (place->area != RELAX_GRAD_STATE) return place;
  for (i = 0; i < model->num_averages; ++i) {
    if (model->averages[i].param == place->offset) {
      *made = *place;
      made->offset = model->averages[i].average;
      return made;
    }
  }
  return place;
}

static void set_tensor(const relax_grad_trainer* trainer, const relax_grad_place* place,
                       relax_grad_dltensor* tensor) {
  memset(tensor, 0, sizeof *tensor);
  tensor->data = relax_grad_data(trainer, place);
  tensor->device.type = 1; /* a CPU */
  tensor->num_axes = place->num_axes;
  tensor->dtype.code = place->code;
  tensor->dtype.bits = place->bits;
  tensor->dtype.lanes = 1;
  tensor->shape = trainer->model->extents + place->extents;
}

/* The types of arguments in tvm::ffi. */
enum { ANY_INTEGER = 1, ANY_REAL = 3, ANY_TENSOR = 7 };

static void set_arguments(relax_grad_trainer* trainer, const relax_grad_call* call,
                          int32_t with_averages) {
  const relax_grad_argument* argument = trainer->model->arguments + call->first;
  relax_grad_place made;
  uint32_t i;
  for (i = 0; i < call->count; ++i, ++argument) {
    relax_grad_any* any = trainer->arguments + i;
    memset(any, 0, sizeof *any);
    if (argument->kind == RELAX_GRAD_PLACE) {
      const relax_grad_place* place =
          relax_grad_place_at(trainer, (uint32_t)argument->value.integer);
      if (with_averages) place = average_of(trainer->model, place, &made);
      set_tensor(trainer, place, trainer->tensors + i);
      any->type = ANY_TENSOR;
      any->value.pointer = trainer->tensors + i;
    } else if (argument->kind == RELAX_GRAD_INTEGER) {
      any->type = ANY_INTEGER;
      any->value.integer = argument->value.integer;
    } else {
      any->type = ANY_REAL;
      any->value.real = argument->value.real;
    }
  }
}

static int32_t run(relax_grad_trainer* trainer, const relax_grad_function* function,
                   int32_t with_averages) {
  uint32_t i;
  relax_grad_fail("");
  for (i = 0; i < function->num_calls; ++i) {
    const relax_grad_call* call = function->calls + i;
    relax_grad_any result;
    memset(&result, 0, sizeof result);
    set_arguments(trainer, call, with_averages);
    relax_grad_use_workspaces(trainer->workspaces, trainer->model->workspace_bytes);
    if (call->kernel(NULL, trainer->arguments, (int32_t)call->count, &result) != 0) {
      if (*relax_grad_last_error() == 0) relax_grad_fail("a kernel ran out of workspace");
      return RELAX_GRAD_ERROR;
    }
  }
  trainer->last = function;
  return RELAX_GRAD_OK;
}

/* Steps */

static int32_t check_whole(const relax_grad_trainer* trainer) {
  if (!trainer->is_broken) return RELAX_GRAD_OK;
  return relax_grad_fail(
      "the last step did not end: its parameters may be partly those before it and partly those "
      "after it; load a saved state");
}

static void set_scalars(relax_grad_trainer* trainer, const relax_grad_function* function) {
  uint32_t count = trainer->model->num_hyperparameters, i;
  const relax_grad_counters* counters = &trainer->counters;
  uint64_t steps = (uint64_t)counters->steps & 0xffffffffu;
  int64_t seed = (int64_t)((uint64_t)counters->seed << 32 | steps);
  for (i = 0; i < count; ++i)
    memcpy(relax_grad_data(trainer, relax_grad_place_at(trainer, function->scalars[i])),
           trainer->hyperparameters + i, sizeof(double));
  memcpy(relax_grad_data(trainer, relax_grad_place_at(trainer, function->scalars[count])), &seed,
         sizeof seed);
}

static void move_results(relax_grad_trainer* trainer, const relax_grad_function* function) {
  uint32_t i;
  for (i = 0; i < function->num_moves; ++i) {
    const relax_grad_place* source = relax_grad_place_at(trainer, function->moves[i].source);
    const relax_grad_place* target = relax_grad_place_at(trainer, function->moves[i].target);
    memcpy(relax_grad_data(trainer, target), relax_grad_data(trainer, source),
           (size_t)relax_grad_size(trainer->model, target));
  }
}

/* Ends a step as the table of outcomes in Python says: training/_outcome.py. */
static int32_t end_step(relax_grad_trainer* trainer, const relax_grad_function* function,
                        relax_grad_result* result) {
  const relax_grad_model* model = trainer->model;
  relax_grad_counters* counters = &trainer->counters;
  double loss = number_in(trainer, function->results[0].place);
  int32_t is_good = is_finite(loss), raises;
  uint32_t i;
  for (i = 0; i < model->num_metrics; ++i)
    trainer->metrics[i] = number_in(trainer, function->results[1 + i].place);
  if (model->applied_metric >= 0) is_good = is_good && trainer->metrics[model->applied_metric] == 1;
  raises = !is_good && !(is_finite(loss) && model->has_loss_scale);
  if (raises && !trainer->options.skip_nonfinite) {
    trainer->last = NULL;
    relax_grad_fail(
        "%s is not finite in step %i; everything is as before the step. Lower the learning rate, "
        "clip the gradients, or skip such batches with the option skip_nonfinite",
        is_finite(loss) ? "a gradient" : "the loss", counters->steps);
    return RELAX_GRAD_NOT_FINITE;
  }
  if (is_good || model->has_loss_scale) move_results(trainer, function);
  counters->steps += 1;
  counters->skipped += !is_good;
  counters->updates += is_good && function->kind == RELAX_GRAD_STEP;
  result->loss = loss;
  result->applied = is_good;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_step(relax_grad_trainer* trainer, const relax_grad_tensor* batch, int64_t number,
                        relax_grad_result* result) {
  const relax_grad_function* function;
  int64_t applied;
  int32_t kind;
  NOT_NULL(trainer);
  NOT_NULL(result);
  if (check_whole(trainer) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  /* Skipped batches do not count towards accumulation. */
  applied = trainer->counters.steps - trainer->counters.skipped + 1;
  kind = applied % trainer->model->accumulate == 0 ? RELAX_GRAD_STEP : RELAX_GRAD_ACCUMULATE;
  if (relax_grad_take_inputs(trainer, kind, batch, number, &function) != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  set_scalars(trainer, function);
  if (run(trainer, function, 0) != RELAX_GRAD_OK) {
    trainer->is_broken = 1;
    return RELAX_GRAD_ERROR;
  }
  return end_step(trainer, function, result);
}

static int32_t predict(relax_grad_trainer* trainer, const relax_grad_tensor* inputs, int64_t number,
                       int32_t with_averages) {
  const relax_grad_function* function;
  NOT_NULL(trainer);
  if (check_whole(trainer) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  if (relax_grad_function_of(trainer->model, RELAX_GRAD_PREDICT, 0) == NULL)
    return relax_grad_fail("the model has no function for prediction");
  if (relax_grad_take_inputs(trainer, RELAX_GRAD_PREDICT, inputs, number, &function) !=
      RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  return run(trainer, function, with_averages);
}

int32_t relax_grad_predict(relax_grad_trainer* trainer, const relax_grad_tensor* inputs,
                           int64_t number) {
  return predict(trainer, inputs, number, 0);
}

int32_t relax_grad_predict_ema(relax_grad_trainer* trainer, const relax_grad_tensor* inputs,
                               int64_t number) {
  NOT_NULL(trainer);
  if (trainer->model->num_averages == 0)
    return relax_grad_fail(
        "the step has no moving average in the dtypes of its parameters; make "
        "it with train_step(..., ema=0.999)");
  return predict(trainer, inputs, number, 1);
}
