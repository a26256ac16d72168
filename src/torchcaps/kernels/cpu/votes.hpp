// A capsule layer as its kernels see it: poses, transforms in lanes, and the votes they make.
#pragma once

#include "lanes.hpp"
#include "problem.hpp"

namespace TORCHCAPS_TARGET {

// ROWS, INNER and COLUMNS are R, Q and N where they are known beforehand, else 0.
template <class T, int ROWS, int INNER, int COLUMNS> class Votes {
 protected:
  using V = Vector<T>;
  static constexpr int L = lanes<T>;
  static constexpr int MOST = ROWS * COLUMNS ? ROWS * COLUMNS : MOST_NUMBERS;

  const Problem& g;
  const int H, JB, PB;  // numbers in a vote, blocks of parent types, blocks of parents
  const V* const W;     // [K, C, JB, Q, N]

  Votes(const Problem& problem, const T* transform)
      : g(problem), H(g.R * g.N), JB((g.J + L - 1) / L), PB(g.P * JB), W(reinterpret_cast<const V*>(transform)) {}

  int rows() const { return ROWS ? ROWS : g.R; }
  int inner() const { return INNER ? INNER : g.Q; }
  int columns() const { return COLUMNS ? COLUMNS : g.N; }
  int height() const { return ROWS * COLUMNS ? ROWS * COLUMNS : H; }

  const V* weights(int k, int c, int jb) const { return W + ((long(k) * g.C + c) * JB + jb) * inner() * columns(); }
  const T* pose_of(const T* pose, int s, int c) const { return pose + (long(s) * g.C + c) * rows() * inner(); }
  V valid(int jb) const {
    V x{};
    for (int i = 0; i < L; ++i) x[i] = jb * L + i < g.J;
    return x;
  }

  // From 0 on, so that there is one way to contract every step: votes have the same bits wherever they are computed.
  void vote(const T* m, const V* w, V* out) const { vote_rows(m, w, rows(), out); }
  void vote_rows(const T* m, const V* w, int count, V* out) const {
    for (int r = 0; r < count; ++r) {
      V row[COLUMNS ? COLUMNS : MOST]{};
      for (int q = 0; q < inner(); ++q)
        for (int n = 0; n < columns(); ++n) row[n] += m[r * inner() + q] * w[q * columns() + n];
      for (int n = 0; n < columns(); ++n) out[r * columns() + n] = row[n];
    }
  }

  // The gradient of a vote, added to those of its pose [R, Q], lanes apart, and of its transform.
  void undo_vote(const T* __restrict m, const V* __restrict w, const V* __restrict v_grad, V* __restrict m_grad,
                 V* __restrict w_grad) const {
    for (int n = 0; n < columns(); ++n)
      for (int q = 0; q < inner(); ++q) {
        V x = w_grad[q * columns() + n];
        for (int r = 0; r < rows(); ++r) x += m[r * inner() + q] * v_grad[r * columns() + n];
        w_grad[q * columns() + n] = x;
      }
    for (int r = 0; r < rows(); ++r)
      for (int q = 0; q < inner(); ++q) {
        V x = m_grad[r * inner() + q];
        for (int n = 0; n < columns(); ++n) x += v_grad[r * columns() + n] * w[q * columns() + n];
        m_grad[r * inner() + q] = x;
      }
  }
};

}  // namespace TORCHCAPS_TARGET
