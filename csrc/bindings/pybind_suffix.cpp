// The Python module specdec_kernels._suffix: structures over token texts, without tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "suffix/array.h"
#include "suffix/automaton.h"
#include "suffix/counted_tree.h"

namespace py = pybind11;
using namespace specdec::suffix;

namespace {

using Answer = std::tuple<std::vector<int64_t>, std::vector<int32_t>, double, int64_t>;

Answer answer(Grown&& grown) { return {std::move(grown.tokens), std::move(grown.parents), grown.expected, grown.match}; }

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

// Keeps the buffers alive that the array reads.
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
      .def("grow", [](const Automaton& self, int64_t nodes, int64_t min_match, double factor, double min_probability) {
        return answer(self.grow({nodes, min_match, factor, min_probability}));
      });
  py::class_<CountedTree>(m, "CountedTree")
      .def(py::init<int64_t>())
      .def("add", [](CountedTree& self, const std::vector<int64_t>& tokens) { return self.add(checked(tokens)); })
      .def("remove", &CountedTree::remove)
      .def("__len__", &CountedTree::size)
      .def_property_readonly("nodes", &CountedTree::nodes)
      .def("count", [](const CountedTree& self, const std::vector<int64_t>& tokens) { return self.count(checked(tokens)); })
      .def("grow", [](const CountedTree& self, const std::vector<int64_t>& context, int64_t max_match, int64_t nodes, int64_t min_match,
                      double factor, double min_probability) {
        return answer(self.grow(checked(context), max_match, {nodes, min_match, factor, min_probability}));
      });
  py::class_<HeldArray>(m, "Array")
      .def(py::init<const py::buffer&, const py::buffer&, int64_t>())
      .def("range", [](const HeldArray& self, const std::vector<int64_t>& tokens) {
        return self.array.range(tokens.data(), static_cast<int64_t>(tokens.size()));
      });
  m.def("look_up", [](const std::vector<const HeldArray*>& held, const std::vector<int64_t>& context, int64_t max_match, int64_t depth,
                      int64_t samples, int64_t nodes, int64_t min_match, double min_probability) {
    std::vector<const Array*> arrays;
    for (const HeldArray* each : held) arrays.push_back(&each->array);
    return answer(look_up(arrays, context, {max_match, depth, samples, {nodes, min_match, 1.0, min_probability}}));
  });
}
