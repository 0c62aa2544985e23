#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "core/resharding/strategy.h"
#include "core/resharding/strategy_registry.h"
#include "core/text.h"

namespace xmesh::core {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> out;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    std::string part;
    for (char c : text.substr(begin, end == std::string_view::npos ? end : end - begin)) {
      part += c == ' ' ? "" : std::string(1, c);
    }
    out.push_back(part);
    if (end == std::string_view::npos) {
      return out;
    }
    begin = end + 1;
  }
}

void parseWords(const std::string& field, const StrategyInfo& info, const std::string& what, Strategy& out) {
  const std::vector<std::string> words = split(field, '+');
  require(words.size() <= info.words.size(), what + "takes " + std::to_string(info.words.size()) + " words, got '" + field + "'");
  for (size_t i = 0; i < words.size(); ++i) {
    const WordSlot& slot = info.words[i];
    require(std::find(slot.choices.begin(), slot.choices.end(), words[i]) != slot.choices.end(),
            what + "expected one of " + joined(slot.choices, ", ") + " for its " + slot.name + ", got '" + words[i] + "'");
    out.words[slot.name] = words[i];
  }
}

void parseOption(const std::string& field, const StrategyInfo& info, const std::string& what, Strategy& out) {
  const size_t equals = field.find('=');
  const std::string name = field.substr(0, equals);
  const std::string digits = field.substr(equals + 1);
  const auto option = std::find_if(info.options.begin(), info.options.end(), [&](const IntegerOption& o) { return o.name == name; });
  require(option != info.options.end(), what + "has no option '" + name + "'; there are: " + describeStrategies());
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  require(error == std::errc() && end == digits.data() + digits.size() && value >= option->min_value,
          what + name + " takes an integer not below " + std::to_string(option->min_value) + ", got '" + digits + "'");
  out.options[name] = value;
}

Strategy withDefaults(const StrategyInfo& info) {
  Strategy out;
  out.name = info.name;
  for (const WordSlot& slot : info.words) {
    out.words[slot.name] = slot.choices.front();
  }
  for (const IntegerOption& option : info.options) {
    out.options[option.name] = option.default_value;
  }
  return out;
}

}  // namespace

std::string Strategy::str() const {
  if (name == "auto") {
    return name;
  }
  const StrategyInfo& info = strategyInfo(name);
  std::vector<std::string> spelled;
  bool is_default = true;
  for (const WordSlot& slot : info.words) {
    spelled.push_back(word(slot.name));
    is_default = is_default && spelled.back() == slot.choices.front();
  }
  std::vector<std::string> fields;
  if (!is_default) {
    fields.push_back(joined(spelled, "+"));
  }
  for (const IntegerOption& known : info.options) {
    if (option(known.name) != known.default_value) {
      fields.push_back(known.name + "=" + std::to_string(option(known.name)));
    }
  }
  return name + (fields.empty() ? "" : ":" + joined(fields, ","));
}

Strategy parseStrategy(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string name = split(text.substr(0, colon), '\n').front();
  if (name == "auto") {
    require(colon == std::string_view::npos, "strategy '" + std::string(text) + "': auto takes no options");
    return {};
  }
  const StrategyInfo& info = strategyInfo(name);
  Strategy out = withDefaults(info);
  if (colon == std::string_view::npos) {
    return out;
  }
  const std::string what = "strategy '" + std::string(text) + "': " + name + " ";
  const std::vector<std::string> fields = split(text.substr(colon + 1), ',');
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].find('=') != std::string::npos) {
      parseOption(fields[i], info, what, out);
    } else {
      require(i == 0 && !fields[i].empty(), what + "expected name=integer after the words, got '" + fields[i] + "'");
      parseWords(fields[i], info, what, out);
    }
  }
  return out;
}

}  // namespace xmesh::core
