#include "runtime/failure.h"

#include "core/error.h"

namespace xmesh::runtime {

void throwFailure(const Failure& failure) {
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
