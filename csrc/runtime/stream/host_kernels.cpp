#include "runtime/stream/stream_kernels.h"

namespace xmesh::runtime {
namespace {

void reducePart(const ReductionPart& part) {
  const int64_t num_elements = part.num_elements;
  bool is_first = !part.goes_on;
  std::vector<std::byte> packed;
  for (const Contribution& contribution : part.contributions) {
    const Reduction reduction = contribution.is_sum ? part.reduction.ofSums() : part.reduction;
    const int64_t end = contribution.begin + num_elements;
    const std::byte* data = contiguousRun(contribution.box, contribution.begin, end, reduction.itemBytes());
    if (data == nullptr) {
      packed.resize(static_cast<size_t>(num_elements * reduction.itemBytes()));
      packRange(contribution.box, contribution.begin, end, reduction.itemBytes(), packed.data());
      data = packed.data();
    }
    (is_first ? initAccumulator : accumulate)(reduction, part.accumulator, data, num_elements);
    is_first = false;
  }
  if (!part.ends) {
    return;
  }
  finishAccumulator(part.reduction, part.accumulator, num_elements);
  const int64_t dst_end = part.dst_begin + num_elements;
  if (contiguousRun(part.dst, part.dst_begin, dst_end, part.reduction.itemBytes()) != part.accumulator) {
    unpackRange(part.accumulator, part.dst, part.dst_begin, dst_end, part.reduction.itemBytes());
  }
}

}  // namespace

void HostKernels::pack(void* /*stream*/, std::span<const PackedRange> ranges) const {
  for (const PackedRange& range : ranges) {
    packRange(range.box, range.begin, range.end, range.item_bytes, range.dense);
  }
}

void HostKernels::unpack(void* /*stream*/, std::span<const PackedRange> ranges) const {
  for (const PackedRange& range : ranges) {
    unpackRange(range.dense, range.box, range.begin, range.end, range.item_bytes);
  }
}

void HostKernels::copy(void* /*stream*/, std::span<const BoxPair> pairs) const {
  for (const BoxPair& pair : pairs) {
    copyRange(pair.src, pair.dst, 0, pair.num_elements, pair.item_bytes);
  }
}

void HostKernels::reduce(void* /*stream*/, std::span<const ReductionPart> parts) const {
  for (const ReductionPart& part : parts) {
    reducePart(part);
  }
}

}  // namespace xmesh::runtime
