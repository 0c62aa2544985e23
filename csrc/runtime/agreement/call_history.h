#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agreement/messages.h"

namespace xmesh::runtime {

/// What came for a call before this rank made it.
struct EarlyNews {
  std::vector<std::pair<int32_t, CallNotice>> notices;  ///< by peer
  std::optional<Failure> failure;
  std::vector<int64_t> participants;  ///< with the failure, where they are known
};

/// What a rank remembers of calls that are over for it, and of those that others made before it. Both are bounded: the oldest failures are forgotten,
/// and news beyond kMaxEarly are not kept. Threading: the network's thread.
class CallHistory {
 public:
  /// The call has begun here, or was refused.
  void start(const CallKey& key) {
    if (key.lane == 0) {
      started_[key.participants] = key.count + 1;
    }
  }
  /// The call ended well here.
  void end(const CallKey& key) {
    if (key.lane == 0 || !ended_.insert(key).second) {
      return;
    }
    order_of_ended_.push_back(key);
    if (order_of_ended_.size() > kMaxEnded) {
      ended_.erase(order_of_ended_.front());
      order_of_ended_.pop_front();
    }
  }
  /// Whether it began here at some time. Of calls outside lane 0 only those are known that have ended, of which the oldest are forgotten.
  bool isPast(const CallKey& key) const {
    if (key.lane != 0) {
      return failed_.contains(key) || ended_.contains(key);
    }
    const auto started = started_.find(key.participants);
    return started != started_.end() && key.count < started->second;
  }

  /// What this rank called last, for the answers to others' questions.
  void setLastCall(std::string text) { last_call_ = std::move(text); }
  const std::string& lastCall() const { return last_call_; }

  /// The call failed with this: for ranks that come to it later. The first failure counts.
  void fail(const CallKey& key, const Failure& failure) {
    if (!failed_.emplace(key, failure).second) {
      return;
    }
    order_.push_back(key);
    if (order_.size() > kMaxFailed) {
      failed_.erase(order_.front());
      order_.pop_front();
    }
  }
  /// Null where it did not, or is forgotten.
  const Failure* failureOf(const CallKey& key) const {
    const auto found = failed_.find(key);
    return found == failed_.end() ? nullptr : &found->second;
  }

  /// The news of a call still to come, to add to; null where it is past or there is no room.
  EarlyNews* newsFor(const CallKey& key) { return isPast(key) || early_.size() >= kMaxEarly ? nullptr : &early_[key]; }
  const std::map<CallKey, EarlyNews>& early() const { return early_; }
  EarlyNews takeNews(const CallKey& key) {
    auto found = early_.extract(key);
    return found.empty() ? EarlyNews{} : std::move(found.mapped());
  }

 private:
  static constexpr size_t kMaxEarly = size_t{1} << 16;
  static constexpr size_t kMaxFailed = 4096;
  static constexpr size_t kMaxEnded = 1024;

  std::map<uint64_t, uint64_t> started_;  ///< participants -> calls started or refused in lane 0
  std::map<CallKey, Failure> failed_;
  std::deque<CallKey> order_;
  std::set<CallKey> ended_;
  std::deque<CallKey> order_of_ended_;
  std::map<CallKey, EarlyNews> early_;
  std::string last_call_;
};

}  // namespace xmesh::runtime
