/// A strategy's text, as users write it.

#include "core/resharding/strategy.h"

#include "core/error.h"
#include "fuzz/fuzz.h"

using namespace xmesh::core;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const Strategy strategy = parseStrategy(xmesh::fuzz::textOf(data, size));
    xmesh::fuzz::promise(parseStrategy(strategy.str()) == strategy, "a strategy comes back");
  } catch (const InvalidArgument&) {  // as promised for what is no strategy
  }
  return 0;
}
