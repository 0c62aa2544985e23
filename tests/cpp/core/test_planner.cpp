#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "core/error.h"
#include "core/resharding/planner.h"
#include "core/resharding/validate.h"
#include "random_layouts.h"

namespace xmesh::core {
namespace {

TEST(Planner, Smoke) {
  for (const char* text : {"send_recv", "broadcast", "broadcast:naive+naive", "auto"}) {
    for (int64_t seed = 0; seed < 300; ++seed) {
      std::mt19937_64 rng(static_cast<uint64_t>(seed));
      const TensorPair pair = layouts::randomPair(rng);
      const ReshardingPlan plan = planResharding({pair}, layouts::randomTopology(rng, 12), parseStrategy(text));
      ASSERT_NO_THROW(validatePlan(plan)) << "seed " << seed << " " << pair.src.str() << " -> " << pair.dst.str();
      ASSERT_LE(plan.lower_bound_seconds, plan.predicted_seconds * (1 + 1e-9)) << seed << text;
    }
  }
}

}  // namespace
}  // namespace xmesh::core
