#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/link/party.h"

namespace xmesh::runtime::link {

/// What the members of a link tell each other. Ranks speak with their leader, leaders with the source's.
enum class Kind : uint8_t {
  kEnter = 0xA0,  ///< rank -> leader: party (with the sender's member alone), rank, size
  kFormed,        ///< leader -> ranks: party
  kMeet,          ///< replica's leader -> source's: party; version: the newest that it has had
  kKnow,          ///< source's leader -> leaders -> ranks: party. The source's own comes first
  kForget,        ///< the same way: the number of a party that is gone
  kReady,         ///< source's rank -> leader: version
  kOffer,         ///< source's leader -> leaders -> ranks: attempt, parties' numbers
  kAccept,        ///< rank -> leader -> source's leader: attempt; text: a fingerprint of what it is about to do
  kGo,            ///< the way of kOffer: attempt
  kAbort,         ///< the way of kOffer: attempt, whose time is over; done is said for it all the same
  kDone,          ///< rank -> leader -> source's leader: attempt; has_all, else text and the numbers of members to blame
  kHolds,         ///< leader -> ranks: the party has the version, all of it
  kSettled,     ///< source's leader -> source's ranks: version; text: why it could not be published at all; parties' numbers that hold it; texts: of
                ///< those left out
  kLeftOut,     ///< source's leader -> a replica's: it is no longer waited for; text
  kSwap,        ///< rank -> leader: count
  kSwapped,     ///< leader -> ranks: count, version (0: none), numbers: the newest that all ranks have had
  kSourceLost,  ///< source's leader -> leaders -> ranks, or a leader that has lost it -> ranks: text
  kBroken,      ///< leader -> ranks, source's leader -> a replica's, replica's -> source's: the receiver's, or sender's, party is over; text
};

struct Message {
  Kind kind = Kind::kEnter;
  Attempt attempt;
  uint64_t count = 0;
  int32_t rank = 0;
  int32_t size = 0;
  bool has_all = false;
  std::string text;
  std::vector<uint64_t> numbers;
  std::vector<std::string> texts;
  Party party;
  bool operator==(const Message&) const = default;
};

/// Whether a control message is a link's.
bool isLinkMessage(std::string_view bytes);
std::string encode(const Message& message);
/// Throws std::runtime_error for what no encode() has made.
Message decode(std::string_view bytes);

}  // namespace xmesh::runtime::link
