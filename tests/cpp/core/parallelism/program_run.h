#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/parallelism/program.h"

/// Programs, run on simulated devices and on none: the oracle of validateProgram. Numbers are whole and wrap around, so that sums are exact in any
/// order.
namespace xmesh::core::program_run {

using Shape = std::vector<int64_t>;

inline int64_t sizeOf(const Shape& shape) { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

struct Tensor {
  Shape shape;
  std::vector<uint64_t> data;

  static Tensor zeros(Shape shape) {
    Tensor out{std::move(shape), {}};
    out.data.resize(static_cast<size_t>(sizeOf(out.shape)));
    return out;
  }
  bool operator==(const Tensor&) const = default;
};

/// Does not fit: what a program that is wrong comes to.
struct Misfit {};

inline void expect(bool holds) {
  if (!holds) {
    throw Misfit();
  }
}

/// All points of a grid, row-major.
inline std::vector<Shape> grid(const Shape& shape) {
  std::vector<Shape> out{{}};
  for (const int64_t extent : shape) {
    std::vector<Shape> longer;
    for (const Shape& point : out) {
      for (int64_t i = 0; i < extent; ++i) {
        longer.push_back(point);
        longer.back().push_back(i);
      }
    }
    out = std::move(longer);
  }
  return out;
}

inline size_t indexOf(const Shape& shape, const Shape& point) {
  int64_t out = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    out = out * shape[dim] + point[dim];
  }
  return static_cast<size_t>(out);
}

/// The `at`-th of `count` equal parts along a dim.
inline Tensor chunk(const Tensor& whole, size_t dim, int64_t at, int64_t count) {
  expect(dim < whole.shape.size() && whole.shape[dim] % count == 0);
  Shape shape = whole.shape;
  shape[dim] /= count;
  Tensor out = Tensor::zeros(shape);
  for (const Shape& point : grid(shape)) {
    Shape from = point;
    from[dim] += at * shape[dim];
    out.data[indexOf(shape, point)] = whole.data[indexOf(whole.shape, from)];
  }
  return out;
}

inline Tensor joined(const std::vector<Tensor>& parts, size_t dim) {
  expect(dim < parts[0].shape.size());
  Shape shape = parts[0].shape;
  shape[dim] *= static_cast<int64_t>(parts.size());
  Tensor out = Tensor::zeros(shape);
  for (size_t at = 0; at < parts.size(); ++at) {
    expect(parts[at].shape == parts[0].shape);
    for (const Shape& point : grid(parts[at].shape)) {
      Shape to = point;
      to[dim] += static_cast<int64_t>(at) * parts[at].shape[dim];
      out.data[indexOf(shape, to)] = parts[at].data[indexOf(parts[at].shape, point)];
    }
  }
  return out;
}

inline Tensor sum(const std::vector<Tensor>& parts) {
  Tensor out = Tensor::zeros(parts[0].shape);
  for (const Tensor& part : parts) {
    expect(part.shape == out.shape);
    for (size_t i = 0; i < out.data.size(); ++i) {
      out.data[i] += part.data[i];
    }
  }
  return out;
}

/// A value on a mesh: a part for each device, row-major.
class Parts {
 public:
  Parts(Shape mesh, std::vector<Tensor> parts) : mesh_(std::move(mesh)), parts_(std::move(parts)) {}

  /// Axis by axis, the one further left first; of a sum the first device has all.
  static Parts of(const Shape& mesh, const Tensor& whole, const ValueState& state) {
    std::vector<Tensor> parts;
    for (const Shape& device : grid(mesh)) {
      Tensor part = whole;
      for (size_t axis = 0; axis < mesh.size(); ++axis) {
        if (state[axis] >= 0) {
          part = chunk(part, static_cast<size_t>(state[axis]), device[axis], mesh[axis]);
        } else if (state[axis] == kPartialSum && device[axis] > 0) {
          part = Tensor::zeros(part.shape);
        }
      }
      parts.push_back(std::move(part));
    }
    return {mesh, std::move(parts)};
  }

  const std::vector<Tensor>& parts() const { return parts_; }

  void move(const AxisMove& move) {
    expect(move.axis < mesh_.size());
    const int64_t size = mesh_[move.axis];
    std::vector<Tensor> out(parts_.size());
    for (const Shape& device : grid(mesh_)) {
      const int64_t at = device[move.axis];
      const Tensor& mine = parts_[indexOf(mesh_, device)];
      const std::vector<Tensor> line = lineOf(device, move.axis);
      Tensor& made = out[indexOf(mesh_, device)];
      const auto from = static_cast<size_t>(move.before);
      const auto to = static_cast<size_t>(move.after);
      if (move.before == kReplicated) {
        made = move.after == kPartialSum   ? (at == 0 ? mine : Tensor::zeros(mine.shape))
               : move.after == kReplicated ? mine
                                           : chunk(mine, to, at, size);
      } else if (move.before == kPartialSum) {
        made = move.after == kPartialSum ? mine : sum(line);
        made = move.after >= 0 ? chunk(made, to, at, size) : made;
      } else if (move.after == kReplicated) {
        made = joined(line, from);
      } else if (move.after == kPartialSum) {
        std::vector<Tensor> padded(line.size(), Tensor::zeros(mine.shape));
        padded[static_cast<size_t>(at)] = mine;
        made = joined(padded, from);
      } else {
        std::vector<Tensor> pieces;
        for (const Tensor& other : line) {
          pieces.push_back(chunk(other, to, at, size));
        }
        made = joined(pieces, from);
      }
    }
    parts_ = std::move(out);
  }

  void move(const std::vector<AxisMove>& moves) {
    for (const AxisMove& one : moves) {
      move(one);
    }
  }

  /// All of the value, if its devices have it as the state says.
  Tensor whole(const ValueState& state) const {
    Parts rest = *this;
    for (size_t axis = mesh_.size(); axis-- > 0;) {
      if (state[axis] == kReplicated) {
        for (const Shape& device : grid(mesh_)) {
          expect(rest.parts_[indexOf(mesh_, device)] == rest.lineOf(device, axis)[0]);
        }
      } else {
        rest.move({axis, state[axis], kReplicated});
      }
    }
    return rest.parts_[0];
  }

 private:
  /// The parts of the devices along an axis.
  std::vector<Tensor> lineOf(Shape device, size_t axis) const {
    std::vector<Tensor> out;
    for (int64_t at = 0; at < mesh_[axis]; ++at) {
      device[axis] = at;
      out.push_back(parts_[indexOf(mesh_, device)]);
    }
    return out;
  }

  Shape mesh_;
  std::vector<Tensor> parts_;
};

/// The element of a tensor at a point of the loops that run over it.
inline size_t placeOf(const Tensor& tensor, const DimLoops& dims, const Shape& point) {
  Shape place;
  for (const std::vector<size_t>& dim : dims) {
    place.push_back(point[dim.at(0)]);
  }
  return indexOf(tensor.shape, place);
}

inline uint64_t at(const Tensor& tensor, const DimLoops& dims, const Shape& point) { return tensor.data[placeOf(tensor, dims, point)]; }
inline uint64_t& at(Tensor& tensor, const DimLoops& dims, const Shape& point) { return tensor.data[placeOf(tensor, dims, point)]; }

/// What an operator computes, by the first word of its name: "product" of all inputs over its loops, plus those that stand outside; "sum" of its
/// inputs; "square" of one.
class Kernel {
 public:
  /// `adds_once`: this device adds what stands outside of the loops that add up.
  Kernel(const ProgramOperator& op, bool adds_once) : op_(op), adds_once_(adds_once) {}

  Tensor forward(const std::vector<Tensor>& inputs) const {
    Tensor out = Tensor::zeros(outputShape(inputs));
    for (const Shape& point : points(inputs, out.shape)) {
      uint64_t made = is("sum") ? 0 : 1;
      for (const size_t i : factors()) {
        const uint64_t x = at(inputs[i], op_.loops.inputs[i], point);
        made = is("sum") ? made + x : is("square") ? x * x : made * x;
      }
      at(out, op_.loops.outputs[0], point) += made;
    }
    if (adds_once_) {
      for (const size_t i : op_.loops.once) {
        for (const Shape& point : pointsOf(out.shape, op_.loops.outputs[0])) {
          at(out, op_.loops.outputs[0], point) += at(inputs[i], op_.loops.inputs[i], point);
        }
      }
    }
    return out;
  }

  Tensor backward(const std::vector<Tensor>& inputs, const Tensor& gradient, size_t wanted) const {
    Tensor out = Tensor::zeros(inputs[wanted].shape);
    const DimLoops& dims = op_.loops.inputs[wanted];
    if (std::find(op_.loops.once.begin(), op_.loops.once.end(), wanted) != op_.loops.once.end()) {
      for (const Shape& point : pointsOf(gradient.shape, op_.loops.outputs[0])) {
        at(out, dims, point) += at(gradient, op_.loops.outputs[0], point);
      }
      return out;
    }
    for (const Shape& point : points(inputs, gradient.shape)) {
      uint64_t made = at(gradient, op_.loops.outputs[0], point);
      for (const size_t i : factors()) {
        const uint64_t x = at(inputs[i], op_.loops.inputs[i], point);
        made = is("square") ? 2 * made * x : i == wanted || is("sum") ? made : made * x;
      }
      at(out, dims, point) += made;
    }
    return out;
  }

 private:
  bool is(const std::string& kind) const { return op_.name.rfind(kind, 0) == 0; }

  std::vector<size_t> factors() const {
    std::vector<size_t> out;
    for (size_t i = 0; i < op_.loops.inputs.size(); ++i) {
      if (std::find(op_.loops.once.begin(), op_.loops.once.end(), i) == op_.loops.once.end()) {
        out.push_back(i);
      }
    }
    return out;
  }

  /// How often each loop runs here; 0: nothing says it.
  void count(Shape& extents, const DimLoops& dims, const Shape& shape) const {
    expect(dims.size() == shape.size());
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      int64_t& extent = extents.at(dims[dim].at(0));
      expect(extent == 0 || extent == shape[dim]);
      extent = shape[dim];
    }
  }

  Shape outputShape(const std::vector<Tensor>& inputs) const {
    Shape extents(op_.loops.names.size(), 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      count(extents, op_.loops.inputs[i], inputs[i].shape);
    }
    Shape out;
    for (const std::vector<size_t>& dim : op_.loops.outputs[0]) {
      out.push_back(extents.at(dim.at(0)));
    }
    return out;
  }

  std::vector<Shape> points(const std::vector<Tensor>& inputs, const Shape& output) const {
    Shape extents(op_.loops.names.size(), 0);
    count(extents, op_.loops.outputs[0], output);
    for (size_t i = 0; i < inputs.size(); ++i) {
      count(extents, op_.loops.inputs[i], inputs[i].shape);
    }
    for (int64_t& extent : extents) {
      extent = std::max<int64_t>(extent, 1);
    }
    return grid(extents);
  }

  /// Those of the output's loops alone.
  std::vector<Shape> pointsOf(const Shape& output, const DimLoops& dims) const {
    Shape extents(op_.loops.names.size(), 0);
    count(extents, dims, output);
    for (int64_t& extent : extents) {
      extent = std::max<int64_t>(extent, 1);
    }
    return grid(extents);
  }

  const ProgramOperator& op_;
  bool adds_once_;
};

/// What comes of it: by value that leaves the value, and by value that enters and has one its gradient.
struct Outcome {
  std::vector<Tensor> left;
  std::map<size_t, Tensor> gradients;
  bool operator==(const Outcome&) const = default;
};

/// What enters, by value, and the gradients of what leaves.
struct Given {
  std::map<size_t, Tensor> entering;
  std::vector<Tensor> gradients;
};

/// On the devices of its mesh. Throws Misfit where tensors do not fit one another.
inline Outcome onDevices(const Program& program, const Given& given) {
  const Shape& mesh = program.mesh_shape;
  const std::vector<Shape> devices = grid(mesh);
  std::map<size_t, Parts> held;
  std::map<size_t, const ProgramFetch*> fetches;
  for (const ProgramFetch& fetch : program.fetches) {
    expect(fetches.emplace(fetch.value, &fetch).second);
  }
  for (const auto& [number, whole] : given.entering) {
    const auto found = fetches.find(number);
    Parts parts = Parts::of(mesh, whole, found == fetches.end() ? program.values[number].held.value : found->second->kept);
    if (found != fetches.end()) {
      parts.move(found->second->way.there);
    }
    held.emplace(number, std::move(parts));
  }
  const auto adds = [&](const ProgramOperator& op, const Shape& device) {
    for (size_t axis = 0; axis < mesh.size(); ++axis) {
      const bool adds_up = op.axes[axis] >= 0 && std::none_of(op.loops.outputs[0].begin(), op.loops.outputs[0].end(), [&](const auto& dim) {
                             return std::find(dim.begin(), dim.end(), static_cast<size_t>(op.axes[axis])) != dim.end();
                           });
      if (adds_up && device[axis] > 0) {
        return false;
      }
    }
    return true;
  };
  std::vector<std::vector<Parts>> taken;  // by operator, by read
  for (const ProgramOperator& op : program.operators) {
    taken.emplace_back();
    for (const ProgramRead& read : op.reads) {
      taken.back().push_back(held.at(read.value));
      taken.back().back().move(read.way.there);
    }
    std::vector<Tensor> made;
    for (size_t device = 0; device < devices.size(); ++device) {
      std::vector<Tensor> inputs;
      for (const Parts& parts : taken.back()) {
        inputs.push_back(parts.parts()[device]);
      }
      made.push_back(Kernel(op, adds(op, devices[device])).forward(inputs));
    }
    Parts result(mesh, std::move(made));
    result.move(op.results[0].way.there);
    expect(held.emplace(op.results[0].value, std::move(result)).second);
  }
  Outcome out;
  std::map<size_t, std::vector<Parts>> gradients;
  for (size_t i = 0; i < program.leaving.size(); ++i) {
    const ProgramRead& read = program.leaving[i];
    Parts left = held.at(read.value);
    left.move(read.way.there);
    out.left.push_back(left.whole(read.taken.value));
    if (read.gives_gradient) {
      gradients[read.value].push_back(Parts::of(mesh, given.gradients[i], read.taken.gradient));
      gradients[read.value].back().move(read.way.back);
    }
  }
  const auto summed = [&](size_t value) {
    std::vector<Tensor> parts;
    for (size_t device = 0; device < devices.size(); ++device) {
      std::vector<Tensor> own;
      for (const Parts& one : gradients.at(value)) {
        own.push_back(one.parts()[device]);
      }
      parts.push_back(sum(own));
    }
    return Parts(mesh, std::move(parts));
  };
  for (size_t number = program.operators.size(); number-- > 0;) {
    const ProgramOperator& op = program.operators[number];
    if (!gradients.contains(op.results[0].value)) {
      continue;
    }
    Parts gradient = summed(op.results[0].value);
    gradient.move(op.results[0].way.back);
    for (size_t i = 0; i < op.reads.size(); ++i) {
      if (!op.reads[i].gives_gradient) {
        continue;
      }
      std::vector<Tensor> given_back;
      for (size_t device = 0; device < devices.size(); ++device) {
        std::vector<Tensor> inputs;
        for (const Parts& parts : taken[number]) {
          inputs.push_back(parts.parts()[device]);
        }
        given_back.push_back(Kernel(op, true).backward(inputs, gradient.parts()[device], i));
      }
      Parts back(mesh, std::move(given_back));
      back.move(op.reads[i].way.back);
      gradients[op.reads[i].value].push_back(std::move(back));
    }
  }
  for (const auto& [number, whole] : given.entering) {
    if (program.values[number].has_gradient && gradients.contains(number)) {
      const auto found = fetches.find(number);
      Parts parts = summed(number);
      if (found != fetches.end()) {
        parts.move(found->second->way.back);
      }
      out.gradients.emplace(number, parts.whole(found == fetches.end() ? program.values[number].held.gradient : found->second->kept));
    }
  }
  return out;
}

/// The same program on one device, which has all.
inline Outcome onOne(Program program, const Given& given) {
  program.mesh_shape = {1};
  const ValueEnd whole{{kReplicated}, {kReplicated}};
  for (ProgramValue& value : program.values) {
    value.held = whole;
  }
  for (ProgramOperator& op : program.operators) {
    op.axes = {kWhole};
    for (ProgramRead& read : op.reads) {
      read.taken = whole, read.way = {};
    }
    for (ProgramResult& result : op.results) {
      result.made = whole, result.way = {};
    }
  }
  for (ProgramRead& read : program.leaving) {
    read.taken = whole, read.way = {};
  }
  program.fetches.clear();
  return onDevices(program, given);
}

}  // namespace xmesh::core::program_run
