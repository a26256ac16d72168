// What a kernel is told: sizes, the routing map from both its sides, the options of a rule.
#pragma once

constexpr int MOST_NUMBERS = 64;  // in a pose, of a child or of a parent

struct Problem {
  int B, S, C, P, J, K, R, Q, N;
  // Edges sorted by child: those of site s are child_begin[s] … child_begin[s + 1] - 1; and sorted by parent.
  const int *child_begin, *child_parent, *child_kernel;
  const int *parent_begin, *parent_child, *parent_kernel;
  bool own_transforms;  // no transform serves two child sites
};

// Numbers that a sample keeps for the backward pass. They are laid out in the lanes at work, but have the size of the
// widest: the operators promise one shape on every processor.
template <class T> static inline long padded_numbers(long count) {
  const long L = 64 / long(sizeof(T));
  return (count + L - 1) / L * L;
}
template <class T> static inline long em_kept(const Problem& g, int iterations) {
  return long(g.P) * padded_numbers<T>(g.J) * (2 * g.R * g.N + 4) * iterations;
}
template <class T> static inline long dynamic_kept(const Problem& g, int iterations) {
  return long(g.P) * g.J * padded_numbers<T>(g.R * g.N) * iterations;
}

template <class T> struct EMOptions {
  int iterations, threads;
  T floor, mean_data;
  bool mixing;  // activations are proportions of data, not logistic
  const T *heat, *beta_u, *beta_a;  // [T], [J], [J]
};

template <class T> struct EMForward {
  const T *pose, *activation, *transform;
  T *kept, *log_sums, *mean, *parent_activation;
};

template <class T> struct EMBackward {
  const T *pose, *activation, *transform, *kept, *log_sums, *mean_grad, *parent_activation_grad;
  T *pose_grad, *activation_grad, *transform_grad, *beta_u_grad, *beta_a_grad;
};

enum class Squash { none, unit, sabour, su };

struct DynamicOptions {
  int iterations, threads;
  bool cumulative, leaky, all_passes;
  Squash form, inner_form;
};

template <class T> struct DynamicForward {
  const T *pose, *transform;
  T *kept, *log_sums, *parents;
};

template <class T> struct DynamicBackward {
  const T *pose, *transform, *kept, *log_sums, *parents_grad;
  T *pose_grad, *transform_grad;
};

// What one instruction set offers.
template <class T> struct EMKernels {
  void (*forward)(const Problem&, const EMOptions<T>&, const EMForward<T>&);
  void (*backward)(const Problem&, const EMOptions<T>&, const EMBackward<T>&);
};
template <class T> struct DynamicKernels {
  void (*forward)(const Problem&, const DynamicOptions&, const DynamicForward<T>&);
  void (*backward)(const Problem&, const DynamicOptions&, const DynamicBackward<T>&);
};
template <class T> struct Kernels {
  EMKernels<T> em;
  DynamicKernels<T> dynamic;
};
struct Target {
  const char* name;
  Kernels<float> in_float;
  Kernels<double> in_double;
  double (*peak_gflops)(int threads);
};
