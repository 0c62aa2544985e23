#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "transport/socket.h"

namespace xmesh::transport {

/// Bytes of a ring; its writer may be this far ahead of its reader.
constexpr int64_t kRingBytes = int64_t{1} << 20;

/// Where a ring is, for another process of this host: the writer's process id and descriptor, and a number that only this ring begins with.
struct RingTicket {
  int64_t pid = 0;
  int64_t descriptor = 0;
  uint64_t nonce = 0;
};

/// Memory mapped from a file; unmapped in the end.
class Mapping {
 public:
  Mapping() = default;
  /// Nothing is mapped where the kernel refuses.
  Mapping(int fd, size_t num_bytes, int protection);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t num_bytes_ = 0;
};

/// The end of a ring that bytes go into. A ring is an anonymous memory file which two processes of one host map, so that payload goes from one to the
/// other by two copies in user space. Each end keeps its own position and learns the other's from frames on their connection; the memory holds no
/// counters, and the file is sealed at its size, so neither end can make the other wait or fault.
/// Threading: one thread at a time.
class RingWriter {
 public:
  /// Nothing where the kernel gives no memory file.
  static std::optional<RingWriter> make();
  RingTicket ticket() const;
  int64_t freeBytes() const { return kRingBytes - (num_written_ - num_taken_); }
  /// `num_bytes` are at most freeBytes().
  void write(const char* data, int64_t num_bytes);
  /// The reader has taken `num_taken` bytes in all. False where that cannot be.
  bool onTaken(int64_t num_taken);
  /// The reader has mapped the memory: the descriptor is given back.
  void onMapped() { file_.reset(); }

 private:
  RingWriter(Fd file, Mapping mapping, uint64_t nonce);

  Fd file_;
  Mapping mapping_;
  uint64_t nonce_ = 0;
  int64_t num_written_ = 0;
  int64_t num_taken_ = 0;
};

/// The end of a ring that bytes come out of.
class RingReader {
 public:
  /// Nothing where the ticket's ring cannot be opened here: the writer is in another process namespace, or belongs to another user.
  static std::optional<RingReader> open(const RingTicket& ticket);
  /// Takes the next bytes out of the ring, to nowhere where `data` is null.
  void read(char* data, int64_t num_bytes);
  int64_t numTaken() const { return num_taken_; }

 private:
  explicit RingReader(Mapping mapping);

  Mapping mapping_;
  int64_t num_taken_ = 0;
};

}  // namespace xmesh::transport
