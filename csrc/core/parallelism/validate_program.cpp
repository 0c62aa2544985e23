#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/parallelism/program.h"

namespace xmesh::core {
namespace {

bool isSpecial(AxisChoice choice) { return choice < 0; }

/// The dim that a loop runs over; none where it runs over none of this tensor's.
std::optional<size_t> dimOf(const DimLoops& dims, AxisChoice loop) {
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    if (std::find(dims[dim].begin(), dims[dim].end(), static_cast<size_t>(loop)) != dims[dim].end()) {
      return dim;
    }
  }
  return std::nullopt;
}

/// What follows from one axis's choice, for one tensor of the operator.
class AxisRule {
 public:
  AxisRule(const LoopNest& loops, AxisChoice choice) : loops_(loops), choice_(choice) {}

  AxisState madeValue(const DimLoops& output) const { return of(output, kPartialSum, {kReplicated, kPartialSum, kReplicated}); }
  AxisState madeGradient(const DimLoops& output) const { return of(output, kReplicated, {kReplicated, kReplicated, kPartialSum}); }
  AxisState takenValue(const DimLoops& input) const { return of(input, kReplicated, {kReplicated, kPartialSum, kReplicated}); }
  /// Devices that share a loop which does not run over the input have summands of its gradient. They all have the same where the input stands outside
  /// of the loops that add up, and this is one of these.
  AxisState takenGradient(size_t input) const {
    const bool is_once = std::find(loops_.once.begin(), loops_.once.end(), input) != loops_.once.end();
    const bool adds_up = !isSpecial(choice_) && !loops_.outputs.empty() && !dimOf(loops_.outputs.front(), choice_).has_value();
    return of(loops_.inputs[input], is_once && adds_up ? kReplicated : kPartialSum, {kReplicated, kReplicated, kPartialSum});
  }

 private:
  struct Special {
    AxisState whole;
    AxisState pass;
    AxisState later;
  };
  AxisState of(const DimLoops& dims, AxisState elsewhere, Special special) const {
    if (isSpecial(choice_)) {
      return choice_ == kWhole ? special.whole : choice_ == kPass ? special.pass : special.later;
    }
    const std::optional<size_t> dim = dimOf(dims, choice_);
    return dim.has_value() ? static_cast<AxisState>(*dim) : elsewhere;
  }

  const LoopNest& loops_;
  AxisChoice choice_;
};

class ProgramCheck {
 public:
  explicit ProgramCheck(const Program& program) : program_(program), is_there_(program.values.size()) {}

  void run() {
    require(!program_.mesh_shape.empty(), "the program has a mesh without axes");
    for (const int64_t size : program_.mesh_shape) {
      require(size >= 1, "the program has a mesh axis of " + std::to_string(size) + " devices");
    }
    for (size_t i = 0; i < program_.values.size(); ++i) {
      const ProgramValue& value = program_.values[i];
      checkEnd(value, value.held, "is held");
      is_there_[i] = value.enters;
    }
    for (const ProgramOperator& op : program_.operators) {
      where_ = "operator " + op.name;
      checkOperator(op);
    }
    checkFetches();
    where_ = "what leaves";
    for (const ProgramRead& read : program_.leaving) {
      checkRead(read, /*can_give=*/true);
    }
  }

 private:
  [[noreturn]] void fail(const ProgramValue& value, const std::string& what) const {
    throw InvalidArgument((where_.empty() ? "" : where_ + ": ") + "value " + value.name + " " + what);
  }

  void check(bool holds, const ProgramValue& value, const std::string& what) const {
    if (!holds) {
      fail(value, what);
    }
  }

  const ProgramValue& valueOf(size_t number) const {
    require(number < program_.values.size(), where_ + " names value " + std::to_string(number) + " of " + std::to_string(program_.values.size()));
    return program_.values[number];
  }

  /// A state that the value may have: its axes divide the dims that they shard.
  void checkState(const ProgramValue& value, const ValueState& state, const std::string& what) const {
    const std::string shown = what + " as " + valueStateStr(state);
    check(state.size() == program_.mesh_shape.size(), value, shown + " on a mesh of " + std::to_string(program_.mesh_shape.size()) + " axes");
    std::vector<int64_t> parts(value.shape.size(), 1);
    for (size_t axis = 0; axis < state.size(); ++axis) {
      check(state[axis] >= kPartialSum && state[axis] < static_cast<AxisState>(value.shape.size()), value, shown + ", which it has no dim for");
      if (state[axis] >= 0) {
        parts[static_cast<size_t>(state[axis])] *= program_.mesh_shape[axis];
      }
    }
    for (size_t dim = 0; dim < parts.size(); ++dim) {
      check(value.shape[dim] % parts[dim] == 0, value,
            shown + ": dim " + std::to_string(dim) + " of " + std::to_string(value.shape[dim]) + " in " + std::to_string(parts[dim]) + " parts");
    }
  }

  void checkEnd(const ProgramValue& value, const ValueEnd& end, const std::string& what) const {
    checkState(value, end.value, what);
    if (value.has_gradient) {
      checkState(value, end.gradient, what + ", its gradient,");
    }
  }

  /// Each move begins where the value lies, and keeps it. Where several axes shard one dim the one further left splits first, so only the last of
  /// them can be changed, or added.
  void checkMoves(const ProgramValue& value, const std::vector<AxisMove>& moves, ValueState state, const ValueState& to,
                  const std::string& what) const {
    for (const AxisMove& move : moves) {
      check(move.axis < state.size(), value, what + " moves along axis " + std::to_string(move.axis));
      check(move.before == state[move.axis], value,
            what + " moves axis " + std::to_string(move.axis) + " from " + valueStateStr({move.before}) + ", but lies as " + valueStateStr(state));
      check(move.before != move.after, value, what + " moves axis " + std::to_string(move.axis) + " to where it is");
      for (const AxisState dim : {move.before, move.after}) {
        const auto later = state.begin() + static_cast<std::ptrdiff_t>(move.axis) + 1;
        check(dim < 0 || std::find(later, state.end(), dim) == state.end(), value,
              what + " moves axis " + std::to_string(move.axis) + " of " + valueStateStr(state) + " under an axis that splits the dim further");
      }
      state[move.axis] = move.after;
      checkState(value, state, what + " lies on its way");
    }
    check(state == to, value, what + " comes as " + valueStateStr(state) + ", expected " + valueStateStr(to));
  }

  void checkWay(const ProgramValue& value, const ProgramWay& way, const ValueEnd& from, const ValueEnd& to, bool has_gradient) const {
    checkMoves(value, way.there, from.value, to.value, "forward");
    if (has_gradient) {
      checkMoves(value, way.back, to.gradient, from.gradient, "its gradient");
    } else {
      check(way.back.empty(), value, "has a way back, but no gradient");
    }
  }

  /// `can_give`: the reader has a gradient to give.
  void checkRead(const ProgramRead& read, bool can_give) const {
    const ProgramValue& value = valueOf(read.value);
    check(is_there_[read.value], value, "is read before it is made");
    check(read.gives_gradient == (can_give && value.has_gradient), value,
          read.gives_gradient ? "is given a gradient that there is not, or nobody wants" : "is given no gradient");
    checkEnd(value, read.taken, "is taken");
    checkWay(value, read.way, value.held, read.taken, read.gives_gradient);
  }

  void checkResult(const ProgramResult& result) const {
    const ProgramValue& value = valueOf(result.value);
    check(!value.enters && !is_there_[result.value], value, "is made twice");
    checkEnd(value, result.made, "is made");
    checkWay(value, result.way, result.made, value.held, value.has_gradient);
  }

  /// A parameter's gradient comes home to where the parameter is kept.
  void checkFetches() {
    where_ = "what is fetched";
    std::vector<bool> is_fetched(program_.values.size());
    for (const ProgramFetch& fetch : program_.fetches) {
      const ProgramValue& value = valueOf(fetch.value);
      check(value.enters && !is_fetched[fetch.value], value, "is fetched twice, or made here");
      is_fetched[fetch.value] = true;
      checkState(value, fetch.kept, "is kept");
      check(std::find(fetch.kept.begin(), fetch.kept.end(), kPartialSum) == fetch.kept.end(), value, "is kept in summands");
      checkWay(value, fetch.way, {fetch.kept, fetch.kept}, value.held, value.has_gradient);
    }
  }

  void checkOperator(const ProgramOperator& op) {
    checkLoops(op);
    const bool has_gradient =
        std::any_of(op.results.begin(), op.results.end(), [&](const ProgramResult& result) { return valueOf(result.value).has_gradient; });
    for (size_t i = 0; i < op.reads.size(); ++i) {
      checkRead(op.reads[i], has_gradient);
      const ProgramRead& read = op.reads[i];
      const ProgramValue& value = valueOf(read.value);
      for (size_t axis = 0; axis < op.axes.size(); ++axis) {
        const AxisRule rule(op.loops, op.axes[axis]);
        checkFollows(value, read.taken.value[axis], rule.takenValue(op.loops.inputs[i]), axis, "is taken");
        if (read.gives_gradient) {
          checkFollows(value, read.taken.gradient[axis], rule.takenGradient(i), axis, "has its gradient given");
        }
      }
    }
    for (size_t i = 0; i < op.results.size(); ++i) {
      checkResult(op.results[i]);
      const ProgramResult& result = op.results[i];
      const ProgramValue& value = valueOf(result.value);
      for (size_t axis = 0; axis < op.axes.size(); ++axis) {
        const AxisRule rule(op.loops, op.axes[axis]);
        checkFollows(value, result.made.value[axis], rule.madeValue(op.loops.outputs[i]), axis, "is made");
        if (value.has_gradient) {
          checkFollows(value, result.made.gradient[axis], rule.madeGradient(op.loops.outputs[i]), axis, "wants its gradient");
        }
      }
    }
    for (const ProgramResult& result : op.results) {
      is_there_[result.value] = true;
    }
  }

  void checkFollows(const ProgramValue& value, AxisState found, AxisState wanted, size_t axis, const std::string& what) const {
    check(found == wanted, value,
          what + " as " + valueStateStr({found}) + " along axis " + std::to_string(axis) + ", expected " + valueStateStr({wanted}));
  }

  /// Loops fit the tensors, and axes the loops.
  void checkLoops(const ProgramOperator& op) const {
    const LoopNest& loops = op.loops;
    const auto wants = [&](bool holds, const std::string& what) { require(holds, where_ + " " + what); };
    wants(loops.names.size() == loops.extents.size(), "has loops without names");
    wants(loops.inputs.size() == op.reads.size() && loops.outputs.size() == op.results.size(), "has loops for other tensors than it reads and makes");
    wants(op.axes.size() == program_.mesh_shape.size(),
          "has " + std::to_string(op.axes.size()) + " axes on a mesh of " + std::to_string(program_.mesh_shape.size()));
    for (size_t i = 0; i < loops.inputs.size(); ++i) {
      checkDims(valueOf(op.reads[i].value), loops.inputs[i], loops);
    }
    for (size_t i = 0; i < loops.outputs.size(); ++i) {
      checkDims(valueOf(op.results[i].value), loops.outputs[i], loops);
      for (size_t loop = 0; loop < loops.names.size(); ++loop) {
        const auto number = static_cast<AxisChoice>(loop);
        wants(dimOf(loops.outputs[i], number).has_value() == dimOf(loops.outputs.front(), number).has_value(),
              "has loop " + loops.names[loop] + " over some of its outputs");
      }
    }
    std::vector<int64_t> parts(loops.names.size(), 1);
    for (size_t axis = 0; axis < op.axes.size(); ++axis) {
      const AxisChoice choice = op.axes[axis];
      wants(choice >= kLater && choice < static_cast<AxisChoice>(loops.names.size()), "has no loop " + std::to_string(choice));
      wants(choice != kPass || loops.is_linear, "passes partial sums on, but is not linear");
      if (!isSpecial(choice)) {
        parts[static_cast<size_t>(choice)] *= program_.mesh_shape[axis];
      }
    }
    for (size_t loop = 0; loop < parts.size(); ++loop) {
      wants(loops.extents[loop] >= 1 && loops.extents[loop] % parts[loop] == 0,
            "has loop " + loops.names[loop] + " of " + std::to_string(loops.extents[loop]) + " in " + std::to_string(parts[loop]) + " parts");
    }
  }

  void checkDims(const ProgramValue& value, const DimLoops& dims, const LoopNest& loops) const {
    check(dims.size() == value.shape.size(), value,
          "has loops over " + std::to_string(dims.size()) + " dims, and " + std::to_string(value.shape.size()));
    std::vector<bool> is_used(loops.names.size());
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      for (const size_t loop : dims[dim]) {
        check(loop < loops.names.size() && !is_used[loop], value, "has a loop that there is not, or one over two dims");
        is_used[loop] = true;
        check(value.shape[dim] % loops.extents[loop] == 0, value,
              "has loop " + loops.names[loop] + " of " + std::to_string(loops.extents[loop]) + " over " + std::to_string(value.shape[dim]) +
                  " elements");
      }
    }
  }

  const Program& program_;
  std::string where_;
  std::vector<bool> is_there_;
};

}  // namespace

void validateProgram(const Program& program) { ProgramCheck(program).run(); }

}  // namespace xmesh::core
