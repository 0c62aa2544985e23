#pragma once

#include <random>

#include "cuda/launches.h"
#include "random_layouts.h"

namespace xmesh::cuda {

/// Runs every thread of a launch, one after another, in blocks of `block_size` threads; a block's threads in any order give the same.
template <typename Launch, typename Body>
void runOnGrid(const Launch& launch, int block_size, const Body& body) {
  for (int block = 0; block < launch.num_blocks; ++block) {
    for (int thread = block_size; thread-- > 0;) {
      body(ThreadIndex{block, thread, block_size});
    }
  }
}

/// A copy launched on a grid of `block_size` threads per block; with fewer blocks per item than it asks for, where `max_blocks` says so.
inline LaunchCopy copyOnGrid(int block_size, int max_blocks, int* num_launches = nullptr) {
  return [=](const CopyLaunch& given) {
    CopyLaunch launch = given;
    launch.num_blocks = 0;
    for (int i = 0; i < launch.num_items; ++i) {
      BlockRange& blocks = launch.items[i].blocks;
      blocks = {launch.num_blocks, std::min(blocks.count, max_blocks)};
      launch.num_blocks += blocks.count;
    }
    runOnGrid(launch, block_size, [&](const ThreadIndex& at) { runCopy(launch, at); });
    if (num_launches != nullptr) {
      ++*num_launches;
    }
  };
}

inline LaunchReduce reduceOnGrid(int block_size, int* num_launches = nullptr) {
  return [=](const ReduceLaunch& launch) {
    runtime::withType(launch.type,
                      [&](auto value) { runOnGrid(launch, block_size, [&](const ThreadIndex& at) { runReduce<decltype(value)>(launch, at); }); });
    if (num_launches != nullptr) {
      ++*num_launches;
    }
  };
}

}  // namespace xmesh::cuda
