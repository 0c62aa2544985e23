#include "core/spec.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr int64_t kMaxDims = 8;
constexpr int64_t kMaxSplitFactor = 1 << 16;

constexpr std::array<std::pair<std::string_view, int64_t>, 42> kItemBytes = {{
    {"float64", 8},
    {"float32", 4},
    {"float16", 2},
    {"bfloat16", 2},
    {"int64", 8},
    {"int32", 4},
    {"int16", 2},
    {"int8", 1},
    {"uint8", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"bool", 1},
    {"complex32", 4},
    {"bcomplex32", 4},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
    {"bits8", 1},
    {"bits16", 2},
    {"bits1x8", 1},
    {"bits2x4", 1},
    {"bits4x2", 1},
    {"int1", 1},
    {"int2", 1},
    {"int3", 1},
    {"int4", 1},
    {"int5", 1},
    {"int6", 1},
    {"int7", 1},
    {"uint1", 1},
    {"uint2", 1},
    {"uint3", 1},
    {"uint4", 1},
    {"uint5", 1},
    {"uint6", 1},
    {"uint7", 1},
}};

bool isFloat(const std::string& name) { return name == "float64" || name == "float32" || name == "float16" || name == "bfloat16"; }
bool isComplex(const std::string& name) { return name == "complex64" || name == "complex128"; }
/// Those that can be computed with: not int1 to int7, which torch only names.
bool isInteger(const std::string& name) {
  const bool has_whole_bytes = name.ends_with("8") || name.ends_with("16") || name.ends_with("32") || name.ends_with("64");
  return has_whole_bytes && (name.starts_with("int") || name.starts_with("uint"));
}

bool canReduce(const std::string& dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return isFloat(dtype) || isComplex(dtype) || isInteger(dtype);
    case ReduceOp::kAvg:
      return isFloat(dtype) || isComplex(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return isFloat(dtype) || isInteger(dtype);
  }
  return false;
}

bool mayMeet(ReduceOp left, ReduceOp right) {
  const auto is_linear = [](ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; };
  return left == right || (is_linear(left) && is_linear(right));
}

void validateBoxes(const TensorSpec& spec, const std::string& what) {
  require(!spec.isBoxed() || (spec.mesh.numRanks() == 0 && spec.placements.empty()), what + "a tensor is placed by a mesh or by boxes, not by both");
  for (const OwnedBox& owned : spec.boxes) {
    bool is_inside = owned.box.size() == spec.shape.size();
    for (size_t dim = 0; is_inside && dim < owned.box.size(); ++dim) {
      is_inside = owned.box[dim].begin >= 0 && owned.box[dim].begin < owned.box[dim].end && owned.box[dim].end <= spec.shape[dim];
    }
    require(is_inside, what + "the box " + boxStr(owned.box) + " is empty, or not inside the tensor");
    const bool ascends = std::adjacent_find(owned.ranks.begin(), owned.ranks.end(), std::greater_equal<>()) == owned.ranks.end();
    require(ascends && (owned.ranks.empty() || owned.ranks.front() >= 0),
            what + "the ranks of the box " + boxStr(owned.box) + " do not ascend from 0");
  }
}

}  // namespace

DType DType::parse(std::string_view name) {
  const std::string_view bare = name.starts_with("torch.") ? name.substr(6) : name;
  for (const auto& [known, item_bytes] : kItemBytes) {
    if (known == bare) {
      return {std::string(known), item_bytes};
    }
  }
  throw InvalidArgument("unknown dtype '" + std::string(name) + "'");
}

int64_t TensorSpec::numElements() const {
  int64_t count = 1;
  for (int64_t extent : shape) {
    count *= extent;
  }
  return count;
}

void TensorSpec::validate() const {
  const std::string what = "spec " + str() + ": ";
  require(std::cmp_less_equal(shape.size(), kMaxDims), what + "tensors of more than 8 dims are not supported");
  int64_t limit = std::numeric_limits<int64_t>::max() / std::max<int64_t>(dtype.item_bytes, 1);
  for (int64_t extent : shape) {
    require(extent >= 0, what + "a dim cannot have the negative extent " + std::to_string(extent));
    require(extent <= limit, what + "the tensor's bytes do not fit 63 bits");
    limit = extent > 0 ? limit / extent : limit;
  }
  require(std::cmp_equal(placements.size(), mesh.numAxes()),
          what + "expected one placement per mesh axis (" + std::to_string(mesh.numAxes()) + "), got " + std::to_string(placements.size()));
  validateBoxes(*this, what);
  const Placement* first_partial = nullptr;
  for (const Placement& placement : placements) {
    if (placement.isShard()) {
      require(placement.dim >= 0 && std::cmp_less(placement.dim, shape.size()),
              what + placement.str() + " is out of range for a tensor of " + std::to_string(shape.size()) + " dims");
      require(placement.split_factor > 0 && placement.split_factor <= kMaxSplitFactor,
              what + placement.str() + " needs a split factor from 1 to " + std::to_string(kMaxSplitFactor));
    }
    if (placement.kind == PlacementKind::kPartial) {
      require(canReduce(dtype.name, placement.reduce_op), what + placement.str() + " is not defined for " + dtype.name);
      require(first_partial == nullptr || mayMeet(first_partial->reduce_op, placement.reduce_op),
              what + placement.str() + " and " + (first_partial != nullptr ? first_partial->str() : "") +
                  " on one tensor depend on the order of reduction; redistribute one of them first");
      first_partial = &placement;
    }
  }
}

bool TensorSpec::hasPartial() const {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.kind == PlacementKind::kPartial; });
}

std::vector<int64_t> TensorSpec::ranks() const {
  std::vector<int64_t> out = mesh.ranks();
  for (const OwnedBox& box : boxes) {
    out.insert(out.end(), box.ranks.begin(), box.ranks.end());
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::string TensorSpec::str() const {
  return dtype.name + shapeStr(shape) + (isBoxed() ? " in " + whereStr() : " on " + mesh.str() + " as " + placementsStr(placements));
}

std::string TensorSpec::whereStr() const {
  if (!isBoxed()) {
    return placementsStr(placements) + " on " + mesh.str();
  }
  std::string out = std::to_string(boxes.size()) + (boxes.size() == 1 ? " box on ranks " : " boxes on ranks ");
  const std::vector<int64_t> all = ranks();
  for (size_t i = 0; i < all.size(); ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(all[i]);
  }
  return out;
}

std::string shapeStr(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return out + "]";
}

std::string placementsStr(const std::vector<Placement>& placements) {
  std::string out = "(";
  for (size_t i = 0; i < placements.size(); ++i) {
    out += (i > 0 ? ", " : "") + placements[i].str();
  }
  return out + ")";
}

}  // namespace xmesh::core
