#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "pipeline/tensor_pool.h"

namespace xmesh::pipeline {
namespace {

constexpr int64_t kSteps = 16;  // that a shape is kept without being taken

TEST(TensorPool, MemoryComesBackOnceNobodySharesIt) {
  TensorPool pool;
  at::Tensor first = pool.take({2, 3}, at::kFloat);
  const void* memory = first.data_ptr();
  at::Tensor view = first.view({6}).narrow(0, 2, 1);
  first.reset();
  const at::Tensor second = pool.take({2, 3}, at::kFloat);
  EXPECT_NE(second.data_ptr(), memory) << "a view holds it";
  view.reset();
  const at::Tensor third = pool.take({2, 3}, at::kFloat);
  EXPECT_EQ(third.data_ptr(), memory);
  EXPECT_EQ(pool.numAllocated(), 2);
  EXPECT_EQ(pool.bytesAllocated(), 2 * 6 * 4);
}

TEST(TensorPool, ShapesAndDtypesAreApart) {
  TensorPool pool;
  const std::vector<int64_t> shape = {2, 3};
  EXPECT_EQ(pool.take(shape, at::kFloat).sizes().vec(), shape);
  EXPECT_EQ(pool.take({3, 2}, at::kFloat).sizes().vec(), std::vector<int64_t>({3, 2}));
  const at::Tensor taken = pool.take(shape, at::kInt);
  EXPECT_EQ(taken.scalar_type(), at::kInt);
  EXPECT_TRUE(taken.is_contiguous());
  EXPECT_EQ(pool.numAllocated(), 3);
}

TEST(TensorPool, WhatAutogradKnewOfABufferIsGone) {
  TensorPool pool;
  at::Tensor leaf = pool.take({2}, at::kFloat).requires_grad_();
  leaf.square().sum().backward();
  ASSERT_TRUE(leaf.grad().defined());
  const void* memory = leaf.data_ptr();
  leaf.reset();
  const at::Tensor again = pool.take({2}, at::kFloat);
  EXPECT_EQ(again.data_ptr(), memory);
  EXPECT_FALSE(again.requires_grad());
  EXPECT_FALSE(again.grad().defined());
}

TEST(TensorPool, ASavedActivationHoldsItsMemory) {
  TensorPool pool;
  at::Tensor taken = pool.take({2}, at::kFloat).fill_(3);
  const at::Tensor weight = at::ones({2}).requires_grad_();
  at::Tensor loss = (weight * taken).sum();
  taken.reset();
  pool.take({2}, at::kFloat).fill_(0);
  loss.backward();
  EXPECT_TRUE(weight.grad().equal(at::full({2}, 3.0F)));
  loss.reset();
  pool.take({2}, at::kFloat);
  EXPECT_EQ(pool.numAllocated(), 2);
}

TEST(TensorPool, ShapesThatAreTakenNoLongerAreDropped) {
  TensorPool pool;
  pool.take({4}, at::kFloat);
  const at::Tensor held = pool.take({5}, at::kFloat).fill_(7);
  for (int64_t step = 0; step < kSteps; ++step) {
    pool.beginStep();
  }
  pool.take({4}, at::kFloat);
  EXPECT_EQ(pool.numAllocated(), 2) << "kept";
  pool.beginStep();
  pool.take({4}, at::kFloat);
  EXPECT_EQ(pool.numAllocated(), 2) << "taken since";
  pool.take({5}, at::kFloat);
  EXPECT_EQ(pool.numAllocated(), 3) << "dropped";
  EXPECT_TRUE(held.equal(at::full({5}, 7.0F))) << "whoever holds a dropped buffer keeps it";
}

}  // namespace
}  // namespace xmesh::pipeline
