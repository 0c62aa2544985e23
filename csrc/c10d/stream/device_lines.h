#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/stream/backend_communicators.h"
#include "c10d/stream/device_line.h"
#include "runtime/stream/stream_executors.h"

namespace xmesh::c10d_backend {

/// The lines of one group's rank, with their communicators, and the executors on them. Threading: any thread.
class DeviceLines {
 public:
  /// Makes an inner backend on a device: see BackendCommunicators::Make, of whose names those of another line are no part.
  using MakeInner = std::function<c10::intrusive_ptr<::c10d::Backend>(c10::Device device, const std::string& name, int rank,
                                                                      const std::vector<int64_t>& global_ranks)>;
  explicit DeviceLines(MakeInner make_inner) : make_inner_(std::move(make_inner)) {}

  /// The executors of a route: of its line, which is made. Once per route.
  std::unique_ptr<runtime::Executors> executors(const runtime::Route& route, runtime::StreamExecutors::Post network);
  /// The line on which calls that move through host memory copy to it and from it; made at the first.
  std::shared_ptr<DeviceLine> mirrorLine(c10::Device device);
  /// Aborts what is in flight and ends the lines' threads; after the executors have been abandoned.
  void close() noexcept;

 private:
  struct Line {
    std::shared_ptr<DeviceLine> line;
    std::shared_ptr<BackendCommunicators> communicators;
    std::shared_ptr<const runtime::StreamKernels> kernels;
  };
  const MakeInner make_inner_;
  const std::shared_ptr<CommunicatorThreads> threads_ = std::make_shared<CommunicatorThreads>();
  std::mutex mutex_;
  std::map<runtime::Route, Line> lines_;
  std::map<c10::DeviceType, std::shared_ptr<DeviceLine>> mirror_lines_;  ///< a group keeps to one device of a type
};

}  // namespace xmesh::c10d_backend
