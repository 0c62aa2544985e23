#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "c10d/inner_backends.h"

namespace xmesh::c10d_backend {
namespace {

/// A backend that tells when it is gone.
class Told final : public ::c10d::Backend {
 public:
  explicit Told(std::shared_ptr<int> num_gone) : Backend(0, 1), num_gone_(std::move(num_gone)) {}
  ~Told() override { ++*num_gone_; }

 private:
  std::shared_ptr<int> num_gone_;
};

class InnerBackendsTest : public ::testing::Test {
 protected:
  InnerBackends make() {
    HostHooks hooks;
    hooks.run_unlocked = [](const std::function<void()>& function) { function(); };
    hooks.make_inner = [this](auto&&...) {
      ++num_made_;
      return c10::make_intrusive<Told>(num_gone_);
    };
    return {std::move(hooks), store_, 0, 1, c10::make_intrusive<XmeshOptions>()};
  }
  static void prepare(::c10d::Backend& /*made*/) {}

  c10::intrusive_ptr<::c10d::Store> store_ = c10::make_intrusive<::c10d::HashStore>();
  std::shared_ptr<int> num_gone_ = std::make_shared<int>(0);
  int num_made_ = 0;
  InnerBackends inner_ = make();
};

TEST_F(InnerBackendsTest, AreMadeOnceAndEnd) {
  ::c10d::Backend& first = inner_.get(c10::kCPU, prepare);
  EXPECT_EQ(&first, &inner_.get(c10::kCPU, prepare));
  EXPECT_EQ(num_made_, 1);
  EXPECT_THROW(inner_.get(c10::kCUDA, prepare), c10::NotImplementedError);
  inner_.end();
  EXPECT_EQ(*num_gone_, 1);
  EXPECT_EQ(inner_.made(c10::kCPU), nullptr);
}

TEST_F(InnerBackendsTest, CarryTheAcceleratorsThatAreThere) {
  EXPECT_EQ(inner_.primary(), c10::kCPU);
  HostHooks hooks = inner_.hooks();
  hooks.accelerators = {c10::kXPU, c10::kCUDA};
  InnerBackends both(std::move(hooks), store_, 0, 1, c10::make_intrusive<XmeshOptions>());
  EXPECT_EQ(both.primary(), c10::kXPU) << "the first one";
  EXPECT_NE(&both.get(c10::kXPU, prepare), &both.get(c10::kCUDA, prepare));
  try {
    both.get(c10::kHPU, prepare);
    ADD_FAILURE();
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(std::string(error.what()).find("carries cpu tensors and xpu tensors and cuda tensors, got a hpu tensor"), std::string::npos)
        << error.what();
  }
}

TEST_F(InnerBackendsTest, EndBeforeTheProcessDoesAndAreNotMadeAgain) {
  inner_.get(c10::kCPU, prepare);
  std::future<void> end = inner_.endGloo();
  ASSERT_TRUE(end.valid());
  end.get();
  EXPECT_EQ(*num_gone_, 1);
  EXPECT_THROW(inner_.get(c10::kCPU, prepare), c10::Error);
  EXPECT_EQ(num_made_, 1);
}

TEST_F(InnerBackendsTest, ThatWereNotMadeHaveNoEnd) {
  EXPECT_FALSE(inner_.endGloo().valid());
  EXPECT_THROW(inner_.get(c10::kCPU, prepare), c10::Error);
}

TEST_F(InnerBackendsTest, StayWhereACallIsInside) {
  inner_.get(c10::kCPU, prepare);
  {
    const InnerBackends::Inside inside = inner_.inside();
    EXPECT_FALSE(inner_.endGloo().valid());
  }
  EXPECT_EQ(*num_gone_, 0);
  inner_.end();
  EXPECT_EQ(*num_gone_, 1);
}

TEST_F(InnerBackendsTest, LetTheStoreGo) {
  const c10::weak_intrusive_ptr<::c10d::Store> watched(store_);
  store_.reset();
  EXPECT_FALSE(watched.expired());
  inner_.end();
  inner_.dropStore();
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace xmesh::c10d_backend
