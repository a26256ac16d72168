// The gradients of moments. Votes and couplings are recomputed from the results of each pass. For one pass, with
// w = activation · c, e = vote - mean, d = vote - centre, and given gradients of mass, mean and variance:
//
//   u          = mass_grad + Σ (mean_grad · e + variance_grad · (e² - variance)) / mass        gradient of w
//   γ          = Σ c u over the parents of a child                                             gradient of activation
//   logit_grad = w (u - γ)
//   constant_grad = Σ logit_grad, linear_grad = Σ logit_grad d, quadratic_grad = -Σ logit_grad d² over the children,
//   centre_grad   = 2 quadratic Σ logit_grad d - linear Σ logit_grad
//   vote_grad  = (w / mass) (mean_grad + 2 variance_grad e) + logit_grad (linear - 2 quadratic d)
//
// For each pass whose couplings are differentiated, one sweep over children computes γ and the gradients of the
// agreement. After that, a single sweep for all passes computes each vote once, sums its gradients over the passes, and
// computes the gradients of pose and transform.
#pragma once

#include "moments.hpp"

namespace TORCHCAPS_TARGET {

template <class T, template <class> class LaneLayout, int ROWS, int INNER, int COLUMNS, int FORM>
class MomentsBackward : public Moments<T, LaneLayout, ROWS, INNER, COLUMNS, FORM> {
  using Base = Moments<T, LaneLayout, ROWS, INNER, COLUMNS, FORM>;
  using V = typename Base::V;
  using Layout = typename Base::Layout;
  using Child = typename Base::Child;
  using Base::g, Base::L, Base::MOST, Base::PLACES, Base::rows, Base::inner, Base::columns, Base::numbers, Base::pose_size,
      Base::weights, Base::uniform_coupling, Base::vote, Base::pose_logits, Base::linear, Base::quadratic, Base::with_variance, Base::MOST_TOGETHER,
      Base::log_coupling, Base::together, Base::agreement_size, Base::centre_at, Base::quadratic_at, Base::linear_at, Base::constant_at;
  // Children that each sweep processes together, so that they share the reads of a parent.
  static constexpr int CHILDREN = 4;
  static constexpr T SMALL_LOG_MASS = -40, MOST_LOG_SHARE = 60;

 public:
  using Base::Base, Base::H, Base::JB, Base::PB, Base::children, Base::load_scalar, Base::load_vector, Base::place,
      Base::store_scalar, Base::store_vector, Base::log_sums_size;

  // One record per block of parents: agreement, mean, gradients of mean and variance [H], the two parts of log mass,
  // 1 / mass, gradient of mass, Σ variance_grad · variance, and whether the mass of any parent is small. The gradient of
  // the variance includes the gradient through log_volume.
  long mean_at() const { return agreement_size(); }
  long mean_grad_at() const { return mean_at() + numbers(); }
  long variance_grad_at() const { return mean_grad_at() + numbers(); }
  enum Scalar { LARGEST, LOG_MASS, INVERSE_MASS, MASS_GRAD, OFFSET, SMALL_MASS, SCALARS };
  long at_scalar(Scalar scalar) const { return variance_grad_at() + (with_variance ? numbers() : 0) + scalar; }
  long record_size() const { return at_scalar(SCALARS); }
  void load_pass(int tile, const Record<T>& pass, V* records) const {
    this->load_agreement(tile, pass.agreement, records, record_size());
    for (int at = 0; at < PB; ++at, records += record_size()) {
      const auto place = this->place(tile, at);
      load_vector(pass.mean, place, records + mean_at());
      load_vector(pass.mean_grad, place, records + mean_grad_at());
      records[at_scalar(LARGEST)] = load_scalar(pass.largest, place);
      records[at_scalar(LOG_MASS)] = load_scalar(pass.log_mass, place);
      records[at_scalar(MASS_GRAD)] = load_scalar(pass.mass_grad, place);
      const V whole = records[at_scalar(LARGEST)] + records[at_scalar(LOG_MASS)];
      records[at_scalar(INVERSE_MASS)] = exponential(-whole);
      records[at_scalar(SMALL_MASS)] = splat(T(any(whole < SMALL_LOG_MASS)));
      records[at_scalar(OFFSET)] = V{};
      if (!with_variance) continue;
      V variance[MOST], *grad = records + variance_grad_at();
      load_vector(pass.variance_grad, place, grad);
      load_vector(pass.variance, place, variance);
      const V half = T(0.5) * load_scalar(pass.log_volume_grad, place);  // 0 in lanes without a parent
      for (int h = 0; h < numbers(); ++h) {
        const V square = variance[h] + pass.floor;
        grad[h] += ((half == T(0)) | (square < TINY<T>)) ? V{} : half / square;
        records[at_scalar(OFFSET)] += variance[h] * grad[h];
      }
    }
  }

  // For one tile: γ of each child, and the gradients of the agreement.
  void agreement_grads(int tile, const Children<T>& x, const Record<T>& pass, const PassGrads<T>& out, Arena& arena) const {
    const Child* pose = this->load_children(x.pose, tile, 0, g.S, g.C * pose_size(), arena);
    const Child* activation = this->load_children(x.activation, tile, 0, g.S, g.C, arena);
    const Child* log_sums = reinterpret_cast<const Child*>(pass.log_sums) + log_sums_size() * tile;
    Child* gammas = reinterpret_cast<Child*>(out.coupling_grads) + long(g.groups()) * g.C * tile;
    V* parents = arena.take<V>(PB * record_size());
    load_pass(tile, pass, parents);
    const auto sums = this->zero_sums(this->template sums_size_of<quadratic>(), arena);
    const long most = this->most_visited();
    V* d = Base::of_numbers ? arena.take<V>(most * numbers()) : arena.zeros<V>(most * numbers());  // set only if it counts in the logits
    V *u = arena.take<V>(most), *couplings = arena.take<V>(most);
    const bool wanted = out.constant || out.linear || out.quadratic || out.centre;
    for (int group = 0; group < g.groups(); ++group) {
      const int begin = g.group_begin(group), end = g.group_end(group), step = together(end - begin);
      for (int c0 = 0; c0 < g.C; c0 += step) {
        const int children = std::min(step, g.C - c0);
        const long first = long(g.group_site(group)) * g.C + c0, softmax = long(group) * g.C + c0;
        for (int e = begin; e < end; ++e)
          for (int c = 0; c < children; c += CHILDREN)
            for (int block = 0; block < JB; ++block) {
              const V* record = parents + (long(g.edge_parent[e]) * JB + block) * record_size();
              const long i = (long(e - begin) * JB + block) * children + c;
              logits_and_moments_grads(pose + (first + c) * pose_size(), std::min(CHILDREN, children - c), record,
                                       [&](int k) { return weights(g.edge_kernel[e], c0 + c + k, block); }, couplings + i, u + i, d + i * numbers());
            }
        V total[MOST_TOGETHER]{};
        long i = 0;
        for (int e = begin; e < end; ++e)
          for (int block = 0; block < JB; ++block) {
            const V* record = parents + (long(g.edge_parent[e]) * JB + block) * record_size();
            for (int c = 0; c < children; ++c, ++i) {
              const V log_c = log_coupling(couplings[i], log_sums, softmax + c);
              couplings[i] = exponential(log_c);
              u[i] = weight_grad(activation[first + c], record, u[i], couplings[i], log_c).c_u;
              total[c] += u[i];
            }
          }
        alignas(64) Child gamma[MOST_TOGETHER];
        Layout::sums(total, children, gamma);
        std::copy_n(gamma, children, gammas + softmax);
        if (!wanted) continue;
        for (long at = 0; at < i; at += children)
          for (int c = 0; c < children; ++c)
            u[at + c] = scaled(activation[first + c] / gradient_scale(activation[first + c]), u[at + c] - couplings[at + c] * gamma[c]);
        this->template add_up_of<quadratic>(group, children, d, u, sums);
      }
    }
    this->add_earlier(sums);
    if (wanted) store_agreement_grads(tile, parents, sums, pass.agreement.inverse_temperature, out);
  }

  // A pass of one tile, as the sweep over votes reads it. In most rules, the centre of a pass is the mean of the
  // previous pass. Both passes then share the differences between votes and this mean.
  struct Pass {
    const V* records;
    const Child *log_sums, *coupling_grads;
    bool around_earlier_mean;
  };
  Pass pass_of(int tile, Record<T> from, const Record<T>* earlier, Arena& arena) const {
    V* records = arena.take<V>(PB * record_size());
    const bool around_earlier_mean = earlier && from.agreement.centre && from.agreement.centre == earlier->mean;
    if (around_earlier_mean) from.agreement.centre = nullptr;
    load_pass(tile, from, records);
    const auto of_tile = [&](const T* x, long size) { return x ? reinterpret_cast<const Child*>(x) + size * tile : nullptr; };
    return {records, of_tile(from.log_sums, log_sums_size()), of_tile(from.coupling_grads, long(g.groups()) * g.C),
            around_earlier_mean};
  }

  // For child site s of several tiles: writes the gradients of pose and activation, and adds to the gradients of the
  // transforms, which are in lanes by type. `passes` is [tile, pass].
  void votes_grads(int s, int first_tile, int count, const Children<T>& x, const Pass* passes, int pass_count,
                   const ChildrenGrads<T>& out, void* transform_grad, Arena& arena) const {
    arena.clear();
    const long size = pose_size(), poses_size = g.C * size;
    const Child **poses = arena.take<const Child*>(count), **activations = arena.take<const Child*>(count);
    for (int tile = 0; tile < count; ++tile) {
      poses[tile] = this->load_children(x.pose, first_tile + tile, s, s + 1, poses_size, arena);
      activations[tile] = this->load_children(x.activation, first_tile + tile, s, s + 1, g.C, arena);
    }
    const int begin = g.child_begin[s], end = g.child_begin[s + 1];
    V* totals = arena.zeros<V>(long(count) * g.C + L);
    V* pose_grads = begin < end ? arena.take<V>(count * poses_size + L) : arena.zeros<V>(count * poses_size + L);
    V(*v)[PLACES] = reinterpret_cast<V(*)[PLACES]>(arena.take<V>(long(count) * CHILDREN * PLACES));
    auto factors = reinterpret_cast<Factors*>(arena.take<V>(pass_count * long(sizeof(Factors) / sizeof(V))));
    for (int e = begin; e < end; ++e) {
      const T uniform_value = uniform_coupling(g.group_of(e));
      for (int c = 0; c < g.C; c += CHILDREN)
        for (int block = 0; block < JB; ++block) {
          const int children = std::min(CHILDREN, g.C - c);
          const long at = long(g.edge_parent[e]) * JB + block;
          for (int tile = 0; tile < count; ++tile) {
            V(*grads)[PLACES] = v + long(tile) * CHILDREN;
            for (int i = 0; i < CHILDREN; ++i) {  // indices beyond the last child use the last child
              const int there = std::min(c + i, g.C - 1);
              vote(poses[tile] + there * size, weights(g.edge_kernel[e], there, block), grads[i]);
            }
            replace_by_grads(long(g.group_of(e)) * g.C, c, children, at, uniform_value, activations[tile],
                     passes + long(tile) * pass_count, pass_count, totals + long(tile) * g.C + c, factors, grads);
            for (int i = 0; i < children; ++i)
              this->add_pose_grad(weights(g.edge_kernel[e], c + i, block), grads[i],
                                  pose_grads + tile * poses_size + (c + i) * size, e == begin && block == 0);
          }
          for (int i = 0; i < children; ++i) {
            const long to = weights(g.edge_kernel[e], c + i, block) - this->transform;
            if constexpr (Layout::by_type)
              this->add_transform_grad(poses[0] + (c + i) * size, v[i], static_cast<V*>(transform_grad) + to);
            else add_over_samples(poses, (c + i) * size, v[i], count, static_cast<T*>(transform_grad) + to);
          }
        }
    }
    for (int tile = 0; tile < count; ++tile)
      store_children_grads(s, first_tile + tile, activations[tile], passes + long(tile) * pass_count, pass_count,
                           pose_grads + tile * poses_size, totals + long(tile) * g.C, out, arena);
  }

 private:
  // If a child's activation is small, its gradient is multiplied by SMALL, because it may exceed the largest number.
  static Child gradient_scale(Child a) { return ((a >= TINY<T>) & (a < SMALL<T>)) ? Child{} + SMALL<T> : Child{} + T(1); }
  // a · x, but 0 if the activation is 0, even for infinite x.
  static V scaled(Child a, V x) { return a == T(0) ? V{} : a * x; }

  // c / mass and c u, both multiplied by gradient_scale(activation).
  struct WeightGrad {
    V share, c_u;
  };
  WeightGrad weight_grad(Child a, const V* record, V moments_grad, V c, V log_c) const {
    const Child scale = gradient_scale(a);
    V share = scale * c * record[at_scalar(INVERSE_MASS)];
    if (record[at_scalar(SMALL_MASS)][0] != 0) {
      const V log_share = (log_c - record[at_scalar(LARGEST)]) - record[at_scalar(LOG_MASS)], log_scaled_share = log_share + logarithm(Layout::broadcast(scale));
      share = exponential(Layout::broadcast(a) < TINY<T> ? smaller<T>(log_share, splat(MOST_LOG_SHARE)) : log_scaled_share);
    }
    return {share, share * (moments_grad - record[at_scalar(OFFSET)]) + scale * c * record[at_scalar(MASS_GRAD)]};
  }

  // For `count` children, at most CHILDREN: logits, moments_grads Σ e (mean_grad + variance_grad e), and d.
  template <class Weights>
  void logits_and_moments_grads(const Child* pose, int count, const V* record, Weights weights, V* logits, V* moments_grads, V* d) const {
    V v[CHILDREN][PLACES], *distance[CHILDREN], logit[CHILDREN], moments_grad[CHILDREN]{};
    for (int k = 0; k < CHILDREN; ++k) {
      const int there = std::min(k, count - 1);
      vote(pose + there * pose_size(), weights(there), v[k]);
      logit[k] = this->pose_logit(v[k]), distance[k] = d + there * numbers();
    }
    for (int h = 0; h < numbers(); ++h) {
      const V centre = quadratic ? record[centre_at() + h] : V{}, mean = record[mean_at() + h];
      const V mean_grad = record[mean_grad_at() + h], variance_grad = with_variance ? record[variance_grad_at() + h] : V{};
      for (int k = 0; k < CHILDREN; ++k) {
        const V x = quadratic ? v[k][h] - centre : v[k][h], y = v[k][h] - mean;
        if (Base::of_numbers) distance[k][h] = x, logit[k] += this->logit_of_number(x, record, h);
        moments_grad[k] += with_variance ? y * (mean_grad + variance_grad * y) : y * mean_grad;
      }
    }
    for (int k = 0; k < count; ++k) logits[k] = record[constant_at()] + logit[k], moments_grads[k] = moments_grad[k];
  }

  void store_agreement_grads(int tile, const V* parents, const typename Base::Sums& sums, T inverse_temperature, const PassGrads<T>& out) const {
    for (int at = 0; at < PB; ++at) {
      const V *record = parents + at * record_size(), *sum = sums.recent + at * sums.size;
      const auto place = this->place(tile, at);
      V negative[MOST], centre_grad[MOST];
      for (int h = 0; h < numbers(); ++h) {
        const V factor = quadratic ? record[quadratic_at() + h] : V{};
        negative[h] = quadratic ? -sum[1 + numbers() + h] : V{};
        // The square of a small factor would underflow.
        if (inverse_temperature != 0) negative[h] = negative[h] * factor * (T(-2) / inverse_temperature * factor);
        centre_grad[h] = quadratic ? T(2) * factor * sum[1 + h] : V{};
        if (linear) centre_grad[h] -= record[linear_at() + h] * sum[0];
      }
      store_scalar(*sum, out.constant, place);
      store_vector(sum + 1, out.linear, place);
      store_vector(negative, out.quadratic, place);
      store_vector(centre_grad, out.centre, place);
    }
  }

  // For several children and one pass: share = w / mass, and logit_grad.
  struct Factors {
    V share[CHILDREN], logit_grad[CHILDREN];
  };

  // Replaces the votes of several children for one block of parents by their gradients.
  void replace_by_grads(long group, int c0, int children, long at, T uniform_value, const Child* activation,
                        const Pass* passes, int count, V* totals, Factors* factors, V (*v)[PLACES]) const {
    constexpr int N = CHILDREN;
    const long softmax = group + c0;
    Child scaled_activation[N];  // activation / gradient_scale(activation)
    V logit[N], of_pose[N], logit_grads[N]{};
    for (int i = 0; i < N; ++i) {
      const Child a = activation[c0 + std::min(i, children - 1)];
      scaled_activation[i] = i < children ? a / gradient_scale(a) : Child{};
      logit[i] = of_pose[i] = this->pose_logit(v[i]);
    }
    for (int t = 0; t < count; ++t) {
      const Pass& pass = passes[t];
      const V* record = pass.records + at * record_size();
      const V* next = t + 1 < count && passes[t + 1].around_earlier_mean ? passes[t + 1].records + at * record_size() : nullptr;
      V next_logit[N]{}, moments_grad[N]{};
      for (int h = 0; h < numbers(); ++h) {
        const V mean = record[mean_at() + h], mean_grad = record[mean_grad_at() + h];
        const V variance_grad = with_variance ? record[variance_grad_at() + h] : V{};
        for (int i = 0; i < N; ++i) {
          const V e = v[i][h] - mean;
          moments_grad[i] += with_variance ? e * (mean_grad + variance_grad * e) : e * mean_grad;
          if (quadratic && next) next_logit[i] += this->logit_of_number(e, next, h);
          if (linear && !quadratic) logit[i] += this->logit_of_number(v[i][h], record, h);
        }
      }
      for (int h = 0; quadratic && pass.log_sums && !pass.around_earlier_mean && h < numbers(); ++h)
        for (int i = 0; i < N; ++i) logit[i] += this->logit_of_number(v[i][h] - record[centre_at() + h], record, h);
      for (int i = 0; i < N; ++i) {
        V share{}, logit_grad{};
        if (i < children) {
          const V log_c = pass.log_sums ? log_coupling(record[constant_at()] + logit[i], pass.log_sums, softmax + i)
                                        : splat(record[at_scalar(SMALL_MASS)][0] != 0 ? std::log(uniform_value) : T(0));
          const V c = pass.log_sums ? exponential(log_c) : splat(uniform_value);
          const auto [of_vote, c_u] = weight_grad(activation[c0 + i], record, moments_grad[i], c, log_c);
          share = scaled_activation[i] * of_vote;
          if (pass.coupling_grads) logit_grad = scaled(scaled_activation[i], c_u - c * pass.coupling_grads[softmax + i]);
          else totals[i] += c_u;
        }
        factors[t].share[i] = share, factors[t].logit_grad[i] = logit_grad, logit_grads[i] += logit_grad;
        logit[i] = FORM & POSE ? of_pose[i] + next_logit[i] : next_logit[i];
      }
    }
    for (int h = 0; h < numbers(); ++h) {
      V sum[N]{};
      for (int t = 0; t < count; ++t) {
        const Factors& f = factors[t];
        const V* record = passes[t].records + at * record_size() + h;
        const bool next_around_mean = quadratic && t + 1 < count && passes[t + 1].around_earlier_mean;
        const V mean = record[mean_at()], mean_grad = record[mean_grad_at()];
        const V twice_variance_grad = with_variance ? T(2) * record[variance_grad_at()] : V{};
        const V slope = next_around_mean ? T(-2) * passes[t + 1].records[at * record_size() + h + quadratic_at()] : V{};
        for (int i = 0; i < N; ++i) {
          sum[i] += f.share[i] * mean_grad;
          if (!with_variance && !next_around_mean) continue;
          V factor = f.share[i] * twice_variance_grad;
          if (next_around_mean) factor += factors[t + 1].logit_grad[i] * slope;
          sum[i] += factor * (v[i][h] - mean);
        }
        if (!passes[t].coupling_grads) continue;
        if (linear)
          for (int i = 0; i < N; ++i) sum[i] += f.logit_grad[i] * record[linear_at()];
        if (!quadratic || passes[t].around_earlier_mean) continue;
        const V centre = record[centre_at()], slope_of_pass = T(-2) * record[quadratic_at()];
        for (int i = 0; i < N; ++i) sum[i] += f.logit_grad[i] * slope_of_pass * (v[i][h] - centre);
      }
      for (int i = 0; i < N; ++i) v[i][h] = sum[i];
    }
    for (int i = 0; FORM & POSE && i < N; ++i) v[i][numbers()] = logit_grads[i];
  }

  // By sample: Σ pose · vote_grad over the rows of a pose, the lanes and the tiles.
  void add_over_samples(const Child* const* poses, long pose_at, const V* vote_grads, int count, T* out) const {
    const int of_vote = inner() * columns(), all_of_them = of_vote + (pose_logits() ? int(pose_size()) + 1 : 0);
    for (int from = 0; from < all_of_them; from += L) {
      const int here = std::min(L, all_of_them - from);
      V x[L]{};
      for (int tile = 0; tile < count; ++tile) {
        const Child* pose = poses[tile] + pose_at;
        const V* grads = vote_grads + long(tile) * CHILDREN * PLACES;
        for (int r = 0; r < rows(); ++r, pose += inner(), grads += columns())
          if constexpr (COLUMNS && L % COLUMNS == 0) {
            const int q = from / COLUMNS;
            for (int i = 0; i < L; ++i)
              if (q + i / COLUMNS < inner()) x[i] += pose[q + i / COLUMNS] * grads[i % COLUMNS];
          } else {
            for (int i = 0; i < std::min(here, of_vote - from); ++i) x[i] += pose[(from + i) / columns()] * grads[(from + i) % columns()];
          }
        for (int i = std::max(0, of_vote - from), at = from + i - of_vote; FORM & POSE && i < here; ++i, ++at)
          x[i] += (at < pose_size() ? poses[tile][pose_at + at] : Child{} + T(1)) * *grads;
      }
      const V sum = sums_across<T>(x);
      for (int i = 0; i < here; ++i) out[from + i] += sum[i];
    }
  }

  void store_children_grads(int s, int tile, const Child* activation, const Pass* passes, int pass_count, V* pose_grad,
                            V* total, const ChildrenGrads<T>& out, Arena& arena) const {
    const long poses_size = g.C * pose_size();
    Child* sums = arena.take<Child>(std::max<long>(poses_size, g.C) + L);
    const auto store = [&](T* to, int count) {
      if constexpr (Layout::by_type) std::copy_n(sums, count, to + (long(tile) * g.S + s) * count);
      else store_lanes(sums, count, to + (long(tile) * L * g.S + s) * count, long(g.S) * count, this->samples_of(tile));
    };
    Layout::sums(pose_grad, int(poses_size), sums);
    store(out.pose, int(poses_size));
    if (!out.activation) return;
    Layout::sums(total, g.C, sums);
    for (int t = 0; t < pass_count; ++t)
      for (int e = g.child_begin[s]; passes[t].coupling_grads && e < g.child_begin[s + 1]; e = g.types ? e + 1 : g.child_begin[s + 1])
        for (int c = 0; c < g.C; ++c) sums[c] += passes[t].coupling_grads[long(g.group_of(e)) * g.C + c];
    for (int c = 0; c < g.C; ++c) sums[c] /= gradient_scale(activation[c]);
    store(out.activation, g.C);
  }
};

}  // namespace TORCHCAPS_TARGET
