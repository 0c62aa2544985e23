#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"
#include "runtime/agreement/messages.h"

namespace xmesh::c10d_backend {

/// What ranks must agree on besides the plan.
struct CallDetails {
  std::string requires_grad;  ///< one letter per tensor
  bool is_backward = false;
  std::vector<std::string> labels = {};                           ///< one name per tensor; empty where they are numbered
  std::vector<std::pair<std::string, std::string>> devices = {};  ///< kinds of source and destination of each tensor; empty: all on cpu
  runtime::CallFields entries = {};  ///< what is compared before the tensors: the names and kinds of a container's entries
  bool through_host = false;         ///< host memory carries them, whatever they are on
};

/// What the ranks of a call compare, by name.
runtime::CallFields fieldsOf(const core::ReshardingPlan& plan, const CallDetails& details, int64_t staging_bytes);
/// The call in a few words, for messages.
std::string summaryOf(const core::ReshardingPlan& plan, const CallDetails& details);

}  // namespace xmesh::c10d_backend
