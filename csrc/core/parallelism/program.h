#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/parallelism/conversion_cost.h"

namespace xmesh::core {

/// By dim of a tensor the loops that may run over it, by number; none where each device needs all of the dim.
using DimLoops = std::vector<std::vector<size_t>>;

/// An operator as nested loops: which of its dims may be sharded. A loop over none of the output's dims adds up.
struct LoopNest {
  std::vector<std::string> names;  ///< of the loops
  std::vector<int64_t> extents;    ///< by loop; what shards it divides it
  std::vector<DimLoops> inputs;    ///< by tensor that is read
  std::vector<DimLoops> outputs;   ///< by tensor that is made; each loop is in all of them or in none
  bool is_linear = false;          ///< partial sums of all inputs give partial sums of the outputs
  std::vector<size_t> once;        ///< inputs that stand outside of the loops that add up: a bias is added once
};

/// What a mesh axis does with an operator: the loop of that number is sharded, or one of these.
using AxisChoice = int32_t;
constexpr AxisChoice kWhole = -1;  ///< every device does the same
constexpr AxisChoice kPass = -2;   ///< partial sums go through as they are
constexpr AxisChoice kLater = -3;  ///< every device does the same forward, and backward with its summand of the gradient

/// How a value changes along one axis.
struct AxisMove {
  size_t axis = 0;
  AxisState before = kReplicated;
  AxisState after = kReplicated;
  bool operator==(const AxisMove&) const = default;
};

/// How a value comes from one end to another, and its gradient back; empty where nothing has to change, or there is no gradient.
struct ProgramWay {
  std::vector<AxisMove> there;
  std::vector<AxisMove> back;
};

/// A tensor that flows through a stage.
struct ProgramValue {
  std::string name;
  std::vector<int64_t> shape;
  bool has_gradient = false;
  bool enters = false;  ///< it is there from the beginning: an argument, a parameter, another stage's
  ValueEnd held;        ///< how its readers find it, and how the sum of their gradients lies
};

/// A value as one reader takes it from where it is held.
struct ProgramRead {
  size_t value = 0;
  ValueEnd taken;
  ProgramWay way;
  bool gives_gradient = false;
};

/// A value as its maker leaves it, and its way to where it is held.
struct ProgramResult {
  size_t value = 0;
  ValueEnd made;
  ProgramWay way;
};

/// A parameter as it is kept between steps, and its way to where readers find it, its gradient's back.
struct ProgramFetch {
  size_t value = 0;
  ValueState kept;
  ProgramWay way;
};

struct ProgramOperator {
  std::string name;
  LoopNest loops;
  std::vector<AxisChoice> axes;  ///< by mesh axis
  std::vector<ProgramRead> reads;
  std::vector<ProgramResult> results;
};

/// What the devices of a stage do with a microbatch, as data: operators in order, and how each value lies on its way. Backward is the same in the
/// other order: an operator's gradients go back by the ways that its values came. It names no collective: a move of an axis is one, or what each
/// device does by itself.
struct Program {
  std::vector<int64_t> mesh_shape;
  std::vector<ProgramValue> values;
  std::vector<ProgramOperator> operators;
  std::vector<ProgramFetch> fetches;  ///< parameters, each of which enters; once a step, or in each microbatch
  std::vector<ProgramRead> leaving;   ///< what goes to other stages, or to the model's caller
};

/// Follows every value and its gradient through the program. Every tensor lies where an operator wants it, every way leads where it says, by moves
/// that keep the value; what operators make and want follows from their loops and axes. It shares no code with what plans.
/// Throws InvalidArgument, which names the operator and the value that do not fit.
void validateProgram(const Program& program);

/// Whether devices have to talk to each other for a move. To slice, and to take what all have for a sum that the first has all of, they need not.
inline bool isCollective(const AxisMove& move) { return move.before != kReplicated && move.before != move.after && move.after != kPartialSum; }

/// Whether a value comes to its reader, or from its maker to where it is held, by a transfer among the devices: one that leaves nobody summands, and
/// nobody summands of the gradient. Such summands are made and taken within a segment, by collectives.
bool isTransfer(const Program& program, const ProgramRead& read);
bool isTransfer(const Program& program, const ProgramResult& result);

/// Where segments begin. A segment is what is computed between transfers. One begins with each operator that reads something which comes to it by a
/// transfer from the segment before. The first has what enters, and no operator where the first one reads that so; the last has what leaves, and none
/// where that comes to it so.
/// `may_begin`: by operator whether a segment may begin with it.
std::vector<size_t> segmentsOf(const Program& program, const std::vector<bool>& may_begin);

}  // namespace xmesh::core
