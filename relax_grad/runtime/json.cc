#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <locale>
#include <sstream>

#include "error.h"

namespace relax_grad {

namespace {

// The reader recurses.
constexpr size_t kMaxDepth = 64;
constexpr size_t kShown = 100;

bool IsDigit(char character) { return character >= '0' && character <= '9'; }

void AppendUtf8(unsigned point, std::string* text) {
  auto put = [&](unsigned byte) { text->push_back(static_cast<char>(byte)); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put(0x80 | (point & 63));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12);
    put(0x80 | (point >> 6 & 63));
    put(0x80 | (point & 63));
  } else {
    put(0xF0 | point >> 18);
    put(0x80 | (point >> 12 & 63));
    put(0x80 | (point >> 6 & 63));
    put(0x80 | (point & 63));
  }
}

void AppendEscape(char character, std::string* text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  *text += "\\u00";
  *text += kDigits[character >> 4 & 15];
  *text += kDigits[character & 15];
}

}  // namespace

JsonReader::JsonReader(std::string_view text, std::string where, bool allows_nan)
    : text_(text), where_(std::move(where)), allows_nan_(allows_nan) {}

void JsonReader::Fail(const std::string& reason) const {
  std::string place;
  for (const std::string& key : path_) place += (place.empty() ? "" : ".") + Shown(key);
  throw Error(where_ + " is damaged: " + (place.empty() ? "" : place + " ") + reason);
}

void JsonReader::FailHere(const std::string& expected) const {
  std::string actual = "the text ends";
  if (at_ < text_.size()) {
    std::string_view rest = text_.substr(at_, 20);
    size_t length = 0;
    while (length < rest.size() && static_cast<signed char>(rest[length]) >= 0) ++length;
    length = std::min(length, rest.find_first_of(",\n", 1));
    actual = length ? "there is " + Shown(rest.substr(0, length)) : "there is no ASCII";
  }
  Fail("must be " + expected + ", but at byte " + std::to_string(at_) + " " + actual);
}

void JsonReader::Space() {
  while (at_ < text_.size() &&
         std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) {
    ++at_;
  }
}

bool JsonReader::IsNext(char first) {
  Space();
  return at_ < text_.size() && text_[at_] == first;
}

bool JsonReader::Take(char expected) {
  if (!IsNext(expected)) return false;
  ++at_;
  return true;
}

bool JsonReader::TakeWord(std::string_view word) {
  Space();
  if (text_.substr(at_, word.size()) != word) return false;
  at_ += word.size();
  return true;
}

void JsonReader::Enter() {
  if (path_.size() == kMaxDepth) {
    path_.clear();
    Fail("its JSON is nested more than " + std::to_string(kMaxDepth) + " deep");
  }
  path_.emplace_back();
}

void JsonReader::Object(const std::function<void(const std::string& key)>& member,
                        const std::vector<std::string>& required) {
  if (!Take('{')) FailHere("an object");
  std::set<std::string> keys;
  if (!Take('}')) {
    do {
      if (!IsNext('"')) FailHere("an object, with a key");
      std::string key = Text();
      if (!keys.insert(key).second) Fail("has the key " + Shown(key) + " twice");
      if (!Take(':')) FailHere("an object, with a colon after the key " + Shown(key));
      Enter();
      path_.back() = key;
      member(key);
      path_.pop_back();
    } while (Take(','));
    if (!Take('}')) FailHere("an object, with , or } after a value");
  }
  for (const std::string& key : required) {
    if (!keys.count(key)) Fail("has no " + key);
  }
}

void JsonReader::Array(const std::function<void()>& item) {
  if (!Take('[')) FailHere("a list");
  if (Take(']')) return;
  size_t count = 0;
  do {
    Enter();
    path_.back() = std::to_string(count++);
    item();
    path_.pop_back();
  } while (Take(','));
  if (!Take(']')) FailHere("a list, with , or ] after an item");
}

unsigned JsonReader::Hex() {
  unsigned value = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    char digit = at_ < text_.size() ? text_[at_] : '"';
    if (IsDigit(digit)) {
      value = value << 4 | static_cast<unsigned>(digit - '0');
    } else if ((digit >= 'a' && digit <= 'f') || (digit >= 'A' && digit <= 'F')) {
      value = value << 4 | (static_cast<unsigned>(digit | 32) - 'a' + 10);
    } else {
      FailHere("text, with four hexadecimal digits in an escape");
    }
  }
  return value;
}

/// Reads an escape, after its backslash.
void JsonReader::Escape(std::string* text) {
  static constexpr std::string_view kNames = "\"\\/bfnrt", kCharacters = "\"\\/\b\f\n\r\t";
  char name = at_ < text_.size() ? text_[at_] : '\0';
  size_t index = name ? kNames.find(name) : std::string_view::npos;
  if (index != std::string_view::npos) {
    ++at_;
    text->push_back(kCharacters[index]);
    return;
  }
  if (name != 'u') FailHere("text, with a known escape");
  ++at_;
  unsigned point = Hex();
  if (point >= 0xD800 && point < 0xDC00 && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    unsigned low = Hex();
    if (low < 0xDC00 || low > 0xDFFF) Fail("has half a surrogate pair in a text");
    point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
  } else if (point >= 0xD800 && point <= 0xDFFF) {
    Fail("has half a surrogate pair in a text");
  }
  AppendUtf8(point, text);
}

namespace {

/// Returns the bytes of the character of UTF-8 at a place: the shortest form, no surrogate, up to
/// U+10FFFF; 0 if there is none.
size_t LengthAt(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  unsigned first = byte(at);
  size_t more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
  bool is_valid = first < 0x80 || (first >= 0xC2 && first <= 0xF4);
  for (size_t i = 1; i <= more; ++i) is_valid &= byte(at + i) >> 6 == 2;
  unsigned second = byte(at + 1);
  if (first == 0xE0) is_valid &= second >= 0xA0;
  if (first == 0xED) is_valid &= second < 0xA0;
  if (first == 0xF0) is_valid &= second >= 0x90;
  if (first == 0xF4) is_valid &= second < 0x90;
  return is_valid ? more + 1 : 0;
}

}  // namespace

bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    size_t length = LengthAt(text, at);
    if (length == 0) return false;
    at += length;
  }
  return true;
}

/// Reads one character of UTF-8.
void JsonReader::Utf8(std::string* text) {
  size_t length = LengthAt(text_, at_);
  if (length == 0) Fail("has text that is no UTF-8, at byte " + std::to_string(at_));
  text->append(text_.substr(at_, length));
  at_ += length;
}

std::string JsonReader::Text() {
  if (!Take('"')) FailHere("text");
  std::string text;
  while (true) {
    if (at_ >= text_.size()) FailHere("text, with a quotation mark at its end");
    char character = text_[at_];
    if (character == '"') {
      ++at_;
      return text;
    }
    if (static_cast<unsigned char>(character) < 0x20) FailHere("text, without control characters");
    if (character == '\\') {
      ++at_;
      Escape(&text);
    } else {
      Utf8(&text);
    }
  }
}

std::string JsonReader::Name() {
  std::string name = Text();
  if (name.empty()) Fail("is an empty text");
  for (char character : name) {
    if (static_cast<unsigned char>(character) < 0x20)
      Fail("has control characters: " + Shown(name));
  }
  return name;
}

void JsonReader::Digits() {
  if (at_ >= text_.size() || !IsDigit(text_[at_])) FailHere("a number");
  while (at_ < text_.size() && IsDigit(text_[at_])) ++at_;
}

std::string_view JsonReader::Numeral() {
  Space();
  size_t begin = at_;
  auto take = [&](char character) {
    bool is_there = at_ < text_.size() && text_[at_] == character;
    at_ += is_there;
    return is_there;
  };
  take('-');
  // No digit may follow a leading 0.
  if (!take('0')) Digits();
  if (at_ < text_.size() && IsDigit(text_[at_])) FailHere("a number, without leading zeros");
  if (take('.')) Digits();
  if (take('e') || take('E')) {
    if (!take('+')) take('-');
    Digits();
  }
  return text_.substr(begin, at_ - begin);
}

int64_t JsonReader::Integer(int64_t least, int64_t most) {
  std::string_view numeral = Numeral();
  int64_t value = 0;
  auto [end, reason] = std::from_chars(numeral.data(), numeral.data() + numeral.size(), value);
  bool is_whole = end == numeral.data() + numeral.size();
  if (!is_whole || reason != std::errc() || value < least || value > most) {
    Fail("must be an integer from " + std::to_string(least) + " to " + std::to_string(most) +
         ", but it is " + Shown(numeral));
  }
  return value;
}

double JsonReader::Number() {
  std::string_view numeral = Numeral();
  std::istringstream stream{std::string(numeral)};
  // strtod depends on the locale of the process.
  stream.imbue(std::locale::classic());
  double value = 0;
  stream >> value;
  if (stream.fail() || !std::isfinite(value)) Fail("is beyond all numbers: " + Shown(numeral));
  return value;
}

std::string_view JsonReader::Skip() {
  Space();
  size_t begin = at_;
  char first = at_ < text_.size() ? text_[at_] : '\0';
  if (first == '{') {
    Object([&](const std::string&) { Skip(); });
  } else if (first == '[') {
    Array([&] { Skip(); });
  } else if (first == '"') {
    Text();
  } else if (first == '-' || IsDigit(first)) {
    if (!allows_nan_ || !TakeWord("-Infinity")) Numeral();
  } else if (!TakeWord("null") && !TakeWord("true") && !TakeWord("false")) {
    if (!allows_nan_ || (!TakeWord("NaN") && !TakeWord("Infinity"))) FailHere("a value");
  }
  return text_.substr(begin, at_ - begin);
}

void JsonReader::End() {
  Space();
  if (at_ != text_.size()) FailHere("one value, with nothing after it");
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (char character : text) {
    if (static_cast<unsigned char>(character) < 0x20) {
      AppendEscape(character, &quoted);
      continue;
    }
    if (character == '"' || character == '\\') quoted += '\\';
    quoted += character;
  }
  return quoted + '"';
}

std::string Shown(std::string_view text) {
  size_t length = std::min(text.size(), kShown);
  // Characters of several bytes are whole.
  while (length && length < text.size() && (text[length] & 0xC0) == 0x80) --length;
  std::string shown;
  for (char character : text.substr(0, length)) {
    if (static_cast<unsigned char>(character) < 0x20) {
      AppendEscape(character, &shown);
    } else {
      shown += character;
    }
  }
  return shown + (text.size() > length ? "..." : "");
}

}  // namespace relax_grad
