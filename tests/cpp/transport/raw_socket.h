#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/socket.h"
#include "transport/tcp/frame.h"

namespace xmesh::transport::test {

/// A blocking connection to `address`.
Fd rawConnect(const std::string& address);
/// A socket bound to a free port of 127.0.0.1 that does not listen yet.
Fd rawBind();
/// Writes everything; false when the other end is gone.
bool rawWrite(const Fd& fd, std::string_view bytes);
/// Reads until `num_bytes` have come or the other end is gone.
std::string rawRead(const Fd& fd, size_t num_bytes);
/// Waits until the other end has closed.
bool isClosedByOther(const Fd& fd);
std::string helloBytes(const Hello& hello);
std::string headerBytes(const FrameHeader& header);
/// The descriptor of this process's socket that is connected to `address`; -1 when there is none.
int findSocketTo(const std::string& address);
/// Number of rings that this process has mapped.
size_t countMappedRings();
/// Number of open descriptors and of threads of this process.
size_t countEntries(const std::string& directory);

}  // namespace xmesh::transport::test
