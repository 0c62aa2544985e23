#include "c10d/stream/line_use.h"

#include <map>
#include <mutex>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

struct Used {
  std::shared_ptr<DeviceLine> line;
  std::shared_ptr<runtime::CallOrder> order;
  int num_uses = 0;
};

struct Lines {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Used> used;
};

/// Never destroyed: a process may end with groups in use.
Lines& lines() {
  static Lines* const made = new Lines;
  return *made;
}

}  // namespace

LineUse::LineUse(c10::Device device) : device_(device) {
  Lines& all = lines();
  const std::lock_guard lock(all.mutex);
  Used& used = all.used[{device.type(), device.index()}];
  if (used.line == nullptr) {
    used = {std::make_shared<DeviceLine>(device), std::make_shared<runtime::CallOrder>()};
  }
  ++used.num_uses;
  line_ = used.line;
  order_ = used.order;
}

LineUse::~LineUse() {
  Lines& all = lines();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.used.find({device_.type(), device_.index()});
    if (--found->second.num_uses > 0) {
      return;
    }
    all.used.erase(found);
  }
  line_->close();
}

}  // namespace xmesh::c10d_backend
