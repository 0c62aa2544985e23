#pragma once

#include <cstdint>
#include <functional>

#include "transport/operation.h"

namespace xmesh::transport {

/// What became of an operation's messages. Called on the transport's thread only. The `cookie` is the one given to send() or recv().
class OperationEvents {
 public:
  virtual ~OperationEvents() = default;
  virtual void onSent(int64_t cookie) = 0;
  virtual void onReceived(int64_t cookie) = 0;
};

/// Moves bytes between the ranks of one group and tells the host of every completion; knows no specs. `peer` is a group rank.
/// Threading: everything but post() is called on the transport's own thread; callbacks come on it and may call back in.
/// Matching: the k-th send of an operation to a peer meets the k-th recv that the peer posted for that operation from this rank; their sizes must be
/// equal. A send moves bytes only once its receive is posted (the receiver's posting is told to the sender), so an operation that is not
/// received yet never blocks another one on the same connection. Of the messages to one peer that may move at the same time those of one call
/// should leave by ascending cookie: that is the order in which they are needed. Buffers belong to the transport until the completion or close().
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  /// Runs `task` on the transport's thread, after the tasks posted before. Any thread.
  virtual void post(std::function<void()> task) = 0;
  virtual void open(OperationId operation, OperationEvents& events) = 0;
  virtual void send(OperationId operation, int32_t peer, const void* data, int64_t num_bytes, int64_t cookie) = 0;
  virtual void recv(OperationId operation, int32_t peer, void* data, int64_t num_bytes, int64_t cookie) = 0;
  /// Forgets the operation: no callback comes any more and its buffers are free when this returns. A message that is half on its way is
  /// not completed at its receiver, and the connection stays usable for other operations.
  virtual void close(OperationId operation) = 0;
  /// Limits what leaves for `peer` to this rate; 0 lifts the limit. A transport that cannot pace ignores it.
  virtual void pace(int32_t peer, int64_t bytes_per_s) { static_cast<void>(peer), static_cast<void>(bytes_per_s); }
};

}  // namespace xmesh::transport
