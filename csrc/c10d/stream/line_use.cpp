#include "c10d/stream/line_use.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/per_process.h"

namespace xmesh::c10d_backend {
namespace {

struct Used {
  std::shared_ptr<DeviceLine> line;
  std::shared_ptr<runtime::CallOrder> order;
  int num_uses = 0;  ///< 0: it is being closed
};

struct Lines {
  std::mutex mutex;
  std::condition_variable closed;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Used> used;
};

}  // namespace

LineUse::LineUse(c10::Device device) : device_(device) {
  Lines& all = runtime::ofThisProcess<Lines>();
  const std::pair key(device.type(), device.index());
  std::unique_lock lock(all.mutex);
  all.closed.wait(lock, [&] {
    const auto found = all.used.find(key);
    return found == all.used.end() || found->second.num_uses > 0;
  });
  if (!all.used.contains(key)) {
    all.used.emplace(key, Used{std::make_shared<DeviceLine>(device), std::make_shared<runtime::CallOrder>()});
  }
  Used& used = all.used.at(key);
  ++used.num_uses;
  line_ = used.line;
  order_ = used.order;
}

bool LineUse::isShared() const {
  Lines& all = runtime::ofThisProcess<Lines>();
  const std::lock_guard lock(all.mutex);
  const auto found = all.used.find({device_.type(), device_.index()});
  return found != all.used.end() && found->second.line == line_ && found->second.num_uses > 1;
}

LineUse::~LineUse() {
  Lines& all = runtime::ofThisProcess<Lines>();
  std::unique_lock lock(all.mutex);
  const auto found = all.used.find({device_.type(), device_.index()});
  if (found == all.used.end() || found->second.line != line_) {
    return;  // a forked child ends what is its parent's
  }
  if (--found->second.num_uses > 0) {
    return;
  }
  lock.unlock();
  line_->close();
  lock.lock();
  all.used.erase(found);
  all.closed.notify_all();
}

}  // namespace xmesh::c10d_backend
