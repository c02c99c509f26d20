/* The functions that name and give tensors, hyperparameters, metrics and counters. */
#include "relax_grad_model.h"

static int32_t check_index(int64_t index, int64_t count, const char* kind) {
  if (0 <= index && index < count) return RELAX_GRAD_OK;
  return relax_grad_fail("there are %i %s, but the position is %i", count, kind, index);
}

int32_t relax_grad_num_sizes(relax_grad_trainer* trainer, int64_t* number) {
  NOT_NULL(trainer);
  NOT_NULL(number);
  for (*number = 0; relax_grad_function_of(trainer->model, RELAX_GRAD_STEP, *number) != NULL;)
    ++*number;
  return RELAX_GRAD_OK;
}

static int32_t count_inputs(relax_grad_trainer* trainer, int32_t kind, int64_t* number) {
  const relax_grad_function* function;
  NOT_NULL(trainer);
  NOT_NULL(number);
  function = relax_grad_function_of(trainer->model, kind, 0);
  *number = function == NULL ? 0 : function->num_inputs;
  return RELAX_GRAD_OK;
}

static int32_t input(relax_grad_trainer* trainer, int32_t kind, int64_t size, int64_t index,
                     relax_grad_type* type) {
  const relax_grad_function* function;
  const relax_grad_place* place;
  NOT_NULL(trainer);
  NOT_NULL(type);
  function = size < 0 ? NULL : relax_grad_function_of(trainer->model, kind, size);
  if (function == NULL) return relax_grad_fail("there is no size with the position %i", size);
  if (check_index(index, function->num_inputs, "inputs") != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  place = trainer->model->places + function->inputs[index].place;
  type->name = function->inputs[index].name;
  type->dtype = function->inputs[index].dtype;
  type->num_axes = place->num_axes;
  type->shape = trainer->model->extents + place->extents;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_num_batch(relax_grad_trainer* trainer, int64_t* number) {
  return count_inputs(trainer, RELAX_GRAD_STEP, number);
}

int32_t relax_grad_batch(relax_grad_trainer* trainer, int64_t size, int64_t index,
                         relax_grad_type* type) {
  return input(trainer, RELAX_GRAD_STEP, size, index, type);
}

int32_t relax_grad_num_inputs(relax_grad_trainer* trainer, int64_t* number) {
  return count_inputs(trainer, RELAX_GRAD_PREDICT, number);
}

int32_t relax_grad_input(relax_grad_trainer* trainer, int64_t size, int64_t index,
                         relax_grad_type* type) {
  return input(trainer, RELAX_GRAD_PREDICT, size, index, type);
}

int32_t relax_grad_num_hyperparameters(relax_grad_trainer* trainer, int64_t* number) {
  NOT_NULL(trainer);
  NOT_NULL(number);
  *number = trainer->model->num_hyperparameters;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_hyperparameter_name(relax_grad_trainer* trainer, int64_t index,
                                       const char** name) {
  NOT_NULL(trainer);
  NOT_NULL(name);
  if (check_index(index, trainer->model->num_hyperparameters, "hyperparameters") != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  *name = trainer->model->hyperparameters[index];
  return RELAX_GRAD_OK;
}

static double* hyperparameter(relax_grad_trainer* trainer, const char* name) {
  uint32_t i;
  for (i = 0; i < trainer->model->num_hyperparameters; ++i) {
    if (relax_grad_same(trainer->model->hyperparameters[i], name))
      return trainer->hyperparameters + i;
  }
  relax_grad_fail("the step has no hyperparameter %s", name);
  return NULL;
}

int32_t relax_grad_get_hyperparameter(relax_grad_trainer* trainer, const char* name,
                                      double* value) {
  const double* found;
  NOT_NULL(trainer);
  NOT_NULL(name);
  NOT_NULL(value);
  found = hyperparameter(trainer, name);
  if (found == NULL) return RELAX_GRAD_ERROR;
  *value = *found;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_set_hyperparameter(relax_grad_trainer* trainer, const char* name, double value) {
  double* found;
  NOT_NULL(trainer);
  NOT_NULL(name);
  found = hyperparameter(trainer, name);
  if (found == NULL) return RELAX_GRAD_ERROR;
  if (!(value - value == 0)) return relax_grad_fail("%s must be finite", name);
  *found = value;
  return RELAX_GRAD_OK;
}

static void set_tensor(const relax_grad_trainer* trainer, uint32_t at, const char* name,
                       const char* dtype, relax_grad_tensor* tensor) {
  const relax_grad_place* place = trainer->model->places + at;
  tensor->name = name;
  tensor->dtype = dtype;
  tensor->num_axes = place->num_axes;
  tensor->shape = trainer->model->extents + place->extents;
  tensor->data = relax_grad_data(trainer, place);
  tensor->num_bytes = relax_grad_size(trainer->model, place);
}

/* Returns the number of the results of the last call before its outputs. */
static uint32_t before_outputs(const relax_grad_trainer* trainer) {
  return trainer->last->kind == RELAX_GRAD_PREDICT ? 0 : 1 + trainer->model->num_metrics;
}

int32_t relax_grad_num_outputs(relax_grad_trainer* trainer, int64_t* number) {
  NOT_NULL(trainer);
  NOT_NULL(number);
  *number = trainer->last == NULL ? 0 : trainer->last->num_results - before_outputs(trainer);
  return RELAX_GRAD_OK;
}

int32_t relax_grad_output(relax_grad_trainer* trainer, int64_t index, relax_grad_tensor* output) {
  const relax_grad_named* result;
  int64_t number = 0;
  NOT_NULL(output);
  if (relax_grad_num_outputs(trainer, &number) != RELAX_GRAD_OK ||
      check_index(index, number, "outputs") != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  result = trainer->last->results + before_outputs(trainer) + index;
  set_tensor(trainer, result->place, result->name, result->dtype, output);
  return RELAX_GRAD_OK;
}

int32_t relax_grad_num_metrics(relax_grad_trainer* trainer, int64_t* number) {
  NOT_NULL(trainer);
  NOT_NULL(number);
  *number = trainer->last == NULL || trainer->last->kind == RELAX_GRAD_PREDICT
                ? 0
                : trainer->model->num_metrics;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_metric(relax_grad_trainer* trainer, int64_t index, const char** name,
                          double* value) {
  const relax_grad_named* result;
  int64_t number = 0;
  NOT_NULL(name);
  NOT_NULL(value);
  if (relax_grad_num_metrics(trainer, &number) != RELAX_GRAD_OK ||
      check_index(index, number, "metrics") != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  result = trainer->last->results + 1 + index;
  *name = result->name;
  *value = trainer->metrics[index];
  return RELAX_GRAD_OK;
}

static const char* const groups[] = {"params", "frozen", "states", "optimizer_state"};

static int32_t group_of(const char* name, uint32_t* group) {
  for (*group = 0; *group < 4; ++*group) {
    if (relax_grad_same(groups[*group], name)) return RELAX_GRAD_OK;
  }
  return relax_grad_fail(
      "the group must be params, frozen, states or optimizer_state, but it is %s", name);
}

int32_t relax_grad_num_group_tensors(relax_grad_trainer* trainer, const char* group,
                                     int64_t* number) {
  uint32_t own, i;
  NOT_NULL(trainer);
  NOT_NULL(group);
  NOT_NULL(number);
  if (group_of(group, &own) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  *number = 0;
  for (i = 0; i < trainer->model->num_entries; ++i)
    *number += trainer->model->entries[i].group == own;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_group_tensor(relax_grad_trainer* trainer, const char* group, int64_t index,
                                relax_grad_tensor* tensor) {
  int64_t number = 0;
  uint32_t own, i;
  NOT_NULL(tensor);
  if (relax_grad_num_group_tensors(trainer, group, &number) != RELAX_GRAD_OK ||
      check_index(index, number, "tensors of the group") != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  (void)group_of(group, &own);
  for (i = 0; trainer->model->entries[i].group != own; ++i) continue;
  i += (uint32_t)index;
  set_tensor(trainer, trainer->model->entries[i].place, trainer->model->entries[i].name,
             trainer->model->entries[i].dtype, tensor);
  return RELAX_GRAD_OK;
}

int32_t relax_grad_get_counters(relax_grad_trainer* trainer, relax_grad_counters* counters) {
  NOT_NULL(trainer);
  NOT_NULL(counters);
  *counters = trainer->counters;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_set_counters(relax_grad_trainer* trainer, const relax_grad_counters* counters) {
  NOT_NULL(trainer);
  NOT_NULL(counters);
  if (relax_grad_check_counters(counters) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  trainer->counters = *counters;
  return RELAX_GRAD_OK;
}
