#include "c10d/stores.h"

#include <random>

namespace xmesh::c10d_backend {

c10::intrusive_ptr<::c10d::Store> ownClient(const c10::intrusive_ptr<::c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

std::string agreeOnToken(::c10d::Store& store) {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 16; ++i) {
    token += static_cast<char>(device() & 0xffU);
  }
  return textOf(store.compareSet("token", std::vector<uint8_t>{}, bytesOf(token)));
}

}  // namespace xmesh::c10d_backend
