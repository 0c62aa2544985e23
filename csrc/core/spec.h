#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh.h"
#include "core/placement.h"
#include "core/slice.h"

namespace xmesh::core {

/// An element type by torch's name ("float32", "bfloat16", "bool", "float8_e4m3fn", ...) and size. The core only moves elements;
/// the runtime knows how to add them.
struct DType {
  std::string name;
  int64_t item_bytes = 0;
  /// Throws InvalidArgument for a name torch does not have.
  static DType parse(std::string_view name);
  /// Bytes of one element of what contributions are added up in: float32's for float16 and bfloat16, else its own.
  int64_t accumulatorItemBytes() const { return name == "float16" || name == "bfloat16" ? 4 : item_bytes; }
  bool operator==(const DType&) const = default;
};

/// A box of a tensor, and the global ranks (ascending) that have its values. None: whoever had it is gone.
struct OwnedBox {
  Box box;
  std::vector<int64_t> ranks;
  bool operator==(const OwnedBox&) const = default;
};

/// What is placed where: global shape, element type, and either a mesh with one placement per axis, or, of what no placement describes, boxes with
/// owners. Boxes of different ranks may overlap, and need not cover the tensor. Immutable value.
struct TensorSpec {
  std::vector<int64_t> shape;
  DType dtype;
  Mesh mesh;
  std::vector<Placement> placements;
  std::vector<OwnedBox> boxes = {};

  bool isBoxed() const { return !boxes.empty(); }
  /// Ascending global ranks that have a part of it, or may have an empty one.
  std::vector<int64_t> ranks() const;
  int64_t numElements() const;
  int64_t numBytes() const { return numElements() * dtype.item_bytes; }
  /// Throws InvalidArgument: negative extents, more than 8 dims, wrong number of placements, a dim out of range, Partial operations
  /// that the dtype does not have, or different Partial operations on different axes (sum with avg excepted); a box that is empty or not inside the
  /// tensor, ranks that do not ascend, boxes beside a mesh.
  void validate() const;
  bool hasPartial() const;
  /// "float32[8, 4] on [[0, 1], [2, 3]] as (Shard(0), Replicate())", "float32[8, 4] in 2 boxes on ranks 0, 3"
  std::string str() const;
  /// The same without shape and type: "(Shard(0), Replicate()) on [[0, 1], [2, 3]]"
  std::string whereStr() const;
  bool operator==(const TensorSpec&) const = default;
};

std::string shapeStr(const std::vector<int64_t>& shape);
std::string placementsStr(const std::vector<Placement>& placements);

}  // namespace xmesh::core
