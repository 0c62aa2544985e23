#include "transport/local_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
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

std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    throw std::runtime_error(std::string("the network interfaces cannot be listed: ") + std::strerror(errno));
  }
  return {found, &freeifaddrs};
}

std::string addressOfInterface(const std::string& name) {
  const auto all = interfaces();
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

bool isLoopback(const std::string& address) { return address.starts_with("127."); }

/// Whether a user who wrote this host means that all ranks are on this machine.
bool namesLoopback(const std::string& host) { return isLoopback(host) || host.starts_with("localhost"); }

/// The address from which the kernel speaks to other machines: that of its default route, else of the first interface that runs and has one.
std::string addressOnNetwork() {
  constexpr const char* kElsewhere = "192.0.2.1";  // set aside for documentation: it is no machine's, so only a default route leads there
  if (std::string found = addressTowards(kElsewhere); !found.empty()) {
    return found;
  }
  const auto all = interfaces();
  for (const ifaddrs* entry = all.get(); entry != nullptr; entry = entry->ifa_next) {
    const bool is_up = (entry->ifa_flags & IFF_RUNNING) != 0 && (entry->ifa_flags & IFF_LOOPBACK) == 0;  // a bridge without members is not running
    if (is_up && entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET) {
      return textOf(*reinterpret_cast<const sockaddr_in*>(entry->ifa_addr));
    }
  }
  return {};
}

}  // namespace

std::string localAddress(const std::string& peer_host) { return knownAddress(peer_host).value_or(kLoopback); }

std::optional<std::string> knownAddress(const std::string& peer_host) {
  for (const char* name : {"XMESH_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (const std::string named = environment(name); !named.empty()) {
      return addressOfInterface(named.substr(0, named.find(',')));
    }
  }
  const std::string found = peer_host.empty() ? std::string() : addressTowards(peer_host);
  if (isLoopback(found) && !namesLoopback(peer_host)) {
    const std::string other = addressOnNetwork();
    return other.empty() ? found : other;
  }
  return found.empty() ? std::nullopt : std::optional(found);
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
