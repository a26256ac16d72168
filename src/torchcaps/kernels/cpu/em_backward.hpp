// EM routing without stored votes, backward: votes and couplings are computed again from what each pass kept.
#pragma once

#include "em.hpp"

namespace TORCHCAPS_TARGET {

template <class T, int ROWS, int INNER, int COLUMNS> class EM : public EMFits<T, ROWS, INNER, COLUMNS> {
  using Base = EMFits<T, ROWS, INNER, COLUMNS>;
  using V = typename Base::V;
  using Fit = typename Base::Fit;
  using Base::g, Base::H, Base::JB, Base::PB, Base::W, Base::o, Base::MOST, Base::L;
  using Base::add_up, Base::chunk_blocks, Base::clear, Base::even_share, Base::fit, Base::sums_size;
  using Base::MOST_TOGETHER, Base::log_coupling, Base::log_sums_size, Base::together, Base::weigh;
  using Base::inner, Base::rows, Base::height, Base::weights, Base::pose_of, Base::valid, Base::vote, Base::undo_vote;
  static constexpr int SIDE_BY_SIDE = 4, PAIR = 2;  // children that share what is read of a parent

 public:
  using Base::Base;

  // Gradients of the last mean [PB, H] and activation [PB], in lanes → of pose and activation (written), of transform
  // and betas (added to).
  void backward(const T* pose, const T* activation, const T* sample, const T* log_sums, const V* mean_grad,
                const V* activation_grad, T* pose_grad, T* child_activation_grad, V* transform_grad, V* beta_u_grad,
                V* beta_a_grad, Scratch& scratch) const {
    const int last = o.iterations - 1;
    const long child = long(g.S) * g.C, gammas_size = (last * child + L - 1) / L;
    V* grads = scratch.take<V>(long(PB) * (o.iterations * grad_size() + sums_size()) + gammas_size +
                               std::max(chunk_blocks() * (H + 2), long(g.C) * (rows() * inner() + 1) +
                                                                      2L * SIDE_BY_SIDE * (o.iterations + 1)));
    V* sums = grads + long(PB) * o.iterations * grad_size();
    T* gammas = reinterpret_cast<T*>(sums + long(PB) * sums_size());
    V* buffer = sums + long(PB) * sums_size() + gammas_size;
    for (long i = 0; i < child; ++i) child_activation_grad[i] = 0;
    const T total = this->total_of(activation);
    const T enough = total >= Base::TINY ? Base::TINY * std::max(total, T(1)) : std::numeric_limits<T>::max();
    for (int t = last; t >= 0; --t) {
      V to_log_total{};
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
        undecide(t, now, at % JB, log_activation_grad, enough, grad, beta_u_grad, beta_a_grad);
        to_log_total -= grad.data * now.data;
      }
      if (o.mixing && t == last && total >= Base::TINY)  // before the last pass, the total cancels in the couplings
        for (int s = 0; s < g.S; ++s)
          for (int c = 0; c < g.C && g.child_begin[s] < g.child_begin[s + 1]; ++c)
            child_activation_grad[long(s) * g.C + c] = sum<T>(to_log_total) / total;
      if (t > 0)
        undo_later_pass(t, pose, activation, sample, grads, log_sums + log_sums_size() * (t - 1), gammas + (t - 1) * child,
                        child_activation_grad, sums, buffer);
    }
    undo_votes(pose, activation, sample, log_sums, grads, gammas, pose_grad, child_activation_grad, transform_grad,
               buffer);
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

  int grad_size() const { return 2 * height() + 3; }

  // From the gradients of log activation, mean and variance to those of data, betas and variance, and the factors that
  // the children need.
  void undecide(int t, const Fit& now, int jb, V log_activation_grad, T enough, const Grad& grad, V* beta_u_grad,
                V* beta_a_grad) const {
    const auto [half_logs, described, x] = weigh(t, now, jb);
    const V small = exponential(x < 0 ? x : -x);  // 1 - activation without cancellation
    const V slope = x < 0 ? T(1) / (T(1) + small) : small / (T(1) + small);
    const V x_grad = o.mixing ? V{} : slope * log_activation_grad * valid(jb);
    const V cost_grad = -o.heat[t] * x_grad / o.mean_data;
    beta_a_grad[jb] += o.heat[t] * x_grad;
    beta_u_grad[jb] += T(H) * cost_grad * now.data;
    grad.data = cost_grad * described;
    if (o.mixing) grad.data = now.data > enough ? log_activation_grad / now.data : V{};
    V offset{};
    for (int h = 0; h < height(); ++h) {
      grad.variance[h] += cost_grad * now.data * now.half[h];
      offset += grad.variance[h] * (T(0.5) / now.half[h] - o.floor);
    }
    grad.offset = offset;
    grad.inverse = exponential(-now.log_data);
  }

  // The gradient of a faint child's activation is in units of 1 / FAINT: it may be larger than any number.
  static bool is_faint(T a) { return a >= Base::TINY && a < Base::FAINT; }
  static T unit(T a) { return is_faint(a) ? Base::FAINT : T(1); }

  // In these units: a vote's share of its parent, R / data, and its part u of the gradient of the child's activation.
  struct Part {
    V share, u;
  };
  // Of a child that is off, nothing, however large its part would be.
  static V scaled(T a, V x) { return a == 0 ? V{} : a * x; }
  static bool faint(const Fit& now) { return any(now.log_data < T(-40)); }
  Part part(T a, const Fit& now, bool faint, const Grad& grad, V bracket, V r, V log_r) const {
    V share = unit(a) * r * grad.inverse;
    if (faint) {
      const V log_share = log_r - now.log_data;
      share = exponential(a < Base::TINY ? smaller<T>(log_share, all(T(60)))
                                         : log_share + (is_faint(a) ? std::log(Base::FAINT) : T(0)));
    }
    return {share, share * bracket + unit(a) * r * grad.data};
  }

  // Child side of a pass: the gradients of its logits, summed at the parents of the pass before.
  void undo_later_pass(int t, const T* pose, const T* activation, const T* sample, V* grads, const T* log_sums, T* gammas,
                       T* activation_grad, V* sums, V* buffer) const {
    V* w = buffer + chunk_blocks() * H;
    V* couplings = w + chunk_blocks();
    clear(sums);
    for (int s = 0; s < g.S; ++s) {
      const int begin = g.child_begin[s], end = g.child_begin[s + 1], step = together(s);
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
            const bool now_faint = faint(now);
            for (int c = 0; c < children; block += std::min(PAIR, children - c), c += PAIR) {
              V v[PAIR][MOST], far[PAIR]{}, bracket[PAIR];
              V* d[PAIR];
              for (int i = 0; i < PAIR; ++i) {
                const int there = std::min(c + i, children - 1);
                vote(pose_of(pose, s, c0 + there), weights(g.child_kernel[e], c0 + there, jb), v[i]);
                d[i] = buffer + (block + there - c) * height();
                bracket[i] = -grad.offset;
              }
              for (int h = 0; h < height(); ++h) {
                const V mean = before.mean[h], half = before.half[h], mean_now = now.mean[h];
                const V mean_grad = grad.mean[h], variance_grad = grad.variance[h];
                for (int i = 0; i < PAIR; ++i) {
                  const V x = v[i][h] - mean, y = v[i][h] - mean_now;
                  d[i][h] = x;
                  far[i] += x * x * half;
                  bracket[i] += y * (mean_grad + variance_grad * y);
                }
              }
              for (int i = 0; i < std::min(PAIR, children - c); ++i) {
                const V log_r = smaller<T>(log_coupling(before.prior - far[i], log_sums, child + c + i), V{});
                couplings[block + i] = exponential(log_r);
                w[block + i] = part(activation[child + c + i], now, now_faint, grad, bracket[i], couplings[block + i], log_r).u;
                total[c + i] += w[block + i];
              }
            }
          }
        T gamma[MOST_TOGETHER];
        for (int c = 0; c < children; ++c) {
          gammas[child + c] = gamma[c] = sum<T>(total[c]);
          activation_grad[child + c] += gamma[c] / unit(activation[child + c]);
        }
        for (long i = 0; i < block; i += children)
          for (int c = 0; c < children; ++c)
            w[i + c] = scaled(activation[child + c] / unit(activation[child + c]), w[i + c] - couplings[i + c] * gamma[c]);
        add_up(s, children, buffer, w, sums);
      }
    }
  }

  // The gradient of every vote, over all passes, to pose and transform at once. Some children of a site are taken
  // together: what a parent was and its gradients, of all passes, are read once for them.
  void undo_votes(const T* pose, const T* activation, const T* sample, const T* log_sums, V* grads, const T* gammas,
                  T* pose_grad, T* activation_grad, V* transform_grad, V* work) const {
    const int size = rows() * inner();
    V *m_grad = work, *total = work + long(g.C) * size;
    auto by_pass = reinterpret_cast<V(*)[SIDE_BY_SIDE]>(total + g.C);
    for (int s = 0; s < g.S; ++s) {
      for (long i = 0; i < long(g.C) * (size + 1); ++i) work[i] = V{};
      for (int e = g.child_begin[s]; e < g.child_begin[s + 1]; ++e)
        for (int jb = 0; jb < JB; ++jb)
          for (int c = 0; c < g.C; c += SIDE_BY_SIDE) {
            const long child = long(s) * g.C + c;
            const int children = std::min(SIDE_BY_SIDE, g.C - c);
            V v[SIDE_BY_SIDE][MOST];
            for (int i = 0; i < SIDE_BY_SIDE; ++i) {
              const int there = std::min(c + i, g.C - 1);  // the last one stands in for children that are not
              vote(pose_of(pose, s, there), weights(g.child_kernel[e], there, jb), v[i]);
            }
            undo_fits(s, child, children, g.child_parent[e] * JB + jb, activation, sample, log_sums, grads, gammas,
                      by_pass, total + c, v);
            for (int i = 0; i < children; ++i) {
              const V* w = weights(g.child_kernel[e], c + i, jb);
              undo_vote(pose_of(pose, s, c + i), w, v[i], m_grad + long(c + i) * size, transform_grad + (w - W));
            }
          }
      for (int c = 0; c < g.C; ++c) {
        const long child = long(s) * g.C + c;
        activation_grad[child] += sum<T>(total[c]) / unit(activation[child]);
        for (int i = 0; i < size; ++i) pose_grad[child * size + i] = sum<T>(m_grad[long(c) * size + i]);
      }
    }
  }

  // Votes of some children of a site for one parent block → their gradients, in place. by_pass is work space.
  void undo_fits(int s, long child, int children, int at, const T* activation, const T* sample, const T* log_sums,
                 V* grads, const T* gammas, V (*by_pass)[SIDE_BY_SIDE], V* total, V (*v)[MOST]) const {
    constexpr int N = SIDE_BY_SIDE;
    V (*to_fit)[N] = by_pass, (*to_logit)[N] = by_pass + o.iterations, distance[N];
    for (int t = 0; t < o.iterations; ++t) {
      const Fit now = fit(sample, t, at);
      const Grad grad = gradient(grads, t, at);
      const bool now_faint = faint(now);
      V bracket[N], far[N]{};
      for (int i = 0; i < N; ++i) bracket[i] = -grad.offset;
      for (int h = 0; h < height(); ++h) {
        const V mean = now.mean[h], half = now.half[h], mean_grad = grad.mean[h], variance_grad = grad.variance[h];
        for (int i = 0; i < N; ++i) {
          const V d = v[i][h] - mean;
          bracket[i] += d * (mean_grad + variance_grad * d);
          far[i] += d * d * half;
        }
      }
      for (int i = 0; i < children; ++i) {
        const T a = activation[child + i];
        const long earlier = long(t - 1) * g.S * g.C + child + i;
        V log_r, r;
        if (t == 0) {
          const T even = even_share(s);
          log_r = all(std::log(even)), r = all(even);
        } else {
          log_r = smaller<T>(log_coupling(fit(sample, t - 1, at).prior - distance[i],
                                          log_sums + log_sums_size() * (t - 1), child + i), V{});
          r = exponential(log_r);
        }
        const Part one = part(a, now, now_faint, grad, bracket[i], r, log_r);
        if (t == 0) total[i] += one.u;
        to_fit[t][i] = a / unit(a) * one.share;
        to_logit[t][i] = t > 0 ? scaled(T(-2) * a / unit(a), one.u - r * gammas[earlier]) : V{};
        distance[i] = far[i];
      }
    }
    for (int t = 0; t < o.iterations; ++t)
      for (int i = children; i < N; ++i) to_fit[t][i] = to_logit[t][i] = V{};
    for (int i = 0; i < N; ++i) to_logit[o.iterations][i] = V{};
    for (int h = 0; h < height(); ++h) {
      V sum[N]{};
      for (int t = 0; t < o.iterations; ++t) {
        const Fit now = fit(sample, t, at);
        const Grad grad = gradient(grads, t, at);
        const V mean = now.mean[h], half = now.half[h], mean_grad = grad.mean[h], twice = T(2) * grad.variance[h];
        for (int i = 0; i < N; ++i) {
          const V slope = to_fit[t][i] * twice + to_logit[t + 1][i] * half;
          sum[i] += to_fit[t][i] * mean_grad;
          sum[i] += (v[i][h] - mean) * slope;
        }
      }
      for (int i = 0; i < N; ++i) v[i][h] = sum[i];
    }
  }
};

}  // namespace TORCHCAPS_TARGET
