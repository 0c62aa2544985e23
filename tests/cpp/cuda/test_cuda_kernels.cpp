#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <stdexcept>
#include <string>

#include "core/error.h"
#include "cuda/cuda_kernels.h"
#include "cuda/emulated_grid.h"
#include "cuda/loaded_library.h"
#include "random_layouts.h"
#include "runtime/plans.h"
#include "runtime/random_plan.h"
#include "runtime/stream_run.h"

namespace xmesh::cuda {
namespace {

/// The library's functions on an emulated grid.
Library emulatedLibrary() {
  Library library;
  library.copy = [](int /*device*/, void* /*stream*/, const CopyLaunch* launch) {
    copyOnGrid(kThreadsPerBlock, 2)(*launch);
    return 0;
  };
  library.reduce = [](int /*device*/, void* /*stream*/, const ReduceLaunch* launch) {
    reduceOnGrid(kThreadsPerBlock)(*launch);
    return 0;
  };
  library.error_text = [](int /*error*/) { return "no device"; };
  return library;
}

TEST(CudaKernels, MoveRandomPlans) {
  const CudaKernels kernels(emulatedLibrary(), 0, [] { return nullptr; });
  std::mt19937_64 rng(1);
  for (int round = 0; round < 400; ++round) {
    layouts::LayoutOptions options;
    options.num_ranks = layouts::randomInt(rng, 2, 8);
    options.max_elements = 300;
    std::vector<core::TensorPair> tensors{layouts::randomPair(rng, options)};
    replay::drawDType(rng, tensors.back());
    const core::ReshardingPlan plan = replay::RandomPlanner(tensors, layouts::randomTopology(rng, 10), rng).plan();
    const auto layout = round % 2 == 0 ? replay::MemoryLayout::kContiguous : replay::MemoryLayout::kRandom;
    const int64_t staging_bytes = round % 3 == 0 ? layouts::randomInt(rng, 1, 4096) : 1 << 20;
    ASSERT_EQ(replay::runOnStreams(plan, layout, rng(), staging_bytes, {layouts::randomInt(rng, 1, 512)}, kernels), "") << "round " << round;
  }
}

TEST(CudaKernels, SayWhatCudaSays) {
  Library library = emulatedLibrary();
  library.copy = [](int /*device*/, void* /*stream*/, const CopyLaunch* /*launch*/) { return 35; };
  const CudaKernels kernels(library, 3, [] { return nullptr; });
  std::byte memory[16] = {};
  const runtime::PackedRange range{runtime::denseBox(memory, 4, 1), 0, 4, 1, memory + 8};
  try {
    kernels.pack(nullptr, {&range, 1});
    FAIL() << "expected an exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "xmesh: a kernel was not launched on cuda:3: no device");
  }
}

TEST(CudaKernels, TakeTheCallersCurrentStreamWhereNoneIsNamed) {
  static void* seen = nullptr;
  Library library = emulatedLibrary();
  library.copy = [](int /*device*/, void* stream, const CopyLaunch* /*launch*/) {
    seen = stream;
    return 0;
  };
  int current = 0;
  int named = 0;
  const CudaKernels kernels(library, 0, [&current] { return &current; });
  std::byte memory[16] = {};
  const runtime::PackedRange range{runtime::denseBox(memory, 4, 1), 0, 4, 1, memory + 8};
  kernels.unpack(nullptr, {&range, 1});
  EXPECT_EQ(seen, &current);
  kernels.unpack(&named, {&range, 1});
  EXPECT_EQ(seen, &named);
}

TEST(LoadedLibrary, SaysWhyThereIsNone) {
  EXPECT_EQ(loadLibrary("/nowhere/_cuda_kernels.so").reason, "built without nvcc");
  const std::string path = testing::TempDir() + "no_library.so";
  std::ofstream(path) << "text";
  const LoadedLibrary broken = loadLibrary(path);
  EXPECT_FALSE(broken.library.has_value());
  EXPECT_NE(broken.reason.find("no_library.so"), std::string::npos) << broken.reason;
  EXPECT_FALSE(loadedLibrary().library.has_value()) << "none lies beside a test's program";
}

}  // namespace
}  // namespace xmesh::cuda
