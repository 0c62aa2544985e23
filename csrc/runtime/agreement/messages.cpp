#include "runtime/agreement/messages.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/agreement/wire.h"

namespace xmesh::runtime {
namespace {

constexpr char kFieldEnd = '\x1e';
constexpr char kNameEnd = '\x1f';

WireWriter begin(ControlKind kind, const CallKey& key) {
  WireWriter writer;
  writer.put(kind).put(key);
  return writer;
}

CallKey readHead(WireReader& reader) {
  reader.get<ControlKind>();
  return reader.get<CallKey>();
}

void putRanks(WireWriter& writer, const std::vector<int64_t>& ranks) {
  writer.put(static_cast<uint64_t>(ranks.size()));
  for (const int64_t rank : ranks) {
    writer.put(rank);
  }
}

void putFailure(WireWriter& writer, const Failure& failure) {
  writer.put(failure.kind).put(std::string_view(failure.text));
  putRanks(writer, failure.blamed_ranks);
  writer.put(failure.stage).put(failure.microbatch).put(failure.arrived_peer).put(failure.arrival).put(failure.phase);
}

std::vector<int64_t> getRanks(WireReader& reader) {
  std::vector<int64_t> out;
  for (uint64_t left = reader.get<uint64_t>(); left > 0; --left) {
    out.push_back(reader.get<int64_t>());
  }
  return out;
}

Failure getFailure(WireReader& reader) {
  Failure out;
  out.kind = reader.get<FailureKind>();
  if (out.kind > FailureKind::kStage) {
    throw std::runtime_error("a failure is of no known kind");
  }
  out.text = reader.getText();
  out.blamed_ranks = getRanks(reader);
  out.stage = reader.get<int32_t>();
  out.microbatch = reader.get<int32_t>();
  out.arrived_peer = reader.get<int32_t>();
  out.arrival = reader.get<uint64_t>();
  out.phase = reader.get<uint64_t>();
  return out;
}

}  // namespace

uint64_t hashBytes(std::string_view bytes, uint64_t state) {
  for (const char c : bytes) {
    state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return state;
}

uint64_t hashRanks(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) {
    text += std::to_string(rank) + ",";
  }
  return hashBytes(text);
}

uint64_t backwardLane(const CallKey& forward) { return hashBytes(WireWriter().put(forward).take(), hashBytes("backward")) | 1U; }

uint64_t operationOf(const CallKey& key, std::string_view fingerprint) { return hashBytes(fingerprint, hashBytes(WireWriter().put(key).take())); }

std::string packFields(const CallFields& fields) {
  std::string out;
  for (const auto& [name, value] : fields) {
    out += name + kNameEnd + value + kFieldEnd;
  }
  return out;
}

CallFields unpackFields(std::string_view packed) {
  CallFields out;
  while (!packed.empty()) {
    const size_t end = std::min(packed.find(kFieldEnd), packed.size());
    const std::string_view field = packed.substr(0, end);
    const size_t split = std::min(field.find(kNameEnd), field.size());
    out.emplace_back(field.substr(0, split), field.substr(std::min(split + 1, field.size())));
    packed.remove_prefix(std::min(end + 1, packed.size()));
  }
  return out;
}

namespace {

/// "entry ['b']: rank 0 has it, rank 2 has not" for the first field that one of them lacks; empty if they have the same ones.
std::string missingField(const CallFields& left, const CallFields& right, const std::string& left_rank, const std::string& right_rank) {
  const auto lacks = [](const CallFields& fields, const std::string& name) {
    return std::none_of(fields.begin(), fields.end(), [&](const auto& field) { return field.first == name; });
  };
  for (size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
    if (i < left.size() && lacks(right, left[i].first)) {
      return left[i].first + ": " + left_rank + " has it, " + right_rank + " has not";
    }
    if (i < right.size() && lacks(left, right[i].first)) {
      return right[i].first + ": " + right_rank + " has it, " + left_rank + " has not";
    }
  }
  return {};
}

}  // namespace

std::string firstDifference(const std::string& mine, int64_t my_rank, const std::string& theirs, int64_t their_rank) {
  const CallFields left = unpackFields(mine);
  const CallFields right = unpackFields(theirs);
  const std::string left_rank = "rank " + std::to_string(my_rank);
  const std::string right_rank = "rank " + std::to_string(their_rank);
  for (size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
    if (i >= left.size() || i >= right.size() || left[i].first != right[i].first) {
      const std::string missing = missingField(left, right, left_rank, right_rank);
      return missing.empty() ? "the names of the tensors: " + left_rank + " and " + right_rank + " have them in different order" : missing;
    }
    if (left[i].second != right[i].second) {
      return left[i].first + ": " + left_rank + " has " + left[i].second + ", " + right_rank + " has " + right[i].second;
    }
  }
  return "the plans: " + left_rank + " and " + right_rank + " computed different plans for equal arguments (do they run the same version?)";
}

ControlKind controlKind(std::string_view message) { return WireReader(message).get<ControlKind>(); }

std::string encode(const CallNotice& notice) {
  WireWriter writer = begin(ControlKind::kCallNotice, notice.key);
  writer.put(notice.round).put(notice.start_terms.turn).put(static_cast<uint32_t>(notice.start_terms.generations.size()));
  for (const uint64_t generation : notice.start_terms.generations) {
    writer.put(generation);
  }
  return writer.put(std::string_view(notice.fingerprint)).put(std::string_view(notice.fields)).take();
}

std::string encode(const FailNotice& notice) {
  WireWriter writer = begin(ControlKind::kFail, notice.key);
  putFailure(writer, notice.failure);
  putRanks(writer, notice.participants);
  return writer.take();
}

std::string encode(const UnnamedRefusals& refusals) { return begin(ControlKind::kUnnamedRefusals, {}).put(refusals.count).take(); }

std::string encode(const Question& question) {
  WireWriter writer = begin(ControlKind::kQuestion, question.key);
  putRanks(writer, question.participants);
  return writer.take();
}

std::string encode(const Answer& answer) {
  return begin(ControlKind::kAnswer, answer.key).put(static_cast<uint8_t>(answer.has_called)).put(std::string_view(answer.state)).take();
}

std::string encode(const Arrival& arrival) {
  WireWriter writer = begin(ControlKind::kArrival, {});
  writer.put(arrival.number).put(arrival.count);
  putRanks(writer, arrival.ranks);
  writer.put(static_cast<uint8_t>(arrival.failure.has_value()));
  if (arrival.failure.has_value()) {
    putFailure(writer, *arrival.failure);
  }
  return writer.take();
}

std::string encode(const Introduction& introduction) {
  return begin(ControlKind::kIntroduction, {}).put(std::string_view(introduction.address)).take();
}

std::string encode(const TurnRequest& request) {
  return begin(ControlKind::kTurnRequest, request.key).put(request.turn).put(static_cast<uint8_t>(request.is_promise)).take();
}

std::string encode(const Return& coming) {
  return begin(ControlKind::kReturn, {}).put(coming.number).put(static_cast<uint8_t>(coming.is_answer)).take();
}

CallNotice decodeCallNotice(std::string_view message) {
  WireReader reader(message);
  CallNotice out;
  out.key = readHead(reader);
  out.round = reader.get<uint8_t>();
  out.start_terms.turn = reader.get<uint64_t>();
  for (auto left = reader.get<uint32_t>(); left > 0; --left) {
    out.start_terms.generations.push_back(reader.get<uint64_t>());
  }
  out.fingerprint = reader.getText();
  out.fields = reader.getText();
  return out;
}

FailNotice decodeFail(std::string_view message) {
  WireReader reader(message);
  FailNotice out;
  out.key = readHead(reader);
  out.failure = getFailure(reader);
  out.participants = getRanks(reader);
  return out;
}

UnnamedRefusals decodeUnnamedRefusals(std::string_view message) {
  WireReader reader(message);
  readHead(reader);
  return {reader.get<uint64_t>()};
}

Question decodeQuestion(std::string_view message) {
  WireReader reader(message);
  Question out;
  out.key = readHead(reader);
  out.participants = getRanks(reader);
  return out;
}

Answer decodeAnswer(std::string_view message) {
  WireReader reader(message);
  Answer out;
  out.key = readHead(reader);
  out.has_called = reader.get<uint8_t>() != 0;
  out.state = reader.getText();
  return out;
}

Arrival decodeArrival(std::string_view message) {
  WireReader reader(message);
  readHead(reader);
  Arrival out;
  out.number = reader.get<uint64_t>();
  out.count = reader.get<uint64_t>();
  out.ranks = getRanks(reader);
  if (reader.get<uint8_t>() != 0) {
    out.failure = getFailure(reader);
  }
  return out;
}

Introduction decodeIntroduction(std::string_view message) {
  WireReader reader(message);
  readHead(reader);
  return {reader.getText()};
}

Return decodeReturn(std::string_view message) {
  WireReader reader(message);
  readHead(reader);
  Return out;
  out.number = reader.get<uint64_t>();
  out.is_answer = reader.get<uint8_t>() != 0;
  return out;
}

TurnRequest decodeTurnRequest(std::string_view message) {
  WireReader reader(message);
  TurnRequest out;
  out.key = readHead(reader);
  out.turn = reader.get<uint64_t>();
  out.is_promise = reader.get<uint8_t>() != 0;
  return out;
}

CallKey pipelineWatch(const std::vector<int64_t>& ranks, uint64_t count) {
  return {hashRanks(ranks), hashBytes("pipeline " + std::to_string(count) + "/watch") | 1U, 0};
}

}  // namespace xmesh::runtime
