#include "pipeline/collective_watch.h"

#include <array>
#include <memory>
#include <string_view>

namespace xmesh::pipeline {
namespace {

thread_local bool has_seen = false;

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& function) {
  constexpr std::array<std::string_view, 4> kPrefixes = {"c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::"};
  const std::string_view name = function.name();
  for (const std::string_view prefix : kPrefixes) {
    has_seen = has_seen || name.substr(0, prefix.size()) == prefix;
  }
  return nullptr;
}

}  // namespace

CollectiveWatch::CollectiveWatch() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&look).scopes({at::RecordScope::FUNCTION}))) {
  has_seen = false;
}

CollectiveWatch::~CollectiveWatch() { at::removeCallback(handle_); }

bool CollectiveWatch::hasSeen() const { return has_seen; }

}  // namespace xmesh::pipeline
