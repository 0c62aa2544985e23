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

ReshardWork::ReshardWork(std::shared_ptr<runtime::ReshardCall> call, std::vector<at::Tensor> dst, std::shared_ptr<CallOnDevice> on_device,
                         bool blocks)
    : Work(-1, ::c10d::OpType::UNKNOWN, "xmesh:reshard"),
      call_(std::move(call)),
      dst_(std::move(dst)),
      on_device_(std::move(on_device)),
      blocks_(blocks) {}

bool ReshardWork::isCompleted() { return call_->isCompleted(); }

bool ReshardWork::isSuccess() const { return call_->isCompleted() && !call_->failure().has_value(); }

std::exception_ptr ReshardWork::exception() const { return exceptionOf(*call_); }

bool ReshardWork::wait(std::chrono::milliseconds timeout) {
  const auto longest = std::max(timeout, std::chrono::milliseconds(0));
  const bool has_ended = on_device_ != nullptr ? waitOnDevice(longest) : call_->isDetached() ? call_->waitMoved(longest) : call_->wait(longest);
  TORCH_CHECK_WITH(DistBackendError, has_ended, "xmesh: the reshard did not end within ", timeout.count(), " ms; it goes on");
  return true;
}

bool ReshardWork::waitOnDevice(std::chrono::milliseconds timeout) {
  if (timeout.count() > 0 || blocks_) {
    if (!call_->wait(timeout)) {
      return false;
    }
  } else {
    call_->waitEnqueued();
  }
  on_device_->orderCurrentStream();
  return true;
}

void ReshardWork::synchronize() {
  if (on_device_ != nullptr) {
    waitOnDevice(std::chrono::milliseconds(0));
  } else {
    call_->wait();
  }
}

void ReshardWork::abort() { TORCH_CHECK(false, "xmesh: a single reshard cannot be aborted; abort the process group"); }

std::vector<at::Tensor> ReshardWork::result() { return dst_; }

c10::intrusive_ptr<c10::ivalue::Future> ReshardWork::getFuture() {
  if (future_ == nullptr) {
    const auto devices = on_device_ != nullptr ? std::vector<c10::Device>{on_device_->device()} : std::vector<c10::Device>();
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
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
