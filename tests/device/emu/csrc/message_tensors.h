// What a message's tensors must be, and where their bytes are.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime.h"

namespace emu {

inline const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "emunccl: ", what, " takes one tensor, but got ", tensors.size());
  return tensors[0];
}

inline void checkTensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.device().type() == kDeviceType, "emunccl: ", what, " takes tensors of the emulated device, but got one on ", tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "emunccl: tensors for ", what, " must be non-overlapping and dense, but got strides ",
              tensor.strides(), " for shape ", tensor.sizes());
}

inline char* bytesOf(const at::Tensor& tensor) { return static_cast<char*>(const_cast<void*>(tensor.unsafeGetTensorImpl()->data())); }

}  // namespace emu
