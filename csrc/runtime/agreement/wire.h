#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace xmesh::runtime {

/// Writes the fields of a control message one after another: integers as they lie in memory, strings with their length.
class WireWriter {
 public:
  template <typename T>
  WireWriter& put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  WireWriter& put(std::string_view text) {
    put(static_cast<uint64_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads what WireWriter wrote; throws std::runtime_error where the message is too short.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string getText() { return std::string(take(get<uint64_t>())); }

 private:
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) {
      throw std::runtime_error("a control message ends too early");
    }
    const std::string_view out = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return out;
  }
  std::string_view rest_;
};

}  // namespace xmesh::runtime
