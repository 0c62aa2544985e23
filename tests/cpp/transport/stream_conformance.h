#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/stream_transport.h"

namespace xmesh::transport::test {

/// Ranks of one kind of StreamTransport.
class StreamCluster {
 public:
  virtual ~StreamCluster() = default;
  virtual StreamTransport& transport(int32_t rank, int32_t communicator = 0) = 0;
  /// Lets everything happen that is enqueued; false where streams wait for each other.
  virtual bool run() = 0;
  /// Memory that a rank's stream can use, and its bytes as the host sees them.
  virtual std::shared_ptr<void> allocate(size_t num_bytes) = 0;
  virtual void write(void* memory, const std::vector<char>& bytes) = 0;
  virtual std::vector<char> read(const void* memory, size_t num_bytes) = 0;
};

/// A kind of transport; of fakes, the seed of the order in which things happen.
struct StreamKind {
  std::string name;
  std::function<std::unique_ptr<StreamCluster>(int32_t num_ranks)> make;
};

/// What every StreamTransport promises (stream_conformance.cpp), checked over each kind of it: the fake in stream_conformance_test.cpp, backends on
/// the emulated accelerator in ../on_emu.
class StreamConformance : public testing::TestWithParam<StreamKind> {
 protected:
  void start(int32_t num_ranks) { cluster_ = GetParam().make(num_ranks); }
  StreamTransport& at(int32_t rank, int32_t communicator = 0) { return cluster_->transport(rank, communicator); }
  std::shared_ptr<void> holding(const std::vector<char>& bytes) {
    std::shared_ptr<void> memory = cluster_->allocate(bytes.size());
    cluster_->write(memory.get(), bytes);
    return memory;
  }

  std::unique_ptr<StreamCluster> cluster_;
};

}  // namespace xmesh::transport::test
