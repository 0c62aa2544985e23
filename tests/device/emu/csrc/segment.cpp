#include "segment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace emu {
namespace {

int64_t bytesFor(int num_ranks) { return int64_t(num_ranks) * num_ranks * int64_t(sizeof(Lane)); }

}  // namespace

// Zeroed memory is a segment at its start.
Segment::Segment(int num_ranks) : num_ranks_(num_ranks), num_bytes_(bytesFor(num_ranks)), file_(memfd_create("emunccl", MFD_CLOEXEC)) {
  TORCH_CHECK(file_ >= 0 && ftruncate(file_, num_bytes_) == 0, "emunccl: no shared memory of ", num_bytes_, " bytes: ", std::strerror(errno));
  map();
}

Segment::Segment(int num_ranks, const std::string& handle)
    : num_ranks_(num_ranks), num_bytes_(bytesFor(num_ranks)), file_(open(handle.c_str(), O_RDWR | O_CLOEXEC)) {
  TORCH_CHECK(file_ >= 0, "emunccl: cannot open the shared memory ", handle, ": ", std::strerror(errno));
  map();
  closeHandle();
}

Segment::~Segment() {
  closeHandle();
  munmap(lanes_, num_bytes_);
}

void Segment::map() {
  auto* memory = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) {
    closeHandle();
    TORCH_CHECK(false, "emunccl: cannot map ", num_bytes_, " bytes of shared memory: ", std::strerror(errno));
  }
  lanes_ = static_cast<Lane*>(memory);
}

std::string Segment::handle() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_); }

void Segment::closeHandle() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

}  // namespace emu
