#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace xmesh::core {

/// A parsed JSON value that knows where it stood in the text. A plain tree; the reading functions throw InvalidArgument naming line, column and
/// field when the value is of another kind.
class JsonValue {
 public:
  enum class Kind : uint8_t { kNull, kBool, kInteger, kDouble, kString, kArray, kObject };

  int64_t integer() const;
  double number() const;
  const std::string& string() const;
  bool boolean() const;
  const std::vector<JsonValue>& array() const;
  /// An array of exactly `size` values.
  const std::vector<JsonValue>& array(size_t size) const;
  std::vector<int64_t> integers() const;
  /// A member of an object.
  const JsonValue& at(std::string_view name) const;
  /// Whether it is an object that has the member.
  bool has(std::string_view name) const;
  /// Throws unless this is an object with these members and no others.
  void expectMembers(const std::vector<std::string_view>& names) const;
  /// Throws InvalidArgument "<where>: <message>".
  [[noreturn]] void fail(const std::string& message) const;
  Kind kind() const { return kind_; }

 private:
  friend class JsonParser;
  void expect(Kind kind) const;

  Kind kind_ = Kind::kNull;
  bool boolean_ = false;
  int64_t integer_ = 0;
  double double_ = 0;
  std::string string_;
  std::vector<JsonValue> items_;    ///< an array's items, or the values of an object's members
  std::vector<std::string> names_;  ///< the names of an object's members
  std::string field_;               ///< "messages[3][0]"
  int64_t line_ = 0;
  int64_t column_ = 0;
};

/// Parses one JSON text (RFC 8259, nothing else). Throws InvalidArgument naming line and column. Integers must fit 64 bits; a name may
/// occur once per object; nesting is limited to 32.
JsonValue parseJson(std::string_view text);

/// Writes compact JSON. The caller nests begin and end calls correctly; commas are put by themselves.
class JsonWriter {
 public:
  JsonWriter& beginObject() { return open('{'); }
  JsonWriter& endObject() { return close('}'); }
  JsonWriter& beginArray() { return open('['); }
  JsonWriter& endArray() { return close(']'); }
  JsonWriter& name(std::string_view name);
  JsonWriter& integer(int64_t value);
  /// The shortest text that reads back as the same double.
  JsonWriter& number(double value);
  JsonWriter& boolean(bool value);
  JsonWriter& string(std::string_view value);
  JsonWriter& integers(const std::vector<int64_t>& values);
  /// A line break for the human eye; outside of strings only.
  JsonWriter& newLine();
  std::string take() { return std::move(text_); }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();
  void quote(std::string_view value);

  std::string text_;
  bool needs_comma_ = false;
};

}  // namespace xmesh::core
