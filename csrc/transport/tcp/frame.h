#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "transport/operation.h"

namespace xmesh::transport {

/// What TcpNetwork writes on a connection. All numbers are little-endian.
enum class FrameKind : uint32_t {
  kControl = 1,    ///< header, num_bytes of message
  kReady = 2,      ///< header only; num_bytes is the number of receives posted so far for the operation's messages from this peer
  kData = 3,       ///< header, num_bytes of payload, one FrameStatus byte
  kGoodbye = 4,    ///< header only; see kGoodbye* below
  kError = 5,      ///< header, num_bytes of text: why the sender of this frame gives the connection up
  kRing = 6,       ///< header only: a RingTicket (its nonce as the operation's call, pid as num_bytes, descriptor as message_bytes)
  kRingData = 7,   ///< header only; the payload, num_bytes of it, is next in the ring
  kRingTaken = 8,  ///< header only; num_bytes have been taken out of the peer's ring in all (from 0 on: it is in use), or kRingRefused
};

/// Follows the payload of a kData frame, since its sender may have to give the message up after the header has left.
enum class FrameStatus : uint8_t { kOk = 0, kAborted = 1 };

constexpr size_t kFrameHeaderBytes = 32;
/// A kData frame carries at most this much, so that control frames never wait for a long message.
constexpr int64_t kMaxFramePayloadBytes = int64_t{1} << 20;
constexpr int64_t kMaxControlBytes = int64_t{1} << 26;
constexpr int64_t kMaxErrorBytes = 4096;
/// Values of a kGoodbye frame's num_bytes.
constexpr int64_t kGoodbyeFinal = 0;     ///< nothing follows, on this or any other connection
constexpr int64_t kGoodbyeOtherway = 1;  ///< the final goodbye is on the connection that the leaving rank opened itself

/// A kRingTaken frame's num_bytes where the ring cannot be mapped.
constexpr int64_t kRingRefused = -1;

struct FrameHeader {
  FrameKind kind = FrameKind::kControl;
  OperationId operation;
  int64_t num_bytes = 0;
  int64_t message_bytes = 0;  ///< kData, kRingData: size of the whole message, of which this frame is the next part
  bool operator==(const FrameHeader&) const = default;
};

void encodeFrameHeader(const FrameHeader& header, std::span<char, kFrameHeaderBytes> out);
/// Nothing when the bytes are no header that encodeFrameHeader writes: an unknown kind, or a number out of its kind's range.
std::optional<FrameHeader> decodeFrameHeader(std::span<const char, kFrameHeaderBytes> bytes);
/// Appends header and text, if any, of a frame.
void appendFrame(const FrameHeader& header, std::string_view text, std::string& out);

/// The secret that those share who may connect to each other; a connection that does not begin with it is dropped.
using Token = std::array<uint8_t, 16>;

constexpr size_t kHelloBytes = 32;

/// First bytes of every connection.
struct Hello {
  uint32_t peer = 0;  ///< the number of the one that connects
  Token token{};
};

void encodeHello(const Hello& hello, std::span<char, kHelloBytes> out);
/// Nothing when magic or version differ.
std::optional<Hello> decodeHello(std::span<const char, kHelloBytes> bytes);
/// Whether the first bytes of a connection can still become a Hello.
bool isHelloPrefix(std::string_view bytes);
/// Takes the same time wherever the tokens differ.
bool equalTokens(const Token& a, const Token& b);

}  // namespace xmesh::transport
