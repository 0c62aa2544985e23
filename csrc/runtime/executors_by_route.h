#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/executor.h"

namespace xmesh::runtime {

/// All executors of one group's rank: one set for host memory, whatever the line, and one for each route on a device. Threading: peakStagingBytes()
/// and disconnect() on any thread, all else on the network's.
class ExecutorsByRoute {
 public:
  /// Makes those of a route on a device. Throws where nothing carries it.
  using Make = std::function<std::unique_ptr<Executors>(const Route& route)>;

  explicit ExecutorsByRoute(std::unique_ptr<Executors> host, Make make = nullptr) : host_(std::move(host)), make_(std::move(make)) {}
  /// Those of a route, made at its first call. Throws GroupError where nothing carries it.
  Executors& at(const Route& route);
  /// As Executors', of every route.
  void promise(uint64_t turn);
  /// As Executors'; none is made from now on.
  void disconnect();
  /// The network has been destroyed: nothing more may be asked of it.
  void abandon();
  /// The most of each added: at least what was ever in use at once.
  int64_t peakStagingBytes() const;

 private:
  const std::unique_ptr<Executors> host_;
  const Make make_;
  mutable std::mutex mutex_;  ///< guards the two below against other threads
  bool is_disconnected_ = false;
  uint64_t promised_turn_ = 0;  ///< the network's thread
  std::map<Route, std::unique_ptr<Executors>> on_devices_;
};

}  // namespace xmesh::runtime
