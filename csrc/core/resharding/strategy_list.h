#pragma once

#include "core/resharding/strategy.h"

namespace xmesh::core {

// One function per strategy, each in the file of its name; strategies() in strategy.cpp lists them.

/// One message per needer and slice from one of its holders.
StrategyInfo sendRecvStrategy();
/// AlpaComm (MLSys'23, section 3): one sender per unit task, a chunked chain over the receiving hosts and over the devices of each.
StrategyInfo broadcastStrategy();
/// Each receiving host gets a slice once, in parts over its devices, which gather them locally.
StrategyInfo localAllgatherStrategy();
/// A slice goes in parts to all its receivers, which gather them in a ring.
StrategyInfo globalAllgatherStrategy();
/// Alpa's rule: the all-gather over all receivers where the slice divides by their number, else send_recv.
StrategyInfo alpaStrategy();

/// Slices split over all their holders, chunks passed on by receivers, in an order decided chunk by chunk.
StrategyInfo stripedStrategy();

}  // namespace xmesh::core
