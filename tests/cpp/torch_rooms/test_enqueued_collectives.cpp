#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <vector>

#include "pipeline/enqueued_collectives.h"

namespace xmesh::pipeline {
namespace {

using std::chrono::milliseconds;

class FakeWork final : public ::c10d::Work {
 public:
  bool isCompleted() override { return is_done; }
  std::atomic<bool> is_done{false};
};

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
  const auto ended = c10::make_intrusive<FakeWork>();
  ended->is_done = true;
  collectives.add(ended);
  collectives.add(c10::make_intrusive<FakeWork>());
  collectives.add(c10::make_intrusive<FakeWork>());
  told.told.get_future().wait();
  collectives.add(c10::make_intrusive<FakeWork>());
  collectives.close();
  EXPECT_EQ(told.times, 1);
}

TEST(EnqueuedCollectives, LetsGoOfThoseThatHaveEnded) {
  Told told;
  EnqueuedCollectives collectives(std::chrono::hours(1), told.tell());
  std::vector<c10::intrusive_ptr<FakeWork>> works;
  for (int i = 0; i < 100; ++i) {
    works.push_back(c10::make_intrusive<FakeWork>());
    collectives.add(works.back());
    works.back()->is_done = true;
  }
  int held = 0;
  for (const auto& work : works) {
    held += work.use_count() > 1 ? 1 : 0;
  }
  EXPECT_LE(held, 1) << "the last one, until another is added";
  collectives.close();
  EXPECT_EQ(works.back().use_count(), 1U);
  EXPECT_EQ(told.times, 0);
}

TEST(EnqueuedCollectives, EndsWithoutAny) {
  Told told;
  EnqueuedCollectives collectives(milliseconds(0), told.tell());
  collectives.close();
  collectives.close();
  EXPECT_EQ(told.times, 0);
}

}  // namespace
}  // namespace xmesh::pipeline
