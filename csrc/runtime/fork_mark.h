#pragma once

#include <cstdint>

namespace xmesh::runtime {

/// Tells whether a process is the one that made an object, or was forked from it since: threads do not follow a fork, so what they would do never
/// happens there. Any thread.
class ForkMark {
 public:
  ForkMark();
  bool isHere() const;
  /// Throws std::runtime_error in a forked child.
  void check() const;

 private:
  uint32_t num_forks_;  ///< forks that had led to this process when the object was made
};

}  // namespace xmesh::runtime
