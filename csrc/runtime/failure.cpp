#include "runtime/failure.h"

#include <atomic>

#include "core/error.h"

namespace xmesh::runtime {
namespace {

std::atomic<void (*)(const Failure&)> throwing_above{nullptr};

}  // namespace

std::string rankList(const std::vector<int64_t>& ranks) {
  constexpr size_t kMost = 16;
  std::string out;
  for (size_t i = 0; i < ranks.size() && i < kMost; ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return "[" + out + (ranks.size() > kMost ? ", ..." : "") + "]";
}

void setThrowing(void (*throwing)(const Failure& failure)) { throwing_above = throwing; }

void throwFailure(const Failure& failure) {
  if (void (*const throwing)(const Failure&) = throwing_above; throwing != nullptr) {
    throwing(failure);
  }
  switch (failure.kind) {
    case FailureKind::kMistake:
      throw core::InvalidArgument(failure.text);
    case FailureKind::kPeer:
      throw PeerError(failure.text, failure.blamed_ranks);
    case FailureKind::kStage:
      throw StageError(failure.text, failure.stage, failure.microbatch);
    case FailureKind::kGroup:
      break;
  }
  throw GroupError(failure.text);
}

}  // namespace xmesh::runtime
