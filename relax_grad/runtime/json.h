/// A strict reader of JSON (RFC 8259) for files that nobody vouches for.
#ifndef RELAX_GRAD_RUNTIME_JSON_H_
#define RELAX_GRAD_RUNTIME_JSON_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace relax_grad {

/// Reads a text value by value. A value of another type, a number out of range, a key that stands
/// twice, text that is no UTF-8, and lists and objects that are nested more than 64 deep are errors
/// with the file and the place of the value.
class JsonReader {
 public:
  /// @param text The text, which must outlive the reader.
  /// @param where The file, for errors.
  /// @param allows_nan Whether Skip accepts NaN, Infinity and -Infinity, which Python writes.
  JsonReader(std::string_view text, std::string where, bool allows_nan = false);

  /// Reads an object, and calls a function for each key, which must read its value.
  ///
  /// @param required Keys that must be there.
  void Object(const std::function<void(const std::string& key)>& member,
              const std::vector<std::string>& required = {});
  /// Reads a list, and calls a function at each item, which must read it.
  void Array(const std::function<void()>& item);
  std::string Text();
  /// Reads a text that is not empty and has no control characters.
  std::string Name();
  /// Reads an integer from `least` to `most`.
  int64_t Integer(int64_t least, int64_t most);
  /// Reads a number that is finite as a double.
  double Number();
  /// Tells whether the next value begins with a character: `{`, `[`, `"`, or that of a literal.
  bool IsNext(char first);
  /// Reads any value, and returns its text.
  std::string_view Skip();
  /// Throws if there is more than white space after the value.
  void End();
  /// Throws an error that names the file and the value that is read.
  [[noreturn]] void Fail(const std::string& reason) const;

 private:
  [[noreturn]] void FailHere(const std::string& expected) const;
  void Space();
  bool Take(char expected);
  bool TakeWord(std::string_view word);
  void Enter();
  void Digits();
  std::string_view Numeral();
  unsigned Hex();
  void Escape(std::string* text);
  void Utf8(std::string* text);

  std::string_view text_;
  std::string where_;
  bool allows_nan_;
  size_t at_ = 0;
  std::vector<std::string> path_;
};

/// Tells whether a text is UTF-8, in the shortest form and without surrogates.
bool IsUtf8(std::string_view text);

/// Returns a text as a string of JSON.
std::string Quoted(std::string_view text);

/// Returns a text of a file for a message: shortened, with escapes for control characters.
std::string Shown(std::string_view text);

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_JSON_H_
