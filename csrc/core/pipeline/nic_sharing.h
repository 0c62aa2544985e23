#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace xmesh::core {

/// A transfer between two places that takes `seconds` alone.
struct NicFlow {
  int32_t from = 0;
  int32_t to = 0;
  double seconds = 0;
};

/// Flows between the full-duplex NICs of places, one at a time for each ordered pair. They share each NIC's two directions max-min fairly: no flow
/// could be faster without a slower one becoming slower still (Bertsekas and Gallager, Data Networks, section 6.5.2). Times never go back.
class NicSharing {
 public:
  explicit NicSharing(int32_t num_places) : num_places_(num_places), is_busy_(static_cast<size_t>(num_places) * static_cast<size_t>(num_places)) {}

  bool isEmpty() const { return active_.empty(); }
  /// Whether a flow between the same places is on its way.
  bool isBusy(const NicFlow& flow) const { return is_busy_[pairOf(flow)]; }
  void start(int32_t id, const NicFlow& flow, double now);
  /// Gives every flow its share from `now` on; call after flows have ended or started.
  void share(double now);
  /// When the next flow ends, as of the last share(); infinite if there is none.
  double nextEnd() const { return next_end_s_; }
  /// Removes the flows that end by `now`; their ids in order of their start.
  std::vector<int32_t> endedBy(double now);

 private:
  struct Active {
    int32_t id = 0;
    NicFlow flow;  ///< seconds: what is left at since_s
    double since_s = 0;
    double rate = 0;  ///< part of a NIC
    double end_s = 0;
  };

  std::vector<double> fairRates() const;
  size_t pairOf(const NicFlow& flow) const {
    return static_cast<size_t>(flow.from) * static_cast<size_t>(num_places_) + static_cast<size_t>(flow.to);
  }

  int32_t num_places_;
  std::vector<bool> is_busy_;  ///< by pair of places
  std::vector<Active> active_;
  bool has_changed_ = false;  ///< flows have ended or started since the last share()
  double next_end_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace xmesh::core
