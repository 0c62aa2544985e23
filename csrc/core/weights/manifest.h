#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/slice.h"
#include "core/spec.h"

namespace xmesh::core {

/// A tensor that a member of a source has parts of.
struct HeldTensor {
  std::string name;
  std::vector<int64_t> shape;  ///< of the whole tensor
  DType dtype;
  std::vector<Box> boxes;  ///< this member's, disjoint
  bool operator==(const HeldTensor&) const = default;
};

/// A box of a source's tensor that a member of a replica wants, and the type in which it comes: the source's, or another that the source casts to.
struct NeededBox {
  std::string source;
  Box box;
  DType dtype;
  bool operator==(const NeededBox&) const = default;
};

/// What one member of a link has and needs, without its memory. Names are compared between members; their order never matters. Immutable.
struct Manifest {
  std::vector<HeldTensor> held;
  std::vector<NeededBox> needed;  ///< in the order in which the member numbers them
  bool operator==(const Manifest&) const = default;
};

std::string manifestToJson(const Manifest& manifest);
/// Throws InvalidArgument that names line, column and field of what is no manifest.
Manifest manifestFromJson(std::string_view text);

}  // namespace xmesh::core
