// EM routing without stored votes; torchcaps.routing.em is its specification and holds the formulas.
//
// A child site visits its edges, parent types in the lanes: vote, agreement, softmax, sums. Every pass recomputes the
// votes. Sums are centred on the parent's last mean. A block of parent types whose mean moved far compared with its
// spread, or that hardly any child wants, is fitted again from its own side, in log space.
#pragma once

#include "votes.hpp"

namespace TORCHCAPS_TARGET {

template <class T, int ROWS, int INNER, int COLUMNS> class EM : public Votes<T, ROWS, INNER, COLUMNS> {
  using Base = Votes<T, ROWS, INNER, COLUMNS>;
  using V = typename Base::V;
  using Base::g, Base::H, Base::JB, Base::PB, Base::W, Base::MOST, Base::MOST_POSE, Base::L;
  using Base::inner, Base::rows, Base::height, Base::weights, Base::pose_of, Base::valid, Base::vote, Base::undo_vote;
  static constexpr int BLOCK = ROWS * COLUMNS && ROWS * COLUMNS % 8 == 0 ? 8 : 1;
  static constexpr int CHUNK_BYTES = 24 * 1024, MOST_TOGETHER = 16;
  static constexpr T NOTHING = sizeof(T) == 4 ? T(1.0842022e-19) : T(1.4916681462400413e-154);
  static constexpr T FAINT = 10 * NOTHING;

  const EMOptions<T>& o;
  const int most_edges, step;  // edges of a child site; children of a site that are taken together

 public:
  EM(const Problem& problem, const EMOptions<T>& options, const T* transform)
      : Base(problem, transform), o(options), most_edges(this->widest()), step(together()) {}

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

  // One sample: pose [S, C, R, Q], activation [S, C] → kept passes and log_sums [T - 1, S, C].
  void forward(const T* pose, const T* activation, T* sample, T* log_sums, Scratch& scratch) const {
    first_pass(pose, activation, sample);
    V* sums = scratch.take<V>(long(PB) * sums_size() + chunk_blocks() * (H + 1));
    for (int t = 1; t < o.iterations; ++t)
      later_pass(t, pose, activation, sample, log_sums + long(t - 1) * g.S * g.C, sums);
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

  // Gradients of the last mean [PB, H] and activation [PB], in lanes → of pose and activation (written), of transform
  // and betas (added to).
  void backward(const T* pose, const T* activation, const T* sample, const T* log_sums, const V* mean_grad,
                const V* activation_grad, T* pose_grad, T* child_activation_grad, V* transform_grad, V* beta_u_grad,
                V* beta_a_grad, Scratch& scratch) const {
    const int last = o.iterations - 1;
    const long child = long(g.S) * g.C, gammas_size = (last * child + L - 1) / L;
    V* grads = scratch.take<V>(long(PB) * (o.iterations * grad_size() + sums_size()) + gammas_size +
                               chunk_blocks() * (H + 2));
    V* sums = grads + long(PB) * o.iterations * grad_size();
    T* gammas = reinterpret_cast<T*>(sums + long(PB) * sums_size());
    V* buffer = sums + long(PB) * sums_size() + gammas_size;
    for (long i = 0; i < child; ++i) child_activation_grad[i] = 0;
    for (int t = last; t >= 0; --t) {
      for (int at = 0; at < PB; ++at) {
        const Fit now = fit(sample, t, at);
        const Grad grad = gradient(grads, t, at);
        V log_activation_grad;
        if (t == last) {
          log_activation_grad = now.activation * activation_grad[at];
          for (int h = 0; h < height(); ++h) grad.mean[h] = mean_grad[long(at) * H + h], grad.variance[h] = V{};
        } else {
          const V* x = sums + long(at) * sums_size();
          log_activation_grad = x[0];
          for (int h = 0; h < height(); ++h) {
            grad.mean[h] = T(2) * now.half[h] * x[1 + h];
            grad.variance[h] = now.half[h] * (T(2) * now.half[h] * x[1 + height() + h] - x[0]);
          }
        }
        undecide(t, now, at % JB, log_activation_grad, grad, beta_u_grad, beta_a_grad);
      }
      if (t > 0)
        undo_later_pass(t, pose, activation, sample, grads, log_sums + (t - 1) * child, gammas + (t - 1) * child,
                        child_activation_grad, sums, buffer);
    }
    undo_votes(pose, activation, sample, log_sums, grads, gammas, pose_grad, child_activation_grad, transform_grad);
  }

 private:
  // Gradients of a fit: of mean and variance [H]; Σ_h variance gradient · spread; 1 / data, 0 where there is none;
  // gradient of data through the cost.
  struct Grad {
    V *mean, *variance, &offset, &inverse, &data;
  };
  Grad gradient(V* grads, int t, int at) const {
    V* x = grads + (long(t) * PB + at) * grad_size();
    return {x, x + height(), x[2 * height()], x[2 * height() + 1], x[2 * height() + 2]};
  }

  int kept_size() const { return 2 * height() + 4; }
  int grad_size() const { return 2 * height() + 3; }
  int sums_size() const { return 2 * height() + 1; }  // Σ w, Σ w d [H], Σ w d² [H]

  int together() const {
    return int(std::min<long>(std::min(g.C, MOST_TOGETHER),
                              std::max<long>(1, CHUNK_BYTES / (long(most_edges) * JB * H * long(sizeof(V))))));
  }
  long chunk_blocks() const { return long(step) * most_edges * JB; }

  T even_share(int s) const { return T(1) / (T(g.J) * T(g.child_begin[s + 1] - g.child_begin[s])); }
  V beta(const T* values, int jb) const { return reinterpret_cast<const V*>(values)[jb]; }

  // log R + the child's log-sum; votes minus the mean to d.
  V logit(const V* v, const V* kept_record, V* d) const {
    const V *mean = kept_record, *half = kept_record + height();
    V far{}, farther{};
    for (int h = 0; h < height(); h += 2) {
      const V x = v[h] - mean[h];
      d[h] = x;
      far += x * x * half[h];
      if (h + 1 < height()) {
        const V y = v[h + 1] - mean[h + 1];
        d[h + 1] = y;
        farther += y * y * half[h + 1];
      }
    }
    return kept_record[2 * height() + 3] - (far + farther);
  }

  // Activation and prior of a parent block whose variance and data are known.
  void decide(int t, const Fit& now, int jb) const {
    const auto [half_logs, described, x] = weigh(t, now, jb);
    const V magnitude = x < 0 ? -x : x;
    const V log_activation = smaller<T>(x, V{}) - logarithm(T(1) + exponential(-magnitude));
    now.activation = exponential(log_activation);
    now.prior = valid(jb) > 0 ? log_activation - half_logs : all(lowest<T>);
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

  // From the gradients of log activation, mean and variance to those of data, betas and variance, and the factors that
  // the children need.
  void undecide(int t, const Fit& now, int jb, V log_activation_grad, const Grad& grad, V* beta_u_grad,
                V* beta_a_grad) const {
    const auto [half_logs, described, x] = weigh(t, now, jb);
    const V small = exponential(x < 0 ? x : -x);  // 1 - activation without cancellation
    const V x_grad = (x < 0 ? T(1) / (T(1) + small) : small / (T(1) + small)) * log_activation_grad * valid(jb);
    const V cost_grad = -o.heat[t] * x_grad / o.mean_data;
    beta_a_grad[jb] += o.heat[t] * x_grad;
    beta_u_grad[jb] += T(H) * cost_grad * now.data;
    grad.data = cost_grad * described;
    V offset{};
    for (int h = 0; h < height(); ++h) {
      grad.variance[h] += cost_grad * now.data * now.half[h];
      offset += grad.variance[h] * (T(0.5) / now.half[h] - o.floor);
    }
    grad.offset = offset;
    grad.inverse = exponential(-now.log_data);
  }

  void first_pass(const T* pose, const T* activation, T* sample) const {
    for (int p = 0; p < g.P; ++p) {
      T data = 0, most = 0;
      int pilot = -1, pilot_type = 0;
      for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e) {
        const int s = g.parent_child[e];
        const T share = even_share(s);
        for (int c = 0; c < g.C; ++c) {
          const T a = activation[long(s) * g.C + c];
          if (a <= 0) continue;
          if (pilot < 0) pilot = e, pilot_type = c;
          data += a * share;
          most = std::max(most, share);
        }
      }
      const bool dead = data <= NOTHING * most;
      for (int jb = 0; jb < JB; ++jb) {
        const V mask = valid(jb);
        const Fit now = fit(sample, 0, p * JB + jb);
        now.data = data * mask;
        now.log_data = all(dead ? -lowest<T> : std::log(data));
        if (dead) {
          for (int h = 0; h < height(); ++h) now.mean[h] = V{}, now.half[h] = halved(V{}, mask);
        } else {
          V centre[MOST], first[MOST]{}, second[MOST]{}, d[MOST];
          vote(pose_of(pose, g.parent_child[pilot], pilot_type), weights(g.parent_kernel[pilot], pilot_type, jb), centre);
          for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e) {
            const int s = g.parent_child[e];
            const T share = even_share(s) / data;
            for (int c = 0; c < g.C; ++c) {
              const T weight = share * activation[long(s) * g.C + c];
              vote(pose_of(pose, s, c), weights(g.parent_kernel[e], c, jb), d);
              for (int h = 0; h < height(); ++h) {
                d[h] -= centre[h];
                const V x = weight * d[h];
                first[h] += x;
                second[h] += x * d[h];
              }
            }
          }
          if (!settle(centre, first, second, now, mask)) {
            for (int h = 0; h < height(); ++h) second[h] = V{};
            for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e) {
              const int s = g.parent_child[e];
              for (int c = 0; c < g.C; ++c) {
                vote(pose_of(pose, s, c), weights(g.parent_kernel[e], c, jb), d);
                for (int h = 0; h < height(); ++h) {
                  const V x = d[h] - now.mean[h];
                  second[h] += even_share(s) / data * activation[long(s) * g.C + c] * x * x;
                }
              }
            }
            for (int h = 0; h < height(); ++h) now.half[h] = halved(second[h], mask);
          }
        }
        decide(0, now, jb);
      }
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

  void later_pass(int t, const T* pose, const T* activation, T* sample, T* log_sums, V* sums) const {
    V* buffer = sums + long(PB) * sums_size();
    V* w = buffer + chunk_blocks() * H;
    clear(sums);
    for (int s = 0; s < g.S; ++s) {
      const int begin = g.child_begin[s], end = g.child_begin[s + 1];
      if (begin == end) {
        std::fill_n(log_sums + long(s) * g.C, g.C, T(0));
        continue;
      }
      for (int c0 = 0; c0 < g.C; c0 += step) {
        const int children = std::min(step, g.C - c0);
        V top[MOST_TOGETHER], total[MOST_TOGETHER];
        for (int c = 0; c < children; ++c) top[c] = all(std::numeric_limits<T>::lowest());
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
        T high[MOST_TOGETHER], scale[MOST_TOGETHER];
        for (int c = 0; c < children; ++c) high[c] = largest<T>(top[c]), total[c] = V{};
        for (long i = 0; i < block; i += children)
          for (int c = 0; c < children; ++c) total[c] += w[i + c] = exponential(w[i + c] - high[c]);
        const long child = long(s) * g.C + c0;
        for (int c = 0; c < children; ++c) {
          scale[c] = sum<T>(total[c]);
          log_sums[child + c] = high[c] + std::log(scale[c]);
          scale[c] = activation[child + c] / scale[c];
        }
        for (long i = 0; i < block; i += children)
          for (int c = 0; c < children; ++c) w[i + c] *= scale[c];
        add_up(s, children, buffer, w, sums);
      }
    }
    for (int at = 0; at < PB; ++at) {
      const V mask = valid(at % JB), *x = sums + long(at) * sums_size();
      const Fit now = fit(sample, t, at);
      now.data = x[0];
      now.log_data = logarithm(mask > 0 ? x[0] : all(T(1)));
      bool exact = !any((x[0] < FAINT) & (mask > 0));
      if (exact) {
        const V inverse = T(1) / (mask > 0 ? x[0] : all(T(1)));
        V first[MOST], second[MOST];
        for (int h = 0; h < height(); ++h) first[h] = x[1 + h] * inverse, second[h] = x[1 + height() + h] * inverse;
        exact = settle(fit(sample, t - 1, at).mean, first, second, now, mask);
      }
      if (!exact) fit_alone(pose, activation, fit(sample, t - 1, at).mean, now, log_sums, at);
      decide(t, now, at % JB);
    }
  }

  // One parent block from its own side, its shares stabilised by the largest coupling of a child that is on.
  void fit_alone(const T* pose, const T* activation, const V* before, const Fit& now, const T* log_sums, int at) const {
    const int p = at / JB, jb = at % JB;
    const V mask = valid(jb);
    V d[MOST], moment[MOST]{}, top = all(lowest<T>), total{};
    const auto each = [&](auto use) {
      for (int e = g.parent_begin[p]; e < g.parent_begin[p + 1]; ++e)
        for (int c = 0; c < g.C; ++c) {
          const long child = long(g.parent_child[e]) * g.C + c;
          if (activation[child] <= 0) continue;
          V v[MOST];
          vote(pose_of(pose, g.parent_child[e], c), weights(g.parent_kernel[e], c, jb), v);
          use(activation[child], logit(v, before, d) - log_sums[child]);
        }
    };
    each([&](T, V log_r) { top = larger<T>(log_r, top); });
    top = top == lowest<T> ? V{} : top;
    each([&](T a, V log_r) {
      const V w = a * exponential(log_r - top);
      total += w;
      for (int h = 0; h < height(); ++h) moment[h] += w * d[h];
    });
    const auto alive = ~(total <= NOTHING);
    const V inverse = alive ? T(1) / (alive ? total : all(T(1))) : V{};
    for (int h = 0; h < height(); ++h) {
      now.mean[h] = alive ? before[h] + moment[h] * inverse : V{};
      moment[h] = V{};
    }
    each([&](T a, V log_r) {
      const V w = inverse * a * exponential(log_r - top);
      for (int h = 0; h < height(); ++h) {
        const V x = d[h] + (before[h] - now.mean[h]);
        moment[h] += w * x * x;
      }
    });
    for (int h = 0; h < height(); ++h) now.half[h] = halved(moment[h], mask);
    now.data = total * exponential(top);
    now.log_data = alive ? logarithm(total) + top : all(-lowest<T>);
  }

  // A vote's share of its parent, R / data, and its part u of the gradient of the child's activation.
  struct Part {
    V share, u;
  };
  Part part(const V* v, const Fit& now, const Grad& grad, V r, V log_r) const {
    V bracket = -grad.offset, other{};
    for (int h = 0; h < height(); h += 2) {
      const V d = v[h] - now.mean[h];
      bracket += d * (grad.mean[h] + grad.variance[h] * d);
      if (h + 1 < height()) {
        const V f = v[h + 1] - now.mean[h + 1];
        other += f * (grad.mean[h + 1] + grad.variance[h + 1] * f);
      }
    }
    bracket += other;
    V share = r * grad.inverse;
    if (any(now.log_data < T(-40))) share = exponential(smaller<T>(log_r - now.log_data, all(T(60))));
    return {share, share * bracket + r * grad.data};
  }

  // Child side of a pass: the gradients of its logits, summed at the parents of the pass before.
  void undo_later_pass(int t, const T* pose, const T* activation, const T* sample, V* grads, const T* log_sums, T* gammas,
                       T* activation_grad, V* sums, V* buffer) const {
    V* w = buffer + chunk_blocks() * H;
    V* couplings = w + chunk_blocks();
    clear(sums);
    for (int s = 0; s < g.S; ++s) {
      const int begin = g.child_begin[s], end = g.child_begin[s + 1];
      for (int c0 = 0; c0 < g.C; c0 += step) {
        const int children = std::min(step, g.C - c0);
        const long child = long(s) * g.C + c0;
        V total[MOST_TOGETHER]{};
        long block = 0;
        for (int e = begin; e < end; ++e)
          for (int jb = 0; jb < JB; ++jb) {
            const int at = g.child_parent[e] * JB + jb;
            const Fit before = fit(sample, t - 1, at), now = fit(sample, t, at);
            const Grad grad = gradient(grads, t, at);
            for (int c = 0; c < children; ++c, ++block) {
              V v[MOST];
              vote(pose_of(pose, s, c0 + c), weights(g.child_kernel[e], c0 + c, jb), v);
              const V log_r = logit(v, before.mean, buffer + block * height()) - log_sums[child + c];
              couplings[block] = exponential(log_r);
              w[block] = part(v, now, grad, couplings[block], log_r).u;
              total[c] += w[block];
            }
          }
        T gamma[MOST_TOGETHER];
        for (int c = 0; c < children; ++c) {
          gammas[child + c] = gamma[c] = sum<T>(total[c]);
          activation_grad[child + c] += gamma[c];
        }
        for (long i = 0; i < block; i += children)
          for (int c = 0; c < children; ++c)
            w[i + c] = activation[child + c] * (w[i + c] - couplings[i + c] * gamma[c]);
        add_up(s, children, buffer, w, sums);
      }
    }
  }

  // The gradient of every vote, over all passes, to pose and transform at once.
  void undo_votes(const T* pose, const T* activation, const T* sample, const T* log_sums, V* grads, const T* gammas,
                  T* pose_grad, T* activation_grad, V* transform_grad) const {
    const int size = rows() * inner();
    for (int s = 0; s < g.S; ++s) {
      const T even = even_share(s);
      const V log_even = all(std::log(even));
      for (int c = 0; c < g.C; ++c) {
        const long child = long(s) * g.C + c;
        const T a = activation[child];
        const T* m = pose_of(pose, s, c);
        V m_grad[MOST_POSE], total{};
        for (int i = 0; i < size; ++i) m_grad[i] = V{};
        for (int e = g.child_begin[s]; e < g.child_begin[s + 1]; ++e)
          for (int jb = 0; jb < JB; ++jb) {
            const int at = g.child_parent[e] * JB + jb;
            const V* w = weights(g.child_kernel[e], c, jb);
            V v[MOST], v_grad[MOST], d[MOST];
            vote(m, w, v);
            {
              const Fit now = fit(sample, 0, at);
              const Grad grad = gradient(grads, 0, at);
              const Part one = part(v, now, grad, all(even), log_even);
              const V q = a * one.share;
              total += one.u;
              for (int h = 0; h < height(); ++h)
                v_grad[h] = q * (grad.mean[h] + T(2) * grad.variance[h] * (v[h] - now.mean[h]));
            }
            for (int t = 1; t < o.iterations; ++t) {
              const Fit before = fit(sample, t - 1, at), now = fit(sample, t, at);
              const Grad grad = gradient(grads, t, at);
              const long at_child = long(t - 1) * g.S * g.C + child;
              const V log_r = logit(v, before.mean, d) - log_sums[at_child];
              const V r = exponential(log_r);
              const Part one = part(v, now, grad, r, log_r);
              const V q = a * one.share, logit_grad = T(-2) * a * (one.u - r * gammas[at_child]);
              for (int h = 0; h < height(); ++h)
                v_grad[h] += q * (grad.mean[h] + T(2) * grad.variance[h] * (v[h] - now.mean[h])) +
                             logit_grad * before.half[h] * d[h];
            }
            undo_vote(m, w, v_grad, m_grad, transform_grad + (w - W));
          }
        activation_grad[child] += sum<T>(total);
        for (int i = 0; i < size; ++i) pose_grad[child * size + i] = sum<T>(m_grad[i]);
      }
    }
  }
};

}  // namespace TORCHCAPS_TARGET
