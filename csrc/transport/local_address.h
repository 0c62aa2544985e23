#pragma once

#include <optional>
#include <string>

namespace xmesh::transport {

/// The IPv4 address that peers reach this host by: that of the interface named by XMESH_SOCKET_IFNAME or GLOO_SOCKET_IFNAME (the first of several,
/// separated by commas); else the one from which the kernel would speak to `peer_host` (the store's; may be empty); else 127.0.0.1. Where `peer_host`
/// is this host's own name, and /etc/hosts has that name on loopback, it is the one from which the kernel speaks to other machines. Throws
/// std::runtime_error when a named interface has no address.
std::string localAddress(const std::string& peer_host);

/// The same, but nothing where it is not known: no interface is named, and no IPv4 way leads to `peer_host`.
std::optional<std::string> knownAddress(const std::string& peer_host);

/// Which host this process is on: XMESH_HOST_ID if set, else the boot id with the network namespace (containers and emulated hosts share a host
/// name).
std::string hostIdentity();

}  // namespace xmesh::transport
