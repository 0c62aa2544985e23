#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agreement/messages.h"
#include "runtime/agreement/participants.h"
#include "runtime/agreement/peers.h"

namespace xmesh::runtime {

/// What the participants of a call that took too long say of it. Threading: the network's thread.
class Inquiry {
 public:
  /// Asks them; false where they have been asked already.
  bool begin(const CallKey& key, const Participants& participants, Peers& peers);
  /// Takes an answer; true when all have come.
  bool hear(int32_t peer, Answer answer, const Participants& participants);
  /// What the call fails with. `head` says that it took too long, `progress` how far this rank is. To blame are those that do not answer, else those
  /// that have not made the call.
  Failure conclude(const std::string& head, const std::string& progress, const Participants& participants, const Peers& peers) const;

 private:
  bool is_asking_ = false;
  std::map<int32_t, Answer> answers_;
};

}  // namespace xmesh::runtime
