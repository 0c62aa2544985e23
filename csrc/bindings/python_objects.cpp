#include "bindings/python_objects.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace py = pybind11;

namespace xmesh::bindings {

bool interpreterIsThere() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

void checkSignals() {
  const bool is_main_thread = ::syscall(SYS_gettid) == ::getpid();  // on others Python looks at no signal
  if (is_main_thread && interpreterIsThere()) {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

std::shared_ptr<py::object> holdCallable(py::object callable) {
  return {new py::object(std::move(callable)), [](py::object* held) {
            if (!interpreterIsThere()) {
              static_cast<void>(held->release());
              return;
            }
            const py::gil_scoped_acquire locked;
            delete held;
          }};
}

}  // namespace xmesh::bindings
