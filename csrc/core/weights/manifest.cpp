#include "core/weights/manifest.h"

#include "core/error.h"
#include "core/json.h"

namespace xmesh::core {
namespace {

constexpr int64_t kVersion = 1;

void writeBox(JsonWriter& json, const Box& box) {
  json.beginArray();
  for (const Interval& interval : box) {
    json.integers({interval.begin, interval.end});
  }
  json.endArray();
}

Box readBox(const JsonValue& value) {
  Box out;
  for (const JsonValue& interval : value.array()) {
    const std::vector<int64_t> ends = interval.integers();
    if (ends.size() != 2 || ends[0] < 0 || ends[0] >= ends[1]) {
      interval.fail("expected begin and a greater end");
    }
    out.push_back({ends[0], ends[1]});
  }
  return out;
}

DType readType(const JsonValue& value) {
  try {
    return DType::parse(value.string());
  } catch (const InvalidArgument& error) {
    value.fail(error.what());
  }
}

HeldTensor readHeld(const JsonValue& value) {
  value.expectMembers({"name", "shape", "dtype", "boxes"});
  HeldTensor out{value.at("name").string(), value.at("shape").integers(), readType(value.at("dtype")), {}};
  for (const int64_t extent : out.shape) {
    if (extent < 0) {
      value.at("shape").fail("a dim cannot have the negative extent " + std::to_string(extent));
    }
  }
  for (const JsonValue& box : value.at("boxes").array()) {
    out.boxes.push_back(readBox(box));
  }
  return out;
}

}  // namespace

std::string manifestToJson(const Manifest& manifest) {
  JsonWriter json;
  json.beginObject().name("version").integer(kVersion).name("held").beginArray();
  for (const HeldTensor& tensor : manifest.held) {
    json.newLine().beginObject().name("name").string(tensor.name).name("shape").integers(tensor.shape).name("dtype").string(tensor.dtype.name);
    json.name("boxes").beginArray();
    for (const Box& box : tensor.boxes) {
      writeBox(json, box);
    }
    json.endArray().endObject();
  }
  json.endArray().name("needed").beginArray();
  for (const NeededBox& needed : manifest.needed) {
    json.newLine().beginObject().name("source").string(needed.source).name("box");
    writeBox(json, needed.box);
    json.name("dtype").string(needed.dtype.name).endObject();
  }
  json.endArray().endObject();
  return json.take();
}

Manifest manifestFromJson(std::string_view text) {
  const JsonValue value = parseJson(text);
  const JsonValue& version = value.at("version");
  if (version.integer() != kVersion) {
    version.fail("expected version " + std::to_string(kVersion) + ", got " + std::to_string(version.integer()));
  }
  value.expectMembers({"version", "held", "needed"});
  Manifest out;
  for (const JsonValue& tensor : value.at("held").array()) {
    out.held.push_back(readHeld(tensor));
  }
  for (const JsonValue& needed : value.at("needed").array()) {
    needed.expectMembers({"source", "box", "dtype"});
    out.needed.push_back({needed.at("source").string(), readBox(needed.at("box")), readType(needed.at("dtype"))});
  }
  return out;
}

}  // namespace xmesh::core
