#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/parallelism/program.h"

namespace xmesh::bindings {
namespace {

namespace py = pybind11;
using End = std::pair<core::ValueState, core::ValueState>;
using Move = std::tuple<size_t, core::AxisState, core::AxisState>;
/// Value, how it is taken, the moves there and back, whether it gives a gradient.
using Read = std::tuple<size_t, End, std::vector<Move>, std::vector<Move>, bool>;
/// Value, how it is made, the moves there and back.
using Result = std::tuple<size_t, End, std::vector<Move>, std::vector<Move>>;
/// Names, extents, loops over each input's and each output's dims, linear, inputs that are added once.
using Loops =
    std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<core::DimLoops>, std::vector<core::DimLoops>, bool, std::vector<size_t>>;

core::ValueEnd endOf(const End& end) { return {end.first, end.second}; }

core::ProgramWay wayOf(const std::vector<Move>& there, const std::vector<Move>& back) {
  core::ProgramWay out;
  for (const auto& [axis, before, after] : there) {
    out.there.push_back({axis, before, after});
  }
  for (const auto& [axis, before, after] : back) {
    out.back.push_back({axis, before, after});
  }
  return out;
}

core::ProgramRead readOf(const Read& read) {
  const auto& [value, taken, there, back, gives_gradient] = read;
  return {value, endOf(taken), wayOf(there, back), gives_gradient};
}

void addOperator(core::Program& program, const std::string& name, const Loops& loops, const std::vector<core::AxisChoice>& axes,
                 const std::vector<Read>& reads, const std::vector<Result>& results) {
  const auto& [names, extents, inputs, outputs, is_linear, once] = loops;
  core::ProgramOperator out{name, {names, extents, inputs, outputs, is_linear, once}, axes, {}, {}};
  for (const Read& read : reads) {
    out.reads.push_back(readOf(read));
  }
  for (const auto& [value, made, there, back] : results) {
    out.results.push_back({value, endOf(made), wayOf(there, back)});
  }
  program.operators.push_back(std::move(out));
}

}  // namespace

void bindProgram(py::module_& module) {
  py::class_<core::Program>(module, "Program", "What the devices of a stage do with a microbatch, as data.")
      .def(py::init([](std::vector<int64_t> mesh_shape) {
             auto out = std::make_unique<core::Program>();
             out->mesh_shape = std::move(mesh_shape);
             return out;
           }),
           py::arg("mesh_shape"))
      .def(
          "add_value",
          [](core::Program& program, std::string name, std::vector<int64_t> shape, const End& held, bool has_gradient, bool enters) {
            program.values.push_back({std::move(name), std::move(shape), has_gradient, enters, endOf(held)});
            return program.values.size() - 1;
          },
          py::arg("name"), py::arg("shape"), py::arg("held"), py::kw_only(), py::arg("has_gradient"), py::arg("enters"), "Its number.")
      .def("add_operator", &addOperator, py::arg("name"), py::arg("loops"), py::arg("axes"), py::arg("reads"), py::arg("results"))
      .def(
          "add_fetch",
          [](core::Program& program, size_t value, core::ValueState kept, const std::vector<Move>& there, const std::vector<Move>& back) {
            program.fetches.push_back({value, std::move(kept), wayOf(there, back)});
          },
          py::arg("value"), py::arg("kept"), py::arg("there"), py::arg("back"))
      .def(
          "add_leaving", [](core::Program& program, const Read& read) { program.leaving.push_back(readOf(read)); }, py::arg("read"))
      .def("validate", &core::validateProgram, py::call_guard<py::gil_scoped_release>(),
           "Raises ValueError that names the operator and the value that do not fit.")
      .def(
          "is_transfer",
          [](const core::Program& program, std::optional<size_t> operation, size_t place, bool is_result) {
            if (!operation.has_value()) {
              return core::isTransfer(program, program.leaving.at(place));
            }
            const core::ProgramOperator& op = program.operators.at(*operation);
            return is_result ? core::isTransfer(program, op.results.at(place)) : core::isTransfer(program, op.reads.at(place));
          },
          py::arg("operator"), py::arg("place"), py::kw_only(), py::arg("is_result") = false,
          "Whether a read, or a result, of an operator, or of what leaves (None), comes by a transfer.")
      .def("segments", &core::segmentsOf, py::arg("may_begin"), "The operators with which segments begin.");
}

}  // namespace xmesh::bindings
