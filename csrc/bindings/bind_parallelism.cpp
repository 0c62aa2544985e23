#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/parallelism/collective_cost.h"
#include "core/parallelism/conversion_cost.h"
#include "core/parallelism/elimination.h"
#include "core/parallelism/strategy_graph.h"

namespace xmesh::bindings {
namespace {

namespace py = pybind11;
/// Its size, latency, seconds per byte, and the same where each device sends to all others.
using Axis = std::variant<std::tuple<int64_t, double, double>, std::tuple<int64_t, double, double, double>>;
using End = std::pair<core::ValueState, core::ValueState>;
using Step = std::tuple<size_t, core::ValueState, std::optional<std::string>, double>;

core::AxisLinks linksOf(const Axis& axis) {
  return std::visit([](const auto& fields) { return std::apply([](auto... field) { return core::AxisLinks{field...}; }, fields); }, axis);
}

std::vector<core::ValueEnd> endsOf(const std::vector<End>& ends) {
  std::vector<core::ValueEnd> out;
  for (const auto& [value, gradient] : ends) {
    out.push_back({value, gradient});
  }
  return out;
}

std::unique_ptr<core::ConversionCosts> makeConversionCosts(const std::vector<int64_t>& shape, double num_bytes, const std::vector<Axis>& axes,
                                                           const std::string& model, bool is_direct) {
  std::vector<core::AxisLinks> links;
  for (const Axis& axis : axes) {
    links.push_back(linksOf(axis));
  }
  return std::make_unique<core::ConversionCosts>(shape, num_bytes, std::move(links), core::collectiveCostModel(model),
                                                 is_direct ? core::ConversionWays::kDirect : core::ConversionWays::kAny);
}

std::vector<Step> stepsOf(const core::ConversionCosts& costs, const core::ValueState& from, const core::ValueState& to) {
  std::vector<Step> out;
  for (const core::ConversionStep& step : costs.steps(from, to)) {
    std::optional<std::string> name;
    if (step.collective.has_value()) {
      name = core::collectiveName(*step.collective);
    }
    out.emplace_back(step.axis, step.to, name, step.num_bytes);
  }
  return out;
}

void bindCosts(py::module_& module) {
  module.def(
      "collective_cost_models",
      [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const core::CollectiveCostModel& model : core::collectiveCostModels()) {
          out.emplace_back(model.name, model.summary);
        }
        return out;
      },
      "Names and summaries of all cost models of collectives.");
  module.def(
      "collective_cost",
      [](const std::string& model, const std::string& collective, double num_bytes, const Axis& axis) {
        return core::collectiveCostModel(model).cost(core::collectiveOf(collective), num_bytes, linksOf(axis));
      },
      py::arg("model"), py::arg("collective"), py::arg("num_bytes"), py::arg("axis"),
      "Seconds of one along an axis (size, latency, seconds per byte, and, if that is more, the same where all send to all). Raises ValueError for "
      "names that are unknown.");
  py::class_<core::ConversionCosts>(module, "ConversionCosts", "What it costs to bring a value from one state on a mesh to another.")
      .def(py::init(&makeConversionCosts), py::arg("shape"), py::arg("num_bytes"), py::arg("axes"), py::arg("model"), py::arg("is_direct") = false,
           "For a value of this shape and so many bytes; axes are (size, latency, seconds per byte). A state has per axis a dim, -1 (replicated) or "
           "-2 (a partial sum). `is_direct`: axis by axis, not by way of other shardings. Raises ValueError for a mesh of more than 3 axes and an "
           "unknown model.")
      .def("cost", &core::ConversionCosts::cost, py::arg("from_state"), py::arg("to_state"))
      .def("steps", &stepsOf, py::arg("from_state"), py::arg("to_state"),
           "(axis, state afterwards, collective or None, bytes) of the cheapest way, in order.");
}

void bindGraph(py::module_& module) {
  py::class_<core::CostTable, std::shared_ptr<core::CostTable>>(module, "CostTable", "What each pair of choices of two nodes costs.")
      .def(py::init([](size_t num_rows, size_t num_columns, std::vector<double> costs) {
             core::require(costs.size() == num_rows * num_columns, "a table of " + std::to_string(num_rows) + " x " + std::to_string(num_columns) +
                                                                       " costs, got " + std::to_string(costs.size()));
             return std::make_shared<core::CostTable>(core::CostTable{num_rows, num_columns, std::move(costs)});
           }),
           py::arg("num_rows"), py::arg("num_columns"), py::arg("costs"))
      .def(
          "at",
          [](const core::CostTable& table, size_t row, size_t column) {
            if (row >= table.num_rows || column >= table.num_columns) {
              throw py::index_error("no such pair of choices");
            }
            return table.at(row, column);
          },
          py::arg("row"), py::arg("column"));
  module.def(
      "conversion_table",
      [](const core::ConversionCosts& costs, const std::vector<End>& made, const std::vector<End>& taken, bool has_gradient, int times) {
        return std::make_shared<core::CostTable>(core::conversionTable(costs, endsOf(made), endsOf(taken), has_gradient, times));
      },
      py::arg("costs"), py::arg("made"), py::arg("taken"), py::arg("has_gradient"), py::arg("times") = 1,
      "Between the choices of who makes a value and of who takes it: pairs of the value's state and the gradient's. The value goes that way `times` "
      "times, its gradient back once.");
  py::class_<core::StrategyGraph>(module, "StrategyGraph", "Sharding choices of operators, and what they cost alone and in pairs.")
      .def(py::init<>())
      .def("add_node", &core::StrategyGraph::addNode, py::arg("name"), py::arg("costs"), "Its number. Raises ValueError without a choice.")
      .def(
          "add_edge",
          [](core::StrategyGraph& graph, size_t from, size_t to, std::shared_ptr<core::CostTable> table) {
            graph.addEdge(from, to, std::move(table));
          },
          py::arg("from_node"), py::arg("to_node"), py::arg("table"), "Raises ValueError where the table does not fit.")
      .def(
          "set_costs",
          [](core::StrategyGraph& graph, const py::array_t<double, py::array::c_style | py::array::forcecast>& costs) {
            graph.setCosts(costs.data(), static_cast<size_t>(costs.size()));
          },
          py::arg("costs"), "Other costs of all nodes, on end. Raises ValueError for another number of them.")
      .def("edge_costs", &core::StrategyGraph::edgeCosts, py::arg("choices"), "What each edge costs, with one choice per node.")
      .def("cost", &core::StrategyGraph::cost, py::arg("choices"), "What one choice per node costs.")
      .def(
          "least_cost",
          [](const core::StrategyGraph& graph) {
            core::ShardingChoices found = core::leastCost(graph);
            return std::tuple(std::move(found.choice_of), found.cost, found.is_exact);
          },
          py::call_guard<py::gil_scoped_release>(),
          "The choices that cost least together, their cost, and whether nothing costs less. Raises ValueError where there are none.");
}

}  // namespace

void bindParallelism(py::module_& module) {
  bindCosts(module);
  bindGraph(module);
}

}  // namespace xmesh::bindings
