#include "relax_grad_json.h"

#define MOST_DEPTH 64

/* A character of the JSON: -1 at its end, -2 for a damaged one. What is no ASCII is 128. */
static int32_t character(const relax_grad_json* json, const uint8_t** next) {
  static const char escapes[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
  const uint8_t* at = json->at;
  uint32_t code = 0, i;
  if (at == json->end) return -1;
  *next = at + 1;
  if (!json->is_text || *at != '\\') return *at < 128 ? *at : 128;
  if (at + 1 == json->end) return -2;
  *next = at + 2;
  for (i = 0; escapes[i] != 0; ++i) {
    if (at[1] == (uint8_t)escapes[i]) return values[i];
  }
  if (at[1] != 'u' || json->end - at < 6) return -2;
  *next = at + 6;
  for (i = 2; i < 6; ++i) {
    uint32_t digit = at[i] <= '9' ? (uint32_t)at[i] - '0' : ((uint32_t)at[i] | 32) - 'a' + 10;
    if (digit > 15) return -2;
    code = 16 * code + digit;
  }
  return code < 128 ? (int32_t)code : 128;
}

static void skip_space(relax_grad_json* json) {
  const uint8_t* next;
  int32_t found = character(json, &next);
  while (found == ' ' || found == '\n' || found == '\t' || found == '\r') {
    json->at = next;
    found = character(json, &next);
  }
}

static int32_t is_next(relax_grad_json* json, int32_t wanted) {
  const uint8_t* next;
  skip_space(json);
  return character(json, &next) == wanted;
}

int32_t relax_grad_expect(relax_grad_json* json, int32_t wanted) {
  const uint8_t* next;
  skip_space(json);
  if (character(json, &next) != wanted) return 0;
  json->at = next;
  return 1;
}

int32_t relax_grad_at_end(relax_grad_json* json) { return is_next(json, -1); }

int32_t relax_grad_next(relax_grad_json* json, int32_t* is_first, int32_t end) {
  if (*is_first) {
    *is_first = 0;
    return !relax_grad_expect(json, end);
  }
  if (relax_grad_expect(json, end)) return 0;
  /* A missing comma leaves a character that no value begins with. */
  if (!relax_grad_expect(json, ',')) json->at = json->end;
  return 1;
}

int32_t relax_grad_text(relax_grad_json* json, relax_grad_json* content) {
  const uint8_t* next;
  int32_t found;
  if (!relax_grad_expect(json, '"')) return 0;
  content->at = json->at;
  content->is_text = 1;
  for (;;) {
    found = character(json, &next);
    if (found == '"') break;
    if (found < ' ') return 0; /* also the end */
    json->at = next;
    if (found != '\\') continue;
    if (character(json, &next) < ' ') return 0;
    json->at = next;
  }
  content->end = json->at;
  json->at = next;
  return 1;
}

int32_t relax_grad_key(relax_grad_json* json, relax_grad_json* content) {
  return relax_grad_text(json, content) && relax_grad_expect(json, ':');
}

int32_t relax_grad_is(relax_grad_json content, const char* name) {
  const uint8_t* next;
  for (; *name != 0; ++name) {
    int32_t found = character(&content, &next);
    /* A byte of UTF-8 is written as it is. */
    if (found == 128 ? *content.at != (uint8_t)*name : found != *name) return 0;
    content.at = next;
  }
  return content.at == content.end;
}

int32_t relax_grad_integer(relax_grad_json* json, int64_t* value) {
  const uint8_t* next;
  int32_t digits = 0, found;
  *value = 0;
  skip_space(json);
  for (; (found = character(json, &next)) >= '0' && found <= '9'; json->at = next) {
    if (++digits > 18) return 0;
    *value = 10 * *value + (found - '0');
  }
  return digits > 0 && found != '.' && found != 'e' && found != 'E';
}

/* Passes a number, or a word such as true and NaN. */
static int32_t word(relax_grad_json* json) {
  const uint8_t *next, *begin = json->at;
  int32_t found = character(json, &next);
  while ((found >= '0' && found <= '9') || ((found | 32) >= 'a' && (found | 32) <= 'z') ||
         found == '-' || found == '+' || found == '.') {
    json->at = next;
    found = character(json, &next);
  }
  return json->at > begin;
}

static int32_t value(relax_grad_json* json, int32_t depth) {
  relax_grad_json content;
  int32_t is_first = 1;
  if (depth > MOST_DEPTH) return 0;
  if (is_next(json, '"')) return relax_grad_text(json, &content);
  if (relax_grad_expect(json, '[')) {
    while (relax_grad_next(json, &is_first, ']')) {
      if (!value(json, depth + 1)) return 0;
    }
    return 1;
  }
  if (!relax_grad_expect(json, '{')) return word(json);
  while (relax_grad_next(json, &is_first, '}')) {
    if (!relax_grad_key(json, &content) || !value(json, depth + 1)) return 0;
  }
  return 1;
}

int32_t relax_grad_value(relax_grad_json* json, relax_grad_json* content) {
  skip_space(json);
  *content = *json;
  if (!value(json, 0)) return 0;
  content->end = json->at;
  return 1;
}

int32_t relax_grad_is_object(relax_grad_json content) { return is_next(&content, '{'); }
