#include "c10d/guarded_work.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kSlice{500};  ///< of a wait for a collective, which may be abandoned meanwhile

c10::intrusive_ptr<c10::ivalue::Future> futureOf(::c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace

GuardedWork::GuardedWork(c10::intrusive_ptr<::c10d::Work> inner, std::shared_ptr<CollectiveFaults> faults, GuardedCall call)
    : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), faults_(std::move(faults)), call_(std::move(call)) {
  const auto given = call_.is_collective ? futureOf(*inner_) : nullptr;
  if (given == nullptr) {
    open_ = std::make_shared<OpenCall>(call_, [inner = inner_](const std::exception_ptr&) { inner->abort(); });
    return;
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(given->elementType(), given->devices());
  open_ = std::make_shared<OpenCall>(call_, [future = future_](const std::exception_ptr& error) { future->setError(error); });
  faults_->openCalls().add(open_);
  // On gloo's thread, before anybody who waits for the call wakes.
  given->addCallback([future = future_, faults = faults_, open = open_](c10::ivalue::Future& done) {
    faults->openCalls().remove(open);
    if (!open->settle()) {
      return;
    }
    if (!done.hasError()) {
      future->markCompleted(done.constValue());
      return;
    }
    faults->collectiveFailed(done.exception_ptr());
    future->setError(faults->explained(done.exception_ptr(), open->call().what, open->call().peer));
  });
}

bool GuardedWork::hasFailed(const std::exception_ptr& error) const {
  if (inner_->isCompleted()) {
    return true;
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return future_ == nullptr && std::string(known.what()).find("Operation timed out!") == std::string::npos;
  } catch (...) {
    return false;
  }
}

bool GuardedWork::waitInSlices(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const bool has_deadline = timeout != kNoTimeout;
  while (true) {
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const bool is_last = has_deadline && rest <= kSlice;
    const bool was_completed = inner_->isCompleted();
    try {
      return inner_->wait(is_last ? std::max(rest, std::chrono::milliseconds(1)) : kSlice);  // which goes on when a wait for it has ended
    } catch (...) {
      if (is_last || was_completed || open_->error() != nullptr) {
        throw;
      }
    }
  }
}

bool GuardedWork::waitWatched(std::chrono::milliseconds timeout) {
  faults_->openCalls().add(open_);
  const auto closed = c10::make_scope_exit([this] {
    faults_->openCalls().remove(open_);
    open_->settle();
  });
  const bool is_done = inner_->wait(timeout);
  if (const std::exception_ptr abandoned = open_->error(); abandoned != nullptr && !is_done) {
    std::rethrow_exception(abandoned);
  }
  return is_done;
}

bool GuardedWork::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    return future_ != nullptr ? waitInSlices(timeout) : waitWatched(timeout);
  } catch (...) {
    error = std::current_exception();
  }
  if (const std::exception_ptr abandoned = open_->error()) {
    std::rethrow_exception(abandoned);
  }
  if (hasFailed(error)) {
    if (call_.is_collective && future_ == nullptr) {
      faults_->collectiveFailed(error);
    }
    error = faults_->explained(error, call_.what, call_.peer);
  }
  std::rethrow_exception(error);
}

std::exception_ptr GuardedWork::exception() const {
  if (const std::exception_ptr abandoned = open_->error()) {
    return abandoned;
  }
  const std::exception_ptr error = inner_->exception();
  return error == nullptr ? nullptr : faults_->explained(error, call_.what, call_.peer);
}

c10::intrusive_ptr<c10::ivalue::Future> GuardedWork::getFuture() { return future_ != nullptr ? future_ : inner_->getFuture(); }

}  // namespace xmesh::c10d_backend
