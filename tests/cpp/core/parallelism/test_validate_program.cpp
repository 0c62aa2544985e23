// Programs of planned stages: what the validator lets through gives, on simulated devices, what one device gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallelism/collective_cost.h"
#include "core/parallelism/program.h"
#include "core/parallelism/program_run.h"

namespace xmesh::core {
namespace {

using program_run::Given;
using program_run::Misfit;
using program_run::onDevices;
using program_run::onOne;
using program_run::Outcome;
using program_run::Shape;
using program_run::Tensor;

/// Random programs that are right.
class Programs {
 public:
  explicit Programs(uint64_t seed) : random_(seed) {
    static const std::vector<Shape> kMeshes = {{2}, {3}, {4}, {2, 2}, {2, 3}, {3, 2}};
    program_.mesh_shape = kMeshes[pick(kMeshes.size())];
    extent_ = program_run::sizeOf(program_.mesh_shape);  // so that any axes divide any dim
  }

  Program make() {
    enter({extent_, extent_}, pick(4) != 0);
    const size_t count = 2 + pick(5);
    for (size_t number = 0; number < count; ++number) {
      addOperator(number);
    }
    for (size_t number = 0, wanted = 1 + pick(2); number < wanted; ++number) {
      program_.leaving.push_back(read(number == 0 ? program_.operators.back().results[0].value : anyMatrix(), randomEnd(2), true));
    }
    return program_;
  }

  size_t pick(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }

  Tensor tensor(const Shape& shape) {
    Tensor out = Tensor::zeros(shape);
    for (uint64_t& element : out.data) {
      element = pick(1000);
    }
    return out;
  }

  Given given(const Program& program) {
    Given out;
    for (size_t value = 0; value < program.values.size(); ++value) {
      if (program.values[value].enters) {
        out.entering.emplace(value, tensor(program.values[value].shape));
      }
    }
    for (const ProgramRead& read : program.leaving) {
      out.gradients.push_back(tensor(program.values[read.value].shape));
    }
    return out;
  }

  AxisState randomState(size_t num_dims, bool may_be_sum = true) {
    return static_cast<AxisState>(static_cast<int64_t>(pick(num_dims + (may_be_sum ? 2 : 1))) + (may_be_sum ? kPartialSum : kReplicated));
  }

  /// The cheapest way.
  std::vector<AxisMove> moves(size_t num_dims, const ValueState& from, const ValueState& to) {
    const auto found = costs_.find(num_dims);
    if (found == costs_.end()) {
      std::vector<AxisLinks> axes;
      for (const int64_t size : program_.mesh_shape) {
        axes.push_back({size, 1.0, axes.empty() ? 1.0 : 0.125});
      }
      costs_.emplace(std::piecewise_construct, std::forward_as_tuple(num_dims),
                     std::forward_as_tuple(Shape(num_dims, extent_), 8.0 * static_cast<double>(extent_), axes, collectiveCostModel("ring")));
      return moves(num_dims, from, to);
    }
    std::vector<AxisMove> out;
    ValueState state = from;
    for (const ConversionStep& step : found->second.steps(from, to)) {
      out.push_back({step.axis, state[step.axis], step.to[step.axis]});
      state = step.to;
    }
    return out;
  }

  /// Axis by axis, in any order: a way where no axis splits a dim that another one moves.
  std::vector<AxisMove> directMoves(const ValueState& from, const ValueState& to) {
    std::vector<size_t> axes(from.size());
    std::iota(axes.begin(), axes.end(), size_t{0});
    std::shuffle(axes.begin(), axes.end(), random_);
    std::vector<AxisMove> out;
    for (const size_t axis : axes) {
      if (from[axis] != to[axis]) {
        out.push_back({axis, from[axis], to[axis]});
      }
    }
    return out;
  }

 private:
  ValueState randomStates(size_t num_dims) {
    ValueState out;
    for (size_t axis = 0; axis < program_.mesh_shape.size(); ++axis) {
      out.push_back(randomState(num_dims));
    }
    return out;
  }
  ValueEnd randomEnd(size_t num_dims) { return {randomStates(num_dims), randomStates(num_dims)}; }

  /// What enters; some of it is kept in another way between steps.
  size_t enter(const Shape& shape, bool has_gradient) {
    const size_t number = program_.values.size();
    const ValueEnd& held =
        program_.values.emplace_back(ProgramValue{"entering" + std::to_string(number), shape, has_gradient, true, randomEnd(shape.size())}).held;
    if (pick(2) == 0) {
      ProgramFetch fetch{number, {}, {}};
      for (size_t axis = 0; axis < program_.mesh_shape.size(); ++axis) {
        fetch.kept.push_back(randomState(shape.size(), /*may_be_sum=*/false));
      }
      fetch.way.there = moves(shape.size(), fetch.kept, held.value);
      if (has_gradient) {
        fetch.way.back = moves(shape.size(), held.gradient, fetch.kept);
      }
      program_.fetches.push_back(std::move(fetch));
    }
    return number;
  }

  /// A matrix that is there, now and then one that enters.
  size_t anyMatrix() {
    std::vector<size_t> found;
    for (size_t value = 0; value < program_.values.size(); ++value) {
      if (program_.values[value].shape.size() == 2) {
        found.push_back(value);
      }
    }
    return pick(3) == 0 ? enter({extent_, extent_}, pick(3) != 0) : found[pick(found.size())];
  }

  ProgramRead read(size_t number, const ValueEnd& taken, bool can_give) {
    const ProgramValue& value = program_.values[number];
    ProgramRead out{number, taken, {}, can_give && value.has_gradient};
    out.way.there = moves(value.shape.size(), value.held.value, taken.value);
    if (out.gives_gradient) {
      out.way.back = moves(value.shape.size(), taken.gradient, value.held.gradient);
    }
    return out;
  }

  static LoopNest loopsOf(size_t kind) {
    const DimLoops ik{{0}, {2}};
    const DimLoops kj{{2}, {1}};
    const DimLoops ij{{0}, {1}};
    switch (kind) {
      case 0:  // a product, with a bias that is added once
        return {{"i", "j", "k"}, {}, {ik, kj, {{1}}}, {ij}, false, {2}};
      case 1:  // a product
        return {{"i", "j", "k"}, {}, {ik, kj}, {ij}, false, {}};
      case 2:
        return {{"i", "j"}, {}, {ij}, {ij}, false, {}};
      case 3:
        return {{"i", "j"}, {}, {ij, ij}, {ij}, true, {}};
      default:  // transposed
        return {{"i", "j"}, {}, {ij}, {{{1}, {0}}}, true, {}};
    }
  }

  static AxisState stateOf(const DimLoops& dims, AxisChoice choice, AxisState elsewhere, AxisState pass, AxisState later) {
    if (choice < 0) {
      return choice == kWhole ? kReplicated : choice == kPass ? pass : later;
    }
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      if (dims[dim][0] == static_cast<size_t>(choice)) {
        return static_cast<AxisState>(dim);
      }
    }
    return elsewhere;
  }

  void addOperator(size_t number) {
    static const std::vector<std::string> kNames = {"product", "product", "square", "sum", "sum"};
    const size_t kind = pick(kNames.size());
    ProgramOperator op{kNames[kind] + std::to_string(number), loopsOf(kind), {}, {}, {}};
    LoopNest& loops = op.loops;
    loops.extents.assign(loops.names.size(), extent_);
    for (size_t axis = 0; axis < program_.mesh_shape.size(); ++axis) {
      const auto choice = static_cast<AxisChoice>(pick(loops.names.size() + 3)) - 3;
      op.axes.push_back(choice == kPass && !loops.is_linear ? kWhole : choice);
    }
    std::vector<size_t> sources;
    bool has_gradient = false;
    for (const DimLoops& dims : loops.inputs) {
      sources.push_back(dims.size() == 1 ? enter({extent_}, true) : anyMatrix());
      has_gradient = has_gradient || program_.values[sources.back()].has_gradient;
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      ValueEnd taken;
      for (const AxisChoice choice : op.axes) {
        const bool is_once = kind == 0 && i == 2 && choice == 2;
        taken.value.push_back(stateOf(loops.inputs[i], choice, kReplicated, kPartialSum, kReplicated));
        taken.gradient.push_back(stateOf(loops.inputs[i], choice, is_once ? kReplicated : kPartialSum, kReplicated, kPartialSum));
      }
      op.reads.push_back(read(sources[i], taken, has_gradient));
    }
    ValueEnd made;
    for (const AxisChoice choice : op.axes) {
      made.value.push_back(stateOf(loops.outputs[0], choice, kPartialSum, kPartialSum, kReplicated));
      made.gradient.push_back(stateOf(loops.outputs[0], choice, kReplicated, kReplicated, kPartialSum));
    }
    const ValueEnd held = pick(2) == 0 ? made : randomEnd(2);
    ProgramResult result{program_.values.size(), made, {}};
    result.way.there = moves(2, made.value, held.value);
    if (has_gradient) {
      result.way.back = moves(2, held.gradient, made.gradient);
    }
    program_.values.push_back({"made" + std::to_string(number), {extent_, extent_}, has_gradient, false, held});
    op.results.push_back(std::move(result));
    program_.operators.push_back(std::move(op));
  }

  std::mt19937_64 random_;
  Program program_;
  int64_t extent_ = 1;
  std::map<size_t, ConversionCosts> costs_;
};

TEST(ValidateProgram, WhatIsRightPassesAndGivesWhatOneDeviceGives) {
  size_t num_collectives = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Programs programs(seed);
    const Program program = programs.make();
    EXPECT_NO_THROW(validateProgram(program)) << "seed " << seed;
    const Given given = programs.given(program);
    EXPECT_TRUE(onDevices(program, given) == onOne(program, given)) << "seed " << seed;
    for (const ProgramOperator& op : program.operators) {
      for (const ProgramRead& read : op.reads) {
        num_collectives += static_cast<size_t>(std::count_if(read.way.there.begin(), read.way.there.end(), isCollective));
      }
    }
  }
  EXPECT_GT(num_collectives, 500U);
}

/// Changes one thing. Returns what.
std::string corrupt(Program& program, Programs& random) {
  std::vector<std::pair<std::string, ValueEnd*>> ends;
  std::vector<std::pair<std::string, std::vector<AxisMove>*>> ways;
  for (ProgramValue& value : program.values) {
    ends.emplace_back(value.name + " held", &value.held);
  }
  const auto addRead = [&](ProgramRead& read, const std::string& where) {
    ends.emplace_back(where + " taken", &read.taken);
    ways.emplace_back(where + " there", &read.way.there);
    ways.emplace_back(where + " back", &read.way.back);
  };
  for (ProgramOperator& op : program.operators) {
    for (ProgramRead& read : op.reads) {
      addRead(read, op.name + " " + program.values[read.value].name);
    }
    ends.emplace_back(op.name + " made", &op.results[0].made);
    ways.emplace_back(op.name + " result there", &op.results[0].way.there);
    ways.emplace_back(op.name + " result back", &op.results[0].way.back);
  }
  for (ProgramRead& read : program.leaving) {
    addRead(read, "leaving " + program.values[read.value].name);
  }
  for (ProgramFetch& fetch : program.fetches) {
    ways.emplace_back("fetch of " + program.values[fetch.value].name, &fetch.way.there);
    ways.emplace_back("fetch of " + program.values[fetch.value].name + " back", &fetch.way.back);
  }
  const size_t what = random.pick(11);
  if (what == 10 && !program.fetches.empty()) {
    ProgramFetch& fetch = program.fetches[random.pick(program.fetches.size())];
    if (random.pick(3) == 0) {
      fetch.value = random.pick(program.values.size());
      return "a fetch of another value";
    }
    fetch.kept[random.pick(fetch.kept.size())] = random.randomState(2);
    return "how a parameter is kept";
  }
  if (what >= 8) {  // an end changed with its way, or other moves to the same end
    ProgramOperator& op = program.operators[random.pick(program.operators.size())];
    const bool is_read = random.pick(2) == 0;
    ProgramRead& read = op.reads[random.pick(op.reads.size())];
    ProgramResult& result = op.results[0];
    const ProgramValue& value = program.values[is_read ? read.value : result.value];
    ValueEnd& end = is_read ? read.taken : result.made;
    ProgramWay& way = is_read ? read.way : result.way;
    const size_t num_dims = value.shape.size();
    if (what != 9) {
      ValueState& state = random.pick(2) == 0 ? end.value : end.gradient;
      state[random.pick(state.size())] = random.randomState(num_dims);
    }
    const auto between = [&](const ValueState& from, const ValueState& to) {
      return what != 9 ? random.moves(num_dims, from, to) : random.directMoves(from, to);
    };
    way.there = is_read ? between(value.held.value, end.value) : between(end.value, value.held.value);
    if (is_read ? read.gives_gradient : value.has_gradient) {
      way.back = is_read ? between(end.gradient, value.held.gradient) : between(value.held.gradient, end.gradient);
    }
    return op.name + " " + value.name + (what != 9 ? ", an end with its way" : ", other moves");
  }
  if (what == 0) {  // a state changed
    auto& [where, end] = ends[random.pick(ends.size())];
    ValueState& state = random.pick(2) == 0 ? end->value : end->gradient;
    state[random.pick(state.size())] = random.randomState(2);
    return where + ", a state";
  }
  if (what < 5) {
    auto& [where, way] = ways[random.pick(ways.size())];
    if (way->empty()) {
      way->push_back({random.pick(program.mesh_shape.size()), random.randomState(2), random.randomState(2)});
      return where + ", a move more";
    }
    const auto at = way->begin() + static_cast<std::ptrdiff_t>(random.pick(way->size()));
    if (what == 1) {
      way->erase(at);
      return where + ", a move less";
    }
    if (what == 2) {
      way->insert(at, *at);
      return where + ", a move doubled";
    }
    if (what == 3) {
      way->clear();
      return where + ", no moves";
    }
    (random.pick(2) == 0 ? at->before : at->after) = random.randomState(2);
    return where + ", a move's end";
  }
  ProgramOperator& op = program.operators[random.pick(program.operators.size())];
  if (what == 5) {
    op.axes[random.pick(op.axes.size())] = static_cast<AxisChoice>(random.pick(op.loops.names.size() + 3)) - 3;
    return op.name + ", an axis";
  }
  if (what == 6) {
    std::swap(op, program.operators[random.pick(program.operators.size())]);
    return "operators swapped";
  }
  op.reads[random.pick(op.reads.size())].value = random.pick(program.values.size());
  return op.name + ", another value";
}

TEST(ValidateProgram, WhatIsWrongIsRefusedOrEqual) {
  size_t num_refused = 0;
  size_t num_other = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    Programs programs(seed);
    const Program program = programs.make();
    Program changed = program;
    const std::string what = corrupt(changed, programs);
    try {
      validateProgram(changed);
    } catch (const InvalidArgument& error) {
      ++num_refused;
      EXPECT_NE(std::string(error.what()).find(' '), std::string::npos);
      continue;
    }
    const Given given = programs.given(changed);
    try {
      EXPECT_TRUE(onDevices(changed, given) == onOne(changed, given)) << "seed " << seed << ": " << what;
    } catch (const Misfit&) {
      ADD_FAILURE() << "seed " << seed << ": " << what << " does not fit";
    }
    ++num_other;
  }
  EXPECT_GT(num_refused, 2000U) << num_other << " passed";
}

TEST(ValidateProgram, NamesTheOperatorAndTheValue) {
  const LoopNest loops{{"i", "j"}, {4, 4}, {{{0}, {1}}}, {{{0}, {1}}}, false, {}};
  Program program;
  program.mesh_shape = {2};
  program.values = {{"x", {4, 4}, true, true, {{0}, {0}}}, {"y", {4, 4}, true, false, {{0}, {0}}}};
  program.operators = {{"square", loops, {0}, {{0, {{0}, {0}}, {}, true}}, {{1, {{0}, {0}}, {}}}}};
  program.leaving = {{1, {{kReplicated}, {0}}, {{{0, 0, kReplicated}}, {}}, true}};
  EXPECT_NO_THROW(validateProgram(program));
  const auto refusal = [&](const std::function<void(Program&)>& change) -> std::string {
    Program changed = program;
    change(changed);
    try {
      validateProgram(changed);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal([](Program& p) { p.operators[0].reads[0].taken.value = {1}; }), "operator square: value x forward comes as S0, expected S1");
  EXPECT_EQ(refusal([](Program& p) { p.operators[0].axes = {1}; }), "operator square: value x is taken as S0 along axis 0, expected S1");
  EXPECT_EQ(refusal([](Program& p) { p.leaving[0].way.there.clear(); }), "what leaves: value y forward comes as S0, expected R");
  EXPECT_EQ(refusal([](Program& p) { std::swap(p.values[0].enters, p.values[1].enters); }), "operator square: value x is read before it is made");
  EXPECT_EQ(refusal([](Program& p) {
              p.values[1].shape = {4, 1};  // by the other dim, which cannot be shared out
              p.operators[0].loops.outputs = {{{0}, {}}};
              p.leaving[0].way.there = {{0, 0, 1}, {0, 1, kReplicated}};
            }),
            "what leaves: value y forward lies on its way as S1: dim 1 of 1 in 2 parts");
  EXPECT_EQ(refusal([](Program& p) { p.mesh_shape = {3}; }), "value x is held as S0: dim 0 of 4 in 3 parts");
  EXPECT_EQ(refusal([](Program& p) { p.operators[0].reads[0].gives_gradient = false; }), "operator square: value x is given no gradient");
  EXPECT_EQ(refusal([](Program& p) { p.values[1].has_gradient = false; }),
            "operator square: value x is given a gradient that there is not, or nobody wants");
  EXPECT_EQ(refusal([](Program& p) { p.fetches = {{0, {kReplicated}, {}}}; }), "what is fetched: value x forward comes as R, expected S0");
  EXPECT_EQ(refusal([](Program& p) { p.fetches = {{0, {kReplicated}, {{{0, kReplicated, 0}}, {}}}}; }),
            "what is fetched: value x its gradient comes as S0, expected R");
  EXPECT_EQ(refusal([](Program& p) { p.fetches = {{1, {0}, {}}}; }), "what is fetched: value y is fetched twice, or made here");
  EXPECT_EQ(refusal([](Program& p) { p.operators[0].axes = {kPass}; }), "operator square passes partial sums on, but is not linear");
}

TEST(ValidateProgram, SegmentsEndAtCollectives) {
  const LoopNest loops{{"i", "j"}, {4, 4}, {{{0}, {1}}}, {{{0}, {1}}}, false, {}};
  const ValueEnd rows{{0}, {0}};
  const ValueEnd whole{{kReplicated}, {kReplicated}};
  Program program;
  program.mesh_shape = {2};
  for (const std::string name : {"x", "a", "b", "c", "d"}) {
    program.values.push_back({name, {4, 4}, false, name == "x", name == "b" ? whole : rows});
  }
  const auto square = [&](const std::string& name, size_t from, size_t to, const ProgramWay& in, const ProgramWay& out) {
    program.operators.push_back({name, loops, {0}, {{from, rows, in, false}}, {{to, rows, out}}});
  };
  square("first", 0, 1, {}, {});
  square("second", 1, 2, {}, {{{0, 0, kReplicated}}, {}});  // b is gathered
  square("third", 1, 3, {}, {});                            // reads a: in the same segment
  square("fourth", 2, 4, {{{0, kReplicated, 0}}, {}}, {});
  validateProgram(program);
  const std::vector<bool> anywhere(4, true);
  EXPECT_EQ(segmentsOf(program, anywhere), (std::vector<size_t>{0, 3}));
  EXPECT_TRUE(isTransfer(program, program.operators[1].results[0]));
  EXPECT_FALSE(isTransfer(program, program.operators[3].reads[0])) << "each slices what it has";
  Program summed = program;  // the gradient stays in summands along the other axis, and has no way to go
  summed.mesh_shape = {2, 2};
  summed.values[3].has_gradient = true;
  summed.values[3].held = {{0, kReplicated}, {0, kPartialSum}};
  summed.operators[3].reads[0] = {3, {{kReplicated, kReplicated}, {0, kPartialSum}}, {{{0, 0, kReplicated}}, {}}, true};
  EXPECT_FALSE(isTransfer(summed, summed.operators[3].reads[0]));
  summed.operators[3].reads[0].gives_gradient = false;
  EXPECT_TRUE(isTransfer(summed, summed.operators[3].reads[0]));
  EXPECT_EQ(segmentsOf(program, {true, true, true, false}), (std::vector<size_t>{0})) << "no segment may begin there";
  program.leaving = {{4, whole, {{{0, 0, kReplicated}}, {}}, false}};
  EXPECT_EQ(segmentsOf(program, anywhere), (std::vector<size_t>{0, 3, 4})) << "what leaves is gathered behind the last";
  EXPECT_THROW(static_cast<void>(segmentsOf(program, {})), InvalidArgument);
}

}  // namespace
}  // namespace xmesh::core
