#include "c10d/collective_faults.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <thread>
#include <typeinfo>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

using runtime::Failure;
using runtime::FailureKind;
using std::chrono::milliseconds;

constexpr milliseconds kLookTime{700};     ///< for who has ended, once a connection has
constexpr milliseconds kGlance{50};        ///< where connections had no part in it, or this rank gives up
constexpr milliseconds kConnectTime{200};  ///< to those who are told
constexpr milliseconds kPause{1};          ///< between two looks
constexpr size_t kMostText = 1000;         ///< characters of what ranks tell each other

std::string textOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an error of an unknown type";
  }
}

/// Whether it is what gloo throws where connections fail; its headers are not there to ask for the type.
bool isGloos(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return std::string(typeid(known).name()).find("gloo11IoException") != std::string::npos;
  } catch (...) {
    return false;
  }
}

/// Whether an error tells of gloo's connections: its own, or one of c10d's that quotes it.
bool isOfConnections(const std::exception_ptr& error) { return isGloos(error) || textOf(error).find("gloo/transport/") != std::string::npos; }

/// How long to look for who has ended.
milliseconds lookTime(const std::string& text) {
  const bool is_timeout = text.find("imed out") != std::string::npos || text.find("timeout") != std::string::npos;
  return is_timeout ? kGlance : kLookTime;
}

/// One line of what ranks tell each other: "SECRET 3,5 why". It is found again by parsed().
std::string lineOf(const std::string& secret, const Failure& failure) {
  std::string out = secret + " ";
  for (size_t i = 0; i < failure.blamed_ranks.size(); ++i) {
    out += (i > 0 ? "," : "") + std::to_string(failure.blamed_ranks[i]);
  }
  size_t length = std::min(failure.text.size(), kMostText);
  while (length < failure.text.size() && length > 0 && (static_cast<unsigned char>(failure.text[length]) & 0xC0U) == 0x80U) {
    --length;  // within a character of UTF-8
  }
  std::string text = failure.text.substr(0, length);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return out + " " + text;
}

/// Nothing for a line of somebody who does not know the secret, or which blames no rank of the group.
std::optional<Failure> parsed(const std::string& line, const std::string& secret, const std::vector<int64_t>& ranks) {
  const size_t begin = secret.size() + 1;
  const size_t space = line.find(' ', begin);
  if (secret.empty() || line.compare(0, begin, secret + " ") != 0 || space == std::string::npos) {
    return std::nullopt;
  }
  Failure out{FailureKind::kPeer, line.substr(space + 1), {}};
  const char* at = line.data() + begin;
  const char* const end = line.data() + space;
  while (at < end) {
    int64_t rank = 0;
    const auto [next, error] = std::from_chars(at, end, rank);
    if (error != std::errc() || std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
      return std::nullopt;
    }
    out.blamed_ranks.push_back(rank);
    at = next + (next < end ? 1 : 0);
  }
  return out.blamed_ranks.empty() ? std::nullopt : std::optional(std::move(out));
}

}  // namespace

/// A look at the life lines of the other ranks.
class CollectiveFaults::Look {
 public:
  Look(const std::vector<LifeAddress>& addresses, int self) {
    for (int rank = 0; rank < static_cast<int>(addresses.size()); ++rank) {
      if (rank != self && !addresses[static_cast<size_t>(rank)].address.empty()) {
        watches_.emplace(rank, transport::LifeWatch(addresses[static_cast<size_t>(rank)].address));
      }
    }
  }
  /// Ascending.
  std::vector<int> gone() {
    std::vector<int> out;
    for (auto& [rank, watch] : watches_) {
      if (watch.isGone()) {
        out.push_back(rank);
      }
    }
    return out;
  }
  /// Sends each rank that is there, or will be within a while, a line of its own.
  void tell(const std::function<std::string(int rank)>& line_for) {
    const auto deadline = Clock::now() + kConnectTime;
    while (!watches_.empty()) {
      for (auto at = watches_.begin(); at != watches_.end();) {
        const bool is_there = at->second.isConnected();
        if (is_there) {
          at->second.tell(line_for(at->first));
        }
        at = is_there || at->second.isGone() ? watches_.erase(at) : std::next(at);
      }
      if (Clock::now() >= deadline) {
        return;
      }
      std::this_thread::sleep_for(watches_.empty() ? milliseconds(0) : kPause);
    }
  }

 private:
  std::map<int, transport::LifeWatch> watches_;  ///< by group rank
};

CollectiveFaults::CollectiveFaults(int rank, std::vector<int64_t> global_ranks, PublishedLifeLine line, std::function<void()> break_off)
    : rank_(rank),
      global_ranks_(std::move(global_ranks)),
      break_off_(std::move(break_off)),
      secret_(std::move(line.address.secret)),
      line_(std::move(line.line)) {}

void CollectiveFaults::meet(const c10::intrusive_ptr<::c10d::Store>& store) {
  addresses_ = lifeAddresses(store, static_cast<int>(global_ranks_.size()));
  const std::string& next = addresses_.at(static_cast<size_t>(rank_ + 1) % addresses_.size()).address;
  if (addresses_.size() > 1 && !next.empty()) {
    next_ = std::make_unique<transport::LifeWatch>(next);
  }
}

std::string CollectiveFaults::here(const std::string& what) const {
  return "on rank " + std::to_string(global_ranks_.at(static_cast<size_t>(rank_))) + ", " + what + " of ranks " + runtime::rankList(global_ranks_) +
         ": ";
}

void CollectiveFaults::check(const std::string& what) const {
  const std::lock_guard lock(mutex_);
  if (failure_.has_value()) {
    Failure again = *failure_;
    again.text = here(what) + "the group's collectives have ended: " + again.text;
    runtime::throwFailure(again);
  }
}

std::optional<Failure> CollectiveFaults::told() {
  const std::lock_guard lock(line_mutex_);
  if (line_ != nullptr) {
    for (const std::string& line : line_->hear()) {
      if (std::optional<Failure> failure = parsed(line, secret_, global_ranks_)) {
        return failure;
      }
    }
  }
  return std::nullopt;
}

Failure CollectiveFaults::lost(const std::vector<int>& ranks) const {
  Failure out{FailureKind::kPeer, {}, {}};
  for (const int rank : ranks) {
    out.blamed_ranks.push_back(global_ranks_.at(static_cast<size_t>(rank)));
  }
  std::sort(out.blamed_ranks.begin(), out.blamed_ranks.end());
  const bool is_one = ranks.size() == 1;
  out.text =
      (is_one ? "rank " + std::to_string(out.blamed_ranks.front()) + " is lost" : "ranks " + runtime::rankList(out.blamed_ranks) + " are lost") +
      (is_one ? ": it has ended, or left the group" : ": they have ended, or left the group");
  return out;
}

void CollectiveFaults::tellOthers(Look& look, const Failure& failure) const {
  look.tell([&](int rank) { return lineOf(addresses_.at(static_cast<size_t>(rank)).secret, failure); });
}

void CollectiveFaults::tellOthers(const Failure& failure) const {
  Look look(addresses_, rank_);
  tellOthers(look, failure);
}

std::optional<Failure> CollectiveFaults::findCause(milliseconds time, int peer, bool tells) {
  if (std::optional<Failure> known = told()) {
    return known;
  }
  Look look(addresses_, rank_);
  const auto deadline = Clock::now() + time;
  while (true) {
    std::vector<int> gone = look.gone();
    if (std::find(gone.begin(), gone.end(), peer) != gone.end()) {
      gone = {peer};
    }
    std::optional<Failure> known = told();
    if (!known.has_value() && !gone.empty()) {
      known = lost(gone);
      if (tells) {
        tellOthers(look, *known);
      }
    }
    if (!known.has_value()) {
      const std::lock_guard lock(mutex_);
      known = failure_;
    }
    if (known.has_value() || Clock::now() >= deadline) {
      return known;
    }
    std::this_thread::sleep_for(kPause);
  }
}

void CollectiveFaults::settle(std::optional<Failure> failure) {
  const std::lock_guard lock(mutex_);
  is_looking_ = false;
  if (!failure_.has_value()) {
    failure_ = std::move(failure);
  }
  settled_.notify_all();
}

void CollectiveFaults::collectiveFailed(const std::exception_ptr& error) noexcept {
  try {
    if (!isOfConnections(error) || !fork_.isHere()) {
      return;
    }
    {
      std::unique_lock lock(mutex_);
      settled_.wait(lock, [this] { return !is_looking_ || failure_.has_value(); });
      if (failure_.has_value()) {
        return;
      }
      is_looking_ = true;
    }
    std::optional<Failure> cause;
    try {
      cause = findCause(lookTime(textOf(error)), -1, /*tells=*/true);
    } catch (const std::exception&) {
      cause.reset();  // descriptors have run out: the error speaks for itself
    }
    const bool ends = cause.has_value();
    settle(std::move(cause));
    if (ends) {
      break_off_();
    }
  } catch (const std::exception&) {
    return;  // no memory for a text
  }
}

std::exception_ptr CollectiveFaults::explained(const std::exception_ptr& error, const std::string& what, int peer) noexcept {
  try {
    std::optional<Failure> cause;
    {
      std::unique_lock lock(mutex_);
      settled_.wait(lock, [this] { return !is_looking_ || failure_.has_value(); });
      cause = failure_;
    }
    const bool is_of_connections = isOfConnections(error);
    if (!cause.has_value() && !is_of_connections) {
      return error;
    }
    const std::string text = textOf(error);
    if (!cause.has_value() && peer >= 0 && fork_.isHere()) {
      cause = findCause(lookTime(text), peer, /*tells=*/false);
    }
    if (!cause.has_value() && !isGloos(error)) {
      return error;
    }
    if (!cause.has_value()) {
      return std::make_exception_ptr(c10::DistNetworkError(c10::SourceLocation{__func__, __FILE__, __LINE__}, text));
    }
    cause->text = here(what) + cause->text + " (gloo: " + text + ")";
    runtime::throwFailure(*cause);
  } catch (...) {
    return std::current_exception();
  }
}

void CollectiveFaults::end(Failure failure) noexcept {
  if (fork_.isHere()) {
    settle(std::move(failure));
    break_off_();
  }
}

void CollectiveFaults::abort() noexcept {
  if (!fork_.isHere()) {
    return;
  }
  const int64_t me = global_ranks_.at(static_cast<size_t>(rank_));
  Failure here{FailureKind::kGroup, "the process group was aborted on this rank", {}};
  bool is_known = false;
  {
    const std::lock_guard lock(mutex_);
    is_known = failure_.has_value();
  }
  if (!is_known) {
    try {
      if (std::optional<Failure> cause = findCause(kGlance, -1, /*tells=*/true)) {
        here = std::move(*cause);
      } else {
        tellOthers({FailureKind::kPeer, "rank " + std::to_string(me) + " has aborted the process group", {me}});
      }
    } catch (const std::exception&) {
      is_known = false;  // nobody is told: they hear that connections have ended
    }
  }
  end(std::move(here));
}

void CollectiveFaults::leave(bool in_order) noexcept {
  {
    const std::lock_guard lock(mutex_);
    has_left_ = true;
    in_order = in_order && !failure_.has_value();
  }
  const std::lock_guard lock(line_mutex_);
  if (line_ != nullptr && fork_.isHere()) {
    line_->end(in_order);
  }
}

}  // namespace xmesh::c10d_backend
