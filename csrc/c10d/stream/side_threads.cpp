#include "c10d/stream/side_threads.h"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

namespace xmesh::c10d_backend {

struct SideThreads::State {
  struct Running {
    std::thread thread;
    bool has_ended = false;
  };
  std::mutex mutex;
  std::condition_variable ended;
  std::list<Running> all;

  /// With the mutex held: what has ended needs it no more.
  void joinEnded() {
    all.remove_if([](Running& one) {
      if (one.has_ended) {
        one.thread.join();
      }
      return one.has_ended;
    });
  }
};

SideThreads::SideThreads() : state_(std::make_shared<State>()) {}

SideThreads::~SideThreads() {
  const std::lock_guard lock(state_->mutex);
  state_->joinEnded();
  for (State::Running& one : state_->all) {
    one.thread.detach();
  }
}

void SideThreads::run(std::function<void()> task) {
  const std::lock_guard lock(state_->mutex);
  state_->joinEnded();
  const auto place = state_->all.emplace(state_->all.end());
  try {
    place->thread = std::thread([state = state_, place, task = std::move(task)]() mutable {
      c10::setThreadName("xmesh_side");
      task();
      task = nullptr;
      const std::lock_guard ending(state->mutex);
      place->has_ended = true;
      state->ended.notify_all();
    });
  } catch (...) {
    state_->all.erase(place);
    throw;
  }
}

bool SideThreads::waitFor(std::chrono::milliseconds patience) noexcept {
  std::unique_lock lock(state_->mutex);
  const auto all_have = [this] { return std::ranges::all_of(state_->all, &State::Running::has_ended); };
  const bool all_have_ended = state_->ended.wait_for(lock, patience, all_have);
  state_->joinEnded();
  return all_have_ended;
}

}  // namespace xmesh::c10d_backend
