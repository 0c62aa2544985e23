#include "c10d/call_details.h"

#include <cstdint>
#include <string>

namespace xmesh::c10d_backend {
namespace {

void addPlaces(const std::string& end, const std::string& tensor, const core::TensorSpec& spec, runtime::CallFields& fields) {
  if (spec.isBoxed()) {
    fields.emplace_back(end + " boxes" + tensor, spec.whereStr());
    return;
  }
  fields.emplace_back(end + " mesh" + tensor, spec.mesh.str());
  fields.emplace_back(end + " placements" + tensor, core::placementsStr(spec.placements));
}

std::string placesOf(const core::TensorSpec& spec) { return spec.isBoxed() ? spec.whereStr() : core::placementsStr(spec.placements); }

}  // namespace

runtime::CallFields fieldsOf(const core::ReshardingPlan& plan, const CallDetails& details, int64_t staging_bytes) {
  runtime::CallFields fields = details.entries;
  fields.emplace_back("number of tensors", std::to_string(plan.tensors.size()));
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const bool is_alone = plan.tensors.size() == 1 && details.labels.empty();
    const std::string tensor = is_alone ? "" : " of tensor " + (details.labels.empty() ? std::to_string(i) : details.labels.at(i));
    const auto& [src, dst] = plan.tensors[i];
    fields.emplace_back("shape" + tensor, core::shapeStr(src.shape));
    fields.emplace_back("dtype" + tensor, src.dtype.name);
    addPlaces("source", tensor, src, fields);
    fields.emplace_back("source device" + tensor, details.devices.empty() ? "cpu" : details.devices.at(i).first);
    addPlaces("destination", tensor, dst, fields);
    fields.emplace_back("destination device" + tensor, details.devices.empty() ? "cpu" : details.devices.at(i).second);
    fields.emplace_back("requires_grad" + tensor, i < details.requires_grad.size() && details.requires_grad[i] == '1' ? "True" : "False");
  }
  std::string hosts;
  for (const auto& [rank, host] : plan.topology.hostOfRanks()) {
    hosts += std::to_string(rank) + "@" + std::to_string(host) + " ";
  }
  fields.emplace_back("topology (rank@host)", hosts);
  fields.emplace_back("strategy", plan.strategy);
  fields.emplace_back("staging_bytes", std::to_string(staging_bytes));
  return fields;
}

std::string summaryOf(const core::ReshardingPlan& plan, const CallDetails& details) {
  const auto& [src, dst] = plan.tensors.front();
  std::string out =
      (details.is_backward ? "gradient of " : "") + src.dtype.name + core::shapeStr(src.shape) + " " + placesOf(src) + " -> " + placesOf(dst);
  return plan.tensors.size() > 1
             ? "tensor " + (details.labels.empty() ? "0" : details.labels.front()) + " of " + std::to_string(plan.tensors.size()) + ": " + out
             : out;
}

}  // namespace xmesh::c10d_backend
