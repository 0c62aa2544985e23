#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace xmesh::core {

/// One way to run some layers on a submesh.
struct StageOption {
  double seconds = 0;  ///< of one microbatch, forward and backward
  int64_t stage_bytes = 0;
  int64_t bytes_per_microbatch = 0;  ///< that the stage holds between a microbatch's forward and its backward
};

struct StageSubmesh {
  std::vector<size_t> num_devices;  ///< by class of devices
  int64_t memory_bytes = 0;         ///< of one device
};

/// What stage search is asked: layers to cut into stages, devices that all are to be used, and what each stage would cost.
struct StageProblem {
  size_t num_layers = 0;
  size_t num_microbatches = 0;
  std::vector<size_t> num_devices;  ///< by class: equal devices are one class, and usually there is one
  std::vector<StageSubmesh> submeshes;
  /// How many microbatches a stage holds at once, by the number of stages from it to the end, itself included, less one. It never falls. There are
  /// at most as many stages as it has elements.
  std::vector<int64_t> in_flight;
  /// At [(first layer * num_layers + last layer) * submeshes.size() + submesh]; addOption() fills it.
  std::vector<std::vector<StageOption>> options;
  /// At [first layer * submeshes.size() + submesh]: seconds that what a stage reads takes to it, and its gradients back, once in the sum. None: zero.
  std::vector<double> entering;

  /// Once num_layers and submeshes are set. Throws InvalidArgument for what is none of them.
  void addOption(size_t first_layer, size_t last_layer, size_t submesh, const StageOption& option);
  double enteringOf(size_t first_layer, size_t submesh) const { return entering.empty() ? 0 : entering.at(first_layer * submeshes.size() + submesh); }
  const std::vector<StageOption>& optionsOf(size_t first_layer, size_t last_layer, size_t submesh) const {
    return options.at((first_layer * num_layers + last_layer) * submeshes.size() + submesh);
  }
};

/// Layers [first_layer, end_layer) on a submesh, run in one of the ways that StageProblem::optionsOf() lists.
struct ChosenStage {
  size_t first_layer = 0;
  size_t end_layer = 0;
  size_t submesh = 0;
  size_t option = 0;
  auto operator<=>(const ChosenStage&) const = default;
};

struct StagePlan {
  std::vector<ChosenStage> stages;
  double seconds = 0;      ///< all microbatches, by eq. 2
  double slowest = 0;      ///< seconds of its slowest stage, for one microbatch
  bool is_proven = false;  ///< no plan that is accepted takes less than this one, by more than num_microbatches * epsilon
};

struct StageSearchLimits {
  size_t count = 1;                               ///< how many plans are returned at most
  double epsilon = 0;                             ///< seconds: slowest stages that differ by less count as equally slow
  std::function<bool(const StagePlan&)> accepts;  ///< plans it refuses are not returned; none refuses nothing
  size_t least_stages = 1;                        ///< plans of fewer are not returned
  size_t most_tries = 500000;                     ///< stages looked at, in all, for other plans where one is refused
  std::function<bool()> go_on;                    ///< asked now and then: once it says no, what was found is returned; none never does
};

/// The stages that take least time together: L. Zheng et al., Alpa (OSDI 2022), section 5.2, Algorithm 1.
///
/// Minimises sum(e_i + t_i) + (B - 1) * max(t_i) (eq. 2, which has no e_i: what values take on their way to a stage). A stage takes an option where
/// stage_bytes + in_flight * bytes_per_microbatch fits a device of its submesh (eq. 5). For a limit t_max on the slowest stage, the least sum of F(s,
/// k, d) follows from eq. 3: s stages, from layer k to the last, use d devices. d is a number for each class.
///
/// Not every t_max is tried (eq. 4). F never rises with t_max: what it is at the end of a range of them, and the range's start, are a lower bound for
/// all in it. The same F without s, where each stage takes an option that fits as the last one, is a weaker bound, and cheap.
///
/// The best plan is first, and is exact: is_proven. The others are what was met on the way: for each t_max that was tried, the best plan of each
/// number of stages; of these, all different, the cheapest. Where that is too few, up to six larger t_max are tried for them, up to twice the best
/// plan's. Nothing is returned where no plan fits. A plan's seconds are added up from its last stage on, in doubles. Of plans that take equally long
/// the same is found on every machine.
///
/// Where the best plan of some t_max is refused, the next best ones are tried, by their sums. limits.most_tries bounds that: a sixteenth of what is
/// left of it goes to each t_max and number of stages. accepts() is to judge layers and submeshes alone: of options, only the fastest that fits is
/// tried. is_proven is false where plans were left out that may be better, and where go_on said no.
///
/// Throws InvalidArgument, which names what is wrong, for sizes that do not fit together, and for costs or bytes that are negative or no number.
std::vector<StagePlan> bestStagePlans(const StageProblem& problem, const StageSearchLimits& limits = {});

/// The memory that a problem needs, and the stage that needs it.
struct MemoryNeed {
  int64_t num_bytes = 0;
  std::vector<ChosenStage> stages;  ///< that need no more
  size_t largest_stage = 0;         ///< in `stages`: the first that needs so much
};

/// The least number of bytes that, as the memory of a device of every submesh, leaves a plan: the least largest left side of eq. 5. The memory of
/// `problem`'s own submeshes plays no part. Nothing where no stages use all devices. Throws InvalidArgument as bestStagePlans() does.
std::optional<MemoryNeed> smallestMemory(const StageProblem& problem);

}  // namespace xmesh::core
