#include "transport/tcp/frame.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "transport/tcp/shared_ring.h"

namespace xmesh::transport {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as the CPU keeps its numbers");

constexpr std::string_view kMagic = "xmeshtcp";
constexpr uint32_t kVersion = 5;

template <typename T>
void put(T value, size_t offset, std::span<char> out) {
  std::memcpy(out.data() + offset, &value, sizeof(T));
}

template <typename T>
T get(size_t offset, std::span<const char> bytes) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

bool isInRange(const FrameHeader& header) {
  if (header.operation.track >= kMaxTracks) {
    return false;
  }
  if (header.kind == FrameKind::kRingTaken) {
    return header.num_bytes >= kRingRefused && header.message_bytes == 0;
  }
  if (header.num_bytes < 0 || header.message_bytes < 0) {
    return false;
  }
  switch (header.kind) {
    case FrameKind::kControl:
      return header.num_bytes <= kMaxControlBytes;
    case FrameKind::kReady:
    case FrameKind::kRing:
    case FrameKind::kRingTaken:
      return true;
    case FrameKind::kRingData:
      return header.num_bytes > 0 && header.num_bytes <= kRingBytes && header.num_bytes <= header.message_bytes;
    case FrameKind::kData:
      return header.num_bytes <= kMaxFramePayloadBytes && header.num_bytes <= header.message_bytes;
    case FrameKind::kGoodbye:
      return header.num_bytes == kGoodbyeFinal || header.num_bytes == kGoodbyeOtherway;
    case FrameKind::kError:
      return header.num_bytes <= kMaxErrorBytes;
  }
  return false;
}

}  // namespace

void encodeFrameHeader(const FrameHeader& header, std::span<char, kFrameHeaderBytes> out) {
  put(static_cast<uint32_t>(header.kind), 0, out);
  put(header.operation.track, 4, out);
  put(header.operation.call, 8, out);
  put(header.num_bytes, 16, out);
  put(header.message_bytes, 24, out);
}

std::optional<FrameHeader> decodeFrameHeader(std::span<const char, kFrameHeaderBytes> bytes) {
  FrameHeader header;
  header.kind = static_cast<FrameKind>(get<uint32_t>(0, bytes));
  header.operation = {get<uint64_t>(8, bytes), get<uint32_t>(4, bytes)};
  header.num_bytes = get<int64_t>(16, bytes);
  header.message_bytes = get<int64_t>(24, bytes);
  if (!isInRange(header)) {
    return std::nullopt;
  }
  return header;
}

void appendFrame(const FrameHeader& header, std::string_view text, std::string& out) {
  std::array<char, kFrameHeaderBytes> bytes{};
  encodeFrameHeader(header, bytes);
  out.append(bytes.data(), bytes.size());
  out.append(text);
}

void encodeHello(const Hello& hello, std::span<char, kHelloBytes> out) {
  std::memcpy(out.data(), kMagic.data(), kMagic.size());
  put(kVersion, 8, out);
  put(hello.peer, 12, out);
  std::memcpy(out.data() + 16, hello.token.data(), hello.token.size());
}

std::optional<Hello> decodeHello(std::span<const char, kHelloBytes> bytes) {
  if (std::string_view(bytes.data(), kMagic.size()) != kMagic || get<uint32_t>(8, bytes) != kVersion) {
    return std::nullopt;
  }
  Hello hello;
  hello.peer = get<uint32_t>(12, bytes);
  std::memcpy(hello.token.data(), bytes.data() + 16, hello.token.size());
  return hello;
}

bool isHelloPrefix(std::string_view bytes) {
  const size_t common = std::min(bytes.size(), kMagic.size());
  return bytes.substr(0, common) == kMagic.substr(0, common);
}

bool equalTokens(const Token& a, const Token& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace xmesh::transport
