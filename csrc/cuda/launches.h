#pragma once

#include <functional>
#include <span>

#include "cuda/copy_launch.h"
#include "cuda/reduce_launch.h"
#include "runtime/stream/stream_kernels.h"

/// Boxes as parameters of launches, as few as possible: `launch` is called for each, in the order that the stream must keep.
namespace xmesh::cuda {

using LaunchCopy = std::function<void(const CopyLaunch& launch)>;
using LaunchReduce = std::function<void(const ReduceLaunch& launch)>;

void packInLaunches(std::span<const runtime::PackedRange> ranges, const LaunchCopy& launch);
void unpackInLaunches(std::span<const runtime::PackedRange> ranges, const LaunchCopy& launch);
void copyInLaunches(std::span<const runtime::BoxPair> pairs, const LaunchCopy& launch);
void reduceInLaunches(std::span<const runtime::ReductionPart> parts, const LaunchReduce& launch);

}  // namespace xmesh::cuda
