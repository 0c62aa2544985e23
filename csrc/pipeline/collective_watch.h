#pragma once

#include <ATen/record_function.h>

namespace xmesh::pipeline {

/// Sees whether a collective is called on this thread while it lives, by the names of operators (c10d's, its functional ones, DTensor's). What other
/// threads do, and communication that is no operator of torch's, it does not see.
class CollectiveWatch {
 public:
  CollectiveWatch();
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;
  bool hasSeen() const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace xmesh::pipeline
