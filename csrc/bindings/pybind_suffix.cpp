// The Python module specdec_kernels._suffix: Automaton, CountedTree, Successors, Array and look_up, without tensors.
#include <pybind11/pybind11.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "suffix/array.h"
#include "suffix/automaton.h"
#include "suffix/counted_tree.h"
#include "suffix/token_recycling.h"

namespace py = pybind11;
using namespace specdec::suffix;

namespace {

using Noise = std::optional<std::pair<int64_t, int32_t>>;  // (seed, position of the root)

std::optional<ReplayNoise> replay_noise(const Noise& noise) { return noise ? std::optional<ReplayNoise>({noise->first, noise->second}) : std::nullopt; }

using GrownTuple = std::tuple<std::vector<int64_t>, std::vector<int32_t>, double, int64_t>;

GrownTuple to_tuple(Grown&& grown) { return {std::move(grown.tokens), std::move(grown.parents), grown.expected, grown.match}; }

int32_t checked(int64_t token) {
  if (token < 0 || token > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("suffix: got token " + std::to_string(token) + "; expected 0 to 2**31 - 1");
  return static_cast<int32_t>(token);
}

std::vector<int32_t> checked(const std::vector<int64_t>& tokens) {
  std::vector<int32_t> narrow;
  narrow.reserve(tokens.size());
  for (const int64_t token : tokens) narrow.push_back(checked(token));
  return narrow;
}

template <class T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

// An Array and the buffers it reads.
struct HeldArray {
  py::buffer_info tokens, suffixes;
  Array array;

  HeldArray(const py::buffer& tokens_, const py::buffer& suffixes_, int64_t separator)
      : tokens(tokens_.request()), suffixes(suffixes_.request()),
        array(tokens.ptr, static_cast<int>(tokens.itemsize), tokens.size, suffixes.ptr, static_cast<int>(suffixes.itemsize), separator) {
    const bool fits = (tokens.itemsize == 2 || tokens.itemsize == 4) && (suffixes.itemsize == 4 || suffixes.itemsize == 8) &&
                      tokens.size == suffixes.size && tokens.ndim == 1 && suffixes.ndim == 1;
    if (!fits) throw std::invalid_argument("suffix array: expected tokens of 2 or 4 bytes and as many suffixes of 4 or 8 bytes");
  }
};

}  // namespace

PYBIND11_MODULE(_suffix, m) {
  py::class_<Automaton>(m, "Automaton")
      .def(py::init<>())
      .def("extend", [](Automaton& self, const std::vector<int64_t>& tokens) {
        for (const int64_t token : tokens) self.append(checked(token));
      })
      .def("__len__", &Automaton::size)
      .def_property_readonly("states", &Automaton::states)
      .def("match", &Automaton::match)
      .def("count", [](const Automaton& self, const std::vector<int64_t>& tokens) { return self.count(checked(tokens)); })
      .def("grow", [](const Automaton& self, int64_t nodes, int64_t min_match, double factor, double min_probability, const Noise& noise) {
        return to_tuple(self.grow({nodes, min_match, factor, min_probability, replay_noise(noise)}));
      }, py::arg("nodes"), py::arg("min_match"), py::arg("factor"), py::arg("min_probability"), py::arg("noise") = Noise());
  py::class_<CountedTree>(m, "CountedTree")
      .def(py::init<int64_t>())
      .def("add", [](CountedTree& self, const std::vector<int64_t>& tokens) { return self.add(checked(tokens)); })
      .def("remove", &CountedTree::remove)
      .def("__len__", &CountedTree::size)
      .def_property_readonly("nodes", &CountedTree::nodes)
      .def("count", [](const CountedTree& self, const std::vector<int64_t>& tokens) { return self.count(checked(tokens)); })
      .def("grow", [](const CountedTree& self, const std::vector<int64_t>& context, int64_t max_match, int64_t nodes, int64_t min_match,
                      double factor, double min_probability, const Noise& noise) {
        return to_tuple(self.grow(checked(context), max_match, {nodes, min_match, factor, min_probability, replay_noise(noise)}));
      }, py::arg("context"), py::arg("max_match"), py::arg("nodes"), py::arg("min_match"), py::arg("factor"), py::arg("min_probability"),
           py::arg("noise") = Noise());
  py::class_<Successors>(m, "Successors")
      .def(py::init<>())
      .def("learn", [](Successors& self, const Column<int64_t>& tokens, const Column<int64_t>& following, const Column<float>& values) {
        const int64_t count = tokens.size(), width = count > 0 ? following.size() / count : 0;
        if (following.size() != count * width || values.size() != following.size())
          throw std::invalid_argument("successors: expected as many next tokens and log-probabilities for every token");
        for (int64_t node = 0; node < count; ++node) {
          Successors::Following own;
          for (int64_t at = node * width; at < (node + 1) * width && following.data()[at] >= 0; ++at)
            own.emplace_back(checked(following.data()[at]), values.data()[at]);
          self.learn(checked(tokens.data()[node]), std::move(own));
        }
      })
      .def("__len__", &Successors::size)
      .def("after", &Successors::after)
      .def("grow", [](const Successors& self, int64_t root, int64_t depth, int64_t nodes, double min_probability, double inv_t, int64_t top_k,
                      double top_p, double min_p, const Noise& noise) {
        return to_tuple(self.grow(root, depth, {inv_t, top_p, min_p, top_k}, {nodes, 0, 1.0, min_probability, replay_noise(noise)}));
      }, py::arg("root"), py::arg("depth"), py::arg("nodes"), py::arg("min_probability"), py::arg("inv_t"), py::arg("top_k"), py::arg("top_p"),
           py::arg("min_p"), py::arg("noise") = Noise());
  py::class_<HeldArray>(m, "Array")
      .def(py::init<const py::buffer&, const py::buffer&, int64_t>())
      .def("range", [](const HeldArray& self, const std::vector<int64_t>& tokens) {
        return self.array.range(tokens.data(), static_cast<int64_t>(tokens.size()));
      });
  m.def("look_up", [](const std::vector<const HeldArray*>& held, const std::vector<int64_t>& context, int64_t max_match, int64_t depth,
                      int64_t samples, int64_t nodes, int64_t min_match, double min_probability, const Noise& noise) {
    std::vector<const Array*> arrays;
    for (const HeldArray* each : held) arrays.push_back(&each->array);
    return to_tuple(look_up(arrays, context, {max_match, depth, samples, {nodes, min_match, 1.0, min_probability, replay_noise(noise)}}));
  }, py::arg("arrays"), py::arg("context"), py::arg("max_match"), py::arg("depth"), py::arg("samples"), py::arg("nodes"), py::arg("min_match"),
        py::arg("min_probability"), py::arg("noise") = Noise());
}
