#include "state.h"

#include <algorithm>
#include <limits>

#include "error.h"
#include "json.h"
#include "manifest.h"

namespace relax_grad {

namespace {

// The seed is the upper half of a step's seed, a positive int64.
constexpr int64_t kMostSeed = std::numeric_limits<int32_t>::max();
// Every reader of JSON has the integers up to it.
constexpr int64_t kMostCount = int64_t{1} << 53;

struct Counter {
  const char* name;
  int64_t Counters::* value;
  int64_t most;
};

const Counter kCounters[] = {
    {"seed", &Counters::seed, kMostSeed},        {"steps", &Counters::steps, kMostCount},
    {"updates", &Counters::updates, kMostCount}, {"skipped", &Counters::skipped, kMostCount},
    {"epoch", &Counters::epoch, kMostCount},     {"batch", &Counters::batch, kMostCount},
};

Counters ReadCounters(JsonReader* json) {
  Counters counters;
  std::vector<std::string> names;
  for (const Counter& counter : kCounters) names.emplace_back(counter.name);
  json->Object(
      [&](const std::string& key) {
        for (const Counter& counter : kCounters) {
          if (key == counter.name) {
            counters.*counter.value = json->Integer(0, counter.most);
            return;
          }
        }
        json->Skip();
      },
      names);
  return counters;
}

std::string ReadObject(JsonReader* json) {
  if (!json->IsNext('{')) json->Fail("must be an object");
  return std::string(json->Skip());
}

/// Returns the version of a text; throws if it is another one, whose keys may be others.
int64_t StateVersion(std::string_view text, const std::string& where) {
  int64_t version = 0;
  JsonReader json(text, where, true);
  json.Object(
      [&](const std::string& key) {
        if (key == "version") {
          version = json.Integer(0, kMostCount);
        } else {
          json.Skip();
        }
      },
      {"version"});
  json.End();
  CheckVersion(version, where);
  return version;
}

}  // namespace

Described ParseDescribed(std::string_view text, const std::string& where) {
  Described described;
  described.version = StateVersion(text, where);
  JsonReader json(text, where, true);
  json.Object(
      [&](const std::string& key) {
        if (key == "step") {
          described.step = json.Name();
        } else if (key == "counters") {
          described.counters = ReadCounters(&json);
        } else if (key == "history") {
          described.history = ReadObject(&json);
        } else if (key == "more") {
          described.more = ReadObject(&json);
        } else {
          json.Skip();
        }
      },
      {"counters", "history", "more"});
  CheckCounters(described.counters, where + " is damaged");
  return described;
}

std::string DescribedText(const Described& described) {
  std::string counters;
  for (const Counter& counter : kCounters) {
    counters += (counters.empty() ? "" : ", ") + Quoted(counter.name) + ": " +
                std::to_string(described.counters.*counter.value);
  }
  std::string step = described.step.empty() ? "" : ", \"step\": " + Quoted(described.step);
  return "{\"version\": " + std::to_string(kVersion) + step + ", \"counters\": {" + counters +
         "}, \"history\": " + described.history + ", \"more\": " + described.more + "}";
}

std::vector<std::pair<std::string, std::string>> MembersOf(std::string_view object) {
  std::vector<std::pair<std::string, std::string>> members;
  JsonReader json(object, "more", true);
  json.Object([&](const std::string& key) { members.emplace_back(key, json.Skip()); });
  return members;
}

std::string WithMember(std::string_view object, const std::string& name,
                       const std::optional<std::string>& text) {
  if (!IsUtf8(name)) throw Error("the name of a property must be UTF-8");
  if (text && !IsUtf8(*text)) throw Error("the text of the property " + name + " must be UTF-8");
  auto members = MembersOf(object);
  auto same = [&](const auto& member) { return member.first == name; };
  auto own = std::find_if(members.begin(), members.end(), same);
  if (!text) {
    if (own == members.end()) throw Error("there is no property " + name);
    members.erase(own);
  } else if (own == members.end()) {
    members.emplace_back(name, Quoted(*text));
  } else {
    own->second = Quoted(*text);
  }
  std::string changed;
  for (const auto& [key, value] : members)
    changed += (changed.empty() ? "" : ", ") + Quoted(key) + ": " + value;
  return "{" + changed + "}";
}

std::string TextOf(const std::string& value) {
  JsonReader json(value, "more", true);
  return json.IsNext('"') ? json.Text() : value;
}

void CheckCounters(const Counters& counters, const std::string& where) {
  for (const Counter& counter : kCounters) {
    int64_t value = counters.*counter.value;
    if (value < 0 || value > counter.most) {
      throw Error(where + ": the counter " + counter.name + " must be from 0 to " +
                  std::to_string(counter.most) + ", but it is " + std::to_string(value));
    }
  }
  if (counters.skipped > counters.steps) {
    throw Error(where + ": the counter skipped is " + std::to_string(counters.skipped) +
                ", but steps is " + std::to_string(counters.steps));
  }
}

}  // namespace relax_grad
