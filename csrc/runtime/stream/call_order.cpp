#include "runtime/stream/call_order.h"

#include <algorithm>
#include <utility>

namespace xmesh::runtime {

CallOrder::Place CallOrder::propose(Name name, Told told) {
  const std::lock_guard lock(mutex_);
  const Turn turn{++last_turn_, name, ++last_id_};
  waiting_.emplace(turn, Waiting{std::move(told)});
  turns_.emplace(turn.id, turn);
  return {turn.id, turn.turn};
}

void CallOrder::agree(uint64_t id, uint64_t turn) {
  const std::lock_guard lock(mutex_);
  if (turns_.contains(id)) {
    move(id, turn, true);
    launchWaiting();
  }
}

void CallOrder::comesAfter(uint64_t id, uint64_t turn) {
  const std::lock_guard lock(mutex_);
  const auto found = turns_.find(id);
  if (found != turns_.end() && found->second.turn <= turn && !waiting_.at(found->second).is_agreed) {
    move(id, turn + 1, false);
    launchWaiting();
  }
}

bool CallOrder::leave(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = turns_.find(id);
  if (found == turns_.end()) {
    return false;
  }
  waiting_.erase(found->second);
  turns_.erase(found);
  launchWaiting();
  return true;
}

void CallOrder::promise(uint64_t turn) {
  const std::lock_guard lock(mutex_);
  last_turn_ = std::max(last_turn_, turn);
}

void CallOrder::move(uint64_t id, uint64_t turn, bool is_agreed) {
  Turn& own = turns_.at(id);
  auto entry = waiting_.extract(own);
  own.turn = turn;
  entry.key() = own;
  entry.mapped().is_agreed = is_agreed;
  waiting_.insert(std::move(entry));
  last_turn_ = std::max(last_turn_, turn);
}

/// Launches what may start, up to the first that may not.
void CallOrder::launchWaiting() {
  while (!waiting_.empty() && waiting_.begin()->second.is_agreed) {
    const auto entry = waiting_.extract(waiting_.begin());
    turns_.erase(entry.key().id);
    entry.mapped().told.launch();
  }
  tellHeld();
}

/// Says so where the first call, not agreed, keeps calls that are.
void CallOrder::tellHeld() {
  const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(), [](const auto& entry) { return entry.second.is_agreed; });
  if (last != waiting_.rend()) {
    Waiting& first = waiting_.begin()->second;
    if (const uint64_t turn = last->first.turn; std::exchange(first.held_turn, turn) < turn) {
      first.told.held(turn);
    }
  }
}

}  // namespace xmesh::runtime
