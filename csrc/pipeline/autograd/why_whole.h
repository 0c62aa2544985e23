#pragma once

#include <string>

#include "pipeline/autograd/path_to_inputs.h"

namespace xmesh::pipeline {

/// Why a backward along this path cannot be split; empty where it can. Takes the GIL for nodes and hooks of Python.
std::string whyWhole(const PathToInputs& path);

}  // namespace xmesh::pipeline
