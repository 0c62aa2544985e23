#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace xmesh::bindings {

/// Runs what may call into autograd, without the GIL; a Python exception raised inside becomes that exception.
template <class Function>
void withoutGil(Function&& function) {
  try {
    const pybind11::gil_scoped_release no_gil;
    std::forward<Function>(function)();
  } catch (python_error& error) {
    error.restore();
    throw pybind11::error_already_set();
  }
}

}  // namespace xmesh::bindings
