// EM routing without stored votes, forward; torchcaps.routing.em is its specification and holds the formulas.
//
// A child site visits its edges, parent types in the lanes: vote, agreement, softmax, sums. Every pass recomputes the
// votes. Sums are centred on the parent's last mean. A block of parent types whose mean moved far compared with its
// spread, or that hardly any child wants, is fitted again from its own side, in log space.
#pragma once

#include "votes.hpp"

namespace TORCHCAPS_TARGET {

template <class T, int ROWS, int INNER, int COLUMNS> class EMFits : public Votes<T, ROWS, INNER, COLUMNS> {
 protected:
  using Base = Votes<T, ROWS, INNER, COLUMNS>;
  using V = typename Base::V;
  using Base::g, Base::H, Base::JB, Base::PB, Base::W, Base::MOST, Base::L;
  using Base::inner, Base::rows, Base::height, Base::weights, Base::pose_of, Base::valid, Base::vote;
  static constexpr int BLOCK = ROWS * COLUMNS && ROWS * COLUMNS % 8 == 0 ? 8 : 1;
  static constexpr int CHUNK_BYTES = 32 * 1024, MOST_TOGETHER = 16;
  // Children below TINY are off; what lies below FAINT (√TINY) is summed as logarithms.
  static constexpr T FAINT = sizeof(T) == 4 ? T(1.0842022e-19) : T(1.4916681462400413e-154);
  static constexpr T TINY = std::numeric_limits<T>::min();

  const EMOptions<T>& o;

 public:
  EMFits(const Problem& problem, const EMOptions<T>& options, const T* transform)
      : Base(problem, transform), o(options) {}

  // Records of vectors over parent types, one a parent block. What a pass keeps: mean [H], 1 / 2σ² [H], data, log
  // data, activation, and log activation - Σ log σ, which is -∞ where there is no parent type.
  long kept() const { return long(PB) * kept_size(); }
  struct Fit {
    V *mean, *half, &data, &log_data, &activation, &prior;
  };
  Fit fit(const T* sample, int t, int at) const {
    V* x = reinterpret_cast<V*>(const_cast<T*>(sample)) + kept() * t + long(at) * kept_size();
    return {x, x + height(), x[2 * height()], x[2 * height() + 1], x[2 * height() + 2], x[2 * height() + 3]};
  }

  // One sample: pose [S, C, R, Q], activation [S, C] → kept passes and log_sums [T - 1, 2, S, C], of every child its
  // largest logit and the logarithm of Σ e^(logit - largest): of huge logits, their sum would lose the second.
  void forward(const T* pose, const T* activation, T* sample, T* log_sums, Scratch& scratch) const {
    const long sites = long(sizeof(Site)) * g.S / long(sizeof(V)) + 1;
    V* sums = scratch.take<V>(long(PB) * sums_size() + std::max(chunk_blocks() * (H + 1), sites));
    const T log_total = log_total_of(activation);
    first_pass(pose, activation, log_total, sample, sums);
    for (int t = 1; t < o.iterations; ++t)
      later_pass(t, pose, activation, log_total, sample, log_sums + log_sums_size() * (t - 1), sums);
  }

  // Mean [P, J, R, N] and activation [P, J] of the last pass.
  void result(const T* sample, T* mean, T* activation) const {
    for (int p = 0; p < g.P; ++p)
      for (int j = 0; j < g.J; ++j) {
        const Fit last = fit(sample, o.iterations - 1, p * JB + j / L);
        for (int h = 0; h < height(); ++h) *mean++ = last.mean[h][j % L];
        *activation++ = last.activation[j % L];
      }
  }

 protected:
  int kept_size() const { return 2 * height() + 4; }
  long log_sums_size() const { return 2L * g.S * g.C; }
  V log_coupling(V logit, const T* log_sums, long child) const {
    return (logit - log_sums[child]) - log_sums[long(g.S) * g.C + child];
  }
  int sums_size() const { return 2 * height() + 1; }  // Σ w, Σ w d [H], Σ w d² [H]

  // Children of a site that are taken together: what is kept of them between two visits stays in the nearest cache.
  int together(int s) const {
    const long bytes = long(g.child_begin[s + 1] - g.child_begin[s]) * JB * (H + 1) * long(sizeof(V));
    const long most = std::max(1L, std::min<long>(MOST_TOGETHER, CHUNK_BYTES / std::max(1L, bytes)));
    const long turns = (g.C + most - 1) / most;
    return int((g.C + turns - 1) / turns);
  }
  long chunk_blocks() const {
    long most = 0;
    for (int s = 0; s < g.S; ++s)
      most = std::max(most, long(together(s)) * (g.child_begin[s + 1] - g.child_begin[s]) * JB);
    return most;
  }

  T even_share(int s) const { return T(1) / (T(g.J) * T(g.child_begin[s + 1] - g.child_begin[s])); }
  V beta(const T* values, int jb) const { return reinterpret_cast<const V*>(values)[jb]; }

  // log R + the child's log-sum; votes minus the mean to d. The backward pass adds up in the same order, to the same
  // bits: of huge distances, only then do differences mean anything.
  V logit(const V* v, const V* kept_record, V* d) const {
    const V *mean = kept_record, *half = kept_record + height();
    V far{};
    for (int h = 0; h < height(); ++h) {
      const V x = v[h] - mean[h];
      d[h] = x;
      far += x * x * half[h];
    }
    return kept_record[2 * height() + 3] - far;
  }

  // Activation and prior of a parent block whose variance and data are known.
  void decide(int t, const Fit& now, int jb, T log_total) const {
    const auto [half_logs, described, x] = weigh(t, now, jb);
    const V magnitude = x < 0 ? -x : x;
    const V log_activation = o.mixing ? larger<T>(log_data_of(now) - log_total, all(std::log(TINY)))
                                      : smaller<T>(x, V{}) - logarithm(T(1) + exponential(-magnitude));
    now.activation = exponential(log_activation);
    now.prior = valid(jb) > 0 ? log_activation - half_logs : all(lowest<T>);
  }

  static V log_data_of(const Fit& now) { return now.log_data == -lowest<T> ? all(lowest<T>) : now.log_data; }

  // Mixing proportions are parts of this: every child that reaches a parent gives all that it has.
  T total_of(const T* activation) const {
    T total = 0;
    for (int s = 0; s < g.S; ++s)
      for (int c = 0; c < g.C && g.child_begin[s] < g.child_begin[s + 1]; ++c) total += activation[long(s) * g.C + c];
    return total;
  }
  T log_total_of(const T* activation) const {
    const T total = total_of(activation);
    return total >= TINY ? std::log(total) : std::numeric_limits<T>::max();
  }

  // Σ log σ; Σ (β_u + log σ), the cost of one datum; and what the activation is the logistic function of.
  struct Weighed {
    V half_logs, described, x;
  };
  Weighed weigh(int t, const Fit& now, int jb) const {
    V half_logs{};
    for (int h = 0; h < height(); ++h) half_logs -= T(0.5) * logarithm(T(2) * now.half[h]);
    const V described = T(H) * beta(o.beta_u, jb) + half_logs;
    return {half_logs, described, o.heat[t] * (beta(o.beta_a, jb) - described * now.data / o.mean_data)};
  }

  // How much there is of the children of a site, the most active one of those that are on, or -1, and its activation.
  struct Site {
    T data;
    int pilot;
    T most;
  };

  // Fits every parent to votes that are shared evenly. A few transforms at a time serve all parents, from the nearest
  // cache; the sums are centred on one vote.
  void first_pass(const T* pose, const T* activation, T log_total, T* sample, V* sums) const {
    Site* sites = reinterpret_cast<Site*>(sums + long(PB) * sums_size());
    for (int s = 0; s < g.S; ++s) {
      Site& site = sites[s] = {T(0), -1, T(0)};
      for (int c = 0; c < g.C; ++c) {
        const T a = activation[long(s) * g.C + c];
        site.data += a;
        if (a < TINY) continue;
        if (site.pilot < 0 || a > site.most) site.pilot = c, site.most = a;
      }
    }
    clear(sums);
    int most_edges = 0;
    for (int p = 0; p < g.P; ++p) {
      T data = 0, most = 0, best = 0;
      int pilot = -1;
      most_edges = std::max(most_edges, g.parent_begin[p + 1] - g.parent_begin[p]);
      for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e) {
        const int s = g.parent_child[e];
        if (sites[s].pilot < 0) continue;
        const T share = even_share(s) * sites[s].most;
        if (pilot < 0 || share > best) pilot = e, best = share;
        most = std::max(most, even_share(s));
      }
      for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e)
        if (pilot >= 0) data += even_share(g.parent_child[e]) / most * sites[g.parent_child[e]].data;
      const bool dead = pilot < 0;
      for (int jb = 0; jb < JB; ++jb) {
        const Fit now = fit(sample, 0, p * JB + jb);
        now.data = data * most * valid(jb);
        now.log_data = all(dead ? -lowest<T> : std::log(data) + std::log(most));
        if (dead) {
          for (int h = 0; h < height(); ++h) now.mean[h] = V{};
        } else {
          const int s = g.parent_child[pilot], c = sites[s].pilot;
          vote(pose_of(pose, s, c), weights(g.parent_kernel[pilot], c, jb), now.mean);
        }
        now.activation = all(dead ? T(0) : T(1) / data);
        now.prior = all(dead ? T(0) : T(1) / most);
      }
    }
    const long one = long(g.C) * inner() * this->columns() * long(sizeof(V));
    const int step = int(std::max(1L, CHUNK_BYTES / one));
    for (int jb = 0; jb < JB; ++jb)
      for (int from = 0; from < most_edges; from += step)
        for (int p = 0; p < g.P; ++p)
          add_evenly(pose, activation, g.parent_begin[p] + from,
                     std::min(g.parent_begin[p] + from + step, g.parent_begin[p + 1]), jb,
                     fit(sample, 0, p * JB + jb), sums + (long(p) * JB + jb) * sums_size());
    for (int at = 0; at < PB; ++at) {
      const Fit now = fit(sample, 0, at);
      const V mask = valid(at % JB), *first = sums + long(at) * sums_size(), *second = first + height();
      V centre[MOST];
      for (int h = 0; h < height(); ++h) centre[h] = now.mean[h];
      if (!settle(centre, first, second, now, mask)) spread_evenly(pose, activation, at, now);
      decide(0, now, at % JB, log_total);
    }
  }

  // Adds the shares of a parent's edges from … to - 1 to its sums around now.mean. The largest even share is 1 / prior,
  // the data in units of it 1 / activation: of faint children, 1 / data would overflow.
  void add_evenly(const T* pose, const T* activation, int from, int to, int jb, const Fit& now, V* first) const {
    constexpr int ROWS_TOGETHER = ROWS % 2 == 0 && COLUMNS ? 2 : 0;  // rows whose sums stay in registers
    constexpr int NUMBERS = ROWS_TOGETHER ? ROWS_TOGETHER * COLUMNS : MOST;
    const int step = ROWS_TOGETHER ? ROWS_TOGETHER : rows(), numbers = step * this->columns();
    const T inverse = now.activation[0], unit = now.prior[0];
    for (int r = 0; r < rows(); r += step) {
      const long at = long(r) * this->columns();
      V centre[NUMBERS], one[NUMBERS], two[NUMBERS];
      for (int h = 0; h < numbers; ++h) {
        centre[h] = now.mean[at + h];
        one[h] = first[at + h];
        two[h] = first[height() + at + h];
      }
      for (int e = from; e < to; ++e) {
        const int s = g.parent_child[e];
        const T share = even_share(s) * unit * inverse;
        for (int c = 0; c < g.C; ++c) {
          const T weight = share * activation[long(s) * g.C + c];
          V v[NUMBERS];
          this->vote_rows(pose_of(pose, s, c) + r * inner(), weights(g.parent_kernel[e], c, jb), step, v);
          for (int h = 0; h < numbers; ++h) {
            const V d = v[h] - centre[h], x = weight * d;
            one[h] += x;
            two[h] += x * d;
          }
        }
      }
      for (int h = 0; h < numbers; ++h) first[at + h] = one[h], first[height() + at + h] = two[h];
    }
  }

  // The spread of evenly shared votes around their mean, which is set right by what it misses them by.
  void spread_evenly(const T* pose, const T* activation, int at, const Fit& now) const {
    const int p = at / JB, jb = at % JB;
    V spread[MOST]{}, beside[MOST]{};
    for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e) {
      const int s = g.parent_child[e];
      for (int c = 0; c < g.C; ++c) {
        V v[MOST];
        vote(pose_of(pose, s, c), weights(g.parent_kernel[e], c, jb), v);
        for (int h = 0; h < height(); ++h) {
          const V d = v[h] - now.mean[h], x = even_share(s) * now.prior * now.activation * activation[long(s) * g.C + c] * d;
          beside[h] += x;
          spread[h] += x * d;
        }
      }
    }
    correct(now, beside, spread, valid(jb));
  }

  void correct(const Fit& now, const V* beside, const V* spread, V mask) const {
    for (int h = 0; h < height(); ++h) {
      now.mean[h] += beside[h];
      now.half[h] = halved(larger<T>(spread[h] - beside[h] * beside[h], V{}), mask);
    }
  }
  V halved(V spread, V mask) const { return mask > 0 ? T(0.5) / (spread + o.floor) : all(T(0.5)); }

  // Mean and variance from the sums around a centre; false where too little of the second one would be left.
  bool settle(const V* centre, const V* first, const V* second, const Fit& now, V mask) const {
    typename Lane<T>::bits lost{};
    for (int h = 0; h < height(); ++h) {
      const V moved = first[h] * first[h];
      const V spread = larger<T>(second[h] - moved, V{});
      now.mean[h] = centre[h] + first[h];
      now.half[h] = halved(spread, mask);
      lost |= mask * moved > T(1000) * (spread + o.floor);
    }
    return !any(lost);
  }

  // Adds Σ w, Σ w d and Σ w d² of some children of one site to its parents' sums; d and w are [edge, jb, child].
  void add_up(int s, int children, const V* d, const V* w, V* sums) const {
    for (int e = g.child_begin[s]; e < g.child_begin[s + 1]; ++e)
      for (int jb = 0; jb < JB; ++jb) {
        V* zeroth = sums + (long(g.child_parent[e]) * JB + jb) * sums_size();
        V *first = zeroth + 1, *second = first + height();
        V total = *zeroth;
        for (int c = 0; c < children; ++c) total += w[c];
        *zeroth = total;
        for (int h = 0; h < height(); h += BLOCK) {
          V one[BLOCK], two[BLOCK];
          for (int i = 0; i < BLOCK; ++i) one[i] = first[h + i], two[i] = second[h + i];
          for (int c = 0; c < children; ++c) {
            const V* dc = d + long(c) * height() + h;
            for (int i = 0; i < BLOCK; ++i) {
              const V x = w[c] * dc[i];
              one[i] += x;
              two[i] += x * dc[i];
            }
          }
          for (int i = 0; i < BLOCK; ++i) first[h + i] = one[i], second[h + i] = two[i];
        }
        d += long(children) * height();
        w += children;
      }
  }

  void clear(V* sums) const {
    for (long i = 0; i < long(PB) * sums_size(); ++i) sums[i] = V{};
  }

  // Softmax of some children's logits w [block, child], whose largest are in top, lanes apart; times their activations.
  void share_out(int children, long blocks, V* top, const T* activation, V* w, T* log_sums) const {
    V total[MOST_TOGETHER]{};
    T high[MOST_TOGETHER], scale[MOST_TOGETHER];
    for (int c = 0; c < children; c += L) {
      const V x = largest_across<T>(top + c);
      std::memcpy(high + c, &x, sizeof x);
    }
    for (long i = 0; i < blocks; i += children)
      for (int c = 0; c < children; ++c) total[c] += w[i + c] = exponential(w[i + c] - high[c]);
    for (int c = 0; c < children; c += L) {
      const V x = sums_across<T>(total + c), inverse = T(1) / x, log_sum = logarithm(x);
      for (int i = 0; i < std::min(L, children - c); ++i) {
        log_sums[c + i] = high[c + i];
        log_sums[long(g.S) * g.C + c + i] = log_sum[i];
        scale[c + i] = activation[c + i] * inverse[i];
      }
    }
    for (long i = 0; i < blocks; i += children)
      for (int c = 0; c < children; ++c) w[i + c] *= scale[c];
  }

  void later_pass(int t, const T* pose, const T* activation, T log_total, T* sample, T* log_sums, V* sums) const {
    V* buffer = sums + long(PB) * sums_size();
    V* w = buffer + chunk_blocks() * H;
    clear(sums);
    for (int s = 0; s < g.S; ++s) {
      const int begin = g.child_begin[s], end = g.child_begin[s + 1];
      if (begin == end) {
        for (long c = long(s) * g.C; c < (s + 1L) * g.C; ++c) log_sums[c] = log_sums[long(g.S) * g.C + c] = 0;
        continue;
      }
      const int step = together(s);
      for (int c0 = 0; c0 < g.C; c0 += step) {
        const int children = std::min(step, g.C - c0);
        V top[MOST_TOGETHER];
        for (int c = 0; c < MOST_TOGETHER; ++c) top[c] = all(std::numeric_limits<T>::lowest());
        long block = 0;
        for (int e = begin; e < end; ++e)
          for (int jb = 0; jb < JB; ++jb) {
            const V* before = fit(sample, t - 1, g.child_parent[e] * JB + jb).mean;
            for (int c = 0; c < children; ++c, ++block) {
              V v[MOST];
              vote(pose_of(pose, s, c0 + c), weights(g.child_kernel[e], c0 + c, jb), v);
              w[block] = logit(v, before, buffer + block * height());
              top[c] = larger<T>(w[block], top[c]);
            }
          }
        const long child = long(s) * g.C + c0;
        share_out(children, block, top, activation + child, w, log_sums + child);
        add_up(s, children, buffer, w, sums);
      }
    }
    for (int at = 0; at < PB; ++at) {
      const V mask = valid(at % JB), *x = sums + long(at) * sums_size();
      const Fit now = fit(sample, t, at);
      now.data = x[0];
      now.log_data = logarithm(mask > 0 ? x[0] : all(T(1)));
      bool exact = !any((x[0] < T(10) * FAINT) & (mask > 0));
      if (exact) {
        const V inverse = T(1) / (mask > 0 ? x[0] : all(T(1)));
        V first[MOST], second[MOST];
        for (int h = 0; h < height(); ++h) first[h] = x[1 + h] * inverse, second[h] = x[1 + height() + h] * inverse;
        exact = settle(fit(sample, t - 1, at).mean, first, second, now, mask);
      }
      if (!exact) fit_alone(pose, activation, fit(sample, t - 1, at).mean, now, log_sums, at);
      decide(t, now, at % JB, log_total);
    }
  }

  // One parent block from its own side, its shares stabilised by the largest log R a of a child.
  void fit_alone(const T* pose, const T* activation, const V* before, const Fit& now, const T* log_sums, int at) const {
    const int p = at / JB, jb = at % JB;
    const V mask = valid(jb);
    V d[MOST], moment[MOST]{}, top = all(lowest<T>), total{};
    const auto each = [&](auto use) {
      for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e)
        for (int c = 0; c < g.C; ++c) {
          const long child = long(g.parent_child[e]) * g.C + c;
          if (activation[child] < TINY) continue;
          V v[MOST];
          vote(pose_of(pose, g.parent_child[e], c), weights(g.parent_kernel[e], c, jb), v);
          use(std::log(activation[child]) + log_coupling(logit(v, before, d), log_sums, child));
        }
    };
    each([&](V log_w) { top = larger<T>(log_w, top); });
    top = top == lowest<T> ? V{} : top;
    each([&](V log_w) {
      const V w = exponential(log_w - top);
      total += w;
      for (int h = 0; h < height(); ++h) moment[h] += w * d[h];
    });
    const auto alive = ~(total <= T(0));
    const V inverse = alive ? T(1) / (alive ? total : all(T(1))) : V{};
    V beside[MOST]{};
    for (int h = 0; h < height(); ++h) {
      now.mean[h] = alive ? before[h] + moment[h] * inverse : V{};
      moment[h] = V{};
    }
    each([&](V log_w) {
      const V w = inverse * exponential(log_w - top);
      for (int h = 0; h < height(); ++h) {
        const V x = d[h] + (before[h] - now.mean[h]), y = w * x;
        beside[h] += y;
        moment[h] += y * x;
      }
    });
    correct(now, beside, moment, mask);
    now.data = total * exponential(top);
    now.log_data = alive ? logarithm(total) + top : all(-lowest<T>);
  }
};

}  // namespace TORCHCAPS_TARGET
