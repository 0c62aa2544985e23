#include "pipeline/autograd/node_kinds.h"

#include <c10/util/Type.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeinfo>

#include "pipeline/autograd/python_hooks.h"

namespace xmesh::pipeline {
namespace {

using torch::autograd::Node;
namespace generated = torch::autograd::generated;

using torch::autograd::SavedVariable;
using Saved = std::array<const SavedVariable*, 2>;

/// A type of node, by its name: type_info is not equal for all of them across shared libraries.
struct NodeType {
  std::string_view name;
  NodeKind kind = NodeKind::kLate;
  Saved (*saved)(const Node&) = nullptr;
};

/// A product of two tensors, which it saves.
template <class T, SavedVariable T::*one, SavedVariable T::*other>
constexpr NodeType early(std::string_view name) {
  return {name, NodeKind::kEarly, [](const Node& node) {
            const T& self = static_cast<const T&>(node);
            return Saved{&(self.*one), &(self.*other)};
          }};
}

constexpr std::array kTypes = {
    early<generated::AddmmBackward0, &generated::AddmmBackward0::mat1_, &generated::AddmmBackward0::mat2_>(
        "torch::autograd::generated::AddmmBackward0"),
    early<generated::MmBackward0, &generated::MmBackward0::self_, &generated::MmBackward0::mat2_>("torch::autograd::generated::MmBackward0"),
    early<generated::BmmBackward0, &generated::BmmBackward0::self_, &generated::BmmBackward0::mat2_>("torch::autograd::generated::BmmBackward0"),
    early<generated::BaddbmmBackward0, &generated::BaddbmmBackward0::batch1_, &generated::BaddbmmBackward0::batch2_>(
        "torch::autograd::generated::BaddbmmBackward0"),
    early<generated::LinearBackward0, &generated::LinearBackward0::input_, &generated::LinearBackward0::weight_>(
        "torch::autograd::generated::LinearBackward0"),
    early<generated::ConvolutionBackward0, &generated::ConvolutionBackward0::input_, &generated::ConvolutionBackward0::weight_>(
        "torch::autograd::generated::ConvolutionBackward0"),
    NodeType{"torch::autograd::CopySlices", NodeKind::kCopySlices},
    NodeType{"torch::autograd::PyNode", NodeKind::kPython},
};
constexpr NodeType kOther{};

const NodeType& typeOf(const Node& node) {
  thread_local ska::flat_hash_map<const std::type_info*, const NodeType*> known;
  const std::type_info* type = &typeid(node);
  const auto found = known.find(type);
  if (found != known.end()) {
    return *found->second;
  }
  const std::string name = c10::demangle(type->name());
  const NodeType* out = &kOther;
  for (const NodeType& candidate : kTypes) {
    if (candidate.name == name) {
      out = &candidate;
    }
  }
  known.emplace(type, out);
  return *out;
}

}  // namespace

NodeKind kindOf(const Node& node) { return typeOf(node).kind; }

bool hasSavedTensorHooks(const Node& node) {
  const NodeType& type = typeOf(node);
  if (type.saved == nullptr) {
    return false;
  }
  const Saved saved = type.saved(node);
  return std::any_of(saved.begin(), saved.end(), [](const auto* one) { return one->has_hooks(); });
}

std::vector<at::Tensor> savedTensors(const Node& node) {
  std::vector<at::Tensor> out;
  const NodeType& type = typeOf(node);
  if (type.saved == nullptr) {
    return out;
  }
  for (const torch::autograd::SavedVariable* one : type.saved(node)) {
    const std::optional<at::Tensor> tensor = one->get_raw_data();
    if (tensor && tensor->defined()) {
      out.push_back(*tensor);
    }
  }
  return out;
}

bool hasHooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

Node* innerNode(Node& node) { return kindOf(node) == NodeKind::kCopySlices ? static_cast<torch::autograd::CopySlices&>(node).fn.get() : nullptr; }

bool savesNothing(const Node& node) {
  constexpr std::array kNames = {"torch::autograd::AccumulateGrad",
                                 "AddBackward0",
                                 "CatBackward0",
                                 "CloneBackward0",
                                 "ExpandBackward0",
                                 "NegBackward0",
                                 "PermuteBackward0",
                                 "ReshapeAliasBackward0",
                                 "SelectBackward0",
                                 "SliceBackward0",
                                 "SplitBackward0",
                                 "SqueezeBackward1",
                                 "StackBackward0",
                                 "SubBackward0",
                                 "SumBackward0",
                                 "SumBackward1",
                                 "TBackward0",
                                 "ToCopyBackward0",
                                 "TransposeBackward0",
                                 "UnsafeViewBackward0",
                                 "UnsqueezeBackward0",
                                 "ViewBackward0"};
  const std::string name = node.name();
  return std::any_of(kNames.begin(), kNames.end(), [&](const char* known) { return name == known; });
}

std::string whyNotSplit(Node& node) {
  if (!node.tensor_pre_hooks().empty()) {
    const std::string module = parallelLibraryHook(node);
    if (!module.empty()) {
      return "a hook of " + module + " on " + node.name() + " acts at the end of the backward that reaches it, when weight gradients must be there";
    }
  }
  if (kindOf(node) != NodeKind::kPython) {
    return {};
  }
  const std::string name = node.name();
  if (name == "CheckpointFunctionBackward") {
    return name + " (a reentrant checkpoint) runs a backward of its own inside, weights included: use_reentrant=False can be split";
  }
  if (name == "RegisterPostBackwardFunctionBackward") {
    return name + " (fully_shard) reduces a module's weight gradients as soon as its input gradients are there";
  }
  if (name == "_DDPSinkBackward") {
    return name + " (DistributedDataParallel with static_graph) reduces at the end of the backward that reaches it";
  }
  return {};
}

}  // namespace xmesh::pipeline
