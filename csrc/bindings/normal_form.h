#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace xmesh::bindings {

/// Numbers for Python objects: equal ones have equal numbers, as long as they are held. With the GIL.
class Numbers {
 public:
  /// A process names no more things than this in calls that it repeats; past it all are forgotten, and known forms with them.
  static constexpr size_t kMost = 1 << 16;

  /// Of this object, and of no other one.
  std::optional<int64_t> ofObject(PyObject* object);
  /// Of all objects whose `value(object)` is equal. std::nullopt for what has no hash.
  template <class Value>
  std::optional<int64_t> ofValue(PyObject* object, const Value& value) {
    if (const auto found = of_object_.find(object); found != of_object_.end()) {
      return found->second;
    }
    return ofEqual(object, value(object));
  }

 private:
  std::optional<int64_t> ofEqual(PyObject* object, const pybind11::object& value);
  int64_t hold(PyObject* object);
  void makeRoom();

  std::unordered_map<PyObject*, int64_t> of_object_;
  std::vector<pybind11::object> held_;
  pybind11::dict of_value_;
  int64_t next_ = 0;
};

/// A call's arguments as they were walked.
struct NormalForm {
  std::string key;
  std::vector<pybind11::object> leaves;  ///< of the tensors' container, in order: tensors, specs and what is passed through
  std::vector<pybind11::object> outs;    ///< leaves of the container of outputs
};

/// Turns the arguments of reshards into keys: calls of equal keys move the same tensors the same way. Reads what decides a plan of each tensor
/// (global shape, dtype, mesh, placements, whether it requires a gradient), and the names in containers; no data. With the GIL.
class NormalForms {
 public:
  NormalForms();
  /// std::nullopt for arguments that have a member of a kind that is not known here, among them all that a call refuses.
  std::optional<NormalForm> of(pybind11::handle xs, pybind11::handle dst_mesh, pybind11::handle dst_placements, pybind11::handle out,
                               pybind11::handle options, bool with_grad);

 private:
  class Walk;

  Numbers numbers_;
  pybind11::object dtensor_, spec_, mesh_, device_mesh_, placement_, ordered_dict_;
};

/// The dicts, lists and tuples of `container` made anew around other leaves.
pybind11::object rebuilt(pybind11::handle container, const std::vector<pybind11::object>& leaves);

}  // namespace xmesh::bindings
