// Every other operator that the CPU has a kernel for. A run on meta tensors gives the results' shapes; the kernel itself runs
// later, on aliases of the arguments. Where that is impossible, the host waits for the stream and runs the kernel itself.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/minimum_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <set>
#include <string>

#include "ops.h"
#include "runtime.h"

namespace emu {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using TensorMap = std::function<Tensor(const Tensor&)>;

// Kernels that draw random numbers without a generator among their arguments: numbers must be drawn in the program's order.
const std::set<std::string> kDrawing{"aten::native_dropout", "aten::rrelu_with_noise", "aten::rrelu_with_noise_"};

// The value with every tensor in it replaced, and every device by `device`.
IValue mapped(const IValue& value, const TensorMap& map, c10::Device device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional<Tensor>(map(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

Stack mapped(const Stack& values, const TensorMap& map, c10::Device device) {
  Stack result;
  result.reserve(values.size());
  for (const auto& value : values) result.push_back(mapped(value, map, device));
  return result;
}

Tensor toMeta(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;  // kernels for meta tensors read these
  Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  return meta;
}

// A host tensor's value is taken now, as a kernel's argument is; a number of Python's stays one, which promotes no type.
Tensor toAlias(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_privateuseone()) return aliasOf(tensor);
  Tensor taken = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) taken.unsafeGetTensorImpl()->set_wrapped_number(true);
  return taken;
}

// The device of all arguments; refuses two devices, and host tensors that are more than a number or an index.
c10::Device commonDevice(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> common;
  std::optional<c10::Device> asked;
  const auto check = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const auto device = tensor.device();
    if (device.is_cpu()) return tensor;
    TORCH_CHECK(!common || *common == device, "Expected all tensors to be on the same device, but ", op.schema().name(), " got ", *common, " and ",
                device);
    common = device;
    return tensor;
  };
  for (const auto& value : arguments) {
    mapped(value, check, c10::kMeta);
    if (value.isDevice() && value.toDevice().is_privateuseone()) asked = value.toDevice();
  }
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu()) {
      TORCH_CHECK(value.toTensor().dim() == 0, "Expected all tensors to be on the same device, but ", op.schema().name(), " got ",
                  common ? common->str() : "emu", " and cpu");
    }
  }
  if (common) return *common;
  return asked && asked->has_index() ? *asked : c10::Device(kDeviceType, currentDevice());
}

// Which argument a result is, for operators that write to their arguments; -1 for results of their own.
std::vector<int> writtenArguments(const c10::FunctionSchema& schema) {
  std::vector<int> written;
  size_t next = 0;
  for (const auto& result : schema.returns()) {
    written.push_back(-1);
    if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) continue;
    for (; next < schema.arguments().size(); ++next) {
      const auto* info = schema.arguments()[next].alias_info();
      if (info == nullptr || !info->isWrite()) continue;
      written.back() = int(next++);
      break;
    }
  }
  return written;
}

// Results' shapes of what C++ threads compute with. Run by way of the dispatcher, many operators on meta tensors need Python.
using MetaKernel = Tensor (*)(const Stack& meta);
const std::map<std::string, MetaKernel> kMetaKernels{
    {"aten::add.Tensor", [](const Stack& meta) { return at::meta::add(meta[0].toTensor(), meta[1].toTensor(), meta[2].toScalar()); }},
    {"aten::sub.Tensor", [](const Stack& meta) { return at::meta::sub(meta[0].toTensor(), meta[1].toTensor(), meta[2].toScalar()); }},
    {"aten::mul.Tensor", [](const Stack& meta) { return at::meta::mul(meta[0].toTensor(), meta[1].toTensor()); }},
    {"aten::div.Tensor", [](const Stack& meta) { return at::meta::div(meta[0].toTensor(), meta[1].toTensor()); }},
    {"aten::maximum", [](const Stack& meta) { return at::meta::maximum(meta[0].toTensor(), meta[1].toTensor()); }},
    {"aten::minimum", [](const Stack& meta) { return at::meta::minimum(meta[0].toTensor(), meta[1].toTensor()); }},
};

struct Call {
  const c10::OperatorHandle& op;
  const Stack& arguments;
  c10::Device device;
  std::vector<int> written;
};

Tensor allocateLike(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(device));
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

// Whether the kernel may run later. Its order or its results' shapes may depend on what only the kernel knows.
bool mayRunLater(const Call& call) {
  const auto& schema = call.op.schema();
  if (kDrawing.count(schema.name()) != 0) return false;
  for (const auto& argument : schema.arguments()) {
    const auto& type = *argument.type();
    if (type.str().find("Generator") != std::string::npos) return false;
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
  }
  return true;
}

// Whether every result is an argument that keeps its shape. A wrong shape is then found by the kernel, at the next synchronization.
bool writesInPlace(const Call& call) {
  for (const int written : call.written) {
    if (written < 0 || !call.arguments[written].isTensor() || !call.arguments[written].toTensor().defined()) return false;
    const bool is_out = call.op.schema().arguments()[written].kwarg_only();
    if (is_out && call.arguments[written].toTensor().numel() == 0) return false;
  }
  return !call.written.empty();
}

// Runs the operator on meta tensors and makes the results; resizes `out` arguments as the kernel would. False if there is no such run.
bool makeResults(const Call& call, Stack& results) {
  if (writesInPlace(call)) {
    for (const int written : call.written) results.push_back(call.arguments[written]);
    return true;
  }
  Stack meta;
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    meta = mapped(call.arguments, toMeta, c10::kMeta);
    if (call.op.schema().name() == "aten::convolution_backward") {
      // The CPU's kernel lays gradients out as the input is; the one for meta tensors, as the output's gradient is.
      meta[0] = meta[0].toTensor().contiguous(meta[1].toTensor().suggest_memory_format());
    }
    const auto before = meta;
    const auto direct = kMetaKernels.find(c10::toString(call.op.operator_name()));
    if (direct != kMetaKernels.end()) {
      meta = {direct->second(before)};
    } else {
      call.op.callBoxed(meta);
    }
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      const auto* info = call.op.schema().arguments()[i].alias_info();
      if (info == nullptr || !info->isWrite() || !before[i].isTensor() || !before[i].toTensor().defined()) continue;
      const auto& shaped = before[i].toTensor();
      const auto& out = call.arguments[i].toTensor();
      if (out.sizes() != shaped.sizes()) {
        out.resize_(shaped.sizes());
        out.as_strided_(shaped.sizes(), shaped.strides());
      }
    }
  } catch (const std::exception&) {
    return false;  // the kernel, run at once, says what is wrong, if anything is
  }
  for (size_t i = 0; i < meta.size(); ++i) {
    if (call.written[i] >= 0) {
      results.push_back(call.arguments[call.written[i]]);
    } else {
      results.push_back(mapped(meta[i], [&](const Tensor& tensor) { return allocateLike(tensor, call.device); }, call.device));
    }
  }
  return true;
}

void copyResult(const std::string& name, const Tensor& computed, const Tensor& result) {
  if (!result.defined() || !computed.defined()) return;
  if (computed.numel() == 0 && computed.dim() == 1) return;  // statistics that batch norm does not make in evaluation, which its meta kernel has
  TORCH_CHECK(computed.sizes() == result.sizes(), "emu: ", name, " made a result of shape ", computed.sizes(), " where ", result.sizes(),
              " was expected");
  result.copy_(computed);
}

void copyResults(const std::string& name, const std::vector<int>& written, const Stack& computed, const Stack& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (written[i] >= 0) continue;
    if (results[i].isTensor()) {
      copyResult(name, computed[i].toTensor(), results[i].toTensor());
    } else if (results[i].isTensorList()) {
      const auto from = computed[i].toTensorVector();
      const auto to = results[i].toTensorVector();
      for (size_t j = 0; j < to.size(); ++j) copyResult(name, from[j], to[j]);
    }
  }
}

bool runLater(const Call& call, Stack& results) {
  if (!mayRunLater(call) || !makeResults(call, results)) return false;
  auto arguments = mapped(call.arguments, toAlias, c10::kCPU);
  auto targets = mapped(results, [](const Tensor& tensor) { return tensor.defined() ? aliasOf(tensor) : tensor; }, c10::kCPU);
  currentWorker(call.device.index())
      .enqueue([op = call.op, written = call.written, arguments = std::move(arguments), targets = std::move(targets)]() mutable {
        op.callBoxed(arguments);
        copyResults(op.schema().name(), written, arguments, targets);
      });
  ++operatorCounts().num_async;
  return true;
}

// An empty tensor that the kernel may let grow: an alias cannot.
Tensor toGrowing(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.numel() > 0) return toAlias(tensor);
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
}

// Where the kernel has resized what it wrote to, the argument follows.
void follow(const Call& call, const IValue& argument, const IValue& computed) {
  if (!argument.isTensor() || !argument.toTensor().defined()) return;
  const auto& tensor = argument.toTensor();
  if (tensor.sizes() == computed.toTensor().sizes()) return;
  tensor.resize_(computed.toTensor().sizes());
  currentWorker(call.device.index()).synchronize();
  aliasOf(tensor).copy_(computed.toTensor());
}

void runNow(const Call& call, Stack& results) {
  auto& worker = currentWorker(call.device.index());
  worker.synchronize();
  ++operatorCounts().num_synced;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto arguments = mapped(call.arguments, toGrowing, c10::kCPU);
  auto computed = arguments;
  call.op.callBoxed(computed);
  const auto copied = [&](const Tensor& from) {
    auto result = allocateLike(from, call.device);
    worker.synchronize();
    if (from.defined()) aliasOf(result).copy_(from);
    return result;
  };
  for (size_t i = 0; i < computed.size(); ++i) {
    const int written = call.written[i];
    if (written >= 0) follow(call, call.arguments[written], arguments[written]);
    results.push_back(written >= 0 ? call.arguments[written] : mapped(computed[i], copied, call.device));
  }
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  const Stack arguments(stack->end() - int64_t(num_arguments), stack->end());
  const Call call{op, arguments, commonDevice(op, arguments), writtenArguments(op.schema())};
  const c10::DeviceGuard guard(call.device);
  dropKept();
  Stack results;
  if (!runLater(call, results)) {
    results.clear();
    runNow(call, results);
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& result : results) stack->push_back(std::move(result));
}

c10::OperatorHandle operatorNamed(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) { run(operatorNamed("aten::convolution"), stack); }

void convolutionBackward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  constexpr int kNumArguments = 10;
  const auto first = stack->end() - kNumArguments;
  const auto weight = first[2].toTensor();
  const bool transposed = first[6].toBool();
  const auto groups = first[8].toInt();
  const auto num_channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(first + 3, IValue(std::vector<int64_t>{num_channels}));
  run(operatorNamed("aten::convolution_backward"), stack);
}

const std::set<std::string> kByHand{
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::as_strided",
    "aten::view",
    "aten::_reshape_alias",
    "aten::unfold",
    "aten::view_as_real",
    "aten::view_as_complex",
    "aten::is_set_to",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Tensor",
    "aten::set_.source_Storage_storage_offset",
    "aten::_local_scalar_dense",
    "aten::_fused_sdp_choice",
    "aten::_nested_view_from_buffer",
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // An operator whose composite kernel would win over a fallback is named itself, so that it stays one task.
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto full = c10::toString(name);
    if (name.name.rfind("aten::", 0) == 0 && kByHand.count(full) == 0) {
      library.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
  }
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolutionBackward>());
}

}  // namespace
}  // namespace emu
