#include "pipeline/collective_watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

namespace xmesh::pipeline {
namespace {

// Autograd takes a thread's callbacks along to its device threads, but a callback is a plain function, which does not know for whom it is called. So
// each watch has a function of its own, as long as there are some. Those that share one see what any of them sees: W runs late rather than early.
constexpr size_t kNumSlots = 16;
struct Slot {
  int num_watches = 0;  ///< the mutex guards it
  std::atomic<bool> has_seen = false;
};
std::mutex mutex;
std::array<Slot, kNumSlots> slots;

template <size_t kSlot>
std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& function) {
  constexpr std::array<std::string_view, 4> kPrefixes = {"c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::"};
  const std::string_view name = function.name();
  if (std::any_of(kPrefixes.begin(), kPrefixes.end(), [name](std::string_view prefix) { return name.substr(0, prefix.size()) == prefix; })) {
    slots[kSlot].has_seen = true;
  }
  return nullptr;
}

template <size_t... kSlots>
at::RecordFunctionCallback callbackOf(size_t slot, std::index_sequence<kSlots...> /*all*/) {
  constexpr std::array<at::RecordFunctionCallback::StartCallback, kNumSlots> kLooks = {&look<kSlots>...};
  return at::RecordFunctionCallback(kLooks.at(slot)).scopes({at::RecordScope::FUNCTION});
}

size_t takeSlot() {
  const std::lock_guard lock(mutex);
  const auto least = std::min_element(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.num_watches < b.num_watches; });
  if (least->num_watches++ == 0) {
    least->has_seen = false;
  }
  return static_cast<size_t>(least - slots.begin());
}

}  // namespace

CollectiveWatch::CollectiveWatch()
    : slot_(takeSlot()), handle_(at::addThreadLocalCallback(callbackOf(slot_, std::make_index_sequence<kNumSlots>()))) {}

CollectiveWatch::~CollectiveWatch() {
  at::removeCallback(handle_);
  const std::lock_guard lock(mutex);
  --slots[slot_].num_watches;
}

bool CollectiveWatch::hasSeen() const { return slots[slot_].has_seen; }

}  // namespace xmesh::pipeline
