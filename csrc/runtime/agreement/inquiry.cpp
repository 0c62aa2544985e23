#include "runtime/agreement/inquiry.h"

namespace xmesh::runtime {

bool Inquiry::begin(const CallKey& key, const Participants& participants, Peers& peers) {
  if (std::exchange(is_asking_, true)) {
    return false;
  }
  peers.tell(participants.peers, encode(Question{key, participants.ranks}));
  return true;
}

bool Inquiry::hear(int32_t peer, Answer answer, const Participants& participants) {
  if (!is_asking_) {
    return false;
  }
  answers_[peer] = std::move(answer);
  return answers_.size() + 1 == participants.size();
}

Failure Inquiry::conclude(const std::string& head, const std::string& progress, const Participants& participants, const Peers& peers) const {
  std::vector<int64_t> silent;
  std::vector<int64_t> absent;
  std::string lines;
  for (const int32_t peer : participants.peers) {
    if (peer == peers.groupRank()) {
      continue;
    }
    const int64_t rank = peers.globalRank(peer);
    const auto answer = answers_.find(peer);
    const bool is_silent = answer == answers_.end();
    if (is_silent) {
      silent.push_back(rank);
    } else if (!answer->second.has_called) {
      absent.push_back(rank);
    }
    lines += "\n  rank " + std::to_string(rank) + (is_silent ? " does not answer (stopped, hung or cut off)" : " " + answer->second.state);
  }
  const std::vector<int64_t>& blamed = silent.empty() ? absent : silent;
  std::string text = head;
  if (!blamed.empty()) {
    text += (silent.empty() ? ": not called by rank " : ": no answer from rank ") + rankList(blamed);
  }
  return {FailureKind::kPeer, text + "; here: " + progress + "; the others:" + lines, blamed};
}

}  // namespace xmesh::runtime
