#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/agreement/start_terms.h"
#include "runtime/failure.h"

namespace xmesh::runtime {

/// Which call this is: the same on every rank that makes it.
struct CallKey {
  uint64_t participants = 0;  ///< hash of the sorted global ranks
  uint64_t lane = 0;          ///< 0 for forward calls, else a hash that names the backward of one forward call
  uint64_t count = 0;         ///< how many calls with these participants came before it in its lane
  auto operator<=>(const CallKey&) const = default;
};

/// FNV-1a over 64 bits, continued from `state`.
uint64_t hashBytes(std::string_view bytes, uint64_t state = 0xcbf29ce484222325ULL);
uint64_t hashRanks(const std::vector<int64_t>& ranks);
/// The lane of the backward of the call `forward`.
uint64_t backwardLane(const CallKey& forward);
/// What the transport's operations are made of: ranks that disagree on the plan get different ones, so that their bytes never meet.
uint64_t operationOf(const CallKey& key, std::string_view fingerprint);

/// What a call is about, field by field: what ranks must agree on, in words.
using CallFields = std::vector<std::pair<std::string, std::string>>;
std::string packFields(const CallFields& fields);
CallFields unpackFields(std::string_view packed);
/// "src_placements: rank 0 has (Shard(0)), rank 2 has (Replicate())" for the first field that differs, or a general sentence.
std::string firstDifference(const std::string& mine, int64_t my_rank, const std::string& theirs, int64_t their_rank);

/// Agreement on a call among its n participants in ceil(log2 n) rounds: in round r the i-th sends a CallNotice to the (i + 2^r)-th and waits
/// for that of the (i - 2^r)-th, so that at the end every pair has been compared, directly or through equals.
struct CallNotice {
  CallKey key;
  uint8_t round = 0;
  StartTerms start_terms;  ///< the most that the sender has heard of
  std::string fingerprint;
  std::string fields;
};

/// "This call has failed": sent to every participant by whoever finds out.
struct FailNotice {
  CallKey key;
  Failure failure;
  std::vector<int64_t> participants;  ///< the call's, ascending; empty where that is not known
};

/// "So many calls have I refused without knowing who takes part, of which nobody has told me that they were theirs." A rank that waits for the sender
/// and has refused fewer asks it; the sender then knows which call it was.
struct UnnamedRefusals {
  uint64_t count = 0;
};

/// "What do you do about this call?", at a timeout or after UnnamedRefusals, and the answer.
struct Question {
  CallKey key;
  std::vector<int64_t> participants;  ///< ascending
};
struct Answer {
  CallKey key;
  bool has_called = false;
  std::string state;
};

/// "If you have not made this call, let its turn be after this one." Who has not answers so, with the same message as a promise.
struct TurnRequest {
  CallKey key;
  uint64_t turn = 0;
  bool is_promise = false;
};

/// "I make my `count`-th pipeline of `ranks`", or, with a failure, "I could not": a rank outside of `ranks`, or one that cannot tell of which ranks
/// the pipeline was (none then, and `count` is that of such failures).
struct Arrival {
  uint64_t number = 0;  ///< counts all arrivals of the sender
  uint64_t count = 0;
  std::vector<int64_t> ranks;  ///< global, ascending
  std::optional<Failure> failure;
};
/// "I come again: my arrivals up to `number` that were failures have no further effect." The peer says the same back, behind all that it has said
/// before: which of its pipelines have failed by them the sender knows then.
struct Return {
  uint64_t number = 0;
  bool is_answer = false;
};
/// "Here you reach me": the first that a peer hears of a rank, so that it can answer even where it has not looked for this rank itself.
struct Introduction {
  std::string address;
};
/// The watch of the `count`-th pipeline of `ranks`.
CallKey pipelineWatch(const std::vector<int64_t>& ranks, uint64_t count);

enum class ControlKind : uint8_t {
  kCallNotice = 1,
  kFail = 2,
  kQuestion = 3,
  kAnswer = 4,
  kUnnamedRefusals = 5,
  kArrival = 6,
  kIntroduction = 7,
  kTurnRequest = 8,
  kReturn = 9
};
ControlKind controlKind(std::string_view message);
std::string encode(const CallNotice& notice);
std::string encode(const FailNotice& notice);
std::string encode(const UnnamedRefusals& refusals);
std::string encode(const Question& question);
std::string encode(const Answer& answer);
std::string encode(const Arrival& arrival);
std::string encode(const Introduction& introduction);
std::string encode(const TurnRequest& request);
std::string encode(const Return& coming);
/// Each throws std::runtime_error for a message that is not whole.
CallNotice decodeCallNotice(std::string_view message);
FailNotice decodeFail(std::string_view message);
UnnamedRefusals decodeUnnamedRefusals(std::string_view message);
Question decodeQuestion(std::string_view message);
Answer decodeAnswer(std::string_view message);
Arrival decodeArrival(std::string_view message);
Introduction decodeIntroduction(std::string_view message);
TurnRequest decodeTurnRequest(std::string_view message);
Return decodeReturn(std::string_view message);

}  // namespace xmesh::runtime
