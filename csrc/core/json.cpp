#include "core/json.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr int kMaxDepth = 32;
constexpr std::array<const char*, 7> kKindNames = {"null", "a boolean", "an integer", "a number", "a string", "an array", "an object"};

}  // namespace

void JsonValue::fail(const std::string& message) const {
  throw InvalidArgument("JSON line " + std::to_string(line_) + ", column " + std::to_string(column_) + (field_.empty() ? "" : ", field " + field_) +
                        ": " + message);
}

void JsonValue::expect(Kind kind) const {
  if (kind_ != kind) {
    fail(std::string("expected ") + kKindNames[static_cast<size_t>(kind)] + ", got " + kKindNames[static_cast<size_t>(kind_)]);
  }
}

int64_t JsonValue::integer() const {
  expect(Kind::kInteger);
  return integer_;
}

double JsonValue::number() const {
  if (kind_ == Kind::kInteger) {
    return static_cast<double>(integer_);
  }
  expect(Kind::kDouble);
  return double_;
}

const std::string& JsonValue::string() const {
  expect(Kind::kString);
  return string_;
}

bool JsonValue::boolean() const {
  expect(Kind::kBool);
  return boolean_;
}

const std::vector<JsonValue>& JsonValue::array() const {
  expect(Kind::kArray);
  return items_;
}

const std::vector<JsonValue>& JsonValue::array(size_t size) const {
  if (array().size() != size) {
    fail("expected " + std::to_string(size) + " items, got " + std::to_string(items_.size()));
  }
  return items_;
}

std::vector<int64_t> JsonValue::integers() const {
  std::vector<int64_t> out;
  for (const JsonValue& item : array()) {
    out.push_back(item.integer());
  }
  return out;
}

const JsonValue& JsonValue::at(std::string_view name) const {
  expect(Kind::kObject);
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    fail("member '" + std::string(name) + "' is missing");
  }
  return items_[static_cast<size_t>(found - names_.begin())];
}

bool JsonValue::has(std::string_view name) const { return kind_ == Kind::kObject && std::find(names_.begin(), names_.end(), name) != names_.end(); }

void JsonValue::expectMembers(const std::vector<std::string_view>& names) const {
  for (std::string_view name : names) {
    at(name);
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    if (std::find(names.begin(), names.end(), names_[i]) == names.end()) {
      items_[i].fail("unknown member '" + names_[i] + "'");
    }
  }
}

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  JsonValue parse() {
    JsonValue out = value("", 0);
    skipSpace();
    if (at_ != text_.size()) {
      fail("expected the end, got " + found());
    }
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    JsonValue here;
    here.line_ = line_;
    here.column_ = static_cast<int64_t>(at_ - line_begin_) + 1;
    here.fail(message);
  }

  /// The character that stands here, for a message; bytes beyond ASCII by number, so that messages are whole UTF-8.
  std::string found() const {
    const auto byte = static_cast<unsigned char>(text_[at_]);
    return byte >= 0x20 && byte < 0x7f ? "'" + std::string(1, text_[at_]) + "'" : "byte " + std::to_string(byte);
  }

  void skipSpace() {
    for (; at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r' || text_[at_] == '\n'); ++at_) {
      if (text_[at_] == '\n') {
        ++line_;
        line_begin_ = at_ + 1;
      }
    }
  }

  char peek() {
    skipSpace();
    if (at_ == text_.size()) {
      fail("the text ends here");
    }
    return text_[at_];
  }

  void take(char expected) {
    if (peek() != expected) {
      fail("expected '" + std::string(1, expected) + "', got " + found());
    }
    ++at_;
  }

  bool takeWord(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) {
      return false;
    }
    at_ += word.size();
    return true;
  }

  JsonValue value(const std::string& field, int depth) {
    const char next = peek();
    if (depth > kMaxDepth) {
      fail("nested deeper than " + std::to_string(kMaxDepth));
    }
    JsonValue out;
    out.field_ = field;
    out.line_ = line_;
    out.column_ = static_cast<int64_t>(at_ - line_begin_) + 1;
    if (next == '{') {
      object(out, depth);
    } else if (next == '[') {
      array(out, depth);
    } else if (next == '"') {
      out.kind_ = JsonValue::Kind::kString;
      out.string_ = quoted();
    } else if (takeWord("true") || takeWord("false")) {
      out.kind_ = JsonValue::Kind::kBool;
      out.boolean_ = next == 't';
    } else if (!takeWord("null")) {
      number(out);
    }
    return out;
  }

  void object(JsonValue& out, int depth) {
    out.kind_ = JsonValue::Kind::kObject;
    take('{');
    while (peek() != '}') {
      if (!out.names_.empty()) {
        take(',');
      }
      if (peek() != '"') {
        fail("expected a member's name in quotes, got " + found());
      }
      std::string name = quoted();
      if (std::find(out.names_.begin(), out.names_.end(), name) != out.names_.end()) {
        fail("member '" + name + "' occurs twice");
      }
      take(':');
      out.items_.push_back(value(out.field_ + (out.field_.empty() ? "" : ".") + name, depth + 1));
      out.names_.push_back(std::move(name));
    }
    take('}');
  }

  void array(JsonValue& out, int depth) {
    out.kind_ = JsonValue::Kind::kArray;
    take('[');
    while (peek() != ']') {
      if (!out.items_.empty()) {
        take(',');
      }
      out.items_.push_back(value(out.field_ + "[" + std::to_string(out.items_.size()) + "]", depth + 1));
    }
    take(']');
  }

  std::string quoted() {
    take('"');
    std::string out;
    while (true) {
      if (at_ == text_.size()) {
        fail("a string is not closed");
      }
      const char c = text_[at_++];
      if (c == '"') {
        return out;
      }
      if (static_cast<unsigned char>(c) < 0x20) {
        fail("a control character inside a string");
      }
      out += c == '\\' ? escaped() : std::string(1, c);
    }
  }

  std::string escaped() {
    constexpr std::string_view kCodes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const char code = at_ < text_.size() ? text_[at_++] : '\0';
    const size_t index = kCodes.find(code);
    if (index != std::string_view::npos) {
      return std::string(1, kMeanings[index]);
    }
    unsigned value = 0;
    const char* digits = text_.data() + at_;
    const bool has_digits = code == 'u' && text_.size() - at_ >= 4;
    if (!has_digits || std::from_chars(digits, digits + 4, value, 16).ptr != digits + 4 || value >= 0x80) {
      fail("unknown escape in a string (\\u only up to 007f)");
    }
    at_ += 4;
    return std::string(1, static_cast<char>(value));
  }

  void number(JsonValue& out) {
    const size_t end = std::min(text_.find_first_not_of("+-.0123456789eE", at_), text_.size());
    const std::string_view digits = text_.substr(at_, end - at_);
    const size_t first = digits.starts_with('-') ? 1 : 0;
    const bool is_well_formed = digits.size() > first && digits[first] >= '0' && digits[first] <= '9' &&
                                !(digits[first] == '0' && digits.size() > first + 1 && digits[first + 1] >= '0' && digits[first + 1] <= '9');
    const bool is_integer = digits.find_first_of(".eE+") == std::string_view::npos;
    const char* last = digits.data() + digits.size();
    const auto result = is_integer ? std::from_chars(digits.data(), last, out.integer_) : std::from_chars(digits.data(), last, out.double_);
    if (!is_well_formed || result.ec != std::errc() || result.ptr != last || digits.back() == '.') {
      fail(digits.empty() ? "expected a value, got " + found() : "'" + std::string(digits) + "' is no number of 64 bits");
    }
    out.kind_ = is_integer ? JsonValue::Kind::kInteger : JsonValue::Kind::kDouble;
    at_ = end;
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t line_begin_ = 0;
  int64_t line_ = 1;
};

JsonValue parseJson(std::string_view text) { return JsonParser(text).parse(); }

void JsonWriter::separate() {
  if (needs_comma_) {
    text_ += ',';
  }
  needs_comma_ = true;
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  text_ += bracket;
  needs_comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::name(std::string_view name) {
  separate();
  quote(name);
  text_ += ':';
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::integer(int64_t value) {
  separate();
  text_ += std::to_string(value);
  return *this;
}

JsonWriter& JsonWriter::number(double value) {
  separate();
  std::array<char, 32> digits{};
  text_.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
  return *this;
}

JsonWriter& JsonWriter::boolean(bool value) {
  separate();
  text_ += value ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::string(std::string_view value) {
  separate();
  quote(value);
  return *this;
}

JsonWriter& JsonWriter::integers(const std::vector<int64_t>& values) {
  beginArray();
  for (int64_t value : values) {
    integer(value);
  }
  return endArray();
}

JsonWriter& JsonWriter::newLine() {
  if (needs_comma_) {
    text_ += ',';
    needs_comma_ = false;
  }
  text_ += '\n';
  return *this;
}

void JsonWriter::quote(std::string_view value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  text_ += '"';
  for (char c : value) {
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      text_ += "\\u00";
      text_ += kDigits[static_cast<size_t>(c) >> 4];
      text_ += kDigits[static_cast<size_t>(c) & 15];
    } else {
      text_ += c;
    }
  }
  text_ += '"';
}

}  // namespace xmesh::core
