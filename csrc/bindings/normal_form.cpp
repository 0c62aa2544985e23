#include "bindings/normal_form.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace xmesh::bindings {
namespace {

constexpr int kDeepest = 64;  ///< containers within containers

/// What follows in a key.
enum Kind : int64_t { kDict, kOrderedDict, kList, kTuple, kTensor, kSpec, kMesh, kDeviceMesh, kPlacement, kPassed, kEnd };

/// An attribute's name, made once.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  [[nodiscard]] py::object of(PyObject* object) const {
    PyObject* const found = PyObject_GetAttr(object, text_);
    if (found == nullptr) {
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(found);
  }
  /// None where it has no such attribute.
  [[nodiscard]] py::object orNone(PyObject* object) const {
    PyObject* const found = PyObject_GetAttr(object, text_);
    if (found == nullptr) {
      PyErr_Clear();
      return py::none();
    }
    return py::reinterpret_steal<py::object>(found);
  }

 private:
  PyObject* text_;
};

bool isInstance(PyObject* object, const py::object& type) {
  if (Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(type.ptr())) {
    return true;
  }
  const int found = PyObject_IsInstance(object, type.ptr());
  if (found < 0) {
    PyErr_Clear();
  }
  return found == 1;
}

bool isExactly(PyObject* object, const py::object& type) { return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(type.ptr()); }

/// What is passed through is told apart by its type only, and that for Python's own types.
std::optional<int64_t> passedThrough(PyObject* object) {
  const bool is_of_type[] = {object == Py_None, PyBool_Check(object) != 0, PyLong_CheckExact(object) != 0, PyFloat_CheckExact(object) != 0,
                             PyUnicode_CheckExact(object) != 0};
  const auto* const found = std::find(std::begin(is_of_type), std::end(is_of_type), true);
  return found == std::end(is_of_type) ? std::nullopt : std::optional<int64_t>(found - std::begin(is_of_type));
}

py::object itself(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

py::object withType(PyObject* object) {
  return py::make_tuple(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(object))), py::reinterpret_borrow<py::object>(object));
}

std::vector<std::pair<py::object, py::object>> entriesOf(PyObject* dict) {
  std::vector<std::pair<py::object, py::object>> out;
  if (PyDict_CheckExact(dict)) {
    out.reserve(static_cast<size_t>(PyDict_Size(dict)));
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
      out.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    }
    return out;
  }
  for (const py::handle entry : py::handle(dict).attr("items")()) {  // an OrderedDict has an order of its own
    const auto pair = py::reinterpret_borrow<py::tuple>(entry);
    out.emplace_back(pair[0], pair[1]);
  }
  return out;
}

}  // namespace

void Numbers::makeRoom() {
  if (held_.size() < kMost) {
    return;
  }
  of_object_.clear();
  held_.clear();
  of_value_ = py::dict();
}

int64_t Numbers::hold(PyObject* object) {
  makeRoom();
  held_.push_back(py::reinterpret_borrow<py::object>(object));
  of_object_.emplace(object, next_);
  return next_++;
}

std::optional<int64_t> Numbers::ofObject(PyObject* object) {
  const auto found = of_object_.find(object);
  return found != of_object_.end() ? found->second : hold(object);
}

std::optional<int64_t> Numbers::ofEqual(PyObject* object, const py::object& value) {
  if (PyObject* const found = PyDict_GetItemWithError(of_value_.ptr(), value.ptr()); found != nullptr) {
    return PyLong_AsLongLong(found);
  }
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  const int64_t number = hold(object);
  of_value_[value] = py::int_(number);
  return number;
}

class NormalForms::Walk {
 public:
  Walk(NormalForms& forms, bool with_grad) : forms_(forms), with_grad_(with_grad) {}

  /// False where something is not known.
  bool add(PyObject* object, std::vector<py::object>* leaves, int depth = 0) {
    if (depth > kDeepest) {
      return false;
    }
    if (PyDict_CheckExact(object) || isExactly(object, forms_.ordered_dict_)) {
      return addDict(object, leaves, depth);
    }
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
      put(PyList_CheckExact(object) ? kList : kTuple);
      put(PySequence_Fast_GET_SIZE(object));
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i));
        if (!add(item.ptr(), leaves, depth + 1)) {
          return false;
        }
      }
      return true;
    }
    if (leaves != nullptr) {
      leaves->push_back(py::reinterpret_borrow<py::object>(object));
    }
    return addLeaf(object, /*is_alone=*/depth == 0);
  }

  bool addOptions(PyObject* options) { return addNumber(forms_.numbers_.ofValue(options, itself)); }

  /// Seven bits a byte, the lowest first; the last byte of a number has its highest bit clear.
  void put(int64_t number) {
    auto rest = static_cast<uint64_t>(number);
    for (; rest >= 0x80; rest >>= 7) {
      key_ += static_cast<char>(rest | 0x80);
    }
    key_ += static_cast<char>(rest);
  }

  std::string key() && { return std::move(key_); }

 private:
  bool addNumber(std::optional<int64_t> number) {
    if (number.has_value()) {
      put(*number);
    }
    return number.has_value();
  }

  bool addDict(PyObject* object, std::vector<py::object>* leaves, int depth) {
    const auto entries = entriesOf(object);
    put(PyDict_CheckExact(object) ? kDict : kOrderedDict);
    put(static_cast<int64_t>(entries.size()));
    for (const auto& [key, value] : entries) {
      const bool is_name = PyUnicode_CheckExact(key.ptr()) || PyLong_CheckExact(key.ptr());
      if (!is_name || !addNumber(forms_.numbers_.ofValue(key.ptr(), withType)) || !add(value.ptr(), leaves, depth + 1)) {
        return false;
      }
    }
    return true;
  }

  bool addLeaf(PyObject* object, bool is_alone) {
    if (isExactly(object, forms_.dtensor_)) {
      return addTensor(object);
    }
    if (isExactly(object, forms_.spec_)) {
      return addSpec(object);
    }
    if (isInstance(object, forms_.placement_)) {
      put(kPlacement);
      return addPlacement(object);
    }
    if (isExactly(object, forms_.mesh_) || isInstance(object, forms_.device_mesh_)) {
      return addMesh(object, is_alone);
    }
    put(kPassed);
    return addNumber(passedThrough(object));
  }

  /// Results lie on the very DeviceMesh that was given. Where one is for all results the caller sees to that, so that equal ones do here; of several,
  /// it is this one, as it is of a source that gets a gradient. Of a Mesh, ranks and device are all there is.
  bool addMesh(PyObject* object, bool takes_equal = true) {
    static const Name shape("shape"), ranks("ranks"), device_type("device_type");
    if (!isExactly(object, forms_.mesh_)) {
      if (!isInstance(object, forms_.device_mesh_)) {
        return false;
      }
      put(kDeviceMesh);
      put(static_cast<int64_t>(takes_equal));
      return addNumber(takes_equal ? forms_.numbers_.ofValue(object, withType) : forms_.numbers_.ofObject(object));
    }
    put(kMesh);
    return addNumber(forms_.numbers_.ofValue(
        object, [&](PyObject* mesh) { return py::make_tuple(forms_.mesh_, shape.of(mesh), ranks.of(mesh), device_type.of(mesh)); }));
  }

  bool addPlacement(PyObject* object) { return addNumber(forms_.numbers_.ofValue(object, withType)); }

  bool addPlacements(const py::object& placements) {
    if (!PyTuple_CheckExact(placements.ptr())) {
      return false;
    }
    put(PyTuple_GET_SIZE(placements.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(placements.ptr()); ++i) {
      PyObject* const placement = PyTuple_GET_ITEM(placements.ptr(), i);
      if (!isInstance(placement, forms_.placement_) || !addPlacement(placement)) {
        return false;
      }
    }
    return true;
  }

  bool addTensor(PyObject* object) {
    static const Name spec("_spec"), mesh("mesh"), placements("placements"), shard_order("shard_order");
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      return false;
    }
    put(kTensor);
    put(static_cast<int64_t>(tensor.scalar_type()));
    const bool wants_grad = with_grad_ && tensor.requires_grad();
    put(static_cast<int64_t>(wants_grad));
    put(tensor.dim());
    for (const int64_t extent : tensor.sizes()) {
      put(extent);
    }
    const py::object found = spec.of(object);
    return addMesh(mesh.of(found.ptr()).ptr(), /*takes_equal=*/!wants_grad) && addPlacements(placements.of(found.ptr())) &&
           addNumber(forms_.numbers_.ofValue(shard_order.orNone(found.ptr()).ptr(), withType));
  }

  bool addSpec(PyObject* object) {
    static const Name shape("shape"), dtype("dtype"), mesh("mesh"), placements("placements"), requires_grad("requires_grad");
    const py::object extents = shape.of(object);
    const py::object type = dtype.of(object);
    if (!PyTuple_Check(extents.ptr()) || !THPDtype_Check(type.ptr())) {
      return false;
    }
    put(kSpec);
    put(static_cast<int64_t>(reinterpret_cast<THPDtype*>(type.ptr())->scalar_type));
    put(static_cast<int64_t>(with_grad_ && PyObject_IsTrue(requires_grad.of(object).ptr()) == 1));
    put(PyTuple_GET_SIZE(extents.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(extents.ptr()); ++i) {
      put(PyLong_AsLongLong(PyTuple_GET_ITEM(extents.ptr(), i)));
    }
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
    return addMesh(mesh.of(object).ptr()) && addPlacements(placements.of(object));
  }

  NormalForms& forms_;
  const bool with_grad_;
  std::string key_;
};

NormalForms::NormalForms() {
  const py::module_ tensors = py::module_::import("torch.distributed.tensor");
  const py::module_ specs = py::module_::import("torch_xmesh.spec");
  dtensor_ = tensors.attr("DTensor");
  placement_ = tensors.attr("Placement");
  device_mesh_ = py::module_::import("torch.distributed.device_mesh").attr("DeviceMesh");
  spec_ = specs.attr("Spec");
  mesh_ = specs.attr("Mesh");
  ordered_dict_ = py::module_::import("collections").attr("OrderedDict");
}

std::optional<NormalForm> NormalForms::of(py::handle xs, py::handle dst_mesh, py::handle dst_placements, py::handle out, py::handle options,
                                          bool with_grad) {
  NormalForm found;
  Walk walk(*this, with_grad);
  bool is_known = walk.add(xs.ptr(), &found.leaves);
  for (const py::handle rest : {dst_mesh, dst_placements}) {
    walk.put(kEnd);
    is_known = is_known && walk.add(rest.ptr(), nullptr);
  }
  walk.put(kEnd);
  is_known = is_known && walk.add(out.ptr(), &found.outs) && walk.addOptions(options.ptr());
  if (!is_known) {
    return std::nullopt;
  }
  found.key = std::move(walk).key();
  return found;
}

namespace {

constexpr const char* kChanged = "the container of tensors was changed while they were resharded";

using Leaf = std::vector<py::object>::const_iterator;

py::object rebuiltFrom(PyObject* container, Leaf& leaf, const Leaf& end) {
  if (PyDict_Check(container)) {
    const py::object out = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(container)))();
    for (const auto& [key, value] : entriesOf(container)) {
      out[key] = rebuiltFrom(value.ptr(), leaf, end);
    }
    return out;
  }
  if (PyList_CheckExact(container) || PyTuple_CheckExact(container)) {
    py::list items;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(container); ++i) {
      items.append(rebuiltFrom(PySequence_Fast_GET_ITEM(container, i), leaf, end));
    }
    return PyList_CheckExact(container) ? py::object(std::move(items)) : py::object(py::tuple(items));
  }
  if (leaf == end) {
    throw std::runtime_error(kChanged);
  }
  return *leaf++;
}

}  // namespace

py::object rebuilt(py::handle container, const std::vector<py::object>& leaves) {
  auto leaf = leaves.begin();
  py::object out = rebuiltFrom(container.ptr(), leaf, leaves.end());
  if (leaf != leaves.end()) {
    throw std::runtime_error(kChanged);
  }
  return out;
}

}  // namespace xmesh::bindings
