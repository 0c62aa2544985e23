#include "runtime/memory/shared_memory.h"

#include <algorithm>
#include <numeric>

namespace xmesh::runtime {
namespace {

/// stride * x, of any x in [least, most].
struct Term {
  int64_t stride = 0;
  int64_t least = 0;
  int64_t most = 0;
};

/// Whether terms can add up to a target: a search over the largest strides first, which what is left must reach. Where strides are those of a tensor
/// whose dims lie inside one another, at most two values of each come into question.
class Sums {
 public:
  explicit Sums(std::vector<Term> terms) : terms_(std::move(terms)) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    least_.assign(terms_.size() + 1, 0);
    most_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      least_[i] = least_[i + 1] + terms_[i].stride * terms_[i].least;
      most_[i] = most_[i + 1] + terms_[i].stride * terms_[i].most;
    }
  }

  bool reach(int64_t target) { return search(0, target); }

 private:
  static int64_t floorDiv(int64_t a, int64_t b) { return a / b - static_cast<int64_t>(a % b < 0); }

  bool search(size_t first, int64_t target) {
    if (target < least_[first] || target > most_[first]) {
      return false;
    }
    if (first == terms_.size() || ++num_steps_ > kMostOverlapSteps) {
      return true;
    }
    const Term& term = terms_[first];
    const int64_t begin = std::max(term.least, -floorDiv(most_[first + 1] - target, term.stride));
    const int64_t end = std::min(term.most, floorDiv(target - least_[first + 1], term.stride));
    for (int64_t x = begin; x <= end; ++x) {
      if (search(first + 1, target - x * term.stride)) {
        return true;
      }
    }
    return false;
  }

  std::vector<Term> terms_;
  std::vector<int64_t> least_;  ///< that terms from here on add up to
  std::vector<int64_t> most_;
  int64_t num_steps_ = 0;
};

void addTerm(std::vector<Term>& terms, Term term) {
  const auto same = std::find_if(terms.begin(), terms.end(), [&](const Term& one) { return one.stride == term.stride; });
  if (same == terms.end()) {
    terms.push_back(term);
  } else {
    same->least += term.least;
    same->most += term.most;
  }
}

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

bool isEmpty(const LocalTensor& tensor) { return std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end(); }

Range bytesOf(const TensorMemory& memory) {
  Range out{reinterpret_cast<int64_t>(memory.tensor.data), reinterpret_cast<int64_t>(memory.tensor.data) + memory.item_bytes};
  for (size_t dim = 0; dim < memory.tensor.shape.size(); ++dim) {
    out.end += (memory.tensor.shape[dim] - 1) * memory.tensor.strides[dim] * memory.item_bytes;
  }
  return out;
}

}  // namespace

bool overlapsItself(const LocalTensor& tensor) {
  if (isEmpty(tensor)) {
    return false;
  }
  std::vector<Term> dims;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] > 1) {
      dims.push_back({tensor.strides[dim], 0, tensor.shape[dim] - 1});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const Term& a, const Term& b) { return a.stride < b.stride; });
  int64_t reached = 0;
  bool are_nested = true;
  for (const Term& dim : dims) {
    are_nested = are_nested && dim.stride > reached;
    reached += dim.stride * dim.most;
  }
  if (are_nested) {
    return false;
  }
  // Two elements share memory if, for some dim, they are different places along it and any places along the dims of smaller stride.
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    std::vector<Term> terms{{dims[dim].stride, 1, dims[dim].most}};
    if (dims[dim].stride == 0) {
      return true;
    }
    for (size_t before = 0; before < dim; ++before) {
      addTerm(terms, {dims[before].stride, -dims[before].most, dims[before].most});
    }
    if (Sums(std::move(terms)).reach(0)) {
      return true;
    }
  }
  return false;
}

bool overlap(const TensorMemory& one, const TensorMemory& other) {
  if (one.device != other.device || isEmpty(one.tensor) || isEmpty(other.tensor)) {
    return false;
  }
  const Range here = bytesOf(one);
  const Range there = bytesOf(other);
  if (here.end <= there.begin || there.end <= here.begin) {
    return false;
  }
  std::vector<Term> terms{{1, 1 - other.item_bytes, one.item_bytes - 1}};  // the differences between bytes inside two elements
  for (size_t dim = 0; dim < one.tensor.shape.size(); ++dim) {
    if (one.tensor.shape[dim] > 1 && one.tensor.strides[dim] > 0) {
      addTerm(terms, {one.tensor.strides[dim] * one.item_bytes, 0, one.tensor.shape[dim] - 1});
    }
  }
  for (size_t dim = 0; dim < other.tensor.shape.size(); ++dim) {
    if (other.tensor.shape[dim] > 1 && other.tensor.strides[dim] > 0) {
      addTerm(terms, {other.tensor.strides[dim] * other.item_bytes, 1 - other.tensor.shape[dim], 0});
    }
  }
  return Sums(std::move(terms)).reach(there.begin - here.begin);
}

std::optional<std::pair<size_t, size_t>> findSharedMemory(const std::vector<TensorMemory>& tensors) {
  std::vector<std::pair<Range, size_t>> ranges;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_written && overlapsItself(tensors[i].tensor)) {
      return std::pair(i, i);
    }
    if (!isEmpty(tensors[i].tensor)) {
      ranges.emplace_back(bytesOf(tensors[i]), i);
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return std::pair(a.first.begin, a.second) < std::pair(b.first.begin, b.second); });
  std::vector<std::pair<Range, size_t>> open;  // those that reach to where the next one begins
  for (const auto& [range, i] : ranges) {
    std::erase_if(open, [&, begin = range.begin](const auto& one) { return one.first.end <= begin; });
    for (const auto& [before, j] : open) {
      if ((tensors[i].is_written || tensors[j].is_written) && overlap(tensors[i], tensors[j])) {
        return std::pair(std::min(i, j), std::max(i, j));
      }
    }
    open.emplace_back(range, i);
  }
  return std::nullopt;
}

}  // namespace xmesh::runtime
