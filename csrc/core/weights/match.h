#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/resharding/plan.h"
#include "core/weights/manifest.h"

namespace xmesh::core {

/// A box of a member's, in a tensor of a Match.
struct MatchedBox {
  int64_t tensor = 0;
  int64_t index = 0;  ///< at a source: in HeldTensor::boxes of that name; at a replica: in Manifest::needed
  bool operator==(const MatchedBox&) const = default;
};

/// What moves between a source and replicas, by their manifests.
struct Match {
  /// Tensors in boxes at both ends, by name, then type, ascending. One source's tensor may be several: where members want it in several types, and
  /// where one member wants an element more than once, but not in equal boxes.
  std::vector<TensorPair> tensors;
  std::vector<std::string> names;  ///< by tensor
  /// By member: its boxes in the order of a program's local tensors.
  std::map<int64_t, std::vector<MatchedBox>> sent;
  std::map<int64_t, std::vector<MatchedBox>> received;
  /// By member: (from, to), indices in Manifest::needed. Box `to` is box `from` once more, and is copied from there.
  std::map<int64_t, std::vector<std::pair<int64_t, int64_t>>> copied;
};

/// Pairs what sources hold with what replicas need. A pure function: every member gets the same. Throws InvalidArgument, which lists up to 20 of what
/// is wrong, for members that disagree on a tensor's shape or type, and for needed boxes of names that no source has, outside of a tensor, or of
/// which nobody holds a part.
Match match(const std::map<int64_t, Manifest>& sources, const std::map<int64_t, Manifest>& replicas);

}  // namespace xmesh::core
