#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace xmesh::pipeline {

/// CPU buffers that are used again once nobody else holds their memory: no leaf, no saved activation, no transfer on its way.
/// Threading: take() on one thread; others may drop tensors at any time.
class TensorPool {
 public:
  /// An uninitialized contiguous tensor. Its memory comes back when every tensor that shares it is gone.
  at::Tensor take(const std::vector<int64_t>& shape, at::ScalarType dtype);
  /// A step begins: buffers of shapes that the last kKeptSteps steps have not taken are dropped.
  void beginStep();
  int64_t numAllocated() const { return num_allocated_; }
  int64_t bytesAllocated() const { return bytes_allocated_; }
  void clear() { tensors_.clear(); }

 private:
  static constexpr int64_t kKeptSteps = 16;
  struct Kept {
    std::vector<at::Tensor> tensors;
    int64_t taken_at = 0;  ///< the step
  };
  std::map<std::pair<std::vector<int64_t>, at::ScalarType>, Kept> tensors_;
  int64_t step_ = 0;
  int64_t num_allocated_ = 0;
  int64_t bytes_allocated_ = 0;
};

}  // namespace xmesh::pipeline
