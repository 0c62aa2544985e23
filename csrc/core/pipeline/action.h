#pragma once

#include <compare>
#include <cstdint>
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

/// One cell of a schedule: a computation of one stage for one microbatch.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int32_t stage = 0;
  int32_t microbatch = 0;

  /// B or I: what produces the gradients of the stage's inputs.
  bool isInputGradient() const { return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput; }
  /// "2F0": stage, kind, microbatch; the notation of torch.distributed.pipelining.
  std::string str() const;
  /// Reads str(); spaces around it are ignored. Throws InvalidArgument that says what was expected; communication and FSDP actions
  /// ("1SEND_F0", "0UNSHARD", "(0F1;1B0)OVERLAP_F_B") are refused, since the engine derives communication from the stages' edges.
  static Action parse(std::string_view text);

  auto operator<=>(const Action&) const = default;
};

}  // namespace xmesh::core
