#include "pipeline/tensor_pool.h"

#include <ATen/ops/empty.h>

namespace xmesh::pipeline {

at::Tensor TensorPool::take(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  Kept& known = tensors_[{shape, dtype}];
  known.taken_at = step_;
  for (const at::Tensor& tensor : known.tensors) {
    if (tensor.storage().use_count() == 1) {
      return tensor.detach();
    }
  }
  const at::Tensor& made = known.tensors.emplace_back(at::empty(shape, at::TensorOptions().dtype(dtype)));
  ++num_allocated_;
  bytes_allocated_ += static_cast<int64_t>(made.nbytes());
  return made.detach();
}

void TensorPool::beginStep() {
  ++step_;
  std::erase_if(tensors_, [this](const auto& entry) { return entry.second.taken_at + kKeptSteps < step_; });
}

}  // namespace xmesh::pipeline
