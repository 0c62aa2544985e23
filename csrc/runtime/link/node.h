#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/link/messages.h"
#include "runtime/link/party.h"
#include "runtime/link/publisher.h"
#include "transport/control_network.h"

namespace xmesh::runtime::link {

/// What a node tells its owner, on the network's thread, never from inside a call of the node.
class NodeEvents {
 public:
  virtual ~NodeEvents() = default;
  /// All ranks of the own party have come.
  virtual void onFormed(const Party& own) = 0;
  /// Attempts may name this party from now on; or never again.
  virtual void onKnown(const Party& party) = 0;
  virtual void onForgotten(uint64_t party) = 0;
  /// Get ready to move a version among these parties, the source first; then accept(), or done() with what is in the way.
  virtual void onOffer(const Attempt& attempt, const std::vector<Party>& parties) = 0;
  /// Move; then done().
  virtual void onGo(const Attempt& attempt) = 0;
  /// Move no longer; done() is to be said all the same.
  virtual void onAbort(const Attempt& attempt) = 0;
  /// All ranks of this replica have the version. The next onGo() may end that.
  virtual void onHeld(uint64_t version) = 0;
  /// The version that this source has published has ended: who holds it, or why nobody was brought it.
  virtual void onSettled(const Settlement& settlement) = 0;
  /// All ranks of the replica have called swap() so many times; the version that they take up, or 0 where there is none that all have. `newest`: that
  /// all have had by then, alike on all ranks.
  virtual void onSwapped(uint64_t count, uint64_t version, uint64_t newest) = 0;
  /// The source no longer waits for this replica, which joins again by itself.
  virtual void onLeftOut(const std::string& why) = 0;
  /// A rank of the own party is gone, and with it the party.
  virtual void onBroken(const std::string& why) = 0;
  /// The source is gone; another may come.
  virtual void onSourceLost(const std::string& why) = 0;
};

/// One process of a link between a source and replicas that come and go: who is there, which version moves among whom, and which one a replica's
/// ranks take up together. It moves no tensors. Ranks tell their party's leader, rank 0; leaders tell the source's, whose Publisher decides. Whether
/// a replica has a version its own leader decides, when all of its ranks have it: a source that dies then changes nothing. Threading: the network's
/// thread.
class Node {
 public:
  struct Options {
    Member self;
    bool is_source = false;
    std::string replica;
    int32_t rank = 0;
    int32_t size = 1;
    uint64_t party = 0;  ///< the leader's: the party's number
    std::chrono::milliseconds deadline{30'000};
  };
  Node(Options options, transport::ControlNetwork& network, NodeEvents& events);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Joins the party; every rank once. `leader`: rank 0's number, whose address is known; a leader's own.
  void enter(int32_t leader);
  /// A replica's leader, whose party is formed, joins a source whose address is known.
  void meet(int32_t source_leader);
  /// A rank of the source is ready to publish a version: more than the one before.
  void publish(uint64_t version);
  /// `fingerprint`: of what this rank is about to do, which must be the same on all.
  void accept(const Attempt& attempt, const std::string& fingerprint);
  /// It has all that it is to have, and has sent all; or `why` not, and which members are to blame.
  void done(const Attempt& attempt, bool has_all, const std::string& why = {}, const std::vector<int32_t>& blamed = {});
  /// The how many-th time.
  uint64_t swap();

  /// A control message for which isLinkMessage() holds.
  void hear(int32_t peer, std::string_view bytes);
  void lose(int32_t peer, const std::string& reason);

 private:
  /// What the ranks of the leader's party have said of an attempt.
  struct Reports {
    Attempt attempt;
    std::map<int32_t, std::string> accepted;  ///< by member
    std::map<int32_t, Message> done;
    bool has_answered = false;  ///< the source's leader has been told
    bool is_moving = false;     ///< between go and abort: the ranks can have all of it
  };

  bool leads() const { return options_.rank == 0; }
  void tell(int32_t member, const Message& message);
  void tellRanks(const Message& message);
  void tellSource(Message message);
  void handle(int32_t from, const Message& message);
  void onEnter(int32_t from, const Message& message);
  void onOwnReport(int32_t from, const Message& message);
  void answer();
  void onSwap(int32_t from, uint64_t count);
  void onReady(int32_t from, uint64_t version);
  void makePublisher();
  void breakParty(const std::string& why);
  void meetNow(int32_t from, const Message& message);
  void pass(const Message& message);
  void hearLeader(const Message& message);
  void showOffer(const Message& offer);

  const Options options_;
  transport::ControlNetwork& network_;
  NodeEvents& events_;
  const std::shared_ptr<bool> is_alive_ = std::make_shared<bool>(true);
  int32_t leader_ = -1;
  std::optional<Party> own_;
  bool is_broken_ = false;
  std::map<uint64_t, Party> known_;
  uint64_t num_swaps_ = 0;

  // A leader's.
  std::map<int32_t, Member> entered_;  ///< by rank
  std::map<int32_t, uint64_t> swaps_;  ///< by member: how often it has asked
  uint64_t num_swapped_ = 0;
  uint64_t held_ = 0;                 ///< the version that all of the party's ranks have
  uint64_t newest_ = 0;               ///< the newest that they all have had
  std::map<int32_t, Message> early_;  ///< replicas that have come before the source was formed: by their leaders
  Reports reports_;
  int32_t source_leader_ = -1;                   ///< a replica's leader's
  std::unique_ptr<Publisher> publisher_;         ///< the source's leader's
  std::map<int32_t, uint64_t> ready_;            ///< by member of the source
  std::map<int32_t, uint64_t> party_of_leader_;  ///< replicas' parties, by their leaders' numbers
};

}  // namespace xmesh::runtime::link
