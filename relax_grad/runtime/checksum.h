/// Checksums of files: CRC-32 as in zlib, PNG and gzip, of which Python's standard library has the
/// function too.
#ifndef RELAX_GRAD_RUNTIME_CHECKSUM_H_
#define RELAX_GRAD_RUNTIME_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace relax_grad {

/// The key of the checksum in the manifest, and in the metadata of safetensors.
inline constexpr const char* kChecksum = "crc32";
/// The checksum of a file is computed with these digits instead of its own.
inline constexpr const char* kNoChecksum = "00000000";

/// The version of the format whose files have checksums.
inline constexpr int64_t kFirstWithChecksum = 2;

/// Returns the CRC-32 of bytes that follow others.
///
/// @param before The CRC-32 of those before.
uint32_t Crc32(const void* data, size_t size, uint32_t before = 0);

/// Returns eight hexadecimal digits in lower case.
std::string HexOf(uint32_t checksum);

/// Returns the place of the eight digits of the checksum in a text of JSON; none if it has no such
/// key.
std::optional<size_t> PlaceOfChecksum(std::string_view text);

/// Throws if a checksum differs from the digits in a file.
void CheckChecksum(uint32_t actual, std::string_view written, const std::string& where);

/// Throws if the checksum of a text differs from that at a place in it.
void CheckText(std::string_view text, size_t place, const std::string& where);

/// Returns the checksum of bytes before a text with a checksum at a place, and of the text.
uint32_t Crc32OfText(std::string_view text, size_t place, uint32_t before = 0);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_CHECKSUM_H_
