#include "transport/tcp/shared_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "transport/network_cluster.h"
#include "transport/raw_socket.h"

namespace xmesh::transport::test {
namespace {

TEST(SharedRing, CarriesBytesInOrderOverItsEnd) {
  auto writer = RingWriter::make();
  ASSERT_TRUE(writer);
  auto reader = RingReader::open(writer->ticket());
  ASSERT_TRUE(reader);
  writer->onMapped();
  std::mt19937_64 random(1);
  const std::vector<char> data = randomBytes(static_cast<size_t>(7 * kRingBytes), 1);
  std::vector<char> got(data.size());
  const auto total = static_cast<int64_t>(data.size());
  for (int64_t written = 0, read = 0; read < total;) {
    const int64_t more = std::min({writer->freeBytes(), total - written, static_cast<int64_t>(random() % kRingBytes)});
    writer->write(data.data() + written, more);
    written += more;
    const int64_t part = std::min(written - read, static_cast<int64_t>(random() % kRingBytes));
    reader->read(got.data() + read, part);
    read += part;
    ASSERT_EQ(reader->numTaken(), read);
    ASSERT_TRUE(writer->onTaken(read));
    ASSERT_EQ(writer->freeBytes(), kRingBytes - (written - read));
  }
  EXPECT_EQ(got, data);
}

TEST(SharedRing, DiscardsWhereNobodyWantsTheBytes) {
  auto writer = RingWriter::make();
  auto reader = RingReader::open(writer->ticket());
  const std::string data = "unwantedwanted";
  std::string got(6, ' ');
  writer->write(data.data(), 14);
  reader->read(nullptr, 8);
  reader->read(got.data(), 6);
  EXPECT_EQ(got, "wanted");
}

TEST(SharedRing, BelievesNoImpossiblePosition) {
  auto writer = RingWriter::make();
  writer->write("four", 4);
  EXPECT_FALSE(writer->onTaken(5));
  EXPECT_FALSE(writer->onTaken(-1));
  EXPECT_TRUE(writer->onTaken(3));
  EXPECT_FALSE(writer->onTaken(2));
  EXPECT_EQ(writer->freeBytes(), kRingBytes - 1);
}

TEST(SharedRing, OpensNothingButTheRingOfItsTicket) {
  const auto writer = RingWriter::make();
  const RingTicket ticket = writer->ticket();
  const auto opens = [](int64_t pid, int64_t descriptor, uint64_t nonce) { return RingReader::open({pid, descriptor, nonce}).has_value(); };
  EXPECT_TRUE(opens(ticket.pid, ticket.descriptor, ticket.nonce));
  EXPECT_FALSE(opens(ticket.pid, ticket.descriptor, ticket.nonce + 1));
  EXPECT_FALSE(opens(ticket.pid, 12345, ticket.nonce));
  EXPECT_FALSE(opens(int64_t{1} << 40, ticket.descriptor, ticket.nonce));
  const Fd other(::memfd_create("other", MFD_CLOEXEC));
  EXPECT_FALSE(opens(ticket.pid, other.get(), 0));
  // Of the right name, but of another size, or one that its owner could change under the reader.
  struct Case {
    int64_t num_bytes;
    int seals;
    bool opens;
  };
  for (const Case& made : {Case{4096 + kRingBytes, F_SEAL_SHRINK | F_SEAL_GROW, true}, Case{4096 + kRingBytes, 0, false},
                           Case{4096 + kRingBytes, F_SEAL_GROW, false}, Case{kRingBytes, F_SEAL_SHRINK | F_SEAL_GROW, false}}) {
    const Fd file(::memfd_create("torch_xmesh-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(file.get(), made.num_bytes), 0);
    ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, made.seals), 0);
    EXPECT_EQ(opens(ticket.pid, file.get(), 0), made.opens) << made.num_bytes << " " << made.seals;
  }
}

TEST(SharedRing, SmallMessagesPassAFullRing) {
  TcpCluster cluster(2);
  const auto post = [&](OperationId operation, const std::vector<std::vector<char>>& data, std::vector<std::vector<char>>& got) {
    cluster.open(0, operation);
    cluster.open(1, operation);
    for (size_t i = 0; i < data.size(); ++i) {
      got.emplace_back(data[i].size());
      cluster.recv(1, operation, 0, got[i], static_cast<int64_t>(i));
    }
    ASSERT_TRUE(cluster.fenceBoth(0, 1));
  };
  const auto send = [&](OperationId operation, const std::vector<std::vector<char>>& data) {
    cluster.call(0, [&] {  // in one turn, so that the outbox fills up
      for (size_t i = 0; i < data.size(); ++i) {
        cluster.network(0).send(operation, 1, data[i].data(), static_cast<int64_t>(data[i].size()), static_cast<int64_t>(i));
      }
    });
    ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(0).sent[operation].size() == data.size(); }));
  };
  const std::vector<std::vector<char>> first{randomBytes(100'000, 1)};
  std::vector<std::vector<char>> first_got;
  post(1, first, first_got);
  send(1, first);
  ASSERT_TRUE(cluster.fenceBoth(0, 1));  // the ring is in use

  std::vector<std::vector<char>> data{randomBytes(static_cast<size_t>(kRingBytes) - 100, 2)};
  for (uint64_t i = 0; i < 20; ++i) {
    data.push_back(randomBytes(8192, 3 + i));
  }
  std::vector<std::vector<char>> got;
  post(2, data, got);
  std::promise<void> may_read;
  cluster.network(1).post([&] { may_read.get_future().get(); });
  send(2, data);
  may_read.set_value();
  ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(1).received[2].size() == data.size(); }));
  EXPECT_EQ(got, data);
}

TEST(SharedRing, OneSideAloneDoesNotShareMemory) {
  for (const int32_t unwilling : {0, 1}) {
    TcpCluster cluster(2, {}, unwilling);
    const std::vector<char> data = randomBytes(10'000'000, 1);
    std::vector<char> got(data.size());
    cluster.open(0, 1);
    cluster.open(1, 1);
    cluster.recv(1, 1, 0, got, 1);
    cluster.send(0, 1, 1, data, 1);
    ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(1).received[1].size() == 1; }));
    ASSERT_TRUE(cluster.fenceBoth(0, 1));
    EXPECT_EQ(got, data);
    EXPECT_EQ(countMappedRings(), 0U);
  }
}

TEST(SharedRing, IsMadeAtTheFirstLargeMessageAndGoesWithTheNetwork) {
  const size_t fds = countEntries("/proc/self/fd");
  for (const bool shared_memory : {true, false}) {
    TcpNetworkOptions options;
    options.shared_memory = shared_memory;
    TcpCluster cluster(2, options);
    const auto move = [&](uint64_t operation, size_t num_bytes) {
      const std::vector<char> data = randomBytes(num_bytes, operation);
      std::vector<char> got(data.size());
      cluster.open(0, operation);
      cluster.open(1, operation);
      cluster.recv(1, operation, 0, got, 1);
      cluster.send(0, operation, 1, data, 1);
      ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(1).received[operation].size() == 1 && cluster.told(0).sent[operation].size() == 1; }));
      EXPECT_EQ(got, data);
    };
    move(1, 10'000);
    EXPECT_EQ(countMappedRings(), 0U);
    const size_t in_use = countEntries("/proc/self/fd");
    move(2, 10'000'000);
    EXPECT_EQ(countMappedRings(), shared_memory ? 2U : 0U);  // both ends are in this process
    ASSERT_TRUE(cluster.fenceBoth(0, 1));
    EXPECT_EQ(countEntries("/proc/self/fd"), in_use);
  }
  EXPECT_EQ(countMappedRings(), 0U);
  EXPECT_EQ(countEntries("/proc/self/fd"), fds);
}

}  // namespace
}  // namespace xmesh::transport::test
