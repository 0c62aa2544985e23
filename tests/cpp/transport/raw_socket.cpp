#include "transport/raw_socket.h"

#include <netinet/in.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace xmesh::transport::test {

Fd rawConnect(const std::string& address) {
  const SocketAddress target = SocketAddress::parse(address);
  Fd fd(::socket(target.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::connect(fd.get(), target.raw(), target.length) != 0) {
    throw std::runtime_error("cannot connect to " + address);
  }
  return fd;
}

Fd rawBind() {
  const SocketAddress any = SocketAddress::parse("127.0.0.1:0");
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::bind(fd.get(), any.raw(), any.length) != 0) {
    throw std::runtime_error("cannot bind");
  }
  return fd;
}

bool rawWrite(const Fd& fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) {
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

std::string rawRead(const Fd& fd, size_t num_bytes) {
  std::string bytes(num_bytes, '\0');
  size_t got = 0;
  while (got < num_bytes) {
    const ssize_t count = ::recv(fd.get(), bytes.data() + got, num_bytes - got, 0);
    if (count <= 0) {
      break;
    }
    got += static_cast<size_t>(count);
  }
  bytes.resize(got);
  return bytes;
}

bool isClosedByOther(const Fd& fd) {
  std::array<char, 4096> bytes;
  while (::recv(fd.get(), bytes.data(), bytes.size(), 0) > 0) {
  }
  return true;
}

std::string helloBytes(const Hello& hello) {
  std::array<char, kHelloBytes> bytes{};
  encodeHello(hello, bytes);
  return {bytes.data(), bytes.size()};
}

std::string headerBytes(const FrameHeader& header) {
  std::array<char, kFrameHeaderBytes> bytes{};
  encodeFrameHeader(header, bytes);
  return {bytes.data(), bytes.size()};
}

int findSocketTo(const std::string& address) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    SocketAddress peer;
    peer.length = sizeof(peer.storage);
    if (::getpeername(fd, peer.raw(), &peer.length) == 0 && peer.str() == address) {
      return fd;
    }
  }
  return -1;
}

size_t countMappedRings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:torch_xmesh-ring") != std::string::npos ? 1 : 0;
  }
  return count;
}

size_t countEntries(const std::string& directory) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    count += entry.path().empty() ? 0 : 1;
  }
  return count;
}

}  // namespace xmesh::transport::test
