#include "core/placement.h"

#include <array>
#include <charconv>
#include <vector>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr std::array<std::string_view, 5> kReduceOpNames = {"sum", "avg", "min", "max", "product"};

std::string withoutSpaces(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c != ' ') {
      out += c;
    }
  }
  return out;
}

int64_t parseNumber(std::string_view digits, std::string_view whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  require(error == std::errc() && end == digits.data() + digits.size() && value >= 0,
          "placement '" + std::string(whole) + "': expected a number that is not negative, got '" + std::string(digits) + "'");
  return value;
}

}  // namespace

std::string_view reduceOpName(ReduceOp op) { return kReduceOpNames.at(static_cast<size_t>(op)); }

ReduceOp parseReduceOp(std::string_view name) {
  for (size_t i = 0; i < kReduceOpNames.size(); ++i) {
    if (kReduceOpNames[i] == name) {
      return static_cast<ReduceOp>(i);
    }
  }
  throw InvalidArgument("Partial('" + std::string(name) + "') cannot be resharded: expected sum, avg, min, max or product");
}

Placement Placement::parse(std::string_view text) {
  const std::string compact = withoutSpaces(text);
  if (compact == "R" || compact == "Replicate()" || compact == "Replicate") {
    return replicate();
  }
  if (compact.size() >= 2 && compact[0] == 'S' && compact.find('(') == std::string::npos) {
    return shard(parseNumber(std::string_view(compact).substr(1), text));
  }
  const size_t open = compact.find('(');
  require(open != std::string::npos && compact.back() == ')',
          "placement '" + std::string(text) + "': expected Replicate(), Shard(dim), StridedShard(dim, split_factor) or Partial(op)");
  const std::string name = compact.substr(0, open);
  const std::string inside = compact.substr(open + 1, compact.size() - open - 2);
  if (name == "Shard") {
    return shard(parseNumber(inside, text));
  }
  if (name == "Partial") {
    return partial(inside.empty() ? ReduceOp::kSum : parseReduceOp(inside));
  }
  const size_t comma = inside.find(',');
  require(name == "StridedShard" && comma != std::string::npos,
          "placement '" + std::string(text) + "': expected Replicate(), Shard(dim), StridedShard(dim, split_factor) or Partial(op)");
  const Placement out =
      stridedShard(parseNumber(std::string_view(inside).substr(0, comma), text), parseNumber(std::string_view(inside).substr(comma + 1), text));
  require(out.split_factor > 0, "placement '" + std::string(text) + "': the split factor must be positive");
  return out;
}

std::string Placement::str() const {
  switch (kind) {
    case PlacementKind::kReplicate:
      return "Replicate()";
    case PlacementKind::kShard:
      return "Shard(" + std::to_string(dim) + ")";
    case PlacementKind::kStridedShard:
      return "StridedShard(" + std::to_string(dim) + ", " + std::to_string(split_factor) + ")";
    case PlacementKind::kPartial:
      return "Partial(" + std::string(reduceOpName(reduce_op)) + ")";
  }
  throw InvalidArgument("unknown placement kind");
}

}  // namespace xmesh::core
