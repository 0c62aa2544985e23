#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/resharding/plan.h"

namespace xmesh::replay {

/// Groups of messages as NCCL runs them, without their bytes: a rank's groups one after another, a group in passes (the k-th messages of all pairs),
/// a pass in batches of eight rounds, whose order the seed chooses. A message ends when both ranks run its batch.
class NcclModel {
 public:
  /// Plays messages of which those of one pair and group travel as one.
  static std::string playJoined(const std::vector<core::Message>& messages, const std::vector<int32_t>& groups, uint64_t seed) {
    std::vector<core::Message> firsts;
    std::vector<int32_t> groups_of_firsts;
    std::set<std::tuple<int32_t, int32_t, int32_t>> known;
    for (size_t i = 0; i < messages.size(); ++i) {
      if (known.insert({messages[i].src_rank, messages[i].dst_rank, groups[i]}).second) {
        firsts.push_back(messages[i]);
        groups_of_firsts.push_back(groups[i]);
      }
    }
    return NcclModel(firsts, groups_of_firsts, seed).play();
  }

  using GroupOf = std::function<int32_t(int32_t rank, size_t message)>;

  /// Each rank's messages of one number are one group; the same numbers on both ranks of a message.
  NcclModel(const std::vector<core::Message>& messages, const std::vector<int32_t>& groups, uint64_t seed)
      : NcclModel(messages, [&](int32_t /*rank*/, size_t message) { return groups[message]; }, seed) {}
  NcclModel(const std::vector<core::Message>& messages, const GroupOf& group_of, uint64_t seed) {
    int32_t num_ranks = 0;
    for (const core::Message& message : messages) {
      num_ranks = std::max({num_ranks, message.src_rank + 1, message.dst_rank + 1});
    }
    std::vector<int32_t> round_of(static_cast<size_t>(num_ranks));
    std::iota(round_of.begin(), round_of.end(), 0);
    std::shuffle(round_of.begin(), round_of.end(), std::mt19937_64(seed));
    ranks_.resize(static_cast<size_t>(num_ranks));
    std::map<std::tuple<int32_t, Pair, int32_t>, int32_t> num_in_group;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Pair pair{messages[i].src_rank, messages[i].dst_rank};
      const int32_t delta = (pair.second - pair.first + num_ranks) % num_ranks;
      for (const int32_t rank : {pair.first, pair.second}) {
        const int32_t group = group_of(rank, i);
        const Step step{group, num_in_group[{rank, pair, group}]++, round_of[static_cast<size_t>(delta)] / 8};
        ranks_[static_cast<size_t>(rank)].steps[step].push_back({rank == pair.first, pair, i});
      }
    }
  }

  /// The messages that wait for each other, or an empty text if all end.
  std::string play() {
    for (Rank& rank : ranks_) {
      rank.at = rank.steps.begin();
      begin(rank);
    }
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (Rank& rank : ranks_) {
        while (rank.at != rank.steps.end() &&
               std::all_of(rank.at->second.begin(), rank.at->second.end(), [&](const End& end) { return hasMoved(end); })) {
          ++rank.at;
          begin(rank);
          goes_on = true;
        }
      }
    }
    std::string waiting;
    for (const Rank& rank : ranks_) {
      for (const End& end : rank.at == rank.steps.end() ? std::vector<End>{} : rank.at->second) {
        waiting += hasMoved(end) ? "" : " " + std::to_string(end.message) + (end.is_send ? " sent" : " received");
      }
    }
    return waiting;
  }

 private:
  using Pair = std::pair<int32_t, int32_t>;
  struct Step {
    int32_t group = 0;
    int32_t pass = 0;
    int32_t batch = 0;
    auto operator<=>(const Step&) const = default;
  };
  struct End {
    bool is_send = false;
    Pair pair;
    size_t message = 0;
    int32_t number = 0;  ///< among the pair's, once it has begun
  };
  struct Rank {
    std::map<Step, std::vector<End>> steps;
    std::map<Step, std::vector<End>>::iterator at;
  };

  void begin(Rank& rank) {
    if (rank.at != rank.steps.end()) {
      for (End& end : rank.at->second) {
        end.number = ++num_begun_[{end.pair, end.is_send}];
      }
    }
  }
  bool hasMoved(const End& end) const {
    const auto other = num_begun_.find({end.pair, !end.is_send});
    return other != num_begun_.end() && other->second >= end.number;
  }

  std::vector<Rank> ranks_;
  std::map<std::pair<Pair, bool>, int32_t> num_begun_;
};

}  // namespace xmesh::replay
