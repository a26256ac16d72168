// Python's door to the kernels: shapes and indices are checked here, so that nothing can read or write out of bounds.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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
using Edges = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

template <class T> void expect(const char* name, const Array<T>& array, std::initializer_list<long> shape) {
  bool right = array.ndim() == shape.size();
  std::size_t axis = 0;
  for (const long size : shape) right = right && array.shape(axis++) == std::size_t(size);
  if (!right) throw std::invalid_argument(std::string(name) + " has the wrong shape for these children and this map");
}

// Sizes of a problem, and its edges sorted by child and by parent.
struct Owned {
  Problem problem;
  std::vector<int> begin[2], other[2], kernel[2];

  template <class T> Owned(const Array<const T>& pose, const Array<const T>& transform, const Edges& edges, int parents) {
    if (pose.ndim() != 5 || transform.ndim() != 5)
      throw std::invalid_argument("pose must be [B, S, C, R, Q] and transform [K, C, J, Q, N]");
    const auto size = [](std::size_t n) {
      if (n > 1u << 30) throw std::invalid_argument("a dimension is larger than 2^30");
      return int(n);
    };
    problem.B = size(pose.shape(0)), problem.S = size(pose.shape(1)), problem.C = size(pose.shape(2));
    problem.R = size(pose.shape(3)), problem.Q = size(pose.shape(4)), problem.K = size(transform.shape(0));
    problem.J = size(transform.shape(2)), problem.N = size(transform.shape(4)), problem.P = parents;
    expect("transform", transform, {problem.K, problem.C, problem.J, problem.Q, problem.N});
    if (parents < 1 || problem.S < 1 || problem.C < 1 || problem.R < 1 || problem.Q < 1 || problem.J < 1 || problem.N < 1)
      throw std::invalid_argument("every dimension but the batch must be at least 1");
    const long count = long(edges.shape(0));
    const std::int64_t* edge = edges.data();
    const long limit[3] = {problem.S, problem.P, problem.K};
    for (long i = 0; i < 3 * count; ++i)
      if (edge[i] < 0 || edge[i] >= limit[i % 3])
        throw std::invalid_argument("an edge names a child site, parent site or transform that there is not");
    for (int side = 0; side < 2; ++side) {
      begin[side].assign(std::size_t(limit[side]) + 1, 0);
      for (long e = 0; e < count; ++e) ++begin[side][std::size_t(edge[3 * e + side]) + 1];
      for (long i = 0; i < limit[side]; ++i) begin[side][std::size_t(i) + 1] += begin[side][std::size_t(i)];
      std::vector<int> next(begin[side].begin(), begin[side].end() - 1);
      other[side].resize(std::size_t(count)), kernel[side].resize(std::size_t(count));
      for (long e = 0; e < count; ++e) {
        const std::size_t at = std::size_t(next[std::size_t(edge[3 * e + side])]++);
        other[side][at] = int(edge[3 * e + 1 - side]);
        kernel[side][at] = int(edge[3 * e + 2]);
      }
    }
    std::vector<int> owner(std::size_t(problem.K), -1);
    problem.own_transforms = true;
    for (long e = 0; e < count; ++e) {
      int& site = owner[std::size_t(edge[3 * e + 2])];
      problem.own_transforms = problem.own_transforms && (site < 0 || site == edge[3 * e]);
      site = int(edge[3 * e]);
    }
    problem.child_begin = begin[0].data(), problem.child_parent = other[0].data(), problem.child_kernel = kernel[0].data();
    problem.parent_begin = begin[1].data(), problem.parent_child = other[1].data(), problem.parent_kernel = kernel[1].data();
  }
};

void expect_takes(const Problem& g) {
  if (long(g.R) * g.N > MOST_NUMBERS || long(g.R) * g.Q > MOST_NUMBERS)
    throw std::invalid_argument("the fused kernels take poses of up to 64 numbers");
}

template <class T>
EMOptions<T> options(const Problem& g, const Array<const T>& heat, const Array<const T>& beta_u,
                     const Array<const T>& beta_a, double floor, double mean_data, bool mixing, int threads) {
  if (heat.ndim() != 1 || heat.shape(0) < 1) throw std::invalid_argument("one inverse temperature a pass, please");
  expect("beta_u", beta_u, {g.J});
  expect("beta_a", beta_a, {g.J});
  expect_takes(g);
  return {int(heat.shape(0)), threads, T(floor), T(mean_data), mixing, heat.data(), beta_u.data(), beta_a.data()};
}

template <class T>
void em_forward(Array<const T> pose, Array<const T> activation, Array<const T> transform, Array<const T> beta_u,
                Array<const T> beta_a, Edges edges, Array<const T> heat, double floor, double mean_data, bool mixing,
                int threads, Array<T> mean, Array<T> parent_activation, Array<T> kept, Array<T> log_sums) {
  const Owned owned(pose, transform, edges, int(mean.ndim() == 5 ? mean.shape(1) : 0));
  const Problem& g = owned.problem;
  const EMOptions<T> o = options<T>(g, heat, beta_u, beta_a, floor, mean_data, mixing, threads);
  expect("activation", activation, {g.B, g.S, g.C});
  expect("mean", mean, {g.B, g.P, g.J, g.R, g.N});
  expect("parent activation", parent_activation, {g.B, g.P, g.J});
  expect("kept", kept, {g.B, em_kept<T>(g, o.iterations)});
  expect("log_sums", log_sums, {g.B, o.iterations - 1, 2, g.S, g.C});
  nb::gil_scoped_release released;
  kernels<T>().em.forward(g, o, {pose.data(), activation.data(), transform.data(), kept.data(), log_sums.data(), mean.data(),
                         parent_activation.data()});
}

template <class T>
void em_backward(Array<const T> pose, Array<const T> activation, Array<const T> transform, Array<const T> beta_u,
                 Array<const T> beta_a, Edges edges, Array<const T> heat, double floor, double mean_data, bool mixing,
                 int threads, Array<const T> kept, Array<const T> log_sums, Array<const T> mean_grad,
                 Array<const T> parent_activation_grad, Array<T> pose_grad, Array<T> activation_grad,
                 Array<T> transform_grad, Array<T> beta_u_grad, Array<T> beta_a_grad) {
  const Owned owned(pose, transform, edges, int(mean_grad.ndim() == 5 ? mean_grad.shape(1) : 0));
  const Problem& g = owned.problem;
  const EMOptions<T> o = options<T>(g, heat, beta_u, beta_a, floor, mean_data, mixing, threads);
  expect("activation", activation, {g.B, g.S, g.C});
  expect("kept", kept, {g.B, em_kept<T>(g, o.iterations)});
  expect("log_sums", log_sums, {g.B, o.iterations - 1, 2, g.S, g.C});
  expect("gradient of the mean", mean_grad, {g.B, g.P, g.J, g.R, g.N});
  expect("gradient of the parent activation", parent_activation_grad, {g.B, g.P, g.J});
  expect("gradient of pose", pose_grad, {g.B, g.S, g.C, g.R, g.Q});
  expect("gradient of activation", activation_grad, {g.B, g.S, g.C});
  expect("gradient of transform", transform_grad, {g.K, g.C, g.J, g.Q, g.N});
  expect("gradient of beta_u", beta_u_grad, {g.J});
  expect("gradient of beta_a", beta_a_grad, {g.J});
  nb::gil_scoped_release released;
  kernels<T>().em.backward(g, o, {pose.data(), activation.data(), transform.data(), kept.data(), log_sums.data(),
                          mean_grad.data(), parent_activation_grad.data(), pose_grad.data(), activation_grad.data(),
                          transform_grad.data(), beta_u_grad.data(), beta_a_grad.data()});
}

DynamicOptions dynamic_options(const Problem& g, int iterations, bool cumulative, const std::string& form,
                               const std::string& inner_form, bool all_passes, bool leaky, int threads) {
  const auto named = [](const std::string& name) {
    for (const auto& [known, form] : {std::pair<const char*, Squash>{"none", Squash::none},
                                      {"unit", Squash::unit},
                                      {"sabour", Squash::sabour},
                                      {"su", Squash::su}})
      if (name == known) return form;
    throw std::invalid_argument("unknown squash form " + name);
  };
  if (iterations < 1) throw std::invalid_argument("iterations must be at least 1");
  expect_takes(g);
  return {iterations, threads, cumulative, leaky, all_passes, named(form), named(inner_form)};
}

template <class T>
void dynamic_forward(Array<const T> pose, Array<const T> transform, Edges edges, int iterations, bool cumulative,
                     std::string form, std::string inner_form, bool all_passes, bool leaky, int threads,
                     Array<T> parents, Array<T> kept, Array<T> log_sums) {
  const Owned owned(pose, transform, edges, int(parents.ndim() == 5 ? parents.shape(1) : 0));
  const Problem& g = owned.problem;
  const auto o = dynamic_options(g, iterations, cumulative, form, inner_form, all_passes, leaky, threads);
  expect("parents", parents, {g.B, g.P, g.J, g.R, g.N});
  expect("kept", kept, {g.B, dynamic_kept<T>(g, iterations)});
  expect("log_sums", log_sums, {g.B, iterations - 1, 2, g.S, g.C});
  nb::gil_scoped_release released;
  kernels<T>().dynamic.forward(g, o, {pose.data(), transform.data(), kept.data(), log_sums.data(), parents.data()});
}

template <class T>
void dynamic_backward(Array<const T> pose, Array<const T> transform, Edges edges, int iterations, bool cumulative,
                      std::string form, std::string inner_form, bool all_passes, bool leaky, int threads,
                      Array<const T> kept, Array<const T> log_sums, Array<const T> parents_grad, Array<T> pose_grad,
                      Array<T> transform_grad) {
  const Owned owned(pose, transform, edges, int(parents_grad.ndim() == 5 ? parents_grad.shape(1) : 0));
  const Problem& g = owned.problem;
  const auto o = dynamic_options(g, iterations, cumulative, form, inner_form, all_passes, leaky, threads);
  expect("kept", kept, {g.B, dynamic_kept<T>(g, iterations)});
  expect("log_sums", log_sums, {g.B, iterations - 1, 2, g.S, g.C});
  expect("gradient of the parents", parents_grad, {g.B, g.P, g.J, g.R, g.N});
  expect("gradient of pose", pose_grad, {g.B, g.S, g.C, g.R, g.Q});
  expect("gradient of transform", transform_grad, {g.K, g.C, g.J, g.Q, g.N});
  nb::gil_scoped_release released;
  kernels<T>().dynamic.backward(g, o, {pose.data(), transform.data(), kept.data(), log_sums.data(),
                                       parents_grad.data(), pose_grad.data(), transform_grad.data()});
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "Fused routing on the processor; torchcaps.kernels calls it.";
  m.def("instruction_sets", &instruction_sets, "Kernels that this build holds and this processor runs, best first.");
  m.def("use", &use, nb::arg("instruction_set"), "Take the kernels of one instruction set from now on: for tests; not between a forward pass and its backward pass.");
  m.def("peak_gflops", [](int threads) {
    nb::gil_scoped_release released;
    return chosen->peak_gflops(std::max(1, threads));
  });
  m.def("em_forward", &em_forward<float>);
  m.def("em_forward", &em_forward<double>);
  m.def("em_backward", &em_backward<float>);
  m.def("em_backward", &em_backward<double>);
  m.def("dynamic_forward", &dynamic_forward<float>);
  m.def("dynamic_forward", &dynamic_forward<double>);
  m.def("dynamic_backward", &dynamic_backward<float>);
  m.def("dynamic_backward", &dynamic_backward<double>);
}
