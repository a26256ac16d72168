// The kernels for one instruction set: choice of lane layout and compiled shape, and distribution of tiles over
// threads.
#include "moments_backward.hpp"

#include <exception>
#include <mutex>

#include <omp.h>

namespace TORCHCAPS_TARGET {
namespace {

// While an object exists, the processor flushes subnormal numbers to 0. One operation on a subnormal number takes as
// long as about a hundred other operations.
class Flush {
#ifdef __SSE__
  const unsigned before = __builtin_ia32_stmxcsr();

 public:
  Flush() { __builtin_ia32_ldmxcsr(before | 0x8040); }
  ~Flush() { __builtin_ia32_ldmxcsr(before); }
#endif
};

// Runs work(index, arena) for all indices on several threads, and rethrows an exception after all have finished. Calls
// for different indices must not write memory that another call reads or writes.
template <class Work> void on_threads(int count, int threads, Work work) {
  std::exception_ptr failed;
#pragma omp parallel num_threads(std::max(1, std::min(count, threads)))
  {
    [[maybe_unused]] const Flush flush;
    Arena arena;
#pragma omp for schedule(dynamic, 1)
    for (int index = 0; index < count; ++index) try {
        arena.clear();
        work(index, arena);
      } catch (...) {
#pragma omp critical
        failed = std::current_exception();
      }
  }
  if (failed) std::rethrow_exception(failed);
}

// By type: copies transforms [K, C, J, D, N] into lanes, [K, C, JB, D, N, lane].
template <class T, class Kernel> Vector<T>* transforms_in_lanes(const Problem& g, const Kernel& kernel, const T* from, Arena& arena) {
  constexpr long BYTES_PER_THREAD = 256 * 1024;  // small work uses fewer threads than requested
  const int one = g.D * g.N;
  const long bytes = kernel.transform_size() * long(sizeof(Vector<T>));
  Vector<T>* to = arena.take<Vector<T>>(kernel.transform_size());
  on_threads(g.K, int(std::min<long>(g.threads, 1 + bytes / BYTES_PER_THREAD)), [&](int k, Arena&) {
    for (int c = 0; c < g.C; ++c)
      for (int block = 0; block < kernel.JB; ++block) {
        const long first = (long(k) * g.C + c) * g.J + block * lanes<T>;
        load_lanes(from + first * one, one, std::min(lanes<T>, g.J - block * lanes<T>), one,
                   to + ((long(k) * g.C + c) * kernel.JB + block) * one);
      }
  });
  return to;
}
template <class T, class Kernel> void transforms_from_lanes(const Problem& g, const Kernel& kernel, const Vector<T>* from, T* to) {
  const int one = g.D * g.N;
  for (long kc = 0; kc < long(g.K) * g.C; ++kc)
    for (int block = 0; block < kernel.JB; ++block)
      store_lanes(from + (kc * kernel.JB + block) * one, one, to + (kc * g.J + block * lanes<T>) * one, one,
                  std::min(lanes<T>, g.J - block * lanes<T>));
}

// Calls work(tile, sum, arena) for all tiles; it adds the `size` numbers of a tile to `sum`. Writes the sums over all
// tiles to `to`. The groups of tiles do not depend on the number of threads, and their sums are added in order, so that
// the number of threads does not change the result.
template <class T, class Work> void sum_in_groups(int tiles, long size, int threads, T* to, Work work) {
  constexpr long MOST_GROUPS = 16, MOST_BYTES = 64L << 20;
  const long affordable = std::max(1L, MOST_BYTES / std::max(1L, size * long(sizeof(T))));
  const int groups = int(std::min({long(tiles), MOST_GROUPS, affordable}));
  std::vector<Arena> memory(groups);
  std::vector<const T*> sums(groups);
  std::mutex adding;
  int added = 0;
  std::fill_n(to, size, T(0));
  on_threads(groups, threads, [&](int group, Arena& arena) {
    T* sum = memory[group].template take<T>(size);
    std::fill_n(sum, size, T(0));
    for (int tile = int(long(tiles) * group / groups); tile < int(long(tiles) * (group + 1) / groups); ++tile) {
      arena.clear();
      work(tile, sum, arena);
    }
    const std::lock_guard one_thread(adding);
    sums[group] = sum;
    for (; added < groups && sums[added]; memory[added++] = Arena())
      for (long i = 0; i < size; ++i) to[i] += sums[added][i];
  });
}

// Calls work(kernel) with a kernel of the given class.
template <class Kernel, class T, class Work> void run_with(const Problem& g, const T* transform, Work work) {
  Arena memory;
  if constexpr (Kernel::by_type) work(Kernel(g, transforms_in_lanes(g, Kernel(g, nullptr), transform, memory)));
  else work(Kernel(g, transform));
}

// Calls work(kernel) with the kernel for a problem and a form. In float32, the shapes of the published networks and of
// rules that add columns to each vote have specialised kernels. All other shapes use the general kernel.
template <class T, class Work> void with_kernel(const Problem& g, int form, const T* transform, Work work) {
  constexpr int GAUSSIAN = QUADRATIC | VARIANCE, ALL = LINEAR | QUADRATIC | VARIANCE | POSE;
  const bool is_linear = (form | LINEAR) == LINEAR, is_gaussian = (form | GAUSSIAN) == GAUSSIAN, by_type = !g.by_sample;
  const auto shape_is = [&](int R, int Q, int N) { return g.R == R && g.Q == Q && g.N == N; };
  if constexpr (sizeof(T) == 4) {
    if (g.by_sample && is_linear && shape_is(1, 8, 16)) return run_with<MomentsBackward<T, BySample, 1, 8, 16, LINEAR>>(g, transform, work);
    if (g.by_sample && is_gaussian && shape_is(4, 5, 4)) return run_with<MomentsBackward<T, BySample, 4, 5, 4, GAUSSIAN>>(g, transform, work);
    if (by_type && form == POSE && shape_is(4, 4, 4)) return run_with<MomentsBackward<T, ByType, 4, 4, 4, POSE>>(g, transform, work);
    if (by_type && is_linear && shape_is(4, 4, 4)) return run_with<MomentsBackward<T, ByType, 4, 4, 4, LINEAR>>(g, transform, work);
    if (by_type && is_gaussian && shape_is(4, 4, 4)) return run_with<MomentsBackward<T, ByType, 4, 4, 4, GAUSSIAN>>(g, transform, work);
    if (by_type && is_gaussian && shape_is(4, 6, 5)) return run_with<MomentsBackward<T, ByType, 4, 6, 5, GAUSSIAN>>(g, transform, work);
    if (by_type && is_gaussian && shape_is(4, 5, 4)) return run_with<MomentsBackward<T, ByType, 4, 5, 4, GAUSSIAN>>(g, transform, work);
  }
  if (by_type && form == POSE) run_with<MomentsBackward<T, ByType, 0, 0, 0, POSE>>(g, transform, work);
  else if (by_type) run_with<MomentsBackward<T, ByType, 0, 0, 0, ALL>>(g, transform, work);
  else if (form == POSE) run_with<MomentsBackward<T, BySample, 0, 0, 0, POSE>>(g, transform, work);
  else run_with<MomentsBackward<T, BySample, 0, 0, 0, ALL>>(g, transform, work);
}

template <class T> int form_of(const Problem& g, const Agreement<T>& x, bool variance) {
  return (g.pose_logits ? POSE : 0) | (x.linear ? LINEAR : 0) | (x.quadratic || x.centre ? QUADRATIC : 0) | (variance ? VARIANCE : 0);
}

// By sample: sets the elements beyond the batch to 0. The operators pad the batch to fill the widest vectors, 64 bytes.
template <class T> void clear_padding(const Problem& g, long each, T* x) {
  const long multiple = g.by_sample ? 64 / long(sizeof(T)) : 1;
  std::fill_n(x + g.B * each, ((g.B + multiple - 1) / multiple * multiple - g.B) * each, T(0));
}

template <class T> void moments(const Problem& g, const Children<T>& x, const Agreement<T>& agreement, const MomentsOut<T>& out) {
  with_kernel(g, form_of(g, agreement, out.variance), x.transform, [&](const auto& kernel) {
    if (out.log_sums) clear_padding(g, kernel.log_sums_size(), out.log_sums);
    on_threads(kernel.tiles(), g.threads, [&](int tile, Arena& arena) { kernel.forward(tile, x, agreement, out, arena); });
  });
}

template <class T> void couplings(const Problem& g, const Children<T>& x, const Agreement<T>& agreement, T* out) {
  with_kernel(g, form_of(g, agreement, false), x.transform, [&](const auto& kernel) {
    on_threads(kernel.tiles(), g.threads, [&](int tile, Arena& arena) { kernel.couplings(tile, x, agreement, out, arena); });
  });
}

template <class T>
void moments_backward(const Problem& g, const Children<T>& x, const Record<T>& pass, const PassGrads<T>& out) {
  with_kernel(g, form_of(g, pass.agreement, pass.variance), x.transform, [&](const auto& kernel) {
    clear_padding(g, long(g.groups()) * g.C, out.coupling_grads);
    on_threads(kernel.tiles(), g.threads, [&](int tile, Arena& arena) { kernel.agreement_grads(tile, x, pass, out, arena); });
  });
}

template <class T>
void votes_backward(const Problem& g, const Children<T>& x, const Record<T>* passes, int count, const ChildrenGrads<T>& out) {
  int form = 0;
  for (int t = 0; t < count; ++t) form |= form_of(g, passes[t].agreement, passes[t].variance);
  with_kernel(g, form, x.transform, [&](auto kernel) {
    using Kernel = decltype(kernel);
    using Pass = typename Kernel::Pass;
    const auto read_passes = [&](int tile, Pass* to, Arena& arena) {
      for (int t = 0; t < count; ++t) to[t] = kernel.pass_of(tile, passes[t], t ? passes + t - 1 : nullptr, arena);
    };
    if (!Kernel::by_type && g.own_transforms) {
      // Sites run in parallel, because each writes the gradients of its own transforms.
      std::fill_n(out.transform, kernel.transform_size(), T(0));
      constexpr long MOST_BYTES = 16L << 20;
      const long bytes = long(count) * kernel.PB * kernel.record_size() * long(sizeof(Vector<T>));
      const int chunk = int(std::max(1L, std::min<long>(kernel.tiles(), MOST_BYTES / std::max(1L, bytes))));
      for (int first = 0; first < kernel.tiles(); first += chunk) {
        const int here = std::min(chunk, kernel.tiles() - first);
        std::vector<Pass> read(std::size_t(here) * count);
        std::vector<Arena> memory(here);
        on_threads(here, g.threads, [&](int i, Arena&) { read_passes(first + i, &read[std::size_t(i) * count], memory[i]); });
        on_threads(g.S, g.threads, [&](int s, Arena& arena) {
          kernel.votes_grads(s, first, here, x, read.data(), count, out, out.transform, arena);
        });
      }
      return;
    }
    Arena memory;
    const long size = kernel.transform_size() * (Kernel::by_type ? lanes<T> : 1);
    T* total = Kernel::by_type ? memory.take<T>(size) : out.transform;
    sum_in_groups<T>(kernel.tiles(), size, g.threads, total, [&](int tile, T* sum, Arena& arena) {
      std::vector<Pass> read(count);
      read_passes(tile, read.data(), arena);
      Arena scratch;
      const long most_edges = long(Kernel::MOST_SUMMANDS) * g.K;  // on average, this number for each transform
      T* recent = g.E > most_edges ? arena.zeros<T>(size) : sum;
      for (int s = 0, moved = 0; s < g.S; ++s) {
        kernel.votes_grads(s, tile, 1, x, read.data(), count, out, recent, scratch);
        if (recent == sum || (g.child_begin[s + 1] - moved < most_edges && s + 1 < g.S)) continue;
        for (long i = 0; i < size; ++i) sum[i] += recent[i], recent[i] = 0;
        moved = g.child_begin[s + 1];
      }
    });
    if constexpr (Kernel::by_type) transforms_from_lanes(g, kernel, reinterpret_cast<const Vector<T>*>(total), out.transform);
  });
}

template <class T> constexpr Kernels<T> KERNELS{moments<T>, couplings<T>, moments_backward<T>, votes_backward<T>};

}  // namespace

#define TORCHCAPS_TEXT(name) TORCHCAPS_TEXT_OF(name)
#define TORCHCAPS_TEXT_OF(name) #name
extern const Target kernels;
const Target kernels{TORCHCAPS_TEXT(TORCHCAPS_TARGET), KERNELS<float>, KERNELS<double>};

}  // namespace TORCHCAPS_TARGET
