// The kernels for one instruction set: batches over threads, between torch's layout and lanes.
#include "dynamic.hpp"
#include "em_backward.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include <omp.h>

namespace TORCHCAPS_TARGET {
namespace {

template <class T> int padded(int J) { return (J + lanes<T> - 1) / lanes<T> * lanes<T>; }

// [outer, J, inner] → [outer, JB, inner, lane], zeros in the lanes beyond J; and back. Whole squares are transposed.
template <class T> void to_lanes(const T* from, T* to, long outer, int J, int inner) {
  constexpr int L = lanes<T>;
  const int JB = (J + L - 1) / L;
  for (long block = 0; block < outer * JB; ++block) {
    const int first = int(block % JB) * L, there = std::min(L, J - first);
    const T* rows = from + (block / JB * J + first) * inner;
    T* square = to + block * inner * L;
    int i = 0;
    for (; i + L <= inner; i += L) {
      Vector<T> x[L]{};
      for (int l = 0; l < there; ++l) std::memcpy(x + l, rows + long(l) * inner + i, sizeof x[0]);
      transpose<T>(x);
      std::memcpy(square + long(i) * L, x, sizeof x);
    }
    for (; i < inner; ++i)
      for (int l = 0; l < L; ++l) square[long(i) * L + l] = l < there ? rows[long(l) * inner + i] : T(0);
  }
}
template <class T> void from_lanes(const T* from, T* to, long outer, int J, int inner) {
  constexpr int L = lanes<T>;
  const int JB = (J + L - 1) / L;
  for (long block = 0; block < outer * JB; ++block) {
    const int first = int(block % JB) * L, there = std::min(L, J - first);
    T* rows = to + (block / JB * J + first) * inner;
    const T* square = from + block * inner * L;
    int i = 0;
    for (; i + L <= inner; i += L) {
      Vector<T> x[L];
      std::memcpy(x, square + long(i) * L, sizeof x);
      transpose<T>(x);
      for (int l = 0; l < there; ++l) std::memcpy(rows + long(l) * inner + i, x + l, sizeof x[0]);
    }
    for (; i < inner; ++i)
      for (int l = 0; l < there; ++l) rows[long(l) * inner + i] = square[long(i) * L + l];
  }
}

// Numbers below the smallest normal one are taken as 0 while it lives: each costs as much as a hundred others.
class Flush {
#ifdef __SSE__
  const unsigned before = __builtin_ia32_stmxcsr();

 public:
  Flush() { __builtin_ia32_ldmxcsr(before | 0x8040); }
  ~Flush() { __builtin_ia32_ldmxcsr(before); }
#endif
};

// Runs work(index, scratch) for every index on threads of its own; what one throws is thrown when all have ended. An
// index is a sample, a block or a group of them with a sum of its own, or a child site with transforms of its own: none
// writes what another reads or writes before all have ended.
template <class Work> void on_threads(int count, int threads, Work work) {
  std::exception_ptr failed;
#pragma omp parallel num_threads(std::max(1, std::min(count, threads)))
  {
    const Flush flush;
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

long transform_size(const Problem& g, int J) { return long(g.K) * g.C * J * g.Q * g.N; }

// [K, C, J, Q, N] → [K, C, JB, Q, N, lane].
template <class T> void transforms_to_lanes(const Problem& g, const T* from, T* to, int threads) {
  const long one = long(g.C) * g.J * g.Q * g.N, in_lanes = long(g.C) * padded<T>(g.J) * g.Q * g.N;
  on_threads(g.K, threads, [&](int k, Scratch&) {
    to_lanes(from + k * one, to + k * in_lanes, g.C, g.J, g.Q * g.N);
  });
}

// Sums of `size` numbers over samples: work(from, to, sum, scratch) adds up groups of them, at most 16, whose number
// does not depend on the threads: the same bits for any number of them. The whole stands in the first.
template <class T, class Work> T* sum_in_groups(int samples, long size, int threads, Scratch& memory, Work work) {
  const long most = (64L << 20) / (size * long(sizeof(T)));
  const int groups = int(std::max<long>(1, std::min<long>(std::min(samples, 16), most)));
  T* sums = memory.take<T>(size * groups);
  on_threads(groups, threads, [&](int group, Scratch& scratch) {
    T* sum = sums + size * group;
    std::fill_n(sum, size, T(0));
    work(int(long(samples) * group / groups), int(long(samples) * (group + 1) / groups), sum, scratch);
  });
  for (int group = 1; group < groups; ++group)
    for (long i = 0; i < size; ++i) sums[i] += sums[size * group + i];
  return sums;
}

template <class T, int R, int Q, int N> struct EMBatch {
  using V = Vector<T>;
  using Rule = EM<T, R, Q, N>;

  // Transforms and betas in lanes, and the rule that reads them.
  struct Ready {
    Scratch memory;
    long transforms, parents, children;
    int J;
    EMOptions<T> options;
    Rule rule;
    Ready(const Problem& g, const EMOptions<T>& o, const T* transform)
        : transforms(transform_size(g, padded<T>(g.J))), parents(long(g.P) * g.J),
          children(long(g.S) * g.C), J(padded<T>(g.J)), options(o), rule(g, options, fill(g, o, transform)) {}
    T* fill(const Problem& g, const EMOptions<T>& o, const T* transform) {
      T* weights = memory.take<T>(transforms + 2 * J);
      transforms_to_lanes(g, transform, weights, o.threads);
      to_lanes(o.beta_u, weights + transforms, 1, g.J, 1);
      to_lanes(o.beta_a, weights + transforms + J, 1, g.J, 1);
      options.beta_u = weights + transforms;
      options.beta_a = weights + transforms + J;
      return weights;
    }
    long log_sums() const { return 2 * (options.iterations - 1) * children; }
  };

  static void forward(const Problem& g, const EMOptions<T>& o, const EMForward<T>& x) {
    const Ready ready(g, o, x.transform);
    const long kept = em_kept<T>(g, o.iterations);
    on_threads(g.B, o.threads, [&](int b, Scratch& scratch) {
      T* sample = x.kept + kept * b;
      ready.rule.forward(x.pose + b * ready.children * g.R * g.Q, x.activation + b * ready.children, sample,
                         x.log_sums + ready.log_sums() * b, scratch);
      ready.rule.result(sample, x.mean + b * ready.parents * g.R * g.N, x.parent_activation + b * ready.parents);
    });
  }

  static void backward(const Problem& g, const EMOptions<T>& o, const EMBackward<T>& x) {
    const Ready ready(g, o, x.transform);
    const int J = ready.J, H = g.R * g.N;
    const long kept = em_kept<T>(g, o.iterations);
    Scratch memory;
    const auto add_up = [&](int from, int to, T* sum, Scratch& scratch) {
      Scratch in_lanes;
      T* mean_grad = in_lanes.take<T>(long(g.P) * J * (H + 1));
      T* activation_grad = mean_grad + long(g.P) * J * H;
      for (int b = from; b < to; ++b) {
        to_lanes(x.mean_grad + b * ready.parents * H, mean_grad, g.P, g.J, H);
        to_lanes(x.parent_activation_grad + b * ready.parents, activation_grad, g.P, g.J, 1);
        ready.rule.backward(x.pose + b * ready.children * g.R * g.Q, x.activation + b * ready.children,
                            x.kept + kept * b, x.log_sums + ready.log_sums() * b,
                            reinterpret_cast<const V*>(mean_grad), reinterpret_cast<const V*>(activation_grad),
                            x.pose_grad + b * ready.children * g.R * g.Q, x.activation_grad + b * ready.children,
                            reinterpret_cast<V*>(sum), reinterpret_cast<V*>(sum + ready.transforms),
                            reinterpret_cast<V*>(sum + ready.transforms + J), scratch);
      }
    };
    const T* sums = sum_in_groups<T>(g.B, ready.transforms + 2 * J, o.threads, memory, add_up);
    from_lanes(sums, x.transform_grad, long(g.K) * g.C, g.J, g.Q * g.N);
    from_lanes(sums + ready.transforms, x.beta_u_grad, 1, g.J, 1);
    from_lanes(sums + ready.transforms + J, x.beta_a_grad, 1, g.J, 1);
  }
};

template <class T, int INNER, int BLOCKS> struct DynamicBatch {
  using V = Vector<T>;
  using Rule = Dynamic<T, INNER, BLOCKS>;

  // Transforms as the rule reads them: torch's own where a vote fills its vectors.
  struct Ready {
    Scratch memory;
    Rule rule;
    Ready(const Problem& g, const DynamicOptions& o, const T* transform) : rule(g, o, fill(g, o, transform)) {}
    const T* fill(const Problem& g, const DynamicOptions& o, const T* transform) {
      const Rule layout(g, o, nullptr);
      if (layout.same_layout()) return transform;
      T* weights = memory.take<T>(layout.transform_size());
      const long rows = long(g.C) * g.J * g.Q, wide = layout.transform_size() / std::max(1, g.K);
      on_threads(g.K, o.threads, [&](int k, Scratch&) { layout.spread(transform + k * rows * g.N, weights + k * wide, rows); });
      return weights;
    }
  };

  // Blocks of samples, as many as keep the threads busy and as large as the cache allows.
  template <class Work> static void on_blocks(const DynamicOptions& o, const Rule& rule, int from, int to, Work work) {
    const int size = rule.block(std::max(1, (to - from + o.threads - 1) / o.threads)), count = (to - from + size - 1) / size;
    on_threads(count, o.threads, [&](int i, Scratch& scratch) {
      work(from + i * size, std::min(to, from + (i + 1) * size), scratch);
    });
  }

  static void forward(const Problem& g, const DynamicOptions& o, const DynamicForward<T>& x) {
    const Ready ready(g, o, x.transform);
    on_blocks(o, ready.rule, 0, g.B, [&](int from, int to, Scratch& scratch) {
      ready.rule.forward(from, to, x.pose, x.kept, x.log_sums, scratch);
      for (int b = from; b < to; ++b) ready.rule.result(b, x.kept, x.parents + b * long(g.P) * g.J * g.R * g.N);
    });
  }

  static void backward(const Problem& g, const DynamicOptions& o, const DynamicBackward<T>& x) {
    const Ready ready(g, o, x.transform);
    const Rule& rule = ready.rule;
    Scratch work_memory, sums_memory;
    V* works = work_memory.take<V>(g.B * rule.work());
    T* kept = const_cast<T*>(x.kept);
    const auto undo_passes = [&](int from, int to, const typename Rule::Given& given, Scratch& scratch) {
      for (int b = from; b < to; ++b)
        rule.pad(x.parents_grad + b * long(g.P) * g.J * g.R * g.N, reinterpret_cast<T*>(rule.parents_grad(works, b)));
      rule.undo_passes(from, to, x.pose, kept, x.log_sums, works, given, scratch);
    };
    const auto in_chunks = [&](int from, int to, auto work) {
      const int size = rule.chunk(std::max(1, to - from));
      Scratch memory;
      V* given = memory.template take<V>(size * rule.given_size());
      for (; from < to; from += size) work(from, std::min(to, from + size), typename Rule::Given{given, from, size});
    };
    const long rows = long(g.K) * g.C * g.J * g.Q;
    if (g.own_transforms) {
      const bool in_place = rule.same_layout();
      T* sum = in_place ? x.transform_grad : sums_memory.take<T>(rule.transform_size());
      std::fill_n(sum, rule.transform_size(), T(0));
      in_chunks(0, g.B, [&](int from, int to, const auto& given) {
        on_blocks(o, rule, from, to, [&](int first, int last, Scratch& scratch) { undo_passes(first, last, given, scratch); });
        on_threads(g.S, o.threads, [&](int s, Scratch& scratch) {
          rule.undo_votes(s, s + 1, from, to, x.pose, works, given, x.pose_grad, reinterpret_cast<V*>(sum), scratch);
        });
      });
      if (!in_place) rule.gather_back(sum, x.transform_grad, rows);
      return;
    }
    const auto add_up = [&](int first, int last, T* sum, Scratch& scratch) {
      in_chunks(first, last, [&](int from, int to, const auto& given) {
        undo_passes(from, to, given, scratch);
        rule.undo_votes(0, g.S, from, to, x.pose, works, given, x.pose_grad, reinterpret_cast<V*>(sum), scratch);
      });
    };
    rule.gather_back(sum_in_groups<T>(g.B, rule.transform_size(), o.threads, sums_memory, add_up), x.transform_grad, rows);
  }
};

bool shape_is(const Problem& g, int R, int Q, int N) { return g.R == R && g.Q == Q && g.N == N; }

// The published shapes are compiled one by one, in float32; everything else runs on the general code.
template <class T, class Use> void em_batch(const Problem& g, Use use) {
  if constexpr (sizeof(T) == 4) {
    if (shape_is(g, 4, 4, 4)) return use(EMBatch<T, 4, 4, 4>());
    if (shape_is(g, 4, 5, 4)) return use(EMBatch<T, 4, 5, 4>());
  }
  use(EMBatch<T, 0, 0, 0>());
}
template <class T, class Use> void dynamic_batch(const Problem& g, Use use) {
  if constexpr (sizeof(T) == 4)
    if (shape_is(g, 1, 8, 16)) return use(DynamicBatch<T, 8, 16 / lanes<T>>());
  use(DynamicBatch<T, 0, 0>());
}

template <class T> constexpr Kernels<T> kernels_in() {
  return {
      {
          [](const Problem& g, const EMOptions<T>& o, const EMForward<T>& x) {
            em_batch<T>(g, [&](auto batch) { batch.forward(g, o, x); });
          },
          [](const Problem& g, const EMOptions<T>& o, const EMBackward<T>& x) {
            em_batch<T>(g, [&](auto batch) { batch.backward(g, o, x); });
          },
      },
      {
          [](const Problem& g, const DynamicOptions& o, const DynamicForward<T>& x) {
            dynamic_batch<T>(g, [&](auto batch) { batch.forward(g, o, x); });
          },
          [](const Problem& g, const DynamicOptions& o, const DynamicBackward<T>& x) {
            dynamic_batch<T>(g, [&](auto batch) { batch.backward(g, o, x); });
          },
      },
  };
}

// What the processor reaches where nothing but multiply-adds in registers is asked of it.
double peak_gflops(int threads) {
  constexpr int CHAINS = 12, STEPS = 4'000'000;
  float sink = 0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : sink)
  {
    volatile float seeds[2] = {0.999f, 0.001f};
    const Vector<float> x = all(float(seeds[0])), y = all(float(seeds[1]));
    Vector<float> chains[CHAINS];
    for (int i = 0; i < CHAINS; ++i) chains[i] = all(float(i));
    for (int step = 0; step < STEPS; ++step)
#pragma GCC unroll 12
      for (int i = 0; i < CHAINS; ++i) chains[i] = chains[i] * x + y;
    for (int i = 1; i < CHAINS; ++i) chains[0] += chains[i];
    sink += chains[0][0];
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return sink > 0 ? 2.0 * threads * STEPS * CHAINS * lanes<float> / seconds.count() / 1e9 : 0;
}

}  // namespace

#define TORCHCAPS_TEXT(name) TORCHCAPS_TEXT_OF(name)
#define TORCHCAPS_TEXT_OF(name) #name
extern const Target kernels;
const Target kernels{TORCHCAPS_TEXT(TORCHCAPS_TARGET), kernels_in<float>(), kernels_in<double>(), peak_gflops};

}  // namespace TORCHCAPS_TARGET
