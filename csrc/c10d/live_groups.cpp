#include "c10d/live_groups.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <utility>
#include <vector>

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kPatience{5'000};
constexpr std::chrono::milliseconds kPatienceAfterFailure{200};

using WeakGroup = c10::weak_intrusive_ptr<ProcessGroupXmesh>;

struct Live {
  std::mutex mutex;
  std::vector<WeakGroup> groups;
};

Live& live() {
  static auto* const all = new Live;  // groups may be made and ended while static objects are destroyed
  return *all;
}

}  // namespace

c10::intrusive_ptr<ProcessGroupXmesh> noteLive(c10::intrusive_ptr<ProcessGroupXmesh> group) {
  Live& all = live();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.groups, [](const WeakGroup& one) { return one.expired(); });
  all.groups.emplace_back(group);
  return group;
}

void endLiveGroups(bool has_failed) noexcept {
  std::vector<WeakGroup> groups;
  {
    Live& all = live();
    const std::lock_guard lock(all.mutex);
    groups = std::exchange(all.groups, {});
  }
  std::vector<std::future<void>> ends;
  for (WeakGroup& one : groups) {
    if (const c10::intrusive_ptr<ProcessGroupXmesh> group = one.lock()) {
      group->closeBeforeExit(has_failed);
      ends.push_back(group->endGloo());
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + (has_failed ? kPatienceAfterFailure : kPatience);
  for (const std::future<void>& end : ends) {
    if (end.valid()) {
      end.wait_until(deadline);
    }
  }
  for (WeakGroup& one : groups) {
    if (const c10::intrusive_ptr<ProcessGroupXmesh> group = one.lock()) {
      group->leaveBeforeExit(has_failed);
    }
  }
}

}  // namespace xmesh::c10d_backend
