#include "c10d/reshard_work.h"

#include <ATen/core/jit_type.h>

#include <utility>

namespace xmesh::c10d_backend {
namespace {

std::exception_ptr exceptionOf(const runtime::ReshardCall& call) {
  const std::optional<runtime::Failure> failure = call.failure();
  if (!failure.has_value()) {
    return nullptr;
  }
  try {
    runtime::throwFailure(*failure);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

ReshardWork::ReshardWork(std::shared_ptr<runtime::ReshardCall> call, std::vector<at::Tensor> dst)
    : Work(-1, ::c10d::OpType::UNKNOWN, "xmesh:reshard"), call_(std::move(call)), dst_(std::move(dst)) {}

bool ReshardWork::isCompleted() { return call_->isCompleted(); }

bool ReshardWork::isSuccess() const { return call_->isCompleted() && !call_->failure().has_value(); }

std::exception_ptr ReshardWork::exception() const { return exceptionOf(*call_); }

bool ReshardWork::wait(std::chrono::milliseconds timeout) {
  const auto longest = std::max(timeout, std::chrono::milliseconds(0));
  TORCH_CHECK_WITH(DistBackendError, call_->isDetached() ? call_->waitMoved(longest) : call_->wait(longest), "xmesh: the reshard did not end within ",
                   timeout.count(), " ms; it goes on");
  return true;
}

void ReshardWork::synchronize() { call_->wait(); }

void ReshardWork::abort() { TORCH_CHECK(false, "xmesh: a single reshard cannot be aborted; abort the process group"); }

std::vector<at::Tensor> ReshardWork::result() { return dst_; }

c10::intrusive_ptr<c10::ivalue::Future> ReshardWork::getFuture() {
  if (future_ == nullptr) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    call_->onCompletion([future = future_, call = call_.get(), dst = dst_] {
      if (const std::exception_ptr error = exceptionOf(*call)) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(dst));
      }
    });
  }
  return future_;
}

}  // namespace xmesh::c10d_backend
