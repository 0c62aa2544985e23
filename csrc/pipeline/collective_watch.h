#pragma once

#include <ATen/record_function.h>

#include <cstddef>

namespace xmesh::pipeline {

/// Sees whether a collective is called while it lives, by the names of operators (c10d's, its functional ones, DTensor's): on the thread that made
/// it, and on autograd's device threads in the backwards that this thread runs. What other threads do, and communication that is no operator of
/// torch's, it does not see. Threading: one thread, on which it ends too.
class CollectiveWatch {
 public:
  CollectiveWatch();
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;
  bool hasSeen() const;

 private:
  const size_t slot_;
  at::CallbackHandle handle_;
};

}  // namespace xmesh::pipeline
