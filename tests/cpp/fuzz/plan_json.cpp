/// A plan's text from a file that anybody may have written.

#include "core/resharding/plan_json.h"

#include "core/error.h"
#include "core/resharding/fingerprint.h"
#include "fuzz/fuzz.h"

using namespace xmesh::core;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const ReshardingPlan plan = planFromJson(xmesh::fuzz::textOf(data, size));
    const std::string text = planToJson(plan);
    xmesh::fuzz::promise(planToJson(planFromJson(text)) == text, "a plan comes back");
  } catch (const InvalidArgument&) {  // as promised for what is no plan
  }
  return 0;
}
