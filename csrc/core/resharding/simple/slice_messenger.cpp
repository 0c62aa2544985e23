#include "core/resharding/simple/slice_messenger.h"

#include <algorithm>

#include "core/resharding/chunking.h"

namespace xmesh::core {

std::vector<int64_t> SliceMessenger::lackingNeeders(size_t task) const {
  const UnitTask& unit = plan_.tasks[task];
  const std::vector<std::vector<int64_t>>& contributions = plan_.holders[static_cast<size_t>(unit.holders)].contributions;
  std::vector<int64_t> out;
  for (int64_t rank : plan_.needers[static_cast<size_t>(unit.needers)]) {
    if (contributions.size() > 1 || !std::binary_search(contributions[0].begin(), contributions[0].end(), rank)) {
      out.push_back(rank);
    }
  }
  std::stable_sort(out.begin(), out.end(), [&](int64_t a, int64_t b) { return network_.hostOfGlobal(a) < network_.hostOfGlobal(b); });
  return out;
}

int64_t SliceMessenger::chunkOf(size_t task) const { return chunkElementsOf(kMaxChunkBytes, plan_.itemBytes(plan_.tasks[task])); }

std::vector<int64_t> SliceMessenger::sendRange(size_t task, int64_t begin, int64_t end, int64_t needer) {
  const UnitTask& unit = plan_.tasks[task];
  const std::vector<std::vector<int64_t>>& contributions = plan_.holders[static_cast<size_t>(unit.holders)].contributions;
  const int64_t chunk = chunkOf(task);
  std::vector<int64_t> there(static_cast<size_t>((end - begin + chunk - 1) / chunk), 0);
  for (size_t contribution = 0; contribution < contributions.size(); ++contribution) {
    const std::vector<int64_t>& holders = contributions[contribution];
    if (std::binary_search(holders.begin(), holders.end(), needer)) {
      continue;
    }
    Message message{.task = static_cast<int64_t>(task), .begin = begin, .end = 0, .src_rank = 0, .dst_rank = static_cast<int32_t>(needer)};
    message.src_rank = static_cast<int32_t>(choice_.choose(holders, needer, (end - begin) * plan_.itemBytes(unit)));
    if (contributions.size() > 1) {
      message.contribution = static_cast<int32_t>(contribution);
      message.payload = Payload::kContribution;
    }
    for (int64_t& arrival : there) {
      message.end = std::min(end, message.begin + chunk);
      arrival = std::max(arrival, timeline_.add(message, 0));
      message.begin = message.end;
    }
  }
  return there;
}

void SliceMessenger::sendDirect(size_t task, int64_t needer) { sendRange(task, 0, numElements(plan_.tasks[task].box), needer); }

void SliceMessenger::scatterAndGather(size_t task, const std::vector<int64_t>& group) {
  const int64_t num_elements = numElements(plan_.tasks[task].box);
  const auto num_parts = static_cast<int64_t>(group.size());
  const int64_t chunk = chunkOf(task);
  const auto partBegin = [&](int64_t part) { return num_elements / num_parts * part + std::min(part, num_elements % num_parts); };
  std::vector<std::vector<int64_t>> there;
  for (int64_t part = 0; part < num_parts; ++part) {
    there.push_back(sendRange(task, partBegin(part), partBegin(part + 1), group[static_cast<size_t>(part)]));
  }
  for (int64_t step = 1; step < num_parts; ++step) {
    for (int64_t part = 0; part < num_parts; ++part) {
      Message message{.task = static_cast<int64_t>(task), .begin = partBegin(part), .end = 0, .src_rank = 0, .dst_rank = 0};
      message.src_rank = static_cast<int32_t>(group[static_cast<size_t>((part + step - 1) % num_parts)]);
      message.dst_rank = static_cast<int32_t>(group[static_cast<size_t>((part + step) % num_parts)]);
      for (int64_t& arrival : there[static_cast<size_t>(part)]) {
        message.end = std::min(partBegin(part + 1), message.begin + chunk);
        arrival = timeline_.add(message, arrival);
        message.begin = message.end;
      }
    }
  }
}

}  // namespace xmesh::core
