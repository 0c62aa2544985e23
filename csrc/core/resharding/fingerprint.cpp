#include "core/resharding/fingerprint.h"

#include <bit>
#include <cstdint>
#include <string_view>

namespace xmesh::core {
namespace {

/// Two 64-bit lanes, each stirred by MurmurHash3's finalizer with constants of its own.
class Digest {
 public:
  void add(uint64_t word) {
    left_ = stir(left_ ^ word) + 0x9E3779B97F4A7C15ULL;
    right_ = stir(right_ + std::rotl(word, 32)) ^ 0xC2B2AE3D27D4EB4FULL;
  }
  void add(int64_t value) { add(static_cast<uint64_t>(value)); }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(std::string_view text) {
    add(static_cast<uint64_t>(text.size()));
    for (char c : text) {
      add(static_cast<uint64_t>(static_cast<unsigned char>(c)));
    }
  }
  void add(const std::vector<int64_t>& values) {
    add(static_cast<uint64_t>(values.size()));
    for (int64_t value : values) {
      add(value);
    }
  }
  std::string hex() const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string out;
    for (uint64_t lane : {stir(left_ + right_), stir(right_ ^ std::rotl(left_, 17))}) {
      for (int shift = 60; shift >= 0; shift -= 4) {
        out += kDigits[(lane >> shift) & 15];
      }
    }
    return out;
  }

 private:
  static uint64_t stir(uint64_t z) {
    z = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCDULL;
    z = (z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53ULL;
    return z ^ (z >> 33);
  }

  uint64_t left_ = 0x243F6A8885A308D3ULL;
  uint64_t right_ = 0x13198A2E03707344ULL;
};

void addSpec(Digest& digest, const TensorSpec& spec) {
  digest.add(spec.shape);
  digest.add(spec.dtype.name);
  digest.add(spec.mesh.shape());
  digest.add(spec.mesh.ranks());
  for (const Placement& placement : spec.placements) {
    digest.add(placement.str());
  }
  for (const OwnedBox& owned : spec.boxes) {
    for (const Interval& interval : owned.box) {
      digest.add(interval.begin);
      digest.add(interval.end);
    }
    digest.add(owned.ranks);
  }
}

void addInputs(Digest& digest, const std::vector<TensorPair>& tensors, const Topology& topology, const std::string& strategy) {
  digest.add(strategy);
  digest.add(static_cast<uint64_t>(tensors.size()));
  for (const TensorPair& pair : tensors) {
    addSpec(digest, pair.src);
    addSpec(digest, pair.dst);
  }
  for (const auto* pairs : {&topology.hostOfRanks(), &topology.nicOfHosts()}) {
    digest.add(static_cast<uint64_t>(pairs->size()));
    for (const auto& [key, value] : *pairs) {
      digest.add(key);
      digest.add(value);
    }
  }
  const LinkModel& links = topology.links();
  digest.add(links.nic_bytes_per_s);
  digest.add(links.local_bytes_per_s);
  digest.add(links.latency_us);
  digest.add(links.message_us);
  digest.add(links.local_latency_us);
  digest.add(static_cast<uint64_t>(links.is_measured ? 1 : 0));
}

}  // namespace

std::string planFingerprint(const ReshardingPlan& plan) {
  Digest digest;
  addInputs(digest, plan.tensors, plan.topology, plan.strategy);
  for (const Message& message : plan.messages) {
    digest.add(message.task);
    digest.add(message.begin);
    digest.add(message.end);
    digest.add(static_cast<uint64_t>(static_cast<uint32_t>(message.src_rank)) << 32 | static_cast<uint32_t>(message.dst_rank));
    digest.add(static_cast<uint64_t>(static_cast<uint32_t>(message.contribution)) << 8 | static_cast<uint8_t>(message.payload));
  }
  return digest.hex();
}

std::string inputsFingerprint(const std::vector<TensorPair>& tensors, const Topology& topology, const Strategy& strategy) {
  Digest digest;
  addInputs(digest, tensors, topology, strategy.str());
  return digest.hex();
}

}  // namespace xmesh::core
