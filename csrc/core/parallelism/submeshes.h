#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace xmesh::core {

/// Hosts that are alike in compute, memory and network. A cluster is a list of classes, usually of one.
struct HostClass {
  size_t num_hosts = 0;
  size_t devices_per_host = 0;
};

/// The hosts that a submesh has of one class: either one host, or all devices of each.
struct SubmeshPart {
  size_t host_class = 0;
  size_t num_hosts = 0;
  size_t devices_per_host = 0;
  auto operator<=>(const SubmeshPart&) const = default;
};

/// The devices of one stage, before it is known which. It has one part, or is mixed: whole hosts of several classes, in the order of classes.
struct Submesh {
  std::vector<SubmeshPart> parts;

  /// By class.
  std::vector<size_t> numDevices(size_t num_classes) const;
  auto operator<=>(const Submesh&) const = default;
};

enum class HostCounts : uint8_t { kAll, kPowersOfTwo };

struct SubmeshChoice {
  HostCounts host_counts = HostCounts::kAll;  ///< of whole hosts; all hosts of a class are always one choice
  bool is_mixed = false;                      ///< also whole hosts of several classes
};

/// The shapes that stages may have: L. Zheng et al., Alpa (OSDI 2022), section 5.2. Of hosts with M devices these are (1, 2^p) below M, (n, M), and,
/// for an M that is no power of two, (1, d) for each divisor d of M. By class, smallest first; mixed ones follow.
/// Throws InvalidArgument for a cluster without hosts and for hosts without devices.
std::vector<Submesh> submeshShapes(const std::vector<HostClass>& cluster, const SubmeshChoice& choice = {});

/// Devices of one host: `num_devices` from `first_device` on.
struct HostDevices {
  size_t host_class = 0;
  size_t host = 0;  ///< within its class
  size_t first_device = 0;
  size_t num_devices = 0;
  bool operator==(const HostDevices&) const = default;
};

/// Gives each of `submeshes`, which are in the order of stages, its devices: no device to two. Nothing where that is impossible.
///
/// Stages next to each other get devices next to each other where all fit in order, one after the other. Else the largest submeshes get theirs
/// first, and equal ones in the order of stages. Shapes (1, 2^p) and (n, M) that fill hosts of M = 2^m devices always have a placement (Theorem 1 of
/// Appendix A), which this finds at once. For others it fills one host after the other, and goes back where that leaves devices without use that are
/// needed.
///
/// Throws InvalidArgument for a submesh that is none of this cluster's.
std::optional<std::vector<std::vector<HostDevices>>> placeSubmeshes(const std::vector<HostClass>& cluster, const std::vector<Submesh>& submeshes);

}  // namespace xmesh::core
