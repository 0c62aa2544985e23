#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/link/messages.h"
#include "runtime/link/party.h"

namespace xmesh::runtime::link {

/// How a version that was published ended.
struct Settlement {
  uint64_t version = 0;
  std::string error;                  ///< why nobody was brought it; empty where it went as it should
  std::vector<uint64_t> holders;      ///< parties that hold it
  std::vector<std::string> left_out;  ///< "replica 'a': why", of those that were there when it began
  bool operator==(const Settlement&) const = default;
};

/// How the source's leader brings a version to the replicas that it knows when the version begins:
///
///     offer --> all accept, with equal fingerprints --> go --> all are done --> settled
///        \__ one does not in time, is lost, fails: left out, and the rest is offered the next attempt __/
///
/// Whoever is not done in time is told to abort, and has some time more to say that it has: a source's memory is its own again only then. Every
/// failed attempt leaves out at least one replica, so that a version ends after one attempt more than there are replicas. What goes wrong at the
/// source itself ends the version. Threading: the network's thread.
class Publisher {
 public:
  struct Ways {
    /// To a party's leader; the source's own too.
    std::function<void(const Party& party, const Message& message)> tell;
    std::function<void(const Settlement&)> settle;
    std::function<uint64_t(std::chrono::milliseconds, std::function<void()>)> start_timer;
    std::function<void(uint64_t)> cancel_timer;
  };
  Publisher(Party source, std::chrono::milliseconds deadline, Ways ways) : source_(std::move(source)), deadline_(deadline), ways_(std::move(ways)) {}

  /// A replica is there, which had `newest` (0: none): it takes part from the next version on. Everybody is told of everybody. Another party of the
  /// same replica is over.
  void meet(const Party& replica, uint64_t newest);
  /// It is gone.
  void lose(uint64_t party);
  /// All ranks of the source are ready to publish it, one version at a time. Settled with an error where it is not above all that were published, or
  /// that a replica has had.
  void publish(uint64_t version);
  /// kAccept or kDone of a party's leader.
  void hear(uint64_t party, const Message& message);
  const std::map<uint64_t, Party>& replicas() const { return replicas_; }

 private:
  /// What a party of an attempt has said.
  struct Said {
    std::optional<std::string> fingerprint;
    std::optional<Message> done;
  };
  struct Run {
    Attempt attempt;
    std::set<uint64_t> candidates;  ///< replicas that may still get it
    std::set<uint64_t> holders;
    bool is_moving = false;
    bool is_aborted = false;
    std::map<uint64_t, Said> said;  ///< by party of the attempt; those lost are taken out
    std::vector<std::string> left_out;
    bool has_lost = false;  ///< somebody has been taken out since the attempt began
    uint64_t timer = 0;
  };

  void tellAll(const Message& message);
  /// To those who are left: nobody names the party again.
  void tellGone(uint64_t party);
  void startAttempt();
  void endTimer();
  void onDeadline();
  void checkAccepted();
  void checkDone();
  void leaveOutMisfits(const Message& done);
  void leaveOut(uint64_t party, const std::string& why);
  void settle(const std::string& error);

  const Party source_;
  const std::chrono::milliseconds deadline_;
  const Ways ways_;
  std::map<uint64_t, Party> replicas_;
  uint64_t newest_ = 0;
  std::unique_ptr<Run> run_;  ///< null while no version is published
};

}  // namespace xmesh::runtime::link
