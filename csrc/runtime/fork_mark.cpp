#include "runtime/fork_mark.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

namespace xmesh::runtime {
namespace {

std::atomic<uint32_t> forks_so_far = 0;

uint32_t countForks() {
  [[maybe_unused]] static const int is_watching = pthread_atfork(nullptr, nullptr, [] { ++forks_so_far; });
  return forks_so_far;
}

}  // namespace

ForkMark::ForkMark() : num_forks_(countForks()) {}

bool ForkMark::isHere() const { return forks_so_far == num_forks_; }

void ForkMark::check() const {
  if (!isHere()) {
    throw std::runtime_error("this process was forked from the one that made the process group, whose threads it does not have: make a group here");
  }
}

}  // namespace xmesh::runtime
