#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace xmesh::c10d_backend {

/// Several works as one: complete when all are, failed when one is. A timeout of wait() is that of all together. Threading: as its parts.
class CoalescedWork final : public ::c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<::c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 private:
  std::vector<c10::intrusive_ptr<::c10d::Work>> parts_;
};

}  // namespace xmesh::c10d_backend
