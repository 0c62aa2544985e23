#include "c10d/gloo_connections.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "transport/socket.h"

namespace xmesh::c10d_backend {
namespace {

constexpr size_t kMostOfAValue = 1024;  ///< gloo's address is at its begin, behind a host's name

/// Hears what gloo tells and is told.
class ListeningStore final : public ::c10d::PrefixStore {
 public:
  ListeningStore(std::shared_ptr<GlooConnections> connections, c10::intrusive_ptr<::c10d::Store> store)
      : PrefixStore("gloo", std::move(store)), connections_(std::move(connections)) {}

  c10::intrusive_ptr<::c10d::Store> clone() override { return c10::make_intrusive<ListeningStore>(connections_, store_->clone()); }
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    connections_->hear(value, /*is_own=*/true);
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    std::vector<uint8_t> value = PrefixStore::get(key);
    connections_->hear(value, /*is_own=*/false);
    return value;
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    std::vector<std::vector<uint8_t>> values = PrefixStore::multiGet(keys);
    for (const std::vector<uint8_t>& value : values) {
      connections_->hear(value, /*is_own=*/false);
    }
    return values;
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override {
    for (const std::vector<uint8_t>& value : values) {
      connections_->hear(value, /*is_own=*/true);
    }
    PrefixStore::multiSet(keys, values);
  }

 private:
  std::shared_ptr<GlooConnections> connections_;
};

/// How many bytes of a sockaddr of a family name family, port and address: all that lie before what sockets of one address may differ in.
size_t lengthOf(sa_family_t family) {
  return family == AF_INET    ? offsetof(sockaddr_in, sin_addr) + sizeof(in_addr)
         : family == AF_INET6 ? offsetof(sockaddr_in6, sin6_addr) + sizeof(in6_addr)
                              : 0;
}

std::string bytesOf(const sockaddr_storage& address) { return {reinterpret_cast<const char*>(&address), lengthOf(address.ss_family)}; }

/// The address that a call such as getpeername() gives; empty where it gives none.
std::string askedFor(int fd, int (*call)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return call(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? bytesOf(address) : std::string();
}

/// The number of an open socket, which no other one has.
std::optional<ino_t> socketNumber(int fd) {
  struct stat found {};
  return ::fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) ? std::optional(found.st_ino) : std::nullopt;
}

/// Calls `visit` with each descriptor of this process.
template <class Visit>
void forEachDescriptor(const Visit& visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  while (folder != nullptr) {
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) {
      return;
    }
    if (entry->d_name[0] != '.') {
      visit(std::atoi(entry->d_name));
    }
  }
}

}  // namespace

c10::intrusive_ptr<::c10d::Store> GlooConnections::listeningStore(const std::shared_ptr<GlooConnections>& connections,
                                                                  const c10::intrusive_ptr<::c10d::Store>& store) {
  const std::lock_guard lock(connections->mutex_);
  forEachDescriptor([&](int fd) {
    if (const std::optional<ino_t> number = socketNumber(fd)) {
      connections->before_.insert(*number);
    }
  });
  return c10::make_intrusive<ListeningStore>(connections, store);
}

void GlooConnections::hear(const std::vector<uint8_t>& value, bool is_own) {
  const std::lock_guard lock(mutex_);
  const size_t size = std::min(value.size(), kMostOfAValue);
  for (size_t at = 0; at + sizeof(sockaddr_in) <= size; ++at) {
    sockaddr_storage address{};
    std::memcpy(&address, value.data() + at, std::min(sizeof(address), size - at));
    const bool has_port = reinterpret_cast<const sockaddr_in&>(address).sin_port != 0;
    if (has_port && lengthOf(address.ss_family) > 0) {
      (is_own ? own_ : others_).insert(bytesOf(address));
    }
  }
}

void GlooConnections::findMore() {
  forEachDescriptor([this](int fd) {
    const std::optional<ino_t> number = socketNumber(fd);
    if (number.has_value() && !before_.contains(*number) && !sockets_.contains(*number)) {
      const std::string there = askedFor(fd, &::getpeername);
      if (!there.empty() && (others_.contains(there) || own_.contains(askedFor(fd, &::getsockname)))) {
        sockets_.insert(*number);
      }
    }
  });
}

void GlooConnections::find(int size) {
  const std::lock_guard lock(mutex_);
  findMore();
  if (sockets_.size() + 1 >= static_cast<size_t>(size)) {  // else gloo makes them when they are first used
    before_.clear();
    own_.clear();
    others_.clear();
  }
}

size_t GlooConnections::size() const {
  const std::lock_guard lock(mutex_);
  return sockets_.size();
}

void GlooConnections::breakOff() noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (!others_.empty()) {
      findMore();
    }
    forEachDescriptor([this](int fd) {
      if (const std::optional<ino_t> number = socketNumber(fd); !number.has_value() || !sockets_.contains(*number)) {
        return;
      }
      // A duplicate: gloo may close its descriptor at any time, and another thread get the same number.
      const transport::Fd held(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
      if (const std::optional<ino_t> number = socketNumber(held.get()); number.has_value() && sockets_.contains(*number)) {
        ::shutdown(held.get(), SHUT_RDWR);
      }
    });
  } catch (const std::exception&) {
    return;  // no memory: those who wait do so for their timeout
  }
}

}  // namespace xmesh::c10d_backend
