#include <algorithm>

#include "transport/tcp/sender.h"

namespace xmesh::transport {

void TcpSender::schedule(OperationId operation, Stream& stream) {
  if (!stream.is_scheduled && mayGo(stream)) {
    stream.is_scheduled = true;
    makeRunnable(operation);
  }
}

/// A single small message, such as what ranks agree on before a step, in front: it holds up nobody. While its call has some of its quantum left, in
/// front, before messages of that call with a higher cookie. Else at the end, where messages of the same call swap with it until their cookies
/// ascend.
void TcpSender::makeRunnable(OperationId operation) {
  const auto cookie = [this](OperationId runnable) { return streams_.at(runnable).messages.front().cookie; };
  const auto isAlone = [this](OperationId runnable) {
    const std::deque<Message>& messages = streams_.at(runnable).messages;
    return messages.size() == 1 && messages.front().num_bytes <= kSmallMessageBytes;
  };
  const auto isOfCall = [&](OperationId runnable) { return runnable.call == operation.call; };
  if (isAlone(operation) && operation.call != quantum_call_ && std::none_of(runnable_.begin(), runnable_.end(), isOfCall)) {
    runnable_.insert(std::find_if_not(runnable_.begin(), runnable_.end(), isAlone), operation);
    return;
  }
  if (operation.call == quantum_call_ && quantum_bytes_ > 0) {
    const auto at = std::find_if(runnable_.begin(), runnable_.end(),
                                 [&](OperationId runnable) { return runnable.call != operation.call || cookie(runnable) > cookie(operation); });
    runnable_.insert(at, operation);
    return;
  }
  runnable_.push_back(operation);
  size_t at = runnable_.size() - 1;
  for (size_t i = at; i-- > 0;) {
    if (runnable_[i].call != operation.call) {
      continue;
    }
    if (cookie(runnable_[i]) <= cookie(operation)) {
      return;
    }
    std::swap(runnable_[i], runnable_[at]);
    at = i;
  }
}

/// The first runnable operation, of which `num_bytes` leave now. A call whose quantum is used up goes behind the others with all its tracks. A small
/// message of another call does not end the quantum of the one that goes.
void TcpSender::takeQuantum(int64_t num_bytes) {
  const OperationId operation = runnable_.front();
  runnable_.pop_front();
  if (operation.call != quantum_call_ && num_bytes <= kSmallMessageBytes) {
    return;
  }
  if (operation.call != quantum_call_) {
    quantum_call_ = operation.call;
    quantum_bytes_ = kQuantumBytes;
  }
  quantum_bytes_ -= num_bytes;
  if (quantum_bytes_ <= 0) {
    std::stable_partition(runnable_.begin(), runnable_.end(), [&](OperationId runnable) { return runnable.call != operation.call; });
    quantum_call_ = 0;
  }
}

}  // namespace xmesh::transport
