#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ rooms of torch_xmesh.";
  xmesh::bindings::bindProcessGroup(module);
  xmesh::bindings::bindCore(module);
  xmesh::bindings::bindReshard(module);
  xmesh::bindings::bindPipelineCore(module);
  xmesh::bindings::bindSplitBackward(module);
  xmesh::bindings::bindPipeline(module);
}
