// Python bindings. torchcaps.kernels.moments checks the shapes of all tensors and passes their addresses. This file
// checks the indices of the edges, so that the kernels cannot read or write out of bounds.
#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "problem.hpp"

namespace nb = nanobind;

#if defined(TORCHCAPS_X86)
#define TORCHCAPS_TARGETS(each) each(avx512) each(avx2) each(baseline)
#else
#define TORCHCAPS_TARGETS(each) each(baseline)
#endif
#define TORCHCAPS_DECLARE(target) \
  namespace target { extern const Target kernels; }
TORCHCAPS_TARGETS(TORCHCAPS_DECLARE)

namespace {

bool runs_here(const std::string& name) {
#if defined(TORCHCAPS_X86)
  __builtin_cpu_init();
  if (name == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return name == "baseline";
}

std::vector<const Target*> usable() {
  std::vector<const Target*> found;
#define TORCHCAPS_OFFER(target) \
  if (runs_here(target::kernels.name)) found.push_back(&target::kernels);
  TORCHCAPS_TARGETS(TORCHCAPS_OFFER)
  return found;
}

const Target* chosen = usable().front();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Target* target : usable()) names.push_back(target->name);
  return names;
}

void use(const std::string& name) {
  for (const Target* target : usable())
    if (name == target->name) return void(chosen = target);
  throw std::invalid_argument("instruction_set is \"" + name + "\", but this processor or build does not support it: "
                              "use one of instruction_sets()");
}

const Kernels<float>& kernels(float) { return chosen->in_float; }
const Kernels<double>& kernels(double) { return chosen->in_double; }

using Addresses = std::vector<std::uintptr_t>;
template <class T> T* at(const Addresses& x, std::size_t i) { return reinterpret_cast<T*>(x.at(i)); }
void expect(const Addresses& x, std::size_t count) {
  if (x.size() != count)
    throw std::invalid_argument("the compiled kernels belong to another version of the Python files: install torchcaps again");
}

// B, S, C, P, J, K, R, Q, N, E, D, whether only types at one parent site compete, whether the softmax includes a parent
// "none of the above" with logit 0, whether the lanes hold samples, and the number of threads.
using Sizes = std::vector<long>;

// Creates a problem from its sizes and the edge lists in the layout of RoutingMap.edge_lists.
Problem problem_of(const Sizes& sizes, std::uintptr_t edge_lists) {
  if (sizes.size() != 15)
    throw std::invalid_argument("sizes must have 15 entries; got " + std::to_string(sizes.size()));
  for (const long size : sizes)
    if (size < 0 || size > 1L << 30)
      throw std::invalid_argument("every dimension must be in [0, 2^30]; got " + std::to_string(size));
  const auto size = [&](std::size_t i) { return int(sizes[i]); };
  Problem g{};
  g.B = size(0), g.S = size(1), g.C = size(2), g.P = size(3), g.J = size(4), g.K = size(5), g.R = size(6), g.Q = size(7);
  g.N = size(8), g.E = size(9), g.D = size(10), g.types = size(11), g.none_of_the_above = size(12);
  g.by_sample = size(13), g.threads = size(14), g.pose_logits = g.D > g.Q;
  if (g.P < 1 || g.S < 1 || g.C < 1 || g.R < 1 || g.Q < 1 || g.J < 1 || g.N < 1 || g.K < 1)
    throw std::invalid_argument("every dimension except the batch must be at least 1: remove the empty dimension");
  if (long(g.R) * g.N > MOST_NUMBERS || long(g.R) * g.Q > MOST_NUMBERS)
    throw std::invalid_argument("the fused kernels support poses of up to 64 numbers: use backend=\"reference\"");
  const int* next = reinterpret_cast<const int*>(edge_lists);
  const auto take = [&](long count) { return (next += count) - count; };
  g.edge_child = take(g.E), g.edge_parent = take(g.E), g.edge_kernel = take(g.E), g.child_begin = take(g.S + 1);
  g.parent_begin = take(g.P + 1), g.parent_edge = take(g.E);
  const auto all_below = [&](const int* x, int limit) {
    return std::all_of(x, x + g.E, [&](int i) { return i >= 0 && i < limit; });
  };
  const auto begins = [&](const int* x, int count) { return x[0] == 0 && x[count] == g.E && std::is_sorted(x, x + count + 1); };
  if (!all_below(g.edge_child, g.S) || !all_below(g.edge_parent, g.P) || !all_below(g.edge_kernel, g.K) ||
      !all_below(g.parent_edge, g.E) || !begins(g.child_begin, g.S) || !begins(g.parent_begin, g.P))
    throw std::invalid_argument("edge_lists contains a child site, parent site or transform that does not exist: "
                                "take it from a RoutingMap");
  for (int p = 0; p < g.P; ++p) g.most_edges = std::max(g.most_edges, g.parent_begin[p + 1] - g.parent_begin[p]);
  std::vector<int> owner(std::size_t(g.K), -1);
  g.own_transforms = true;
  for (int e = 0; e < g.E; ++e) {
    int& site = owner[std::size_t(g.edge_kernel[e])];
    g.own_transforms = g.own_transforms && (site < 0 || site == g.edge_child[e]);
    site = g.edge_child[e];
  }
  return g;
}

template <class T> Children<T> children_at(const Addresses& x) { return {at<const T>(x, 0), at<const T>(x, 1), at<const T>(x, 2)}; }
// The floor of log_volume, and the floor and the inverse temperature of an agreement with variances, or zeros.
using Numbers = std::array<double, 3>;
template <class T> Agreement<T> agreement_at(const Addresses& x, std::size_t first, const Numbers& numbers) {
  const auto entry = [&](std::size_t i) { return at<const T>(x, first + i); };
  return {entry(0), entry(1), entry(2), entry(3), T(numbers[1]), T(numbers[2])};
}
// The entries of torchcaps.kernels.moments.Record.
constexpr std::size_t ENTRIES = 15;
template <class T> Record<T> record_at(const Addresses& x, std::size_t first) {
  const auto entry = [&](std::size_t i) { return at<const T>(x, first + i); };
  Numbers numbers{};
  if (const T* given = entry(ENTRIES - 1)) std::copy_n(given, numbers.size(), numbers.begin());
  const Record<T> record{agreement_at<T>(x, first, numbers), entry(4), entry(5), entry(6), entry(7), entry(8), entry(9),
                         entry(10), entry(11), entry(12), entry(13), T(numbers[0])};
  if (record.coupling_grads && !record.log_sums)
    throw std::invalid_argument("coupling_grads needs log_sums: give log_sums too");
  if ((record.variance_grad || record.log_volume_grad) && !record.variance)
    throw std::invalid_argument("variance_grad and log_volume_grad need variance: give variance too");
  return record;
}

template <class T> void define(nb::module_& m, const char* dtype) {
  const auto define = [&](const char* function, auto run) {
    const std::string name = std::string(function) + "_" + dtype;
    m.def(name.c_str(), [run](const Sizes& sizes, std::uintptr_t edge_lists, const Addresses& children,
                              const Addresses& records, const Addresses& out, const Numbers& numbers) {
      const Problem g = problem_of(sizes, edge_lists);
      nb::gil_scoped_release released;
      run(g, children, records, out, numbers);
    });
  };
  define("moments", [](const Problem& g, const Addresses& given, const Addresses& agreement, const Addresses& x, const Numbers& numbers) {
    expect(agreement, 4), expect(x, 7);
    const MomentsOut<T> out{at<T>(x, 0), at<T>(x, 1), at<T>(x, 2), at<T>(x, 3), at<T>(x, 4), at<T>(x, 5), at<T>(x, 6), T(numbers[0])};
    if (out.log_volume && !out.variance) throw std::invalid_argument("log_volume needs variance: request the variance too");
    kernels(T()).moments(g, children_at<T>(given), agreement_at<T>(agreement, 0, numbers), out);
  });
  define("couplings", [](const Problem& g, const Addresses& given, const Addresses& agreement, const Addresses& x, const Numbers& numbers) {
    expect(agreement, 4), expect(x, 1);
    kernels(T()).couplings(g, children_at<T>(given), agreement_at<T>(agreement, 0, numbers), at<T>(x, 0));
  });
  define("moments_backward", [](const Problem& g, const Addresses& given, const Addresses& record, const Addresses& x, const Numbers&) {
    expect(record, ENTRIES), expect(x, 5);
    const PassGrads<T> out{at<T>(x, 0), at<T>(x, 1), at<T>(x, 2), at<T>(x, 3), at<T>(x, 4)};
    kernels(T()).moments_backward(g, children_at<T>(given), record_at<T>(record, 0), out);
  });
  define("votes_backward", [](const Problem& g, const Addresses& given, const Addresses& records, const Addresses& x, const Numbers&) {
    expect(x, 3), expect(records, records.size() / ENTRIES * ENTRIES);
    std::vector<Record<T>> passes;
    for (std::size_t first = 0; first < records.size(); first += ENTRIES) passes.push_back(record_at<T>(records, first));
    kernels(T()).votes_backward(g, children_at<T>(given), passes.data(), int(passes.size()), {at<T>(x, 0), at<T>(x, 1), at<T>(x, 2)});
  });
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "Fused routing on the CPU, called by torchcaps.kernels.";
  m.def("instruction_sets", &instruction_sets, "Instruction sets in this build that this processor supports, best first.");
  m.def("use", &use, nb::arg("instruction_set"),
        "Use the kernels of one instruction set from now on. For tests; never call it between forward and backward.");
  define<float>(m, "float32");
  define<double>(m, "float64");
}
