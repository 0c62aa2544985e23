#include "bindings/bindings.h"

namespace xmesh::bindings {

void bindProcessGroup(pybind11::module_& module) { static_cast<void>(module); }

}  // namespace xmesh::bindings
