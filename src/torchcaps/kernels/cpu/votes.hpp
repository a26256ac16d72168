// The two lane layouts of a capsule layer, and its votes.
//
// By type: the lanes of a vector hold parent types at one site of one sample. A tile is one sample. A block of parents
// is as many parent types as a vector has lanes. By sample: the lanes hold samples of one parent. A tile is as many
// samples as a vector has lanes. A block of parents is one parent type. Kernels are written once for both layouts.
#pragma once

#include "lanes.hpp"
#include "problem.hpp"

namespace TORCHCAPS_TARGET {

// An activation below TINY counts as 0. Below SMALL = √TINY, sums use logarithms.
template <class T> inline constexpr T TINY = std::numeric_limits<T>::min();
template <class T> inline constexpr T SMALL = sizeof(T) == 4 ? T(1.0842022e-19) : T(1.4916681462400413e-154);

// The lane layouts. Child holds a number of a child, Weight a number of a transform.
template <class T> struct ByType {
  using V = Vector<T>;
  using Child = T;
  using Weight = V;
  static constexpr bool by_type = true;
  static V broadcast(Child x) { return splat(x); }
  // Combines the lanes of each vector. The memory of x and out must have room for a multiple of the lanes.
  template <class Combine> static void over_lanes(V* x, int count, Child* out, Combine combine) {
    for (int i = 0; i < count; i += lanes<T>) {
      const V y = combine(x + i);
      std::memcpy(out + i, &y, sizeof y);
    }
  }
  static void sums(V* x, int count, Child* out) { over_lanes(x, count, out, sums_across<T>); }
  static void largest(V* x, int count, Child* out) { over_lanes(x, count, out, largest_across<T>); }
  static int vectors(int count) { return (count + lanes<T> - 1) / lanes<T>; }
};
template <class T> struct BySample {
  using V = Vector<T>;
  using Child = V;
  using Weight = T;
  static constexpr bool by_type = false;
  static V broadcast(Child x) { return x; }
  static void sums(const V* x, int count, Child* out) { std::copy_n(x, count, out); }
  static void largest(const V* x, int count, Child* out) { std::copy_n(x, count, out); }
  static int vectors(int count) { return count; }
};

// Bits of FORM: the agreement has `linear`, it has `quadratic` or `centre`, the pass has variances, pose_logits.
constexpr int LINEAR = 1, QUADRATIC = 2, VARIANCE = 4, POSE = 8;  // kernels are compiled for some combinations of these bits
// ROWS, INNER and COLUMNS are R, Q and N if they are known at compile time, and 0 otherwise.
template <class T, template <class> class LaneLayout, int ROWS, int INNER, int COLUMNS, int FORM> class Votes {
 protected:
  using V = Vector<T>;
  using Layout = LaneLayout<T>;
  using Child = typename Layout::Child;
  using Weight = typename Layout::Weight;
  static constexpr int L = lanes<T>;
  static constexpr int MOST = ROWS * COLUMNS ? ROWS * COLUMNS : MOST_NUMBERS, PLACES = MOST + (FORM & POSE ? 1 : 0);
  static constexpr int BLOCK = !ROWS ? 1 : MOST % 8 == 0 ? 8 : MOST % 4 == 0 ? 4 : 1;  // numbers of a vote whose sums stay in registers

  const Problem& g;
  const Weight* const transform;  // by type [K, C, JB, D, N], by sample [K, C, J, D, N]

 public:
  static constexpr bool by_type = Layout::by_type;
  const int H, JB, PB;  // numbers per vote, blocks of parents per site, blocks of parents in total

  Votes(const Problem& problem, const Weight* transform)
      : g(problem), transform(transform), H(g.R * g.N), JB(Layout::by_type ? (g.J + L - 1) / L : g.J), PB(g.P * JB) {}

  int tiles() const { return Layout::by_type ? g.B : (g.B + L - 1) / L; }
  long children() const { return long(g.S) * g.C; }
  long transform_size() const { return long(g.K) * g.C * JB * depth() * g.N; }

  // Offsets of a block of parents in tensors with one scalar or vector per parent. Scalars are [B, P, J]. Vectors are
  // [B, P, H, J] by type and [P, J, H, B] by sample, so that the dimension of the lanes is last.
  struct Place {
    long scalar, scalar_stride, vector, vector_stride;
    int rows;  // lanes in use
  };
  Place place(int tile, int at) const {
    const long p = at / JB, block = at % JB;
    if constexpr (Layout::by_type) {
      const long site = tile * long(g.P) + p, rest = g.J - block * L;
      return {site * g.J + block * L, 1, site * H * g.J + block * L, g.J, int(std::min<long>(L, rest))};
    } else {
      const long each = long(g.P) * g.J, sample = long(tile) * L;
      return {sample * each + at, each, at * long(H) * g.B + sample, g.B, samples_of(tile)};
    }
  }
  int samples_of(int tile) const { return Layout::by_type ? 1 : std::min(L, g.B - tile * L); }
  // Load and store a block of parents. Lanes without a parent are 0, and a null tensor is 0.
  V load_scalar(const T* from, const Place& at) const { return from ? load_some(from + at.scalar, at.rows, at.scalar_stride) : V{}; }
  void load_vector(const T* from, const Place& at, V* to) const {
    for (int h = 0; h < numbers(); ++h) to[h] = from ? load_some(from + at.vector + h * at.vector_stride, at.rows) : V{};
  }
  void store_scalar(V x, T* to, const Place& at) const {
    if (to) store_some(x, to + at.scalar, at.rows, at.scalar_stride);
  }
  void store_vector(const V* x, T* to, const Place& at) const {
    for (int h = 0; to && h < numbers(); ++h) store_some(x[h], to + at.vector + h * at.vector_stride, at.rows);
  }
  // The factors of d² in the logits; 0 in lanes without a parent.
  void load_quadratic(const Agreement<T>& from, const Place& at, V* to) const {
    load_vector(from.quadratic, at, to);
    if (from.inverse_temperature == 0) return;
    const V holds_parent = first_lanes(at.rows), half = splat(T(0.5) * from.inverse_temperature);
    for (int h = 0; h < numbers(); ++h) to[h] = holds_parent > 0 ? half / (to[h] + from.floor) : V{};
  }
  // The numbers of the children of sites first … last - 1, `each` per site; a null tensor is 1. By type they stay in
  // place, by sample they are copied into lanes.
  const Child* load_children(const T* from, int tile, int first, int last, long each, Arena& arena) const {
    const long start = long(tile) * (Layout::by_type ? 1 : L) * g.S * each + first * each, count = (last - first) * each;
    if (Layout::by_type && from) return reinterpret_cast<const Child*>(from + start);
    Child* to = arena.take<Child>(count);
    if (!from) std::fill_n(to, count, Child{} + T(1));
    else if constexpr (!Layout::by_type) load_lanes(from + start, g.S * each, samples_of(tile), int(count), to);
    return to;
  }
  // Rounding errors grow with the number of summands, so long sums are moved elsewhere after this many summands.
  static constexpr int MOST_SUMMANDS = 128;

 protected:
  // Sums at the parents, `size` numbers per block of parents. If any parent has many votes, they are moved to `earlier`.
  struct Sums {
    long size;
    V *recent, *earlier;
    int* votes;  // number of votes in `recent`, per parent site
  };
  Sums zero_sums(long size, Arena& arena) const {
    const bool many = long(g.most_edges) * g.C > 4 * MOST_SUMMANDS;
    return {size, arena.zeros<V>(PB * size), many ? arena.zeros<V>(PB * size) : nullptr, arena.zeros<int>(g.P)};
  }
  void count_votes(const Sums& sums, int p, int votes) const {
    if (!sums.earlier || (sums.votes[p] += votes) < MOST_SUMMANDS) return;
    sums.votes[p] = 0;
    for (long i = p * JB * sums.size; i < (p + 1) * JB * sums.size; ++i)
      sums.earlier[i] += sums.recent[i], sums.recent[i] = V{};
  }
  void add_earlier(const Sums& sums) const {
    for (long i = 0; sums.earlier && i < PB * sums.size; ++i) sums.recent[i] += sums.earlier[i];
  }

  int rows() const { return ROWS ? ROWS : g.R; }
  int inner() const { return INNER ? INNER : g.Q; }
  int columns() const { return COLUMNS ? COLUMNS : g.N; }
  int numbers() const { return ROWS * COLUMNS ? ROWS * COLUMNS : H; }
  long pose_size() const { return long(rows()) * inner(); }
  bool pose_logits() const { return FORM == POSE || (FORM & POSE && g.pose_logits); }
  int depth() const { return FORM & POSE ? g.D : inner(); }

  const Weight* weights(int kernel, int c, int block) const {
    return transform + ((long(kernel) * g.C + c) * JB + block) * depth() * columns();
  }
  void prefetch(const Weight* w) const {  // transforms of a single child site are seldom in a cache
    for (long i = 0; g.own_transforms && i < depth() * columns(); i += 64 / sizeof(Weight)) __builtin_prefetch(w + i);
  }
  // 1 in the first lanes, 0 in the others.
  static V first_lanes(int count) {
    V x{};
    for (int i = 0; i < count; ++i) x[i] = 1;
    return x;
  }
  T uniform_coupling(int group) const {
    const T parents = T(g.J) * T(g.group_end(group) - g.group_begin(group));
    return T(1) / (parents + T(g.none_of_the_above));
  }

  // All callers contract multiply-adds in the same way, so that a vote has the same bits wherever it is computed.
  // With POSE, the part of the logit that depends on the pose only follows the vote.
  void vote(const Child* pose, const Weight* w, V* out) const {
    prefetch(w + 2 * depth() * columns());
    vote_rows(pose, w, rows(), out);
    w += inner() * columns();
    V logit = pose_logits() ? V{} + w[pose_size()] : V{};
    for (int r = 0; pose_logits() && r < rows(); ++r, pose += inner(), w += inner()) {
      V x{};  // the sum of a row does not wait for the sums of other rows
      for (int q = 0; q < inner(); ++q) x += pose[q] * w[q];
      logit += x;
    }
    if (FORM & POSE) out[numbers()] = logit;
  }
  V pose_logit(const V* v) const { return FORM & POSE ? v[numbers()] : V{}; }
  // `count` rows of a vote minus a centre (null: 0). The sum begins with -centre.
  [[gnu::always_inline]] void vote_rows(const Child* pose, const Weight* w, int count, V* out, const V* centre = nullptr) const {
    constexpr int SUMS = TORCHCAPS_REGISTERS / 2, STEP = !COLUMNS ? 4 : COLUMNS % SUMS ? COLUMNS : SUMS;
    for (int r = 0; r < count; ++r, pose += inner(), out += columns(), centre += centre ? columns() : 0) {
      int n = 0;
      for (; n + STEP <= columns(); n += STEP) {
        V x[STEP]{};
        for (int i = 0; i < STEP && centre; ++i) x[i] = -centre[n + i];
        for (int q = 0; q < inner(); ++q)
          for (int i = 0; i < STEP; ++i) x[i] += pose[q] * w[q * columns() + n + i];
        for (int i = 0; i < STEP; ++i) out[n + i] = x[i];
      }
      for (; n < columns(); ++n) {
        V x = centre ? -centre[n] : V{};
        for (int q = 0; q < inner(); ++q) x += pose[q] * w[q * columns() + n];
        out[n] = x;
      }
    }
  }

  // Adds Σ_n vote_grad · w to the gradient of the pose, which is set if `first`. By type, the lanes are summed later.
  void add_pose_grad(const Weight* __restrict w, const V* __restrict vote_grad, V* __restrict pose_grad, bool first) const {
    for (int r = 0; r < rows(); ++r)
      for (int q = 0; q < inner(); ++q) {
        V x = first ? V{} : pose_grad[r * inner() + q];
        for (int n = 0; n < columns(); ++n) x += vote_grad[r * columns() + n] * w[q * columns() + n];
        if (pose_logits()) x += vote_grad[numbers()] * w[inner() * columns() + r * inner() + q];
        pose_grad[r * inner() + q] = x;
      }
  }
  // By type: adds Σ_r pose · vote_grad to the gradient of a transform.
  void add_transform_grad(const Child* __restrict pose, const V* __restrict vote_grad, V* __restrict w_grad) const {
    for (int q = 0; q < inner(); ++q)
      for (int n = 0; n < columns(); ++n) {
        V x = w_grad[q * columns() + n];
        for (int r = 0; r < rows(); ++r) x += pose[r * inner() + q] * vote_grad[r * columns() + n];
        w_grad[q * columns() + n] = x;
      }
    for (int i = 0; pose_logits() && i <= pose_size(); ++i)
      w_grad[inner() * columns() + i] += (i < pose_size() ? pose[i] : T(1)) * vote_grad[numbers()];
  }
};

}  // namespace TORCHCAPS_TARGET
