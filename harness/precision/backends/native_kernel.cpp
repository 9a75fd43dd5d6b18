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
constexpr int64_t kStripe = 256;  // channels looked at together
constexpr int64_t kRows = 192, kTogether = 32;  // see scaling.centred_rows
constexpr double kInBf16 = 0x1p-16;
constexpr uint32_t kAbs = 0x7fffffffu, kInf = 0x7f800000u, kHigh = 0xffff0000u, kHalf = 0x00400000u;

inline uint32_t bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float real(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }

inline float widen(const float* x, int64_t i) { return x[i]; }
inline float widen(const uint16_t* x, int64_t i) { return real(uint32_t(x[i]) << 16); }

struct Grid { float max; uint32_t min_exponent_bits, magic_shift; };

inline Grid grid(int fmt) {  // 0: E4M3 (448, 2^-6, 3 bits), 1: E5M2 (57344, 2^-14, 2 bits)
  if (fmt == 0) return Grid{448.0f, bits(0x1p-6f), (20u << 23) | kHalf};
  return Grid{57344.0f, bits(0x1p-14f), (21u << 23) | kHalf};
}

// The value in units of FP8, which the cast rounds; 0 where it is no finite number.
template <typename T>
inline float in_fp8(const T* x, int64_t i, float scale) {
  const float value = widen(x, i);
  return (bits(value) & kAbs) < kInf ? value * scale : 0.0f;
}

struct Sums { double clipped, nonzero, flushed, signal, noise, own; };

// Raw FP8 value of one float, as float bits: its upper half is the bfloat16. Without kNan a NaN becomes the maximum.
template <bool kNan>
inline uint32_t cast(float value, float scale, Grid g) {
  const uint32_t scaled = bits(value * scale), magnitude = scaled & kAbs, max = bits(g.max);
  const uint32_t clamped = magnitude < max || (kNan && magnitude > kInf) ? magnitude : max;
  const uint32_t top = clamped & kInf;
  const float magic = real((top < g.min_exponent_bits ? g.min_exponent_bits : top) + g.magic_shift);
  return (scaled & ~kAbs) | bits((real(clamped) + magic) - magic);
}

// Both return the largest |x| of what they cast, as float bits; over kInf if there was a NaN.
template <bool kNan>
uint32_t quantize(const float* __restrict x, int64_t n, float scale, Grid g, uint16_t* __restrict q) {
  uint32_t peak = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits(x[i]) & kAbs;
    peak = magnitude > peak ? magnitude : peak;
    q[i] = uint16_t(cast<kNan>(x[i], scale, g) >> 16);
  }
  return peak;
}

// Two at a time, in the halves of 32 bits: taking them apart needs no shuffles.
template <bool kNan>
uint32_t quantize(const uint16_t* __restrict x, int64_t n, float scale, Grid g, uint16_t* __restrict q) {
  uint32_t peak = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < n / 2; ++i) {
    uint32_t pair;
    std::memcpy(&pair, x + 2 * i, 4);
    const uint32_t first = pair << 16, second = pair & kHigh;
    const uint32_t a = first & kAbs, b = second & kAbs, larger = a > b ? a : b;
    peak = larger > peak ? larger : peak;
    const uint32_t low = cast<kNan>(real(first), scale, g), high = cast<kNan>(real(second), scale, g);
    const uint32_t both = (low >> 16) | (high & kHigh);
    std::memcpy(q + 2 * i, &both, 4);
  }
  if (n % 2) {
    const float last = widen(x, n - 1);
    const uint32_t magnitude = bits(last) & kAbs;
    peak = magnitude > peak ? magnitude : peak;
    q[n - 1] = uint16_t(cast<kNan>(last, scale, g) >> 16);
  }
  return peak;
}

template <typename T>
uint32_t peak_without_nan(const T* x, int64_t n) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits(widen(x, i)) & kAbs;
    if (magnitude <= kInf && magnitude > peak) peak = magnitude;
  }
  return peak;
}

// NaN is rare, and telling it apart costs a third of the time: a block that had one is done again, with care.
template <typename T>
uint32_t quantize_block(const T* x, int64_t n, float scale, Grid g, uint16_t* q) {
  const uint32_t peak = quantize<false>(x, n, scale, g, q);
  // A product of numbers is NaN only as infinity times zero, and a scale is never zero.
  if (peak <= kInf) return peak;
  quantize<true>(x, n, scale, g, q);
  return peak_without_nan(x, n);
}

template <typename T>
Sums measure(const T* __restrict x, int64_t n, float scale, float max, const uint16_t* __restrict q) {
  const double inverse = 1.0 / double(scale);
  int32_t clipped = 0, nonzero = 0, flushed = 0;
  double signal = 0, noise = 0, own = 0;
#pragma omp simd reduction(+ : clipped, nonzero, flushed, signal, noise, own)
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
    const double share = error / (live ? exact : 1.0), square = share * share;
    own += square < 1.0 ? square : 1.0;
  }
  return Sums{double(clipped), double(nonzero), double(flushed), signal, noise, own};
}

// Of whole rows, each beside itself: what is lost of one weighs by its non-zero values.
template <typename T>
Sums measure_rows(const T* x, int64_t n, int64_t row, float scale, float max, const uint16_t* q) {
  Sums all{};
  for (int64_t start = 0; start < n; start += row) {
    const Sums s = measure(x + start, row, scale, max, q + start);
    const double lost = s.noise < s.signal ? s.noise / s.signal : 1.0;
    all.clipped += s.clipped; all.nonzero += s.nonzero; all.flushed += s.flushed;
    all.signal += s.signal; all.noise += s.noise; all.own += s.nonzero * lost;
  }
  return all;
}

// About the mean of each of `width` channels: the squares of what varies from row to row, and of what is lost of it.
// Everything is taken from the first row, in units of FP8, where value and error are exact in float32.
struct Varying { double signal, noise; };

template <typename T>
Varying measure_channels(const T* x, int64_t rows, int64_t row, int64_t width, float scale, const uint16_t* q) {
  const int64_t count = rows < kRows ? rows : kRows, gap = rows > kRows ? rows / (kRows / kTogether) : kTogether;
  float first[kStripe], offset[kStripe], sum[4][kStripe];
  double total[4][kStripe] = {};
  for (int64_t j = 0; j < width; ++j) {
    first[j] = in_fp8(x, j, scale);
    offset[j] = (bits(widen(x, j)) & kAbs) < kInf ? first[j] - widen(q, j) : 0.0f;
  }
  for (int64_t part = 0; part * kTogether < count; ++part) {
    const int64_t start = part * gap;
    const int64_t left = count - part * kTogether, end = start + (left < kTogether ? left : kTogether);
    std::memset(sum, 0, sizeof sum);  // in float32 no more rows than these
    for (int64_t i = start; i < end; ++i) {
      const T* __restrict line = x + i * row;
      const uint16_t* __restrict cast = q + i * row;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const float value = in_fp8(line, j, scale);
        const float raw = (bits(widen(line, j)) & kAbs) < kInf ? widen(cast, j) : 0.0f;
        const float about = value - first[j], error = value - raw - offset[j];
        sum[0][j] += about; sum[1][j] += about * about;
        sum[2][j] += error; sum[3][j] += error * error;
      }
    }
    for (int k = 0; k < 4; ++k)
      for (int64_t j = 0; j < width; ++j) total[k][j] += sum[k][j];
  }
  Varying found{0, 0};
  for (int64_t j = 0; j < width; ++j) {
    const double signal = total[1][j] - total[0][j] * total[0][j] / double(count);
    const double noise = total[3][j] - total[2][j] * total[2][j] / double(count);
    const double all = total[1][j] + 2 * total[0][j] * first[j] + double(count) * first[j] * first[j];
    if (!(signal > kInBf16 * all)) continue;
    found.signal += signal;
    found.noise += noise > 0 ? noise : 0.0;
  }
  const double all = double(rows) / double(count);
  return Varying{found.signal * all, found.noise * all};
}

// Stripes of channels have no part in each other: their sums do not depend on the thread count.
template <typename T>
void add_channels(const T* x, int64_t n, int64_t row, float scale, const uint16_t* q, double* stats, int threads) {
  const int64_t stripes = (row + kStripe - 1) / kStripe;
  std::vector<Varying> found(stripes);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n > kSerial)
  for (int64_t s = 0; s < stripes; ++s) {
    const int64_t from = s * kStripe, width = from + kStripe < row ? kStripe : row - from;
    found[s] = measure_channels(x + from, n / row, row, width, scale, q + from);
  }
  const double unit = 1.0 / double(scale);
  for (const Varying& each : found) {
    // A value that overflows in units of FP8 says nothing of the rest.
    if (!std::isfinite(each.signal) || !std::isfinite(each.noise)) continue;
    stats[6] += each.signal * unit * unit; stats[7] += each.noise * unit * unit;
  }
}

template <typename T>
void run(const T* x, int64_t n, int64_t columns, float scale, Grid g, uint16_t* q, float* amax, double* stats,
         bool by_rows, int threads) {
  const int64_t row = by_rows ? columns : 0;
  const int64_t block = row == 0 ? kBlock : row < kBlock ? kBlock / row * row : row;
  const int64_t blocks = (n + block - 1) / block;
  std::vector<uint32_t> peaks(blocks, 0u);
  std::vector<Sums> sums(stats ? blocks : 0);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n > kSerial)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t start = b * block, size = start + block < n ? block : n - start;
    peaks[b] = quantize_block(x + start, size, scale, g, q + start);
    if (stats && row) sums[b] = measure_rows(x + start, size, row, scale, g.max, q + start);
    else if (stats) sums[b] = measure(x + start, size, scale, g.max, q + start);
  }
  uint32_t peak = bits(*amax);  // running amax of the window: non-negative, so its bits order like its value
  for (const uint32_t p : peaks) peak = p > peak ? p : peak;
  *amax = real(peak);
  for (const Sums& s : sums) {
    stats[0] += s.clipped; stats[1] += s.nonzero; stats[2] += s.flushed; stats[3] += s.signal; stats[4] += s.noise;
    stats[5] += s.own;
  }
  if (stats && n) add_channels(x, n, columns, scale, q, stats, threads);
}

}  // namespace

extern "C" {

// x: n values, float32 (is_bf16 = 0) or bfloat16. q: n bfloat16, out. amax: in and out (max). stats: 8 doubles, added
// to (clipped, nonzero, flushed, sum x^2, sum error^2, sum min(1, error^2 / x^2), and about each channel's mean: sum
// x^2, sum error^2), or null. columns: values in a row, i.e. channels. by_rows: the sixth sum is of rows: nonzero *
// min(1, sum error^2 / sum x^2). fmt: 0 E4M3, 1 E5M2.
void harness_quantize(const void* x, int is_bf16, int64_t n, int64_t columns, float scale, int fmt, uint16_t* q,
                      float* amax, double* stats, int by_rows, int threads) {
  const Grid g = grid(fmt);
  if (is_bf16) run(static_cast<const uint16_t*>(x), n, columns, scale, g, q, amax, stats, by_rows != 0, threads);
  else run(static_cast<const float*>(x), n, columns, scale, g, q, amax, stats, by_rows != 0, threads);
}

}
