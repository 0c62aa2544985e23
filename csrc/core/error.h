#pragma once

#include <stdexcept>
#include <string>

namespace xmesh::core {

/// A user's mistake: a shape, a placement, a mesh or an option that cannot be. Becomes Python's ValueError.
/// The message says what was wrong, what was expected and what was given.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Throws InvalidArgument with `message` unless `condition` holds. The message is built by the caller only where cheap.
inline void require(bool condition, const std::string& message) {
  if (!condition) {
    throw InvalidArgument(message);
  }
}

}  // namespace xmesh::core
