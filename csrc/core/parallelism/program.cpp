#include "core/parallelism/program.h"

#include <algorithm>

#include "core/error.h"

namespace xmesh::core {

namespace {

/// Whether a value comes by a transfer: devices have to talk to each other, and nobody is left summands of it, or of its gradient.
bool isTransfer(const ProgramWay& way, const ValueState& to, bool has_gradient, const ValueState& back_to) {
  const auto talks = [](const std::vector<AxisMove>& moves) { return std::any_of(moves.begin(), moves.end(), isCollective); };
  const auto isSum = [](const ValueState& state) { return std::find(state.begin(), state.end(), kPartialSum) != state.end(); };
  return (talks(way.there) || talks(way.back)) && !isSum(to) && (!has_gradient || !isSum(back_to));
}

}  // namespace

bool isTransfer(const Program& program, const ProgramRead& read) {
  return isTransfer(read.way, read.taken.value, read.gives_gradient, program.values.at(read.value).held.gradient);
}

bool isTransfer(const Program& program, const ProgramResult& result) {
  const ProgramValue& value = program.values.at(result.value);
  return isTransfer(result.way, value.held.value, value.has_gradient, result.made.gradient);
}

std::vector<size_t> segmentsOf(const Program& program, const std::vector<bool>& may_begin) {
  require(may_begin.size() == program.operators.size(), "for each operator it is said whether a segment may begin with it");
  std::vector<size_t> segment_of;  // by value, counted from 1; 0: a parameter, which all segments have
  for (const ProgramValue& value : program.values) {
    segment_of.push_back(value.enters ? 1 : 0);
  }
  for (const ProgramFetch& fetch : program.fetches) {
    segment_of.at(fetch.value) = 0;
  }
  std::vector<bool> is_sent(program.values.size(), false);
  std::vector<size_t> out = {0};
  const auto comesFromHere = [&](const ProgramRead& read) {
    return segment_of[read.value] == out.size() && (isTransfer(program, read) || is_sent[read.value]);
  };
  for (size_t number = 0; number < program.operators.size(); ++number) {
    const ProgramOperator& op = program.operators[number];
    if (may_begin[number] && std::any_of(op.reads.begin(), op.reads.end(), comesFromHere)) {
      out.push_back(number);
    }
    for (const ProgramResult& result : op.results) {
      segment_of[result.value] = out.size();
      is_sent[result.value] = isTransfer(program, result);
    }
  }
  if (std::any_of(program.leaving.begin(), program.leaving.end(), comesFromHere)) {
    out.push_back(program.operators.size());
  }
  return out;
}

}  // namespace xmesh::core
