#include "extent_checks.h"

#include <algorithm>
#include <optional>
#include <set>

#include "error.h"

namespace relax_grad {

namespace {

const char* const kOperators[] = {"+",  "-",  "*", "//", "%", "max", "min",
                                  "==", "!=", "<", "<=", ">", ">="};

/// Returns a quotient that is rounded down, and its remainder, which has the sign of the divisor.
std::optional<int64_t> Divided(int64_t first, int64_t second, bool is_remainder) {
  if (second == 0 || (first == INT64_MIN && second == -1)) return std::nullopt;
  int64_t quotient = first / second, rest = first % second;
  if (rest != 0 && (rest < 0) != (second < 0)) {
    --quotient;
    rest += second;
  }
  return is_remainder ? rest : quotient;
}

/// Returns the value of an operator; none where it is beyond an int64 or has no value.
std::optional<int64_t> Value(const std::string& name, int64_t first, int64_t second) {
  int64_t result = 0;
  if (name == "+") {
    if (__builtin_add_overflow(first, second, &result)) return std::nullopt;
    return result;
  }
  if (name == "-") {
    if (__builtin_sub_overflow(first, second, &result)) return std::nullopt;
    return result;
  }
  if (name == "*") {
    if (__builtin_mul_overflow(first, second, &result)) return std::nullopt;
    return result;
  }
  if (name == "//" || name == "%") return Divided(first, second, name == "%");
  if (name == "max") return std::max(first, second);
  if (name == "min") return std::min(first, second);
  if (name == "==") return first == second;
  if (name == "!=") return first != second;
  if (name == "<") return first < second;
  if (name == "<=") return first <= second;
  if (name == ">") return first > second;
  return first >= second;
}

/// Returns whether extents fulfil a condition, which is in postfix notation.
bool Holds(const ExtentCheck& check, const std::map<std::string, int64_t>& symbols) {
  std::vector<int64_t> stack;
  for (const ExtentCheck::Part& part : check.condition) {
    if (part.name.empty()) {
      stack.push_back(part.number);
    } else if (IsOperator(part.name)) {
      int64_t second = stack.back();
      stack.pop_back();
      std::optional<int64_t> value = Value(part.name, stack.back(), second);
      if (!value.has_value()) return false;
      stack.back() = *value;
    } else {
      stack.push_back(symbols.at(part.name));
    }
  }
  return stack.back() != 0;
}

}  // namespace

bool IsOperator(const std::string& part) {
  return std::find(std::begin(kOperators), std::end(kOperators), part) != std::end(kOperators);
}

void CheckExtents(const std::vector<ExtentCheck>& checks,
                  const std::map<std::string, int64_t>& symbols) {
  for (const ExtentCheck& check : checks) {
    if (Holds(check, symbols)) continue;
    std::string extents;
    std::set<std::string> named;
    for (const ExtentCheck::Part& part : check.condition) {
      if (part.name.empty() || IsOperator(part.name) || !named.insert(part.name).second) continue;
      extents += (extents.empty() ? "" : " and ") + part.name + " = " +
                 std::to_string(symbols.at(part.name));
    }
    throw Error(check.reason + ", but the inputs have " + extents);
  }
}

}  // namespace relax_grad
