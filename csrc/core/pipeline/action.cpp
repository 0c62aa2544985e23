#include "core/pipeline/action.h"

#include <charconv>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr std::string_view kKinds = "FBIW";

[[noreturn]] void refuse(std::string_view text) {
  throw InvalidArgument(
      "'" + std::string(text) +
      "' is not an action of a schedule; expected [stage][F|B|I|W][microbatch], for example 2F0. Communication (SEND_F, RECV_B, ...), "
      "UNSHARD, RESHARD and REDUCE_GRAD are not written in a schedule");
}

/// Reads a number at the front of `rest` and drops it there; false where there is none or it does not fit.
bool takeNumber(std::string_view& rest, int32_t& number) {
  const char* end = rest.data() + rest.size();
  const auto [stop, error] = std::from_chars(rest.data(), end, number);
  if (error != std::errc() || number < 0) {
    return false;
  }
  rest.remove_prefix(static_cast<size_t>(stop - rest.data()));
  return true;
}

}  // namespace

Crossing crossingOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return Crossing::kValues;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      return Crossing::kGradients;
    case ActionKind::kBackwardWeight:
      return Crossing::kNothing;
  }
  throw InvalidArgument("no such kind of action: " + std::to_string(static_cast<int>(kind)));
}

FlightChange flightChangeOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return FlightChange::kBegins;
    case ActionKind::kBackwardInput:
      return FlightChange::kGoesOn;
    case ActionKind::kBackward:
    case ActionKind::kBackwardWeight:
      return FlightChange::kEnds;
  }
  throw InvalidArgument("no such kind of action: " + std::to_string(static_cast<int>(kind)));
}

std::string Action::str() const { return std::to_string(stage) + static_cast<char>(kind) + std::to_string(microbatch); }

Action Action::parse(std::string_view text) {
  const WrittenAction written = WrittenAction::parse(text);
  if (written.segment) {
    refuse(text);
  }
  return written.action;
}

WrittenAction WrittenAction::parse(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpaces);
  std::string_view rest = first == std::string_view::npos ? std::string_view() : text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
  WrittenAction out;
  if (!takeNumber(rest, out.action.stage)) {
    refuse(text);
  }
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    if (!takeNumber(rest, out.segment.emplace())) {
      refuse(text);
    }
  }
  if (rest.empty() || kKinds.find(rest.front()) == std::string_view::npos) {
    refuse(text);
  }
  out.action.kind = static_cast<ActionKind>(rest.front());
  rest.remove_prefix(1);
  if (!takeNumber(rest, out.action.microbatch) || !rest.empty()) {
    refuse(text);
  }
  return out;
}

}  // namespace xmesh::core
