// Seeds every generator of the process in one call; see `seed_series` in recovery/swift_recovery/state/randomness.py, whose function
// seed_generators does the same in Python. That is done twice in every iteration, right after the iteration has emptied
// the caches, and there what counts is how little it touches.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <type_traits>

namespace swift_agent {

namespace py = pybind11;

constexpr int kWords = 624;  // of the state of a Mersenne Twister
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
inline std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

inline void fill(std::uint32_t* words, std::uint64_t key) {
  std::uint64_t counter = mixed(key);
  for (int place = 0; place < kWords; place += 2) {
    const std::uint64_t bits = mixed(counter += kGolden);
    words[place] = static_cast<std::uint32_t>(bits);
    words[place + 1] = static_cast<std::uint32_t>(bits >> 32);
  }
}

// A Mersenne Twister in somebody else's memory. `begin`, the place at which that side begins to draw from a new state,
// tells together with two words whether anything was drawn since it was filled.
struct Twister {
  std::uint32_t* words;
  int* place;
  std::uint32_t first = 0, second = 0;
  bool filled = false;

  bool is_untouched() const { return filled && *place == kWords && words[0] == first && words[1] == second; }

  void refill(std::uint64_t key) {
    fill(words, key);
    *place = kWords;
    first = words[0], second = words[1], filled = true;
  }
};

class Seeder {
 public:
  // `numpy_generator`: NumPy's global MT19937, whose address of its state is documented as `ctypes.state_address`;
  // `numpy_seed`: the function that seeds it. `python_random`: the generator behind the functions of `random`.
  // Raises RuntimeError where the latter's state is not where CPython 3.11 to 3.14 have it.
  Seeder(py::object numpy_generator, py::object numpy_seed, py::object python_random)
      : numpy_generator_(std::move(numpy_generator)),
        numpy_seed_(std::move(numpy_seed)),
        python_random_(std::move(python_random)) {
    // mt19937_state of numpy/random/src/mt19937/mt19937.h.
    const auto numpy = numpy_generator_.attr("ctypes").attr("state_address").cast<std::uintptr_t>();
    numpy_.words = reinterpret_cast<std::uint32_t*>(numpy);
    numpy_.place = reinterpret_cast<int*>(numpy_.words + kWords);
    // RandomObject of Modules/_randommodule.c: the object's head, the place, the words.
    auto* python = reinterpret_cast<char*>(python_random_.ptr()) + sizeof(PyObject);
    python_.place = reinterpret_cast<int*>(python);
    python_.words = reinterpret_cast<std::uint32_t*>(python + sizeof(int));
    if (!python_is_known()) throw std::runtime_error("the state of Python's generator is not where it should be");
  }

  void seed(std::uint64_t torch, std::uint64_t python, std::uint64_t numpy) {
    seed_torch(torch);
    // Both keep the second number of a normal draw outside the state. While nothing was drawn there is none.
    if (!python_.is_untouched()) python_random_.attr("gauss_next") = py::none();
    python_.refill(python);
    if (!numpy_.is_untouched()) numpy_seed_(0);
    numpy_.refill(numpy);
  }

 private:
  bool python_is_known() const {
    const py::tuple state = python_random_.attr("getstate")()[py::int_(1)];
    const auto base = py::module_::import("_random").attr("Random").attr("__basicsize__").cast<std::size_t>();
    if (state.size() != kWords + 1 || base < sizeof(PyObject) + (kWords + 1) * sizeof(std::uint32_t)) return false;
    for (int place = 0; place < kWords; ++place) {
      if (state[place].cast<std::uint32_t>() != python_.words[place]) return false;
    }
    return state[kWords].cast<int>() == *python_.place;
  }

  void seed_torch(std::uint64_t key) {
    // Its only member; as nothing gives access to that, it would have to be copied once more.
    static_assert(std::is_standard_layout_v<at::mt19937> && sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
    auto* data = reinterpret_cast<at::mt19937_data_pod*>(&engine_);
    data->seed_ = key, data->left_ = 1, data->seeded_ = true, data->next_ = 0;
    fill(data->state_.data(), key);
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* impl = generator.get<at::CPUGeneratorImpl>();
    impl->set_engine(engine_);
    impl->set_next_float_normal_sample(std::nullopt);
    impl->set_next_double_normal_sample(std::nullopt);
  }

  py::object numpy_generator_, numpy_seed_, python_random_;
  Twister numpy_{}, python_{};
  at::mt19937 engine_;
};

// The seeds of one purpose: `use(index)` is all that happens in an iteration.
class Series {
 public:
  Series(Seeder& seeder, std::uint64_t torch, std::uint64_t python, std::uint64_t numpy)
      : seeder_(seeder), torch_(torch), python_(python), numpy_(numpy) {}

  void use(std::uint64_t index) {
    const std::uint64_t step = index * kGolden;
    seeder_.seed(torch_ + step, python_ + step, numpy_ + step);
  }

 private:
  Seeder& seeder_;
  const std::uint64_t torch_, python_, numpy_;
};

inline void bind_seeds(py::module_& m) {
  py::class_<Seeder>(m, "Seeder")
      .def(py::init<py::object, py::object, py::object>(), py::arg("numpy_generator"), py::arg("numpy_seed"),
           py::arg("python_random"))
      .def("seed", &Seeder::seed, py::arg("torch"), py::arg("python"), py::arg("numpy"))
      .def(
          "series",
          [](Seeder& self, std::uint64_t torch, std::uint64_t python, std::uint64_t numpy) {
            return Series(self, torch, python, numpy);
          },
          py::keep_alive<0, 1>(), py::arg("torch"), py::arg("python"), py::arg("numpy"));
  py::class_<Series>(m, "Series").def("use", &Series::use, py::arg("index"));
}

}  // namespace swift_agent
