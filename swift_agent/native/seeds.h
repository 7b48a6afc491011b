// Seeds every generator of the process in one call; see SeedSeries in swift_recovery/randomness.py, whose function
// seed_generators does the same in Python. That one runs twice in every iteration, right after the iteration has emptied
// the caches, and there what counts is how little it touches.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>

namespace swift_agent {

namespace py = pybind11;

class Seeder {
 public:
  // `numpy_generator`: NumPy's global MT19937, whose address of its state is documented as `ctypes.state_address`.
  // The functions are those by which Python seeds `random` (`python_random`) and NumPy.
  Seeder(py::object numpy_generator, py::object numpy_seed, py::object python_random, py::object python_seed)
      : numpy_(reinterpret_cast<NumpyState*>(
            numpy_generator.attr("ctypes").attr("state_address").cast<std::uintptr_t>())),
        numpy_generator_(std::move(numpy_generator)),
        numpy_seed_(std::move(numpy_seed)),
        python_random_(std::move(python_random)),
        python_seed_(std::move(python_seed)) {}

  void seed(std::uint64_t torch, const py::object& python, std::uint32_t numpy) {
    seed_torch(torch);
    python_seed_(python);
    python_random_.attr("gauss_next") = py::none();
    seed_numpy(numpy);
  }

 private:
  // mt19937_state of numpy/random/src/mt19937/mt19937.h.
  struct NumpyState {
    static constexpr int length = 624;
    std::uint32_t key[length];
    int pos;
  };

  static void seed_torch(std::uint64_t seed) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }

  // NumPy keeps the second number of a normal draw outside this state. While nothing has been drawn there is none, and
  // the state alone can be written; otherwise NumPy does it itself, which takes five times as long.
  void seed_numpy(std::uint32_t seed) {
    if (!ours_ || numpy_->pos != NumpyState::length || numpy_->key[0] != first_ || numpy_->key[1] != second_) {
      numpy_seed_(seed);
    } else {
      // mt19937_seed of numpy; Knuth's recurrence, as in every Mersenne Twister.
      for (std::uint32_t place = 0; place < NumpyState::length; ++place) {
        numpy_->key[place] = seed;
        seed = 1812433253U * (seed ^ (seed >> 30)) + place + 1;
      }
    }
    ours_ = numpy_->pos == NumpyState::length;
    first_ = numpy_->key[0];
    second_ = numpy_->key[1];
  }

  NumpyState* numpy_;
  py::object numpy_generator_, numpy_seed_, python_random_, python_seed_;
  bool ours_ = false;
  std::uint32_t first_ = 0, second_ = 0;
};

inline void bind_seeder(py::module_& m) {
  py::class_<Seeder>(m, "Seeder")
      .def(py::init<py::object, py::object, py::object, py::object>(), py::arg("numpy_generator"), py::arg("numpy_seed"),
           py::arg("python_random"), py::arg("python_seed"))
      .def("seed", &Seeder::seed, py::arg("torch"), py::arg("python"), py::arg("numpy"));
}

}  // namespace swift_agent
