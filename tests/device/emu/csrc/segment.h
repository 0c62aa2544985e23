// Memory that the ranks of one communicator share: a lane, with a small ring, for every ordered pair of them.
// Nothing in it has a name, so nothing is left over when a process is killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace emu {

inline constexpr int64_t kRingBytes = 64 * 1024;

// What one side has posted. Both sides post before a byte moves; then the sizes and kinds are compared.
struct Posted {
  std::atomic<uint64_t> number{0};  // messages posted so far
  std::atomic<int64_t> num_bytes{0};
  std::atomic<int32_t> kind{0};
};

struct Lane {
  Posted sender;
  Posted receiver;
  std::atomic<uint64_t> num_received{0};  // messages taken over whole
  std::atomic<uint64_t> head{0};          // bytes ever written to the ring
  std::atomic<uint64_t> tail{0};          // bytes ever read from it
  char ring[kRingBytes];
};

class Segment {
 public:
  // Makes a segment that others open by its handle, as long as closeHandle() has not been called.
  explicit Segment(int num_ranks);
  Segment(int num_ranks, const std::string& handle);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::string handle() const;
  void closeHandle();
  Lane& lane(int from, int to) { return lanes_[from * num_ranks_ + to]; }
  int64_t numBytes() const { return num_bytes_; }

 private:
  void map();

  const int num_ranks_;
  const int64_t num_bytes_;
  int file_ = -1;
  Lane* lanes_ = nullptr;
};

}  // namespace emu
