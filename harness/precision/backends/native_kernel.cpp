// One pass over a tensor: scale, clamp, round to an FP8 grid (carried in bfloat16), amax, optional statistics.
// Bit-identical to harness.precision.scaling.quantize. Plain C ABI, loaded with ctypes: no torch headers, builds in
// about a second. Integer arithmetic on the float bits keeps NaN handling exact and the loops vectorisable.
// Build with -ffp-contract=off: a fused multiply-add would round once where the rule rounds twice.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kBlock = 8192;  // statistics are summed block by block, so they do not depend on the thread count
constexpr int64_t kSerial = 4 * kBlock;
constexpr uint32_t kAbs = 0x7fffffffu, kInf = 0x7f800000u;

inline uint32_t bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float real(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }

inline float widen(const float* x, int64_t i) { return x[i]; }
inline float widen(const uint16_t* x, int64_t i) { return real(uint32_t(x[i]) << 16); }

struct Grid { uint32_t max_bits, min_exponent_bits, magic_shift; };

inline Grid grid(int fmt) {  // 0: E4M3 (448, 2^-6, 3 bits), 1: E5M2 (57344, 2^-14, 2 bits)
  return fmt == 0 ? Grid{bits(448.0f), bits(0x1p-6f), 20u << 23} : Grid{bits(57344.0f), bits(0x1p-14f), 21u << 23};
}

struct Sums { double clipped, nonzero, flushed, signal, noise; };

template <typename T>
uint32_t quantize(const T* __restrict x, int64_t n, float scale, Grid g, uint16_t* __restrict q) {
  const uint32_t max_bits = g.max_bits, min_exponent = g.min_exponent_bits, shift = g.magic_shift;
  uint32_t amax = 0;
#pragma omp simd reduction(max : amax)
  for (int64_t i = 0; i < n; ++i) {
    const float value = widen(x, i);
    const uint32_t magnitude = bits(value) & kAbs;
    const uint32_t counted = magnitude > kInf ? 0u : magnitude;  // NaN is ignored
    amax = counted > amax ? counted : amax;
    const uint32_t scaled = bits(value * scale);
    const uint32_t a = scaled & kAbs, sign = scaled & ~kAbs;
    const uint32_t clamped = a > max_bits ? max_bits : a;
    const uint32_t top = clamped & kInf;
    const float magic = real(((top < min_exponent ? min_exponent : top) + shift) | 0x00400000u);
    const uint32_t rounded = bits((real(clamped) + magic) - magic) & kAbs;
    q[i] = uint16_t((sign | (a > kInf ? 0x7fc00000u : rounded)) >> 16);
  }
  return amax;
}

template <typename T>
Sums measure(const T* __restrict x, int64_t n, float scale, float max, const uint16_t* __restrict q) {
  const double inverse = 1.0 / double(scale);
  int32_t clipped = 0, nonzero = 0, flushed = 0;
  double signal = 0, noise = 0;
#pragma omp simd reduction(+ : clipped, nonzero, flushed, signal, noise)
  for (int64_t i = 0; i < n; ++i) {
    const float value = widen(x, i);
    const float raw = widen(q, i);
    const uint32_t magnitude = bits(value) & kAbs;
    const int32_t finite = magnitude < kInf ? 1 : 0;
    const int32_t live = magnitude != 0 ? finite : 0;
    clipped += std::fabs(value * scale) > max ? 1 : 0;
    nonzero += live;
    flushed += raw == 0.0f ? live : 0;
    const double exact = finite ? double(value) : 0.0;
    const double error = finite ? exact - double(raw) * inverse : 0.0;
    signal += exact * exact;
    noise += error * error;
  }
  return Sums{double(clipped), double(nonzero), double(flushed), signal, noise};
}

template <typename T>
void run(const T* x, int64_t n, float scale, Grid g, uint16_t* q, float* amax, double* stats, int threads) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<uint32_t> peaks(blocks, 0u);
  std::vector<Sums> sums(stats ? blocks : 0);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n > kSerial)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t start = b * kBlock, size = start + kBlock < n ? kBlock : n - start;
    peaks[b] = quantize(x + start, size, scale, g, q + start);
    if (stats) sums[b] = measure(x + start, size, scale, real(g.max_bits), q + start);
  }
  uint32_t peak = bits(*amax);  // running amax of the window: non-negative, so its bits order like its value
  for (const uint32_t p : peaks) peak = p > peak ? p : peak;
  *amax = real(peak);
  for (const Sums& s : sums) {
    stats[0] += s.clipped; stats[1] += s.nonzero; stats[2] += s.flushed; stats[3] += s.signal; stats[4] += s.noise;
  }
}

}  // namespace

extern "C" {

// x: n values, float32 (is_bf16 = 0) or bfloat16. q: n bfloat16, out. amax: in and out (max). stats: 5 doubles, added
// to (clipped, nonzero, flushed, sum x^2, sum error^2), or null. fmt: 0 E4M3, 1 E5M2.
void harness_quantize(const void* x, int is_bf16, int64_t n, float scale, int fmt, uint16_t* q, float* amax,
                      double* stats, int threads) {
  const Grid g = grid(fmt);
  if (is_bf16) run(static_cast<const uint16_t*>(x), n, scale, g, q, amax, stats, threads);
  else run(static_cast<const float*>(x), n, scale, g, q, amax, stats, threads);
}

}
