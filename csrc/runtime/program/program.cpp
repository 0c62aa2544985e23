#include "runtime/program/program.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "runtime/program/broadcast_stars.h"
#include "runtime/program/local_places.h"
#include "runtime/program/plan_checks.h"
#include "runtime/program/program_order.h"

namespace xmesh::runtime {
namespace {

using core::Message;
using core::Payload;
using core::ReshardingPlan;
using core::UnitTask;

constexpr int64_t kMaxItemBytes = 16;

/// Elements [begin, end) of a task that this rank has from `arrival` on.
struct ArrivedRange {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t arrival = 0;
};

class Compiler {
 public:
  Compiler(const ReshardingPlan& plan, int64_t global_rank, const ProgramOptions& options, const BroadcastStars* stars = nullptr)
      : plan_(plan),
        stars_(stars),
        rank_(global_rank),
        options_(options),
        program_(std::make_shared<Program>()),
        sources_(plan, LocalPlaces::End::kSource, global_rank),
        destinations_(plan, LocalPlaces::End::kDestination, global_rank) {
    core::require(options.max_message_bytes > 0, "messages must be at least one byte long, got " + std::to_string(options.max_message_bytes));
    program_->global_rank = global_rank;
    program_->src_shapes = sources_.shapes();
    program_->dst_shapes = destinations_.shapes();
    program_->src_tensors = sources_.tensors();
    program_->dst_tensors = destinations_.tensors();
    for (const core::Holders& holders : plan.holders) {
      own_contribution_.push_back(contributionOf(holders, global_rank));
    }
    for (const std::vector<int64_t>& needers : plan.needers) {
      is_needer_.push_back(std::binary_search(needers.begin(), needers.end(), global_rank));
    }
  }

  std::shared_ptr<const Program> compile() {
    std::vector<Message> messages;
    if (options_.groups.has_value()) {
      program_->has_groups = true;
      const auto circle_of = [this](const Message& message) { return circleOf(message); };
      std::tie(messages, group_of_) = groupedMessages(plan_, rank_, options_.max_message_bytes, *options_.groups, circle_of);
    } else {
      messages = orderedMessages(plan_, rank_, options_.max_message_bytes);
    }
    collectPeers(messages);
    if (stars_ != nullptr) {
      program_->circles = stars_->circles;
    }
    for (size_t position = 0; position < messages.size(); ++position) {
      const Message& message = messages[position];
      if (message.src_rank == rank_) {
        addSend(message, static_cast<int64_t>(position));
      } else if (message.payload == Payload::kValue) {
        addValue(message, static_cast<int64_t>(position));
      } else {
        addInput(messages, position);
      }
    }
    addCopies();
    collectTracks();
    linkSends();
    return std::move(program_);
  }

 private:
  int32_t circleOf(const Message& message) const {
    if (stars_ == nullptr || message.payload != Payload::kValue) {
      return -1;
    }
    const auto found = stars_->circle.find({message.task, message.begin, message.end, message.src_rank, message.dst_rank});
    return found == stars_->circle.end() ? -1 : found->second;
  }
  const UnitTask& taskOf(const Message& message) const { return plan_.tasks[static_cast<size_t>(message.task)]; }
  int64_t numContributions(const UnitTask& task) const {
    return static_cast<int64_t>(plan_.holders.at(static_cast<size_t>(task.holders)).contributions.size());
  }
  int64_t ownContribution(const UnitTask& task) const { return own_contribution_.at(static_cast<size_t>(task.holders)); }
  bool holdsValue(const UnitTask& task) const { return numContributions(task) == 1 && ownContribution(task) == 0; }
  bool needs(const UnitTask& task) const { return is_needer_.at(static_cast<size_t>(task.needers)); }
  std::string messageStr(const Message& message) const {
    return "message from rank " + std::to_string(message.src_rank) + " to rank " + std::to_string(message.dst_rank) + " with elements [" +
           std::to_string(message.begin) + ", " + std::to_string(message.end) + ") of " + taskStr(plan_, message.task);
  }

  int32_t groupOf(int64_t position) const { return group_of_.empty() ? 0 : group_of_[static_cast<size_t>(position)]; }

  void collectPeers(const std::vector<Message>& messages) {
    for (const Message& message : messages) {
      program_->peer_ranks.push_back(message.src_rank == rank_ ? message.dst_rank : message.src_rank);
    }
    std::sort(program_->peer_ranks.begin(), program_->peer_ranks.end());
    program_->peer_ranks.erase(std::unique(program_->peer_ranks.begin(), program_->peer_ranks.end()), program_->peer_ranks.end());
    for (size_t i = 0; i < program_->peer_ranks.size(); ++i) {
      peer_index_[program_->peer_ranks[i]] = static_cast<int32_t>(i);
    }
    program_->receives_of_peer.assign(program_->peer_ranks.size(), 0);
    program_->sends_of_peer.assign(program_->peer_ranks.size(), 0);
    program_->first_send_of_track.assign(program_->peer_ranks.size() * kNumTracks, -1);
  }

  int32_t boxOf(int64_t task_index, bool is_src) {
    std::unordered_map<int64_t, int32_t>& known = is_src ? src_box_ : dst_box_;
    const auto [found, is_new] = known.try_emplace(task_index, static_cast<int32_t>(program_->boxes.size()));
    if (is_new) {
      const UnitTask& task = plan_.tasks[static_cast<size_t>(task_index)];
      program_->boxes.push_back((is_src ? sources_ : destinations_).place(task.tensor, task.box));
    }
    return found->second;
  }

  void addSend(const Message& message, int64_t position) {
    const UnitTask& task = taskOf(message);
    SendStep step;
    step.peer = peer_index_.at(message.dst_rank);
    step.track = trackOf(plan_, message);
    step.circle = circleOf(message);
    step.group = groupOf(position);
    step.position = position;
    step.begin = message.begin;
    step.end = message.end;
    if (message.payload == Payload::kPartialSum) {
      const ReduceStep& sum = program_->reductions.back();  // its receives were the steps before
      step.reduction = static_cast<int32_t>(program_->reductions.size()) - 1;
      step.num_deps = 1;
      dependencies_.emplace_back(sum.arrival, static_cast<int32_t>(program_->sends.size()));
    } else if (message.payload == Payload::kContribution) {
      core::require(ownContribution(task) == message.contribution,
                    messageStr(message) + ": its sender does not hold contribution " + std::to_string(message.contribution));
      step.box = boxOf(message.task, true);
    } else if (holdsValue(task)) {
      step.box = boxOf(message.task, true);
    } else {
      addDependencies(message, step);
      step.box = boxOf(message.task, false);
    }
    ++program_->sends_of_peer[static_cast<size_t>(step.peer)];
    program_->sends.push_back(step);
  }

  void addDependencies(const Message& message, SendStep& step) {
    const std::vector<ArrivedRange>& ranges = arrived_[message.task];
    auto range = std::upper_bound(ranges.begin(), ranges.end(), message.begin,
                                  [](int64_t begin, const ArrivedRange& candidate) { return begin < candidate.end; });
    int64_t covered = message.begin;
    for (; range != ranges.end() && range->begin <= covered && covered < message.end; ++range) {
      covered = range->end;
      dependencies_.emplace_back(range->arrival, static_cast<int32_t>(program_->sends.size()));
      ++step.num_deps;
    }
    core::require(covered >= message.end, messageStr(message) + ": its sender does not have element " + std::to_string(covered) + " by then");
  }

  /// Registers elements that are there from now on; returns the arrival's index.
  int32_t addArrival(const Message& message) {
    core::require(needs(taskOf(message)), messageStr(message) + ": its receiver does not need them");
    core::require(!holdsValue(taskOf(message)), messageStr(message) + ": its receiver holds them already");
    std::vector<ArrivedRange>& ranges = arrived_[message.task];
    const auto after = std::lower_bound(ranges.begin(), ranges.end(), message.begin,
                                        [](const ArrivedRange& candidate, int64_t begin) { return candidate.begin < begin; });
    const bool is_free = (after == ranges.end() || message.end <= after->begin) && (after == ranges.begin() || (after - 1)->end <= message.begin);
    core::require(is_free, messageStr(message) + ": its receiver has some of them already");
    ranges.insert(after, {message.begin, message.end, num_arrivals_});
    return num_arrivals_++;
  }

  ReceiveStep& addReceive(const Message& message, int64_t position) {
    ReceiveStep step;
    step.peer = peer_index_.at(message.src_rank);
    step.track = trackOf(plan_, message);
    step.group = groupOf(position);
    step.position = position;
    step.begin = message.begin;
    step.end = message.end;
    step.is_sum = message.payload == Payload::kPartialSum;
    ++program_->receives_of_peer[static_cast<size_t>(step.peer)];
    program_->receives.push_back(step);
    return program_->receives.back();
  }

  void addValue(const Message& message, int64_t position) {
    const int32_t arrival = addArrival(message);
    ReceiveStep& step = addReceive(message, position);
    step.arrival = arrival;
    step.circle = circleOf(message);
    step.box = boxOf(message.task, false);
  }

  static bool isOfSameRange(const Message& a, const Message& b) { return a.task == b.task && a.begin == b.begin && a.end == b.end; }

  /// Whether what the reduction that begins at a position makes is sent on as partial sum.
  bool isPassedOn(const std::vector<Message>& messages, size_t position) const {
    const Message& first = messages[position];
    while (position < messages.size() && messages[position].dst_rank == rank_ && messages[position].payload != Payload::kValue &&
           isOfSameRange(messages[position], first)) {
      ++position;
    }
    return position < messages.size() && messages[position].payload == Payload::kPartialSum && isOfSameRange(messages[position], first);
  }

  void addReduction(const Message& message, bool is_passed_on) {
    const UnitTask& task = taskOf(message);
    ReduceStep step;
    if (is_passed_on) {
      core::require(needs(task) || ownContribution(task) >= 0, messageStr(message) + ": its receiver neither needs nor holds them");
      step.arrival = num_arrivals_++;
    } else {
      step.arrival = addArrival(message);
      step.box = boxOf(message.task, false);
    }
    step.begin = message.begin;
    step.end = message.end;
    step.first_receive = static_cast<int32_t>(program_->receives.size());
    step.reduction = reductionOf(plan_.tensors[static_cast<size_t>(task.tensor)].src);
    if (ownContribution(task) >= 0) {
      step.own_box = boxOf(message.task, true);
      step.own_after = 0;
    }
    program_->reductions.push_back(step);
    last_reduced_task_ = message.task;
  }

  /// A contribution or partial sum that this rank receives.
  void addInput(const std::vector<Message>& messages, size_t position) {
    const Message& message = messages[position];
    std::vector<ReduceStep>& reductions = program_->reductions;
    const bool continues = !reductions.empty() && last_reduced_task_ == message.task && reductions.back().begin == message.begin;
    if (!continues) {
      addReduction(message, isPassedOn(messages, position));
    }
    ReduceStep& step = reductions.back();
    ++step.num_receives;
    if (message.contribution < ownContribution(taskOf(message))) {
      step.own_after = step.num_receives;
    }
    addReceive(message, static_cast<int64_t>(position)).reduction = static_cast<int32_t>(reductions.size()) - 1;
  }

  void addCopies() {
    for (size_t index = 0; index < plan_.tasks.size(); ++index) {
      const UnitTask& task = plan_.tasks[index];
      if (!needs(task)) {
        continue;
      }
      const int64_t num_elements = core::numElements(task.box);
      if (holdsValue(task)) {
        const int32_t src_box = boxOf(static_cast<int64_t>(index), true);
        program_->copies.push_back({src_box, boxOf(static_cast<int64_t>(index), false), num_elements});
        continue;
      }
      int64_t covered = 0;
      for (const ArrivedRange& range : arrived_[static_cast<int64_t>(index)]) {
        covered += range.end - range.begin;
      }
      core::require(covered == num_elements, "rank " + std::to_string(rank_) + " needs " + std::to_string(num_elements) + " elements of " +
                                                 taskStr(plan_, static_cast<int64_t>(index)) + ", the plan brings it " + std::to_string(covered));
    }
  }

  void collectTracks() {
    std::set<int32_t> tracks;
    for (const SendStep& step : program_->sends) {
      tracks.insert(step.track);
    }
    for (const ReceiveStep& step : program_->receives) {
      tracks.insert(step.track);
    }
    program_->tracks.assign(tracks.begin(), tracks.end());
  }

  void linkSends() {
    std::vector<SendStep>& sends = program_->sends;
    for (size_t i = sends.size(); i-- > 0;) {
      int32_t& first = program_->first_send_of_track[Program::trackIndex(sends[i].peer, sends[i].track)];
      sends[i].next_of_track = first;
      first = static_cast<int32_t>(i);
    }
    std::sort(dependencies_.begin(), dependencies_.end());
    program_->dependents_begin.assign(static_cast<size_t>(num_arrivals_) + 1, 0);
    for (const auto& [arrival, send] : dependencies_) {
      ++program_->dependents_begin[static_cast<size_t>(arrival) + 1];
      program_->dependents.push_back(send);
    }
    for (size_t i = 1; i < program_->dependents_begin.size(); ++i) {
      program_->dependents_begin[i] += program_->dependents_begin[i - 1];
    }
  }

  const ReshardingPlan& plan_;
  const BroadcastStars* stars_;  ///< the stars that the plan was made for, or null
  const int64_t rank_;
  const ProgramOptions options_;
  std::shared_ptr<Program> program_;
  const LocalPlaces sources_;
  const LocalPlaces destinations_;
  std::vector<int32_t> group_of_;          ///< by position; empty without groups
  std::vector<int64_t> own_contribution_;  ///< by index in plan.holders
  std::vector<bool> is_needer_;            ///< by index in plan.needers
  std::unordered_map<int64_t, int32_t> peer_index_;
  std::unordered_map<int64_t, int32_t> src_box_;
  std::unordered_map<int64_t, int32_t> dst_box_;
  std::unordered_map<int64_t, std::vector<ArrivedRange>> arrived_;  ///< by task; ascending
  std::vector<std::pair<int32_t, int32_t>> dependencies_;           ///< (arrival, send)
  int64_t last_reduced_task_ = -1;
  int32_t num_arrivals_ = 0;
};

void checkLocalTensor(const std::string& what, const LocalTensor& tensor, const std::optional<std::vector<int64_t>>& shape) {
  if (!shape.has_value()) {
    return;
  }
  core::require(tensor.shape == *shape, what + ": expected shape " + core::shapeStr(*shape) + ", got " + core::shapeStr(tensor.shape));
  core::require(tensor.strides.size() == shape->size(),
                what + ": expected " + std::to_string(shape->size()) + " strides, got " + std::to_string(tensor.strides.size()));
  const bool is_empty = std::find(shape->begin(), shape->end(), 0) != shape->end();
  core::require(is_empty || tensor.data != nullptr, what + " of shape " + core::shapeStr(*shape) + " has no memory");
}

}  // namespace

int64_t Program::numBytes(const ReceiveStep& step) const {
  const int64_t num_elements = step.end - step.begin;
  if (step.reduction < 0) {
    return num_elements * boxes[static_cast<size_t>(step.box)].item_bytes;
  }
  const Reduction& reduction = reductions[static_cast<size_t>(step.reduction)].reduction;
  return num_elements * (step.is_sum ? reduction.accumulatorItemBytes() : reduction.itemBytes());
}

void Program::checkLocalTensors(const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst) const {
  if (src.size() != src_shapes.size() || dst.size() != dst_shapes.size()) {
    throw core::InvalidArgument("expected " + std::to_string(src_shapes.size()) + " source and " + std::to_string(dst_shapes.size()) +
                                " destination tensors, got " + std::to_string(src.size()) + " and " + std::to_string(dst.size()));
  }
  const auto check = [this](const char* what, const std::vector<LocalTensor>& given, const auto& shapes, const std::vector<int32_t>& tensors) {
    for (size_t i = 0; i < given.size(); ++i) {
      const bool fits = !shapes[i].has_value() || (given[i].shape == *shapes[i] && given[i].strides.size() == given[i].shape.size() && given[i].data);
      if (!fits) {  // the text only for a mistake
        checkLocalTensor(std::string(what) + "'s local tensor of tensor " + std::to_string(tensors[i]) + " on rank " + std::to_string(global_rank),
                         given[i], shapes[i]);
      }
    }
  };
  check("the source", src, src_shapes, src_tensors);
  check("the destination", dst, dst_shapes, dst_tensors);
}

std::shared_ptr<const Program> compileProgram(const ReshardingPlan& plan, int64_t global_rank, const ProgramOptions& options) {
  if (!options.broadcasts) {
    return Compiler(plan, global_rank, options).compile();
  }
  ProgramOptions cut = options;
  cut.max_message_bytes = std::max(options.max_message_bytes, kMaxItemBytes);  // so that the order of the stars stays
  const BroadcastStars stars = starsOf(plan, cut.max_message_bytes);
  return Compiler(stars.plan, global_rank, cut, &stars).compile();
}

}  // namespace xmesh::runtime
