// Whether the hyper-parameters of optimizers, and which gradients exist, are what they were; for `Snapshot` in
// recovery/swift_recovery/state/snapshot.py, which asks twice in every iteration, with cold caches, and mostly hears yes.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

namespace swift_agent {

namespace py = pybind11;

class Watch {
 public:
  // Raises TypeError for what is no tensor.
  Watch(const py::list& parameters, const py::list& optimizers) : name_("param_groups") {
    for (const py::handle parameter : parameters) {
      if (!THPVariable_Check(parameter.ptr())) throw py::type_error("a parameter is not a tensor");
      parameters_.push_back(THPVariable_Unpack(parameter.ptr()));
    }
    for (const py::handle optimizer : optimizers) optimizers_.push_back(py::reinterpret_borrow<py::object>(optimizer));
    has_gradient_.resize(parameters_.size());
  }

  // From now on `is_same` compares with what there is now. The caller vouches for it that no value of a group but its
  // list of parameters can be changed in place.
  void keep() {
    items_.clear();
    for (const auto& optimizer : optimizers_) {
      for (const py::handle group : groups_of(optimizer)) {
        items_.emplace_back();  // a group begins
        for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(group)) {
          items_.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
        }
      }
    }
    for (std::size_t index = 0; index < parameters_.size(); ++index) has_gradient_[index] = has_gradient(index);
    kept_ = true;
  }

  void forget() {
    items_.clear();
    kept_ = false;
  }

  // False as long as nothing was kept. Compares objects, not values: a False may be wrong, a True is not.
  bool is_same() const {
    if (!kept_) return false;
    // What is looked at lies all over the memory: let it come from there all at once.
    for (const auto& parameter : parameters_) __builtin_prefetch(parameter.unsafeGetTensorImpl());
    std::size_t next = 0;
    for (const auto& optimizer : optimizers_) {
      for (const py::handle group : groups_of(optimizer)) {
        if (next == items_.size() || items_[next++].first) return false;
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t at = 0;
        while (PyDict_Next(group.ptr(), &at, &key, &value)) {
          if (next == items_.size() || items_[next].first.ptr() != key || items_[next].second.ptr() != value) return false;
          ++next;
        }
      }
    }
    if (next != items_.size()) return false;
    for (const auto& parameter : parameters_) __builtin_prefetch(parameter.unsafeGetTensorImpl()->autograd_meta());
    for (std::size_t index = 0; index < parameters_.size(); ++index) {
      if (has_gradient_[index] != has_gradient(index)) return false;
    }
    return true;
  }

 private:
  py::list groups_of(const py::object& optimizer) const { return optimizer.attr(name_); }

  bool has_gradient(std::size_t index) const {
    // Not Tensor::grad(), which may warn. A parameter that was frozen from the start has nothing of autograd.
    const auto* of_autograd = std::as_const(*parameters_[index].unsafeGetTensorImpl()).autograd_meta();
    return of_autograd != nullptr && of_autograd->grad().defined();
  }

  const py::str name_;
  std::vector<at::Tensor> parameters_;
  std::vector<py::object> optimizers_;
  std::vector<std::pair<py::object, py::object>> items_;
  std::vector<char> has_gradient_;
  bool kept_ = false;
};

inline void bind_watch(py::module_& m) {
  py::class_<Watch>(m, "Watch")
      .def(py::init<const py::list&, const py::list&>(), py::arg("parameters"), py::arg("optimizers"))
      .def("keep", &Watch::keep)
      .def("forget", &Watch::forget)
      .def("is_same", &Watch::is_same);
}

}  // namespace swift_agent
