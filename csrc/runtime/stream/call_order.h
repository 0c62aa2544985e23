#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace xmesh::runtime {

/// The order in which calls are enqueued on one device of this process, whichever of its groups they are of. What is enqueued meets its counterpart
/// by order alone, and NCCL wants the operations of all communicators of a device in one order on all ranks. So nothing is enqueued before the ranks
/// have agreed on a call, and all enqueue their common calls in one order, however each of them made them: as backwards do, whose order is
/// autograd's.
///
/// That order is the turns', by D. Skeen's total order (in K. Birman and T. Joseph, Reliable Communication in the Presence of Failures, ACM TOCS
/// 5(1), 1987, section 5.2). A rank proposes one more than every turn that it has proposed or heard to be agreed; the most that a participant
/// proposes is agreed; equal turns go by the call's name. A call is enqueued once nothing with an earlier turn, proposed or agreed, is left here:
/// what comes later gets a later one. So that no call waits for one that a rank makes only later, perhaps when the first has ended, this rank then
/// asks the others to put that one behind (Told::held); who has not made it promises so.
///
/// Threading: any thread.
class CallOrder {
 public:
  /// What a call is called alike on every rank.
  struct Name {
    uint64_t group = 0;
    uint64_t call = 0;  ///< in its group
    auto operator<=>(const Name&) const = default;
  };
  /// What a call is told. Both run while the order is locked, on any thread: they only post.
  struct Told {
    std::function<void()> launch;             ///< it is enqueued next
    std::function<void(uint64_t turn)> held;  ///< calls that are agreed, the last of them on `turn`, wait for this one, which is not
  };
  struct Place {
    uint64_t id = 0;
    uint64_t turn = 0;  ///< as proposed
  };

  Place propose(Name name, Told told);
  void agree(uint64_t id, uint64_t turn);
  /// What will be agreed for a call is a turn after this one.
  void comesAfter(uint64_t id, uint64_t turn);
  /// The call is not to be launched. Whether that is so; else it has been.
  bool leave(uint64_t id);
  /// Whatever is proposed from now on is a turn after this one.
  void promise(uint64_t turn);

 private:
  struct Turn {
    uint64_t turn = 0;
    Name name;
    uint64_t id = 0;  ///< last: it differs from rank to rank
    auto operator<=>(const Turn&) const = default;
  };
  struct Waiting {
    Told told;
    bool is_agreed = false;
    uint64_t held_turn = 0;  ///< the turn of the last call that was found to wait for this one
  };
  void move(uint64_t id, uint64_t turn, bool is_agreed);
  void launchWaiting();
  void tellHeld();

  std::mutex mutex_;  ///< guards what follows
  uint64_t last_id_ = 0;
  uint64_t last_turn_ = 0;  ///< proposed, agreed or promised
  std::map<Turn, Waiting> waiting_;
  std::map<uint64_t, Turn> turns_;  ///< of those, by id
};

}  // namespace xmesh::runtime
