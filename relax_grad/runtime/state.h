/// The description in the metadata of a state of training: counters, and values that only Python
/// reads.
#ifndef RELAX_GRAD_RUNTIME_STATE_H_
#define RELAX_GRAD_RUNTIME_STATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trainer.h"

namespace relax_grad {

struct Described {
  /// That of the file.
  int64_t version = 0;
  /// The digest of the step, as in the manifest; empty in older files.
  std::string step;
  Counters counters;
  /// Objects of JSON, which are written as they were read.
  std::string history = "{}", more = "{}";
};

/// Reads a description; whatever does not fit is an Error that names the file.
Described ParseDescribed(std::string_view text, const std::string& where);

/// Returns the text of a description.
std::string DescribedText(const Described& described);

/// Returns the members of an object of JSON, whose values are texts of JSON.
std::vector<std::pair<std::string, std::string>> MembersOf(std::string_view object);

/// Returns an object of JSON with a member that is a text, instead of an older one of its
/// name; without it, if there is no text.
std::string WithMember(std::string_view object, const std::string& name,
                       const std::optional<std::string>& text);

/// Returns the text that a value of JSON is; for another one, its JSON.
std::string TextOf(const std::string& value);

/// Throws if a counter is out of range.
void CheckCounters(const Counters& counters, const std::string& where);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_STATE_H_
