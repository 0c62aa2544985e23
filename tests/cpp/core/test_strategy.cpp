#include <gtest/gtest.h>

#include "core/error.h"
#include "core/resharding/strategy.h"
#include "core/resharding/strategy_registry.h"

namespace xmesh::core {
namespace {

std::string complaint(const std::string& text) {
  try {
    parseStrategy(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Strategy, TextRoundTripsInOneSpelling) {
  EXPECT_EQ(parseStrategy("broadcast").str(), "broadcast");
  EXPECT_EQ(parseStrategy("broadcast:size+best").str(), "broadcast");
  EXPECT_EQ(parseStrategy("broadcast:size").str(), "broadcast");
  EXPECT_EQ(parseStrategy(" broadcast : naive + naive , seed = 0 ").str(), "broadcast:naive+naive");
  EXPECT_EQ(parseStrategy("broadcast:seed=3").str(), "broadcast:seed=3");
  EXPECT_EQ(parseStrategy("broadcast:naive+dfs,node_budget=9,seed=3").str(), "broadcast:naive+dfs,seed=3,node_budget=9");
  EXPECT_EQ(parseStrategy("auto").str(), "auto");
  for (const StrategyInfo& info : strategies()) {
    EXPECT_EQ(parseStrategy(info.name).str(), info.name);
    EXPECT_EQ(parseStrategy(parseStrategy(info.name).str()), parseStrategy(info.name));
  }
}

TEST(Strategy, SaysWhatExists) {
  EXPECT_NE(complaint("fastest").find("unknown strategy 'fastest'; there are: "), std::string::npos);
  EXPECT_NE(complaint("fastest").find("broadcast:size|naive+best|naive|dfs|greedy"), std::string::npos);
  EXPECT_NE(complaint("broadcast:quick").find("expected one of size, naive for its senders, got 'quick'"), std::string::npos);
  EXPECT_NE(complaint("broadcast:size+best+more").find("takes 2 words"), std::string::npos);
  EXPECT_NE(complaint("broadcast:speed=1").find("has no option 'speed'"), std::string::npos);
  EXPECT_NE(complaint("broadcast:seed=-1").find("not below 0, got '-1'"), std::string::npos);
  EXPECT_NE(complaint("broadcast:seed=x").find("takes an integer"), std::string::npos);
  EXPECT_NE(complaint("broadcast:seed=1,size").find("expected name=integer"), std::string::npos);
  EXPECT_NE(complaint("auto:seed=1").find("auto takes no options"), std::string::npos);
  EXPECT_NE(complaint("").find("unknown strategy ''"), std::string::npos);
}

}  // namespace
}  // namespace xmesh::core
