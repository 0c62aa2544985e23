// What a C++ user of the device does, for tests: generic c10 and c10d calls only, on a thread that Python does not know.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emu {

// Exchanges with the other of two ranks on a plain thread; empty, or what was wrong. The caller may hold Python's lock.
std::string exchangeOnPlainThread(const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace emu
