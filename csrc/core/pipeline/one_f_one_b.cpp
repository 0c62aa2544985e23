#include "core/pipeline/generators.h"

namespace xmesh::core {

Schedule oneFOneB(const PipelineShape& shape) { return asReady("1f1b", shape, {depths(shape), {}}); }

}  // namespace xmesh::core
