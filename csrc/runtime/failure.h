#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace xmesh::runtime {

/// A peer that was needed is gone, stopped or silent. Becomes Python's xm.PeerError.
class PeerError : public std::runtime_error {
 public:
  PeerError(const std::string& message, std::vector<int64_t> global_ranks) : std::runtime_error(message), global_ranks_(std::move(global_ranks)) {}
  /// The ranks to blame, ascending; empty when no single one can be named.
  const std::vector<int64_t>& globalRanks() const { return global_ranks_; }

 private:
  std::vector<int64_t> global_ranks_;
};

/// A pipeline stage raised. Becomes Python's xm.StageError.
class StageError : public std::runtime_error {
 public:
  StageError(const std::string& message, int32_t stage, int32_t microbatch) : std::runtime_error(message), stage_(stage), microbatch_(microbatch) {}
  int32_t stage() const { return stage_; }
  int32_t microbatch() const { return microbatch_; }

 private:
  int32_t stage_;
  int32_t microbatch_;
};

/// The group was closed, or is used in a way its threading rule forbids. Becomes RuntimeError.
class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class FailureKind : uint8_t {
  kMistake,  ///< ValueError: ranks disagree, or one of them refused its arguments
  kPeer,     ///< PeerError
  kGroup,    ///< RuntimeError
  kStage,    ///< StageError
};

/// Why a call failed, in a form that travels between ranks.
struct Failure {
  FailureKind kind = FailureKind::kMistake;
  std::string text;
  std::vector<int64_t> blamed_ranks;
  int32_t stage = -1;  ///< the stage that failed, for kStage
  int32_t microbatch = -1;
  uint64_t phase = 0;         ///< for a watch: ranks whose calls have not come to this phase go on until they do
  int32_t arrived_peer = -1;  ///< whose arrival at another pipeline it was, as a group rank, and which of that rank's; -1: nobody's
  uint64_t arrival = 0;
};

/// "[0, 1, 2]", shortened past 16 ranks: for texts.
std::string rankList(const std::vector<int64_t>& ranks);

/// Sets what throws in place of `throwFailure` what the language above knows best; it returns for failures that it leaves. Null: nothing.
/// Process-wide. Any thread.
void setThrowing(void (*throwing)(const Failure& failure));
/// Throws the exception that the kind stands for.
[[noreturn]] void throwFailure(const Failure& failure);

}  // namespace xmesh::runtime
