#include "c10d/weight_mover.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <map>

#include "core/error.h"
#include "core/resharding/fingerprint.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/strategy_registry.h"
#include "core/resharding/waves.h"

namespace xmesh::c10d_backend {
namespace {

using runtime::link::Party;

/// Whose owner this is, in a plan's end, in the order of a program's local tensors.
template <typename Visit>
void forOwnBoxes(const core::TensorSpec& spec, int64_t member, const Visit& visit) {
  for (const core::OwnedBox& owned : spec.boxes) {
    if (std::binary_search(owned.ranks.begin(), owned.ranks.end(), member)) {
      visit(owned.box);
    }
  }
}

/// The part of a whole box's tensor.
core::Box withinOf(const core::Box& part, const core::Box& whole) {
  core::Box out = part;
  for (size_t dim = 0; dim < out.size(); ++dim) {
    out[dim].begin -= whole[dim].begin;
    out[dim].end -= whole[dim].begin;
  }
  return out;
}

bool isInside(const core::Box& part, const core::Box& whole) {
  for (size_t dim = 0; dim < part.size(); ++dim) {
    if (part[dim].begin < whole[dim].begin || part[dim].end > whole[dim].end) {
      return false;
    }
  }
  return true;
}

at::Tensor viewOf(at::Tensor tensor, const core::Box& within) {
  for (size_t dim = 0; dim < within.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim), within[dim].begin, within[dim].size());
  }
  return tensor;
}

core::Topology topologyOf(const std::vector<Party>& parties) {
  std::map<int64_t, std::string> host_of;
  for (const Party& party : parties) {
    for (const runtime::link::Member& member : party.members) {
      host_of[member.number] = member.host;
    }
  }
  std::map<std::string, int64_t> index_of_host;
  std::map<int64_t, int64_t> out;
  for (const auto& [member, host] : host_of) {
    out[member] = index_of_host.try_emplace(host, static_cast<int64_t>(index_of_host.size())).first->second;
  }
  return core::Topology(std::move(out), core::LinkModel{});
}

at::ScalarType scalarTypeOf(const core::DType& dtype) {
  static const std::map<std::string, at::ScalarType> types = [] {
    std::map<std::string, at::ScalarType> out;
    for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
      const auto type = static_cast<at::ScalarType>(i);
      try {
        out.emplace(c10::getDtypeNames(type).first, type);
      } catch (const c10::Error&) {  // one that Python does not have
        continue;
      }
    }
    return out;
  }();
  const auto found = types.find(dtype.name);
  core::require(found != types.end(), "torch has no type " + dtype.name + " here");
  return found->second;
}

/// Each replica by itself: one that does not fit must not keep the others waiting.
void checkFit(const std::vector<Party>& parties, const std::map<int64_t, core::Manifest>& sources,
              const std::map<int64_t, core::Manifest>& replicas) {
  std::string text;
  std::vector<int32_t> misfits;
  for (const Party& party : parties) {
    if (party.is_source) {
      continue;
    }
    std::map<int64_t, core::Manifest> own;
    for (const runtime::link::Member& member : party.members) {
      own[member.number] = replicas.at(member.number);
    }
    try {
      core::match(sources, own);
    } catch (const core::InvalidArgument& error) {
      text += (text.empty() ? "" : "\n") + party.str() + ": " + error.what();
      for (const runtime::link::Member& member : party.members) {
        misfits.push_back(member.number);
      }
    }
  }
  if (!misfits.empty()) {
    throw MisfitError(text, std::move(misfits));
  }
}

/// By tensor of a match, this member's boxes.
std::vector<std::vector<core::MatchedBox>> byTensor(const std::vector<core::MatchedBox>& boxes, size_t num_tensors) {
  std::vector<std::vector<core::MatchedBox>> out(num_tensors);
  for (const core::MatchedBox& box : boxes) {
    out.at(static_cast<size_t>(box.tensor)).push_back(box);
  }
  return out;
}

}  // namespace

WeightMover::WeightMover(std::shared_ptr<Endpoint> endpoint, core::Manifest manifest, LocalWeights weights, int64_t wave_bytes)
    : endpoint_(std::move(endpoint)), manifest_(std::move(manifest)), weights_(std::move(weights)), wave_bytes_(wave_bytes) {
  core::require(weights_.held.size() == manifest_.held.size() && weights_.needed.size() == manifest_.needed.size(),
                "expected memory for every tensor of the manifest");
}

std::shared_ptr<const WeightPlan> WeightMover::plan(const std::vector<Party>& parties) const {
  const int64_t self = endpoint_->globalRank();
  std::map<int64_t, core::Manifest> sources;
  std::map<int64_t, core::Manifest> replicas;
  auto out = std::make_shared<WeightPlan>();
  for (const Party& party : parties) {
    for (const runtime::link::Member& member : party.members) {
      (party.is_source ? sources : replicas)[member.number] = core::manifestFromJson(member.manifest);
      out->members_.push_back(member.number);
    }
  }
  std::sort(out->members_.begin(), out->members_.end());
  checkFit(parties, sources, replicas);
  core::Match match = core::match(sources, replicas);
  if (const auto copied = match.copied.find(self); copied != match.copied.end()) {
    out->copies_ = copied->second;
  }
  std::map<std::string, int64_t> held_of_name;
  for (size_t i = 0; i < manifest_.held.size(); ++i) {
    held_of_name[manifest_.held[i].name] = static_cast<int64_t>(i);
  }
  for (const std::string& name : match.names) {
    const auto held = held_of_name.find(name);
    out->held_of_tensor_.push_back(held == held_of_name.end() ? -1 : held->second);
  }
  const core::Topology topology = topologyOf(parties);
  const auto sent = byTensor(match.sent[self], match.names.size());
  const auto received = byTensor(match.received[self], match.names.size());
  const auto pieceOf = [&](const core::Box& box, int64_t tensor, bool is_sent) {
    for (const core::MatchedBox& matched : (is_sent ? sent : received)[static_cast<size_t>(tensor)]) {
      const auto index = static_cast<size_t>(matched.index);
      const auto held = static_cast<size_t>(out->held_of_tensor_[static_cast<size_t>(tensor)]);
      const core::Box& whole = is_sent ? manifest_.held.at(held).boxes.at(index) : manifest_.needed.at(index).box;
      if (isInside(box, whole)) {
        return WeightPlan::Piece{matched, withinOf(box, whole)};
      }
    }
    throw core::InvalidArgument("a wave has a box that this member does not have");
  };
  // What decides on the bytes' ways beside the plans: how messages are cut.
  uint64_t digest = runtime::hashBytes("weights in waves of " + std::to_string(wave_bytes_));
  for (core::Wave& wave : core::cutIntoWaves(match.tensors, wave_bytes_)) {
    WeightPlan::Wave made;
    CallDetails details;
    for (size_t i = 0; i < wave.tensors.size(); ++i) {
      const int64_t tensor = wave.indices[i];
      details.labels.push_back("'" + match.names[static_cast<size_t>(tensor)] + "'");
      forOwnBoxes(wave.tensors[i].src, self, [&](const core::Box& box) { made.sources.push_back(pieceOf(box, tensor, true)); });
      forOwnBoxes(wave.tensors[i].dst, self, [&](const core::Box& box) { made.destinations.push_back(pieceOf(box, tensor, false)); });
    }
    auto plan = std::make_shared<core::ReshardingPlan>(core::planResharding(std::move(wave.tensors), topology, core::parseStrategy("auto")));
    const std::vector<int64_t> taking_part = plan->participants();
    digest = runtime::hashBytes(core::planFingerprint(*plan), digest);
    if (std::binary_search(taking_part.begin(), taking_part.end(), self)) {
      made.prepared = endpoint_->prepare(std::move(plan), details);
    }
    out->waves_.push_back(std::move(made));
  }
  out->fingerprint_ = std::to_string(digest);
  return out;
}

void WeightMover::abort(const runtime::link::Attempt& attempt) {
  const std::lock_guard lock(mutex_);
  if (transfers_ != nullptr && moving_ == attempt) {
    transfers_->fail({runtime::FailureKind::kGroup, "its time was over", {}});
  }
}

void WeightMover::move(const WeightPlan& plan, const runtime::link::Attempt& attempt, std::chrono::milliseconds deadline) {
  WatchedTransfers::Options options;
  options.ranks = plan.members_;
  options.name = "version " + std::to_string(attempt.version) + ", attempt " + std::to_string(attempt.number);
  options.watch = {runtime::hashRanks(plan.members_), runtime::hashBytes("link " + options.name) | 1U, attempt.version};
  options.at_first = "moves " + options.name;
  const auto transfers = std::make_shared<WatchedTransfers>(endpoint_, options);
  {
    const std::lock_guard lock(mutex_);
    moving_ = attempt;
    transfers_ = transfers;
  }
  std::exception_ptr failure;
  try {
    moveWaves(plan, *transfers, std::chrono::steady_clock::now() + deadline);
  } catch (const runtime::PeerError&) {
    failure = std::current_exception();
  } catch (const std::exception& error) {
    failure = std::current_exception();  // of this member: the others hear of it now
    transfers->fail({runtime::FailureKind::kPeer, error.what(), {endpoint_->globalRank()}});
  }
  {
    const std::lock_guard lock(mutex_);
    transfers_ = nullptr;
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void WeightMover::moveWaves(const WeightPlan& plan, WatchedTransfers& transfers, std::chrono::steady_clock::time_point deadline) const {
  const WatchedTransfers::Lane lane = transfers.lane("waves");
  for (size_t i = 0; i < plan.waves_.size(); ++i) {
    const WeightPlan::Wave& wave = plan.waves_[i];
    if (wave.prepared == nullptr) {
      continue;
    }
    std::vector<at::Tensor> src;
    std::vector<at::Tensor> dst;
    std::vector<std::pair<at::Tensor, at::Tensor>> casts;  // (target, what comes)
    const std::vector<core::TensorPair>& tensors = wave.prepared->plan->tensors;
    const std::vector<int32_t>& src_tensors = wave.prepared->program->src_tensors;
    const std::vector<int32_t>& dst_tensors = wave.prepared->program->dst_tensors;
    for (size_t local = 0; local < wave.sources.size(); ++local) {
      const WeightPlan::Piece& piece = wave.sources[local];
      const auto held = static_cast<size_t>(plan.held_of_tensor_[static_cast<size_t>(piece.box.tensor)]);
      const at::ScalarType type = scalarTypeOf(tensors[static_cast<size_t>(src_tensors[local])].src.dtype);
      src.push_back(viewOf(weights_.held[held].at(static_cast<size_t>(piece.box.index)), piece.within).to(type));
    }
    for (size_t local = 0; local < wave.destinations.size(); ++local) {
      const WeightPlan::Piece& piece = wave.destinations[local];
      const at::ScalarType type = scalarTypeOf(tensors[static_cast<size_t>(dst_tensors[local])].dst.dtype);
      at::Tensor target = viewOf(weights_.needed.at(static_cast<size_t>(piece.box.index)), piece.within);
      if (target.scalar_type() != type) {
        casts.emplace_back(target, at::empty(target.sizes(), target.options().dtype(type)));
        target = casts.back().second;
      }
      dst.push_back(std::move(target));
    }
    const WatchedTransfer transfer = transfers.begin(lane, i, wave.prepared, src, dst, [name = transfers.name()] { return name; });
    transfers.flush();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    transfers.waitWithin(transfer, std::max(left, std::chrono::milliseconds(1)));
    for (auto& [target, come] : casts) {
      target.copy_(come);
    }
  }
  for (const auto& [from, to] : plan.copies_) {
    at::Tensor target = weights_.needed.at(static_cast<size_t>(to));
    target.copy_(weights_.needed.at(static_cast<size_t>(from)));
  }
}

}  // namespace xmesh::c10d_backend
