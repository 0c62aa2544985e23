#include "runtime/interrupts.h"

#include <atomic>

namespace xmesh::runtime {
namespace {

std::atomic<void (*)()> interrupt_check = nullptr;

}  // namespace

void setInterruptCheck(void (*check)()) { interrupt_check = check; }

void checkInterrupts() {
  if (void (*check)() = interrupt_check) {
    check();
  }
}

}  // namespace xmesh::runtime
