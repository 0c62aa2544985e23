#pragma once

#include <optional>
#include <string>

#include "cuda/library.h"

namespace xmesh::cuda {

struct LoadedLibrary {
  std::optional<Library> library;
  std::string reason;  ///< why there is none
};

/// `_cuda_kernels.so` in the folder of the binary that this function is in. It is loaded once, when first asked for, and stays.
const LoadedLibrary& loadedLibrary();

/// The library in a file.
LoadedLibrary loadLibrary(const std::string& path);

}  // namespace xmesh::cuda
