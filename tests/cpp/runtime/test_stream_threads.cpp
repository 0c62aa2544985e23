// Calls on in-order streams with every thread that they have in earnest: callers, the network's, the line's, and a device that goes on by itself.
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/resharding/plan_resharding.h"
#include "runtime/calls/reshard_service.h"
#include "runtime/executors_by_route.h"
#include "runtime/fake_networks.h"
#include "runtime/host/host_executors.h"
#include "runtime/stream/stream_executors.h"
#include "transport/fakes/fake_stream_network.h"
#include "transport/tcp/network.h"

namespace xmesh::runtime {
namespace {

using core::Placement;

constexpr int32_t kNumRanks = 4;
constexpr size_t kNumGroups = 2;
constexpr int64_t kExtent = 96;

core::ReshardingPlan planOf(const std::string& strategy) {
  const core::DType dtype = core::DType::parse("int32");
  return core::planResharding(
      {{{{kExtent}, dtype, core::Mesh({2}, {0, 1}), {Placement::shard(0)}}, {{kExtent}, dtype, core::Mesh({2}, {2, 3}), {Placement::replicate()}}}},
      core::Topology::uniform(kNumRanks, 1), core::parseStrategy(strategy));
}

/// A thread that runs tasks in order, as a DeviceLine's.
class Line {
 public:
  ~Line() {
    post(nullptr);
    thread_.join();
  }
  void post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      if (!task) {
        return;
      }
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_{[this] { run(); }};
};

/// A FakeStreamNetwork whose streams go on by a thread of its own, while others enqueue and abort.
class Device {
 public:
  explicit Device(uint64_t seed) : streams_(kNumRanks, seed) {}
  ~Device() {
    with([this](transport::FakeStreamNetwork&) { is_over_ = true; });
    thread_.join();
  }
  template <typename Use>
  void with(const Use& use) {
    {
      const std::lock_guard lock(mutex_);
      use(streams_);
      has_news_ = true;
    }
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!is_over_) {
      if (!streams_.step()) {
        has_news_ = false;
        changed_.wait(lock, [this] { return has_news_; });
      }
    }
  }

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  transport::FakeStreamNetwork streams_;
  bool has_news_ = false;
  bool is_over_ = false;
  std::thread thread_{[this] { run(); }};
};

/// One rank's end of one of the device's communicators.
class End final : public transport::StreamTransport {
 public:
  End(Device& device, int32_t rank, int32_t communicator) : device_(device), rank_(rank), communicator_(communicator) {}
  void connectWays(std::span<const int32_t> send_to, std::span<const int32_t> receive_from) override {
    with([&](StreamTransport& end) { end.connectWays(send_to, receive_from); });
  }
  // The device sees a group as a whole.
  void groupBegin() override { group_.emplace(); }
  void groupEnd() override {
    const auto group = std::exchange(group_, std::nullopt);
    with([&](StreamTransport& end) {
      end.groupBegin();
      for (const auto& message : *group) {
        message(end);
      }
      end.groupEnd();
    });
  }
  void enqueueSend(int32_t peer, const void* data, int64_t num_bytes) override {
    group_->push_back([=](StreamTransport& end) { end.enqueueSend(peer, data, num_bytes); });
  }
  void enqueueRecv(int32_t peer, void* data, int64_t num_bytes) override {
    group_->push_back([=](StreamTransport& end) { end.enqueueRecv(peer, data, num_bytes); });
  }
  void enqueueBroadcast(int32_t root, void* data, int64_t num_bytes) override {
    with([&](StreamTransport& end) { end.enqueueBroadcast(root, data, num_bytes); });
  }
  void enqueue(std::function<void(void* stream)> launch) override {
    with([&](StreamTransport& end) { end.enqueue(std::move(launch)); });
  }
  void whenReached(std::function<void(const transport::StreamFailure* failure)> told) override {
    with([&](StreamTransport& end) { end.whenReached(std::move(told)); });
  }
  void abort(const transport::StreamFailure& failure) noexcept override {
    with([&](StreamTransport& end) { end.abort(failure); });
  }

 private:
  void with(const std::function<void(StreamTransport& end)>& use) {
    device_.with([&](transport::FakeStreamNetwork& streams) { use(streams.transport(rank_, communicator_)); });
  }

  Device& device_;
  const int32_t rank_;
  const int32_t communicator_;
  std::optional<std::vector<std::function<void(StreamTransport&)>>> group_;
};

/// A communicator of all ranks for each generation of a group.
class Generations final : public Communicators {
 public:
  Generations(Device& device, int32_t rank, size_t group) : device_(device), rank_(rank), group_(group) {}
  Proposal propose(const Participants& /*participants*/) override {
    const std::lock_guard lock(mutex_);
    return {newest_, nullptr};
  }
  std::shared_ptr<transport::StreamTransport> of(const Participants& /*participants*/, uint64_t generation) override {
    const std::lock_guard lock(mutex_);
    newest_ = std::max(newest_, generation);
    if (generation < newest_) {
      throw std::runtime_error("its communicator was given up");
    }
    return std::make_shared<End>(device_, rank_, communicator(generation));
  }
  void abort(const Participants& /*participants*/, uint64_t generation, const transport::StreamFailure& failure) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      newest_ = std::max(newest_, generation + 1);
    }
    End(device_, rank_, communicator(generation)).abort(failure);
  }

 private:
  int32_t communicator(uint64_t generation) const { return static_cast<int32_t>(generation * kNumGroups + group_); }

  Device& device_;
  const int32_t rank_;
  const size_t group_;
  std::mutex mutex_;
  uint64_t newest_ = 0;
};

/// Ranks that are in several groups, whose calls share their rank's line and its order.
class StreamThreadsTest : public testing::TestWithParam<uint64_t> {
 protected:
  StreamThreadsTest() : device_(GetParam()) {
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      lines_.push_back(std::make_unique<Line>());
      orders_.push_back(std::make_shared<CallOrder>());
    }
    for (size_t group = 0; group < kNumGroups; ++group) {
      for (int32_t rank = 0; rank < kNumRanks; ++rank) {
        services_.at(group).push_back(makeService(rank, group));
      }
      for (int32_t rank = 0; rank < kNumRanks; ++rank) {
        for (int32_t peer = 0; peer < kNumRanks; ++peer) {
          if (peer != rank) {
            service(rank, group)->setAddress(peer, service(peer, group)->address());
          }
        }
      }
    }
  }
  ~StreamThreadsTest() override {
    std::vector<std::thread> closing;  // as processes do: none waits for another
    for (auto& group : services_) {
      for (auto& service : group) {
        closing.emplace_back([&service] { service.reset(); });
      }
    }
    for (std::thread& thread : closing) {
      thread.join();
    }
    lines_.clear();
  }

  std::unique_ptr<ReshardService> makeService(int32_t rank, size_t group) {
    std::vector<int64_t> ranks(kNumRanks);
    std::iota(ranks.begin(), ranks.end(), 0);
    return std::make_unique<ReshardService>(ReshardService::Options{ranks, rank}, [this, rank, group](transport::PeerEvents& events) {
      transport::TcpNetworkOptions options;
      options.own_peer = rank;
      auto network = std::make_unique<transport::TcpNetwork>(options, events);
      const auto post = [network = network.get()](std::function<void()> task) { network->post(std::move(task)); };
      auto make = [this, rank, group, post](const Route& /*route*/) {
        const auto allocate = [](int64_t num_bytes) {
          return std::shared_ptr<void>(::operator new(static_cast<size_t>(num_bytes)), [](void* memory) { ::operator delete(memory); });
        };
        const auto on_line = [line = lines_[static_cast<size_t>(rank)].get()](std::function<void()> task) { line->post(std::move(task)); };
        return std::make_unique<StreamExecutors>(
            StreamExecutors::Line{std::make_shared<Generations>(device_, rank, group), kernels_, orders_[static_cast<size_t>(rank)], group}, allocate,
            StreamExecutors::Threads{post, on_line});
      };
      auto host = std::make_unique<HostExecutors>(*network, int64_t{1} << 20);
      const std::string address = network->address();
      return ReshardService::Networks{std::move(network), std::make_unique<ExecutorsByRoute>(std::move(host), std::move(make)), address};
    });
  }
  std::unique_ptr<ReshardService>& service(int32_t rank, size_t group) { return services_.at(group).at(static_cast<size_t>(rank)); }

  struct Tensors {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
  };
  struct Made {
    std::shared_ptr<Tensors> tensors = std::make_shared<Tensors>();
    std::shared_ptr<ReshardCall> call;
  };

  Made begin(int32_t rank, const std::shared_ptr<const PreparedPlan>& prepared, size_t group = 0) {
    Made made;
    ReshardRequest request;
    request.movement.src = {localIn(made.tensors->src, prepared->program->srcShape(0))};
    request.movement.dst = {localIn(made.tensors->dst, prepared->program->dstShape(0))};
    request.movement.keep_alive = made.tensors;
    request.movement.prepared = prepared;
    request.movement.route = {1, 0};
    std::iota(made.tensors->src.begin(), made.tensors->src.end(), rank == 1 ? kExtent / 2 : 0);
    made.call = service(rank, group)->reshard(std::move(request));
    return made;
  }

  /// All end, and whoever receives has the whole tensor.
  static void expectWhole(const std::vector<Made>& calls) {
    std::vector<int32_t> whole(kExtent);
    std::iota(whole.begin(), whole.end(), 0);
    for (const Made& made : calls) {
      EXPECT_TRUE(made.call->wait());
      EXPECT_TRUE(made.tensors->dst.empty() || made.tensors->dst == whole);
    }
  }

  /// What each rank does, on a thread of its own.
  static void onAllRanks(const std::function<void(int32_t rank)>& body) {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < kNumRanks; ++rank) {
      threads.emplace_back([&body, rank] { body(rank); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  Device device_;
  const std::shared_ptr<const HostKernels> kernels_ = std::make_shared<HostKernels>();
  std::vector<std::unique_ptr<Line>> lines_;        ///< by rank
  std::vector<std::shared_ptr<CallOrder>> orders_;  ///< by rank
  std::array<std::vector<std::unique_ptr<ReshardService>>, kNumGroups> services_;
};

std::vector<std::shared_ptr<const PreparedPlan>> preparedPlans(int32_t rank) {
  std::vector<std::shared_ptr<const PreparedPlan>> out;
  for (const char* strategy : {"broadcast", "send_recv", "striped"}) {
    out.push_back(preparedFor(planOf(strategy), rank, {.groups = GroupLimits{256}}));
  }
  return out;
}

TEST_P(StreamThreadsTest, CallsEndWithTheirValues) {
  onAllRanks([this](int32_t rank) {
    const auto plans = preparedPlans(rank);
    std::mt19937_64 draw(GetParam());
    std::mt19937_64 own(GetParam() * kNumRanks + static_cast<uint64_t>(rank));
    std::vector<Made> calls;
    for (int turn = 0; turn < 30; ++turn) {
      calls.push_back(begin(rank, plans[draw() % plans.size()], draw() % kNumGroups));
      if (own() % 3 == 0) {
        EXPECT_TRUE(calls.back().call->waitEnqueued());
      }
    }
    expectWhole(calls);
  });
}

/// Ranks give calls up at any moment: each call ends on all ranks, and later ones have their values.
TEST_P(StreamThreadsTest, CallsThatFailHoldUpNoOthers) {
  onAllRanks([this](int32_t rank) {
    const auto plans = preparedPlans(rank);
    std::mt19937_64 draw(GetParam());
    std::mt19937_64 own(GetParam() * kNumRanks + static_cast<uint64_t>(rank));
    const auto ends = [](const Made& made) {
      try {
        return made.call->wait();
      } catch (const std::exception&) {
        return false;
      }
    };
    std::vector<Made> calls;
    for (int turn = 0; turn < 30; ++turn) {
      const size_t group = draw() % kNumGroups;
      calls.push_back(begin(rank, plans[draw() % plans.size()], group));
      if (own() % 12 == 0) {
        service(rank, group)->failCall(calls.back().call->key(), {FailureKind::kGroup, "given up", {}});
      }
      if (own() % 3 == 0) {
        ends(calls.back());
      }
    }
    for (const Made& made : calls) {
      ends(made);
    }
    bool has_ended = false;
    for (int turn = 0; turn < 5; ++turn) {  // the first may be on a communicator that another rank has just given up
      has_ended = ends(begin(rank, plans.front()));
    }
    EXPECT_TRUE(has_ended);
  });
}

/// Each rank makes the calls of the two groups in an order of its own, all before it waits for any.
TEST_P(StreamThreadsTest, GroupsInAnyOrder) {
  onAllRanks([this](int32_t rank) {
    const auto plans = preparedPlans(rank);
    std::mt19937_64 own(GetParam() * kNumRanks + static_cast<uint64_t>(rank));
    std::vector<Made> calls;
    std::array<size_t, kNumGroups> num_made = {};
    while (calls.size() < 30) {
      size_t group = own() % kNumGroups;
      group = num_made.at(group) < 15 ? group : 1 - group;
      calls.push_back(begin(rank, plans[num_made.at(group)++ % plans.size()], group));
    }
    expectWhole(calls);
  });
}

/// Some ranks have made calls that the others never make, when their group ends: it holds up no call of the other group, before or after.
TEST_P(StreamThreadsTest, AGroupEndsBeforeItsCallsAreAgreed) {
  onAllRanks([this](int32_t rank) {
    const auto plans = preparedPlans(rank);
    std::mt19937_64 own(GetParam() * kNumRanks + static_cast<uint64_t>(rank));
    std::vector<Made> calls;
    for (size_t turn = 0; turn < 10; ++turn) {
      if (rank > 0 && turn < 5 && own() % 2 == 0) {
        begin(rank, plans[turn % plans.size()], 1);
      }
      if (turn == 5) {
        service(rank, 1).reset();
      }
      calls.push_back(begin(rank, plans[turn % plans.size()]));
    }
    expectWhole(calls);
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, StreamThreadsTest, testing::Range<uint64_t>(0, 20));

}  // namespace
}  // namespace xmesh::runtime
