// Dynamic routing without stored votes; torchcaps.routing.dynamic is its specification and holds the formulas.
//
// The numbers of a vote lie in the lanes. Logits need no storage either: they are the scalar product of a vote with what
// its parent has been so far. Some samples visit a child together, and then the next child of its site: transforms are
// read once for all of them, and what a pass reads and adds to of their parents stays in the nearest cache.
#pragma once

#include "lanes.hpp"
#include "problem.hpp"

namespace TORCHCAPS_TARGET {

// INNER is Q, and BLOCKS the vectors that a vote fills, of poses of one row; 0 for any other.
template <class T, int INNER, int BLOCKS> class Dynamic {
  using V = Vector<T>;
  static constexpr int L = lanes<T>;
  static constexpr bool FLAT = INNER > 0;
  static constexpr int MOST_BLOCKS = BLOCKS ? BLOCKS : MOST_NUMBERS / L;
  static constexpr int MOST_TOGETHER = L < 16 ? L : 16, PAIR = 2;
  static constexpr int SIDE_BY_SIDE = BLOCKS && BLOCKS < 4 ? 8 / BLOCKS : 2;
  static constexpr long BLOCK_BYTES = 512 * 1024, CHUNK_BYTES = 32 * 1024, GIVEN_BYTES = 16 * 1024 * 1024;

  const Problem& g;
  const DynamicOptions& o;
  const int H, HB;   // numbers of a vote, and the vectors that they fill
  const V* const W;  // [K, C, J, Q, HB]: a transform's numbers once for each row of the pose
  int most_items = 1;

 public:
  Dynamic(const Problem& problem, const DynamicOptions& options, const T* transform)
      : g(problem), o(options), H(g.R * g.N), HB(int(padded_numbers<T>(H)) / L), W(reinterpret_cast<const V*>(transform)) {
    for (int s = 0; s < g.S; ++s) most_items = std::max(most_items, items(s));
  }

  long whole() const { return long(g.P) * g.J * blocks(); }
  long children() const { return long(g.S) * g.C; }
  // Numbers that a sample keeps beside Σ c û of every pass, in the passes but the first: of every child its largest logit
  // and the logarithm of Σ e^(logit - largest), [T - 1, 2, S, C].
  long log_sums() const { return 2 * children() * (o.iterations - 1); }
  // Vectors that a sample needs in the backward pass: what each pass agrees with, the gradients of its sums, and the
  // gradient of the last parents, then of what the passes agreed with.
  long work() const { return (2 * o.iterations + 1) * whole(); }
  V* parents_grad(V* works, int b) const { return works + b * work() + 2 * o.iterations * whole(); }
  int block(int samples) const {
    const long bytes = work() * long(sizeof(V));
    return int(std::max<long>(1, std::min<long>(samples, BLOCK_BYTES / bytes)));
  }

  // What every child gave its parents in some samples: of the passes that have a gradient but the first, the couplings
  // and the gradients of its logits, [child, sample, pass, 2, items in lanes].
  struct Given {
    V* memory;
    int from, count;
  };
  long given_size() const { return children() * undone_passes() * 2L * item_blocks(most_items); }
  // Samples that go through the backward pass together, so that what is given stays within bounds.
  int chunk(int samples) const {
    const long bytes = std::max(1L, given_size()) * long(sizeof(V));
    const int most = int(std::max<long>(1, std::min<long>(samples, GIVEN_BYTES * o.threads / bytes)));
    const int turns = (samples + most - 1) / most;
    return (samples + turns - 1) / std::max(1, turns);
  }

  // Samples from … to - 1: pose [B, S, C, R, Q] → kept, [T, P, J, HB] a sample, and log_sums.
  void forward(int from, int to, const T* pose, T* kept_all, T* log_sums_all, Scratch& scratch) const {
    V* seen = scratch.take<V>((to - from) * whole() + visit_size());
    V* space = seen + (to - from) * whole();
    std::fill_n(reinterpret_cast<T*>(seen), (to - from) * whole() * L, T(0));
    for (int t = 0; t < o.iterations; ++t) {
      for (int b = from; b < to; ++b) std::fill_n(reinterpret_cast<T*>(sums(kept_all, b, t)), whole() * L, T(0));
      visit_all(pose, 0, g.S, from, to, space, [&](const Visit& x) {
        vote(x);
        if (t > 0) share_out(x, t, seen + (x.b - from) * whole(), log_sums_all);
        for (int i = 0; i < x.count; ++i)
          add_up(x, x.votes_of(i), t > 0 ? x.shares + i * x.blocks : x.even, sums(kept_all, x.b + i, t));
      });
      if (t + 1 < o.iterations)
        for (int b = from; b < to; ++b) see(sums(kept_all, b, t), seen + (b - from) * whole());
    }
  }

  // The parents of the last pass, [P, J, R, N].
  void result(int b, T* kept_all, T* pose) const {
    V v[MOST_BLOCKS];
    for (long item = 0; item < long(g.P) * g.J; ++item) {
      squash(o.form, sums(kept_all, b, o.iterations - 1) + item * blocks(), v);
      std::copy_n(reinterpret_cast<const T*>(v), H, pose + item * H);
    }
  }

  // Samples from … to - 1, whose gradients of the last parents stand in their work: down to the gradients of all sums,
  // and what was given.
  void undo_passes(int from, int to, const T* pose, T* kept_all, const T* log_sums_all, V* works, const Given& all,
                   Scratch& scratch) const {
    V* space = scratch.take<V>(visit_size());
    const int last = o.iterations - 1;
    for (int b = from; b < to; ++b) {
      V* parent_grad = parents_grad(works, b);
      for (long at = 0; at < whole(); at += blocks())
        undo_squash(o.form, sums(kept_all, b, last) + at, parent_grad + at, sums_grad(works, b, last) + at);
      std::fill_n(reinterpret_cast<T*>(parent_grad), whole() * L, T(0));
      for (int t = 1; t <= last; ++t) {
        V *before = agreed(works, b, t - 1), *now = agreed(works, b, t);
        for (long i = 0; i < whole(); ++i) now[i] = t > 1 ? before[i] : V{};
        see(sums(kept_all, b, t - 1), now);
      }
    }
    for (int t = last; t > last - undone_passes(); --t) {
      visit_all(pose, 0, g.S, from, to, space, [&](const Visit& x) {
        vote(x);
        for (int i = 0; i < x.count; ++i) {
          const int b = x.b + i;
          V *coupling = given(all, x, i, t), *slope = coupling + x.blocks, total{};
          couplings(x, i, agreed(works, b, t), log_sums_of(log_sums_all, b, t, x.child), coupling);
          if (!o.all_passes) continue;
          agree(x, i, sums_grad(works, b, t), slope);
          for (int k = 0; k < x.blocks; ++k) total += coupling[k] * slope[k];
          const T gamma = sum<T>(total);
          for (int k = 0; k < x.blocks; ++k) slope[k] = coupling[k] * (slope[k] - gamma);
          add_up(x, x.votes_of(i), slope, parents_grad(works, b));
        }
      });
      if (!o.all_passes) return;
      for (int b = from; b < to; ++b) {
        V* parent_grad = parents_grad(works, b);
        for (long at = 0; at < whole(); at += blocks())
          undo_squash(o.inner_form, sums(kept_all, b, t - 1) + at, parent_grad + at, sums_grad(works, b, t - 1) + at);
        if (!o.cumulative) std::fill_n(reinterpret_cast<T*>(parent_grad), whole() * L, T(0));
      }
    }
  }

  // Child sites first … last - 1 of samples from … to - 1: the gradients of pose (written) and transform (added to).
  void undo_votes(int first, int last, int from, int to, const T* pose, V* works, const Given& all, T* pose_grad,
                  V* transform_grad, Scratch& scratch) const {
    V* space = scratch.take<V>(visit_size());
    visit_all(pose, first, last, from, to, space, [&](const Visit& x) {
      for (int i = 0; i < x.count; ++i) undo_shares(x, i, works, all);
      undo_transforms(x, transform_grad);
      for (int i = 0; i < x.count; i += PAIR) undo_poses(x, i, pose_grad);
    });
  }

  // [K, C, J, Q, N] ↔ [K, C, J, Q, HB]; the way back adds up over the rows of the pose.
  bool same_layout() const { return g.R == 1 && H == HB * L; }
  long transform_size() const { return long(g.K) * g.C * g.J * g.Q * HB * L; }
  void spread(const T* from, T* to, long count) const {
    for (long row = 0; row < count; ++row, from += g.N, to += HB * L) {
      for (int h = 0; h < H; ++h) to[h] = from[h % g.N];
      std::fill(to + H, to + HB * L, T(0));
    }
  }
  void gather_back(const T* from, T* to, long count) const {
    for (long row = 0; row < count; ++row, from += HB * L, to += g.N)
      for (int n = 0; n < g.N; ++n) {
        to[n] = from[n];
        for (int r = 1; r < g.R; ++r) to[n] += from[r * g.N + n];
      }
  }
  // [P, J, R, N] → [P, J, HB].
  void pad(const T* from, T* to) const {
    for (long item = 0; item < long(g.P) * g.J; ++item, from += H, to += HB * L) {
      std::copy_n(from, H, to);
      std::fill(to + H, to + HB * L, T(0));
    }
  }

 private:
  int blocks() const { return BLOCKS ? BLOCKS : HB; }
  int inner() const { return INNER ? INNER : g.Q; }
  V* sums(T* kept_all, int b, int t) const {
    return reinterpret_cast<V*>(kept_all + b * dynamic_kept<T>(g, o.iterations)) + t * whole();
  }
  V* agreed(V* works, int b, int t) const { return works + b * work() + t * whole(); }
  V* sums_grad(V* works, int b, int t) const { return works + b * work() + (o.iterations + t) * whole(); }
  template <class X> X* log_sums_of(X* all_of_them, int b, int t, long child) const {
    return all_of_them + b * log_sums() + 2 * (t - 1) * children() + child;
  }
  int undone_passes() const { return o.all_passes ? o.iterations - 1 : std::min(1, o.iterations - 1); }

  // The parents of a site's children, edge by edge: where their vectors stand in a record of all parents, and where the
  // transforms to them of the site's first child do.
  struct Item {
    long at, weights;
  };
  // Some samples at a child. Their votes are [sample, item, HB]; couplings have an item a lane.
  struct Visit {
    int s, c, b, count, items, blocks;
    long child, vote_size, transforms;
    const Item* item;
    const T* poses;
    V *votes, *shares, *even;
    V* votes_of(int i) const { return votes + i * vote_size; }
    long weights(int k) const { return item[k].weights + transforms; }
  };
  V* given(const Given& all, const Visit& x, int i, int t) const {
    const long place = (x.child * all.count + x.b + i - all.from) * undone_passes() + t - o.iterations + undone_passes();
    return all.memory + place * 2 * item_blocks(most_items);
  }
  int items(int s) const { return (g.child_begin[s + 1] - g.child_begin[s]) * g.J; }
  int item_blocks(int count) const { return (count + L - 1) / L; }
  long pose_size() const { return FLAT ? INNER : long(g.Q) * HB * L; }
  long poses_size() const { return (MOST_TOGETHER * g.C * pose_size() + L - 1) / L; }
  long votes_size() const { return long(MOST_TOGETHER + SIDE_BY_SIDE) * most_items * HB; }  // a last few are no one's
  long shares_size() const { return long(std::max(MOST_TOGETHER, 2 * o.iterations) + 1) * item_blocks(most_items); }
  long visit_size() const {
    return poses_size() + votes_size() + shares_size() + most_items * long(sizeof(Item)) / long(sizeof(V)) + 1;
  }
  int together(int s) const {
    const long bytes = 3L * items(s) * blocks() * long(sizeof(V));
    return int(std::max(1L, std::min<long>(MOST_TOGETHER, CHUNK_BYTES / std::max(1L, bytes))));
  }

  // Runs work(visit) for all children of some sites and samples.
  template <class Work>
  void visit_all(const T* pose, int first, int last, int from, int to, V* space, Work work) const {
    T* poses = reinterpret_cast<T*>(space);
    V *votes = space + poses_size(), *shares = votes + votes_size();
    Item* item = reinterpret_cast<Item*>(shares + shares_size());
    for (int s = first; s < last; ++s) {
      const int count = items(s), most = together(s);
      const long one = long(inner()) * blocks();
      for (int e = g.child_begin[s], k = 0; e < g.child_begin[s + 1]; ++e)
        for (int j = 0; j < g.J; ++j, ++k)
          item[k] = {(long(g.child_parent[e]) * g.J + j) * blocks(), (long(g.child_kernel[e]) * g.C * g.J + j) * one};
      Visit x{s, 0, from, 0, count, item_blocks(count), 0, long(count) * blocks(), 0, item, poses, votes, shares, nullptr};
      x.even = shares + shares_size() - item_blocks(most_items);
      const T even = T(1) / (T(count) + T(o.leaky ? 1 : 0));
      for (int k = 0; k < x.blocks; ++k) x.even[k] = only_items(x, k, all(even), T(0));
      for (; x.b < to; x.b += most) {
        x.count = std::min(most, to - x.b);
        for (int i = 0; i < x.count; ++i)
          for (int c = 0; c < g.C; ++c) take_pose(pose + at_pose(x.b + i, s, c), poses + (long(c) * x.count + i) * pose_size());
        for (x.c = 0; x.c < g.C; ++x.c) {
          x.child = long(s) * g.C + x.c;
          x.transforms = x.c * g.J * one;
          x.poses = poses + long(x.c) * x.count * pose_size();
          work(x);
        }
      }
    }
  }
  long at_pose(int b, int s, int c) const { return (b * children() + long(s) * g.C + c) * g.R * g.Q; }
  V only_items(const Visit& x, int block, V value, T otherwise) const {
    V item{};
    for (int i = 0; i < L; ++i) item[i] = T(i);
    return item < T(x.items - block * L) ? value : all(otherwise);
  }

  // A pose's numbers as the votes take them: each in all lanes of its row.
  void take_pose(const T* m, T* to) const {
    if constexpr (FLAT) std::copy_n(m, INNER, to);
    else
      for (int q = 0; q < g.Q; ++q)
        for (int h = 0; h < HB * L; ++h) *to++ = h < H ? m[h / g.N * g.Q + q] : T(0);
  }
  V number(const T* m, int q, int block) const {
    if constexpr (FLAT) return all(m[q]);
    else return reinterpret_cast<const V*>(m)[q * blocks() + block];
  }

  void vote(const Visit& x) const {
    constexpr int N = SIDE_BY_SIDE;
    for (int i = 0; i < x.count; i += N) {
      const T* of[N];
      for (int k = 0; k < N; ++k) of[k] = x.poses + std::min(i + k, x.count - 1) * pose_size();
      V* to = x.votes_of(i);
      for (int item = 0; item < x.items; ++item, to += blocks()) {
        const V* w = W + x.weights(item);
        V v[N][MOST_BLOCKS]{};
        for (int q = 0; q < inner(); ++q)
          for (int h = 0; h < blocks(); ++h)
            for (int k = 0; k < N; ++k) v[k][h] += number(of[k], q, h) * w[q * blocks() + h];
        for (int k = 0; k < N; ++k)
          for (int h = 0; h < blocks(); ++h) to[k * x.vote_size + h] = v[k][h];
      }
    }
  }

  V product(const V* a, const V* b) const {
    V x{};
    for (int h = 0; h < blocks(); ++h) x += a[h] * b[h];
    return x;
  }

  // Of a sample's votes with vectors of their parents, an item a lane.
  void agree(const Visit& x, int i, const V* of_parents, V* out) const {
    const V* votes = x.votes_of(i);
    for (int block = 0; block < x.blocks; ++block) {
      const int here = x.items - block * L;
      const Item* item = x.item + block * L;
      V sums[L];
      for (int k = 0; k < L; ++k)
        sums[k] = k < here ? product(votes + long(block * L + k) * blocks(), of_parents + item[k].at) : V{};
      out[block] = sums_across<T>(sums);
    }
  }

  void couplings(const Visit& x, int i, const V* with, const T* log_sums, V* out) const {
    agree(x, i, with, out);
    for (int k = 0; k < x.blocks; ++k) {
      const V log_coupling = smaller<T>((out[k] - log_sums[0]) - log_sums[children()], V{});
      out[k] = only_items(x, k, exponential(log_coupling), T(0));
    }
  }

  // The couplings of the samples and their log-sums.
  void share_out(const Visit& x, int t, const V* seen, T* log_sums_all) const {
    V top[L], total[L]{};
    for (int i = 0; i < L; ++i) top[i] = all(o.leaky ? T(0) : std::numeric_limits<T>::lowest());
    for (int i = 0; i < x.count; ++i) {
      V* logit = x.shares + i * x.blocks;
      agree(x, i, seen + i * whole(), logit);
      for (int k = 0; k < x.blocks; ++k)
        top[i] = larger<T>(logit[k] = only_items(x, k, logit[k], lowest<T>), top[i]);
    }
    const V high = largest_across<T>(top);
    for (int i = 0; i < x.count; ++i)
      for (int k = i * x.blocks; k < (i + 1) * x.blocks; ++k) total[i] += x.shares[k] = exponential(x.shares[k] - high[i]);
    V sum = sums_across<T>(total);
    if (o.leaky) sum += exponential(-high);
    const V log_sum = logarithm(sum), inverse = T(1) / sum;
    for (int i = 0; i < x.count; ++i) {
      T* log_sums = log_sums_of(log_sums_all, x.b + i, t, x.child);
      log_sums[0] = high[i];
      log_sums[children()] = log_sum[i];
      for (int k = i * x.blocks; k < (i + 1) * x.blocks; ++k) x.shares[k] *= inverse[i];
    }
  }

  // Adds a sample's votes by their shares to vectors of their parents.
  void add_up(const Visit& x, const V* votes, const V* shares, V* of_parents) const {
    const T* share = reinterpret_cast<const T*>(shares);
    for (int k = 0; k < x.items; ++k)
      for (int h = 0; h < blocks(); ++h) of_parents[x.item[k].at + h] += share[k] * votes[long(k) * blocks() + h];
  }

  // What the pass after these sums agrees with.
  void see(const V* sums_here, V* seen) const {
    V v[MOST_BLOCKS];
    for (long at = 0; at < whole(); at += blocks()) {
      squash(o.inner_form, sums_here + at, v);
      for (int h = 0; h < blocks(); ++h) seen[at + h] = o.cumulative ? seen[at + h] + v[h] : v[h];
    }
  }

  // The gradients of a sample's votes, over all passes or through the last: each is a sum of vectors of its parent.
  struct Term {
    const T* share;
    const V* of_parents;
  };
  void undo_shares(const Visit& x, int i, V* works, const Given& all) const {
    Term* const terms = reinterpret_cast<Term*>(x.shares);
    int count = 0;
    for (int t = o.all_passes ? 0 : o.iterations - 1; t < o.iterations; ++t) {
      const V* shares = t > 0 ? given(all, x, i, t) : x.even;
      terms[count++] = {reinterpret_cast<const T*>(shares), sums_grad(works, x.b + i, t)};
      if (t > 0 && o.all_passes) terms[count++] = {reinterpret_cast<const T*>(shares + x.blocks), agreed(works, x.b + i, t)};
    }
    V* to = x.votes_of(i);
    for (int k = 0; k < x.items; ++k)
      for (int h = 0; h < blocks(); ++h) {
        V sum{};
        for (int n = 0; n < count; ++n) sum += terms[n].share[k] * terms[n].of_parents[x.item[k].at + h];
        *to++ = sum;
      }
  }

  void undo_transforms(const Visit& x, V* transform_grad) const {
    constexpr int N = INNER ? INNER : 1;  // rows of a transform whose gradients stay in registers
    for (int item = 0; item < x.items; ++item)
      for (int q = 0; q < inner(); q += N)
        for (int h = 0; h < blocks(); ++h) {
          V *w_grad = transform_grad + x.weights(item) + q * blocks() + h, sum[N];
          for (int k = 0; k < N; ++k) sum[k] = w_grad[k * blocks()];
          for (int i = 0; i < x.count; ++i) {
            const V v_grad = x.votes_of(i)[long(item) * blocks() + h];
            for (int k = 0; k < N; ++k) sum[k] += number(x.poses + i * pose_size(), q + k, h) * v_grad;
          }
          for (int k = 0; k < N; ++k) w_grad[k * blocks()] = sum[k];
        }
  }

  // Of samples i and the next, from the gradients of their votes.
  void undo_poses(const Visit& x, int i, T* pose_grad) const {
    if constexpr (FLAT) {
      const V *one = x.votes_of(i), *two = x.votes_of(std::min(i + 1, x.count - 1));
      V sum[PAIR * INNER]{};
      for (int item = 0; item < x.items; ++item)
        for (int h = 0; h < BLOCKS; ++h) {
          const V *w = W + x.weights(item) + h, a = one[item * BLOCKS + h], b = two[item * BLOCKS + h];
          for (int q = 0; q < INNER; ++q) {
            sum[q] += a * w[q * BLOCKS];
            sum[INNER + q] += b * w[q * BLOCKS];
          }
        }
      T numbers[PAIR * INNER];
      for (int k = 0; k < PAIR * INNER; k += L) {
        const V total = sums_across<T>(sum + k);
        std::memcpy(numbers + k, &total, sizeof total);
      }
      for (int k = 0; k < std::min(PAIR, x.count - i); ++k)
        std::copy_n(numbers + k * INNER, INNER, pose_grad + at_pose(x.b + i + k, x.s, x.c));
    } else {
      for (int k = i; k < std::min(i + PAIR, x.count); ++k) {
        V sum[MOST_NUMBERS * MOST_BLOCKS];
        for (int q = 0; q < g.Q * HB; ++q) sum[q] = V{};
        for (int item = 0; item < x.items; ++item)
          for (int q = 0; q < g.Q; ++q)
            for (int h = 0; h < HB; ++h)
              sum[q * HB + h] += x.votes_of(k)[long(item) * HB + h] * W[x.weights(item) + q * HB + h];
        const T* numbers = reinterpret_cast<const T*>(sum);
        T* out = pose_grad + at_pose(x.b + k, x.s, x.c);
        for (int r = 0; r < g.R; ++r)
          for (int q = 0; q < g.Q; ++q) {
            T total = 0;
            for (int n = 0; n < g.N; ++n) total += numbers[long(q) * HB * L + r * g.N + n];
            out[r * g.Q + q] = total;
          }
      }
    }
  }

  void squash(Squash form, const V* s, V* v) const {
    const T square = sum<T>(product(s, s));
    T factor = 1;
    if (form == Squash::unit) factor = T(1) / std::max(std::sqrt(square), T(1e-12));
    if (form == Squash::sabour) factor = std::sqrt(square) / (T(1) + square);
    if (form == Squash::su) factor = std::sqrt(square) / (T(0.5) + square);
    for (int h = 0; h < blocks(); ++h) v[h] = factor * s[h];
  }

  void undo_squash(Squash form, const V* s, const V* v_grad, V* s_grad) const {
    const T square = sum<T>(product(s, s)), length = std::sqrt(square), along = sum<T>(product(s, v_grad));
    T factor = 1, slope = 0;  // d factor / d length, over length
    if (form == Squash::unit) {
      factor = T(1) / std::max(length, T(1e-12));
      const T turned = length > T(1e-12) ? factor * along : T(0);
      for (int h = 0; h < blocks(); ++h) s_grad[h] = factor * (v_grad[h] - turned * (factor * s[h]));
      return;
    }
    if (form != Squash::none) {
      const T offset = form == Squash::sabour ? T(1) : T(0.5), below = offset + square;
      factor = length / below;
      slope = length > 0 ? (offset - square) / below / below / length : T(0);
    }
    for (int h = 0; h < blocks(); ++h) s_grad[h] = factor * v_grad[h] + slope * along * s[h];
  }
};

}  // namespace TORCHCAPS_TARGET
