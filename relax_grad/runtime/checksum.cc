#include "checksum.h"

#include <array>

#include "error.h"
#include "json.h"

namespace relax_grad {

namespace {

constexpr size_t kDigits = 8;
// The bytes that one round of the loop takes.
constexpr size_t kSlices = 8;

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

/// Returns the remainders of each byte in front of 0 to 7 bytes of zeros, of the reflected
/// polynomial 0xEDB88320.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int i = 0; i < 8; ++i) rest = rest >> 1 ^ (rest & 1 ? 0xEDB88320u : 0u);
    tables[0][byte] = rest;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = tables[slice - 1][byte];
      tables[slice][byte] = rest >> 8 ^ tables[0][rest & 255];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

bool IsHex(char digit) { return (digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f'); }

}  // namespace

uint32_t Crc32(const void* data, size_t size, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t rest = ~before;
  for (; size >= kSlices; size -= kSlices, at += kSlices) {
    rest ^= static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
            static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
    rest = kTables[7][rest & 255] ^ kTables[6][rest >> 8 & 255] ^ kTables[5][rest >> 16 & 255] ^
           kTables[4][rest >> 24] ^ kTables[3][at[4]] ^ kTables[2][at[5]] ^ kTables[1][at[6]] ^
           kTables[0][at[7]];
  }
  for (; size; --size, ++at) rest = rest >> 8 ^ kTables[0][(rest ^ *at) & 255];
  return ~rest;
}

std::string HexOf(uint32_t checksum) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string digits;
  for (int shift = 28; shift >= 0; shift -= 4) digits += kHex[checksum >> shift & 15];
  return digits;
}

std::optional<size_t> PlaceOfChecksum(std::string_view text) {
  // Quotation marks within a text of JSON follow a backslash, so this is a key.
  const std::string key = Quoted(kChecksum);
  for (size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    size_t place = at + key.size();
    if (place < text.size() && text[place] == ':') ++place;
    if (place < text.size() && text[place] == ' ') ++place;
    if (place + kDigits + 2 > text.size() || text[place] != '"' || text[place + kDigits + 1] != '"')
      continue;
    bool is_hex = true;
    for (size_t i = 1; i <= kDigits; ++i) is_hex &= IsHex(text[place + i]);
    if (is_hex) return place + 1;
  }
  return std::nullopt;
}

void CheckChecksum(uint32_t actual, std::string_view written, const std::string& where) {
  if (HexOf(actual) != written) {
    throw Error(where + " is damaged: its checksum is " + HexOf(actual) +
                ", but it was written with " + Shown(written));
  }
}

uint32_t Crc32OfText(std::string_view text, size_t place, uint32_t before) {
  uint32_t start = Crc32(kNoChecksum, kDigits, Crc32(text.data(), place, before));
  std::string_view rest = text.substr(place + kDigits);
  return Crc32(rest.data(), rest.size(), start);
}

void CheckText(std::string_view text, size_t place, const std::string& where) {
  CheckChecksum(Crc32OfText(text, place), text.substr(place, kDigits), where);
}

}  // namespace relax_grad
