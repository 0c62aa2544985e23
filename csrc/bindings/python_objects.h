#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace xmesh::bindings {

/// Whether Python can be called: it has begun and does not end. A thread that asks for the GIL of an interpreter that ends is itself ended.
bool interpreterIsThere();

/// Throws what Python's signal handlers raise, on the main thread. Takes the GIL.
void checkSignals();

/// Holds a Python callable whose last reference may go on any thread, or after the interpreter.
std::shared_ptr<pybind11::object> holdCallable(pybind11::object callable);

}  // namespace xmesh::bindings
