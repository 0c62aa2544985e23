#include "core/parallelism/program.h"

#include <algorithm>

namespace xmesh::core {

std::vector<size_t> segmentsOf(const Program& program) {
  const auto talks = [](const ProgramWay& way) {
    return std::any_of(way.there.begin(), way.there.end(), isCollective) || std::any_of(way.back.begin(), way.back.end(), isCollective);
  };
  std::vector<size_t> segment_of(program.values.size(), 0);  // counted from 1; 0: there from the beginning
  std::vector<bool> comes_by_collective(program.values.size(), false);
  std::vector<size_t> out;
  for (size_t number = 0; number < program.operators.size(); ++number) {
    const ProgramOperator& op = program.operators[number];
    const bool begins = std::any_of(op.reads.begin(), op.reads.end(), [&](const ProgramRead& read) {
      return segment_of[read.value] == out.size() && (talks(read.way) || comes_by_collective[read.value]);
    });
    if (out.empty() || begins) {
      out.push_back(number);
    }
    for (const ProgramResult& result : op.results) {
      segment_of[result.value] = out.size();
      comes_by_collective[result.value] = talks(result.way);
    }
  }
  return out;
}

}  // namespace xmesh::core
