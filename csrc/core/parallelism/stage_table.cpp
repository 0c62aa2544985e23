#include "core/parallelism/stage_table.h"

#include <cmath>
#include <numeric>
#include <string>

#include "core/error.h"

namespace xmesh::core {
namespace {

constexpr int64_t kLargestBytes = int64_t{1} << 62;

/// More device counts than this do not fit memory, with a row for each layer and number of stages.
constexpr size_t kMostCounts = size_t{1} << 20;

void checkDevices(const StageProblem& problem) {
  require(!problem.num_devices.empty(), "there must be at least one class of devices");
  size_t num_counts = 1;
  for (const size_t devices : problem.num_devices) {
    require(devices < kMostCounts && num_counts * (devices + 1) <= kMostCounts, "the classes have too many devices to count through");
    num_counts *= devices + 1;
  }
  require(num_counts > 1, "there are no devices");
  for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
    const std::vector<size_t>& devices = problem.submeshes[submesh].num_devices;
    const std::string name = "submesh " + std::to_string(submesh);
    require(devices.size() == problem.num_devices.size(),
            name + " has devices of " + std::to_string(devices.size()) + " classes, but there are " + std::to_string(problem.num_devices.size()));
    require(std::any_of(devices.begin(), devices.end(), [](size_t number) { return number > 0; }), name + " has no devices");
  }
}

void checkOption(const StageProblem& problem, const StageOption& option, size_t place) {
  const auto name = [&] {
    const size_t interval = place / problem.submeshes.size();
    return "an option of layers " + std::to_string(interval / problem.num_layers) + " to " + std::to_string(interval % problem.num_layers) +
           " on submesh " + std::to_string(place % problem.submeshes.size());
  };
  if (!std::isfinite(option.seconds) || option.seconds < 0) {
    throw InvalidArgument(name() + " takes " + std::to_string(option.seconds) + " seconds");
  }
  if (option.stage_bytes < 0 || option.bytes_per_microbatch < 0 || option.stage_bytes > kLargestBytes ||
      option.bytes_per_microbatch > (kLargestBytes - option.stage_bytes) / std::max<int64_t>(problem.in_flight.back(), 1)) {
    throw InvalidArgument(name() + " needs " + std::to_string(option.stage_bytes) + " bytes and " + std::to_string(option.bytes_per_microbatch) +
                          " a microbatch: they must not be negative, nor 2^62 in all");
  }
}

/// The largest number of stages to the end with which an option fits; 0 where it never does.
size_t mostStagesOf(const StageProblem& problem, const StageOption& option, int64_t memory_bytes) {
  size_t out = mostStages(problem);
  while (out > 0 && bytesInUse(problem, option, out) > memory_bytes) {
    --out;
  }
  return out;
}

}  // namespace

void checkStageProblem(const StageProblem& problem) {
  require(problem.num_layers > 0, "there must be at least one layer");
  require(problem.num_microbatches > 0, "there must be at least one microbatch");
  require(!problem.in_flight.empty(), "in_flight must have at least one element");
  require(problem.in_flight.front() >= 0, "in_flight must not be negative");
  require(std::is_sorted(problem.in_flight.begin(), problem.in_flight.end()), "in_flight must not fall");
  checkDevices(problem);
  const size_t num_lists = problem.num_layers * problem.num_layers * problem.submeshes.size();
  require(problem.options.size() == num_lists || problem.options.empty(),
          "there must be " + std::to_string(num_lists) + " lists of options, but there are " + std::to_string(problem.options.size()));
  require(problem.entering.empty() || problem.entering.size() == problem.num_layers * problem.submeshes.size(),
          "entering has one element for each layer and submesh, or none");
  require(std::all_of(problem.entering.begin(), problem.entering.end(), [](double seconds) { return std::isfinite(seconds) && seconds >= 0; }),
          "what enters a stage takes seconds that are not negative");
  for (size_t place = 0; place < problem.options.size(); ++place) {
    for (const StageOption& option : problem.options[place]) {
      checkOption(problem, option, place);
    }
  }
}

void StageProblem::addOption(size_t first_layer, size_t last_layer, size_t submesh, const StageOption& option) {
  require(first_layer <= last_layer && last_layer < num_layers,
          "layers " + std::to_string(first_layer) + " to " + std::to_string(last_layer) + " are none of " + std::to_string(num_layers) + " layers");
  require(submesh < submeshes.size(), "there is no submesh " + std::to_string(submesh) + " of " + std::to_string(submeshes.size()));
  options.resize(num_layers * num_layers * submeshes.size());
  options[(first_layer * num_layers + last_layer) * submeshes.size() + submesh].push_back(option);
}

DeviceCounts::DeviceCounts(const StageProblem& problem) : runs_(problem.submeshes.size()) {
  std::vector<size_t> strides(problem.num_devices.size());
  for (size_t host_class = strides.size(); host_class-- > 0;) {
    strides[host_class] = size_;
    size_ *= problem.num_devices[host_class] + 1;
  }
  for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
    const std::vector<size_t>& needed = problem.submeshes[submesh].num_devices;
    offsets_.push_back(std::inner_product(needed.begin(), needed.end(), strides.begin(), size_t{0}));
    std::vector<IndexRange>& runs = runs_[submesh];
    for (size_t count = 0; count < size_; ++count) {
      bool is_included = true;
      for (size_t host_class = 0; host_class < strides.size(); ++host_class) {
        is_included = is_included && count / strides[host_class] % (problem.num_devices[host_class] + 1) >= needed[host_class];
      }
      if (is_included && !runs.empty() && runs.back().end == count) {
        ++runs.back().end;
      } else if (is_included) {
        runs.push_back({count, count + 1});
      }
    }
  }
}

bool DeviceCounts::include(size_t count, size_t submesh) const {
  const std::vector<IndexRange>& runs = runs_[submesh];
  const auto after = std::upper_bound(runs.begin(), runs.end(), count, [](size_t value, const IndexRange& run) { return value < run.begin; });
  return after != runs.begin() && count < std::prev(after)->end;
}

StageMoves::StageMoves(const StageProblem& problem, std::optional<int64_t> memory_bytes) : moves_(problem.num_layers) {
  if (problem.options.empty()) {
    return;
  }
  for (size_t first = 0; first < problem.num_layers; ++first) {
    for (size_t last = first; last < problem.num_layers; ++last) {
      for (size_t submesh = 0; submesh < problem.submeshes.size(); ++submesh) {
        const std::vector<StageOption>& options = problem.optionsOf(first, last, submesh);
        std::vector<MoveChoice> all;
        for (size_t option = 0; option < options.size(); ++option) {
          all.push_back({options[option].seconds,
                         mostStagesOf(problem, options[option], memory_bytes.value_or(problem.submeshes[submesh].memory_bytes)), option});
        }
        std::sort(all.begin(), all.end(), [](const MoveChoice& a, const MoveChoice& b) {
          return a.seconds != b.seconds           ? a.seconds < b.seconds
                 : a.most_stages != b.most_stages ? a.most_stages > b.most_stages
                                                  : a.option < b.option;
        });
        const size_t first_choice = choices_.size();
        for (const MoveChoice& choice : all) {
          if (choice.most_stages > (choices_.size() == first_choice ? 0 : choices_.back().most_stages)) {
            choices_.push_back(choice);
          }
        }
        if (choices_.size() > first_choice) {
          moves_[first].push_back({first, last + 1, submesh, first_choice, choices_.size(), problem.enteringOf(first, submesh)});
        }
      }
    }
  }
}

}  // namespace xmesh::core
