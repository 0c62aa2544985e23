// Strangers on a TcpNetwork's port, and peers that do not keep to the protocol.
#include <gtest/gtest.h>

#include "transport/alone.h"
#include "transport/tcp/shared_ring.h"

namespace xmesh::transport::test {
namespace {

using std::chrono::milliseconds;

void expectRejected(Alone& alone, const std::string& bytes, const std::string& why) {
  const Fd stranger = rawConnect(alone.network().address());
  rawWrite(stranger, bytes);
  EXPECT_TRUE(isClosedByOther(stranger));
  ASSERT_TRUE(alone.waitFor([&] { return !alone.lines().empty(); }));
  EXPECT_NE(alone.lines()[0].find(why), std::string::npos) << alone.lines()[0];
}

TEST(TcpNetwork, DropsGarbageAndSaysSoOnce) {
  Alone alone;
  expectRejected(alone, "GET / HTTP/1.1\r\n\r\n", "no hello");
  expectRejected(alone, std::string(100'000, '\xff'), "no hello");
  EXPECT_TRUE(alone.network().drain(std::chrono::minutes(1)));  // behind the turn that dropped it
  EXPECT_EQ(alone.network().numRejectedConnections(), 2);
  EXPECT_EQ(alone.lines().size(), 1U);
  EXPECT_TRUE(alone.told().losses.empty());
}

TEST(TcpNetwork, DropsWhoIsNotOfTheGroup) {
  Token token{};
  token[3] = 1;
  struct Case {
    Hello hello;
    std::string why;
  };
  for (const Case& wrong : {Case{{1, token}, "token"}, Case{{0, {}}, "rank 0"}, Case{{0xffffffff, {}}, "rank 4294967295"}}) {
    Alone alone;
    expectRejected(alone, helloBytes(wrong.hello), wrong.why);
    EXPECT_EQ(alone.network().numRejectedConnections(), 1);
  }
}

TEST(TcpNetwork, DropsASlowHandshake) {
  TcpNetworkOptions options;
  options.handshake_timeout = milliseconds(20);
  Alone alone(options);
  expectRejected(alone, helloBytes({1, {}}).substr(0, 31), "no hello in time");
}

TEST(TcpNetwork, DropsASecondConnectionOfARank) {
  Alone alone;
  const Fd first = rawConnect(alone.network().address());
  rawWrite(first, helloBytes({1, {}}) + headerBytes({FrameKind::kControl, 0, 5, 0}) + "first");
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
  expectRejected(alone, helloBytes({1, {}}), "connected already");
  rawWrite(first, headerBytes({FrameKind::kControl, 0, 6, 0}) + "second");
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 2; }));
  EXPECT_EQ(alone.told().controls[1].second, "second");
}

TEST(TcpNetwork, AWrongTokenLosesThePeerForItsOwner) {
  Alone alone;
  Monitor monitor;
  Recorder recorder(monitor);
  TcpNetworkOptions options;
  options.own_peer = 1;
  options.token.fill(9);
  TcpNetwork other(options, recorder);
  alone.call(other.address(), [](TcpNetwork& network) { network.sendControl(1, "hello?"); });
  EXPECT_NE(alone.waitLoss().reason.find("connection reset by peer"), std::string::npos);
  EXPECT_TRUE(recorder.told.controls.empty());
}

TEST(TcpNetwork, TrustsNoLengthOfAFrame) {
  for (const FrameHeader& header :
       {FrameHeader{FrameKind::kControl, 0, int64_t{1} << 62, 0}, FrameHeader{FrameKind::kData, 1, int64_t{1} << 40, int64_t{1} << 40},
        FrameHeader{static_cast<FrameKind>(77), 0, 0, 0}}) {
    Alone alone;
    const Fd peer = rawConnect(alone.network().address());
    rawWrite(peer, helloBytes({1, {}}) + headerBytes(header));
    EXPECT_NE(alone.waitLoss().reason.find("protocol error"), std::string::npos);
    const std::string answer = rawRead(peer, kFrameHeaderBytes);
    ASSERT_EQ(answer.size(), kFrameHeaderBytes);
    EXPECT_EQ(decodeFrameHeader(std::span<const char, kFrameHeaderBytes>(answer.data(), kFrameHeaderBytes))->kind, FrameKind::kError);
  }
}

TEST(TcpNetwork, ARingThatIsNotThereIsAProtocolError) {
  for (const FrameHeader& header : {FrameHeader{FrameKind::kRingData, 1, 4, 4}, FrameHeader{FrameKind::kRingTaken, 0, 4, 0}}) {
    Alone alone;
    const Fd peer = rawConnect(alone.network().address());
    // A ring that cannot be opened is no error: its owner is told and goes on without.
    rawWrite(peer, helloBytes({1, {}}) + headerBytes({FrameKind::kRing, 1, 1, 1}) + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok");
    ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
    rawWrite(peer, headerBytes(header));
    EXPECT_NE(alone.waitLoss().reason.find("protocol error"), std::string::npos);
  }
}

TEST(TcpNetwork, ASecondRingIsAProtocolError) {
  const auto ring = RingWriter::make();
  const RingTicket ticket = ring->ticket();
  const std::string offer = headerBytes({FrameKind::kRing, ticket.nonce, ticket.pid, ticket.descriptor});
  Alone alone;
  const Fd peer = rawConnect(alone.network().address());
  // Of an operation that is not open: taken and discarded.
  rawWrite(peer, helloBytes({1, {}}) + offer + headerBytes({FrameKind::kRingData, 1, 4, 4}) + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok");
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
  EXPECT_EQ(alone.told().controls[0].second, "ok");
  rawWrite(peer, offer);
  EXPECT_NE(alone.waitLoss().reason.find("second ring"), std::string::npos);
}

TEST(TcpNetwork, DataWithoutAReceiveIsAProtocolErrorOrDiscarded) {
  Alone alone;
  std::vector<char> got(4, 'a');
  alone.call("127.0.0.1:1", [&](TcpNetwork& network) { network.open(1, alone.recorder().operation(1)); });
  const Fd peer = rawConnect(alone.network().address());
  // Operation 2 is not open: discarded, byte by byte.
  const std::string bytes =
      helloBytes({1, {}}) + headerBytes({FrameKind::kData, 2, 4, 4}) + "data" + '\0' + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok";
  for (const char byte : bytes) {
    rawWrite(peer, {&byte, 1});
  }
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
  EXPECT_EQ(alone.told().controls[0].second, "ok");
}

}  // namespace
}  // namespace xmesh::transport::test
