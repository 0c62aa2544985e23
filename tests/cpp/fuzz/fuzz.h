#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// What each target defines: takes bytes that a stranger may send. It must refuse them with the exception that its room promises, or take them; it
/// ends the process where a promise is broken. With libFuzzer the bytes are searched for, else those of the corpus are replayed (replay.cpp).
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace xmesh::fuzz {

inline std::string_view textOf(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }

/// Ends the process unless the promise holds.
inline void promise(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "broken promise: %s\n", what);
    std::abort();
  }
}

}  // namespace xmesh::fuzz
