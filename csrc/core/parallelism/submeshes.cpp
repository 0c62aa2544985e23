#include "core/parallelism/submeshes.h"

#include <algorithm>
#include <bit>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

void checkCluster(const std::vector<HostClass>& cluster) {
  require(!cluster.empty(), "a cluster has at least one class of hosts");
  for (size_t host_class = 0; host_class < cluster.size(); ++host_class) {
    require(cluster[host_class].num_hosts > 0, "class " + std::to_string(host_class) + " has no hosts");
    require(cluster[host_class].devices_per_host > 0, "hosts of class " + std::to_string(host_class) + " have no devices");
  }
}

std::string shapeName(const SubmeshPart& part) { return "(" + std::to_string(part.num_hosts) + ", " + std::to_string(part.devices_per_host) + ")"; }

void checkSubmesh(const std::vector<HostClass>& cluster, const Submesh& submesh, size_t index) {
  const std::string name = "submesh " + std::to_string(index);
  require(!submesh.parts.empty(), name + " has no hosts");
  for (size_t part_index = 0; part_index < submesh.parts.size(); ++part_index) {
    const SubmeshPart& part = submesh.parts[part_index];
    const std::string shape = name + " of shape " + shapeName(part);
    require(part.host_class < cluster.size(),
            shape + " is of class " + std::to_string(part.host_class) + ", but the cluster has " + std::to_string(cluster.size()) + " classes");
    require(part_index == 0 || submesh.parts[part_index - 1].host_class < part.host_class, shape + " has a class out of order, or twice");
    const HostClass& hosts = cluster[part.host_class];
    require(part.num_hosts > 0 && part.devices_per_host > 0, shape + " has no devices");
    require(part.num_hosts <= hosts.num_hosts && part.devices_per_host <= hosts.devices_per_host,
            shape + " is larger than its class, " + std::to_string(hosts.num_hosts) + " hosts of " + std::to_string(hosts.devices_per_host));
    const bool is_whole = part.devices_per_host == hosts.devices_per_host;
    require(is_whole || (part.num_hosts == 1 && submesh.parts.size() == 1),
            shape + " shares several hosts with others, which have " + std::to_string(hosts.devices_per_host) + " devices each");
  }
}

std::vector<size_t> hostCounts(size_t num_hosts, HostCounts counts) {
  std::vector<size_t> out;
  for (size_t count = 1; count < num_hosts; count = counts == HostCounts::kAll ? count + 1 : 2 * count) {
    out.push_back(count);
  }
  out.push_back(num_hosts);
  return out;
}

void addMixed(const std::vector<HostClass>& cluster, HostCounts counts, Submesh& begun, size_t host_class, std::vector<Submesh>& out) {
  if (host_class == cluster.size()) {
    if (begun.parts.size() > 1) {
      out.push_back(begun);
    }
    return;
  }
  addMixed(cluster, counts, begun, host_class + 1, out);
  for (const size_t count : hostCounts(cluster[host_class].num_hosts, counts)) {
    begun.parts.push_back({host_class, count, cluster[host_class].devices_per_host});
    addMixed(cluster, counts, begun, host_class + 1, out);
    begun.parts.pop_back();
  }
}

/// What one submesh wants of one class.
struct Piece {
  size_t submesh = 0;
  size_t num_hosts = 0;
  size_t devices_per_host = 0;
};

/// Where a piece starts.
struct Spot {
  size_t host = 0;
  size_t first_device = 0;
};

/// The placement of one class's pieces: a spot for each, or nothing.
using Spots = std::optional<std::vector<Spot>>;

/// One after the other along the hosts.
Spots placeInOrder(const HostClass& hosts, const std::vector<Piece>& pieces) {
  std::vector<Spot> out;
  Spot next;
  for (const Piece& piece : pieces) {
    if (next.first_device + piece.devices_per_host > hosts.devices_per_host) {
      next = {next.host + 1, 0};
    }
    if (next.host + piece.num_hosts > hosts.num_hosts) {
      return std::nullopt;
    }
    out.push_back(next);
    next.first_device += piece.devices_per_host;
    next.host += piece.num_hosts - 1;
  }
  return out;
}

/// Puts pieces of one host each into equal hosts, which it fills one after the other: the largest piece left goes to the next host, and with it what
/// fills that host best. What cannot be completed so is tried with less in this host; what was found to be in vain is not tried again.
class HostPacking {
 public:
  /// `sizes` fall.
  HostPacking(const std::vector<size_t>& sizes, size_t num_hosts, size_t devices_per_host)
      : sizes_(sizes), devices_per_host_(devices_per_host), num_left_(devices_per_host + 1, 0), sizes_of_(num_hosts) {
    num_spare_ = num_hosts * devices_per_host;
    for (const size_t size : sizes) {
      ++num_left_[size];
      is_possible_ = is_possible_ && size <= num_spare_;
      num_spare_ -= is_possible_ ? size : 0;
    }
  }

  Spots find() {
    if (!is_possible_ || !fillFrom(0)) {
      return std::nullopt;
    }
    std::vector<std::vector<Spot>> spots_of(devices_per_host_ + 1);
    for (size_t host = 0; host < sizes_of_.size(); ++host) {
      size_t first_device = 0;
      for (const size_t size : sizes_of_[host]) {
        spots_of[size].push_back({host, first_device});
        first_device += size;
      }
    }
    std::vector<size_t> num_given(devices_per_host_ + 1, 0);
    std::vector<Spot> out;
    for (const size_t size : sizes_) {
      out.push_back(spots_of[size][num_given[size]++]);
    }
    return out;
  }

 private:
  bool fillFrom(size_t host) {
    size_t largest = devices_per_host_;
    while (largest > 0 && num_left_[largest] == 0) {
      --largest;
    }
    if (largest == 0) {
      return true;
    }
    if (host == sizes_of_.size() || hopeless_.contains({host, num_left_})) {
      return false;
    }
    if (fillWith(host, largest, devices_per_host_, 1)) {
      return true;
    }
    hopeless_.insert({host, num_left_});
    return false;
  }
  /// Adds pieces of at most `size` to a host that has `num_free` devices, at least `least` of that size.
  bool fillWith(size_t host, size_t size, size_t num_free, size_t least) {
    if (size == 0) {
      if (num_free > num_spare_) {
        return false;
      }
      num_spare_ -= num_free;
      const bool is_done = fillFrom(host + 1);
      num_spare_ += num_free;
      return is_done;
    }
    std::vector<size_t>& here = sizes_of_[host];
    for (size_t number = std::min(num_left_[size], num_free / size) + 1; number-- > least;) {
      num_left_[size] -= number;
      here.insert(here.end(), number, size);
      if (fillWith(host, size - 1, num_free - number * size, 0)) {
        return true;
      }
      here.resize(here.size() - number);
      num_left_[size] += number;
    }
    return false;
  }

  const std::vector<size_t>& sizes_;
  size_t devices_per_host_;
  size_t num_spare_ = 0;  ///< devices that may stay free
  bool is_possible_ = true;
  std::vector<size_t> num_left_;               ///< pieces, by size
  std::vector<std::vector<size_t>> sizes_of_;  ///< by host
  std::set<std::pair<size_t, std::vector<size_t>>> hopeless_;
};

Spots placeLargestFirst(const HostClass& hosts, const std::vector<Piece>& pieces) {
  std::vector<size_t> order(pieces.size());
  for (size_t index = 0; index < order.size(); ++index) {
    order[index] = index;
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return pieces[a].num_hosts * pieces[a].devices_per_host > pieces[b].num_hosts * pieces[b].devices_per_host;
  });
  std::vector<Spot> out(pieces.size());
  std::vector<size_t> sizes;
  size_t num_whole = 0;
  size_t num_used_hosts = 0;
  for (const size_t index : order) {
    if (pieces[index].devices_per_host == hosts.devices_per_host) {
      out[index] = {num_used_hosts, 0};
      num_used_hosts += pieces[index].num_hosts;
      ++num_whole;
    } else {
      sizes.push_back(pieces[index].devices_per_host);
    }
  }
  if (num_used_hosts > hosts.num_hosts) {
    return std::nullopt;
  }
  const Spots shared = HostPacking(sizes, hosts.num_hosts - num_used_hosts, hosts.devices_per_host).find();
  if (!shared) {
    return std::nullopt;
  }
  for (size_t index = num_whole; index < order.size(); ++index) {
    const Spot& spot = (*shared)[index - num_whole];
    out[order[index]] = {num_used_hosts + spot.host, spot.first_device};
  }
  return out;
}

Spots place(const HostClass& hosts, const std::vector<Piece>& pieces) {
  size_t num_devices = 0;
  for (const Piece& piece : pieces) {
    num_devices += piece.num_hosts * piece.devices_per_host;
  }
  if (num_devices > hosts.num_hosts * hosts.devices_per_host) {
    return std::nullopt;
  }
  Spots out = placeInOrder(hosts, pieces);
  return out ? out : placeLargestFirst(hosts, pieces);
}

}  // namespace

std::vector<size_t> Submesh::numDevices(size_t num_classes) const {
  std::vector<size_t> out(num_classes, 0);
  for (const SubmeshPart& part : parts) {
    out.at(part.host_class) += part.num_hosts * part.devices_per_host;
  }
  return out;
}

std::vector<Submesh> submeshShapes(const std::vector<HostClass>& cluster, const SubmeshChoice& choice) {
  checkCluster(cluster);
  std::vector<Submesh> out;
  for (size_t host_class = 0; host_class < cluster.size(); ++host_class) {
    const HostClass& hosts = cluster[host_class];
    for (size_t devices = 1; devices < hosts.devices_per_host; ++devices) {
      if (std::has_single_bit(devices) || hosts.devices_per_host % devices == 0) {
        out.push_back({{{host_class, 1, devices}}});
      }
    }
    for (const size_t count : hostCounts(hosts.num_hosts, choice.host_counts)) {
      out.push_back({{{host_class, count, hosts.devices_per_host}}});
    }
  }
  if (choice.is_mixed) {
    Submesh begun;
    addMixed(cluster, choice.host_counts, begun, 0, out);
  }
  return out;
}

std::optional<std::vector<std::vector<HostDevices>>> placeSubmeshes(const std::vector<HostClass>& cluster, const std::vector<Submesh>& submeshes) {
  checkCluster(cluster);
  std::vector<std::vector<Piece>> pieces(cluster.size());
  for (size_t index = 0; index < submeshes.size(); ++index) {
    checkSubmesh(cluster, submeshes[index], index);
    for (const SubmeshPart& part : submeshes[index].parts) {
      pieces[part.host_class].push_back({index, part.num_hosts, part.devices_per_host});
    }
  }
  std::vector<std::vector<HostDevices>> out(submeshes.size());
  for (size_t host_class = 0; host_class < cluster.size(); ++host_class) {
    const Spots spots = place(cluster[host_class], pieces[host_class]);
    if (!spots) {
      return std::nullopt;
    }
    for (size_t index = 0; index < spots->size(); ++index) {
      const Piece& piece = pieces[host_class][index];
      for (size_t host = 0; host < piece.num_hosts; ++host) {
        out[piece.submesh].push_back({host_class, (*spots)[index].host + host, (*spots)[index].first_device, piece.devices_per_host});
      }
    }
  }
  return out;
}

}  // namespace xmesh::core
