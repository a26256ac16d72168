// Dynamic routing without stored votes; torchcaps.routing.dynamic is its specification and holds the formulas.
//
// Logits need no storage either: they are the scalar product of a vote with what its parent has been so far. A child
// capsule visits a block of samples before the next child's transforms are read: in a dense layer these are megabytes.
#pragma once

#include "votes.hpp"

namespace TORCHCAPS_TARGET {

template <class T, int ROWS, int INNER, int COLUMNS> class Dynamic : public Votes<T, ROWS, INNER, COLUMNS> {
  using Base = Votes<T, ROWS, INNER, COLUMNS>;
  using V = typename Base::V;
  using Base::g, Base::H, Base::JB, Base::PB, Base::W, Base::MOST, Base::MOST_POSE, Base::L;
  using Base::inner, Base::rows, Base::height, Base::weights, Base::pose_of, Base::valid, Base::vote, Base::undo_vote;

  const DynamicOptions& o;
  const int most_edges;

 public:
  Dynamic(const Problem& problem, const DynamicOptions& options, const T* transform)
      : Base(problem, transform), o(options), most_edges(this->widest()) {}

  long whole() const { return long(PB) * H; }
  long children() const { return long(g.S) * g.C; }
  // Numbers that a sample keeps beside Σ c û of every pass: the log-sum of every child in the passes but the first.
  long log_sums() const { return children() * (o.iterations - 1); }
  // Vectors that a sample needs in the backward pass: what each pass agrees with, and the gradients of its sums.
  long work() const { return 2 * whole() * o.iterations + whole(); }
  int block(int samples) const {
    const long bytes = work() * long(sizeof(V));
    return int(std::max<long>(1, std::min<long>(samples, BLOCK_BYTES / bytes)));
  }

  // Samples from … to - 1: pose [B, S, C, R, Q] → kept, [T, PB, H] a sample, and log_sums [B, T - 1, S, C].
  void forward(int from, int to, const T* pose, T* kept_all, T* log_sums_all, Scratch& scratch) const {
    V* seen = scratch.take<V>((to - from) * whole() + most_edges * JB * (H + 1L));
    V* votes = seen + (to - from) * whole();
    for (long i = 0; i < (to - from) * whole(); ++i) seen[i] = V{};
    for (int t = 0; t < o.iterations; ++t) {
      for (int b = from; b < to; ++b) std::fill_n(reinterpret_cast<T*>(sums(kept_all, b, t)), whole() * L, T(0));
      for (int s = 0; s < g.S; ++s)
        for (int c = 0; c < g.C; ++c)
          for (int b = from; b < to; ++b) {
            const T* m = pose_of(pose + b * children() * rows() * inner(), s, c);
            T* log_sum = t ? log_sums_all + b * log_sums() + (t - 1) * children() + long(s) * g.C + c : nullptr;
            add_child(s, c, m, t ? seen + (b - from) * whole() : nullptr, log_sum, sums(kept_all, b, t), votes);
          }
      if (t + 1 < o.iterations)
        for (int b = from; b < to; ++b) see(sums(kept_all, b, t), seen + (b - from) * whole());
    }
  }

  // The parents of the last pass, [P, J, R, N].
  void result(int b, T* kept_all, T* pose) const {
    for (int p = 0; p < g.P; ++p)
      for (int jb = 0; jb < JB; ++jb) {
        V v[MOST];
        squash(o.form, sums(kept_all, b, o.iterations - 1) + (long(p) * JB + jb) * H, v);
        for (int l = 0; l < std::min(L, g.J - jb * L); ++l)
          for (int h = 0; h < height(); ++h) pose[(long(p) * g.J + jb * L + l) * H + h] = v[h][l];
      }
  }

  // Samples from … to - 1, whose gradients of the last parents stand at the end of their work: down to the gradients
  // of all sums, and gammas [B, T - 1, S, C], Σ c · gradient of c of every child.
  void undo_passes(int from, int to, const T* pose, T* kept_all, const T* log_sums_all, V* works, T* gammas,
                   Scratch& scratch) const {
    V* votes = scratch.take<V>(most_edges * JB * (H + 2L));
    const int last = o.iterations - 1;
    for (int b = from; b < to; ++b) {
      V* parent_grad = works + b * work() + 2 * whole() * o.iterations;
      for (int at = 0; at < PB; ++at)
        undo_squash(o.form, sums(kept_all, b, last) + long(at) * H, parent_grad + long(at) * H,
                    sums_grad(works, b, last) + long(at) * H);
      for (long i = 0; i < whole(); ++i) parent_grad[i] = V{};
      for (int t = 1; t <= last; ++t) {
        V *before = agreed(works, b, t - 1), *now = agreed(works, b, t);
        for (long i = 0; i < whole(); ++i) now[i] = t > 1 ? before[i] : V{};
        see(sums(kept_all, b, t - 1), now);
      }
    }
    if (!o.all_passes) return;
    for (int t = last; t > 0; --t) {
      for (int s = 0; s < g.S; ++s)
        for (int c = 0; c < g.C; ++c)
          for (int b = from; b < to; ++b) {
            const long child = (t - 1) * children() + long(s) * g.C + c;
            gammas[b * log_sums() + child] =
                undo_child(s, c, pose_of(pose + b * children() * rows() * inner(), s, c), agreed(works, b, t),
                           log_sums_all[b * log_sums() + child], sums_grad(works, b, t),
                           works + b * work() + 2 * whole() * o.iterations, votes);
          }
      for (int b = from; b < to; ++b) {
        V* parent_grad = works + b * work() + 2 * whole() * o.iterations;
        for (int at = 0; at < PB; ++at)
          undo_squash(o.inner_form, sums(kept_all, b, t - 1) + long(at) * H, parent_grad + long(at) * H,
                      sums_grad(works, b, t - 1) + long(at) * H);
        if (!o.cumulative)
          for (long i = 0; i < whole(); ++i) parent_grad[i] = V{};
      }
    }
  }

  // Child sites first … last - 1 of samples from … to - 1: the gradients of pose (written) and transform (added to).
  void undo_votes(int first, int last, int from, int to, const T* pose, const T* log_sums_all, V* works,
                  const T* gammas, T* pose_grad, V* transform_grad) const {
    const int size = rows() * inner();
    for (int s = first; s < last; ++s)
      for (int c = 0; c < g.C; ++c)
        for (int b = from; b < to; ++b) {
          const long at_pose = (b * children() + long(s) * g.C + c) * size;
          V m_grad[MOST_POSE];
          for (int i = 0; i < size; ++i) m_grad[i] = V{};
          for (int e = g.child_begin[s]; e < g.child_begin[s + 1]; ++e)
            for (int jb = 0; jb < JB; ++jb) {
              const long at = (long(g.child_parent[e]) * JB + jb) * H;
              const V* w = weights(g.child_kernel[e], c, jb);
              V v[MOST], v_grad[MOST];
              vote(pose + at_pose, w, v);
              for (int h = 0; h < height(); ++h) v_grad[h] = V{};
              for (int t = o.all_passes ? 0 : o.iterations - 1; t < o.iterations; ++t) {
                const V* grad = sums_grad(works, b, t) + at;
                V coupling = even(s) * valid(jb), logit_grad{};
                if (t > 0) {
                  const long child = b * log_sums() + (t - 1) * children() + long(s) * g.C + c;
                  const V* with = agreed(works, b, t) + at;
                  coupling = coupling_of(v, with, log_sums_all[child], jb);
                  if (o.all_passes) {
                    logit_grad = coupling * (product(v, grad) - gammas[child]);
                    for (int h = 0; h < height(); ++h) v_grad[h] += logit_grad * with[h];
                  }
                }
                for (int h = 0; h < height(); ++h) v_grad[h] += coupling * grad[h];
              }
              undo_vote(pose + at_pose, w, v_grad, m_grad, transform_grad + (w - W));
            }
          for (int i = 0; i < size; ++i) pose_grad[at_pose + i] = sum<T>(m_grad[i]);
        }
  }

 private:
  static constexpr long BLOCK_BYTES = 512 * 1024;

  V* sums(T* kept_all, int b, int t) const {
    return reinterpret_cast<V*>(kept_all + b * dynamic_kept<T>(g, o.iterations)) + t * whole();
  }
  V* agreed(V* works, int b, int t) const { return works + b * work() + t * whole(); }
  V* sums_grad(V* works, int b, int t) const { return works + b * work() + (o.iterations + t) * whole(); }
  T even(int s) const {
    return T(1) / (T(g.J) * T(g.child_begin[s + 1] - g.child_begin[s]) + T(o.leaky ? 1 : 0));
  }

  V product(const V* a, const V* b) const {
    V x{}, y{};
    for (int h = 0; h + 1 < height(); h += 2) x += a[h] * b[h], y += a[h + 1] * b[h + 1];
    if (height() % 2) x += a[height() - 1] * b[height() - 1];
    return x + y;
  }

  V coupling_of(const V* v, const V* with, T log_sum, int jb) const {
    return exponential(valid(jb) > 0 ? product(v, with) - log_sum : all(lowest<T>));
  }

  // What the pass after these sums agrees with.
  void see(const V* sums_here, V* seen) const {
    V v[MOST];
    for (int at = 0; at < PB; ++at) {
      squash(o.inner_form, sums_here + long(at) * H, v);
      for (int h = 0; h < height(); ++h) {
        V& x = seen[long(at) * H + h];
        x = o.cumulative ? x + v[h] : v[h];
      }
    }
  }

  // One child's share of its parents' sums.
  void add_child(int s, int c, const T* m, const V* seen, T* log_sum, V* sums_here, V* votes) const {
    const int begin = g.child_begin[s], edges = g.child_begin[s + 1] - begin;
    V* weight = votes + long(most_edges) * JB * H;
    V top = all(o.leaky ? T(0) : std::numeric_limits<T>::lowest());
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const int i = e * JB + jb;
        V* v = votes + long(i) * height();
        vote(m, weights(g.child_kernel[begin + e], c, jb), v);
        weight[i] = even(s) * valid(jb);
        if (seen) {
          const V logit = product(v, seen + (long(g.child_parent[begin + e]) * JB + jb) * H);
          weight[i] = valid(jb) > 0 ? logit : all(lowest<T>);
          top = larger<T>(weight[i], top);
        }
      }
    if (seen) {
      const T high = largest<T>(top);
      V total{};
      for (int i = 0; i < edges * JB; ++i) total += weight[i] = exponential(weight[i] - high);
      const T all_of_them = sum<T>(total) + (o.leaky ? std::exp(-high) : T(0));
      *log_sum = high + std::log(all_of_them);
      for (int i = 0; i < edges * JB; ++i) weight[i] *= T(1) / all_of_them;
    }
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        V* to = sums_here + (long(g.child_parent[begin + e]) * JB + jb) * H;
        const V x = weight[e * JB + jb], *v = votes + (long(e) * JB + jb) * height();
        for (int h = 0; h < height(); ++h) to[h] += x * v[h];
      }
  }

  // One child's logits back: adds to the gradient of what it agreed with; Σ c · gradient of c.
  T undo_child(int s, int c, const T* m, const V* with, T log_sum, const V* sums_grads, V* with_grad, V* votes) const {
    const int begin = g.child_begin[s], edges = g.child_begin[s + 1] - begin;
    V *coupling = votes + long(most_edges) * JB * H, *coupling_grad = coupling + most_edges * JB;
    V total{};
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const int i = e * JB + jb;
        const long at = (long(g.child_parent[begin + e]) * JB + jb) * H;
        V* v = votes + long(i) * height();
        vote(m, weights(g.child_kernel[begin + e], c, jb), v);
        coupling[i] = coupling_of(v, with + at, log_sum, jb);
        coupling_grad[i] = product(v, sums_grads + at);
        total += coupling[i] * coupling_grad[i];
      }
    const T gamma = sum<T>(total);
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const int i = e * JB + jb;
        const V logit_grad = coupling[i] * (coupling_grad[i] - gamma), *v = votes + long(i) * height();
        V* to = with_grad + (long(g.child_parent[begin + e]) * JB + jb) * H;
        for (int h = 0; h < height(); ++h) to[h] += logit_grad * v[h];
      }
    return gamma;
  }

  static V root(V x) {
    for (int i = 0; i < L; ++i) x[i] = std::sqrt(x[i]);
    return x;
  }

  void squash(Squash form, const V* s, V* v) const {
    const V square = product(s, s);
    V factor = all(T(1));
    if (form == Squash::unit) factor = T(1) / larger<T>(root(square), all(T(1e-12)));
    if (form == Squash::sabour) factor = root(square) / (T(1) + square);
    if (form == Squash::su) factor = root(square) / (T(0.5) + square);
    for (int h = 0; h < height(); ++h) v[h] = factor * s[h];
  }

  void undo_squash(Squash form, const V* s, const V* v_grad, V* s_grad) const {
    const V square = product(s, s), length = root(square), along = product(s, v_grad);
    V factor = all(T(1)), slope{};  // d factor / d length, over length
    if (form == Squash::unit) {
      const auto there = length > T(1e-12);
      const V safe = there ? length : all(T(1e-12));
      factor = T(1) / safe;
      slope = there ? -factor * factor * factor : V{};
    } else if (form != Squash::none) {
      const T offset = form == Squash::sabour ? T(1) : T(0.5);
      const V below = offset + square;
      factor = length / below;
      slope = length > 0 ? (offset - square) / (below * below * (length > 0 ? length : all(T(1)))) : V{};
    }
    for (int h = 0; h < height(); ++h) s_grad[h] = factor * v_grad[h] + slope * along * s[h];
  }
};

}  // namespace TORCHCAPS_TARGET
