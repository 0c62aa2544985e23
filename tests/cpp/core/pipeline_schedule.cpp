#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/pipeline/generators.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/simulate.h"
#include "core/pipeline/split_order.h"
#include "core/pipeline/validate.h"

namespace xmesh::core {
namespace {

/// What an InvalidArgument of `call` says; empty where it throws none.
template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(PipelineAction, TextRoundTrip) {
  EXPECT_EQ(Action::parse("2F0"), (Action{ActionKind::kForward, 2, 0}));
  EXPECT_EQ(Action::parse(" 10B12 "), (Action{ActionKind::kBackward, 10, 12}));
  for (const char* text : {"0F3", "1B2", "0I1", "0W1", "17F255"}) {
    EXPECT_EQ(Action::parse(text).str(), text);
  }
}

TEST(PipelineAction, RefusesOtherText) {
  for (const char* text : {"", "F0", "0F", "0X1", "-1F0", "0F-1", "0F0 1", "1SEND_F0", "0UNSHARD", "(0F1;1B0)OVERLAP_F_B", "99999999999F0", "0f0"}) {
    EXPECT_TRUE(contains(refusal([&] { Action::parse(text); }), std::string("'") + text + "'")) << text;
  }
}

TEST(PipelineSchedule, PublishedGridOf1F1B) {
  EXPECT_EQ(makeSchedule("1f1b", 3, 6).str(),
            "1f1b: 3 stages on 3 places, 6 microbatches\n"
            "stage 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5\n"
            "stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5\n"
            "stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST(PipelineSchedule, PublishedGridOfEager1F1B) {
  EXPECT_EQ(makeSchedule("eager_1f1b", 3, 6).str(),
            "eager_1f1b: 3 stages on 3 places, 6 microbatches\n"
            "stage 0 | F0 F1 F2 F3 F4 B0 F5 B1 .  B2 .  B3 .  B4 .  B5\n"
            "stage 1 | .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5\n"
            "stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST(PipelineSchedule, GridNamesStagesWhereAPlaceHasSeveral) {
  EXPECT_EQ(makeSchedule("gpipe", 3, 1, {0, 1, 0}).str(),
            "gpipe: 3 stages on 2 places, 1 microbatch\n"
            "place 0 (stages 0, 2) | 0F0 .   2F0 2B0 .   0B0\n"
            "place 1 (stage 1)     | .   1F0 .   .   1B0\n");
}

TEST(PipelineSchedule, CsvIsTorchsFormat) {
  const Schedule schedule = makeSchedule("1f1b", 2, 2);
  EXPECT_EQ(scheduleToCsv(schedule), "0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n");
  // A row as torch writes it, and as its own tests read it: padded, either line end, split backward.
  const Schedule read = scheduleFromCsv("0F0,0F1,,,0I0,0W0,0B1\n,1F0,1F1,1B0, 1B1 ,\n");
  EXPECT_EQ(read.num_stages, 2);
  EXPECT_EQ(read.num_microbatches, 2);
  EXPECT_EQ(read.actionsOf(0).size(), 5U);
  EXPECT_EQ(read.cells[1].size(), 6U);
  EXPECT_EQ(read.cells[0][4], (Action{ActionKind::kBackwardInput, 0, 0}));
  EXPECT_NO_THROW(validateSchedule(read, chainEdges(2)));
}

TEST(PipelineSchedule, CsvRoundTrip) {
  for (const std::string& name : scheduleNames()) {
    for (int32_t n = 1; n <= 5; ++n) {
      const Schedule schedule = makeSchedule(name, n, 7);
      EXPECT_EQ(scheduleFromCsv(scheduleToCsv(schedule)), schedule) << schedule.str();
    }
  }
  const Schedule interleaved = makeSchedule("interleaved_1f1b", 6, 4, {0, 1, 0, 1, 0, 1});
  EXPECT_EQ(scheduleFromCsv(scheduleToCsv(interleaved)), interleaved);
}

TEST(PipelineSchedule, CsvErrorsNamePlaceAndCell) {
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv("0F0,0B0\n1F0,1Q0\n"); }), "place 1, cell 1: '1Q0'"));
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv("0F0,1SEND_F0\n"); }), "place 0, cell 1"));
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv("0F0,0B0\n0F1,0B1\n"); }), "stage 0 belongs to one place"));
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv("0F0,0B0\n2F0,2B0\n"); }), "stage 1 has no action"));
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv(",,\n"); }), "at least one action"));
  EXPECT_TRUE(contains(refusal([] { scheduleFromCsv("2000000000F2000000000\n"); }), "only 1 actions"));
}

TEST(PipelineGenerators, PeakInFlightAndWarmUp) {
  for (int32_t n = 1; n <= 6; ++n) {
    for (int32_t m = 1; m <= 12; ++m) {
      const std::vector<int32_t> gpipe_peak = peakInFlight(makeSchedule("gpipe", n, m));
      const Schedule plain = makeSchedule("1f1b", n, m);
      const Schedule eager = makeSchedule("eager_1f1b", n, m);
      for (int32_t i = 0; i < n; ++i) {
        const auto stage = static_cast<size_t>(i);
        EXPECT_EQ(gpipe_peak[stage], m);
        EXPECT_EQ(peakInFlight(plain)[stage], std::min(m, n - i));
        EXPECT_EQ(peakInFlight(eager)[stage], std::min(m, 2 * (n - i) - 1));
        const auto warmUp = [&](const Schedule& schedule) {
          const std::vector<Action> actions = schedule.actionsOf(i);
          return std::find_if(actions.begin(), actions.end(), [](const Action& a) { return a.kind != ActionKind::kForward; }) - actions.begin();
        };
        EXPECT_EQ(warmUp(plain), std::min(m, n - i));
        EXPECT_EQ(warmUp(eager), std::min(m, 2 * (n - i) - 1));
      }
    }
  }
}

TEST(PipelineGenerators, AllAreValid) {
  for (const std::string& name : scheduleNames()) {
    for (int32_t n = 1; n <= 6; ++n) {
      for (int32_t m = 1; m <= 12; ++m) {
        std::vector<StageEdge> edges = chainEdges(n);
        for (int32_t from = 0; from < n; ++from) {
          for (int32_t to = from + 2; to < n; ++to) {
            edges.push_back({from, to});
          }
        }
        const Schedule schedule = makeSchedule(name, n, m);
        EXPECT_NO_THROW(validateSchedule(schedule, edges)) << schedule.str();
        EXPECT_NO_THROW(validateSchedule(forwardsOf(schedule), edges, {true})) << schedule.str();
      }
    }
  }
}

TEST(PipelineGenerators, InterleavedTakesAnyNumberOfMicrobatches) {
  for (int32_t places = 1; places <= 5; ++places) {
    for (int32_t per_place = 1; per_place <= 4; ++per_place) {
      for (int32_t m = 1; m <= 17; ++m) {
        std::vector<int32_t> place_of_stage;
        for (int32_t stage = 0; stage < places * per_place; ++stage) {
          place_of_stage.push_back(stage % places);
        }
        const Schedule schedule = makeSchedule("interleaved_1f1b", places * per_place, m, place_of_stage);
        EXPECT_NO_THROW(validateSchedule(schedule, chainEdges(schedule.num_stages))) << schedule.str();
      }
    }
  }
}

TEST(PipelineGenerators, RefusesShapesWithTheReason) {
  EXPECT_TRUE(contains(refusal([] { makeSchedule("2f2b", 2, 2); }), "'gpipe', '1f1b', 'eager_1f1b', 'interleaved_1f1b'"));
  EXPECT_TRUE(contains(refusal([] { makeSchedule("1f1b", 0, 2); }), "got 0 stages"));
  EXPECT_TRUE(contains(refusal([] { makeSchedule("1f1b", 2, 0); }), "0 microbatches"));
  EXPECT_TRUE(contains(refusal([] { makeSchedule("1f1b", 3, 2, {0, 1}); }), "2 places for 3 stages"));
  EXPECT_TRUE(contains(refusal([] { makeSchedule("1f1b", 3, 2, {0, 2, 2}); }), "none on place 1"));
}

/// Every way to put `num_stages` stages on places that are numbered as they first appear, and the same with the places' numbers turned round.
std::vector<std::vector<int32_t>> placeMaps(int32_t num_stages) {
  std::vector<std::vector<int32_t>> maps = {{}};
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    std::vector<std::vector<int32_t>> longer;
    for (const std::vector<int32_t>& map : maps) {
      const int32_t num_places = map.empty() ? 0 : *std::max_element(map.begin(), map.end()) + 1;
      for (int32_t place = 0; place <= num_places; ++place) {
        longer.push_back(map);
        longer.back().push_back(place);
      }
    }
    maps = std::move(longer);
  }
  const size_t count = maps.size();
  for (size_t i = 0; i < count; ++i) {
    std::vector<int32_t> turned = maps[i];
    const int32_t last = *std::max_element(turned.begin(), turned.end());
    std::transform(turned.begin(), turned.end(), turned.begin(), [last](int32_t place) { return last - place; });
    maps.push_back(std::move(turned));
  }
  return maps;
}

/// By stage, what it may hold: counted from the definition, not by depths().
std::vector<int32_t> runsToTheEnd(const std::vector<int32_t>& places) {
  std::vector<int32_t> out;
  for (size_t stage = 0; stage < places.size(); ++stage) {
    int32_t runs = 1;
    for (size_t later = stage + 1; later < places.size(); ++later) {
      runs += places[later] != places[later - 1] ? 1 : 0;
    }
    out.push_back(runs);
  }
  return out;
}

TEST(PipelineGenerators, EveryScheduleTakesEveryPlaces) {
  for (int32_t n = 1; n <= 6; ++n) {
    std::vector<StageEdge> edges;
    for (int32_t from = 0; from < n; ++from) {
      for (int32_t to = from + 1; to < n; ++to) {
        edges.push_back({from, to, (from + to) % 2 == 0 || to == from + 1});
      }
    }
    for (const std::vector<int32_t>& places : placeMaps(n)) {
      const std::vector<int32_t> runs = runsToTheEnd(places);
      for (int32_t m : {1, 2, 5, 8}) {
        for (const std::string& name : scheduleNames()) {
          const Schedule schedule = makeSchedule(name, n, m, places);
          ASSERT_EQ(schedule.place_of_stage, places);
          ASSERT_NO_THROW(validateSchedule(schedule, edges)) << schedule.str();
          ASSERT_NO_THROW(validateSchedule(forwardsOf(schedule), edges, {true})) << schedule.str();
          const std::vector<int32_t> peak = peakInFlight(schedule);
          for (size_t stage = 0; stage < places.size(); ++stage) {
            const int32_t most = name == "1f1b"          ? runs[stage]
                                 : name == "eager_1f1b"  ? 2 * runs[stage] - 1
                                 : name == "zb_h1"       ? runs[0]
                                 : name == "eager_split" ? 2 * runs[0]
                                                         : m;
            ASSERT_LE(peak[stage], std::min(m, most)) << schedule.str();
          }
        }
      }
    }
  }
}

/// Units of time that the busiest place computes, and those until the last action's end.
std::pair<int32_t, int32_t> unitsOf(const Schedule& schedule) {
  size_t busiest = 0;
  size_t length = 0;
  for (int32_t place = 0; place < schedule.numPlaces(); ++place) {
    busiest = std::max(busiest, schedule.actionsOf(place).size());
    length = std::max(length, schedule.cells[static_cast<size_t>(place)].size());
  }
  return {static_cast<int32_t>(busiest), static_cast<int32_t>(length)};
}

TEST(PipelineGenerators, SharedPlacesStayBusy) {
  const std::vector<std::vector<int32_t>> maps = {{0, 1, 1, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 2, 1, 0}, {0, 0, 1, 1, 2, 2}};
  for (const std::vector<int32_t>& places : maps) {
    for (const char* name : {"1f1b", "eager_1f1b", "interleaved_1f1b"}) {
      const Schedule schedule = makeSchedule(name, static_cast<int32_t>(places.size()), 16, places);
      const auto [busiest, length] = unitsOf(schedule);
      EXPECT_LE(length, busiest + 2 * schedule.num_stages + 1) << schedule.str();  // beside it, a microbatch's way there and back
    }
  }
  // Neighboring stages on one place run as the one stage that they make together would.
  EXPECT_EQ(makeSchedule("1f1b", 4, 3, {0, 0, 1, 1}).str(),
            "1f1b: 4 stages on 2 places, 3 microbatches\n"
            "place 0 (stages 0, 1) | 0F0 1F0 0F1 1F1 .   .   1B0 0B0 0F2 1F2 1B1 0B1 .   .   1B2 0B2\n"
            "place 1 (stages 2, 3) | .   .   2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2\n");
  EXPECT_EQ(makeSchedule("1f1b", 4, 3, {0, 1, 1, 0}).str(),
            "1f1b: 4 stages on 2 places, 3 microbatches\n"
            "place 0 (stages 0, 3) | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 0B0 .   0B1 .   3F2 3B2 .   .   0B2\n"
            "place 1 (stages 1, 2) | .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1F2 2F2 .   .   2B2 1B2\n");
  EXPECT_EQ(makeSchedule("interleaved_1f1b", 4, 3, {0, 1, 1, 0}).str(),
            "interleaved_1f1b: 4 stages on 2 places, 3 microbatches\n"
            "place 0 (stages 0, 3) | 0F0 0F1 0F2 .   .   3F0 3B0 3F1 3B1 0B0 3F2 3B2 0B1 .   0B2\n"
            "place 1 (stages 1, 2) | .   1F0 1F1 1F2 2F0 2F1 2F2 2B0 1B0 2B1 1B1 .   2B2 1B2\n");
}

/// The paper's bubble, (n - 1)(T_F + T_I - T_W), in the memory of 1f1b's first stage.
TEST(PipelineGenerators, ZeroBubbleH1HasAThirdOfTheBubble) {
  for (int32_t n = 1; n <= 8; ++n) {
    for (int32_t m = n; m <= 3 * n; ++m) {
      const Schedule schedule = makeSchedule("zb_h1", n, m);
      EXPECT_EQ(unitsOf(schedule).second, 3 * m + n - 1) << schedule.str();
      for (int32_t peak : peakInFlight(schedule)) {
        EXPECT_LE(peak, n);
      }
    }
  }
  EXPECT_EQ(makeSchedule("zb_h1", 3, 4).str(),
            "zb_h1: 3 stages on 3 places, 4 microbatches\n"
            "stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
            "stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\n"
            "stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3\n");
}

/// No place waits between its first and its last action, and none holds more than 1f1b's first place with stages of twice the size: 2p halves.
TEST(PipelineGenerators, ZeroBubbleVHasNone) {
  for (int32_t p = 1; p <= 6; ++p) {
    std::vector<int32_t> places;
    for (int32_t stage = 0; stage < 2 * p; ++stage) {
      places.push_back(std::min(stage, 2 * p - 1 - stage));
    }
    for (int32_t m = 1; m <= 4 * p; ++m) {
      const Schedule schedule = makeSchedule("zb_v", 2 * p, m, places);
      const std::vector<int32_t> peak = peakInFlight(schedule);
      for (int32_t place = 0; place < p; ++place) {
        EXPECT_LE(peak[static_cast<size_t>(place)] + peak[static_cast<size_t>(2 * p - 1 - place)], 2 * p + 1);
        if (m >= 2 * p) {
          const auto& cells = schedule.cells[static_cast<size_t>(place)];
          const auto first = std::find_if(cells.begin(), cells.end(), [](const auto& cell) { return cell.has_value(); });
          EXPECT_TRUE(std::all_of(first, cells.end(), [](const auto& cell) { return cell.has_value(); })) << schedule.str();
        }
      }
      if (m >= 2 * p) {
        EXPECT_EQ(unitsOf(schedule).second, 6 * m + p - 1) << schedule.str();
      }
    }
  }
}

/// Shorter than interleaved_1f1b, at the peak that this has on its fullest stage.
TEST(PipelineGenerators, InterleavedZeroBubbleSavesTime) {
  for (int32_t p = 2; p <= 4; ++p) {
    std::vector<int32_t> places;
    for (int32_t stage = 0; stage < 2 * p; ++stage) {
      places.push_back(stage % p);
    }
    for (int32_t m = p; m <= 4 * p; m += p) {
      const Schedule whole = makeSchedule("interleaved_1f1b", 2 * p, m, places);
      const Schedule split = makeSchedule("interleaved_zb", 2 * p, m, places);
      const ScheduleCosts costs = unitCosts({2 * p, m, places}, 0);
      const double idle_whole = simulateSchedule(whole, costs).makespan_s - 6 * m;
      const double idle_split = simulateSchedule(split, costs).makespan_s - 6 * m;
      EXPECT_LE(idle_split, p == 2 ? idle_whole - 1 : .67 * idle_whole) << split.str();
      const std::vector<int32_t> before = peakInFlight(whole);
      for (int32_t peak : peakInFlight(split)) {
        EXPECT_LE(peak, *std::max_element(before.begin(), before.end()));
      }
    }
  }
}

TEST(PipelineGenerators, LoopedBfsIsBreadthFirst) {
  EXPECT_EQ(makeSchedule("looped_bfs", 4, 2, {0, 1, 0, 1}).str(),
            "looped_bfs: 4 stages on 2 places, 2 microbatches\n"
            "place 0 (stages 0, 2) | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0\n"
            "place 1 (stages 1, 3) | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0\n");
}

TEST(PipelineGenerators, PlacesMayBePermuted) {
  const Schedule schedule = makeSchedule("eager_1f1b", 3, 5, {2, 0, 1});
  EXPECT_NO_THROW(validateSchedule(schedule, chainEdges(3)));
  EXPECT_EQ(schedule.actionsOf(2), makeSchedule("eager_1f1b", 3, 5).actionsOf(0));
}

}  // namespace
}  // namespace xmesh::core
