#include "core/weights/match.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/resharding/box_refinement.h"

namespace xmesh::core {
namespace {

constexpr size_t kMaxListed = 20;

/// What is wrong, told together.
class Mistakes {
 public:
  void add(const std::string& text) {
    if (texts_.size() < kMaxListed) {
      texts_.push_back(text);
    }
    ++count_;
  }
  void throwIfAny() const {
    if (count_ == 0) {
      return;
    }
    std::string out = "the weights do not fit:";
    for (const std::string& text : texts_) {
      out += "\n  " + text;
    }
    throw InvalidArgument(out + (count_ > kMaxListed ? "\n  ... and " + std::to_string(count_ - kMaxListed) + " more" : ""));
  }

 private:
  std::vector<std::string> texts_;
  size_t count_ = 0;
};

/// A source's tensor, of all its members.
struct Source {
  std::vector<int64_t> shape;
  DType dtype;
  int64_t first_member = 0;
  std::vector<OwnedBox> boxes;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> owners;  ///< by box: member, and which of its boxes
};

/// Adds a member's box to those that are equal, or as another one.
size_t addBox(std::vector<OwnedBox>& boxes, const Box& box, int64_t member) {
  const auto same = std::find_if(boxes.begin(), boxes.end(), [&](const OwnedBox& owned) { return owned.box == box; });
  if (same != boxes.end()) {
    same->ranks.push_back(member);
    return static_cast<size_t>(same - boxes.begin());
  }
  boxes.push_back({box, {member}});
  return boxes.size() - 1;
}

bool isInside(const Box& box, const std::vector<int64_t>& shape) {
  bool out = box.size() == shape.size();
  for (size_t dim = 0; out && dim < box.size(); ++dim) {
    out = box[dim].end <= shape[dim];
  }
  return out;
}

bool overlap(const Box& left, const Box& right) {
  for (size_t dim = 0; dim < left.size(); ++dim) {
    if (left[dim].end <= right[dim].begin || right[dim].end <= left[dim].begin) {
      return false;
    }
  }
  return true;
}

std::map<std::string, Source> sourcesOf(const std::map<int64_t, Manifest>& members, Mistakes& mistakes) {
  std::map<std::string, Source> out;
  for (const auto& [member, manifest] : members) {
    for (const HeldTensor& held : manifest.held) {
      Source& source = out.try_emplace(held.name, Source{held.shape, held.dtype, member, {}, {}}).first->second;
      if (source.shape != held.shape || source.dtype != held.dtype) {
        mistakes.add("'" + held.name + "' is " + source.dtype.name + shapeStr(source.shape) + " on member " + std::to_string(source.first_member) +
                     ", " + held.dtype.name + shapeStr(held.shape) + " on member " + std::to_string(member));
        continue;
      }
      for (size_t i = 0; i < held.boxes.size(); ++i) {
        if (!isInside(held.boxes[i], held.shape)) {
          mistakes.add("'" + held.name + "' has the shape " + shapeStr(held.shape) + ", member " + std::to_string(member) + " holds " +
                       boxStr(held.boxes[i]));
          continue;
        }
        const size_t box = addBox(source.boxes, held.boxes[i], member);
        source.owners.resize(source.boxes.size());
        source.owners[box].emplace_back(member, static_cast<int64_t>(i));
      }
    }
  }
  return out;
}

/// One tensor of the match in the making.
struct Wanted {
  std::vector<OwnedBox> boxes;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> owners;
};

/// By name, type and layer: of a member's boxes that overlap each is in a layer of its own.
using WantedTensors = std::map<std::tuple<std::string, std::string, int64_t>, Wanted>;

/// Finds the place of a member's boxes of one name and type.
class Layers {
 public:
  Layers(int64_t member, const std::vector<NeededBox>& needed, Match& out) : member_(member), needed_(needed), out_(out) {}

  void add(int64_t index, WantedTensors& wanted) {
    const NeededBox& box = needed_[static_cast<size_t>(index)];
    std::vector<std::vector<int64_t>>& layers = layers_[{box.source, box.dtype.name}];
    for (const std::vector<int64_t>& layer : layers) {
      for (const int64_t other : layer) {
        if (needed_[static_cast<size_t>(other)].box == box.box) {
          out_.copied[member_].emplace_back(other, index);
          return;
        }
      }
    }
    size_t layer = 0;
    const auto meets = [&](int64_t other) { return overlap(needed_[static_cast<size_t>(other)].box, box.box); };
    while (layer < layers.size() && std::any_of(layers[layer].begin(), layers[layer].end(), meets)) {
      ++layer;
    }
    layers.resize(std::max(layers.size(), layer + 1));
    layers[layer].push_back(index);
    Wanted& tensor = wanted[{box.source, box.dtype.name, static_cast<int64_t>(layer)}];
    const size_t at = addBox(tensor.boxes, box.box, member_);
    tensor.owners.resize(tensor.boxes.size());
    tensor.owners[at].emplace_back(member_, index);
  }

 private:
  const int64_t member_;
  const std::vector<NeededBox>& needed_;
  Match& out_;
  std::map<std::pair<std::string, std::string>, std::vector<std::vector<int64_t>>> layers_;
};

std::string quoted(const std::string& name) { return "'" + name + "'"; }

bool fits(const NeededBox& needed, int64_t member, const std::map<std::string, Source>& sources, Mistakes& mistakes) {
  const std::string who = "member " + std::to_string(member) + " needs " + boxStr(needed.box) + " of " + quoted(needed.source);
  const auto source = sources.find(needed.source);
  if (source == sources.end()) {
    mistakes.add(who + ", which the source does not have");
    return false;
  }
  if (!isInside(needed.box, source->second.shape)) {
    mistakes.add(who + ", whose shape is " + shapeStr(source->second.shape));
    return false;
  }
  return true;
}

}  // namespace

Match match(const std::map<int64_t, Manifest>& sources, const std::map<int64_t, Manifest>& replicas) {
  Mistakes mistakes;
  const std::map<std::string, Source> held = sourcesOf(sources, mistakes);
  Match out;
  WantedTensors wanted;
  for (const auto& [member, manifest] : replicas) {
    Layers layers(member, manifest.needed, out);
    for (size_t i = 0; i < manifest.needed.size(); ++i) {
      if (fits(manifest.needed[i], member, held, mistakes)) {
        layers.add(static_cast<int64_t>(i), wanted);
      }
    }
  }
  for (auto& [key, tensor] : wanted) {
    const auto& [name, dtype, layer] = key;
    const Source& source = held.at(name);
    const auto index = static_cast<int64_t>(out.tensors.size());
    const DType type = DType::parse(dtype);
    try {
      refineBoxes(source.shape, source.boxes, tensor.boxes);
    } catch (const InvalidArgument& error) {
      mistakes.add(quoted(name) + ": " + error.what());
    }
    out.tensors.push_back({{source.shape, type, {}, {}, source.boxes}, {source.shape, type, {}, {}, std::move(tensor.boxes)}});
    out.names.push_back(name);
    for (const std::vector<std::pair<int64_t, int64_t>>& owners : source.owners) {
      for (const auto& [member, box] : owners) {
        out.sent[member].push_back({index, box});
      }
    }
    for (const std::vector<std::pair<int64_t, int64_t>>& owners : tensor.owners) {
      for (const auto& [member, box] : owners) {
        out.received[member].push_back({index, box});
      }
    }
  }
  mistakes.throwIfAny();
  return out;
}

}  // namespace xmesh::core
