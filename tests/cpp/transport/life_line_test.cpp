#include "transport/life_line.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace xmesh::transport {
namespace {

/// Connections within this machine are there at once, but the kernel may take a moment to say so.
template <class Condition>
void waitUntil(const Condition& condition) {
  while (!condition()) {
    std::this_thread::yield();
  }
}

TEST(LifeLineTest, ItsEndIsSeen) {
  std::optional<LifeLine> line(std::in_place, "127.0.0.1");
  LifeWatch early(line->address());
  waitUntil([&] { return early.isConnected(); });
  EXPECT_FALSE(early.isGone());
  EXPECT_TRUE(line->hear().empty()) << "who only watches tells nothing";
  EXPECT_FALSE(early.isGone()) << "it is still there, though it has looked";
  const std::string address = line->address();
  line.reset();
  waitUntil([&] { return early.isGone(); });
  LifeWatch late(address);
  waitUntil([&] { return late.isGone(); });
  EXPECT_FALSE(late.isConnected());
}

TEST(LifeLineTest, AnEndWithoutAFarewellIsADeath) {
  LifeLine leaves("127.0.0.1");
  LifeWatch watches_one_who_leaves(leaves.address());
  waitUntil([&] { return watches_one_who_leaves.isConnected(); });
  watches_one_who_leaves.tell("something that is not heard any more");
  leaves.end();
  waitUntil([&] { return watches_one_who_leaves.isGone(); });
  EXPECT_FALSE(watches_one_who_leaves.hasDied());
  EXPECT_TRUE(watches_one_who_leaves.hasLeft());
  LifeLine ends("127.0.0.1");
  LifeWatch watches_one_who_ends(ends.address());
  waitUntil([&] { return watches_one_who_ends.isConnected(); });
  ends.end(/*says_farewell=*/false);
  waitUntil([&] { return watches_one_who_ends.hasDied(); });

  Fd dies = listenOn("127.0.0.1", 8);
  const std::string address = SocketAddress::ofSocket(dies.get()).str();
  LifeWatch watches_one_who_dies(address);
  waitUntil([&] { return watches_one_who_dies.isConnected(); });
  EXPECT_FALSE(watches_one_who_dies.hasDied());
  dies.reset();
  waitUntil([&] { return watches_one_who_dies.hasDied(); });

  LifeWatch late(address);
  waitUntil([&] { return late.isGone(); });
  EXPECT_FALSE(late.hasDied() || late.hasLeft()) << "nobody knows how";
}

TEST(LifeLineTest, WhatIsToldOutlivesTheTeller) {
  LifeLine line("127.0.0.1");
  for (const char* const word : {"one", "two"}) {
    LifeWatch teller(line.address());
    waitUntil([&] { return teller.isConnected(); });
    teller.tell(word);
  }
  std::vector<std::string> heard;
  waitUntil([&] {
    for (std::string& one : line.hear()) {
      heard.push_back(std::move(one));
    }
    return heard.size() == 2;
  });
  EXPECT_EQ(heard, (std::vector<std::string>{"one", "two"}));
  EXPECT_TRUE(line.hear().empty()) << "each line is heard once";
}

TEST(LifeLineTest, StrangersMayLeaveAnything) {
  LifeLine line("127.0.0.1");
  LifeWatch stranger(line.address());
  waitUntil([&] { return stranger.isConnected(); });
  stranger.tell(std::string(100'000, 'x'));
  LifeWatch teller(line.address());
  waitUntil([&] { return teller.isConnected(); });
  teller.tell("still heard");
  std::vector<std::string> heard;
  waitUntil([&] {
    heard = line.hear();
    return !heard.empty();
  });
  EXPECT_EQ(heard, std::vector<std::string>{"still heard"}) << "a line without an end is none";
}

}  // namespace
}  // namespace xmesh::transport
