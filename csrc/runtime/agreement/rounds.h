#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

namespace xmesh::runtime {

/// How far one rank is in the agreement of a call of n participants: in round r of ceil(log2 n) it sends a CallNotice to the participant 2^r after
/// it, and waits for that of the one 2^r before. Notices of later rounds may come first. Threading: one thread.
class AgreementRounds {
 public:
  /// One participant, or one that does not compare, has nothing to do.
  explicit AgreementRounds(size_t num_participants = 1) {
    while ((size_t{1} << num_rounds_) < num_participants) {
      ++num_rounds_;
    }
  }

  bool isDone() const { return round_ == num_rounds_; }
  /// The round under way, whose CallNotice this rank has sent.
  uint8_t round() const { return static_cast<uint8_t>(round_); }
  /// How far after this rank the receiver of this round's CallNotice is.
  int64_t distance() const { return distanceOf(round_); }
  /// Takes an equal CallNotice of a round in.
  void hear(uint8_t round) { heard_.insert(round); }
  /// Goes to the next round if this one's CallNotice has come. If that is not the end, the caller sends the CallNotice of the new round.
  bool advance() {
    if (isDone() || heard_.erase(round()) == 0) {
      return false;
    }
    ++round_;
    return true;
  }
  /// Calls `visit(distance)` for each CallNotice that is still to come: how far before this rank its sender is.
  template <typename Visit>
  void forEachMissing(Visit visit) const {
    for (int round = round_; round < num_rounds_; ++round) {
      if (!heard_.contains(static_cast<uint8_t>(round))) {
        visit(distanceOf(round));
      }
    }
  }

 private:
  static int64_t distanceOf(int round) { return int64_t{1} << round; }

  int num_rounds_ = 0;
  int round_ = 0;
  std::set<uint8_t> heard_;  ///< rounds not before this one
};

}  // namespace xmesh::runtime
