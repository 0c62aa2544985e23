#pragma once

#include <string>
#include <vector>

namespace xmesh::core {

/// The parts in one text, with a separator between them.
inline std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (const std::string& part : parts) {
    out += (out.empty() ? "" : separator) + part;
  }
  return out;
}

}  // namespace xmesh::core
