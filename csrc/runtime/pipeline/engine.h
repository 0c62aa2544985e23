#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/pipeline/action.h"

namespace xmesh::runtime {

/// The values (or, against their direction, the gradients) of one edge of the pipeline for one microbatch: what moves at once.
struct Transfer {
  int32_t edge = 0;
  int32_t microbatch = 0;
  bool is_gradient = false;

  auto operator<=>(const Transfer&) const = default;
};

/// Computes. Called on the thread that runs the engine.
class ActionRunner {
 public:
  virtual ~ActionRunner() = default;
  /// What its kind says, for its stage and microbatch.
  virtual void run(const core::Action& action) = 0;
  /// What the action made has been handed to the traffic: what only that needed may go.
  virtual void release(const core::Action& action) = 0;
  /// The action's sends have been started. Now is the time for what comes of it and is less urgent, as sums of gradients.
  virtual void follow(const core::Action& action) = 0;
  /// What has run is not over yet: a device has it enqueued.
  virtual bool isBusy() const { return false; }
  /// Whether a stage's W may run before the place's list comes to it: it communicates with nobody.
  virtual bool mayRunEarly(int32_t stage) const = 0;
  /// Stages of one number add to the same gradients: their B and W keep the order of the place's list.
  virtual int32_t weightsGroup(int32_t stage) const = 0;
  virtual size_t numWeightsGroups() const = 0;
};

/// Moves values between the stages of different places, in the background. Called on the thread that runs the engine.
class BoundaryTraffic {
 public:
  virtual ~BoundaryTraffic() = default;
  /// Makes room for a transfer that will come, with the next flush(). Does not block.
  virtual void postReceive(const Transfer& transfer) = 0;
  /// Whether waitReceive() would return at once, or throw.
  virtual bool hasArrived(const Transfer& transfer) const = 0;
  /// Waits for a posted transfer and gives it to its stage.
  virtual void waitReceive(const Transfer& transfer) = 0;
  /// Sends what the stage has made, with the next flush(). Does not block.
  virtual void send(const Transfer& transfer) = 0;
  /// Starts what was posted and sent since the last time, all at once. Does not block.
  virtual void flush() = 0;
  /// Waits until all that was sent has left.
  virtual void drain() = 0;
  /// Throws what the pipeline has failed with, if it has; cheap.
  virtual void check() const = 0;
};

/// An edge as one place sees it.
struct PlaceEdge {
  int32_t from = 0;
  int32_t to = 0;
  bool has_gradient = true;
  bool has_producer = false;  ///< `from` is on this place
  bool has_consumer = false;  ///< `to` is on this place
};

/// An action with what it must receive before and send after.
struct PlaceStep {
  core::Action action;
  std::vector<Transfer> receives;
  std::vector<Transfer> posted;      ///< those of them that another place sends: room is made for them ahead
  std::vector<Transfer> sends;       ///< of one that this place receives too, room is made here
  std::optional<size_t> input_step;  ///< for a W, the step of its I, if the list has that
};

/// One place's list of actions with its communication. Edges are those that cross the network; edge i of a Transfer is edges[i].
std::vector<PlaceStep> placeProgram(const std::vector<core::Action>& actions, const std::vector<PlaceEdge>& edges);

/// What the place did when: steady clock, nanoseconds.
struct EngineSpan {
  enum class Kind : uint8_t { kCompute, kWait };
  Kind kind = Kind::kCompute;
  core::Action action;  ///< computed, or waiting to be
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

struct EngineOptions {
  /// False: the place waits for each value to leave before it goes on. All receives of the run are posted at its start then, so that no two places
  /// wait for each other; what a place receives may still come while it computes.
  bool overlap = true;
  /// With overlap: how many receiving actions beyond the present one have their receives posted; bounds the buffers.
  int32_t lookahead = 4;
};

int64_t steadyNanoseconds();

/// Runs the list of one place on a runner and a traffic, in order. Receives are posted ahead, first needed first; a value is sent as soon as its
/// action has ended and waited for only where it is needed. Before it waits for another place, with overlap, it runs the next W of the list, if that
/// may run early, its I is done and no other B or W that adds to the same gradients stands before it: these are added up in the list's order,
/// whatever comes late. What a place sends itself comes soon, and all its ranks wait for it together: a W then would hold them up. No action begins
/// once the pipeline has failed. Threading: run() on one thread at a time; describe() on any. Runner and traffic must outlive run().
class Engine {
 public:
  explicit Engine(EngineOptions options) : options_(options) {}

  /// Throws what the runner or the traffic throws; failedAction() then tells whether it was the runner.
  void run(const std::vector<PlaceStep>& steps, ActionRunner& runner, BoundaryTraffic& traffic);
  /// The action in which the last run's runner threw.
  std::optional<core::Action> failedAction() const { return failed_action_; }
  /// What the last run did and waited for, ordered by begin.
  const std::vector<EngineSpan>& spans() const { return spans_; }
  /// What the place does at this moment, for a person: "computes 2F3", "waits for what 2F3 needs", "is between steps". `name`: an action's.
  std::string describe(const std::function<std::string(const core::Action&)>& name = &core::Action::str) const;

 private:
  enum class State : uint8_t { kIdle, kComputing, kWaiting, kDraining };
  /// The receives of a run that are posted.
  struct Posted {
    size_t next = 0;    ///< the first step whose receives are not
    int32_t ahead = 0;  ///< steps with posted receives that have not run
  };
  /// Posts what step `current`, which comes next, and those after it receive, as far ahead as the options say.
  void postReceives(const std::vector<PlaceStep>& steps, size_t current, Posted& posted, BoundaryTraffic& traffic) const;
  void enter(State state, const core::Action& action = {});
  void compute(const core::Action& action, ActionRunner& runner);
  void follow(const core::Action& action, ActionRunner& runner);
  void waitReceives(const PlaceStep& step, BoundaryTraffic& traffic);
  /// Runs W of later steps until what step `current` needs has arrived, or there is none to run.
  void runWeightsEarly(const std::vector<PlaceStep>& steps, size_t current, std::vector<bool>& is_done, ActionRunner& runner,
                       BoundaryTraffic& traffic);

  const EngineOptions options_;
  std::vector<EngineSpan> spans_;
  std::optional<core::Action> failed_action_;
  mutable std::mutex mutex_;  ///< guards the two below
  State state_ = State::kIdle;
  core::Action action_;
};

}  // namespace xmesh::runtime
