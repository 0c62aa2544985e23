#include "bindings/bindings.h"
#include "bindings/python_objects.h"
#include "runtime/interrupts.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ rooms of torch_xmesh.";
  xmesh::runtime::setInterruptCheck(&xmesh::bindings::checkSignals);
  xmesh::bindings::bindProcessGroup(module);
  xmesh::bindings::bindCore(module);
  xmesh::bindings::bindReshard(module);
  xmesh::bindings::bindReshardCall(module);
  xmesh::bindings::bindPipelineCore(module);
  xmesh::bindings::bindParallelism(module);
  xmesh::bindings::bindProgram(module);
  xmesh::bindings::bindStageSearch(module);
  xmesh::bindings::bindSplitBackward(module);
  xmesh::bindings::bindPipeline(module);
  xmesh::bindings::bindLink(module);
  xmesh::bindings::bindAbout(module);
}
