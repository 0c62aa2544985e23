#include "transport/tcp/frame.h"

#include <gtest/gtest.h>

#include <limits>

#include "transport/operation_table.h"
#include "transport/tcp/shared_ring.h"

namespace xmesh::transport {
namespace {

std::array<char, kFrameHeaderBytes> encoded(const FrameHeader& header) {
  std::array<char, kFrameHeaderBytes> bytes{};
  encodeFrameHeader(header, bytes);
  return bytes;
}

TEST(Frame, HeadersComeBackAsTheyWere) {
  const int64_t five_gib = int64_t{5} << 30;
  for (const FrameHeader& header :
       {FrameHeader{FrameKind::kControl, 0, kMaxControlBytes, 0}, FrameHeader{FrameKind::kReady, std::numeric_limits<uint64_t>::max(), five_gib, 0},
        FrameHeader{FrameKind::kData, 1, kMaxFramePayloadBytes, five_gib}, FrameHeader{FrameKind::kData, 1, 0, 0},
        FrameHeader{FrameKind::kData, uint64_t{1} << 40, 17, std::numeric_limits<int64_t>::max()},
        FrameHeader{FrameKind::kRing, std::numeric_limits<uint64_t>::max(), 4711, 12}, FrameHeader{FrameKind::kRingData, 1, kRingBytes, five_gib},
        FrameHeader{FrameKind::kRingTaken, 0, five_gib, 0}, FrameHeader{FrameKind::kRingTaken, 0, kRingRefused, 0},
        FrameHeader{FrameKind::kGoodbye, 0, kGoodbyeOtherway, 0}, FrameHeader{FrameKind::kError, 0, kMaxErrorBytes, 0}}) {
    EXPECT_EQ(decodeFrameHeader(encoded(header)), header);
  }
}

TEST(Frame, RefusesWhatIsNoHeader) {
  for (const FrameHeader& header :
       {FrameHeader{static_cast<FrameKind>(0), 0, 0, 0}, FrameHeader{static_cast<FrameKind>(9), 0, 0, 0},
        FrameHeader{FrameKind::kControl, 0, kMaxControlBytes + 1, 0}, FrameHeader{FrameKind::kControl, 0, -1, 0},
        FrameHeader{FrameKind::kData, 1, kMaxFramePayloadBytes + 1, int64_t{1} << 40}, FrameHeader{FrameKind::kData, 1, 5, 4},
        FrameHeader{FrameKind::kData, 1, 0, -1}, FrameHeader{FrameKind::kRingData, 1, kRingBytes + 1, int64_t{1} << 40},
        FrameHeader{FrameKind::kRingData, 1, 5, 4}, FrameHeader{FrameKind::kRingData, 1, 0, 4}, FrameHeader{FrameKind::kRing, 0, 1, -1},
        FrameHeader{FrameKind::kRingTaken, 0, -2, 0}, FrameHeader{FrameKind::kGoodbye, 0, 2, 0},
        FrameHeader{FrameKind::kError, 0, kMaxErrorBytes + 1, 0}}) {
    EXPECT_EQ(decodeFrameHeader(encoded(header)), std::nullopt);
  }
  auto bytes = encoded({FrameKind::kGoodbye, 0, kGoodbyeFinal, 0});
  bytes[5] = 1;
  EXPECT_EQ(decodeFrameHeader(bytes), std::nullopt);
}

TEST(Frame, HelloComesBackAndOthersDoNot) {
  Hello hello{3, {}};
  for (size_t i = 0; i < hello.token.size(); ++i) {
    hello.token[i] = static_cast<uint8_t>(200 + i);
  }
  std::array<char, kHelloBytes> bytes{};
  encodeHello(hello, bytes);
  const auto decoded = decodeHello(bytes);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->peer, 3U);
  EXPECT_TRUE(equalTokens(decoded->token, hello.token));
  hello.token[15] ^= 1;
  EXPECT_FALSE(equalTokens(decoded->token, hello.token));
  for (size_t length = 0; length <= bytes.size(); ++length) {
    EXPECT_TRUE(isHelloPrefix({bytes.data(), length}));
  }
  EXPECT_FALSE(isHelloPrefix("GET / HTTP/1.1"));
  EXPECT_FALSE(isHelloPrefix("x?"));
  bytes[8] = 9;  // version
  EXPECT_FALSE(decodeHello(bytes).has_value());
}

class NoEvents final : public OperationEvents {
  void onSent(int64_t /*cookie*/) override {}
  void onReceived(int64_t /*cookie*/) override {}
};

TEST(OperationTable, WhatItRemembersIsBounded) {
  OperationTable table;
  NoEvents events;
  const uint64_t count = 3 * OperationTable::kMaxRemembered;
  for (uint64_t operation = 1; operation <= count; ++operation) {
    table.open(operation, events);
    table.close(operation);
  }
  EXPECT_FALSE(table.wasClosed(1));
  EXPECT_TRUE(table.wasClosed(count));
  for (uint64_t operation = 1; operation <= count; ++operation) {
    table.rememberCredit(operation, 2, 1);
    table.rememberCredit(operation, 2, 4);
    table.rememberCredit(operation, 3, 1);
  }
  EXPECT_TRUE(table.open(1, events).empty());
  EXPECT_EQ(table.open(count, events), (OperationTable::Credits{{2, 4}, {3, 1}}));
  EXPECT_TRUE(table.find(count) != nullptr && table.find(2) == nullptr);
}

}  // namespace
}  // namespace xmesh::transport
