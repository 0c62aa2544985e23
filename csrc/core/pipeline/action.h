#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace xmesh::core {

/// What a stage computes for one microbatch. The value is the letter of the notation.
enum class ActionKind : char {
  kForward = 'F',
  kBackward = 'B',        ///< input and weight gradients at once
  kBackwardInput = 'I',   ///< input gradients only; the weights' follow in W
  kBackwardWeight = 'W',  ///< weight gradients, after I of the same stage and microbatch
};

/// What an action waits for from other stages, and makes for others, over its stage's edges.
enum class Crossing : uint8_t {
  kValues,     ///< F: takes its stage's inputs, makes its outputs
  kGradients,  ///< B and I: take the outputs' gradients, make those of the inputs
  kNothing,    ///< W: all it needs is at its stage
};
Crossing crossingOf(ActionKind kind);

/// What becomes of what a stage holds for a microbatch between its actions (a flight).
enum class FlightChange : uint8_t {
  kBegins,  ///< F
  kGoesOn,  ///< I: W still needs it
  kEnds,    ///< B and W
};
FlightChange flightChangeOf(ActionKind kind);

/// One cell of a schedule: a computation of one stage for one microbatch.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int32_t stage = 0;
  int32_t microbatch = 0;

  /// "2F0": stage, kind, microbatch; the notation of torch.distributed.pipelining.
  std::string str() const;
  /// Reads str(); spaces around it are ignored. Throws InvalidArgument that says what was expected; communication and FSDP actions
  /// ("1SEND_F0", "0UNSHARD") are refused, since the engine derives communication from the stages' edges.
  static Action parse(std::string_view text);

  auto operator<=>(const Action&) const = default;
};

/// A cell of a schedule's file: an action, of a whole stage or of a segment, which is numbered within it.
struct WrittenAction {
  Action action;
  std::optional<int32_t> segment;

  /// Reads Segments::textOf(): "2F0", "2.14F0". Throws as Action::parse().
  static WrittenAction parse(std::string_view text);
};

}  // namespace xmesh::core
