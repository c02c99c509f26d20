/* A reader of JSON in place, also of JSON in a text of JSON: the state of training is a text in the
 * header of a file. */
#ifndef RELAX_GRAD_JSON_H_
#define RELAX_GRAD_JSON_H_

#include "relax_grad_model.h"

typedef struct {
  const uint8_t *at, *end;
  /* Whether the JSON is itself the content of a text, with escapes. */
  int32_t is_text;
} relax_grad_json;

/* Each function returns 1, or 0 if the JSON is another one. Objects and lists are read by
 * relax_grad_next: after the opening character, *is_first must be 1. */
RELAX_GRAD_HIDDEN int32_t relax_grad_expect(relax_grad_json* json, int32_t character);
RELAX_GRAD_HIDDEN int32_t relax_grad_next(relax_grad_json* json, int32_t* is_first, int32_t end);
/* Gives the content of a text, without its quotation marks. */
RELAX_GRAD_HIDDEN int32_t relax_grad_text(relax_grad_json* json, relax_grad_json* content);
/* The same, and the colon after it. */
RELAX_GRAD_HIDDEN int32_t relax_grad_key(relax_grad_json* json, relax_grad_json* content);
/* Compares the content of a text with a name. */
RELAX_GRAD_HIDDEN int32_t relax_grad_is(relax_grad_json content, const char* name);
RELAX_GRAD_HIDDEN int32_t relax_grad_integer(relax_grad_json* json, int64_t* value);
/* Gives any value, as it is written. */
RELAX_GRAD_HIDDEN int32_t relax_grad_value(relax_grad_json* json, relax_grad_json* content);
RELAX_GRAD_HIDDEN int32_t relax_grad_is_object(relax_grad_json content);
RELAX_GRAD_HIDDEN int32_t relax_grad_at_end(relax_grad_json* json);

#endif /* RELAX_GRAD_JSON_H_ */
