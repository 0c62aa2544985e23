#include "c10d/life_lines.h"

#include <array>
#include <random>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "transport/local_address.h"

namespace xmesh::c10d_backend {
namespace {

std::string lifeKey(int rank) { return "xmesh/life/" + std::to_string(rank); }

std::string newSecret() {
  constexpr std::array<char, 16> kDigits = {'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'};
  std::random_device random;
  std::string out;
  for (int i = 0; i < 32; ++i) {
    out += kDigits.at(random() % kDigits.size());
  }
  return out;
}

/// "127.0.0.1:4711 0f3a...", or nothing.
LifeAddress parsed(const std::vector<uint8_t>& record) {
  const std::string text(record.begin(), record.end());
  const size_t space = text.find(' ');
  return space == std::string::npos ? LifeAddress{} : LifeAddress{text.substr(0, space), text.substr(space + 1)};
}

}  // namespace

std::string storeHost(c10::intrusive_ptr<::c10d::Store> store) {
  while (const auto* prefixed = dynamic_cast<::c10d::PrefixStore*>(store.get())) {
    store = const_cast<::c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
  }
  const auto* tcp = dynamic_cast<::c10d::TCPStore*>(store.get());
  return tcp == nullptr ? std::string() : tcp->getHost();
}

PublishedLifeLine publishLifeLine(const c10::intrusive_ptr<::c10d::Store>& store, int rank) {
  PublishedLifeLine out;
  std::string record;
  try {
    out.line = std::make_unique<transport::LifeLine>(transport::localAddress(storeHost(store)));
    out.address = {out.line->address(), newSecret()};
    record = out.address.address + " " + out.address.secret;
  } catch (const std::exception&) {
    out = {};  // the group does without, and whoever waits for this rank waits for its timeout
  }
  store->set(lifeKey(rank), std::vector<uint8_t>(record.begin(), record.end()));
  return out;
}

std::vector<LifeAddress> lifeAddresses(const c10::intrusive_ptr<::c10d::Store>& store, int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) {
    keys.push_back(lifeKey(rank));
  }
  std::vector<LifeAddress> out;
  if (store->hasExtendedApi()) {
    for (const std::vector<uint8_t>& record : store->multiGet(keys)) {
      out.push_back(parsed(record));
    }
  } else {
    for (const std::string& key : keys) {
      out.push_back(parsed(store->get(key)));
    }
  }
  return out;
}

bool LifeWatches::isGone(int rank) {
  auto found = watches_.find(rank);
  if (found == watches_.end()) {
    if (!store_->check({lifeKey(rank)})) {
      return false;
    }
    const std::string address = parsed(store_->get(lifeKey(rank))).address;
    if (address.empty()) {
      return false;
    }
    found = watches_.emplace(rank, transport::LifeWatch(address)).first;
  }
  return found->second.isGone();
}

}  // namespace xmesh::c10d_backend
