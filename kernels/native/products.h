// Vectors, numbers of the types that KV has, and products of small matrices of them by each instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 8;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 4;
#else
constexpr int W = 4, ROWS = 4;
#endif
constexpr int KEYS = 128;  // of a block, a multiple of ROWS
constexpr int SIDE = 2 * W;     // columns of a product: rows (query, member of a group of heads)
constexpr float LOWEST = -1e30f, LOG2E = 1.44269504f;

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));

inline vec load(const float* x) {
  vec y;
  std::memcpy(&y, x, sizeof y);
  return y;
}
inline void store(float* x, vec y) { std::memcpy(x, &y, sizeof y); }

struct bfloat16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct packed {  // two numbers of 4 bits
  uint8_t bits;
};
inline float number(float x) { return x; }
inline float number(_Float16 x) { return float(x); }
inline float number(int8_t x) { return x; }
inline float number(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline float number(e4m3 x) {  // its bits, seven places up, are those of a half of 2^-8 times its value
  const uint16_t bits = uint16_t((x.bits & 0x7f) << 7 | (x.bits & 0x80) << 8);
  _Float16 y;
  std::memcpy(&y, &bits, sizeof y);
  return float(y) * 256.0f;
}
inline void put(float* to, float x) { *to = x; }
inline void put(_Float16* to, float x) { *to = _Float16(x); }
inline void put(bfloat16* to, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Returns 2^x for x <= 0, to 2 units in the last position (Cephes' polynomial, for what x is over a whole number).
inline vec exp2_(vec x) {
#ifdef __AVX512F__
  const vec r = x - (vec)_mm512_roundscale_ps((__m512)x, 0);
#else
  x = x < vec{} - 125.0f ? vec{} - 125.0f : x;
  const ivec power = __builtin_convertvector(x - 0.5f, ivec);  // rounds: what is cut off is below 0
  const vec r = x - __builtin_convertvector(power, vec);
#endif
  vec p = vec{} + 1.535336188e-4f;
  p = p * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472029e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)(x - r));
#else
  ivec bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += power << 23;
  std::memcpy(&p, &bits, sizeof bits);
  return p;
#endif
}

inline float pair(bfloat16 low, bfloat16 high) {
  const uint32_t bits = low.bits | uint32_t(high.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// A matrix of factors: `at` is its first, `step` leads to the next one of a sum, `row` to the next sum.
struct Factors {
  const float* at;
  int64_t step, row;

  Factors from(int64_t r) const { return {at + r * row, step, row}; }
};

// The factors of products, 32 bits each: a float, or two bfloat16 whose products are added, the first in the low half.
// rows: that a product has at a time. as_factors: makes scores [KEYS][SIDE] factors, [KEYS / numbers][SIDE].
struct Single {
  static constexpr int numbers = 1, rows = ROWS;
  static inline vec add(vec sum, float a, vec b) { return sum + a * b; }
  static inline void as_factors(float*) {}
};
#ifdef __AVX512BF16__
struct Pair {
  static constexpr int numbers = 2, rows = ROWS;
  static inline vec add(vec sum, float a, vec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
  }
  static inline void as_factors(float* scores) {
    alignas(64) static constexpr uint16_t IN_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i in_turns = _mm512_load_si512(IN_TURNS);
    for (int i = 0; i < KEYS / 2; ++i)
      for (int col = 0; col < SIDE; col += W) {
        const float* x = scores + 2 * i * SIDE + col;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(x + SIDE), (__m512)load(x));
        _mm512_storeu_si512(scores + i * SIDE + col, _mm512_permutexvar_epi16(in_turns, both));
      }
  }
};
#endif

#ifdef __AMX_BF16__
// Pairs again, in AMX's tiles: 16 rows of 64 bytes each. Their sums are over 16 factors at a time, one step apart.
struct Tiles : Pair {
  static constexpr int rows = 32;
};

// While there is one, this thread's tiles are as products need them. Who else uses tiles finds them as they were.
class TilesInUse {
  struct alignas(64) Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } before;

 public:
  TilesInUse() {
    Shapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) shapes.bytes[tile] = 64, shapes.rows[tile] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&shapes);
  }
  ~TilesInUse() { _tile_loadconfig(&before); }
};

// Whether the system lets this process use tiles: it has to be asked once.
inline bool has_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool is_permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_permitted;
}

template <bool ADD>
inline void tile_product(const Factors& a, const float* b, int depth, float* to) {
  constexpr int T = 16, ROW = SIDE * 4;  // bytes
  __asm__ volatile("" ::: "memory");     // the loads below don't tell the compiler that they read
  if constexpr (ADD) {
    _tile_loadd(0, to, ROW);
    _tile_loadd(1, to + T, ROW);
    _tile_loadd(2, to + T * SIDE, ROW);
    _tile_loadd(3, to + T * SIDE + T, ROW);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < depth; i += T) {
    _tile_loadd(4, a.at + i, a.row * 4);
    _tile_loadd(5, a.at + T * a.row + i, a.row * 4);
    _tile_loadd(6, b + i * SIDE, ROW);
    _tile_loadd(7, b + i * SIDE + T, ROW);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, to, ROW);
  _tile_stored(1, to + T, ROW);
  _tile_stored(2, to + T * SIDE, ROW);
  _tile_stored(3, to + T * SIDE + T, ROW);
}

// to[c * to_row + r] = from[r * row + c], 16 by 16.
inline void transpose(const float* from, int64_t row, float* to, int64_t to_row) {
  __m512i x[16], y[16];
  for (int r = 0; r < 16; ++r) x[r] = _mm512_loadu_si512(from + r * row);
  for (int r = 0; r < 16; r += 2) {
    y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
    y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
  }
  for (int r = 0; r < 16; r += 4)
    for (int half = 0; half < 2; ++half) {
      x[r + 2 * half] = _mm512_unpacklo_epi64(y[r + half], y[r + half + 2]);
      x[r + 2 * half + 1] = _mm512_unpackhi_epi64(y[r + half], y[r + half + 2]);
    }
  for (int c = 0; c < 4; ++c) {  // x[r + c] has columns c, c + 4, c + 8 and c + 12 of four rows
    const __m512i first = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88);
    const __m512i second = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
    const __m512i third = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
    const __m512i fourth = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
    _mm512_storeu_si512(to + c * to_row, _mm512_shuffle_i32x4(first, second, 0x88));
    _mm512_storeu_si512(to + (c + 4) * to_row, _mm512_shuffle_i32x4(third, fourth, 0x88));
    _mm512_storeu_si512(to + (c + 8) * to_row, _mm512_shuffle_i32x4(first, second, 0xdd));
    _mm512_storeu_si512(to + (c + 12) * to_row, _mm512_shuffle_i32x4(third, fourth, 0xdd));
  }
}
#else
struct Tiles {};
struct TilesInUse {};
#endif
struct Nothing {};

template <typename Cell>
constexpr bool in_tiles = std::is_same_v<Cell, Tiles>;

// to[Cell::rows][SIDE] (+)= a b: b is [depth][SIDE].
template <bool ADD, typename Cell>
inline void product(const Factors& a, const float* b, int depth, float* to) {
#ifdef __AMX_BF16__
  if constexpr (in_tiles<Cell>) return tile_product<ADD>(a, b, depth, to);
#endif
  vec sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 2; ++c) sums[r][c] = ADD ? load(to + r * SIDE + c * W) : vec{};
  for (int i = 0; i < depth; ++i) {
    const vec left = load(b + i * SIDE), right = load(b + i * SIDE + W);
    for (int r = 0; r < ROWS; ++r) {
      const float factor = a.at[i * a.step + r * a.row];
      sums[r][0] = Cell::add(sums[r][0], factor, left);
      sums[r][1] = Cell::add(sums[r][1], factor, right);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 2; ++c) store(to + r * SIDE + c * W, sums[r][c]);
}

}  // namespace
