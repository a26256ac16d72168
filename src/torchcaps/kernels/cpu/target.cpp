// The kernels for one instruction set: batches over threads, between torch's layout and lanes.
#include "em.hpp"

#include <algorithm>
#include <exception>

#include <omp.h>

namespace TORCHCAPS_TARGET {
namespace {

template <class T> int padded(int J) { return (J + lanes<T> - 1) / lanes<T> * lanes<T>; }

// [outer, J, inner] → [outer, JB, inner, lane], zeros in the lanes beyond J; and back.
template <class T> void to_lanes(const T* from, T* to, long outer, int J, int inner) {
  const int L = lanes<T>, JB = (J + L - 1) / L;
  for (long o = 0; o < outer; ++o)
    for (int jb = 0; jb < JB; ++jb)
      for (int i = 0; i < inner; ++i)
        for (int l = 0; l < L; ++l) {
          const int j = jb * L + l;
          to[((o * JB + jb) * inner + i) * L + l] = j < J ? from[(o * J + j) * inner + i] : T(0);
        }
}
template <class T> void from_lanes(const T* from, T* to, long outer, int J, int inner) {
  const int L = lanes<T>, JB = (J + L - 1) / L;
  for (long o = 0; o < outer; ++o)
    for (int j = 0; j < J; ++j)
      for (int i = 0; i < inner; ++i) to[(o * J + j) * inner + i] = from[((o * JB + j / L) * inner + i) * L + j % L];
}

// Runs work(index, scratch) for every index on threads of its own; what one throws is thrown when all have ended.
template <class Work> void on_threads(int count, int threads, Work work) {
  std::exception_ptr failed;
#pragma omp parallel num_threads(std::max(1, std::min(count, threads)))
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int index = 0; index < count; ++index) try {
        work(index, scratch);
      } catch (...) {
#pragma omp critical
        failed = std::current_exception();
      }
  }
  if (failed) std::rethrow_exception(failed);
}

template <class T, int R, int Q, int N> struct EMBatch {
  using V = Vector<T>;
  using Rule = EM<T, R, Q, N>;

  // Transforms and betas in lanes, and the rule that reads them.
  struct Ready {
    Scratch memory;
    long transform_size, parents, children;
    int J;
    EMOptions<T> options;
    Rule rule;
    Ready(const Problem& g, const EMOptions<T>& o, const T* transform)
        : transform_size(long(g.K) * g.C * padded<T>(g.J) * g.Q * g.N), parents(long(g.P) * g.J),
          children(long(g.S) * g.C), J(padded<T>(g.J)), options(o), rule(g, options, fill(g, o, transform)) {}
    T* fill(const Problem& g, const EMOptions<T>& o, const T* transform) {
      T* weights = memory.take<T>(transform_size + 2 * J);
      to_lanes(transform, weights, long(g.K) * g.C, g.J, g.Q * g.N);
      to_lanes(o.beta_u, weights + transform_size, 1, g.J, 1);
      to_lanes(o.beta_a, weights + transform_size + J, 1, g.J, 1);
      options.beta_u = weights + transform_size;
      options.beta_a = weights + transform_size + J;
      return weights;
    }
    long kept() const { return rule.kept() * lanes<T> * options.iterations; }
    long log_sums() const { return (options.iterations - 1) * children; }
  };

  static void forward(const Problem& g, const EMOptions<T>& o, const EMForward<T>& x) {
    const Ready ready(g, o, x.transform);
    on_threads(g.B, o.threads, [&](int b, Scratch& scratch) {
      T* sample = x.kept + ready.kept() * b;
      ready.rule.forward(x.pose + b * ready.children * g.R * g.Q, x.activation + b * ready.children, sample,
                         x.log_sums + ready.log_sums() * b, scratch);
      ready.rule.result(sample, x.mean + b * ready.parents * g.R * g.N, x.parent_activation + b * ready.parents);
    });
  }

  // Samples in groups, each with sums of its own that are added in order: the same bits for any number of threads.
  static void backward(const Problem& g, const EMOptions<T>& o, const EMBackward<T>& x) {
    const Ready ready(g, o, x.transform);
    const int J = ready.J, H = g.R * g.N;
    const long one = ready.transform_size + 2 * J, most = (64L << 20) / (one * long(sizeof(T)));
    const int groups = int(std::max<long>(1, std::min<long>(std::min(g.B, 16), most)));
    Scratch memory;
    T* sums = memory.take<T>(one * groups);
    on_threads(groups, o.threads, [&](int group, Scratch& scratch) {
      T* sum = sums + one * group;
      std::fill(sum, sum + one, T(0));
      Scratch in_lanes;
      T* mean_grad = in_lanes.take<T>(long(g.P) * J * (H + 1));
      T* activation_grad = mean_grad + long(g.P) * J * H;
      for (int b = int(long(g.B) * group / groups); b < int(long(g.B) * (group + 1) / groups); ++b) {
        to_lanes(x.mean_grad + b * ready.parents * H, mean_grad, g.P, g.J, H);
        to_lanes(x.parent_activation_grad + b * ready.parents, activation_grad, g.P, g.J, 1);
        ready.rule.backward(x.pose + b * ready.children * g.R * g.Q, x.activation + b * ready.children,
                            x.kept + ready.kept() * b, x.log_sums + ready.log_sums() * b,
                            reinterpret_cast<const V*>(mean_grad), reinterpret_cast<const V*>(activation_grad),
                            x.pose_grad + b * ready.children * g.R * g.Q, x.activation_grad + b * ready.children,
                            reinterpret_cast<V*>(sum), reinterpret_cast<V*>(sum + ready.transform_size),
                            reinterpret_cast<V*>(sum + ready.transform_size + J), scratch);
      }
    });
    for (int group = 1; group < groups; ++group)
      for (long i = 0; i < one; ++i) sums[i] += sums[one * group + i];
    from_lanes(sums, x.transform_grad, long(g.K) * g.C, g.J, g.Q * g.N);
    from_lanes(sums + ready.transform_size, x.beta_u_grad, 1, g.J, 1);
    from_lanes(sums + ready.transform_size + J, x.beta_a_grad, 1, g.J, 1);
  }
};

bool matrix(const Problem& g) { return g.R == 4 && g.Q == 4 && g.N == 4; }

template <class T> constexpr EMKernels<T> em_kernels() {
  using General = EMBatch<T, 0, 0, 0>;
  using Matrix = EMBatch<T, 4, 4, 4>;
  return {
      [](const Problem& g) { return General::Rule::takes(g); },
      [](const Problem& g, int iterations) {
        return long(g.P) * padded<T>(g.J) * (2 * g.R * g.N + 4) * iterations;
      },
      [](const Problem& g, const EMOptions<T>& o, const EMForward<T>& x) {
        matrix(g) ? Matrix::forward(g, o, x) : General::forward(g, o, x);
      },
      [](const Problem& g, const EMOptions<T>& o, const EMBackward<T>& x) {
        matrix(g) ? Matrix::backward(g, o, x) : General::backward(g, o, x);
      },
  };
}

}  // namespace

#define TORCHCAPS_TEXT(name) TORCHCAPS_TEXT_OF(name)
#define TORCHCAPS_TEXT_OF(name) #name
extern const Kernels kernels;
const Kernels kernels{TORCHCAPS_TEXT(TORCHCAPS_TARGET), em_kernels<float>(), em_kernels<double>()};

}  // namespace TORCHCAPS_TARGET
