/// What a stranger writes on a new connection (a hello), and what follows (frame headers).

#include <algorithm>
#include <array>
#include <cstring>

#include "fuzz/fuzz.h"
#include "transport/tcp/frame.h"

using xmesh::fuzz::promise;
using namespace xmesh::transport;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = xmesh::fuzz::textOf(data, size);
  if (size >= kHelloBytes) {
    std::array<char, kHelloBytes> first{};
    std::memcpy(first.data(), data, kHelloBytes);
    if (const auto hello = decodeHello(first)) {
      promise(isHelloPrefix(bytes), "a hello begins as a hello");
      std::array<char, kHelloBytes> again{};
      encodeHello(*hello, again);
      const auto decoded = decodeHello(again);
      promise(decoded.has_value() && decoded->peer == hello->peer && equalTokens(decoded->token, hello->token), "a hello comes back");
    }
  }
  for (size_t begin = 0; begin + kFrameHeaderBytes <= size; begin += kFrameHeaderBytes) {
    std::array<char, kFrameHeaderBytes> header{};
    std::memcpy(header.data(), data + begin, kFrameHeaderBytes);
    if (const auto decoded = decodeFrameHeader(header)) {
      std::array<char, kFrameHeaderBytes> again{};
      encodeFrameHeader(*decoded, again);
      promise(decodeFrameHeader(again) == decoded, "a header comes back");
      if (decoded->kind == FrameKind::kData || decoded->kind == FrameKind::kControl || decoded->kind == FrameKind::kError) {
        promise(decoded->num_bytes >= 0 && decoded->num_bytes <= std::max(kMaxControlBytes, kMaxFramePayloadBytes), "a payload is bounded");
      }
    }
  }
  return 0;
}
