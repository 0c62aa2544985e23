#include "self_test.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <vector>

#include "runtime.h"

namespace emu {
namespace {

constexpr int64_t kNumRows = 64;

// (2 * rows + 2, halved, clamped to 5 and 30) of every second column, written and read through foreign pointers.
at::Tensor computed(const at::Tensor& memory, c10::Device device) {
  const auto options = at::TensorOptions(at::kFloat).device(device);
  auto rows = at::for_blob(memory.data_ptr(), {kNumRows, 2}).strides({4, 2}).options(options).target_device(device).make_tensor();
  rows.copy_(at::arange(kNumRows * 2, at::kFloat).view({kNumRows, 2}), /*non_blocking=*/true);
  rows.mul_(2).add_(2).div_(2);
  const auto low = at::full({1}, 5, options);
  const auto high = at::full({1}, 30, options);
  at::maximum_out(rows, rows, low);
  at::minimum_out(rows, rows, high);
  return at::maximum(at::minimum(rows, high), low).to(at::kDouble).contiguous();
}

std::string exchange(c10d::Backend& backend) {
  const c10::Device device(kDeviceType, 0);
  const c10::impl::VirtualGuardImpl guard_impl(kDeviceType);
  const auto stream = guard_impl.getNewStream(device, /*priority=*/-1);
  const auto memory = at::zeros({kNumRows * 4}, at::TensorOptions(at::kFloat).device(device));
  c10::Event ready(kDeviceType);
  ready.record(guard_impl.getStream(device));
  const c10::MultiStreamGuard guard(std::vector<c10::Stream>{stream});
  ready.block(stream);
  memory.record_stream(stream);
  const int other = 1 - backend.getRank();
  std::vector<at::Tensor> sent{computed(memory, device)};
  std::vector<at::Tensor> received{at::empty_like(sent[0])};
  std::vector<at::Tensor> shared{at::full({3}, backend.getRank() + 1, at::TensorOptions(at::kInt).device(device))};
  backend.startCoalescing();
  backend.send(sent, other, 0);
  backend.recv(received, other, 0);
  backend.broadcast(shared, c10d::BroadcastOptions{});
  auto work = backend.endCoalescing();
  work->wait(kNoTimeout);
  const auto expected = ((at::arange(kNumRows * 2, at::kFloat).view({kNumRows, 2}) * 2 + 2) / 2).clamp(5, 30).to(at::kDouble);
  if (!at::equal(received[0].cpu(), expected)) return "the values received are wrong";
  if (!at::equal(shared[0].cpu(), at::ones({3}, at::kInt))) return "the values broadcast are wrong";
  return work->isCompleted() ? "" : "the work is not done after a copy that followed it";
}

}  // namespace

std::string exchangeOnPlainThread(const c10::intrusive_ptr<c10d::Backend>& backend) {
  std::string wrong;
  std::thread thread([&] {
    try {
      wrong = exchange(*backend);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  });
  thread.join();
  return wrong;
}

}  // namespace emu
