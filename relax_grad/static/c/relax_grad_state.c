/* The state of training as the bytes of a file of safetensors: the format of
 * relax_grad.training, with its CRC-32. */
#include <string.h>

#include "relax_grad_json.h"

#define FORMAT "relax_grad.training"
#define MOST_SEED INT32_MAX
#define MOST_COUNT ((int64_t)1 << 53)
#define DIGITS 8

static const char damaged[] = "the state is damaged";

/* Checksums */

static uint32_t crc_of(uint32_t crc, const uint8_t* data, uint64_t size) {
  static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                     0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                     0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                     0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  for (; size > 0; --size, ++data) {
    crc ^= *data;
    crc = crc >> 4 ^ table[crc & 15];
    crc = crc >> 4 ^ table[crc & 15];
  }
  return crc;
}

/* Returns the CRC-32 of a file with zeros in the place of the digits. */
static uint32_t crc_of_file(const uint8_t* data, uint64_t size, uint64_t digits) {
  uint32_t crc = crc_of(0xffffffffu, data, digits);
  crc = crc_of(crc, (const uint8_t*)"00000000", DIGITS);
  return ~crc_of(crc, data + digits + DIGITS, size - digits - DIGITS);
}

static int32_t is_digit(uint8_t character) {
  return (character >= '0' && character <= '9') || (character >= 'a' && character <= 'f');
}

/* Returns the position of the digits of the checksum before an end; 0 without one. */
static uint64_t digits_in(const uint8_t* data, uint64_t end) {
  static const char key[] = "\"crc32\":";
  const uint64_t length = sizeof key - 1;
  uint64_t at, begin, i;
  for (at = 0; at + length + DIGITS + 2 <= end; ++at) {
    if (memcmp(data + at, key, (size_t)length) != 0) continue;
    begin = at + length + (data[at + length] == ' ');
    if (begin + DIGITS + 2 > end || data[begin] != '"' || data[begin + DIGITS + 1] != '"') continue;
    for (i = 1; i <= DIGITS && is_digit(data[begin + i]); ++i) continue;
    if (i > DIGITS) return begin + 1;
  }
  return 0;
}

static void write_digits(uint32_t crc, uint8_t* digits) {
  int32_t i;
  for (i = 0; i < DIGITS; ++i) digits[i] = (uint8_t)"0123456789abcdef"[crc >> (28 - 4 * i) & 15];
}

/* Counters */

typedef struct {
  const char* name;
  size_t offset;
} counter;

static const counter counters_of_files[] = {
    {"seed", offsetof(relax_grad_counters, seed)},
    {"steps", offsetof(relax_grad_counters, steps)},
    {"updates", offsetof(relax_grad_counters, updates)},
    {"skipped", offsetof(relax_grad_counters, skipped)},
    {"epoch", offsetof(relax_grad_counters, epoch)},
    {"batch", offsetof(relax_grad_counters, batch)},
};
#define NUM_COUNTERS 6

static int64_t get_counter(const relax_grad_counters* counters, int32_t i) {
  int64_t value;
  memcpy(&value, (const uint8_t*)counters + counters_of_files[i].offset, sizeof value);
  return value;
}

int32_t relax_grad_check_counters(const relax_grad_counters* counters) {
  int32_t i;
  for (i = 0; i < NUM_COUNTERS; ++i) {
    int64_t value = get_counter(counters, i), most = i == 0 ? MOST_SEED : MOST_COUNT;
    if (value < 0 || value > most)
      return relax_grad_fail("the counter %s must be from 0 to %i, but it is %i",
                             counters_of_files[i].name, most, value);
  }
  if (counters->skipped > counters->steps)
    return relax_grad_fail("the counter skipped is %i, but steps is %i", counters->skipped,
                           counters->steps);
  return RELAX_GRAD_OK;
}

/* Reading */

/* What a file says besides its tensors. */
typedef struct {
  relax_grad_json text, history, more;
  relax_grad_counters counters;
  int64_t version;
  const uint8_t* data;
} description;

static int32_t read_counters(relax_grad_json* json, relax_grad_counters* counters) {
  relax_grad_json key;
  int32_t is_first = 1, seen = 0, i;
  if (!relax_grad_expect(json, '{')) return 0;
  while (relax_grad_next(json, &is_first, '}')) {
    int64_t value;
    if (!relax_grad_key(json, &key) || !relax_grad_integer(json, &value)) return 0;
    for (i = 0; i < NUM_COUNTERS && !relax_grad_is(key, counters_of_files[i].name); ++i) continue;
    if (i == NUM_COUNTERS || seen >> i & 1) return 0;
    seen |= 1 << i;
    memcpy((uint8_t*)counters + counters_of_files[i].offset, &value, sizeof value);
  }
  return seen == (1 << NUM_COUNTERS) - 1;
}

/* Reads the JSON in the metadata. */
static int32_t read_described(description* found) {
  relax_grad_json json = found->text, key, value;
  int32_t is_first = 1, seen = 0, own;
  if (!relax_grad_expect(&json, '{')) return 0;
  while (relax_grad_next(&json, &is_first, '}')) {
    if (!relax_grad_key(&json, &key)) return 0;
    if (relax_grad_is(key, "version")) {
      own = 1;
      if (!relax_grad_integer(&json, &found->version)) return 0;
    } else if (relax_grad_is(key, "counters")) {
      own = 2;
      if (!read_counters(&json, &found->counters)) return 0;
    } else {
      own = relax_grad_is(key, "history") ? 4 : relax_grad_is(key, "more") ? 8 : 0;
      if (!relax_grad_value(&json, &value)) return 0;
      if (own != 0 && !relax_grad_is_object(value)) return 0;
      if (own == 4) found->history = value;
      if (own == 8) found->more = value;
    }
    if (seen & own) return 0;
    seen |= own;
  }
  return seen == 15 && relax_grad_at_end(&json);
}

static int32_t read_metadata(relax_grad_json* json, description* found) {
  relax_grad_json key, value;
  int32_t is_first = 1;
  if (!relax_grad_expect(json, '{')) return 0;
  while (relax_grad_next(json, &is_first, '}')) {
    if (!relax_grad_key(json, &key) || !relax_grad_text(json, &value)) return 0;
    if (!relax_grad_is(key, FORMAT)) continue;
    if (found->text.at != NULL) return 0;
    found->text = value;
  }
  return 1;
}

/* Reads a list of integers, and compares it with the extents of a tensor. */
static int32_t read_shape(relax_grad_json* json, const relax_grad_model* model,
                          const relax_grad_place* place, int32_t* is_same) {
  int32_t is_first = 1;
  uint32_t axes = 0;
  *is_same = 1;
  if (!relax_grad_expect(json, '[')) return 0;
  while (relax_grad_next(json, &is_first, ']')) {
    int64_t extent;
    if (!relax_grad_integer(json, &extent)) return 0;
    if (axes >= place->num_axes || model->extents[place->extents + axes] != extent) *is_same = 0;
    ++axes;
  }
  *is_same = *is_same && axes == place->num_axes;
  return 1;
}

static int32_t read_offsets(relax_grad_json* json, int64_t* begin, int64_t* end) {
  return relax_grad_expect(json, '[') && relax_grad_integer(json, begin) &&
         relax_grad_expect(json, ',') && relax_grad_integer(json, end) &&
         relax_grad_expect(json, ']');
}

/* Reads the type and the place of a tensor in the file. */
static int32_t read_tensor(relax_grad_trainer* trainer, relax_grad_json* json, uint32_t index,
                           uint64_t data_bytes) {
  const relax_grad_entry* entry = trainer->model->entries + index;
  const relax_grad_place* place = trainer->model->places + entry->place;
  relax_grad_json key, dtype;
  int32_t is_first = 1, seen = 0, is_same = 1, fits = 1;
  int64_t begin = 0, end = 0;
  if (!relax_grad_expect(json, '{')) return relax_grad_fail(damaged);
  while (relax_grad_next(json, &is_first, '}')) {
    int32_t own = 0, is_read = 0;
    if (!relax_grad_key(json, &key)) return relax_grad_fail(damaged);
    if (relax_grad_is(key, "dtype")) {
      own = 1;
      is_read = relax_grad_text(json, &dtype);
      fits = is_read && relax_grad_is(dtype, entry->code);
    } else if (relax_grad_is(key, "shape")) {
      own = 2;
      is_read = read_shape(json, trainer->model, place, &is_same);
    } else if (relax_grad_is(key, "data_offsets")) {
      own = 4;
      is_read = read_offsets(json, &begin, &end);
    }
    if (!is_read || seen & own) return relax_grad_fail("%s: the entry of %s", damaged, entry->key);
    seen |= own;
  }
  if (seen != 7 || begin > end || (uint64_t)end > data_bytes)
    return relax_grad_fail("%s: the entry of %s", damaged, entry->key);
  if (!fits || !is_same)
    return relax_grad_fail(
        "the state has another shape or dtype of %s than the step, whose dtype "
        "is %s; it was written by a trainer of another step",
        entry->key, entry->dtype);
  if ((uint64_t)(end - begin) != relax_grad_size(trainer->model, place))
    return relax_grad_fail("%s: %s has %i bytes", damaged, entry->key, end - begin);
  trainer->begins[index] = (uint64_t)begin;
  return RELAX_GRAD_OK;
}

static int32_t read_header(relax_grad_trainer* trainer, relax_grad_json json, uint64_t data_bytes,
                           description* found) {
  const relax_grad_model* model = trainer->model;
  relax_grad_json key;
  int32_t is_first = 1;
  uint32_t i;
  for (i = 0; i < model->num_entries; ++i) trainer->begins[i] = UINT64_MAX;
  if (!relax_grad_expect(&json, '{')) return relax_grad_fail("%s: no header", damaged);
  while (relax_grad_next(&json, &is_first, '}')) {
    if (!relax_grad_key(&json, &key)) return relax_grad_fail("%s: its header", damaged);
    if (relax_grad_is(key, "__metadata__")) {
      if (!read_metadata(&json, found)) return relax_grad_fail("%s: its metadata", damaged);
      continue;
    }
    for (i = 0; i < model->num_entries && !relax_grad_is(key, model->entries[i].key); ++i) continue;
    if (i == model->num_entries)
      return relax_grad_fail(
          "the state has a tensor that the step lacks; it was written by a trainer of another "
          "step");
    if (trainer->begins[i] != UINT64_MAX)
      return relax_grad_fail("%s: %s stands twice", damaged, model->entries[i].key);
    if (read_tensor(trainer, &json, i, data_bytes) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  }
  return relax_grad_at_end(&json) ? RELAX_GRAD_OK : relax_grad_fail("%s: its header", damaged);
}

/* Checks that all tensors are there, side by side. */
static int32_t check_tensors(const relax_grad_trainer* trainer, const description* found,
                             uint64_t data_bytes) {
  const relax_grad_model* model = trainer->model;
  uint32_t i, k;
  for (i = 0; i < model->num_entries; ++i) {
    const relax_grad_place* place = model->places + model->entries[i].place;
    uint64_t begin = trainer->begins[i], size = relax_grad_size(model, place), at;
    if (begin == UINT64_MAX)
      return relax_grad_fail("the state lacks %s; it was written by a trainer of another step",
                             model->entries[i].key);
    for (k = 0; k < i; ++k) {
      uint64_t other = relax_grad_size(model, model->places + model->entries[k].place);
      if (size > 0 && begin < trainer->begins[k] + other && trainer->begins[k] < begin + size)
        return relax_grad_fail("%s: %s and %s overlap", damaged, model->entries[i].key,
                               model->entries[k].key);
    }
    for (at = 0; place->code == 6 && at < size; ++at) {
      if (found->data[begin + at] > 1)
        return relax_grad_fail("%s: %s has booleans that are neither 0 nor 1", damaged,
                               model->entries[i].key);
    }
  }
  if (data_bytes != model->data_bytes)
    return relax_grad_fail("%s: it has %i bytes of tensors, but the step has %i", damaged,
                           (int64_t)data_bytes, (int64_t)model->data_bytes);
  return RELAX_GRAD_OK;
}

static int32_t check_described(const relax_grad_trainer* trainer, description* found,
                               int32_t has_checksum) {
  uint64_t needed;
  if (found->text.at == NULL)
    return relax_grad_fail("it is no state of training; Trainer.save writes such files");
  if (!read_described(found)) return relax_grad_fail("%s: its counters or history", damaged);
  if (found->version != 1 && found->version != 2)
    return relax_grad_fail("the state has version %i of the format, but versions 1 and 2 are known",
                           found->version);
  if (found->version > 1 && !has_checksum)
    return relax_grad_fail("%s: it has no checksum", damaged);
  if (relax_grad_check_counters(&found->counters) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  needed = (uint64_t)(found->history.end - found->history.at) +
           (uint64_t)(found->more.end - found->more.at);
  if (needed > trainer->room && !trainer->options.drop_history)
    return relax_grad_fail(
        "the history and the properties of the state take %i bytes, but the "
        "memory has room for %i: open the trainer with more memory, or with the "
        "option drop_history",
        (int64_t)needed, (int64_t)trainer->room);
  return RELAX_GRAD_OK;
}

static void take_text(relax_grad_trainer* trainer, uint64_t at, relax_grad_json text,
                      uint64_t* size) {
  *size = (uint64_t)(text.end - text.at);
  memcpy(trainer->texts + at, text.at, (size_t)*size);
}

static void take(relax_grad_trainer* trainer, const description* found) {
  const relax_grad_model* model = trainer->model;
  uint64_t needed = (uint64_t)(found->history.end - found->history.at) +
                    (uint64_t)(found->more.end - found->more.at);
  uint32_t i;
  for (i = 0; i < model->num_entries; ++i) {
    const relax_grad_place* place = model->places + model->entries[i].place;
    memcpy(relax_grad_data(trainer, place), found->data + trainer->begins[i],
           (size_t)relax_grad_size(model, place));
  }
  trainer->counters = found->counters;
  trainer->history_bytes = trainer->more_bytes = 0;
  if (needed <= trainer->room) {
    take_text(trainer, 0, found->history, &trainer->history_bytes);
    take_text(trainer, trainer->history_bytes, found->more, &trainer->more_bytes);
  }
  trainer->is_broken = 0;
  trainer->last = NULL;
}

int32_t relax_grad_load_state(relax_grad_trainer* trainer, const void* state,
                              uint64_t state_bytes) {
  const uint8_t* file = state;
  relax_grad_json header;
  description found;
  uint64_t length = 0, digits, data_bytes;
  int32_t i;
  uint8_t written[DIGITS];
  NOT_NULL(trainer);
  NOT_NULL(state);
  memset(&found, 0, sizeof found);
  for (i = 7; i >= 0 && state_bytes >= 8; --i) length = length << 8 | file[i];
  if (state_bytes < 8 || length > state_bytes - 8)
    return relax_grad_fail("%s: it has %i bytes, too few for its header", damaged,
                           (int64_t)state_bytes);
  digits = digits_in(file, 8 + length);
  if (digits != 0) {
    write_digits(crc_of_file(file, state_bytes, digits), written);
    if (memcmp(written, file + digits, DIGITS) != 0)
      return relax_grad_fail("%s: its checksum is wrong", damaged);
  }
  header.at = file + 8;
  header.end = file + 8 + length;
  header.is_text = 0;
  found.data = header.end;
  data_bytes = state_bytes - 8 - length;
  if (read_header(trainer, header, data_bytes, &found) != RELAX_GRAD_OK ||
      check_described(trainer, &found, digits != 0) != RELAX_GRAD_OK ||
      check_tensors(trainer, &found, data_bytes) != RELAX_GRAD_OK)
    return RELAX_GRAD_ERROR;
  take(trainer, &found);
  return RELAX_GRAD_OK;
}

/* Writing */

/* The bytes that are written; those beyond the room are only counted. */
typedef struct {
  uint8_t* data;
  uint64_t at, room;
} output;

static void put(output* out, const void* data, uint64_t size) {
  if (out->at + size <= out->room) memcpy(out->data + out->at, data, (size_t)size);
  out->at += size;
}

static void put_text(output* out, const char* text) {
  uint64_t size = 0;
  while (text[size] != 0) ++size;
  put(out, text, size);
}

static void put_number(output* out, int64_t number) {
  char digits[20];
  int32_t place = 20;
  do {
    digits[--place] = (char)('0' + number % 10);
    number /= 10;
  } while (number > 0);
  put(out, digits + place, (uint64_t)(20 - place));
}

/* Writes a name as the content of a text. Names have no control characters. */
static void put_name(output* out, const char* name) {
  for (; *name != 0; ++name) {
    if (*name == '"' || *name == '\\') put_text(out, "\\");
    put(out, name, 1);
  }
}

static void put_entry(output* out, const relax_grad_model* model, const relax_grad_entry* entry) {
  const relax_grad_place* place = model->places + entry->place;
  uint32_t axis;
  put_text(out, ",\"");
  put_name(out, entry->key);
  put_text(out, "\":{\"dtype\":\"");
  put_text(out, entry->code);
  put_text(out, "\",\"shape\":[");
  for (axis = 0; axis < place->num_axes; ++axis) {
    if (axis > 0) put_text(out, ",");
    put_number(out, model->extents[place->extents + axis]);
  }
  put_text(out, "],\"data_offsets\":[");
  put_number(out, (int64_t)entry->offset);
  put_text(out, ",");
  put_number(out, (int64_t)(entry->offset + relax_grad_size(model, place)));
  put_text(out, "]}");
}

static void put_header(output* out, const relax_grad_trainer* trainer) {
  const relax_grad_model* model = trainer->model;
  uint32_t k;
  int32_t i;
  put_text(out, "{\"__metadata__\":{\"crc32\":\"00000000\",\"" FORMAT
                "\":\"{"
                "\\\"version\\\": 2, \\\"step\\\": \\\"");
  put_text(out, model->digest);
  put_text(out, "\\\", \\\"counters\\\": {");
  for (i = 0; i < NUM_COUNTERS; ++i) {
    put_text(out, i == 0 ? "\\\"" : ", \\\"");
    put_text(out, counters_of_files[i].name);
    put_text(out, "\\\": ");
    put_number(out, get_counter(&trainer->counters, i));
  }
  put_text(out, "}, \\\"history\\\": ");
  if (trainer->history_bytes == 0) put_text(out, model->empty_history);
  put(out, trainer->texts, trainer->history_bytes);
  put_text(out, ", \\\"more\\\": ");
  if (trainer->more_bytes == 0) put_text(out, "{}");
  put(out, trainer->texts + trainer->history_bytes, trainer->more_bytes);
  put_text(out, "}\"}");
  for (k = 0; k < model->num_entries; ++k) put_entry(out, model, model->entries + k);
  put_text(out, "}");
  while (out->at % 8 != 0) put_text(out, " ");
}

static void put_file(output* out, const relax_grad_trainer* trainer) {
  const relax_grad_model* model = trainer->model;
  uint64_t length, begin;
  uint32_t i;
  uint8_t bytes[8];
  out->at = 8;
  put_header(out, trainer);
  length = out->at - 8;
  for (i = 0; i < 8; ++i) bytes[i] = (uint8_t)(length >> 8 * i);
  out->at = 0;
  put(out, bytes, 8);
  begin = 8 + length;
  for (i = 0; i < model->num_entries; ++i) {
    const relax_grad_place* place = model->places + model->entries[i].place;
    out->at = begin + model->entries[i].offset;
    put(out, relax_grad_data(trainer, place), relax_grad_size(model, place));
  }
  out->at = begin + model->data_bytes;
}

int32_t relax_grad_state_bytes(relax_grad_trainer* trainer, uint64_t* size) {
  output out = {NULL, 0, 0};
  NOT_NULL(trainer);
  NOT_NULL(size);
  put_file(&out, trainer);
  *size = out.at;
  return RELAX_GRAD_OK;
}

int32_t relax_grad_save_state(relax_grad_trainer* trainer, void* buffer, uint64_t buffer_bytes,
                              uint64_t* size) {
  output out;
  uint64_t digits;
  NOT_NULL(buffer);
  if (relax_grad_state_bytes(trainer, size) != RELAX_GRAD_OK) return RELAX_GRAD_ERROR;
  if (trainer->is_broken)
    return relax_grad_fail("the last step did not end: there is no whole state to save");
  if (buffer_bytes < *size)
    return relax_grad_fail("the buffer must have at least %i bytes, but it has %i", (int64_t)*size,
                           (int64_t)buffer_bytes);
  out.data = buffer;
  out.at = 0;
  out.room = *size;
  put_file(&out, trainer);
  digits = digits_in(out.data, *size);
  write_digits(crc_of_file(out.data, *size, digits), out.data + digits);
  return RELAX_GRAD_OK;
}
