// What pipeline/autograd asks Python about, in programs without an interpreter: no hook is Python's.
#include "pipeline/autograd/python_hooks.h"

namespace xmesh::pipeline {

std::string parallelLibraryHook(torch::autograd::Node& /*node*/) { return {}; }

}  // namespace xmesh::pipeline
