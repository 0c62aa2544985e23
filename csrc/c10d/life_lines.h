#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/life_line.h"

namespace xmesh::c10d_backend {

/// The host of the TCP store behind any prefixes; empty for other stores.
std::string storeHost(c10::intrusive_ptr<::c10d::Store> store);

/// Opens a life line and tells a group's other ranks where; nothing where this machine cannot.
std::unique_ptr<transport::LifeLine> publishLifeLine(const c10::intrusive_ptr<::c10d::Store>& store, int rank);

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
