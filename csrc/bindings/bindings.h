#pragma once

#include <pybind11/pybind11.h>

namespace xmesh::bindings {

/// The process group: ProcessGroupXmesh. Defined in bind_process_group.cpp.
void bindProcessGroup(pybind11::module_& module);
/// Specs, topologies, plans. Defined in bind_core.cpp.
void bindCore(pybind11::module_& module);
/// The reshards of a process group, and how C++ exceptions become Python's. Defined in bind_reshard.cpp; after bindCore and bindProcessGroup.
void bindReshard(pybind11::module_& module);
/// What one call of a reshard takes of Python: its arguments as a key, local tensors, results. Defined in bind_reshard_call.cpp.
void bindReshardCall(pybind11::module_& module);
/// Actions, schedules, their simulation. Defined in bind_pipeline_core.cpp.
void bindPipelineCore(pybind11::module_& module);
/// The search for automatic plans: costs, strategy graphs, their least cost. Defined in bind_parallelism.cpp.
void bindParallelism(pybind11::module_& module);
void bindProgram(pybind11::module_& module);
/// Cutting a model into layers and stages. Defined in bind_stage_search.cpp.
void bindStageSearch(pybind11::module_& module);
/// A backward in two halves, without a pipeline. Defined in bind_split_backward.cpp.
void bindSplitBackward(pybind11::module_& module);
/// What this build has and found. Defined in bind_about.cpp.
void bindAbout(pybind11::module_& module);
/// Links between a source of weights and replicas. Defined in bind_link.cpp.
void bindLink(pybind11::module_& module);
/// One rank's part of a pipeline. Defined in bind_pipeline.cpp; after bindReshard and bindPipelineCore.
void bindPipeline(pybind11::module_& module);

}  // namespace xmesh::bindings
