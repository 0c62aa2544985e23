#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace xmesh::c10d_backend {

/// The connections of one inner backend on gloo, which gloo itself gives nobody a hold on: they are found among this process's sockets by the
/// addresses that its ranks tell each other in the store. Broken off, they end what waits for one of them, at either end.
/// Threading: any thread. Ownership: owns no descriptor.
class GlooConnections {
 public:
  /// A store to make the backend with: `store`, but it listens to what goes through from now on.
  static c10::intrusive_ptr<::c10d::Store> listeningStore(const std::shared_ptr<GlooConnections>& connections,
                                                          const c10::intrusive_ptr<::c10d::Store>& store);
  /// An address, if there is one in it, that this rank (`is_own`) or another tells.
  void hear(const std::vector<uint8_t>& value, bool is_own);
  /// To be called once the backend is made, a group of `size` ranks: finds its connections. Those that gloo makes later are found when they are
  /// broken off.
  void find(int size);
  size_t size() const;
  /// Both ends of every connection learn that it has ended.
  void breakOff() noexcept;

 private:
  /// With mutex_.
  void findMore();

  mutable std::mutex mutex_;
  std::set<ino_t> before_;        ///< sockets of this process that are none of them
  std::set<std::string> own_;     ///< where the backend listens, as the kernel writes addresses
  std::set<std::string> others_;  ///< where those of other ranks do
  std::set<ino_t> sockets_;       ///< its connections
};

}  // namespace xmesh::c10d_backend
