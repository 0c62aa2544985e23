#pragma once

namespace xmesh::runtime {

/// Sets what threads call that wait for peers, about five times a second: it throws where the wait shall end (Python has got a signal). Null:
/// nothing. Process-wide, as signals are. Any thread.
void setInterruptCheck(void (*check)());
/// Calls it.
void checkInterrupts();

}  // namespace xmesh::runtime
