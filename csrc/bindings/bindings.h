#pragma once

#include <pybind11/pybind11.h>

namespace xmesh::bindings {

/// The process group: ProcessGroupXmesh. Defined in bind_process_group.cpp.
void bindProcessGroup(pybind11::module_& module);

}  // namespace xmesh::bindings
