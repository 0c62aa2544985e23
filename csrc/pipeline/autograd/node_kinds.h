#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <vector>

namespace xmesh::pipeline {

/// How the backward of one autograd node can be split in two.
enum class NodeKind : uint8_t {
  kLate,        ///< computes all its gradients at once: only their use can be put off
  kEarly,       ///< a product, whose gradients are computed one by one, each only where it is asked for: it can run twice, for other ones
  kCopySlices,  ///< an in-place operation on a view, which runs another node inside; as kLate
  kPython,      ///< a Python autograd.Function, or what torch.compile made; as kLate
};

/// The kind that belongs to the node's C++ type; looked up by the type's name, once per type and thread.
NodeKind kindOf(const torch::autograd::Node& node);
/// Whether a node that could be cut early keeps a tensor behind saved-tensor hooks, so that each run unpacks it again (a checkpoint: computes it
/// again). False for types whose saved tensors cannot be looked at.
bool hasSavedTensorHooks(const torch::autograd::Node& node);
/// What a node that could be cut early has saved, weights among it; without what is behind hooks.
std::vector<at::Tensor> savedTensors(const torch::autograd::Node& node);
/// Whether anyone listens to the node's gradients: a tensor hook, a node's hook, retain_grad().
bool hasHooks(torch::autograd::Node& node);
/// The node that a kCopySlices runs inside, with the same next edges from the second on; null for others.
torch::autograd::Node* innerNode(torch::autograd::Node& node);
/// Whether the node saves nothing that a hook could have to unpack: views, casts, the accumulation into a leaf.
bool savesNothing(const torch::autograd::Node& node);
/// Why a backward through this node cannot be split; empty where it can. A node on the way to an input only. Takes the GIL for nodes and hooks of
/// Python: some act on weight gradients as soon as the input gradients are there (FSDP, DDP with a static graph), or run a backward of their own.
std::string whyNotSplit(torch::autograd::Node& node);

}  // namespace xmesh::pipeline
