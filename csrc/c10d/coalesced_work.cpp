#include "c10d/coalesced_work.h"

#include <algorithm>
#include <utility>

namespace xmesh::c10d_backend {

CoalescedWork::CoalescedWork(std::vector<c10::intrusive_ptr<::c10d::Work>> parts) : Work(-1, ::c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool CoalescedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& part : parts_) {
    if (auto error = part->exception()) {
      return error;
    }
  }
  return nullptr;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    const auto some = part->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void CoalescedWork::synchronize() {
  for (const auto& part : parts_) {
    part->synchronize();
  }
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  bool is_done = true;
  for (const auto& part : parts_) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    is_done = part->wait(timeout == kNoTimeout ? timeout : std::max(left, milliseconds(1))) && is_done;
  }
  return is_done;
}

void CoalescedWork::abort() {
  for (const auto& part : parts_) {
    part->abort();
  }
}

}  // namespace xmesh::c10d_backend
