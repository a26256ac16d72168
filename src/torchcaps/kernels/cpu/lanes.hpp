// SIMD lanes as GCC/Clang vectors. Their width TORCHCAPS_BYTES and the number of vector registers TORCHCAPS_REGISTERS are
// those of the instruction set that this translation unit is compiled for. Each instruction set has its own namespace.
// Otherwise the linker could merge functions, and a merged function could use instructions that a processor lacks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <vector>

namespace TORCHCAPS_TARGET {

template <class T> struct Lane {
  typedef T type __attribute__((vector_size(TORCHCAPS_BYTES)));
  using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  typedef integer bits __attribute__((vector_size(TORCHCAPS_BYTES)));
};

template <class T> using Vector = typename Lane<T>::type;
template <class T> inline constexpr int lanes = TORCHCAPS_BYTES / sizeof(T);
template <class T> inline constexpr T lowest = -std::numeric_limits<T>::infinity();

template <class T> inline Vector<T> splat(T x) { return x - Vector<T>{}; }  // x + 0 would turn -0 into 0
// A NaN in a is returned; a NaN in b is ignored.
template <class T> inline Vector<T> larger(Vector<T> a, Vector<T> b) { return a < b ? b : a; }
template <class T> inline Vector<T> smaller(Vector<T> a, Vector<T> b) { return b < a ? b : a; }

// A vector of lanes of a (0 … L - 1) and b (L … 2 L - 1), given by their indices.
#ifdef __clang__
#define TORCHCAPS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TORCHCAPS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, typename Lane<T>::bits{__VA_ARGS__})
#endif

// BIT is a power of two. Lane I of the result comes from b if I has this bit, and from a otherwise. kept_lanes takes
// lane I of b or a, crossed_lanes takes lane I ^ BIT.
template <class T, int BIT, int... I>
inline Vector<T> kept_lanes(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  return TORCHCAPS_SHUFFLE(a, b, (I & BIT ? I + lanes<T> : I)...);
}
template <class T, int BIT, int... I>
inline Vector<T> crossed_lanes(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  return TORCHCAPS_SHUFFLE(a, b, ((I ^ BIT) + (I & BIT ? lanes<T> : 0))...);
}

// Returns a vector whose lane i combines all lanes of x[i]. Overwrites the vectors x[0 … L - 1].
template <class T, int BIT = lanes<T> / 2, class Combine> inline Vector<T> across(Vector<T>* x, Combine combine) {
  const auto each = std::make_integer_sequence<int, lanes<T>>();
  for (int i = 0; i < BIT; ++i)
    x[i] = combine(kept_lanes<T, BIT>(x[i], x[i + BIT], each), crossed_lanes<T, BIT>(x[i], x[i + BIT], each));
  if constexpr (BIT > 1) across<T, BIT / 2>(x, combine);
  return x[0];
}
template <class T> inline Vector<T> sums_across(Vector<T>* x) {
  return across<T>(x, [](Vector<T> a, Vector<T> b) { return a + b; });
}
// NaN is returned if any lane is NaN.
template <class T> inline Vector<T> largest_across(Vector<T>* x) {
  return across<T>(x, [](Vector<T> a, Vector<T> b) { return ((a < b) | (b != b)) ? b : a; });
}

// Transposes L vectors in place. Each call exchanges BIT between the number of a vector and the number of a lane.
template <class T, int BIT = lanes<T> / 2> inline void transpose(Vector<T>* x) {
  const auto each = std::make_integer_sequence<int, lanes<T>>();
  for (int i = 0; i < lanes<T>; ++i) {
    if (i & BIT) continue;
    const Vector<T> a = x[i], b = x[i + BIT];
    x[i] = kept_lanes<T, BIT>(a, crossed_lanes<T, BIT>(b, b, each), each);
    x[i + BIT] = kept_lanes<T, BIT>(crossed_lanes<T, BIT>(a, a, each), b, each);
  }
  if constexpr (BIT > 1) transpose<T, BIT / 2>(x);
}

// e^x to about 1 ulp for x in [-87, 88]. Below -87, the result is 0; above 88, it is e^88. The polynomials of
// exponential and logarithm are from Moshier's Cephes library (expf, logf).
[[gnu::always_inline]] inline Vector<float> exponential(Vector<float> x) {
  using Bits = Lane<float>::bits;
  const Bits alive = x >= -87.0f;
  const Vector<float> nan = x;
  x = smaller<float>(larger<float>(x, splat(-87.0f)), splat(88.0f));
  const float magic = 12582912.0f;
  const Vector<float> shifted = x * 1.44269504088896341f + magic;
  const Vector<float> n = shifted - magic;
  const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits exponent = ((Bits)shifted) << 23;
  const Bits scaled = (Bits)p + exponent;
  return nan == nan ? (Vector<float>)(scaled & alive) : nan;
}

template <class Bits> inline bool any(Bits x) {
  std::uint64_t parts[sizeof x / 8], found = 0;
  std::memcpy(parts, &x, sizeof x);
  for (const std::uint64_t part : parts) found |= part;
  return found != 0;
}

inline Vector<double> exponential(Vector<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// log x of positive numbers, which are first clamped to at least the smallest normal number.
inline Vector<float> logarithm(Vector<float> x) {
  using Bits = Lane<float>::bits;
  x = larger<float>(x, splat(std::numeric_limits<float>::min()));
  const Vector<float> beyond = x;
  const Bits whole = (Bits)x;
  Bits exponent = (whole >> 23) - 126;
  Vector<float> m = (Vector<float>)((whole & 0x007fffff) | 0x3f000000);
  const Bits small = m < 0.707106781186547524f;
  exponent += small;
  m = m + (Vector<float>)((Bits)m & small) - 1.0f;
  const Vector<float> e = __builtin_convertvector(exponent, Vector<float>);
  const Vector<float> z = m * m;
  Vector<float> p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  p = p + e * -2.12194440e-4f - z * 0.5f;
  return beyond <= std::numeric_limits<float>::max() ? m + p + e * 0.693359375f : beyond;
}

inline Vector<double> logarithm(Vector<double> x) {
  x = larger<double>(x, splat(std::numeric_limits<double>::min()));
  for (int i = 0; i < lanes<double>; ++i) x[i] = std::log(x[i]);
  return x;
}

// Σ log σ of up to 64 variances, with σ² = variance + floor, at least the smallest normal number. The fractions of all σ²
// are multiplied, their exponents added, and a single logarithm is taken.
template <class T> inline Vector<T> log_volume(const Vector<T>* variances, int count, T floor) {
  using Bits = typename Lane<T>::bits;
  constexpr int FRACTION = std::numeric_limits<T>::digits - 1, BIAS = std::numeric_limits<T>::max_exponent - 1;
  Vector<T> product = splat(T(1)), beyond{};
  Bits exponents{};
  for (int h = 0; h < count; ++h) {
    const Vector<T> x = larger<T>(variances[h] + floor, splat(std::numeric_limits<T>::min()));
    const Bits finite = x <= std::numeric_limits<T>::max();
    beyond += finite ? Vector<T>{} : x;  // the sum is ∞ or NaN if x is
    const Bits whole = (Bits)(finite ? x : splat(T(1)));
    const Vector<T> fraction = (Vector<T>)((whole & ((typename Lane<T>::integer(1) << FRACTION) - 1)) | (Bits)splat(T(1)));
    const Bits large = fraction > T(1.41421356237309505);
    exponents += (whole >> FRACTION) - BIAS - large;
    product *= large ? T(0.5) * fraction : fraction;
  }
  const Vector<T> exponent = __builtin_convertvector(exponents, Vector<T>);
  return T(0.5) * (logarithm(product) + exponent * T(0.693147180559945309) + beyond);
}

// Kahan summation, which compensates rounding errors.
template <class X> struct Compensated {
  X sum, rest;
  void add(X x) {
    const X added = x - rest, before = sum;
    sum += added, rest = (sum - before) - added;
    rest = rest - rest == X{} ? rest : X{};  // it is not finite if the sum is infinite
  }
};

// a · b, also if the result is below the smallest normal number and the processor flushes such numbers to 0.
template <class V> __attribute__((noinline)) inline V product_below_normal(V a, V b) {
#ifdef __SSE__
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before & ~0x8040u);
  volatile V late = a;  // computes the product between the two changes of the mode
  volatile V product = late * b;
  __builtin_ia32_ldmxcsr(before);
  return product;
#else
  return a * b;
#endif
}

// Loads `count` numbers, `stride` apart, into the first lanes, with zeros in the other lanes. store_some is the
// inverse. `whole` stays in a register; `x`, whose lanes are set one by one, is in memory.
template <class T> inline Vector<T> load_some(const T* from, int count, long stride = 1) {
  Vector<T> x{}, whole;
  if (stride == 1 && count == lanes<T>) return std::memcpy(&whole, from, sizeof whole), whole;
  for (int l = 0; l < count; ++l) x[l] = from[l * stride];
  return x;
}
template <class T> inline void store_some(Vector<T> x, T* to, int count, long stride = 1) {
  if (stride == 1 && count == lanes<T>) std::memcpy(to, &x, sizeof x);
  else
    for (int l = 0; l < count; ++l) to[l * stride] = x[l];
}

// Loads `count` numbers of each row, with rows `stride` apart, so that lane l holds row l. Lanes beyond the rows are 0.
// store_lanes is the inverse.
template <class T> inline void load_lanes(const T* from, long stride, int rows, int count, Vector<T>* to) {
  constexpr int L = lanes<T>;
  int i = 0;
  for (; i + L <= count; i += L) {
    Vector<T> x[L]{};
    for (int l = 0; l < rows; ++l) std::memcpy(x + l, from + l * stride + i, sizeof x[0]);
    transpose<T>(x);
    for (int l = 0; l < L; ++l) to[i + l] = x[l];
  }
  for (; i < count; ++i) to[i] = load_some(from + i, rows, stride);
}
template <class T> inline void store_lanes(const Vector<T>* from, int count, T* to, long stride, int rows) {
  constexpr int L = lanes<T>;
  int i = 0;
  for (; i + L <= count; i += L) {
    Vector<T> x[L];
    for (int l = 0; l < L; ++l) x[l] = from[i + l];
    transpose<T>(x);
    for (int l = 0; l < rows; ++l) std::memcpy(to + l * stride + i, x + l, sizeof x[0]);
  }
  for (; i < count; ++i) store_some(from[i], to + i, rows, stride);
}

// Allocator of memory aligned for any vector. All pieces are released at once.
class Arena {
  struct Block {
    std::unique_ptr<void, decltype(&std::free)> memory;
    std::size_t size;
  };
  std::vector<Block> blocks;
  std::size_t used = 0;  // bytes in use in the last block

  void add(std::size_t size) {
    blocks.push_back({{std::aligned_alloc(64, size), &std::free}, size});
    if (!blocks.back().memory) throw std::bad_alloc();
    used = 0;
  }

 public:
  template <class X> X* take(std::size_t count) {
    const std::size_t size = (count * sizeof(X) + 63) / 64 * 64;
    if (blocks.empty() || used + size > blocks.back().size) add(std::max(size, std::size_t(1) << 16));
    used += size;
    return reinterpret_cast<X*>(static_cast<char*>(blocks.back().memory.get()) + used - size);
  }
  template <class X> X* zeros(std::size_t count) { return static_cast<X*>(std::memset(take<X>(count), 0, count * sizeof(X))); }
  void clear() {
    std::size_t total = 0;
    for (const Block& block : blocks) total += block.size;
    if (blocks.size() > 1) blocks.clear(), add(total);
    used = 0;
  }
};

}  // namespace TORCHCAPS_TARGET
