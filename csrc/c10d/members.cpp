#include "c10d/members.h"

#include <algorithm>
#include <iterator>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/life_lines.h"
#include "c10d/stores.h"
#include "runtime/failure.h"
#include "runtime/interrupts.h"
#include "transport/local_address.h"

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kFirstLook{1};  ///< at ranks that are not there yet; then twice that, and so on
constexpr std::chrono::milliseconds kLastLook{100};

}  // namespace

Members::Members(c10::intrusive_ptr<::c10d::Store> group_store, runtime::RankNumbers numbers, int32_t own_peer, Found found)
    : group_store_(std::move(group_store)),
      store_(c10::make_intrusive<::c10d::PrefixStore>("xmesh/reshard", group_store_)),
      numbers_(std::move(numbers)),
      own_peer_(own_peer),
      found_(std::move(found)) {}

std::string Members::keyOf(int64_t rank) const { return "member/" + std::to_string(numbers_.peerOf(rank)); }

void Members::publish(const std::string& address, const std::string& host_id) {
  store_->set(keyOf(numbers_.globalRank(own_peer_)), bytesOf(address + " " + (host_id.empty() ? transport::hostIdentity() : host_id)));
}

bool Members::isFound(int64_t rank) const {
  const std::lock_guard lock(mutex_);
  return host_of_.contains(rank);
}

void Members::await(std::vector<int64_t> missing, const Wait& wait) {
  LifeWatches lives(group_store_);
  const auto deadline = std::chrono::steady_clock::now() + wait.timeout;
  for (std::chrono::milliseconds pause = kFirstLook; !missing.empty(); pause = std::min(2 * pause, kLastLook)) {
    std::vector<int64_t> gone;
    try {
      std::erase_if(missing, [this](int64_t rank) { return store_->check({keyOf(rank)}); });
      std::copy_if(missing.begin(), missing.end(), std::back_inserter(gone), [&](int64_t rank) { return lives.isGone(numbers_.peerOf(rank)); });
      std::erase_if(gone, [this](int64_t rank) { return store_->check({keyOf(rank)}); });  // came, then left
    } catch (const std::exception& error) {
      throw runtime::PeerError("the store, by which the ranks of a group find each other, is gone: " + std::string(error.what()), {});
    }
    const std::string here = "on rank " + std::to_string(numbers_.globalRank(own_peer_)) + ": rank ";
    const std::string step = wait.why == AwaitedFor::kPipeline ? "made the pipeline that this rank makes" : "called any reshard";
    if (!gone.empty()) {
      throw runtime::PeerError(here + runtime::rankList(gone) + " has left the group, or ended, without having " + step + " on it", gone);
    }
    if (missing.empty()) {
      return;
    }
    runtime::checkInterrupts();
    if (wait.check) {
      wait.check();
    }
    if (wait.timeout.count() > 0 && std::chrono::steady_clock::now() >= deadline) {
      throw runtime::PeerError(
          here + runtime::rankList(missing) + " has not " + step + " on this group within " + std::to_string(wait.timeout.count()) + " ms", missing);
    }
    std::this_thread::sleep_for(pause);
  }
}

void Members::find(const std::vector<int64_t>& ranks, const Wait& wait) {
  std::vector<int64_t> missing;
  for (const int64_t rank : ranks) {
    numbers_.peerOf(rank);
    if (!isFound(rank)) {
      missing.push_back(rank);
    }
  }
  await(missing, wait);
  for (const int64_t rank : missing) {
    const std::string text = textOf(store_->get(keyOf(rank)));
    const size_t space = text.find(' ');
    if (const int32_t peer = numbers_.peerOf(rank); peer != own_peer_) {
      found_(peer, text.substr(0, space));
    }
    const std::lock_guard lock(mutex_);
    host_of_[rank] = text.substr(space + 1);
  }
}

void Members::findPresent(const std::vector<int64_t>& ranks) {
  std::vector<int64_t> present;
  for (const int64_t rank : ranks) {
    if (isFound(rank) || store_->check({keyOf(rank)})) {
      present.push_back(rank);
    }
  }
  find(present, {});
}

bool Members::areMembers(const std::vector<int64_t>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [this](int64_t rank) { return numbers_.contains(rank); });
}

core::Topology Members::topology(std::vector<int64_t> ranks, const core::LinkModel& links) const {
  std::sort(ranks.begin(), ranks.end());
  std::map<std::string, int64_t> index_of_host;
  std::map<int64_t, int64_t> index_of_rank;
  const std::lock_guard lock(mutex_);
  for (const int64_t rank : ranks) {
    index_of_rank[rank] = index_of_host.try_emplace(host_of_.at(rank), static_cast<int64_t>(index_of_host.size())).first->second;
  }
  return core::Topology(std::move(index_of_rank), links);
}

}  // namespace xmesh::c10d_backend
