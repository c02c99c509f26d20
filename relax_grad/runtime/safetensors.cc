#include "safetensors.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "json.h"

namespace relax_grad {

namespace {

constexpr int64_t kMostExtent = std::numeric_limits<int64_t>::max();

Entry ReadEntry(const std::string& name, JsonReader* json) {
  Entry entry{name, nullptr, {}, 0, 0};
  std::vector<int64_t> offsets;
  json->Object(
      [&](const std::string& key) {
        if (key == "dtype") {
          std::string dtype = json->Text();
          entry.dtype = DtypeInFile(dtype);
          if (!entry.dtype) json->Fail("is " + Shown(dtype) + ", which is not supported");
        } else if (key == "shape") {
          json->Array([&] { entry.shape.push_back(json->Integer(0, kMostExtent)); });
        } else if (key == "data_offsets") {
          json->Array([&] { offsets.push_back(json->Integer(0, kMostExtent)); });
        } else {
          json->Fail("is no key of a tensor");
        }
      },
      {"dtype", "shape", "data_offsets"});
  if (offsets.size() != 2)
    json->Fail("must have two data_offsets, but it has " + std::to_string(offsets.size()));
  entry.begin = offsets[0];
  entry.end = offsets[1];
  return entry;
}

void Check(const Entry& entry, int64_t size, const JsonReader& json) {
  std::string name = Shown(entry.name);
  if (entry.end < entry.begin || entry.end > size) {
    json.Fail(name + " is not within the file: it has the bytes from " +
              std::to_string(entry.begin) + " to " + std::to_string(entry.end) + " of " +
              std::to_string(size));
  }
  auto bytes = Bytes(entry.shape, entry.dtype->bytes);
  if (!bytes.has_value()) json.Fail(name + " is larger than any file");
  if (*bytes != entry.end - entry.begin) {
    json.Fail(name +
              " has another size than its shape: " + std::to_string(entry.end - entry.begin) +
              " and not " + std::to_string(*bytes) + " bytes");
  }
}

}  // namespace

Header ParseHeader(std::string_view text, int64_t size, const std::string& where) {
  Header header;
  JsonReader json(text, where);
  json.Object([&](const std::string& key) {
    if (key == "__metadata__") {
      json.Object([&](const std::string& name) { header.metadata[name] = json.Text(); });
    } else {
      header.entries.push_back(ReadEntry(key, &json));
    }
  });
  json.End();
  for (const Entry& entry : header.entries) Check(entry, size, json);
  auto place = [](const Entry& entry) { return std::tie(entry.begin, entry.end, entry.name); };
  std::sort(header.entries.begin(), header.entries.end(),
            [&](const Entry& first, const Entry& second) { return place(first) < place(second); });
  int64_t used = 0;
  for (const Entry& entry : header.entries) {
    if (entry.begin < used)
      json.Fail("its tensors overlap: " + Shown(entry.name) + " and another one");
    if (entry.begin > used)
      json.Fail("there are bytes of no tensor in it, before " + Shown(entry.name));
    used = entry.end;
  }
  if (used != size) {
    json.Fail("its tensors have " + std::to_string(used) + " bytes, but it has " +
              std::to_string(size));
  }
  return header;
}

}  // namespace relax_grad
