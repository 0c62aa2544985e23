#include "c10d/life_lines.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "transport/local_address.h"

namespace xmesh::c10d_backend {
namespace {

std::string lifeKey(int rank) { return "xmesh/life/" + std::to_string(rank); }

}  // namespace

std::string storeHost(c10::intrusive_ptr<::c10d::Store> store) {
  while (const auto* prefixed = dynamic_cast<::c10d::PrefixStore*>(store.get())) {
    store = const_cast<::c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
  }
  const auto* tcp = dynamic_cast<::c10d::TCPStore*>(store.get());
  return tcp == nullptr ? std::string() : tcp->getHost();
}

std::unique_ptr<transport::LifeLine> publishLifeLine(const c10::intrusive_ptr<::c10d::Store>& store, int rank) {
  std::unique_ptr<transport::LifeLine> line;
  try {
    line = std::make_unique<transport::LifeLine>(transport::localAddress(storeHost(store)));
  } catch (const std::exception&) {
    return nullptr;  // the group does without, and whoever waits for this rank waits for its timeout
  }
  const std::string address = line->address();
  store->set(lifeKey(rank), std::vector<uint8_t>(address.begin(), address.end()));
  return line;
}

bool LifeWatches::isGone(int rank) {
  auto found = watches_.find(rank);
  if (found == watches_.end()) {
    if (!store_->check({lifeKey(rank)})) {
      return false;
    }
    const std::vector<uint8_t> address = store_->get(lifeKey(rank));
    found = watches_.emplace(rank, transport::LifeWatch(std::string(address.begin(), address.end()))).first;
  }
  return found->second.isGone();
}

}  // namespace xmesh::c10d_backend
