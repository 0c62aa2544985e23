/// A schedule's cells from a file that anybody may have written.

#include "core/error.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/validate.h"
#include "fuzz/fuzz.h"

using namespace xmesh::core;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const Schedule schedule = scheduleFromCsv(std::string(xmesh::fuzz::textOf(data, size)));
    const std::string text = scheduleToCsv(schedule);
    xmesh::fuzz::promise(scheduleToCsv(scheduleFromCsv(text)) == text, "a schedule comes back");
  } catch (const InvalidArgument&) {  // as promised for what is no schedule
  }
  return 0;
}
