// What TcpNetwork promises beyond PeerNetwork: peers that die, shortages, forks.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <future>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "transport/alone.h"
#include "transport/tcp/network.h"
#include "transport/tcp/sender.h"

namespace xmesh::transport::test {
namespace {

using std::chrono::milliseconds;

TEST(TcpNetwork, RefusedConnectionNamesTheAddress) {
  TcpNetworkOptions options;
  options.connect_timeout = milliseconds(50);
  Alone alone(options);
  const Fd closed_port = rawBind();
  alone.call(addressOf(closed_port), [](TcpNetwork& network) { network.sendControl(1, "hello?"); });
  EXPECT_EQ(alone.waitLoss().reason, "cannot connect to rank 1 at " + addressOf(closed_port) + " within 50 ms: Connection refused");
  EXPECT_FALSE(alone.told().losses[0].is_goodbye);
}

TEST(TcpNetwork, KeepsTryingWhileThePeerStarts) {
  Alone alone;
  const Fd port = rawBind();
  std::atomic<bool> has_been_refused = false;
  alone.call(addressOf(port), [&](TcpNetwork& network) {
    network.sendControl(1, "hello");
    network.startTimer(milliseconds(20), [&] { has_been_refused = true; });
  });
  while (!has_been_refused) {
    std::this_thread::yield();
  }
  ASSERT_EQ(::listen(port.get(), 1), 0);
  const Fd accepted(::accept(port.get(), nullptr, nullptr));
  EXPECT_EQ(rawRead(accepted, kHelloBytes), helloBytes({0, {}}));
  EXPECT_EQ(rawRead(accepted, kFrameHeaderBytes + 5).substr(kFrameHeaderBytes), "hello");
  alone.destroyNetwork();  // before its peer ends without goodbye
  EXPECT_TRUE(alone.told().losses.empty());
}

TEST(TcpNetwork, LeavesWhenItsWordsHaveGoneThoughItHasYetToConnect) {
  Alone alone;
  const Fd port = rawBind();
  const Fd peer = rawConnect(alone.network().address());
  rawWrite(peer, helloBytes({1, {}}) + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok");
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
  std::promise<void> said;
  alone.call(addressOf(port), [&](TcpNetwork& network) {
    network.sendControl(1, "hello");
    said.set_value();
  });
  said.get_future().wait();
  std::thread leaving([&] { alone.destroyNetwork(); });
  EXPECT_EQ(rawRead(peer, kFrameHeaderBytes), headerBytes({FrameKind::kGoodbye, 0, kGoodbyeOtherway, 0}));
  EXPECT_EQ(::listen(port.get(), 1), 0);
  leaving.join();
  pollfd ready{port.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 0), 1) << "it has left without its words";
  const Fd accepted(::accept(port.get(), nullptr, nullptr));
  EXPECT_EQ(rawRead(accepted, kHelloBytes), helloBytes({0, {}}));
  EXPECT_EQ(rawRead(accepted, kFrameHeaderBytes + 5).substr(kFrameHeaderBytes), "hello");
  EXPECT_EQ(rawRead(accepted, kFrameHeaderBytes), headerBytes({FrameKind::kGoodbye, 0, kGoodbyeFinal, 0}));
}

TEST(TcpNetwork, EndWithoutGoodbyeIsALossFromBothSides) {
  {
    Alone alone;
    Fd peer = rawConnect(alone.network().address());
    rawWrite(peer, helloBytes({1, {}}) + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok");
    ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
    peer.reset();
    EXPECT_EQ(alone.waitLoss().reason.find("connection reset by peer"), 0U);
  }
  {
    Alone alone;
    const Fd port = rawBind();
    ASSERT_EQ(::listen(port.get(), 1), 0);
    alone.call(addressOf(port), [](TcpNetwork& network) { network.sendControl(1, "hello"); });
    Fd accepted(::accept(port.get(), nullptr, nullptr));
    rawRead(accepted, kHelloBytes);
    accepted.reset();
    EXPECT_EQ(alone.waitLoss().reason.find("connection reset by peer"), 0U);
  }
}

/// The operation of each frame of payload that comes, `num_frames` of them.
std::vector<uint64_t> callsOfFrames(const Fd& from, size_t num_frames) {
  std::vector<uint64_t> calls;
  while (calls.size() < num_frames) {
    const std::string bytes = rawRead(from, kFrameHeaderBytes);
    const std::optional<FrameHeader> header = decodeFrameHeader(std::span<const char, kFrameHeaderBytes>(bytes.data(), kFrameHeaderBytes));
    if (header->kind == FrameKind::kData) {
      calls.push_back(header->operation.call);
      rawRead(from, static_cast<size_t>(header->num_bytes) + 1);
    }
  }
  return calls;
}

TEST(TcpNetwork, CallsGoInQuanta) {
  TcpNetworkOptions options;
  options.shared_memory = false;
  Alone alone(options);
  const std::vector<char> large(static_cast<size_t>(TcpSender::kQuantumBytes + 4 * kMaxFramePayloadBytes));
  const std::vector<char> small(static_cast<size_t>(3 * kMaxFramePayloadBytes));
  const Fd port = rawBind();
  ASSERT_EQ(::listen(port.get(), 1), 0);
  const Fd peer = rawConnect(alone.network().address());
  // The peer's receives are posted before anything is sent.
  std::string ready = helloBytes({1, {}});
  const std::vector<OperationId> operations{1, 2, OperationId(2, 1), 3, 4, 5};
  for (const OperationId operation : operations) {
    ready += headerBytes({FrameKind::kReady, operation, 2, 0});
  }
  alone.call(addressOf(port), [&](TcpNetwork& network) {
    for (const OperationId operation : operations) {
      network.open(operation, alone.recorder().operation(operation));
    }
  });
  rawWrite(peer, ready + headerBytes({FrameKind::kControl, 0, 2, 0}) + "ok");
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().controls.size() == 1; }));
  alone.network().post([&] {
    alone.network().send(1, 1, small.data(), static_cast<int64_t>(small.size()), 0);
    alone.network().send(2, 1, large.data(), static_cast<int64_t>(large.size()), 0);
    alone.network().send(OperationId(2, 1), 1, large.data(), static_cast<int64_t>(large.size()), 1);
    alone.network().send(3, 1, small.data(), static_cast<int64_t>(small.size()), 0);
    alone.network().send(1, 1, small.data(), static_cast<int64_t>(small.size()), 1);
    alone.network().send(4, 1, small.data(), 10, 0);
  });
  const Fd accepted(::accept(port.get(), nullptr, nullptr));
  rawRead(accepted, kHelloBytes);
  // The one small message, call 1 with both its messages, a quantum of call 2 with both its tracks, call 3, the rest of call 2.
  const size_t quantum = TcpSender::kQuantumBytes / kMaxFramePayloadBytes;
  // A small message that comes meanwhile goes between and changes nothing else.
  std::vector<uint64_t> expected(1, 4);
  expected.insert(expected.end(), 6, 1);
  expected.insert(expected.end(), quantum, 2);
  expected.insert(expected.end(), 3, 3);
  expected.insert(expected.end(), quantum + 8, 2);
  std::vector<uint64_t> calls = callsOfFrames(accepted, 10);
  alone.network().post([&] { alone.network().send(5, 1, small.data(), 10, 0); });
  for (const uint64_t call : callsOfFrames(accepted, expected.size() + 1 - calls.size())) {
    calls.push_back(call);
  }
  EXPECT_EQ(std::erase(calls, 5U), 1U);
  EXPECT_EQ(calls, expected);
  alone.destroyNetwork();
}

TEST(TcpNetwork, AKilledProcessIsLost) {
  int from_child[2];
  int to_child[2];
  ASSERT_EQ(::pipe(from_child), 0);
  ASSERT_EQ(::pipe(to_child), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Monitor monitor;
    Recorder recorder(monitor);
    TcpNetworkOptions options;
    options.own_peer = 1;
    TcpNetwork network(options, recorder);
    std::string address = network.address() + "\n";
    static_cast<void>(!::write(from_child[1], address.data(), address.size()));
    std::array<char, 100> bytes{};
    static_cast<void>(!::read(to_child[0], bytes.data(), bytes.size() - 1));
    network.post([&] {
      network.setAddress(0, bytes.data());
      network.sendControl(0, "alive");
    });
    while (true) {
      ::pause();
    }
  }
  {
    Alone alone;
    std::array<char, 100> bytes{};
    ASSERT_GT(::read(from_child[0], bytes.data(), bytes.size() - 1), 0);
    const std::string address = alone.network().address();
    ASSERT_GT(::write(to_child[1], address.data(), address.size()), 0);
    ASSERT_TRUE(alone.waitFor([&] { return !alone.told().controls.empty(); }));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    const Told::Loss loss = alone.waitLoss();
    EXPECT_EQ(loss.peer, 1);
    EXPECT_FALSE(loss.is_goodbye);
    EXPECT_EQ(loss.reason.find("connection reset by peer"), 0U) << loss.reason;
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  for (const int fd : {from_child[0], from_child[1], to_child[0], to_child[1]}) {
    ::close(fd);
  }
}

TEST(TcpNetwork, PaceSetsTheRateOfTheConnection) {
  TcpCluster cluster(2);
  const auto rate = [&] {
    uint64_t value = 0;
    socklen_t length = sizeof(value);
    EXPECT_EQ(::getsockopt(findSocketTo(cluster.network(1).address()), SOL_SOCKET, SO_MAX_PACING_RATE, &value, &length), 0);
    return value;
  };
  cluster.call(0, [&] { cluster.network(0).pace(1, 5'000'000'000); });  // before there is a connection
  ASSERT_TRUE(cluster.fence(0, 1));
  EXPECT_EQ(rate(), 5'000'000'000U);
  cluster.call(0, [&] { cluster.network(0).pace(1, 25'000'000); });
  EXPECT_EQ(rate(), 25'000'000U);
  cluster.call(0, [&] { cluster.network(0).pace(1, 0); });
  EXPECT_EQ(rate(), ~uint64_t{0});
}

TEST(TcpNetwork, TracksOfACallGoByCookie) {
  constexpr uint64_t kFirst = 8;
  constexpr uint64_t kSecond = 16;
  const std::vector<std::pair<OperationId, int64_t>> sends{{kFirst, 2},      {kFirst, 3},      {kFirst, 5},   {{kFirst, 1}, 0},
                                                           {{kFirst, 1}, 1}, {{kFirst, 2}, 4}, {kSecond, 10}, {kSecond, 11}};
  for (const bool shared_memory : {true, false}) {
    for (const size_t num_bytes : {size_t{100}, size_t{3} << 20}) {
      const std::vector<char> data(num_bytes);  // may be in the midst of a write when all of it has come
      std::vector<std::vector<char>> got(sends.size(), std::vector<char>(num_bytes));
      TcpNetworkOptions options;
      options.shared_memory = shared_memory;
      TcpCluster cluster(2, options);
      for (const OperationId operation : {OperationId(kFirst), OperationId(kFirst, 1), OperationId(kFirst, 2), OperationId(kSecond)}) {
        cluster.open(0, operation);
        cluster.open(1, operation);
      }
      for (size_t i = 0; i < sends.size(); ++i) {
        cluster.recv(1, sends[i].first, 0, got[i], sends[i].second);
      }
      ASSERT_TRUE(cluster.fenceBoth(0, 1));
      cluster.call(0, [&] {
        for (const auto& [operation, cookie] : sends) {
          cluster.network(0).send(operation, 1, data.data(), static_cast<int64_t>(num_bytes), cookie);
        }
      });
      ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(1).received_of_all.size() == sends.size(); }));
      std::vector<int64_t> of_the_first;
      const std::vector<int64_t>& all = cluster.told(1).received_of_all;
      std::copy_if(all.begin(), all.end(), std::back_inserter(of_the_first), [](int64_t cookie) { return cookie < 10; });
      EXPECT_EQ(of_the_first, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
    }
  }
}

TEST(TcpNetwork, LeavesNoDescriptorAndNoThread) {
  { const TcpCluster first(2); }  // a sanitizer's runtime starts a thread of its own beside the first one
  const size_t fds = countEntries("/proc/self/fd");
  const size_t threads = countEntries("/proc/self/task");
  for (int i = 0; i < 3; ++i) {
    TcpCluster cluster(3);
    ASSERT_TRUE(cluster.fenceBoth(0, 1));
    ASSERT_TRUE(cluster.fenceBoth(1, 2));
    const size_t in_use = countEntries("/proc/self/fd");
    for (uint64_t operation = 1; operation <= 50; ++operation) {
      const std::vector<char> data = randomBytes(20'000, operation);
      std::vector<char> got(data.size());
      cluster.open(0, operation);
      cluster.open(1, operation);
      cluster.send(0, operation, 1, data, 1);
      cluster.recv(1, operation, 0, got, 1);
      ASSERT_TRUE(cluster.waitFor([&] { return cluster.told(1).received[operation].size() == 1; }));
      cluster.close(0, operation);
      cluster.close(1, operation);
    }
    EXPECT_EQ(countEntries("/proc/self/fd"), in_use);
  }
  EXPECT_EQ(countEntries("/proc/self/fd"), fds);
  EXPECT_EQ(countEntries("/proc/self/task"), threads);
}

TEST(TcpNetwork, ALackOfDescriptorsIsNamedAsSuch) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "runs in builds without sanitizers: UBSan looks at an object's type through a pipe, for which it needs descriptors";
#endif
  Alone alone;
  const Fd port = rawBind();
  ASSERT_EQ(::listen(port.get(), 1), 0);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  // Descriptors below the limit may be free: fill them.
  rlimit tight = old;
  tight.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<Fd> fillers;
  while (fillers.empty() || fillers.back().valid()) {
    fillers.emplace_back(::dup(port.get()));
  }
  alone.call(addressOf(port), [](TcpNetwork& network) { network.sendControl(1, "hello"); });
  const Told::Loss loss = alone.waitLoss();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_NE(loss.reason.find("this rank is short of resources (Too many open files)"), std::string::npos) << loss.reason;
  EXPECT_EQ(loss.reason.find("connection reset"), std::string::npos) << loss.reason;
}

TEST(TcpNetwork, DrainWaitsForWhatMayBeWritten) {
  Alone alone;
  const Fd port = rawBind();
  ASSERT_EQ(::listen(port.get(), 1), 0);
  EXPECT_TRUE(alone.network().drain(milliseconds(0)));
  const std::string message(32 << 20, 'x');
  const std::string unwanted = "nobody has posted a receive for this";
  alone.call(addressOf(port), [&](TcpNetwork& network) {
    network.sendControl(1, message);
    network.open(1, alone.recorder().operation(1));
    network.send(1, 1, unwanted.data(), static_cast<int64_t>(unwanted.size()), 1);
  });
  const Fd accepted(::accept(port.get(), nullptr, nullptr));
  EXPECT_FALSE(alone.network().drain(milliseconds(50)));  // the peer does not read
  std::thread reader(
      [&] { EXPECT_EQ(rawRead(accepted, kHelloBytes + kFrameHeaderBytes + message.size()).substr(kHelloBytes + kFrameHeaderBytes), message); });
  EXPECT_TRUE(alone.network().drain(std::chrono::minutes(1)));
  reader.join();
}

TEST(TcpNetwork, DestructorDoesNotWaitForAPeerThatDoesNotRead) {
  Alone alone;
  const Fd port = rawBind();
  ASSERT_EQ(::listen(port.get(), 1), 0);
  alone.call(addressOf(port), [](TcpNetwork& network) { network.sendControl(1, std::string(32 << 20, 'x')); });
  const Fd accepted(::accept(port.get(), nullptr, nullptr));
  EXPECT_FALSE(alone.network().drain(milliseconds(10)));
  alone.destroyNetwork();
}

TEST(TcpNetwork, AForkedChildMayDestroyItsCopy) {
  auto cluster = std::make_unique<TcpCluster>(2);
  ASSERT_TRUE(cluster->fenceBoth(0, 1));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    cluster->leave(0);
    cluster->leave(1);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(cluster->fenceBoth(0, 1));
  EXPECT_TRUE(cluster->told(0).losses.empty() && cluster->told(1).losses.empty());
}

TEST(TcpNetwork, WhatCallbacksThrowIsLoggedAndTheNetworkGoesOn) {
  Alone alone;
  alone.network().post([] { throw std::runtime_error("from a task"); });
  std::atomic<bool> goes_on = false;
  alone.network().post([&] { goes_on = true; });
  ASSERT_TRUE(alone.waitFor([&] { return !alone.lines().empty(); }));
  EXPECT_NE(alone.lines()[0].find("from a task"), std::string::npos);
  EXPECT_TRUE(alone.network().drain(std::chrono::minutes(1)));
  EXPECT_TRUE(goes_on);
}

TEST(TcpNetwork, MisuseThrows) {
  Alone alone;
  EXPECT_THROW(alone.network().open(1, alone.recorder().operation(1)), std::logic_error);  // not on the network's thread
  EXPECT_THROW(static_cast<void>(alone.network().hasAddress(1)), std::logic_error);
  std::atomic<bool> is_done = false;
  alone.network().post([&] {
    EXPECT_THROW(alone.network().sendControl(1, "to whom?"), std::logic_error);  // no address yet
    for (const char* address : {"", "127.0.0.1", ":80", "127.0.0.1:", "some.host.name:80", "127.0.0.1:http!"}) {
      EXPECT_THROW(alone.network().setAddress(1, address), std::invalid_argument) << address;
    }
    EXPECT_THROW(static_cast<void>(alone.network().drain(milliseconds(0))), std::logic_error);
    is_done = true;
  });
  EXPECT_TRUE(alone.network().drain(std::chrono::minutes(1)));
  EXPECT_TRUE(is_done);
  Monitor monitor;
  Recorder recorder(monitor);
  TcpNetworkOptions options;
  options.own_peer = -1;
  EXPECT_THROW(TcpNetwork(options, recorder), std::invalid_argument);
  options.own_peer = 0;
  options.listen_host = "203.0.113.1";  // no interface of this machine has it
  EXPECT_THROW(TcpNetwork(options, recorder), std::system_error);
}

TEST(SocketAddress, ReadsWhatItWrites) {
  for (const char* text : {"127.0.0.1:4711", "[::1]:80", "10.77.0.3:65535"}) {
    EXPECT_EQ(SocketAddress::parse(text).str(), text);
  }
}

}  // namespace
}  // namespace xmesh::transport::test
