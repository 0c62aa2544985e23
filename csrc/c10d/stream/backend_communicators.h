#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c10d/stream/backend_transport.h"
#include "c10d/stream/device_line.h"
#include "runtime/stream/stream_executors.h"

namespace xmesh::c10d_backend {

/// The communicators of one line: inner c10d backends of the library's own, one per set of ranks, made when a call first needs one. As many as
/// kMaxCommunicators stay; the least recently used one goes first. Threading: as Communicators.
class BackendCommunicators final : public runtime::Communicators {
 public:
  static constexpr size_t kMaxCommunicators = 8;
  /// Makes the inner backend of some ranks, of which this one is the `rank`-th. `name` is alike on all of them and never used again; it may block
  /// until they are all there.
  using Make = std::function<c10::intrusive_ptr<::c10d::Backend>(const std::string& name, int rank, const std::vector<int64_t>& global_ranks)>;

  BackendCommunicators(std::shared_ptr<DeviceLine> line, Make make) : line_(std::move(line)), make_(std::move(make)) {}

  uint64_t generation(const runtime::Participants& participants) const override;
  std::shared_ptr<transport::StreamTransport> of(const runtime::Participants& participants, uint64_t generation) override;
  void abort(const runtime::Participants& participants, const transport::StreamFailure& failure) noexcept override;
  void abortAll(const transport::StreamFailure& failure) noexcept;

 private:
  using Ranks = std::vector<int64_t>;
  struct Entry {
    uint64_t generation = 0;                      ///< of the last one made
    std::shared_ptr<BackendTransport> transport;  ///< null when it is gone
  };
  void touch(const Ranks& ranks);

  const std::shared_ptr<DeviceLine> line_;
  const Make make_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::map<Ranks, Entry> entries_;
  std::list<Ranks> used_;  ///< those that are there, the least recently used first
};

}  // namespace xmesh::c10d_backend
