// Python's door to the kernels: shapes and indices are checked here, so that nothing can read or write out of bounds.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
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
    if (name == target->name) {
      chosen = target;
      return;
    }
  throw std::invalid_argument("this processor or build has no " + name + " kernels");
}

template <class T> const Kernels<T>& kernels();
template <> const Kernels<float>& kernels<float>() { return chosen->in_float; }
template <> const Kernels<double>& kernels<double>() { return chosen->in_double; }

template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T> using Maybe = std::optional<Array<T>>;
using EdgeLists = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T> void expect(const char* name, const Array<T>& array, std::initializer_list<long> shape) {
  bool right = array.ndim() == shape.size();
  std::size_t axis = 0;
  for (const long size : shape) right = right && array.shape(axis++) == std::size_t(size);
  if (!right) throw std::invalid_argument(std::string(name) + " has the wrong shape for these children and this map");
}
// The memory of an array that has the shape; null where there is no array, or an empty one that may be left out.
template <class T> T* checked(const char* name, const Maybe<T>& array, std::initializer_list<long> shape) {
  if (!array || (array->ndim() == 1 && array->shape(0) == 0)) return nullptr;
  expect(name, *array, shape);
  return array->data();
}

struct Options {
  int parent_sites;
  bool types, none_of_the_above;
  int threads;
};

// Sizes of a problem, and its edges.
template <class T>
Problem problem_of(const Array<const T>& pose, const Array<const T>& transform, const EdgeLists& lists, const Options& options,
                   std::vector<int>& owners) {
  if (pose.ndim() != 5 || transform.ndim() != 5)
    throw std::invalid_argument("pose must be [B, S, C, R, Q] and transform [K, C, J, Q, N]");
  const auto size = [](std::size_t n) {
    if (n > 1u << 30) throw std::invalid_argument("a dimension is larger than 2^30");
    return int(n);
  };
  Problem g{};
  g.B = size(pose.shape(0)), g.S = size(pose.shape(1)), g.C = size(pose.shape(2)), g.R = size(pose.shape(3));
  g.Q = size(pose.shape(4)), g.K = size(transform.shape(0)), g.J = size(transform.shape(2)), g.N = size(transform.shape(4));
  g.P = options.parent_sites, g.types = options.types, g.none_of_the_above = options.none_of_the_above;
  g.threads = options.threads;
  expect("transform", transform, {g.K, g.C, g.J, g.Q, g.N});
  if (g.P < 1 || g.S < 1 || g.C < 1 || g.R < 1 || g.Q < 1 || g.J < 1 || g.N < 1 || g.K < 1)
    throw std::invalid_argument("every dimension but the batch must be at least 1");
  if (long(g.R) * g.N > MOST_NUMBERS || long(g.R) * g.Q > MOST_NUMBERS)
    throw std::invalid_argument("the fused kernels take poses of up to 64 numbers");
  const long entries = long(lists.shape(0)) - g.S - g.P - g.K - 3;
  if (entries < 0 || entries % 5) throw std::invalid_argument("the edge lists are not those of this map: use RoutingMap.edge_lists");
  g.E = int(entries / 5);
  const int* next = lists.data();
  const auto take = [&](long count) { return (next += count) - count; };
  g.edge_child = take(g.E), g.edge_parent = take(g.E), g.edge_kernel = take(g.E), g.child_begin = take(g.S + 1);
  g.parent_begin = take(g.P + 1), g.parent_edge = take(g.E);
  const auto all_below = [&](const int* x, long count, int limit) {
    return std::all_of(x, x + count, [&](int i) { return i >= 0 && i < limit; });
  };
  const auto begins = [&](const int* x, long count) {
    return x[0] == 0 && x[count] == g.E && std::is_sorted(x, x + count + 1);
  };
  if (!all_below(g.edge_child, g.E, g.S) || !all_below(g.edge_parent, g.E, g.P) || !all_below(g.edge_kernel, g.E, g.K) ||
      !all_below(g.parent_edge, g.E, g.E) || !begins(g.child_begin, g.S) || !begins(g.parent_begin, g.P))
    throw std::invalid_argument("an edge names a child site, parent site or transform that does not exist");
  owners.assign(std::size_t(g.K), -1);
  g.own_transforms = true;
  for (int e = 0; e < g.E; ++e) {
    int& site = owners[std::size_t(g.edge_kernel[e])];
    g.own_transforms = g.own_transforms && (site < 0 || site == g.edge_child[e]);
    site = g.edge_child[e];
  }
  return g;
}

template <class T>
Children<T> children_of(const Problem& g, const Array<const T>& pose, const Maybe<const T>& activation, const Array<const T>& transform) {
  return {pose.data(), checked("activation", activation, {g.B, g.S, g.C}), transform.data()};
}
template <class T>
Agreement<T> agreement_of(const Problem& g, const Maybe<const T>& constant, const Maybe<const T>& linear,
                          const Maybe<const T>& quadratic, const Maybe<const T>& centre) {
  return {checked("constant", constant, {g.B, g.P, g.J}), checked("linear", linear, {g.B, g.P, g.J, g.R, g.N}),
          checked("quadratic", quadratic, {g.B, g.P, g.J, g.R, g.N}), checked("centre", centre, {g.B, g.P, g.J, g.R, g.N})};
}
// Samples as the operators pad them: as many as fill the widest vectors, 64 bytes.
template <class T> long padded_samples(const Problem& g) {
  const long most = 64 / long(sizeof(T));
  return (g.B + most - 1) / most * most;
}

template <class T>
void moments(Array<const T> pose, Maybe<const T> activation, Array<const T> transform, EdgeLists edge_lists,
             Maybe<const T> constant, Maybe<const T> linear, Maybe<const T> quadratic, Maybe<const T> centre, Array<T> mass,
             Array<T> mean, Maybe<T> variance, Array<T> log_mass, Maybe<T> log_sums, bool even, bool types,
             bool none_of_the_above, int threads) {
  std::vector<int> owners;
  const int parents = int(mass.ndim() == 3 ? mass.shape(1) : 0);
  const Problem g = problem_of<T>(pose, transform, edge_lists, {parents, types, none_of_the_above, threads}, owners);
  expect("mass", mass, {g.B, g.P, g.J});
  expect("mean", mean, {g.B, g.P, g.J, g.R, g.N});
  expect("log_mass", log_mass, {g.B, g.P, g.J});
  MomentsOut<T> out{mass.data(), mean.data(), checked("variance", variance, {g.B, g.P, g.J, g.R, g.N}), log_mass.data(), nullptr};
  std::vector<T> unused;
  if (!even) {
    out.log_sums = checked("log_sums", log_sums, {padded_samples<T>(g), 2, g.groups(), g.C});
    if (!out.log_sums) unused.resize(1), out.log_sums = unused.data();  // no groups, so that nothing is written
  }
  const auto children = children_of<T>(g, pose, activation, transform);
  const auto agreement = agreement_of<T>(g, constant, linear, quadratic, centre);
  nb::gil_scoped_release released;
  kernels<T>().moments(g, children, agreement, out);
}

template <class T>
void couplings(Array<const T> pose, Array<const T> transform, EdgeLists edge_lists, Maybe<const T> constant,
               Maybe<const T> linear, Maybe<const T> quadratic, Maybe<const T> centre, Array<T> couplings, int parent_sites,
               bool types, bool none_of_the_above, int threads) {
  std::vector<int> owners;
  const Problem g = problem_of<T>(pose, transform, edge_lists, {parent_sites, types, none_of_the_above, threads}, owners);
  expect("couplings", couplings, {g.B, g.J, g.E, g.C});
  const auto children = children_of<T>(g, pose, {}, transform);
  const auto agreement = agreement_of<T>(g, constant, linear, quadratic, centre);
  nb::gil_scoped_release released;
  kernels<T>().couplings(g, children, agreement, couplings.data());
}

template <class T>
void moments_backward(Array<const T> pose, Maybe<const T> activation, Array<const T> transform, EdgeLists edge_lists,
                      Maybe<const T> constant, Maybe<const T> linear, Maybe<const T> quadratic, Maybe<const T> centre,
                      Array<const T> log_sums, Array<const T> mean, Maybe<const T> variance, Array<const T> log_mass,
                      Maybe<const T> mass_grad, Maybe<const T> mean_grad, Maybe<const T> variance_grad,
                      Array<T> coupling_grads, Maybe<T> constant_grad, Maybe<T> linear_grad, Maybe<T> quadratic_grad,
                      Maybe<T> centre_grad, bool types, bool none_of_the_above, int threads) {
  std::vector<int> owners;
  const int parents = int(log_mass.ndim() == 3 ? log_mass.shape(1) : 0);
  const Problem g = problem_of<T>(pose, transform, edge_lists, {parents, types, none_of_the_above, threads}, owners);
  const auto vectors = [&](const char* name, const auto& x) { return checked(name, x, {g.B, g.P, g.J, g.R, g.N}); };
  expect("log_sums", log_sums, {padded_samples<T>(g), 2, g.groups(), g.C});
  expect("mean", mean, {g.B, g.P, g.J, g.R, g.N});
  expect("log_mass", log_mass, {g.B, g.P, g.J});
  expect("coupling_grads", coupling_grads, {padded_samples<T>(g), g.groups(), g.C});
  const Record<T> pass{agreement_of<T>(g, constant, linear, quadratic, centre), log_sums.data(), nullptr, mean.data(),
                       vectors("variance", variance), log_mass.data(), checked("mass_grad", mass_grad, {g.B, g.P, g.J}),
                       vectors("mean_grad", mean_grad), vectors("variance_grad", variance_grad)};
  if (pass.variance_grad && !pass.variance) throw std::invalid_argument("variance_grad is given without variance");
  const AgreementGrads<T> out{coupling_grads.data(), checked("constant_grad", constant_grad, {g.B, g.P, g.J}),
                              vectors("linear_grad", linear_grad), vectors("quadratic_grad", quadratic_grad),
                              vectors("centre_grad", centre_grad)};
  const auto children = children_of<T>(g, pose, activation, transform);
  nb::gil_scoped_release released;
  kernels<T>().moments_backward(g, children, pass, out);
}

template <class T>
void votes_backward(Array<const T> pose, Maybe<const T> activation, Array<const T> transform, EdgeLists edge_lists,
                    std::vector<Array<const T>> records, Array<T> pose_grad, Maybe<T> activation_grad, Array<T> transform_grad,
                    int parent_sites, bool types, bool none_of_the_above, int threads) {
  constexpr std::size_t ENTRIES = 12;  // of torchcaps.kernels.moments.Record
  std::vector<int> owners;
  const Problem g = problem_of<T>(pose, transform, edge_lists, {parent_sites, types, none_of_the_above, threads}, owners);
  if (records.size() % ENTRIES) throw std::invalid_argument("records must have 12 tensors a pass");
  std::vector<Record<T>> passes;
  for (std::size_t first = 0; first < records.size(); first += ENTRIES) {
    const auto entry = [&](std::size_t i) { return Maybe<const T>(records[first + i]); };
    const auto scalars = [&](const char* name, std::size_t i) { return checked(name, entry(i), {g.B, g.P, g.J}); };
    const auto vectors = [&](const char* name, std::size_t i) { return checked(name, entry(i), {g.B, g.P, g.J, g.R, g.N}); };
    Record<T> pass{agreement_of<T>(g, entry(0), entry(1), entry(2), entry(3)),
                   checked("log_sums", entry(4), {padded_samples<T>(g), 2, g.groups(), g.C}),
                   checked("coupling_grads", entry(5), {padded_samples<T>(g), g.groups(), g.C}), vectors("mean", 6),
                   vectors("variance", 7), scalars("log_mass", 8), scalars("mass_grad", 9), vectors("mean_grad", 10),
                   vectors("variance_grad", 11)};
    if (!pass.mean || !pass.log_mass) continue;  // the loss does not depend on this pass
    if (pass.variance_grad && !pass.variance) throw std::invalid_argument("variance_grad is given without variance");
    if (pass.coupling_grads && !pass.log_sums) throw std::invalid_argument("coupling_grads is given without log_sums");
    passes.push_back(pass);
  }
  expect("pose_grad", pose_grad, {g.B, g.S, g.C, g.R, g.Q});
  expect("transform_grad", transform_grad, {g.K, g.C, g.J, g.Q, g.N});
  const ChildrenGrads<T> out{pose_grad.data(), checked("activation_grad", activation_grad, {g.B, g.S, g.C}), transform_grad.data()};
  const auto children = children_of<T>(g, pose, activation, transform);
  nb::gil_scoped_release released;
  kernels<T>().votes_backward(g, children, passes.data(), int(passes.size()), out);
}

template <class T> void define(nb::module_& m) {
  using namespace nb::literals;
  m.def("moments", &moments<T>, "pose"_a, "activation"_a.none(), "transform"_a, "edge_lists"_a, "constant"_a.none(),
        "linear"_a.none(), "quadratic"_a.none(), "centre"_a.none(), "mass"_a, "mean"_a, "variance"_a.none(), "log_mass"_a,
        "log_sums"_a.none(), "even"_a, "types"_a, "none_of_the_above"_a, "threads"_a);
  m.def("couplings", &couplings<T>, "pose"_a, "transform"_a, "edge_lists"_a, "constant"_a.none(), "linear"_a.none(),
        "quadratic"_a.none(), "centre"_a.none(), "couplings"_a, "parent_sites"_a, "types"_a, "none_of_the_above"_a, "threads"_a);
  m.def("moments_backward", &moments_backward<T>, "pose"_a, "activation"_a.none(), "transform"_a, "edge_lists"_a,
        "constant"_a.none(), "linear"_a.none(), "quadratic"_a.none(), "centre"_a.none(), "log_sums"_a, "mean"_a,
        "variance"_a.none(), "log_mass"_a, "mass_grad"_a.none(), "mean_grad"_a.none(), "variance_grad"_a.none(),
        "coupling_grads"_a, "constant_grad"_a.none(), "linear_grad"_a.none(), "quadratic_grad"_a.none(),
        "centre_grad"_a.none(), "types"_a, "none_of_the_above"_a, "threads"_a);
  m.def("votes_backward", &votes_backward<T>, "pose"_a, "activation"_a.none(), "transform"_a, "edge_lists"_a, "records"_a,
        "pose_grad"_a, "activation_grad"_a.none(), "transform_grad"_a, "parent_sites"_a, "types"_a, "none_of_the_above"_a,
        "threads"_a);
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "Fused routing on the processor; torchcaps.kernels calls it.";
  m.def("instruction_sets", &instruction_sets, "Kernels that this build holds and this processor runs, best first.");
  m.def("use", &use, nb::arg("instruction_set"),
        "Take the kernels of one instruction set from now on: for tests; not between a forward pass and its backward pass.");
  m.def("peak_gflops", [](int threads) {
    nb::gil_scoped_release released;
    return chosen->peak_gflops(std::max(1, threads));
  });
  define<float>(m);
  define<double>(m);
}
