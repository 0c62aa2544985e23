#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace xmesh::c10d_backend {

inline std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string textOf(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// A client of the same store for another thread: one client serves one request at a time, and its caller may wait in it for long. The store itself
/// where no second client can be had.
c10::intrusive_ptr<::c10d::Store> ownClient(const c10::intrusive_ptr<::c10d::Store>& store);

/// The secret, of 16 bytes, that all who ask this store present to each other: the first one makes it.
std::string agreeOnToken(::c10d::Store& store);

}  // namespace xmesh::c10d_backend
