#include "runtime/failure.h"

#include "core/error.h"

namespace xmesh::runtime {

void throwFailure(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kMistake:
      throw core::InvalidArgument(failure.text);
    case FailureKind::kPeer:
      throw PeerError(failure.text, failure.blamed_ranks);
    case FailureKind::kGroup:
      break;
  }
  throw GroupError(failure.text);
}

}  // namespace xmesh::runtime
