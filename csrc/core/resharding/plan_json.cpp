#include "core/resharding/plan_json.h"

#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "core/resharding/decompose.h"
#include "core/resharding/plan_resharding.h"
#include "core/resharding/validate.h"

namespace xmesh::core {
namespace {

constexpr int64_t kVersion = 1;
constexpr std::string_view kPartialSumName = "partial_sum";

void writePairs(JsonWriter& json, const std::map<int64_t, int64_t>& pairs) {
  json.beginArray();
  for (const auto& [key, value] : pairs) {
    json.integers({key, value});
  }
  json.endArray();
}

void writeTopology(JsonWriter& json, const Topology& topology) {
  const LinkModel& links = topology.links();
  json.beginObject().name("host_of");
  writePairs(json, topology.hostOfRanks());
  json.name("nic_of_host");
  writePairs(json, topology.nicOfHosts());
  json.name("links").beginObject();
  json.name("nic_bytes_per_s").integer(links.nic_bytes_per_s).name("local_bytes_per_s").integer(links.local_bytes_per_s);
  json.name("latency_us").number(links.latency_us).name("message_us").number(links.message_us);
  json.name("local_latency_us").number(links.local_latency_us).name("is_measured").boolean(links.is_measured);
  json.endObject().endObject();
}

void writeBoxes(JsonWriter& json, const TensorSpec& spec) {
  json.beginObject().name("boxes").beginArray();
  for (const OwnedBox& owned : spec.boxes) {
    json.beginArray().beginArray();
    for (const Interval& interval : owned.box) {
      json.integers({interval.begin, interval.end});
    }
    json.endArray().integers(owned.ranks).endArray();
  }
  json.endArray().endObject();
}

void writeSpec(JsonWriter& json, const TensorSpec& spec) {
  if (spec.isBoxed()) {
    writeBoxes(json, spec);
    return;
  }
  json.beginObject().name("mesh_shape").integers(spec.mesh.shape()).name("ranks").integers(spec.mesh.ranks());
  json.name("placements").beginArray();
  for (const Placement& placement : spec.placements) {
    json.string(placement.str());
  }
  json.endArray().endObject();
}

void writeTables(JsonWriter& json, const ReshardingPlan& plan) {
  json.newLine().name("holders").beginArray();
  for (const Holders& holders : plan.holders) {
    json.beginArray();
    for (const std::vector<int64_t>& ranks : holders.contributions) {
      json.integers(ranks);
    }
    json.endArray();
  }
  json.endArray().newLine().name("needers").beginArray();
  for (const std::vector<int64_t>& ranks : plan.needers) {
    json.integers(ranks);
  }
  json.endArray().newLine().name("tasks").beginArray();
  for (const UnitTask& task : plan.tasks) {
    json.newLine().beginArray().integer(task.tensor).integer(task.holders).integer(task.needers).beginArray();
    for (const Interval& interval : task.box) {
      json.integers({interval.begin, interval.end});
    }
    json.endArray().endArray();
  }
  json.endArray();
}

std::map<int64_t, int64_t> readPairs(const JsonValue& value) {
  std::map<int64_t, int64_t> out;
  for (const JsonValue& pair : value.array()) {
    const std::vector<JsonValue>& items = pair.array(2);
    if (!out.try_emplace(items[0].integer(), items[1].integer()).second) {
      pair.fail(std::to_string(items[0].integer()) + " occurs twice");
    }
  }
  return out;
}

/// Runs `read`; what it finds wrong is reported where the value stands.
template <typename Read>
auto readAt(const JsonValue& value, Read read) {
  try {
    return read();
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    if (what.starts_with("JSON line ")) {
      throw;
    }
    value.fail(what);
  }
}

Topology readTopology(const JsonValue& value) {
  value.expectMembers({"host_of", "nic_of_host", "links"});
  const JsonValue& links = value.at("links");
  links.expectMembers({"nic_bytes_per_s", "local_bytes_per_s", "latency_us", "message_us", "local_latency_us", "is_measured"});
  LinkModel model;
  model.nic_bytes_per_s = links.at("nic_bytes_per_s").integer();
  model.local_bytes_per_s = links.at("local_bytes_per_s").integer();
  model.latency_us = links.at("latency_us").number();
  model.message_us = links.at("message_us").number();
  model.local_latency_us = links.at("local_latency_us").number();
  model.is_measured = links.at("is_measured").boolean();
  return readAt(value, [&] { return Topology(readPairs(value.at("host_of")), model, readPairs(value.at("nic_of_host"))); });
}

Box readBox(const JsonValue& value) {
  Box out;
  for (const JsonValue& interval : value.array()) {
    const std::vector<int64_t> ends = interval.integers();
    if (ends.size() != 2) {
      interval.fail("expected begin and end");
    }
    out.push_back({ends[0], ends[1]});
  }
  return out;
}

TensorSpec readSpec(const JsonValue& value, const std::vector<int64_t>& shape, const DType& dtype) {
  TensorSpec out;
  out.shape = shape;
  out.dtype = dtype;
  if (value.has("boxes")) {
    value.expectMembers({"boxes"});
    for (const JsonValue& owned : value.at("boxes").array()) {
      const std::vector<JsonValue>& items = owned.array(2);
      out.boxes.push_back({readBox(items[0]), items[1].integers()});
    }
    return out;
  }
  value.expectMembers({"mesh_shape", "ranks", "placements"});
  out.mesh = readAt(value, [&] { return Mesh(value.at("mesh_shape").integers(), value.at("ranks").integers()); });
  for (const JsonValue& placement : value.at("placements").array()) {
    out.placements.push_back(readAt(placement, [&] { return Placement::parse(placement.string()); }));
  }
  return out;
}

TensorPair readTensor(const JsonValue& value) {
  value.expectMembers({"shape", "dtype", "src", "dst"});
  const std::vector<int64_t> shape = value.at("shape").integers();
  const JsonValue& dtype_text = value.at("dtype");
  const DType dtype = readAt(dtype_text, [&] { return DType::parse(dtype_text.string()); });
  return {readSpec(value.at("src"), shape, dtype), readSpec(value.at("dst"), shape, dtype)};
}

UnitTask readTask(const JsonValue& value) {
  const std::vector<JsonValue>& items = value.array(4);
  UnitTask out{items[0].integer(), {}, items[1].integer(), items[2].integer()};
  for (const JsonValue& interval : items[3].array()) {
    const std::vector<JsonValue>& ends = interval.array(2);
    out.box.push_back({ends[0].integer(), ends[1].integer()});
  }
  return out;
}

/// The tables are redundant: they must be what the tensors decompose into.
void checkTables(const JsonValue& value, const ReshardingPlan& plan) {
  const std::vector<JsonValue>& holders = value.at("holders").array(plan.holders.size());
  for (size_t i = 0; i < holders.size(); ++i) {
    Holders read;
    for (const JsonValue& ranks : holders[i].array()) {
      read.contributions.push_back(ranks.integers());
    }
    if (read != plan.holders[i]) {
      holders[i].fail("these are not the holders that follow from the tensors");
    }
  }
  const std::vector<JsonValue>& needers = value.at("needers").array(plan.needers.size());
  for (size_t i = 0; i < needers.size(); ++i) {
    if (needers[i].integers() != plan.needers[i]) {
      needers[i].fail("these are not the needers that follow from the tensors");
    }
  }
  const std::vector<JsonValue>& tasks = value.at("tasks").array(plan.tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (readTask(tasks[i]) != plan.tasks[i]) {
      tasks[i].fail("this is not the task that follows from the tensors");
    }
  }
}

Message readMessage(const JsonValue& value) {
  const bool is_value = value.array().size() != 6;
  const std::vector<JsonValue>& items = value.array(is_value ? 5 : 6);
  const auto narrow = [&](size_t i) {
    const int64_t number = items[i].integer();
    if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
      items[i].fail(std::to_string(number) + " is no rank or contribution");
    }
    return static_cast<int32_t>(number);
  };
  Message out{items[0].integer(), items[1].integer(), items[2].integer(), narrow(3), narrow(4), 0, Payload::kValue};
  if (!is_value && items[5].kind() == JsonValue::Kind::kString) {
    if (items[5].string() != kPartialSumName) {
      items[5].fail("expected a contribution or \"" + std::string(kPartialSumName) + "\", got \"" + items[5].string() + "\"");
    }
    out.payload = Payload::kPartialSum;
  } else if (!is_value) {
    out.contribution = narrow(5);
    out.payload = Payload::kContribution;
  }
  return out;
}

}  // namespace

std::string planToJson(const ReshardingPlan& plan) {
  JsonWriter json;
  json.beginObject().newLine().name("version").integer(kVersion);
  json.newLine().name("strategy").string(plan.strategy);
  json.newLine().name("topology");
  writeTopology(json, plan.topology);
  json.newLine().name("tensors").beginArray();
  for (const TensorPair& pair : plan.tensors) {
    json.newLine().beginObject().name("shape").integers(pair.src.shape).name("dtype").string(pair.src.dtype.name).name("src");
    writeSpec(json, pair.src);
    json.name("dst");
    writeSpec(json, pair.dst);
    json.endObject();
  }
  json.endArray();
  writeTables(json, plan);
  json.newLine().name("lower_bound_bytes").integer(plan.lower_bound_bytes);
  json.newLine().name("lower_bound_seconds").number(plan.lower_bound_seconds);
  json.newLine().name("predicted_seconds").number(plan.predicted_seconds);
  json.newLine().name("messages").beginArray();
  for (const Message& message : plan.messages) {
    json.newLine().beginArray().integer(message.task).integer(message.begin).integer(message.end);
    json.integer(message.src_rank).integer(message.dst_rank);
    if (message.payload == Payload::kContribution) {
      json.integer(message.contribution);
    } else if (message.payload == Payload::kPartialSum) {
      json.string(kPartialSumName);
    }
    json.endArray();
  }
  json.endArray().endObject();
  return json.take() + "\n";
}

ReshardingPlan planFromJson(std::string_view text) {
  const JsonValue value = parseJson(text);
  const JsonValue& version = value.at("version");
  if (version.integer() != kVersion) {
    version.fail("expected version " + std::to_string(kVersion) + ", got " + std::to_string(version.integer()));
  }
  value.expectMembers({"version", "strategy", "topology", "tensors", "holders", "needers", "tasks", "lower_bound_bytes", "lower_bound_seconds",
                       "predicted_seconds", "messages"});
  ReshardingPlan plan;
  const JsonValue& strategy = value.at("strategy");
  plan.strategy = readAt(strategy, [&] { return parseStrategy(strategy.string()).str(); });
  plan.topology = readTopology(value.at("topology"));
  for (const JsonValue& tensor : value.at("tensors").array()) {
    plan.tensors.push_back(readTensor(tensor));
  }
  readAt(value.at("tensors"), [&] { checkReshard(plan.tensors, plan.topology); });
  decompose(plan);
  checkTables(value, plan);
  plan.lower_bound_bytes = value.at("lower_bound_bytes").integer();
  plan.lower_bound_seconds = value.at("lower_bound_seconds").number();
  plan.predicted_seconds = value.at("predicted_seconds").number();
  for (const JsonValue& message : value.at("messages").array()) {
    plan.messages.push_back(readMessage(message));
  }
  readAt(value.at("messages"), [&] { validatePlan(plan); });
  return plan;
}

}  // namespace xmesh::core
