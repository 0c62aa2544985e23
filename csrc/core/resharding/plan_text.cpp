#include "core/resharding/plan_text.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

namespace xmesh::core {
namespace {

constexpr size_t kMaxTensors = 8;

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return std::string(text.data(), static_cast<size_t>(std::clamp<int>(size, 0, static_cast<int>(text.size()) - 1)));
}

/// Rows of cells as lines, every column as wide as its widest cell, numbers flush right from the second column on.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string out;
  for (const std::vector<std::string>& row : rows) {
    out += " ";
    for (size_t i = 0; i < row.size(); ++i) {
      out += " " + std::string(widths[i] - row[i].size(), ' ') + row[i] + " ";
    }
    out += "\n";
  }
  return out;
}

std::string tensorsStr(const ReshardingPlan& plan) {
  std::string out;
  for (size_t i = 0; i < std::min(plan.tensors.size(), kMaxTensors); ++i) {
    const auto& [src, dst] = plan.tensors[i];
    out += "  tensor " + std::to_string(i) + "  " + src.dtype.name + shapeStr(src.shape) + "  " + bytesStr(src.numBytes()) + "\n";
    out += "    from " + src.whereStr() + "\n";
    out += "    to   " + dst.whereStr() + "\n";
  }
  if (plan.tensors.size() > kMaxTensors) {
    out += "  ... and " + std::to_string(plan.tensors.size() - kMaxTensors) + " more tensors\n";
  }
  return out;
}

std::string messagesStr(const ReshardingPlan& plan, int64_t max_messages) {
  const auto shown = static_cast<size_t>(std::clamp<int64_t>(max_messages, 0, static_cast<int64_t>(plan.messages.size())));
  if (shown == 0) {
    return "";
  }
  std::vector<std::vector<std::string>> rows = {{"message", "tensor", "slice", "elements", "from", "to", "bytes", "payload"}};
  for (size_t i = 0; i < shown; ++i) {
    const Message& message = plan.messages[i];
    const UnitTask& task = plan.tasks[static_cast<size_t>(message.task)];
    rows.push_back({std::to_string(i), std::to_string(task.tensor), boxStr(task.box),
                    "[" + std::to_string(message.begin) + ", " + std::to_string(message.end) + ")", std::to_string(message.src_rank),
                    std::to_string(message.dst_rank), bytesStr(plan.numBytes(message)), payloadStr(message)});
  }
  std::string out = table(rows);
  if (shown < plan.messages.size()) {
    out += "  ... and " + std::to_string(plan.messages.size() - shown) + " more messages\n";
  }
  return out;
}

}  // namespace

std::string bytesStr(int64_t num_bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(num_bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) {
    value /= 1024;
  }
  return (unit == 0 ? std::to_string(num_bytes) : fixed(value, 2)) + " " + kUnits[unit];
}

std::string secondsStr(double seconds) {
  if (seconds >= 1) {
    return fixed(seconds, 3) + " s";
  }
  return seconds >= 1e-3 ? fixed(seconds * 1e3, 3) + " ms" : fixed(seconds * 1e6, 1) + " us";
}

constexpr double kLeastBoundSeconds = 1e-6;  // a ratio over less says nothing

std::string planStr(const ReshardingPlan& plan, int64_t max_messages) {
  std::string out = "ReshardingPlan  strategy " + plan.strategy + "  " + std::to_string(plan.tensors.size()) +
                    (plan.tensors.size() == 1 ? " tensor  " : " tensors  ") + std::to_string(plan.tasks.size()) + " slices  " +
                    std::to_string(plan.messages.size()) + " messages\n";
  out += tensorsStr(plan);
  out += "  lower bound  " + bytesStr(plan.lower_bound_bytes) + " over one NIC, " + secondsStr(plan.lower_bound_seconds) + "\n";
  out += "  predicted    " + secondsStr(plan.predicted_seconds);
  if (plan.lower_bound_seconds >= kLeastBoundSeconds) {
    out += ", " + fixed(plan.predicted_seconds / plan.lower_bound_seconds, 3) + " of the bound";
  } else if (plan.lower_bound_seconds > 0) {
    out += ", nearly all of it latency, which the bound does not count";
  }
  out += "\n";
  std::vector<std::vector<std::string>> rows = {{"host", "NIC out", "NIC in"}};
  const std::map<int64_t, int64_t> received = plan.bytesReceived();
  for (const auto& [host, sent] : plan.bytesSent()) {
    rows.push_back({std::to_string(host), bytesStr(sent), bytesStr(received.at(host))});
  }
  return out + table(rows) + messagesStr(plan, max_messages);
}

}  // namespace xmesh::core
