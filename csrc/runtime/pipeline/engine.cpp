#include "runtime/pipeline/engine.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>

namespace xmesh::runtime {
namespace {

constexpr std::chrono::microseconds kLookEvery{50};  ///< at a device that computes, and at what may have arrived

}  // namespace

using core::Action;
using core::Crossing;

std::vector<PlaceStep> placeProgram(const std::vector<Action>& actions, const std::vector<PlaceEdge>& edges) {
  std::vector<PlaceStep> out;
  out.reserve(actions.size());
  std::map<std::pair<int32_t, int32_t>, size_t> input_steps;
  for (const Action& action : actions) {
    PlaceStep& step = out.emplace_back();
    step.action = action;
    const Crossing crossing = core::crossingOf(action.kind);
    if (crossing == Crossing::kNothing) {
      const auto found = input_steps.find({action.stage, action.microbatch});
      step.input_step = found == input_steps.end() ? std::nullopt : std::optional(found->second);
      continue;
    }
    if (action.kind == core::ActionKind::kBackwardInput) {
      input_steps.emplace(std::pair(action.stage, action.microbatch), out.size() - 1);
    }
    const bool is_forward = crossing == Crossing::kValues;
    for (size_t i = 0; i < edges.size(); ++i) {
      const PlaceEdge& edge = edges[i];
      const Transfer transfer{static_cast<int32_t>(i), action.microbatch, !is_forward};
      if (!is_forward && !edge.has_gradient) {
        continue;
      }
      const bool is_own = edge.has_producer && edge.has_consumer;
      const auto receive = [&] {
        step.receives.push_back(transfer);
        if (!is_own) {
          step.posted.push_back(transfer);
        }
      };
      if (edge.has_producer && edge.from == action.stage) {
        is_forward ? step.sends.push_back(transfer) : receive();
      }
      if (edge.has_consumer && edge.to == action.stage) {
        is_forward ? receive() : step.sends.push_back(transfer);
      }
    }
  }
  return out;
}

int64_t steadyNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Engine::run(const std::vector<PlaceStep>& steps, ActionRunner& runner, BoundaryTraffic& traffic) {
  spans_.clear();
  spans_.reserve(2 * steps.size());
  failed_action_.reset();
  std::vector<bool> is_done(steps.size(), false);
  Posted posted;
  postReceives(steps, 0, posted, traffic);
  traffic.flush();
  for (size_t i = 0; i < steps.size(); ++i) {
    if (is_done[i]) {
      continue;
    }
    const PlaceStep& step = steps[i];
    if (options_.overlap && !step.posted.empty()) {
      runWeightsEarly(steps, i, is_done, runner, traffic);
    }
    waitReceives(step, traffic);
    posted.ahead -= step.posted.empty() ? 0 : 1;
    traffic.check();
    compute(step.action, runner);
    is_done[i] = true;
    for (const Transfer& transfer : step.sends) {
      traffic.send(transfer);
    }
    runner.release(step.action);
    postReceives(steps, i + 1, posted, traffic);
    traffic.flush();
    follow(step.action, runner);
    if (!options_.overlap && !step.sends.empty()) {
      enter(State::kDraining);
      traffic.drain();
    }
  }
  enter(State::kDraining);
  traffic.drain();
  enter(State::kIdle);
}

void Engine::postReceives(const std::vector<PlaceStep>& steps, size_t current, Posted& posted, BoundaryTraffic& traffic) const {
  for (; posted.next < steps.size() && (posted.next <= current || !options_.overlap || posted.ahead <= options_.lookahead); ++posted.next) {
    for (const Transfer& transfer : steps[posted.next].posted) {
      traffic.postReceive(transfer);
    }
    posted.ahead += steps[posted.next].posted.empty() ? 0 : 1;
  }
}

void Engine::runWeightsEarly(const std::vector<PlaceStep>& steps, size_t current, std::vector<bool>& is_done, ActionRunner& runner,
                             BoundaryTraffic& traffic) {
  const auto hasArrived = [&] {
    const std::vector<Transfer>& posted = steps[current].posted;
    return std::all_of(posted.begin(), posted.end(), [&](const Transfer& transfer) { return traffic.hasArrived(transfer); });
  };
  const auto adds = [](const PlaceStep& step) { return core::flightChangeOf(step.action.kind) == core::FlightChange::kEnds; };
  std::set<int32_t> blocked;  // of these gradients a B or W stands before the rest of the list
  if (adds(steps[current])) {
    blocked.insert(runner.weightsGroup(steps[current].action.stage));
  }
  for (size_t next = current + 1; next < steps.size() && blocked.size() < runner.numWeightsGroups() && !hasArrived(); ++next) {
    const PlaceStep& step = steps[next];
    if (is_done[next] || !adds(step)) {
      continue;
    }
    const int32_t group = runner.weightsGroup(step.action.stage);
    if (blocked.contains(group)) {
      continue;
    }
    const bool is_ready = step.action.kind == core::ActionKind::kBackwardWeight && step.input_step && is_done[*step.input_step];
    if (!is_ready || !runner.mayRunEarly(step.action.stage)) {
      blocked.insert(group);
      continue;
    }
    while (runner.isBusy() && !hasArrived()) {  // else all W would be enqueued ahead of what this waits for
      traffic.check();
      std::this_thread::sleep_for(kLookEvery);
    }
    if (hasArrived()) {
      return;
    }
    traffic.check();
    compute(step.action, runner);
    is_done[next] = true;
    runner.release(step.action);
    follow(step.action, runner);
  }
}

void Engine::waitReceives(const PlaceStep& step, BoundaryTraffic& traffic) {
  if (step.receives.empty()) {
    return;
  }
  enter(State::kWaiting, step.action);
  const int64_t begin_ns = steadyNanoseconds();
  for (const Transfer& transfer : step.receives) {
    traffic.waitReceive(transfer);
  }
  spans_.push_back({EngineSpan::Kind::kWait, step.action, begin_ns, steadyNanoseconds()});
}

void Engine::compute(const Action& action, ActionRunner& runner) {
  enter(State::kComputing, action);
  const int64_t begin_ns = steadyNanoseconds();
  try {
    runner.run(action);
  } catch (...) {
    failed_action_ = action;
    enter(State::kIdle);
    throw;
  }
  spans_.push_back({EngineSpan::Kind::kCompute, action, begin_ns, steadyNanoseconds()});
}

void Engine::follow(const Action& action, ActionRunner& runner) {
  try {
    runner.follow(action);
  } catch (...) {
    failed_action_ = action;
    enter(State::kIdle);
    throw;
  }
}

void Engine::enter(State state, const Action& action) {
  const std::lock_guard lock(mutex_);
  state_ = state;
  action_ = action;
}

std::string Engine::describe(const std::function<std::string(const Action&)>& name) const {
  const std::lock_guard lock(mutex_);
  switch (state_) {
    case State::kComputing:
      return "computes " + name(action_);
    case State::kWaiting:
      return "waits for what " + name(action_) + " needs";
    case State::kDraining:
      return "waits until what it sent has left";
    case State::kIdle:
      break;
  }
  return "is between steps";
}

}  // namespace xmesh::runtime
