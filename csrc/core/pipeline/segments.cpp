#include "core/pipeline/segments.h"

#include <algorithm>

#include "core/error.h"

namespace xmesh::core {

Segments::Segments(const std::vector<int32_t>& counts) {
  if (counts.empty()) {
    return;
  }
  begins_ = {0};
  for (const int32_t count : counts) {
    require(count >= 1, "stage " + std::to_string(begins_.size() - 1) + " has " + std::to_string(count) + " segments, expected at least 1");
    begins_.push_back(begins_.back() + count);
  }
}

bool Segments::isDivided() const { return begins_.size() > 1 && static_cast<size_t>(begins_.back()) + 1 > begins_.size(); }

std::vector<int32_t> Segments::counts() const {
  std::vector<int32_t> out;
  for (size_t stage = 0; stage + 1 < begins_.size(); ++stage) {
    out.push_back(begins_[stage + 1] - begins_[stage]);
  }
  return out;
}

int32_t Segments::countOf(int32_t stage) const {
  return begins_.empty() ? 1 : begins_.at(static_cast<size_t>(stage) + 1) - begins_.at(static_cast<size_t>(stage));
}

int32_t Segments::firstOf(int32_t stage) const { return begins_.empty() ? stage : begins_.at(static_cast<size_t>(stage)); }

std::vector<Action> Segments::expand(const std::vector<Action>& actions) const {
  if (begins_.empty()) {
    return actions;
  }
  std::vector<Action> out;
  out.reserve(actions.size());
  for (const Action& action : actions) {
    const auto stage = static_cast<size_t>(action.stage);
    require(stage + 1 < begins_.size(), "action " + action.str() + " is of none of " + std::to_string(begins_.size() - 1) + " stages");
    const int32_t begin = begins_[stage];
    const int32_t count = begins_[stage + 1] - begin;
    for (int32_t place = 0; place < count; ++place) {
      const int32_t at = action.kind == ActionKind::kForward ? place : count - 1 - place;
      out.push_back({action.kind, begin + at, action.microbatch});
    }
  }
  return out;
}

int32_t Segments::stageOf(int32_t segment) const {
  if (begins_.empty()) {
    return segment;
  }
  require(segment >= 0 && segment < begins_.back(), "there is no segment " + std::to_string(segment));
  return static_cast<int32_t>(std::upper_bound(begins_.begin(), begins_.end(), segment) - begins_.begin()) - 1;
}

bool Segments::isOnly(int32_t segment) const {
  const auto stage = static_cast<size_t>(stageOf(segment));
  return begins_.empty() || begins_[stage + 1] - begins_[stage] == 1;
}

std::string Segments::nameOf(int32_t segment) const {
  const int32_t stage = stageOf(segment);
  const std::string name = "stage " + std::to_string(stage);
  return isOnly(segment) ? name : name + ", segment " + std::to_string(segment - begins_[static_cast<size_t>(stage)]);
}

std::string Segments::nameOf(const Action& action) const {
  const int32_t stage = stageOf(action.stage);
  const std::string name = Action{action.kind, stage, action.microbatch}.str();
  return isOnly(action.stage) ? name : name + ", segment " + std::to_string(action.stage - begins_[static_cast<size_t>(stage)]);
}

std::string Segments::textOf(const Action& action) const {
  if (isOnly(action.stage)) {
    return Action{action.kind, stageOf(action.stage), action.microbatch}.str();
  }
  const int32_t stage = stageOf(action.stage);
  const int32_t segment = action.stage - begins_[static_cast<size_t>(stage)];
  return std::to_string(stage) + '.' + Action{action.kind, segment, action.microbatch}.str();
}

}  // namespace xmesh::core
