#pragma once

#include <torch/csrc/autograd/function.h>

#include <string>

namespace xmesh::pipeline {

/// The module of a hook on the node's gradients that belongs to a library of torch which reduces or gathers there (FSDP, DDP, composable ones); empty
/// where there is none. Takes the GIL.
std::string parallelLibraryHook(torch::autograd::Node& node);

}  // namespace xmesh::pipeline
