#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/life_line.h"

namespace xmesh::c10d_backend {

/// The host of the TCP store behind any prefixes; empty for other stores.
std::string storeHost(c10::intrusive_ptr<::c10d::Store> store);

/// Where a rank's life line is. Who tells something there begins with the secret, which only ranks of the group know.
struct LifeAddress {
  std::string address;  ///< empty: that rank's machine has no life lines
  std::string secret;
};

/// A life line, and what the other ranks know of it.
struct PublishedLifeLine {
  std::unique_ptr<transport::LifeLine> line;
  LifeAddress address;
};

/// Opens a life line and tells a group's other ranks where; none where this machine cannot.
PublishedLifeLine publishLifeLine(const c10::intrusive_ptr<::c10d::Store>& store, int rank);

/// The life lines of a group of `size` ranks, all of which have published theirs.
std::vector<LifeAddress> lifeAddresses(const c10::intrusive_ptr<::c10d::Store>& store, int size);

/// Looks at the life lines of a group's ranks. Threading: one thread at a time.
class LifeWatches {
 public:
  explicit LifeWatches(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}
  /// Whether a rank (of the group) has made the group and then left it, or ended. Does not block.
  bool isGone(int rank);

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
  std::map<int, transport::LifeWatch> watches_;
};

}  // namespace xmesh::c10d_backend
