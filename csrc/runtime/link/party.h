#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::runtime::link {

/// A process in a link. Its number is that of its network's end, and is never used by two.
struct Member {
  int32_t number = -1;
  std::string address;   ///< where its network's end listens
  std::string host;      ///< which host it is on
  std::string manifest;  ///< what it has or needs: bytes that the link only carries
  bool operator==(const Member&) const = default;
};

/// Processes that live and die together: a source (a trainer), or one replica. Rank 0 leads: it speaks for all of them. Immutable once it is formed.
struct Party {
  uint64_t number = 0;  ///< of this life of it; never used by two, 0 is none
  bool is_source = false;
  std::string replica;          ///< the replica's id, which outlives the party
  std::vector<Member> members;  ///< by rank

  int32_t leader() const { return members.front().number; }
  bool has(int32_t member) const {
    for (const Member& one : members) {
      if (one.number == member) {
        return true;
      }
    }
    return false;
  }
  /// "the source", "replica 'a'"
  std::string str() const { return is_source ? "the source" : "replica '" + replica + "'"; }
  bool operator==(const Party&) const = default;
};

/// One try of a source to bring a version to some parties, counted from 1 for every version.
struct Attempt {
  uint64_t source = 0;  ///< the party's number: another source may use a version again that nobody has had
  uint64_t version = 0;
  uint32_t number = 0;
  bool operator==(const Attempt&) const = default;
};

}  // namespace xmesh::runtime::link
