#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace xmesh::transport {

inline constexpr uint32_t kMaxTracks = 256;

/// What messages belong to: one of the tracks (fewer than kMaxTracks) of one call. Messages of one track between two ranks keep their order; those of
/// other tracks may overtake them. The caller chooses both numbers, alike on every rank, and never uses a pair again on one transport.
struct OperationId {
  uint64_t call = 0;
  uint32_t track = 0;

  constexpr OperationId() = default;
  /// A call without tracks is its first one.
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr OperationId(uint64_t of_call, uint32_t of_track = 0) : call(of_call), track(of_track) {}
  auto operator<=>(const OperationId&) const = default;
  /// "7, track 2": for texts.
  std::string str() const { return std::to_string(call) + ", track " + std::to_string(track); }
};

}  // namespace xmesh::transport

template <>
struct std::hash<xmesh::transport::OperationId> {
  size_t operator()(const xmesh::transport::OperationId& operation) const noexcept {
    return static_cast<size_t>(operation.call * 0x9e3779b97f4a7c15ULL + operation.track);
  }
};
