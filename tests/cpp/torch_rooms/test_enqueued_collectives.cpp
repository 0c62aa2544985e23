#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <vector>

#include "pipeline/enqueued_collectives.h"

namespace xmesh::pipeline {
namespace {

using std::chrono::milliseconds;

bool yes() { return true; }
bool no() { return false; }

struct Told {
  std::promise<void> told;
  std::atomic<int> times{0};
  std::function<void()> tell() {
    return [this] {
      if (times++ == 0) {
        told.set_value();
      }
    };
  }
};

TEST(EnqueuedCollectives, TellsOnceOfOneThatDoesNotEnd) {
  Told told;
  EnqueuedCollectives collectives(milliseconds(1), told.tell());
  collectives.add(yes, yes);
  collectives.add(yes, no);
  collectives.add(yes, no);
  told.told.get_future().wait();
  collectives.add(yes, no);
  collectives.close();
  EXPECT_EQ(told.times, 1);
}

TEST(EnqueuedCollectives, CountsFromWhenTheDeviceComesToIt) {
  Told told;
  EnqueuedCollectives collectives(milliseconds(1), told.tell());
  std::atomic<int> looks{0};
  std::promise<void> has_looked;
  std::atomic<bool> has_begun{false};
  collectives.add(
      [&] {
        if (++looks == 50) {
          has_looked.set_value();
        }
        return has_begun.load();
      },
      no);
  has_looked.get_future().wait();
  EXPECT_EQ(told.times, 0) << "what is before it on the device may take as long as it likes";
  has_begun = true;
  told.told.get_future().wait();
  collectives.close();
  EXPECT_EQ(told.times, 1);
}

TEST(EnqueuedCollectives, TellsOfADeviceThatFails) {
  const EnqueuedCollectives::Query fails = []() -> bool { throw std::runtime_error("device-side assert"); };
  for (const bool is_begun : {false, true}) {
    Told told;
    EnqueuedCollectives collectives(std::chrono::hours(1), told.tell());
    collectives.add(is_begun ? fails : yes, is_begun ? no : fails);
    collectives.add(yes, no);
    told.told.get_future().wait();
    collectives.close();
    EXPECT_EQ(told.times, 1);
  }
}

TEST(EnqueuedCollectives, LetsGoOfThoseThatHaveEnded) {
  Told told;
  EnqueuedCollectives collectives(std::chrono::hours(1), told.tell());
  std::vector<std::shared_ptr<std::atomic<bool>>> ends;
  for (int i = 0; i < 100; ++i) {
    ends.push_back(std::make_shared<std::atomic<bool>>(false));
    collectives.add(yes, [end = ends.back()] { return end->load(); });
    *ends.back() = true;
  }
  int held = 0;
  for (const auto& end : ends) {
    held += end.use_count() > 1 ? 1 : 0;
  }
  EXPECT_LE(held, 1) << "the last one, until another is added";
  collectives.close();
  EXPECT_EQ(ends.back().use_count(), 1);
  EXPECT_EQ(told.times, 0);
}

TEST(EnqueuedCollectives, EndsWithoutAny) {
  Told told;
  EnqueuedCollectives collectives(milliseconds(0), told.tell());
  collectives.close();
  collectives.close();
  EXPECT_EQ(told.times, 0);
}

int statusOfChild(const std::function<void()>& in_child) {
  const pid_t child = fork();
  if (child == 0) {
    in_child();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(EnqueuedCollectives, EndInAForkedChild) {
  for (const bool has_thread : {false, true}) {
    Told told;
    auto collectives = std::make_unique<EnqueuedCollectives>(std::chrono::hours(1), told.tell());
    if (has_thread) {
      collectives->add(yes, no);
    }
    EXPECT_EQ(statusOfChild([&] { collectives->close(); }), 0);
    collectives->close();
    EXPECT_EQ(statusOfChild([&] { collectives->close(); }), 0);
  }
}

}  // namespace
}  // namespace xmesh::pipeline
