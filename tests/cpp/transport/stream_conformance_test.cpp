// The fake network of streams keeps what every StreamTransport promises.
#include "transport/stream_conformance.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/fakes/fake_stream_network.h"

namespace xmesh::transport::test {
namespace {

class FakeStreamCluster final : public StreamCluster {
 public:
  FakeStreamCluster(int32_t num_ranks, uint64_t seed) : network_(num_ranks, seed) {}
  StreamTransport& transport(int32_t rank, int32_t communicator) override { return network_.transport(rank, communicator); }
  bool run() override {
    try {
      network_.run();
    } catch (const StreamDeadlock&) {
      return false;
    }
    return true;
  }
  std::shared_ptr<void> allocate(size_t num_bytes) override {
    auto memory = std::make_shared<std::vector<char>>(num_bytes);
    return {memory, memory->data()};
  }
  void write(void* memory, const std::vector<char>& bytes) override { std::copy(bytes.begin(), bytes.end(), static_cast<char*>(memory)); }
  std::vector<char> read(const void* memory, size_t num_bytes) override {
    const char* begin = static_cast<const char*>(memory);
    return {begin, begin + num_bytes};
  }

 private:
  FakeStreamNetwork network_;
};

std::vector<StreamKind> fakes() {
  std::vector<StreamKind> out;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    out.push_back({"Fake" + std::to_string(seed), [seed](int32_t num_ranks) { return std::make_unique<FakeStreamCluster>(num_ranks, seed); }});
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Kinds, StreamConformance, testing::ValuesIn(fakes()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace xmesh::transport::test
