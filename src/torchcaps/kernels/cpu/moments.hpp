// The moments of votes under an agreement, forward. torchcaps.routing.votes specifies them.
//
// With equal couplings, each block of parents sums its own votes. Otherwise each child loops over its edges: vote,
// logit, softmax, sums at the parents. Sums are centred on the agreement's centre or on some vote. If a variance would
// lose too many digits by cancellation, it is recomputed by a loop over the edges of the parents. If the sum of a small
// mass underflows, all moments of this block are recomputed in log space.
#pragma once

#include "votes.hpp"

namespace TORCHCAPS_TARGET {

template <class T, template <class> class LaneLayout, int ROWS, int INNER, int COLUMNS, int FORM>
class Moments : public Votes<T, LaneLayout, ROWS, INNER, COLUMNS, FORM> {
 protected:
  using Base = Votes<T, LaneLayout, ROWS, INNER, COLUMNS, FORM>;
  using V = typename Base::V;
  using Layout = typename Base::Layout;
  using Child = typename Base::Child;
  using Weight = typename Base::Weight;
  using Base::g, Base::L, Base::MOST, Base::PLACES, Base::BLOCK, Base::rows, Base::inner, Base::columns, Base::numbers, Base::pose_size,
      Base::weights, Base::first_lanes, Base::uniform_coupling, Base::vote;
  static constexpr bool linear = FORM & LINEAR, quadratic = FORM & QUADRATIC, with_variance = FORM & VARIANCE,
                        of_numbers = linear || quadratic;  // whether the numbers of a vote contribute to the logit
  // Children of a group are processed together, as long as their votes take less than CACHE_BYTES.
  static constexpr int CACHE_BYTES = (Layout::by_type ? 80 : 40) * 1024, MOST_TOGETHER = 16, MOST_SAMPLES = 8;

 public:
  using Base::Base, Base::H, Base::JB, Base::PB, Base::children, Base::load_quadratic, Base::load_scalar, Base::load_vector,
      Base::place, Base::store_scalar, Base::store_vector, Base::tiles;

  // The agreement of a tile, one record per block of parents: centre and quadratic [H], linear [H], constant. Tensors
  // that FORM lacks are omitted. By type, the constant is -∞ in lanes without a parent. By sample, it is 0 in lanes
  // without a sample, because nothing is read from them.
  long centre_at() const { return 0; }
  long quadratic_at() const { return numbers(); }
  long linear_at() const { return quadratic ? 2 * numbers() : 0; }
  long constant_at() const { return linear_at() + (linear ? numbers() : 0); }
  long agreement_size() const { return constant_at() + 1; }
  void load_agreement(int tile, const Agreement<T>& from, V* records, long size) const {
    for (int at = 0; at < PB; ++at, records += size) {
      const auto place = this->place(tile, at);
      if (quadratic) load_vector(from.centre, place, records + centre_at());
      if (quadratic) load_quadratic(from, place, records + quadratic_at());
      if (linear) load_vector(from.linear, place, records + linear_at());
      const V holds_parent = first_lanes(Layout::by_type ? place.rows : L);
      records[constant_at()] = holds_parent > 0 ? load_scalar(from.constant, place) : splat(lowest<T>);
    }
  }

  // [2, G, C] per tile: the largest logit and log Σ e^(logit - largest); their sum could round the logarithm away.
  long log_sums_size() const { return 2L * g.groups() * g.C; }

  void forward(int tile, const Children<T>& x, const Agreement<T>& agreement, const MomentsOut<T>& out, Arena& arena) const {
    const Child* pose = this->load_children(x.pose, tile, 0, g.S, g.C * pose_size(), arena);
    const Child* activation = this->load_children(x.activation, tile, 0, g.S, g.C, arena);
    V* parents = arena.take<V>(PB * agreement_size());
    const auto sums = this->zero_sums(this->template sums_size_of<with_variance>(), arena);
    const bool uniform_couplings = !out.log_sums;
    V* centres = with_variance && uniform_couplings ? arena.take<V>(PB * numbers()) : nullptr;
    Child* log_sums = uniform_couplings ? nullptr : reinterpret_cast<Child*>(out.log_sums) + log_sums_size() * tile;
    if (uniform_couplings) {
      sum_uniform(pose, activation, sums, centres, out.variance, arena);
    } else {
      load_agreement(tile, agreement, parents, agreement_size());
      visit_groups(pose, activation, parents, log_sums, arena, [&](int group, int, int children, const V* d, const V* w) {
        this->template add_up_of<with_variance>(group, children, d, w, sums);
      });
      this->add_earlier(sums);
    }
    // If the squared distance between mean and centre is this many times the variance, the variance loses its digits.
    const T most_moved = !uniform_couplings || out.variance ? T(30) : -lowest<T>;
    for (int at = 0; at < PB; ++at) {
      const V* centre = centres ? centres + at * numbers() : nullptr;
      if (!uniform_couplings && quadratic) centre = parents + at * agreement_size() + centre_at();
      const auto place = this->place(tile, at);
      Found found;
      if (const Result result = from_sums(sums.recent + at * sums.size, centre, first_lanes(place.rows), most_moved, found); result != ACCURATE)
        recompute(pose, activation, parents + at * agreement_size(), log_sums, at, result == SMALL_MASS, found);
      store_scalar(found.mass, out.mass, place);
      store_vector(found.mean, out.mean, place);
      store_scalar(found.largest, out.largest, place);
      store_scalar(found.log_mass, out.log_mass, place);
      if (with_variance) store_vector(found.variance, out.variance, place);
      if (with_variance && out.log_volume) store_scalar(log_volume<T>(found.variance, numbers(), out.floor), out.log_volume, place);
    }
  }

  // [B, J, E, C]
  void couplings(int tile, const Children<T>& x, const Agreement<T>& agreement, T* out, Arena& arena) const {
    const Child* pose = this->load_children(x.pose, tile, 0, g.S, g.C * pose_size(), arena);
    const Child* activation = this->load_children(x.activation, tile, 0, g.S, g.C, arena);
    V* parents = arena.take<V>(PB * agreement_size());
    load_agreement(tile, agreement, parents, agreement_size());
    Child* log_sums = arena.take<Child>(log_sums_size());
    const long one = long(g.E) * g.C, first = long(tile) * (Layout::by_type ? 1 : L) * g.J * one;
    visit_groups(pose, activation, parents, log_sums, arena, [&](int group, int c, int together, const V*, const V* w) {
      for (int e = g.group_begin(group); e < g.group_end(group); ++e)
        for (int block = 0; block < JB; ++block, w += together)
          for (int i = 0; i < together; ++i)
            for (int l = 0; l < this->place(tile, block).rows; ++l)
              out[first + (Layout::by_type ? (block * L + l) : (long(l) * g.J + block)) * one + long(e) * g.C + c + i] = w[i][l];
    });
  }

 protected:
  struct Found {
    V mass, largest, log_mass, mean[MOST], variance[MOST];
  };

  // Σ w, Σ w d [H], and with SECOND also Σ w d² [H].
  template <bool SECOND> long sums_size_of() const { return 1 + (SECOND ? 2 : 1) * numbers(); }

  int together(int edges) const {
    const long bytes = std::max(1L, long(edges) * JB * (H + 1) * long(sizeof(V)));
    const long most = std::max(1L, std::min<long>(MOST_TOGETHER, CACHE_BYTES / bytes));
    const long turns = (g.C + most - 1) / most;
    return int((g.C + turns - 1) / turns);
  }
  // The largest number of votes that visit_groups processes together, or more.
  long most_visited() const {
    long most = 1;
    for (int group = 0; group < g.groups(); ++group) most = std::max<long>(most, (g.group_end(group) - g.group_begin(group)) * JB);
    return std::max(most, std::min<long>(most * std::min(MOST_TOGETHER, g.C), CACHE_BYTES / ((H + 1) * long(sizeof(V)))));
  }

  // The contribution of one number of a vote, minus the centre, to the logit.
  V logit_of_number(V d, const V* record, int h) const {
    if constexpr (linear && quadratic) return d * (record[linear_at() + h] - d * record[quadratic_at() + h]);
    else if constexpr (quadratic) return -(d * d * record[quadratic_at() + h]);
    else return linear ? d * record[linear_at() + h] : V{};
  }
  // The difference d between a vote and the centre, and the logit, which is computed from d to avoid cancellation.
  V logit(const V* v, const V* record, V* d) const {
    V x = this->pose_logit(v);
    for (int h = 0; h < numbers(); ++h) {
      d[h] = quadratic ? v[h] - record[centre_at() + h] : v[h];
      if (of_numbers) x += logit_of_number(d[h], record, h);
    }
    return record[constant_at()] + x;
  }
  V log_coupling(V logit, const Child* sums, long child) const {
    return smaller<T>((logit - sums[child]) - sums[long(g.groups()) * g.C + child], V{});
  }

  // Calls use(group, first child type, children, d, w) for several children of a group at a time. d [edge, block,
  // child, H] holds their centred votes, w [edge, block, child] their couplings times their activations.
  template <class Use>
  void visit_groups(const Child* pose, const Child* activation, const V* parents, Child* log_sums, Arena& arena, Use use) const {
    const long most = most_visited();
    V *d = arena.take<V>(most * numbers()), *w = arena.take<V>(most);
    std::fill_n(log_sums, log_sums_size(), Child{});  // of groups without edges
    for (int group = 0; group < g.groups(); ++group) {
      const int begin = g.group_begin(group), end = g.group_end(group), s = g.group_site(group);
      if (begin == end) continue;
      const int step = together(end - begin);
      for (int c0 = 0; c0 < g.C; c0 += step) {
        const int children = std::min(step, g.C - c0);
        const long child = long(s) * g.C + c0;
        V largest[MOST_TOGETHER];
        std::fill_n(largest, MOST_TOGETHER, splat(g.none_of_the_above ? T(0) : std::numeric_limits<T>::lowest()));
        for (int e = begin; e < end; ++e)
          for (int c = 0; c < children; ++c)
            for (int block = 0; block < JB; ++block) {
              const V* record = parents + (long(g.edge_parent[e]) * JB + block) * agreement_size();
              const long i = (long(e - begin) * JB + block) * children + c;
              V v[PLACES];
              vote(pose + (child + c) * pose_size(), weights(g.edge_kernel[e], c0 + c, block), v);
              w[i] = logit(v, record, d + i * numbers());
              largest[c] = larger<T>(w[i], largest[c]);
            }
        softmax(children, long(end - begin) * JB * children, largest, activation + child, w, log_sums + long(group) * g.C + c0);
        use(group, c0, children, d, w);
      }
    }
  }

  // Replaces logits w [block, child] by couplings times activations. `largest` holds the largest logits over blocks.
  void softmax(int children, long blocks, V* largest, const Child* activation, V* w, Child* log_sums) const {
    V total[MOST_TOGETHER]{};
    alignas(64) Child largest_of_child[MOST_TOGETHER], sum[MOST_TOGETHER], scale[MOST_TOGETHER];
    Layout::largest(largest, children, largest_of_child);
    for (long i = 0; i < blocks; i += children)
      for (int c = 0; c < children; ++c) total[c] += w[i + c] = exponential(w[i + c] - largest_of_child[c]);
    Layout::sums(total, children, sum);
    const auto in_vectors = [](Child* x) { return reinterpret_cast<V*>(x); };
    for (int i = 0; i < Layout::vectors(children); ++i) {
      if (g.none_of_the_above) in_vectors(sum)[i] += exponential(-in_vectors(largest_of_child)[i]);
      in_vectors(scale)[i] = T(1) / in_vectors(sum)[i];
      // NaN if all logits are -∞
      in_vectors(sum)[i] = in_vectors(sum)[i] == T(0) ? in_vectors(scale)[i] * T(0) : logarithm(in_vectors(sum)[i]);
    }
    for (int c = 0; c < children; ++c) {
      log_sums[c] = largest_of_child[c];
      log_sums[long(g.groups()) * g.C + c] = sum[c];
      scale[c] *= activation[c];
    }
    for (long i = 0; i < blocks; i += children)
      for (int c = 0; c < children; ++c) w[i + c] *= scale[c];
  }

  // Adds Σ w, Σ w d and, with SECOND, Σ w d² of several children of a group to the sums of their parents.
  template <bool SECOND> void add_up_of(int group, int children, const V* d, const V* w, const typename Base::Sums& sums) const {
    constexpr int STEP = SECOND ? std::min(BLOCK, TORCHCAPS_REGISTERS / 4) : BLOCK;
    for (int e = g.group_begin(group); e < g.group_end(group); ++e) {
      for (int block = 0; block < JB; ++block, d += children * numbers(), w += children) {
        V *mass = sums.recent + (long(g.edge_parent[e]) * JB + block) * sums.size, *first = mass + 1, *second = first + numbers();
        *mass = std::accumulate(w, w + children, *mass);
        for (int h = 0; h < numbers(); h += STEP) {
          V one[STEP], two[STEP];
          for (int i = 0; i < STEP; ++i) one[i] = first[h + i], two[i] = SECOND ? second[h + i] : V{};
          for (int c = 0; c < children; ++c) {
            const V* dc = d + long(c) * numbers() + h;
            for (int i = 0; i < STEP; ++i) one[i] += w[c] * dc[i], two[i] += w[c] * dc[i] * dc[i];
          }
          for (int i = 0; i < STEP; ++i) first[h + i] = one[i];
          for (int i = 0; SECOND && i < STEP; ++i) second[h + i] = two[i];
        }
      }
      this->count_votes(sums, g.edge_parent[e], children);
    }
  }

  // The sums with equal couplings. With variances, they are centred on the mean of some votes of a parent. A few
  // transforms at a time are applied for all parents, so that they stay in the L1 cache.
  void sum_uniform(const Child* pose, const Child* activation, const typename Base::Sums& sums, V* centres, bool centred, Arena& arena) const {
    auto site_sums = arena.zeros<Compensated<Child>>(g.S);  // the mean is sensitive to rounding of the mass
    for (long child = 0; child < children(); ++child) site_sums[child / g.C].add(activation[child]);
    for (int p = 0; p < g.P; ++p) {
      Compensated<Child> mass{};
      for (int i = g.parent_begin[p]; i < g.parent_begin[p + 1]; ++i) {
        const int e = g.parent_edge[i];
        mass.add(uniform_coupling(g.group_of(e)) * site_sums[g.edge_child[e]].sum);
      }
      for (int block = 0; block < JB; ++block) {
        const long at = long(p) * JB + block;
        sums.recent[at * sums.size] = Layout::broadcast(mass.sum);
        if (with_variance) mean_of_some_votes(pose, activation, p, block, centred ? MOST_SAMPLES : 0, centres + at * numbers());
      }
    }
    const int types = std::min(g.C, Base::MOST_SUMMANDS);
    const long bytes = long(types) * inner() * columns() * long(sizeof(Weight));
    const int step = int(std::max(1L, std::min<long>(CACHE_BYTES / bytes, Base::MOST_SUMMANDS / types)));
    for (long i = 0, turns = (g.C + types - 1) / types; i < JB * turns; ++i)
      for (int from = 0; from < g.most_edges; from += step)
        for (int p = 0; p < g.P; ++p) {
          const int block = int(i / turns), c0 = int(i % turns) * types;
          const long at = long(p) * JB + block;
          add_uniform(pose, activation, g.parent_begin[p] + from, std::min(g.parent_begin[p] + from + step, g.parent_begin[p + 1]),
                     c0, std::min(c0 + types, g.C), block, sums.recent + at * sums.size, centres + at * numbers());
        }
  }

  // Votes at regular intervals, because neighbouring votes may be unlike all others.
  void mean_of_some_votes(const Child* pose, const Child* activation, int p, int block, long most, V* mean) const {
    const long votes = long(g.parent_begin[p + 1] - g.parent_begin[p]) * g.C, count = std::min(most, votes);
    std::fill_n(reinterpret_cast<T*>(mean), numbers() * L, T(0));
    V total{};
    for (long i = 0; i < count; ++i) {
      const long vote_at = (2 * i + 1) * votes / (2 * count);
      const int e = g.parent_edge[g.parent_begin[p] + vote_at / g.C], c = int(vote_at % g.C);
      const long child = long(g.edge_child[e]) * g.C + c;
      V v[PLACES];
      vote(pose + child * pose_size(), weights(g.edge_kernel[e], c, block), v);
      total += activation[child];
      for (int h = 0; h < numbers(); ++h) mean[h] += activation[child] * v[h];
    }
    for (int h = 0; h < numbers(); ++h) mean[h] = total > SMALL<T> ? mean[h] / total : V{};
  }

  void add_uniform(const Child* pose, const Child* activation, int from, int to, int c0, int c1, int block, V* sum, const V* centres) const {
    constexpr int TOGETHER = !COLUMNS ? 0 : ROWS % 2 == 0 ? 2 : 1;  // rows that share the reads of a transform
    constexpr int NUMBERS = TOGETHER ? TOGETHER * COLUMNS : MOST;
    const int step = TOGETHER ? TOGETHER : rows(), count = step * columns();
    for (int r = 0; r < rows(); r += step) {
      const long at = long(r) * columns();
      V *first = sum + 1 + at, *second = first + numbers(), one[NUMBERS], two[NUMBERS], centre[NUMBERS];
      for (int h = 0; h < count; ++h) one[h] = two[h] = V{}, centre[h] = with_variance ? centres[at + h] : V{};
      for (int i = from; i < to; ++i) {
        const int e = g.parent_edge[i], s = g.edge_child[e];
        const T share = uniform_coupling(g.group_of(e));
        for (int c = c0; c < c1; ++c) {
          const Child weight = share * activation[long(s) * g.C + c];
          this->prefetch(weights(g.edge_kernel[e], std::min(c + 1, c1 - 1), block));
          V d[NUMBERS];
          this->vote_rows(pose + (long(s) * g.C + c) * pose_size() + r * inner(), weights(g.edge_kernel[e], c, block), step, d,
                          with_variance ? centre : nullptr);
          for (int h = 0; h < count; ++h) {
            const V x = weight * d[h];
            one[h] += x;
            if (with_variance) two[h] += x * d[h];
          }
        }
      }
      for (int h = 0; h < count; ++h) first[h] += one[h];
      for (int h = 0; h < count && with_variance; ++h) second[h] += two[h];
    }
  }

  // Computes moments from sums around a centre (null: 0), and returns whether they are accurate.
  enum Result { ACCURATE, MOVED_FAR, SMALL_MASS };
  Result from_sums(const V* sum, const V* centre, V mask, T most_moved, Found& found) const {
    const V mass = mask > 0 ? sum[0] : splat(T(1));  // lanes that are not in use must not trigger a recomputation
    if (any(mass < T(10) * SMALL<T>)) return SMALL_MASS;
    const V inverse = T(1) / mass;
    typename Lane<T>::bits lost{};
    found.mass = mass, found.largest = V{}, found.log_mass = logarithm(mass);
    for (int h = 0; h < numbers(); ++h) {
      const V first = sum[1 + h] * inverse, moved = first * first;
      found.mean[h] = centre ? centre[h] + first : first;
      if (!with_variance) continue;
      found.variance[h] = larger<T>(sum[1 + numbers() + h] * inverse - moved, V{});
      lost |= mask * moved > most_moved * found.variance[h];
    }
    return any(lost) ? MOVED_FAR : ACCURATE;
  }

  // Recomputes moments of a block of parents by loops over their edges: the variances, around the known mean, or, if a
  // mass is small, all moments, with weights relative to the largest.
  void recompute(const Child* pose, const Child* activation, const V* record, const Child* log_sums, int at, bool small, Found& found) const {
    const int p = at / JB, block = at % JB;
    V d[MOST], best_c = splat(small ? lowest<T> : T(0)), best_a{}, total = small ? V{} : found.mass;
    const auto each_vote = [&](auto use) {
      for (int i = g.parent_begin[p]; i < g.parent_begin[p + 1]; ++i) {
        const int e = g.parent_edge[i], group = g.group_of(e);
        for (int c = 0; c < g.C; ++c) {
          const long child = long(g.edge_child[e]) * g.C + c;
          const V a = Layout::broadcast(activation[child]);
          const auto off = a < TINY<T>;
          V v[PLACES];
          vote(pose + child * pose_size(), weights(g.edge_kernel[e], c, block), v);
          const V log_c = log_sums ? log_coupling(logit(v, record, d), log_sums, long(group) * g.C + c) : splat(std::log(uniform_coupling(group)));
          use(off, logarithm(off ? splat(T(1)) : a), log_c, v);
        }
      }
    };
    // A sum of both logarithms would round log a away if log c is huge.
    const auto log_share = [&](V log_a, V log_c) { return (log_c - best_c) + (log_a - best_a); };
    if (small) {
      V centre[MOST]{};
      each_vote([&](auto off, V log_a, V log_c, const V* v) {
        const auto better = (log_share(log_a, log_c) > T(0)) & ~off;
        for (int h = 0; h < numbers(); ++h) centre[h] = better ? v[h] : centre[h];
        best_c = better ? log_c : best_c, best_a = better ? log_a : best_a;
      });
      best_c = best_c == lowest<T> ? V{} : best_c;
      found = Found{};
      each_vote([&](auto off, V log_a, V log_c, const V* v) {
        const V w = off ? V{} : exponential(log_share(log_a, log_c));
        total += w;
        for (int h = 0; h < numbers(); ++h) found.mean[h] += off ? V{} : w * (v[h] - centre[h]);
      });
      for (int h = 0; h < numbers(); ++h) found.mean[h] = total <= T(0) ? V{} : centre[h] + found.mean[h] / total;
      const V root = exponential(T(0.5) * (best_c + best_a));  // its square may underflow although the mass does not
      found.mass = product_below_normal(total * root, root);
      found.largest = best_c, found.log_mass = total <= T(0) ? splat(-lowest<T>) : logarithm(total) + best_a;
    }
    if (!with_variance) return;
    const V inverse = total <= T(0) ? V{} : T(1) / total;
    V first[MOST]{}, second[MOST]{};
    each_vote([&](auto off, V log_a, V log_c, const V* v) {
      const V w = off ? V{} : inverse * exponential(log_share(log_a, log_c));
      for (int h = 0; h < numbers(); ++h) {
        const V x = v[h] - found.mean[h], y = off ? V{} : w * x;
        first[h] += y, second[h] += y * x;
      }
    });
    // Correct the mean by the remaining mean difference.
    for (int h = 0; h < numbers(); ++h) found.variance[h] = larger<T>(second[h] - first[h] * first[h], V{}), found.mean[h] += first[h];
  }
};

}  // namespace TORCHCAPS_TARGET
