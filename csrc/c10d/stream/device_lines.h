#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "c10d/stream/backend_communicators.h"
#include "c10d/stream/device_line.h"
#include "c10d/stream/line_use.h"
#include "runtime/stream/stream_executors.h"

namespace xmesh::c10d_backend {

/// The lines on which calls that move through host memory copy. One stream would have copies in wait behind copies out.
struct MirrorLines {
  std::shared_ptr<DeviceLine> to_host;
  std::shared_ptr<DeviceLine> from_host;
};

/// What one group's rank has on devices: its communicators on their lines, the executors there, and lines for its mirrors. Threading: any thread.
class DeviceLines {
 public:
  /// Makes an inner backend on a device: see BackendCommunicators::Make, of whose names those on another device are no part.
  using MakeInner = std::function<c10::intrusive_ptr<::c10d::Backend>(c10::Device device, const std::string& name, int rank,
                                                                      const std::vector<int64_t>& global_ranks)>;
  /// `group` names the group in the order of calls: alike on all of its ranks, and no other group's.
  DeviceLines(MakeInner make_inner, uint64_t group) : make_inner_(std::move(make_inner)), group_(group) {}

  /// The executors of a route: on its device's line. Once per route.
  std::unique_ptr<runtime::Executors> executors(const runtime::Route& route, runtime::StreamExecutors::Post network);
  /// Made at the first call that moves through host memory.
  MirrorLines mirrorLines(c10::Device device);
  /// Aborts what the group has in flight, and closes the lines that no other group uses; after the executors have been abandoned.
  void close() noexcept;

 private:
  struct Line {
    std::unique_ptr<LineUse> use;
    std::shared_ptr<BackendCommunicators> communicators;
  };
  const MakeInner make_inner_;
  const uint64_t group_;
  const std::shared_ptr<CommunicatorThreads> threads_ = std::make_shared<CommunicatorThreads>();
  std::mutex mutex_;
  std::map<runtime::Route, Line> lines_;
  std::map<c10::DeviceType, MirrorLines> mirror_lines_;  ///< a group keeps to one device of a type
};

}  // namespace xmesh::c10d_backend
