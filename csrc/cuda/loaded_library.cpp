#include "cuda/loaded_library.h"

#include <dlfcn.h>
#include <unistd.h>

namespace xmesh::cuda {
namespace {

template <typename Function>
bool find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

std::string pathBesideThis() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<const void*>(&loadedLibrary), &here) == 0 || here.dli_fname == nullptr) {
    return "_cuda_kernels.so";
  }
  const std::string path = here.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "_cuda_kernels.so";
}

}  // namespace

LoadedLibrary loadLibrary(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) {
    return {std::nullopt, "built without nvcc"};
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    return {std::nullopt, error != nullptr ? error : "cannot load " + path};
  }
  Library found;
  const bool is_whole = find(handle, "xmesh_cuda_copy", found.copy) && find(handle, "xmesh_cuda_reduce", found.reduce) &&
                        find(handle, "xmesh_cuda_load", found.load) && find(handle, "xmesh_cuda_look", found.look) &&
                        find(handle, "xmesh_cuda_error_text", found.error_text) && find(handle, "xmesh_cuda_architectures", found.architectures);
  return is_whole ? LoadedLibrary{found, ""} : LoadedLibrary{std::nullopt, path + " is of another version"};
}

const LoadedLibrary& loadedLibrary() {
  static const LoadedLibrary loaded = loadLibrary(pathBesideThis());
  return loaded;
}

}  // namespace xmesh::cuda
