#include "c10d/call_watch.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/per_process.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kLookEvery{500};

struct Watch {
  std::mutex mutex;  ///< guards the two below
  std::vector<std::weak_ptr<CollectiveFaults>> groups;
  bool is_running = false;
};

/// Those that are there; empty once, when none is, and then the thread ends.
std::vector<std::shared_ptr<CollectiveFaults>> here(Watch& all) {
  const std::lock_guard lock(all.mutex);
  std::vector<std::shared_ptr<CollectiveFaults>> out;
  std::erase_if(all.groups, [&](const std::weak_ptr<CollectiveFaults>& group) {
    std::shared_ptr<CollectiveFaults> found = group.lock();
    const bool is_gone = found == nullptr;
    if (!is_gone) {
      out.push_back(std::move(found));
    }
    return is_gone;
  });
  all.is_running = !out.empty();
  return out;
}

void run(Watch& all) {
  while (true) {
    std::this_thread::sleep_for(kLookEvery);
    const std::vector<std::shared_ptr<CollectiveFaults>> groups = here(all);
    if (groups.empty()) {
      return;
    }
    for (const std::shared_ptr<CollectiveFaults>& group : groups) {
      group->look();
    }
  }
}

}  // namespace

void watchCalls(const std::shared_ptr<CollectiveFaults>& group) {
  Watch& all = runtime::ofThisProcess<Watch>();
  const std::lock_guard lock(all.mutex);
  all.groups.push_back(group);
  if (!all.is_running) {
    std::thread([&all] { run(all); }).detach();
    all.is_running = true;
  }
}

}  // namespace xmesh::c10d_backend
