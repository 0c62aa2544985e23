#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/pipeline/action.h"

namespace xmesh::core {

/// The segments of a pipeline's stages. A segment is what a stage computes between transfers among its devices. A place runs segments, which are
/// numbered through all stages; users know stages.
class Segments {
 public:
  /// Each stage is one segment, of the same number.
  Segments() = default;
  /// `counts`: by stage; none: as by default. Throws InvalidArgument for a stage without any.
  explicit Segments(const std::vector<int32_t>& counts);

  /// Whether some stage has several.
  bool isDivided() const;
  /// By stage, how many; empty where nobody has said how many stages there are.
  std::vector<int32_t> counts() const;
  int32_t countOf(int32_t stage) const;
  /// The first one of a stage.
  int32_t firstOf(int32_t stage) const;

  /// Actions of stages as those of their segments, one after the other: forward in order, all else in the other.
  std::vector<Action> expand(const std::vector<Action>& actions) const;
  int32_t stageOf(int32_t segment) const;
  /// "stage 1", or "stage 1, segment 14", which is counted within the stage.
  std::string nameOf(int32_t segment) const;
  /// Action::str() of the stage's, with the segment: "1F3", or "1F3, segment 14".
  std::string nameOf(const Action& action) const;
  /// As schedules are written: "1F3", or "1.14F3" of a stage that has several.
  std::string textOf(const Action& action) const;

  bool operator==(const Segments&) const = default;

 private:
  bool isOnly(int32_t segment) const;

  std::vector<int32_t> begins_;  ///< by stage its first segment, and the end of the last; none where all stages are single
};

}  // namespace xmesh::core
