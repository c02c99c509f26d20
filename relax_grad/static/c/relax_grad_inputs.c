/* The functions of a step and their inputs: the checks of what a caller gives. */
#include <string.h>

#include "relax_grad_model.h"

/* Returns an element of a tensor of integers; large ones of uint64 are above every range. */
int64_t relax_grad_element(const relax_grad_place* place, const uint8_t* data, uint64_t index) {
  uint64_t width = relax_grad_width(place), value = 0, byte;
  for (byte = 0; byte < width; ++byte) {
    uint16_t probe = 1;
    uint64_t from = *(uint8_t*)&probe == 1 ? byte : width - 1 - byte;
    value |= (uint64_t)data[index * width + from] << 8 * byte;
  }
  if (place->code == 0) {
    uint64_t sign = (uint64_t)1 << (8 * width - 1);
    return (int64_t)((value ^ sign) - sign);
  }
  return value > INT64_MAX ? INT64_MAX : (int64_t)value;
}

const relax_grad_function* relax_grad_function_of(const relax_grad_model* model, int32_t kind,
                                                  int64_t size) {
  uint32_t i;
  for (i = 0; i < model->num_functions; ++i) {
    if (model->functions[i].kind == kind && size-- == 0) return model->functions + i;
  }
  return NULL;
}

static int32_t fits(const relax_grad_model* model, const relax_grad_named* input,
                    const relax_grad_tensor* given) {
  const relax_grad_place* place = model->places + input->place;
  int64_t axis;
  if (given->num_axes != place->num_axes) return 0;
  for (axis = 0; axis < given->num_axes; ++axis) {
    if (given->shape[axis] != model->extents[place->extents + axis]) return 0;
  }
  return 1;
}

/* Returns the tensor of a name among those of a caller; null without one. */
static const relax_grad_tensor* named(const relax_grad_tensor* given, int64_t number,
                                      const char* name) {
  for (; number > 0; --number, ++given) {
    if (relax_grad_same(given->name, name)) return given;
  }
  return NULL;
}

static int32_t check_shape(const relax_grad_model* model, const relax_grad_named* input,
                           const relax_grad_tensor* given) {
  const relax_grad_place* place = model->places + input->place;
  int64_t axis;
  if (given->num_axes != place->num_axes)
    return relax_grad_fail("%s must have %i axes, but it has %i", input->name,
                           (int64_t)place->num_axes, given->num_axes);
  for (axis = 0; axis < given->num_axes; ++axis) {
    int64_t wanted = model->extents[place->extents + axis];
    if (given->shape[axis] != wanted)
      return relax_grad_fail(
          "%s must have the extent %i on axis %i, as the other inputs of this size, but it has %i",
          input->name, wanted, axis, given->shape[axis]);
  }
  return RELAX_GRAD_OK;
}

/* Checks what does not depend on the size. */
static int32_t check_given(const relax_grad_function* function, const relax_grad_tensor* given,
                           int64_t number) {
  int64_t i;
  uint32_t k;
  if (number != function->num_inputs)
    return relax_grad_fail("the call needs %i tensors, but %i were given",
                           (int64_t)function->num_inputs, number);
  for (i = 0; i < number; ++i) {
    NOT_NULL(given[i].name);
    NOT_NULL(given[i].dtype);
    NOT_NULL(given[i].data);
    if (given[i].num_axes > 0) NOT_NULL(given[i].shape);
  }
  for (k = 0; k < function->num_inputs; ++k) {
    const relax_grad_named* input = function->inputs + k;
    const relax_grad_tensor* own = named(given, number, input->name);
    if (own == NULL) return relax_grad_fail("the call needs the tensor %s", input->name);
    if (!relax_grad_same(own->dtype, input->dtype))
      return relax_grad_fail("%s must have the dtype %s, but it has %s", input->name, input->dtype,
                             own->dtype);
  }
  return RELAX_GRAD_OK;
}

static int32_t check_bytes(const relax_grad_trainer* trainer, const relax_grad_named* input,
                           const relax_grad_tensor* given) {
  const relax_grad_place* place = relax_grad_place_at(trainer, input->place);
  uint64_t size = relax_grad_size(trainer->model, place), i;
  if (given->num_bytes != size)
    return relax_grad_fail("%s must have %i bytes, but it has %i", input->name, (int64_t)size,
                           (int64_t)given->num_bytes);
  for (i = 0; place->code == 6 && i < size; ++i) {
    if (((const uint8_t*)given->data)[i] > 1)
      return relax_grad_fail("%s has a boolean that is neither 0 nor 1", input->name);
  }
  return RELAX_GRAD_OK;
}

static int32_t is_allowed(const relax_grad_range* range, int64_t value) {
  uint32_t i;
  if (range->low <= value && value < range->high) return 1;
  for (i = 0; i < range->num_ignored; ++i) {
    if (range->ignored[i] == value) return 1;
  }
  return 0;
}

static int32_t is_index(const relax_grad_model* model, const relax_grad_place* place,
                        const relax_grad_range* range, uint64_t index) {
  int32_t axis;
  if (range->slices == NULL) return 1;
  for (axis = place->num_axes - 1; axis >= 0; --axis) {
    int64_t extent = model->extents[place->extents + (uint32_t)axis];
    int64_t at = (int64_t)(index % (uint64_t)extent);
    const int64_t* slice = range->slices + 3 * axis;
    index /= (uint64_t)extent;
    if (at < slice[0] || at >= extent - slice[1] || (at - slice[0]) % slice[2] != 0) return 0;
  }
  return 1;
}

static int32_t check_ranges(const relax_grad_trainer* trainer, const relax_grad_function* function,
                            const relax_grad_tensor* given, int64_t number) {
  uint32_t i;
  for (i = 0; i < function->num_ranges; ++i) {
    const relax_grad_range* range = function->ranges + i;
    const relax_grad_named* input = function->inputs + range->input;
    const relax_grad_place* place = relax_grad_place_at(trainer, input->place);
    const uint8_t* data = named(given, number, input->name)->data;
    uint64_t count = relax_grad_size(trainer->model, place) / relax_grad_width(place), k;
    for (k = 0; k < count; ++k) {
      int64_t value = relax_grad_element(place, data, k);
      if (is_allowed(range, value) || !is_index(trainer->model, place, range, k)) continue;
      return relax_grad_fail(
          "%s is %i at its element %i, but it selects one of %i elements, and must be from %i to "
          "%i; the option check_inputs = 0 leaves such values to the compiled step, whose results "
          "are then NaN",
          input->name, value, (int64_t)k, range->extent, range->low, range->high - 1);
    }
  }
  return RELAX_GRAD_OK;
}

int32_t relax_grad_take_inputs(relax_grad_trainer* trainer, int32_t kind,
                               const relax_grad_tensor* given, int64_t number,
                               const relax_grad_function** function) {
  const relax_grad_model* model = trainer->model;
  const relax_grad_function *first = relax_grad_function_of(model, kind, 0), *own;
  int64_t size;
  uint32_t i;
  if (number > 0) NOT_NULL(given);
  if (check_given(first, given, number) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  for (size = 0; (own = relax_grad_function_of(model, kind, size)) != NULL; ++size) {
    for (i = 0; i < own->num_inputs; ++i) {
      if (!fits(model, own->inputs + i, named(given, number, own->inputs[i].name))) break;
    }
    if (i == own->num_inputs) break;
  }
  for (i = 0; own == NULL && i < first->num_inputs; ++i) {
    const relax_grad_tensor* tensor = named(given, number, first->inputs[i].name);
    if (check_shape(model, first->inputs + i, tensor) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  }
  for (i = 0; i < own->num_inputs; ++i) {
    const relax_grad_tensor* tensor = named(given, number, own->inputs[i].name);
    if (check_bytes(trainer, own->inputs + i, tensor) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  }
  if (trainer->options.check_inputs && check_ranges(trainer, own, given, number) != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  trainer->last = NULL;
  for (i = 0; i < own->num_inputs; ++i) {
    const relax_grad_tensor* tensor = named(given, number, own->inputs[i].name);
    memcpy(relax_grad_data(trainer, relax_grad_place_at(trainer, own->inputs[i].place)),
           tensor->data, (size_t)tensor->num_bytes);
  }
  *function = own;
  return RELAX_GRAD_OK;
}
