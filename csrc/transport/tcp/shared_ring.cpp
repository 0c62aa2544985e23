#include "transport/tcp/shared_ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace xmesh::transport {
namespace {

constexpr char kName[] = "torch_xmesh-ring";
constexpr size_t kHeadBytes = 4096;  ///< the file's head, which has the nonce
constexpr size_t kFileBytes = kHeadBytes + static_cast<size_t>(kRingBytes);
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

#ifdef MFD_NOEXEC_SEAL
constexpr unsigned kNoExec = MFD_NOEXEC_SEAL;
#else
constexpr unsigned kNoExec = 0;
#endif

Fd makeFile() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Fd file(::memfd_create(kName, kFlags | kNoExec));
  if (!file.valid() && errno == EINVAL) {  // an older kernel
    file = Fd(::memfd_create(kName, kFlags));
  }
  return file;
}

/// Where the byte at `position` is, and how many follow it up to the ring's end.
std::pair<size_t, int64_t> offsetOf(int64_t position) {
  const int64_t offset = position % kRingBytes;
  return {kHeadBytes + static_cast<size_t>(offset), kRingBytes - offset};
}

/// Whether the descriptor that /proc names so is of a ring.
bool isRing(const std::string& path) {
  std::array<char, 64> target{};
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  const std::string expected = std::string("/memfd:") + kName;
  return length > 0 && std::string_view(target.data(), static_cast<size_t>(length)).substr(0, expected.size()) == expected;
}

}  // namespace

Mapping::Mapping(int fd, size_t num_bytes, int protection) {
  void* const data = ::mmap(nullptr, num_bytes, protection, MAP_SHARED, fd, 0);
  if (data != MAP_FAILED) {
    data_ = static_cast<char*>(data);
    num_bytes_ = num_bytes;
    ::madvise(data, num_bytes, MADV_DONTFORK);
  }
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    ::munmap(data_, num_bytes_);
  }
}

Mapping::Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

RingWriter::RingWriter(Fd file, Mapping mapping, uint64_t nonce) : file_(std::move(file)), mapping_(std::move(mapping)), nonce_(nonce) {
  std::memcpy(mapping_.data(), &nonce_, sizeof(nonce_));
}

std::optional<RingWriter> RingWriter::make() {
  uint64_t nonce = 0;
  Fd file = makeFile();
  if (!file.valid() || ::getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce) || ::fallocate(file.get(), 0, 0, static_cast<off_t>(kFileBytes)) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    return std::nullopt;
  }
  Mapping mapping(file.get(), kFileBytes, PROT_READ | PROT_WRITE);
  if (mapping.data() == nullptr) {
    return std::nullopt;
  }
  return RingWriter(std::move(file), std::move(mapping), nonce);
}

RingTicket RingWriter::ticket() const { return {::getpid(), file_.get(), nonce_}; }

void RingWriter::write(const char* data, int64_t num_bytes) {
  const auto [offset, until_end] = offsetOf(num_written_);
  const auto first = static_cast<size_t>(std::min(num_bytes, until_end));
  std::memcpy(mapping_.data() + offset, data, first);
  std::memcpy(mapping_.data() + kHeadBytes, data + first, static_cast<size_t>(num_bytes) - first);
  num_written_ += num_bytes;
}

bool RingWriter::onTaken(int64_t num_taken) {
  if (num_taken < num_taken_ || num_taken > num_written_) {
    return false;
  }
  num_taken_ = num_taken;
  return true;
}

RingReader::RingReader(Mapping mapping) : mapping_(std::move(mapping)) {}

std::optional<RingReader> RingReader::open(const RingTicket& ticket) {
  const std::string path = "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.descriptor);
  if (!isRing(path)) {
    return std::nullopt;
  }
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.valid() || !isRing("/proc/self/fd/" + std::to_string(file.get()))) {
    return std::nullopt;
  }
  // Without the seals the writer could cut the file short, and reading would fault.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::lseek(file.get(), 0, SEEK_END) != static_cast<off_t>(kFileBytes)) {
    return std::nullopt;
  }
  Mapping mapping(file.get(), kFileBytes, PROT_READ);
  if (mapping.data() == nullptr || std::memcmp(mapping.data(), &ticket.nonce, sizeof(ticket.nonce)) != 0) {
    return std::nullopt;
  }
  return RingReader(std::move(mapping));
}

void RingReader::read(char* data, int64_t num_bytes) {
  if (data != nullptr) {
    const auto [offset, until_end] = offsetOf(num_taken_);
    const auto first = static_cast<size_t>(std::min(num_bytes, until_end));
    std::memcpy(data, mapping_.data() + offset, first);
    std::memcpy(data + first, mapping_.data() + kHeadBytes, static_cast<size_t>(num_bytes) - first);
  }
  num_taken_ += num_bytes;
}

}  // namespace xmesh::transport
