#include "c10d/guarded_work.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace xmesh::c10d_backend {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2'000};  ///< at what has ended the group's collectives, while one lasts

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
  if (!call_.is_collective) {
    return;
  }
  if (const auto given = futureOf(*inner_)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(given->elementType(), given->devices());
    // On gloo's thread, before anybody who waits for the call wakes.
    given->addCallback([future = future_, faults = faults_, call = call_](c10::ivalue::Future& done) {
      if (!done.hasError()) {
        future->markCompleted(done.constValue());
        return;
      }
      faults->collectiveFailed(done.exception_ptr());
      future->setError(faults->explained(done.exception_ptr(), call.what, call.peer));
    });
  }
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

bool GuardedWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const bool has_deadline = timeout != kNoTimeout;
  const bool looks = call_.is_collective && future_ != nullptr;  // such a Work of gloo's goes on when a wait for it has ended
  std::exception_ptr error;
  while (true) {
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const bool is_last = !looks || (has_deadline && rest <= kLookEvery);
    const bool was_completed = inner_->isCompleted();
    try {
      return inner_->wait(!is_last ? kLookEvery : !has_deadline ? timeout : std::max(rest, std::chrono::milliseconds(1)));
    } catch (...) {
      error = std::current_exception();
    }
    if (is_last || was_completed) {
      break;
    }
    if (!inner_->isCompleted()) {
      faults_->lookAgain();
    }
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
  const std::exception_ptr error = inner_->exception();
  return error == nullptr ? nullptr : faults_->explained(error, call_.what, call_.peer);
}

c10::intrusive_ptr<c10::ivalue::Future> GuardedWork::getFuture() { return future_ != nullptr ? future_ : inner_->getFuture(); }

}  // namespace xmesh::c10d_backend
