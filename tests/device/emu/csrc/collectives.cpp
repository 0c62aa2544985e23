// The collectives of all ranks of a communicator.
#include <ATen/ATen.h>

#include <cstring>
#include <memory>
#include <utility>

#include "backend.h"
#include "message_tensors.h"
#include "ops.h"

namespace emu {
namespace {

using at::Tensor;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void combine(const Tensor& sum, const Tensor& next, c10d::ReduceOp::RedOpType type) {
  switch (type) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      sum.add_(next);
      break;
    case c10d::ReduceOp::PRODUCT:
      sum.mul_(next);
      break;
    case c10d::ReduceOp::MIN:
      at::minimum_out(const_cast<Tensor&>(sum), sum, next);
      break;
    case c10d::ReduceOp::MAX:
      at::maximum_out(const_cast<Tensor&>(sum), sum, next);
      break;
    default:
      TORCH_CHECK(false, "emunccl: allreduce knows sum, average, product, minimum and maximum");
  }
}

// Writes the sum of what the ranks had, which is as `target` in memory, in the order of the ranks.
void addParts(std::vector<std::vector<char>>& parts, const Tensor& target, c10d::ReduceOp::RedOpType type) {
  for (size_t peer = 0; peer < parts.size(); ++peer) {
    const auto part = at::from_blob(parts[peer].data(), target.sizes(), target.strides(), target.options());
    if (peer == 0) {
      target.copy_(part);
    } else {
      combine(target, part, type);
    }
  }
  if (type == c10d::ReduceOp::AVG) target.div_(int64_t(parts.size()));
}

}  // namespace

WorkPtr EmuNccl::broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = single(tensors, "broadcast");
  checkTensor(tensor, "broadcast");
  Operation operation{OpType::BROADCAST, {}, tensors, tensor.device().index(), options.asyncOp};
  const int root = int(options.rootRank);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (root != rank_ && root != peer)) continue;
    operation.group.transfers.push_back({MessageKind::kBroadcast, root == rank_, peer, bytesOf(tensor), int64_t(tensor.nbytes())});
  }
  return run(std::move(operation));
}

WorkPtr EmuNccl::allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const auto& tensor = single(tensors, "allreduce");
  checkTensor(tensor, "allreduce");
  Operation operation{OpType::ALLREDUCE, {}, tensors, tensor.device().index(), options.asyncOp};
  const auto num_bytes = int64_t(tensor.nbytes());
  auto parts = std::make_shared<std::vector<std::vector<char>>>(size_);
  for (int peer = 0; peer < size_; ++peer) {
    (*parts)[peer].resize(num_bytes);
    if (peer == rank_) continue;
    operation.group.transfers.push_back({MessageKind::kAllreduce, true, peer, bytesOf(tensor), num_bytes});
    operation.group.transfers.push_back({MessageKind::kAllreduce, false, peer, (*parts)[peer].data(), num_bytes});
  }
  // All ranks add in the order of the ranks, so that all get the same bits.
  operation.group.finishers.push_back([parts, target = aliasOf(tensor), rank = rank_, type = options.reduceOp.op_] {
    std::memcpy((*parts)[rank].data(), target.data_ptr(), (*parts)[rank].size());
    addParts(*parts, target, type);
  });
  return run(std::move(operation));
}

WorkPtr EmuNccl::gather(const std::vector<Tensor>& outputs, const Tensor& input, bool is_async) {
  TORCH_CHECK(int(outputs.size()) == size_, "emunccl: allgather takes an output for each of ", size_, " ranks, but got ", outputs.size());
  checkTensor(input, "allgather");
  Operation operation{OpType::ALLGATHER, {}, outputs, input.device().index(), is_async};
  operation.tensors.push_back(input);
  for (int peer = 0; peer < size_; ++peer) {
    checkTensor(outputs[peer], "allgather");
    if (peer == rank_) continue;
    operation.group.transfers.push_back({MessageKind::kAllgather, true, peer, bytesOf(input), int64_t(input.nbytes())});
    operation.group.transfers.push_back({MessageKind::kAllgather, false, peer, bytesOf(outputs[peer]), int64_t(outputs[peer].nbytes())});
  }
  operation.group.finishers.push_back([from = aliasOf(input), to = aliasOf(outputs[rank_])] { to.copy_(from); });
  return run(std::move(operation));
}

WorkPtr EmuNccl::allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == 1, "emunccl: allgather takes one list of outputs, but got ", outputs.size());
  return gather(outputs[0], single(inputs, "allgather"), options.asyncOp);
}

WorkPtr EmuNccl::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(output.numel() == input.numel() * size_, "emunccl: allgather of ", input.numel(), " elements on ", size_, " ranks needs ",
              input.numel() * size_, " elements of output, but got ", output.numel());
  checkTensor(output, "allgather");
  std::vector<Tensor> parts;
  for (int peer = 0; peer < size_; ++peer) parts.push_back(output.view({size_, -1})[peer].view(input.sizes()));
  return gather(parts, input, options.asyncOp);
}

WorkPtr EmuNccl::allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) {
  const bool is_inner = isCoalescing();
  if (!is_inner) startCoalescing();
  for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
  return is_inner ? nullptr : endCoalescing();
}

// Each rank adds, in the order of the ranks, what all of them have for it.
WorkPtr EmuNccl::scatterSums(const Tensor& output, const std::vector<Tensor>& inputs, c10d::ReduceOp::RedOpType type, bool is_async) {
  TORCH_CHECK(int(inputs.size()) == size_, "emunccl: reduce_scatter takes an input for each of ", size_, " ranks, but got ", inputs.size());
  checkTensor(output, "reduce_scatter");
  Operation operation{OpType::REDUCE_SCATTER, {}, inputs, output.device().index(), is_async};
  operation.tensors.push_back(output);
  const auto num_bytes = int64_t(output.nbytes());
  auto parts = std::make_shared<std::vector<std::vector<char>>>(size_);
  for (int peer = 0; peer < size_; ++peer) {
    checkTensor(inputs[peer], "reduce_scatter");
    (*parts)[peer].resize(num_bytes);
    if (peer == rank_) continue;
    operation.group.transfers.push_back({MessageKind::kReduceScatter, true, peer, bytesOf(inputs[peer]), int64_t(inputs[peer].nbytes())});
    operation.group.transfers.push_back({MessageKind::kReduceScatter, false, peer, (*parts)[peer].data(), num_bytes});
  }
  operation.group.finishers.push_back([parts, own = aliasOf(inputs[rank_]), target = aliasOf(output), rank = rank_, type] {
    std::memcpy((*parts)[rank].data(), own.data_ptr(), (*parts)[rank].size());
    addParts(*parts, target, type);
  });
  return run(std::move(operation));
}

WorkPtr EmuNccl::reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(inputs.size() == 1, "emunccl: reduce_scatter takes one list of inputs, but got ", inputs.size());
  return scatterSums(single(outputs, "reduce_scatter"), inputs[0], options.reduceOp.op_, options.asyncOp);
}

WorkPtr EmuNccl::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(input.numel() == output.numel() * size_, "emunccl: reduce_scatter of ", input.numel(), " elements on ", size_, " ranks leaves ",
              input.numel() / size_, " elements of output, but got ", output.numel());
  checkTensor(input, "reduce_scatter");
  std::vector<Tensor> parts;
  for (int peer = 0; peer < size_; ++peer) parts.push_back(input.view({size_, -1})[peer].view(output.sizes()));
  return scatterSums(output, parts, options.reduceOp.op_, options.asyncOp);
}

WorkPtr EmuNccl::reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  const bool is_inner = isCoalescing();
  if (!is_inner) startCoalescing();
  for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
  return is_inner ? nullptr : endCoalescing();
}

WorkPtr EmuNccl::exchange(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs, bool is_async) {
  TORCH_CHECK(int(outputs.size()) == size_ && int(inputs.size()) == size_, "emunccl: all_to_all takes an output and an input for each of ", size_,
              " ranks, but got ", outputs.size(), " and ", inputs.size());
  Operation operation{OpType::ALLTOALL, {}, outputs, outputs[0].device().index(), is_async};
  for (int peer = 0; peer < size_; ++peer) {
    checkTensor(inputs[peer], "all_to_all");
    checkTensor(outputs[peer], "all_to_all");
    operation.tensors.push_back(inputs[peer]);
    if (peer == rank_) continue;
    operation.group.transfers.push_back({MessageKind::kAlltoall, true, peer, bytesOf(inputs[peer]), int64_t(inputs[peer].nbytes())});
    operation.group.transfers.push_back({MessageKind::kAlltoall, false, peer, bytesOf(outputs[peer]), int64_t(outputs[peer].nbytes())});
  }
  operation.group.finishers.push_back([from = aliasOf(inputs[rank_]), to = aliasOf(outputs[rank_])] { to.copy_(from); });
  return run(std::move(operation));
}

WorkPtr EmuNccl::alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllToAllOptions& options) {
  return exchange(outputs, inputs, options.asyncOp);
}

WorkPtr EmuNccl::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& options) {
  const auto parts = [this](const Tensor& whole, const std::vector<int64_t>& splits) {
    checkTensor(whole, "all_to_all");
    if (!splits.empty()) return whole.split_with_sizes(splits, 0);
    TORCH_CHECK(whole.size(0) % size_ == 0, "emunccl: all_to_all of ", whole.size(0), " rows is not even on ", size_, " ranks");
    return whole.chunk(size_, 0);
  };
  return exchange(parts(output, output_splits), parts(input, input_splits), options.asyncOp);
}

}  // namespace emu
