#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/collective_watch.h"

namespace xmesh::pipeline {
namespace {

void call(const std::string& name) { RECORD_FUNCTION(name, std::vector<c10::IValue>()); }

void waitForTensor(const at::Tensor& tensor) {
  using Wait = at::Tensor(const at::Tensor&);
  c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "").typed<Wait>().call(tensor);
}

TEST(CollectiveWatch, SeesTheOperatorsOfCollectives) {
  for (const char* name : {"c10d::allreduce_", "_c10d_functional::all_reduce", "c10d_functional::broadcast", "_dtensor::shard_dim_alltoall"}) {
    const CollectiveWatch watch;
    EXPECT_FALSE(watch.hasSeen());
    call(name);
    EXPECT_TRUE(watch.hasSeen()) << name;
    call("aten::mm");
    EXPECT_TRUE(watch.hasSeen()) << name;
  }
}

TEST(CollectiveWatch, SeesWhatTheDispatcherCalls) {
  const CollectiveWatch watch;
  const at::Tensor one = at::ones({2});
  const at::Tensor two = one + one;
  EXPECT_FALSE(watch.hasSeen());
  waitForTensor(two);
  EXPECT_TRUE(watch.hasSeen());
}

TEST(CollectiveWatch, OtherNamesAreNone) {
  const CollectiveWatch watch;
  for (const char* name : {"aten::mm", "xmesh::reshard", "my_c10d::allreduce_", "c10d", ""}) {
    call(name);
    EXPECT_FALSE(watch.hasSeen()) << name;
  }
}

TEST(CollectiveWatch, SeesItsOwnThreadWhileItLives) {
  call("c10d::allreduce_");
  {
    const CollectiveWatch watch;
    std::thread(call, "c10d::allreduce_").join();
    EXPECT_FALSE(watch.hasSeen());
    call("c10d::allreduce_");
    EXPECT_TRUE(watch.hasSeen());
  }
  call("c10d::allreduce_");
  const CollectiveWatch next;
  EXPECT_FALSE(next.hasSeen());
}

/// More watches than there are slots: those that share one see too much rather than too little, and the next one begins anew.
TEST(CollectiveWatch, ManyAtOnce) {
  {
    std::vector<std::unique_ptr<CollectiveWatch>> watches;
    std::generate_n(std::back_inserter(watches), 40, [] { return std::make_unique<CollectiveWatch>(); });
    EXPECT_TRUE(std::none_of(watches.begin(), watches.end(), [](const auto& watch) { return watch->hasSeen(); }));
    call("c10d::allreduce_");
    EXPECT_TRUE(std::all_of(watches.begin(), watches.end(), [](const auto& watch) { return watch->hasSeen(); }));
  }
  const CollectiveWatch next;
  EXPECT_FALSE(next.hasSeen());
}

}  // namespace
}  // namespace xmesh::pipeline
