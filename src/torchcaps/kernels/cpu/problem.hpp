// Inputs and outputs of the kernels: sizes, edges of the routing map sorted by child and by parent, tensors of a pass.
#pragma once

constexpr int MOST_NUMBERS = 64;  // largest pose of a child or parent

struct Problem {
  int B, S, C, P, J, K, R, Q, N, E, D;  // a transform has D rows of N numbers
  // Edges are sorted by child site. Site s has the edges child_begin[s] … child_begin[s + 1] - 1. Parent site p has the
  // edges parent_edge[parent_begin[p]] … parent_edge[parent_begin[p + 1] - 1].
  const int *edge_child, *edge_parent, *edge_kernel, *child_begin, *parent_begin, *parent_edge;
  int most_edges;       // largest number of edges of a parent site
  bool own_transforms;  // every transform is used by one child site only
  bool types;           // couplings of a child compete among the types at one parent site, not among all its parents
  bool pose_logits;     // the rows of a transform after the first Q hold R·Q weights of a pose, and a bias: a part of the logit
  bool none_of_the_above, by_sample;  // by_sample: SIMD lanes hold samples, see votes.hpp
  int threads;

  // A group contains the edges that share one softmax: all edges of a child site, or a single edge.
  int groups() const { return types ? E : S; }
  int group_begin(int group) const { return types ? group : child_begin[group]; }
  int group_end(int group) const { return types ? group + 1 : child_begin[group + 1]; }
  int group_site(int group) const { return types ? edge_child[group] : group; }
  int group_of(int edge) const { return types ? edge : edge_child[edge]; }
};

// The logit of a coupling is constant + Σ linear · d - Σ quadratic · d², d = vote - centre. A null tensor is 0. If
// inverse_temperature is not 0, `quadratic` contains variances, and the factor of d² is
// inverse_temperature / 2 (quadratic + floor).
template <class T> struct Agreement {
  const T *constant, *linear, *quadratic, *centre;
  T floor, inverse_temperature;
};

template <class T> struct Children {
  const T *pose, *activation, *transform;  // null activation: all activations are 1
};

// log_sums is null if the couplings of a child are equal. variance and log_volume are null if they are not requested.
// log_volume is Σ log σ, with σ² = variance + floor. The logarithm of the mass is largest + log_mass.
template <class T> struct MomentsOut {
  T *mass, *mean, *variance, *largest, *log_mass, *log_sums, *log_volume, floor;
};

// The tensors of a pass that its gradients need. A null gradient is 0. log_sums is null if the couplings of a child are
// equal, and coupling_grads is null if the couplings are constants. variance is null if neither variance nor log_volume
// has a gradient.
template <class T> struct Record {
  Agreement<T> agreement;
  const T *log_sums, *coupling_grads, *mean, *largest, *log_mass, *variance, *mass_grad, *mean_grad, *variance_grad,
      *log_volume_grad;
  T floor;
};

// The gradients of the couplings and of the agreement of a pass. A null tensor is not requested.
template <class T> struct PassGrads {
  T *coupling_grads, *constant, *linear, *quadratic, *centre;
};

template <class T> struct ChildrenGrads {
  T *pose, *activation, *transform;
};

// The kernels of one instruction set.
template <class T> struct Kernels {
  void (*moments)(const Problem&, const Children<T>&, const Agreement<T>&, const MomentsOut<T>&);
  void (*couplings)(const Problem&, const Children<T>&, const Agreement<T>&, T* couplings);
  void (*moments_backward)(const Problem&, const Children<T>&, const Record<T>&, const PassGrads<T>&);
  void (*votes_backward)(const Problem&, const Children<T>&, const Record<T>* passes, int count, const ChildrenGrads<T>&);
};
struct Target {
  const char* name;
  Kernels<float> in_float;
  Kernels<double> in_double;
};
