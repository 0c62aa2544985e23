// A network whose peers are not known beforehand: they come, leave or die, and others come under numbers of their own.
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>

#include "transport/alone.h"

namespace xmesh::transport::test {
namespace {

int64_t numDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

/// A peer that says hello to `alone`, and hears an answer.
class Newcomer {
 public:
  Newcomer(Alone& alone, int32_t number) : alone_(alone), number_(number) {
    TcpNetworkOptions options;
    options.own_peer = number;
    network_ = std::make_unique<TcpNetwork>(options, recorder_);
  }
  void talk() {
    network_->post([this, address = alone_.network().address()] {
      network_->setAddress(0, address);
      network_->sendControl(0, "here I am");
    });
    ASSERT_TRUE(alone_.waitFor([this] { return !alone_.told().controls.empty() && alone_.told().controls.back().first == number_; }));
    alone_.network().post([this, address = network_->address()] {
      alone_.network().setAddress(number_, address);
      alone_.network().sendControl(number_, "welcome");
    });
    std::unique_lock lock(monitor_.mutex);
    ASSERT_TRUE(monitor_.changed.wait_for(lock, std::chrono::minutes(1), [this] { return !recorder_.told.controls.empty(); }));
    EXPECT_EQ(recorder_.told.controls.front().second, "welcome");
  }

 private:
  Alone& alone_;
  const int32_t number_;
  Monitor monitor_;
  Recorder recorder_{monitor_};
  std::unique_ptr<TcpNetwork> network_;
};

TEST(TcpNetwork, PeersComeAndGo) {
  Alone alone;
  int64_t before = 0;
  for (int32_t i = 0; i < 100; ++i) {
    const int32_t number = 1'000'000'000 + 7 * i;
    {
      Newcomer newcomer(alone, number);
      newcomer.talk();
    }
    ASSERT_TRUE(alone.waitFor([&] { return !alone.told().losses.empty() && alone.told().losses.back().peer == number; }));
    EXPECT_TRUE(alone.told().losses.back().is_goodbye);
    alone.network().post([&] { alone.network().forget(number); });
    ASSERT_TRUE(alone.network().drain(std::chrono::minutes(1)));
    if (i == 0) {
      before = numDescriptors();
    }
  }
  EXPECT_EQ(numDescriptors(), before);
  EXPECT_EQ(alone.network().numRejectedConnections(), 0);
}

TEST(TcpNetwork, AForgottenPeerIsNotHeardAgain) {
  Alone alone;
  {
    Newcomer first(alone, 7);
    first.talk();
  }
  ASSERT_TRUE(alone.waitFor([&] { return alone.told().losses.size() == 1; }));
  alone.network().post([&] { alone.network().forget(7); });
  ASSERT_TRUE(alone.network().drain(std::chrono::minutes(1)));
  const Fd again = rawConnect(alone.network().address());
  rawWrite(again, helloBytes({7, {}}) + headerBytes({FrameKind::kControl, 0, 2, 0}) + "me");
  EXPECT_TRUE(isClosedByOther(again));
  EXPECT_EQ(alone.told().controls.size(), 1U);
}

TEST(TcpNetwork, APeerThatIsThereIsNotForgotten) {
  Alone alone;
  Newcomer first(alone, 7);
  first.talk();
  alone.network().post([&] { alone.network().forget(7); });
  ASSERT_TRUE(alone.network().drain(std::chrono::minutes(1)));
  EXPECT_TRUE(alone.told().losses.empty());
}

}  // namespace
}  // namespace xmesh::transport::test
