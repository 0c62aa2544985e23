#include "core/resharding/plan_resharding.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/resharding/decompose.h"
#include "core/resharding/lower_bound.h"
#include "core/resharding/network.h"
#include "core/resharding/simulate.h"
#include "core/resharding/strategy_registry.h"
#include "core/resharding/validate.h"

namespace xmesh::core {
namespace {

void checkRanks(const TensorSpec& spec, const Topology& topology, const std::string& what) {
  for (int64_t rank : spec.ranks()) {  // texts only for a mistake: meshes are long
    if (!topology.hasRank(rank)) {
      throw InvalidArgument(what + "rank " + std::to_string(rank) + " of " + (spec.isBoxed() ? spec.whereStr() : "mesh " + spec.mesh.str()) +
                            " has no host in the topology");
    }
    if (rank > std::numeric_limits<int32_t>::max()) {
      throw InvalidArgument(what + "rank " + std::to_string(rank) + " does not fit 31 bits");
    }
  }
}

void checkTensor(const TensorPair& pair, size_t index, const Topology& topology) {
  const std::string what = "tensor " + std::to_string(index) + ": ";
  for (const TensorSpec* spec : {&pair.src, &pair.dst}) {
    try {
      spec->validate();
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(what + (spec == &pair.src ? "source " : "destination ") + error.what());
    }
  }
  require(pair.src.shape == pair.dst.shape,
          what + "a reshard keeps the shape; the source has " + shapeStr(pair.src.shape) + ", the destination " + shapeStr(pair.dst.shape));
  require(pair.src.dtype == pair.dst.dtype,
          what + "a reshard keeps the dtype; the source has " + pair.src.dtype.name + ", the destination " + pair.dst.dtype.name);
  require(!pair.dst.hasPartial(), what + "the destination " + placementsStr(pair.dst.placements) +
                                      " has a Partial placement; a value cannot be split into contributions, ask for Replicate() or Shard(dim)");
  const auto is_placed = [](const TensorSpec& spec) { return spec.isBoxed() || spec.mesh.numRanks() > 0; };
  require(is_placed(pair.src) && is_placed(pair.dst), what + "a mesh without ranks cannot hold a tensor");
  require(!pair.src.hasPartial() || !pair.dst.isBoxed(), what + "a Partial source goes to a mesh, not to boxes");
  checkRanks(pair.src, topology, what);
  checkRanks(pair.dst, topology, what);
}

/// Runs one strategy on a plan that is decomposed and bounded; what another strategy made of it is dropped.
void runStrategy(ReshardingPlan& plan, const Strategy& strategy, const Network& network) {
  plan.strategy = strategy.str();
  plan.messages.clear();
  plan.predicted_seconds = kNotPredicted;
  strategyInfo(strategy.name).plan(plan, strategy);
  if (plan.predicted_seconds == kNotPredicted) {
    plan.predicted_seconds = simulatedSeconds(plan, network);
  }
#ifndef NDEBUG
  validatePlan(plan);
#endif
}

/// The most streams (pairs of ranks) to or from other hosts that share one direction of a host's NIC.
int64_t streamsPerNic(const std::vector<Message>& messages, const Network& network) {
  std::set<std::pair<int32_t, int32_t>> streams;
  std::vector<int64_t> num_out(static_cast<size_t>(network.numHosts()));
  std::vector<int64_t> num_in = num_out;
  int64_t most = 0;
  for (const Message& message : messages) {
    const int32_t from = network.hostOfGlobal(message.src_rank);
    const int32_t to = network.hostOfGlobal(message.dst_rank);
    if (from != to && streams.emplace(message.src_rank, message.dst_rank).second) {
      most = std::max({most, ++num_out[static_cast<size_t>(from)], ++num_in[static_cast<size_t>(to)]});
    }
  }
  return most;
}

/// What a strategy adds to a plan.
struct Candidate {
  std::string strategy;
  std::vector<Message> messages;
  double predicted_seconds = 0;
};

using CandidateRank = std::tuple<bool, int64_t, double>;

/// Among equal predictions: direct sends last, since they all leave at once, and on real links they do not get the equal shares that the prediction
/// gives them; then fewer streams per NIC first, since streams take turns less evenly than predicted; then the better prediction.
CandidateRank rankOf(const Candidate& candidate, const Network& network) {
  return {candidate.strategy == "send_recv", streamsPerNic(candidate.messages, network), candidate.predicted_seconds};
}

/// Keeps the best of the candidates.
void runCandidates(ReshardingPlan& plan, const Network& network) {
  constexpr size_t kLargePlan = 20'000;  // messages; the first candidate is made for such sizes, the others would cost more than they could gain
  constexpr double kEqualWithin = 0.99;
  std::vector<Candidate> candidates;
  for (const StrategyInfo& info : strategies()) {
    const bool is_large = !candidates.empty() && candidates.front().messages.size() > kLargePlan;
    if (info.is_candidate != nullptr && !is_large && info.is_candidate(plan, network)) {
      runStrategy(plan, parseStrategy(info.name), network);
      candidates.push_back({std::move(plan.strategy), std::move(plan.messages), plan.predicted_seconds});
    }
  }
  if (candidates.size() > 1) {
    const auto less = [](const Candidate& a, const Candidate& b) { return a.predicted_seconds < b.predicted_seconds; };
    const double least = std::min_element(candidates.begin(), candidates.end(), less)->predicted_seconds;
    std::erase_if(candidates, [least](const Candidate& candidate) { return kEqualWithin * candidate.predicted_seconds > least; });
  }
  size_t best = 0;
  if (candidates.size() > 1) {
    std::vector<CandidateRank> ranks;
    for (const Candidate& candidate : candidates) {
      ranks.push_back(rankOf(candidate, network));
    }
    best = static_cast<size_t>(std::min_element(ranks.begin(), ranks.end()) - ranks.begin());
  }
  plan.strategy = std::move(candidates[best].strategy);
  plan.messages = std::move(candidates[best].messages);
  plan.predicted_seconds = candidates[best].predicted_seconds;
}

}  // namespace

void checkReshard(const std::vector<TensorPair>& tensors, const Topology& topology) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkTensor(tensors[i], i, topology);
  }
}

ReshardingPlan planResharding(std::vector<TensorPair> tensors, Topology topology, const Strategy& strategy) {
  checkReshard(tensors, topology);
  ReshardingPlan plan;
  plan.tensors = std::move(tensors);
  plan.topology = std::move(topology);
  decompose(plan);
  const Network network(plan);
  const LowerBound bound = lowerBound(plan, network);
  plan.lower_bound_bytes = bound.bytes;
  plan.lower_bound_seconds = bound.seconds;
  if (strategy.name == "auto") {
    runCandidates(plan, network);
  } else {
    runStrategy(plan, strategy, network);
  }
  return plan;
}

}  // namespace xmesh::core
