#include "transport/local_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>

namespace xmesh::transport {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string textOf(const sockaddr_in& address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
  return text.data();
}

std::string addressOfInterface(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    throw std::runtime_error(std::string("the network interfaces cannot be listed: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(found, &freeifaddrs);
  for (const ifaddrs* entry = all.get(); entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET && name == entry->ifa_name) {
      return textOf(*reinterpret_cast<const sockaddr_in*>(entry->ifa_addr));
    }
  }
  throw std::runtime_error("network interface '" + name + "' has no IPv4 address");
}

/// The source address of a route, asked from the kernel with a datagram socket that sends nothing; empty when there is none.
std::string addressTowards(const std::string& peer_host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* resolved = nullptr;
  if (getaddrinfo(peer_host.c_str(), "9", &hints, &resolved) != 0) {
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(resolved, &freeaddrinfo);
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return {};
  }
  sockaddr_in local{};
  socklen_t length = sizeof(local);
  const bool is_known =
      connect(fd, resolved->ai_addr, resolved->ai_addrlen) == 0 && getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0;
  close(fd);
  return is_known ? textOf(local) : std::string();
}

}  // namespace

std::string localAddress(const std::string& peer_host) {
  for (const char* name : {"XMESH_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (const std::string interface = environment(name); !interface.empty()) {
      return addressOfInterface(interface);
    }
  }
  const std::string found = peer_host.empty() ? std::string() : addressTowards(peer_host);
  return found.empty() ? kLoopback : found;
}

std::string hostIdentity() {
  if (std::string given = environment("XMESH_HOST_ID"); !given.empty()) {
    return given;
  }
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat netns {};
  const bool has_netns = stat("/proc/self/ns/net", &netns) == 0;
  return boot_id + "/" + (has_netns ? std::to_string(netns.st_ino) : "");
}

}  // namespace xmesh::transport
