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
  using Base::inner, Base::rows, Base::height, Base::weights, Base::valid, Base::vote, Base::GROUP;

  const DynamicOptions& o;
  const int most_edges;

 public:
  Dynamic(const Problem& problem, const DynamicOptions& options, const T* transform)
      : Base(problem, transform), o(options), most_edges(this->widest()) {}

  long whole() const { return long(PB) * H; }
  long children() const { return long(g.S) * g.C; }
  // Numbers that a sample keeps beside Σ c û of every pass, in the passes but the first: of every child its largest logit
  // and the logarithm of Σ e^(logit - largest), [T - 1, 2, S, C].
  long log_sums() const { return 2 * children() * (o.iterations - 1); }
  long gammas_size() const { return children() * (o.iterations - 1); }
  // Vectors that a sample needs in the backward pass: what each pass agrees with, and the gradients of its sums.
  long work() const { return 2 * whole() * o.iterations + whole(); }
  int block(int samples) const {
    const long bytes = work() * long(sizeof(V));
    return int(std::max<long>(1, std::min<long>(samples, BLOCK_BYTES / bytes)));
  }

  // Samples from … to - 1: pose [B, S, C, R, Q] → kept, [T, PB, H] a sample, and log_sums.
  void forward(int from, int to, const T* pose, T* kept_all, T* log_sums_all, Scratch& scratch) const {
    V* seen = scratch.take<V>((to - from) * whole() + together() * most_edges * JB * (H + 1L) + site_poses(to - from));
    V* votes = seen + (to - from) * whole();
    T* poses = reinterpret_cast<T*>(votes + together() * most_edges * JB * (H + 1L));
    for (long i = 0; i < (to - from) * whole(); ++i) seen[i] = V{};
    for (int t = 0; t < o.iterations; ++t) {
      for (int b = from; b < to; ++b) std::fill_n(reinterpret_cast<T*>(sums(kept_all, b, t)), whole() * L, T(0));
      for (int s = 0; s < g.S; ++s) {
        gather(pose, s, from, to, poses);
        for (int c = 0; c < g.C; ++c)
          for (int b = from; b < to; b += together())
            add_child(t, s, c, b, std::min(together(), to - b), poses + (long(c) * (to - from) + b - from) * size(),
                      seen + (b - from) * whole(), log_sums_all, kept_all, votes);
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
    V* votes = scratch.take<V>(most_edges * JB * (H + 2L) + site_poses(to - from));
    T* poses = reinterpret_cast<T*>(votes + most_edges * JB * (H + 2L));
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
      for (int s = 0; s < g.S; ++s) {
        gather(pose, s, from, to, poses);
        for (int c = 0; c < g.C; ++c)
          for (int b = from; b < to; ++b) {
            const long child = (t - 1) * children() + long(s) * g.C + c;
            gammas[b * gammas_size() + child] =
                undo_child(s, c, poses + (long(c) * (to - from) + b - from) * size(), agreed(works, b, t),
                           log_sums_of(log_sums_all, b, t, s, c), sums_grad(works, b, t),
                           works + b * work() + 2 * whole() * o.iterations, votes);
          }
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
                  const T* gammas, T* pose_grad, V* transform_grad, Scratch& scratch) const {
    T* poses = reinterpret_cast<T*>(scratch.take<V>(2 * site_poses(to - from)));
    T* poses_grad = poses + site_poses(to - from) * L;
    for (int s = first; s < last; ++s) {
      gather(pose, s, from, to, poses);
      for (int c = 0; c < g.C; ++c)
        for (int b = from; b < to; b += GROUP) {
          const long at = (long(c) * (to - from) + b - from) * size();
          undo_votes_of(s, c, b, std::min(GROUP, to - b), poses + at, log_sums_all, works, gammas, poses_grad + at,
                        transform_grad);
        }
      for (int b = from; b < to; ++b)
        for (int c = 0; c < g.C; ++c)
          std::copy_n(poses_grad + (long(c) * (to - from) + b - from) * size(), size(), pose_grad + at_pose(b, s, c));
    }
  }

 private:
  static constexpr long BLOCK_BYTES = 512 * 1024, CHUNK_BYTES = 24 * 1024;

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

  template <class X> X* log_sums_of(X* all_of_them, int b, int t, int s, int c) const {
    return all_of_them + b * log_sums() + 2 * (t - 1) * children() + long(s) * g.C + c;
  }
  V coupling_of(const V* v, const V* with, const T* log_sums, int jb) const {
    const V log_coupling = smaller<T>((product(v, with) - log_sums[0]) - log_sums[children()], V{});
    return exponential(valid(jb) > 0 ? log_coupling : all(lowest<T>));
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

  // One child in some samples.
  void undo_votes_of(int s, int c, int b, int samples, const T* poses, const T* log_sums_all, V* works, const T* gammas,
                     T* poses_grad, V* transform_grad) const {
    V m_grad[GROUP][MOST_POSE], v_grad[GROUP][MOST];
    const T* m[GROUP];
    for (int i = 0; i < samples; ++i) {
      m[i] = poses + i * size();
      for (int k = 0; k < size(); ++k) m_grad[i][k] = V{};
    }
    for (int e = g.child_begin[s]; e < g.child_begin[s + 1]; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const long at = (long(g.child_parent[e]) * JB + jb) * H;
        const V* w = weights(g.child_kernel[e], c, jb);
        V votes[GROUP][MOST];
        for (int i = 0; i < samples; i += 2) {
          const int other = std::min(i + 1, samples - 1);
          this->vote_twice(m[i], m[other], w, votes[i], votes[other]);
        }
        for (int i = 0; i < samples; ++i) {
          const V* v = votes[i];
          for (int h = 0; h < height(); ++h) v_grad[i][h] = V{};
          for (int t = o.all_passes ? 0 : o.iterations - 1; t < o.iterations; ++t) {
            const V* grad = sums_grad(works, b + i, t) + at;
            V coupling = even(s) * valid(jb);
            if (t > 0) {
              const T gamma = gammas[(b + i) * gammas_size() + (t - 1) * children() + long(s) * g.C + c];
              const V* with = agreed(works, b + i, t) + at;
              coupling = coupling_of(v, with, log_sums_of(log_sums_all, b + i, t, s, c), jb);
              if (o.all_passes) {
                const V logit_grad = coupling * (product(v, grad) - gamma);
                for (int h = 0; h < height(); ++h) v_grad[i][h] += logit_grad * with[h];
              }
            }
            for (int h = 0; h < height(); ++h) v_grad[i][h] += coupling * grad[h];
          }
        }
        this->undo_votes_together(samples, m, w, v_grad, m_grad, transform_grad + (w - W));
      }
    for (int i = 0; i < samples; ++i)
      for (int k = 0; k < size(); ++k) poses_grad[i * size() + k] = sum<T>(m_grad[i][k]);
  }

  // Samples whose votes of one child stay in the nearest cache together.
  int together() const {
    return int(std::max(1L, std::min<long>(L, CHUNK_BYTES / (long(most_edges) * JB * (H + 1) * long(sizeof(V))))));
  }

  // The poses of a site's children, [C, sample, R · Q]: samples lie so far apart in memory that they crowd the cache out.
  int size() const { return rows() * inner(); }
  long at_pose(int b, int s, int c) const { return (b * children() + long(s) * g.C + c) * size(); }
  long site_poses(int samples) const { return (long(samples) * g.C * size() + L - 1) / L; }
  void gather(const T* pose, int s, int from, int to, T* poses) const {
    for (int b = from; b < to; ++b)
      for (int c = 0; c < g.C; ++c)
        std::copy_n(pose + at_pose(b, s, c), size(), poses + (long(c) * (to - from) + b - from) * size());
  }

  // One child's shares of its parents' sums, in `samples` samples from b on, whose poses of it follow one another.
  void add_child(int t, int s, int c, int b, int samples, const T* m, const V* seen, T* log_sums_all, T* kept_all,
                 V* votes) const {
    const int begin = g.child_begin[s], edges = g.child_begin[s + 1] - begin, blocks = edges * JB;
    V* weight = votes + long(samples) * blocks * H;
    V top[L], total[L]{};
    for (int i = 0; i < L; ++i) top[i] = all(o.leaky ? T(0) : std::numeric_limits<T>::lowest());
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const V* w = weights(g.child_kernel[begin + e], c, jb);
        const long at = (long(g.child_parent[begin + e]) * JB + jb) * H;
        const int block = e * JB + jb;
        for (int i = 0; i < samples; i += 2) {
          const int other = std::min(i + 1, samples - 1);
          this->vote_twice(m + i * size(), m + other * size(), w, votes + (long(i) * blocks + block) * H,
                           votes + (long(other) * blocks + block) * H);
        }
        for (int i = 0; i < samples; ++i) {
          const V* v = votes + (long(i) * blocks + block) * H;
          V& logit = weight[i * blocks + block];
          if (t == 0) {
            logit = even(s) * valid(jb);
          } else {
            logit = valid(jb) > 0 ? product(v, seen + i * whole() + at) : all(lowest<T>);
            top[i] = larger<T>(logit, top[i]);
          }
        }
      }
    if (t > 0) {
      const V high = largest_across<T>(top);
      for (int i = 0; i < samples; ++i)
        for (int k = i * blocks; k < (i + 1) * blocks; ++k) total[i] += weight[k] = exponential(weight[k] - high[i]);
      V sum = sums_across<T>(total);
      if (o.leaky) sum += exponential(-high);
      const V log_sum = logarithm(sum), inverse = T(1) / sum;
      for (int i = 0; i < samples; ++i) {
        T* log_sums = log_sums_of(log_sums_all, b + i, t, s, c);
        log_sums[0] = high[i];
        log_sums[children()] = log_sum[i];
        for (int k = i * blocks; k < (i + 1) * blocks; ++k) weight[k] *= inverse[i];
      }
    }
    for (int i = 0; i < samples; ++i)
      for (int e = 0; e < edges; ++e)
        for (int jb = 0; jb < JB; ++jb) {
          V* to = sums(kept_all, b + i, t) + (long(g.child_parent[begin + e]) * JB + jb) * H;
          const long k = long(i) * blocks + e * JB + jb;
          const V x = weight[k], *v = votes + k * H;
          for (int h = 0; h < height(); ++h) to[h] += x * v[h];
        }
  }

  // One child's logits back: adds to the gradient of what it agreed with; Σ c · gradient of c.
  T undo_child(int s, int c, const T* m, const V* with, const T* log_sums, const V* sums_grads, V* with_grad, V* votes) const {
    const int begin = g.child_begin[s], edges = g.child_begin[s + 1] - begin;
    V *coupling = votes + long(most_edges) * JB * H, *coupling_grad = coupling + most_edges * JB;
    V total{};
    for (int e = 0; e < edges; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        const int i = e * JB + jb;
        const long at = (long(g.child_parent[begin + e]) * JB + jb) * H;
        V* v = votes + long(i) * height();
        vote(m, weights(g.child_kernel[begin + e], c, jb), v);
        coupling[i] = coupling_of(v, with + at, log_sums, jb);
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
      factor = T(1) / (there ? length : all(T(1e-12)));
      const V turned = there ? factor * along : V{};
      for (int h = 0; h < height(); ++h) s_grad[h] = factor * (v_grad[h] - turned * (factor * s[h]));
      return;
    }
    if (form != Squash::none) {
      const T offset = form == Squash::sabour ? T(1) : T(0.5);
      const V below = offset + square;
      factor = length / below;
      slope = length > 0 ? (offset - square) / below / below / (length > 0 ? length : all(T(1))) : V{};
    }
    for (int h = 0; h < height(); ++h) s_grad[h] = factor * v_grad[h] + slope * along * s[h];
  }
};

}  // namespace TORCHCAPS_TARGET
