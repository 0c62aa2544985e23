#include <algorithm>
#include <memory>

#include "cuda/launches.h"

namespace xmesh::cuda {
namespace {

using runtime::Contribution;
using runtime::ReductionPart;
using runtime::StridedBox;

constexpr int64_t kMaxBlocksPerItem = 8192;

/// Elements of a box from `first` on.
struct BoxElements {
  const StridedBox& box;
  int64_t first;
  int64_t num_elements;
  int64_t item_bytes;

  const std::byte* run() const { return contiguousRun(box, first, first + num_elements, item_bytes); }
  int32_t numDims() const { return run() != nullptr ? 0 : static_cast<int32_t>(box.num_dims); }
};

BoxElements elementsOf(const ReductionPart& part, const Contribution& contribution) {
  const int64_t item_bytes = contribution.is_sum ? part.reduction.accumulatorItemBytes() : part.reduction.itemBytes();
  return {contribution.box, contribution.begin, part.num_elements, item_bytes};
}

BoxElements valueOf(const ReductionPart& part) { return {part.dst, part.dst_begin, part.num_elements, part.reduction.itemBytes()}; }

/// Whether elements, so many at once, lie one behind another at addresses that are multiples of kVectorBytes.
bool liesInVectors(const Operand& operand, const OperandDim* dims, int64_t item_bytes, int64_t num_at_once) {
  if (operand.num_dims == 0) {
    return operand.address % kVectorBytes == 0;
  }
  const OperandDim* inner = dims + operand.num_dims - 1;
  const bool has_runs = inner->bytes == item_bytes && inner->extent % num_at_once == 0 && operand.first % num_at_once == 0;
  return has_runs && operand.address % kVectorBytes == 0 &&
         std::all_of(dims, inner, [](const OperandDim& dim) { return dim.bytes % kVectorBytes == 0; });
}

class ReduceLaunches {
 public:
  explicit ReduceLaunches(const LaunchReduce& launch) : launch_(launch) {}

  /// A part with more contributions than a launch takes goes by way of its accumulator. Its launches are its own: others may share the accumulator.
  void add(const ReductionPart& part) {
    if (part.num_elements == 0) {
      return;
    }
    std::span<const Contribution> rest(part.contributions);
    if (part.reduction.type != next_->type || fitting(part, rest) < rest.size()) {
      flush();
    }
    bool goes_on = part.goes_on;
    for (size_t count = fitting(part, rest); count < rest.size(); count = fitting(part, rest)) {
      addItem(part, rest.first(count), goes_on, /*ends=*/false);
      flush();
      rest = rest.subspan(count);
      goes_on = true;
    }
    addItem(part, rest, goes_on, part.ends);
    if (rest.size() < part.contributions.size()) {
      flush();
    }
  }

  void flush() {
    if (next_->num_items > 0) {
      launch_(*next_);
      *next_ = {};
    }
  }

 private:
  /// How many of the contributions, and the value, the next launch has room for.
  size_t fitting(const ReductionPart& part, std::span<const Contribution> contributions) const {
    int32_t num_operands = next_->num_operands + 1;
    int32_t num_dims = next_->num_dims + (part.ends ? valueOf(part).numDims() : 0);
    size_t count = 0;
    while (count < contributions.size() && next_->num_items < ReduceLaunch::kMaxItems) {
      num_operands += 1;
      num_dims += elementsOf(part, contributions[count]).numDims();
      if (num_operands > ReduceLaunch::kMaxOperands || num_dims > ReduceLaunch::kMaxDims) {
        break;
      }
      ++count;
    }
    return count;
  }

  void addItem(const ReductionPart& part, std::span<const Contribution> contributions, bool goes_on, bool ends) {
    next_->type = part.reduction.type;
    ReduceItem& item = next_->items[next_->num_items++];
    item.accumulator = reinterpret_cast<uint64_t>(part.accumulator);
    item.num_elements = part.num_elements;
    item.divisor = part.reduction.divisor;
    item.op = part.reduction.op;
    item.goes_on = goes_on;
    item.ends = ends;
    item.first_operand = static_cast<int16_t>(next_->num_operands);
    item.num_contributions = static_cast<int16_t>(contributions.size());
    const int64_t num_at_once = kVectorBytes / part.reduction.itemBytes();
    bool takes_vectors = item.accumulator % kVectorBytes == 0 || (!goes_on && ends);
    for (const Contribution& contribution : contributions) {
      takes_vectors = addOperand(elementsOf(part, contribution), contribution.is_sum, num_at_once) && takes_vectors;
    }
    if (ends) {
      takes_vectors = addOperand(valueOf(part), /*is_sum=*/false, num_at_once) && takes_vectors;
    }
    item.takes_vectors = takes_vectors;
    const int64_t per_block = kThreadsPerBlock * (takes_vectors ? num_at_once : 1);
    item.blocks = {next_->num_blocks, static_cast<int32_t>(std::min((part.num_elements + per_block - 1) / per_block, kMaxBlocksPerItem))};
    next_->num_blocks += item.blocks.count;
  }

  /// Returns whether vectors of so many elements can be taken from it.
  bool addOperand(const BoxElements& elements, bool is_sum, int64_t num_at_once) {
    Operand& operand = next_->operands[next_->num_operands++];
    operand.is_sum = is_sum ? 1 : 0;
    operand.first_dim = static_cast<int16_t>(next_->num_dims);
    if (const std::byte* run = elements.run(); run != nullptr) {
      operand.address = reinterpret_cast<uint64_t>(run);
    } else {
      const StridedBox& box = elements.box;
      operand.address = reinterpret_cast<uint64_t>(box.base) + static_cast<uint64_t>(box.offset_bytes);
      operand.first = elements.first;
      operand.num_dims = static_cast<int16_t>(box.num_dims);
      for (size_t d = 0; d < box.num_dims; ++d) {
        next_->dims[next_->num_dims++] = {box.extents[d], box.stride_bytes[d]};
      }
      operand.is_small = fitsIn32Bits(next_->dims + operand.first_dim, operand.num_dims, elements.first + elements.num_elements) ? 1 : 0;
    }
    return liesInVectors(operand, next_->dims + operand.first_dim, elements.item_bytes, num_at_once);
  }

  const LaunchReduce& launch_;
  const std::unique_ptr<ReduceLaunch> next_ = std::make_unique<ReduceLaunch>();
};

}  // namespace

void reduceInLaunches(std::span<const ReductionPart> parts, const LaunchReduce& launch) {
  ReduceLaunches launches(launch);
  for (const ReductionPart& part : parts) {
    launches.add(part);
  }
  launches.flush();
}

}  // namespace xmesh::cuda
