#pragma once

#include <mutex>

#include "runtime/fork_mark.h"

namespace xmesh::runtime {

/// The T of this process, made at first use: a forked child, which has no thread of its parent's, begins anew. Never destroyed: threads may outlast
/// static objects. Any thread.
template <typename T>
T& ofThisProcess() {
  struct Made {
    const ForkMark fork;
    T value;
  };
  static std::mutex making;
  static Made* current = nullptr;
  const std::lock_guard lock(making);
  if (current == nullptr || !current->fork.isHere()) {
    current = new Made;
  }
  return current->value;
}

}  // namespace xmesh::runtime
