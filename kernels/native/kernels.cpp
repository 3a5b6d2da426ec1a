// The operators on CPU, called through ctypes (`ragkv.kernels.native`); the references in Python define them.
//
// Compiled for several instruction sets; vectors are GCC's and Clang's own. Products are tiles of ROWS x 2 vectors that
// stay in registers, over keys and values that are packed once for many rows; softmax is in float32. Compiled for
// finite numbers only: what a row doesn't see is set to LOWEST, not to minus infinity.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6;
#else
constexpr int W = 4, ROWS = 4;
#endif
constexpr int KEYS = 128;  // of a block, a multiple of 2 W
constexpr int64_t MAX_SCORES = 1 << 18;  // that a thread holds at a time
constexpr float LOWEST = -1e30f;

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

#ifdef __AVX512BF16__
inline void store(bfloat16* x, vec y) {
  const __m256bh z = _mm512_cvtneps_pbh((__m512)y);
  std::memcpy(x, &z, sizeof z);
}
#endif

// Returns e^x for x <= 0, to 2 units in the last position (Cephes' polynomial).
inline vec exp_(vec x) {
  x = x < vec{} - 87.0f ? vec{} - 87.0f : x;
  const ivec power = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec);  // rounds: what is cut off is below 0
  const vec n = __builtin_convertvector(power, vec);
  const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec bits = (power + 127) << 23;
  vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// Writes e^(s scale - most) to to[0..n) and returns the sum. n is a multiple of W.
template <typename T>
inline float exponentials(const float* s, int n, float scale, float most, T* to) {
  vec added{};
  for (int i = 0; i < n; i += W) {
    const vec p = exp_(load(s + i) * scale - most);
    store(to + i, p);
    added += p;
  }
  float sum = 0;
  for (int i = 0; i < W; ++i) sum += added[i];
  return sum;
}

inline float largest(const float* s, int n) {
  vec highest = load(s);
  for (int i = W; i < n; i += W) {
    const vec x = load(s + i);
    highest = x > highest ? x : highest;
  }
  float most = highest[0];
  for (int i = 1; i < W; ++i) most = std::max(most, highest[i]);
  return most;
}

inline void cap(float* s, int n, float scale, float soft_cap) {
  for (int i = 0; i < n; ++i) s[i] = soft_cap * std::tanh(s[i] * scale / soft_cap);
}

// The factors of products, 32 bits each: a float, or two bfloat16 whose products are added, the first in the low half.
struct Single {
  static constexpr int numbers = 1;
  static inline vec add(vec sum, float a, vec b) { return sum + a * b; }
};
#ifdef __AVX512BF16__
struct Pair {
  static constexpr int numbers = 2;
  static inline vec add(vec sum, float a, vec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
  }
};
#endif

// to[ROWS][2 W] (+)= a b: a[r][i] is a[i * a_step + r * a_row], b is [depth][b_step].
template <bool ADD, typename Cell = Single>
inline void product(const float* a, int a_step, int a_row, const float* b, int b_step, int depth, float* to,
                    int64_t to_step) {
  vec sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 2; ++c) sums[r][c] = ADD ? load(to + r * to_step + c * W) : vec{};
  for (int i = 0; i < depth; ++i) {
    const vec left = load(b + i * b_step), right = load(b + i * b_step + W);
    for (int r = 0; r < ROWS; ++r) {
      const float factor = a[i * a_step + r * a_row];
      sums[r][0] = Cell::add(sums[r][0], factor, left);
      sums[r][1] = Cell::add(sums[r][1], factor, right);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 2; ++c) store(to + r * to_step + c * W, sums[r][c]);
}

// Writes up to KEYS rows of `size` numbers as columns of `to` [size][KEYS], zeros after them. In squares, so that
// neither side is accessed with large strides.
template <typename T, typename At>
inline void pack_columns(At row_at, int count, int size, float* to) {
  constexpr int SIDE = 8;
  for (int i = 0; i < KEYS; i += SIDE)
    for (int d = 0; d < size; d += SIDE) {
      const int height = std::min(SIDE, size - d);
      float square[SIDE][SIDE] = {};
      for (int r = 0; r < SIDE && i + r < count; ++r) {
        const T* row = row_at(i + r) + d;
        for (int c = 0; c < height; ++c) square[c][r] = number(row[c]);
      }
      for (int c = 0; c < height; ++c) std::memcpy(to + size_t(d + c) * KEYS + i, square[c], sizeof square[c]);
    }
}

int num_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

struct Paged {  // [blocks, block_size, Hkv, D], strides in numbers
  int64_t block, row, head, number, block_size;
};

inline Paged paged(const int64_t* strides, int64_t block_size) {
  return {strides[0], strides[1], strides[2], strides[3], block_size};
}

// As pack_columns, of tokens from the n-th on, where a block's tokens are contiguous.
template <typename T, typename At>
inline void copy_columns(const Paged& layout, At row_at, int64_t n, int count, int size, float* to) {
  int run;
  for (int i = 0; i < count; i += run) {
    run = int(std::min<int64_t>(count - i, layout.block_size - (n + i) % layout.block_size));
    const T* from = row_at(i);
    for (int d = 0; d < size; ++d)
      for (int t = 0; t < run; ++t) to[size_t(d) * KEYS + i + t] = number(from[d * layout.number + t]);
  }
  for (int d = 0; d < size; ++d) std::fill(to + size_t(d) * KEYS + count, to + size_t(d + 1) * KEYS, 0.0f);
}

// Writes pairs of a[i] and b[i]; b null: of a[i] and 0.
inline void interleave(const bfloat16* a, const bfloat16* b, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = a[i].bits | (b ? uint32_t(b[i].bits) << 16 : 0);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// As copy_columns, in pairs of vertical neighbours.
template <typename At>
inline void copy_column_pairs(const Paged& layout, At row_at, int64_t n, int count, int size, float* to) {
  int run;
  for (int i = 0; i < count; i += run) {
    run = int(std::min<int64_t>(count - i, layout.block_size - (n + i) % layout.block_size));
    const bfloat16* from = row_at(i);
    for (int d = 0; d < size; d += 2)
      interleave(from + d * layout.number, from + (d + 1) * layout.number, run, to + size_t(d / 2) * KEYS + i);
  }
  for (int d = 0; d < size / 2; ++d) std::fill(to + size_t(d) * KEYS + count, to + size_t(d + 1) * KEYS, 0.0f);
}

// selective_attention

struct Attention {
  int64_t num_queries, num_heads, num_kv_heads, size;
  const int64_t *positions, *block_table;
  Paged keys, values;
  float scale, soft_cap;
  int64_t window;      // 0: none
  const float* sinks;  // null: none
};

template <typename T, typename Cell>
void attend(const Attention& c, const T* q, const T* k, const T* v, T* out, int64_t head, int64_t first, int64_t last) {
  constexpr bool PAIRS = Cell::numbers == 2;
  const int group = int(c.num_heads / c.num_kv_heads), size = int(c.size), depth = size / Cell::numbers;
  const int width = (size + 2 * W - 1) / (2 * W) * (2 * W);
  const int num_rows = int(last - first) * group, padded = (num_rows + ROWS - 1) / ROWS * ROWS;
  std::vector<float> queries(size_t(padded) * depth), sums(size_t(padded) * width), keys(size_t(depth) * KEYS),
      values(size_t(KEYS) / Cell::numbers * width), scores(ROWS * KEYS), top(padded, LOWEST), total(padded);
  std::vector<bfloat16> weights(PAIRS ? ROWS * KEYS : 0);
  std::vector<int64_t> position(padded);
  for (int row = 0; row < padded; ++row) {  // packed by ROWS: [padded / ROWS][depth][ROWS]
    const int like = std::min(row, num_rows - 1);
    const int64_t query = first + like / group, of = head * group + like % group;
    position[row] = c.positions[query];
    if (c.sinks) top[row] = c.sinks[of], total[row] = 1.0f;
    const T* from = q + (query * c.num_heads + of) * size;
    for (int d = 0; d < depth; ++d) {
      float* to = &queries[(size_t(row / ROWS) * depth + d) * ROWS + row % ROWS];
      if constexpr (PAIRS)
        std::memcpy(to, from + 2 * d, sizeof *to);
      else
        *to = number(from[d]) * c.scale;
    }
  }
  const float scale = PAIRS ? c.scale : 1.0f, factor = c.soft_cap ? 1.0f : scale;  // scaled pairs would lose digits
  const auto weight_at = [&](int r) {
    if constexpr (PAIRS)
      return &weights[r * KEYS];
    else
      return &scores[r * KEYS];
  };
  const auto at = [&](const T* cache, const Paged& layout, int64_t n) {
    return cache + c.block_table[n / layout.block_size] * layout.block + n % layout.block_size * layout.row +
           head * layout.head;
  };
  const int64_t end = position[padded - 1] + 1;
  const int64_t begin = c.window ? std::max<int64_t>(0, position[0] - c.window + 1) : 0;
  for (int64_t n = begin; n < end; n += KEYS) {
    const int count = int(std::min<int64_t>(KEYS, end - n));
    const auto key_at = [&](int i) { return at(k, c.keys, n + i); };
    if constexpr (PAIRS) {
      if (c.keys.number == 1)
        pack_columns<float>([&](int i) { return (const float*)key_at(i); }, count, depth, keys.data());
      else
        copy_column_pairs(c.keys, key_at, n, count, size, keys.data());
      for (int i = 0; i < count; i += 2)
        interleave(at(v, c.values, n + i), i + 1 < count ? at(v, c.values, n + i + 1) : nullptr, size,
                   &values[size_t(i / 2) * width]);
    } else {
      if (c.keys.number == 1)
        pack_columns<T>(key_at, count, size, keys.data());
      else
        copy_columns<T>(c.keys, key_at, n, count, size, keys.data());
      for (int i = 0; i < count; ++i) {
        const T* value = at(v, c.values, n + i);
        for (int d = 0; d < size; ++d) values[size_t(i) * width + d] = number(value[d]);
      }
    }
    std::fill(values.begin() + size_t((count + Cell::numbers - 1) / Cell::numbers) * width, values.end(), 0.0f);
    for (int row = 0; row < padded; row += ROWS) {
      if (position[row + ROWS - 1] < n) continue;                          // all are before n
      if (c.window && position[row] - c.window + 1 >= n + KEYS) continue;  // sees none of it yet
      for (int col = 0; col < KEYS; col += 2 * W)
        product<false, Cell>(&queries[size_t(row) * depth], ROWS, 1, &keys[col], KEYS, depth, &scores[col], KEYS);
      for (int r = 0; r < ROWS; ++r) {
        float* s = &scores[r * KEYS];
        if (c.soft_cap) cap(s, KEYS, scale, c.soft_cap);
        const int64_t seen = position[row + r] + 1 - n, unseen = c.window ? seen - c.window : 0;
        for (int64_t i = std::max<int64_t>(0, seen); i < KEYS; ++i) s[i] = LOWEST;
        for (int64_t i = 0; i < std::min<int64_t>(unseen, KEYS); ++i) s[i] = LOWEST;
        if (seen <= 0 || unseen >= KEYS) {
          std::memset(weight_at(r), 0, KEYS * sizeof *weight_at(r));
          continue;
        }
        const float most = std::max(top[row + r], largest(s, KEYS) * factor);
        const float sum = exponentials(s, KEYS, factor, most, weight_at(r));
        if (most > top[row + r]) {
          const float faded = std::exp(top[row + r] - most);
          total[row + r] *= faded;
          float* o = &sums[size_t(row + r) * width];
          for (int d = 0; d < width; ++d) o[d] *= faded;
          top[row + r] = most;
        }
        total[row + r] += sum;
      }
      for (int col = 0; col < width; col += 2 * W)
        product<true, Cell>((const float*)weight_at(0), 1, KEYS / Cell::numbers, &values[col], width, KEYS / Cell::numbers,
                            &sums[size_t(row) * width + col], width);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    T* to = out + ((first + row / group) * c.num_heads + head * group + row % group) * size;
    for (int d = 0; d < size; ++d) put(to + d, sums[size_t(row) * width + d] / total[row]);
  }
}

template <typename T, typename Cell = Single>
void attend_all(const Attention& c, const void* q, const void* k, const void* v, void* out) {
  const int64_t group = c.num_heads / c.num_kv_heads, at_most = std::max<int64_t>(1, 384 / group);
  const int64_t wanted = c.num_queries * c.num_kv_heads / (2 * num_threads());  // so that all are busy to the end
  const int64_t per_tile = std::min(at_most, std::max<int64_t>(std::max<int64_t>(1, 24 / group), wanted));
  const int64_t num_tiles = (c.num_queries + per_tile - 1) / per_tile;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < num_tiles * c.num_kv_heads; ++i) {
    const int64_t tile = num_tiles - 1 - i / c.num_kv_heads;  // the longest first
    attend<T, Cell>(c, (const T*)q, (const T*)k, (const T*)v, (T*)out, i % c.num_kv_heads, tile * per_tile,
                    std::min(c.num_queries, (tile + 1) * per_tile));
  }
}

// query_scores

struct Scores {
  int64_t num_queries, num_heads, num_kv_heads, size, num_tokens, k_head, k_token;
  const int64_t *q_positions, *k_positions;
  float scale, soft_cap;
  int64_t window;
};

// Adds the attention of rows [first, last) (query, member of the group) of one KV head to votes [N].
template <typename T>
void vote(const Scores& c, const T* q, const T* k, int64_t head, int first, int last, float* votes) {
  const int group = int(c.num_heads / c.num_kv_heads), size = int(c.size);
  const int num_rows = last - first, padded = (num_rows + ROWS - 1) / ROWS * ROWS;
  const int64_t width = (c.num_tokens + KEYS - 1) / KEYS * KEYS;
  std::vector<float> queries(size_t(padded) * size), keys(size_t(size) * KEYS), scores(size_t(padded) * width);
  for (int row = 0; row < padded; ++row) {
    const int like = first + std::min(row, num_rows - 1);
    const T* from = q + (int64_t(like / group) * c.num_heads + head * group + like % group) * size;
    for (int d = 0; d < size; ++d)
      queries[(size_t(row / ROWS) * size + d) * ROWS + row % ROWS] = number(from[d]) * c.scale;
  }
  for (int64_t n = 0; n < c.num_tokens; n += KEYS) {
    const int count = int(std::min<int64_t>(KEYS, c.num_tokens - n));
    pack_columns<T>([&](int i) { return k + head * c.k_head + (n + i) * c.k_token; }, count, size, keys.data());
    for (int row = 0; row < padded; row += ROWS)
      for (int col = 0; col < KEYS; col += 2 * W)
        product<false>(&queries[size_t(row) * size], ROWS, 1, &keys[col], KEYS, size,
                       &scores[size_t(row) * width + n + col], width);
  }
  for (int row = 0; row < num_rows; ++row) {
    float* s = &scores[size_t(row) * width];
    const int64_t last_seen = c.q_positions[(first + row) / group];
    const int64_t first_seen = c.window ? last_seen - c.window + 1 : INT64_MIN;
    if (c.soft_cap) cap(s, int(width), 1.0f, c.soft_cap);
    for (int64_t n = 0; n < c.num_tokens; ++n)
      s[n] = c.k_positions[n] <= last_seen && c.k_positions[n] >= first_seen ? s[n] : LOWEST;
    std::fill(s + c.num_tokens, s + width, LOWEST);
    const float share = 1.0f / exponentials(s, int(width), 1.0f, largest(s, int(width)), s);
    for (int64_t n = 0; n < c.num_tokens; ++n) votes[n] += share * s[n];
  }
}

template <typename T>
void vote_all(const Scores& c, const void* q, const void* k, float* votes) {
  const int64_t rows = c.num_queries * (c.num_heads / c.num_kv_heads);
  const int64_t wanted = std::min(rows * c.num_kv_heads / (3 * num_threads()), MAX_SCORES / c.num_tokens);
  const int rows_each = std::max(2 * ROWS, int(wanted + ROWS - 1) / ROWS * ROWS);
  const int parts = int(rows + rows_each - 1) / rows_each, units = parts * int(c.num_kv_heads);
  const int teams = std::min(units, num_threads());
  std::vector<float> sums(size_t(teams) * c.num_tokens);
#pragma omp parallel for schedule(static, 1)
  for (int team = 0; team < teams; ++team)  // each has its own units: sums don't depend on timing
    for (int i = team; i < units; i += teams)
      vote(c, (const T*)q, (const T*)k, i / parts, i % parts * rows_each, std::min(int(rows), (i % parts + 1) * rows_each),
           &sums[size_t(team) * c.num_tokens]);
  std::fill(votes, votes + c.num_tokens, 0.0f);
  for (int team = 0; team < teams; ++team)
    for (int64_t n = 0; n < c.num_tokens; ++n) votes[n] += sums[size_t(team) * c.num_tokens + n];
}

// kv_fuse

struct Chunk {  // a row of `ragkv.kernels.kv_fuse.table`
  const void *k, *v;
  const void *k_scale, *v_scale;  // float, of packed numbers _Float16
  const _Float16 *k_low, *v_low;
  const int64_t* slots;
  const float *shift_k, *shift_v, *weights;
  const int32_t* rows;
  const _Float16* added_scale;
  const uint8_t* added;
  int64_t num_tokens, moved, start, num_added;
};
static_assert(sizeof(Chunk) == 17 * 8, "as in the table");

struct Fuse {
  int64_t num_heads, size, pairs;
  int neox;
  const float *cos, *sin;
  Paged keys, values;
};

// Rotates x; c and s: `pairs` cosines and sines, the latter times `sign`.
inline void turn(const Fuse& f, const float* c, const float* s, float sign, float* x) {
  if (f.neox)
    for (int64_t i = 0; i < f.pairs; ++i) {
      const float a = x[i], b = x[i + f.pairs], sine = sign * s[i];
      x[i] = a * c[i] - b * sine;
      x[i + f.pairs] = b * c[i] + a * sine;
    }
  else
    for (int64_t i = 0; i < f.pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1], sine = sign * s[i];
      x[2 * i] = a * c[i] - b * sine;
      x[2 * i + 1] = b * c[i] + a * sine;
    }
}

// Reads the numbers of one row of `size`.
template <typename S>
inline void read(const S* rows, int64_t row, int64_t size, float* x) {
  const S* from = rows + row * size;
  for (int64_t d = 0; d < size; ++d) x[d] = number(from[d]);
}
inline void read(const packed* rows, int64_t row, int64_t size, float* x) {
  const int64_t half = size / 2;
  const packed* from = rows + row * half;
  for (int64_t d = 0; d < half; ++d) x[d] = float(from[d].bits & 15);
  for (int64_t d = 0; d < half; ++d) x[d + half] = float(from[d].bits >> 4);
}

// Adds what token t's row of K (part 0) or V (1) has to x; y: room for a row.
inline void add(const Fuse& f, const Chunk& chunk, int64_t part, int64_t head, int64_t t, float* y, float* x) {
  if (!chunk.rows || chunk.rows[t] < 0) return;
  const int64_t row = (part * f.num_heads + head) * chunk.num_added + chunk.rows[t];
  const float scale = float(chunk.added_scale[row]);
  read((const packed*)chunk.added, row, f.size, y);
  for (int64_t d = 0; d < f.size; ++d) x[d] += scale * (y[d] - 8.0f);
}

template <typename S, typename T>
void fuse(const Fuse& f, const Chunk& chunk, T* key_cache, T* value_cache, int64_t head, int64_t first, int64_t last) {
  using Scale = std::conditional_t<std::is_same_v<S, packed>, _Float16, float>;
  const int64_t size = f.size;
  std::vector<float> row(size), other(size), scales(size, 1.0f), lows(size);
  float *x = row.data(), *y = other.data();
  if (chunk.k_scale) read((const Scale*)chunk.k_scale, head, size, scales.data());
  if (chunk.k_low) read(chunk.k_low, head, size, lows.data());
  const int64_t distance = chunk.moved < 0 ? -chunk.moved : chunk.moved;
  const float sign = chunk.moved < 0 ? -1.0f : 1.0f;
  for (int64_t t = first; t < last; ++t) {
    const int64_t slot = chunk.slots[t], from = head * chunk.num_tokens + t;
    if (slot < 0) continue;
    read((const S*)chunk.k, from, size, x);
    if (chunk.k_scale)
      for (int64_t d = 0; d < size; ++d) x[d] = x[d] * scales[d] + lows[d];
    add(f, chunk, 0, head, t, y, x);
    if (chunk.moved) turn(f, f.cos + distance * f.pairs, f.sin + distance * f.pairs, sign, x);
    const float weight = chunk.weights ? chunk.weights[t] : 0.0f;
    if (chunk.weights) {
      const int64_t position = (chunk.start + t) * f.pairs;
      std::memcpy(y, chunk.shift_k + head * size, size * sizeof(float));
      turn(f, f.cos + position, f.sin + position, 1.0f, y);
      for (int64_t d = 0; d < size; ++d) x[d] += weight * y[d];
    }
    const int64_t block = slot / f.keys.block_size, line = slot % f.keys.block_size;
    T* to = key_cache + block * f.keys.block + line * f.keys.row + head * f.keys.head;
    for (int64_t d = 0; d < size; ++d) put(to + d, x[d]);

    read((const S*)chunk.v, from, size, x);
    if (chunk.v_scale) {
      const float scale = float(((const Scale*)chunk.v_scale)[from]);
      const float low = chunk.v_low ? float(chunk.v_low[from]) : 0.0f;
      for (int64_t d = 0; d < size; ++d) x[d] = x[d] * scale + low;
    }
    add(f, chunk, 1, head, t, y, x);
    if (chunk.weights)
      for (int64_t d = 0; d < size; ++d) x[d] += weight * chunk.shift_v[head * size + d];
    to = value_cache + block * f.values.block + line * f.values.row + head * f.values.head;
    for (int64_t d = 0; d < size; ++d) put(to + d, x[d]);
  }
}

template <typename S, typename T>
void fuse_all(const Fuse& f, const Chunk* chunks, int64_t num_chunks, void* key_cache, void* value_cache) {
  constexpr int64_t TOKENS = 64;
  struct Unit {
    int64_t chunk, head, first;
  };
  std::vector<Unit> units;
  for (int64_t i = 0; i < num_chunks; ++i)
    for (int64_t head = 0; head < f.num_heads; ++head)
      for (int64_t t = 0; t < chunks[i].num_tokens; t += TOKENS) units.push_back({i, head, t});
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < units.size(); ++i) {
    const Chunk& chunk = chunks[units[i].chunk];
    fuse<S, T>(f, chunk, (T*)key_cache, (T*)value_cache, units[i].head, units[i].first,
               std::min(chunk.num_tokens, units[i].first + TOKENS));
  }
}

template <typename T>
int fuse_stored(int stored, const Fuse& f, const Chunk* chunks, int64_t num_chunks, void* k, void* v) {
  switch (stored) {
    case 0: return fuse_all<float, T>(f, chunks, num_chunks, k, v), 0;
    case 1: return fuse_all<_Float16, T>(f, chunks, num_chunks, k, v), 0;
    case 2: return fuse_all<bfloat16, T>(f, chunks, num_chunks, k, v), 0;
    case 3: return fuse_all<int8_t, T>(f, chunks, num_chunks, k, v), 0;
    case 4: return fuse_all<e4m3, T>(f, chunks, num_chunks, k, v), 0;
    case 5: return fuse_all<packed, T>(f, chunks, num_chunks, k, v), 0;
  }
  return -1;
}

}  // namespace

// Types: 0 float32, 1 float16, 2 bfloat16, 3 int8, 4 float8_e4m3fn, 5 two 4-bit numbers. Each returns 0, or -1 for a type it doesn't know.
extern "C" {

int ragkv_selective_attention(int type, const void* q, const void* k, const void* v, void* out, const int64_t* positions,
                              const int64_t* block_table, const float* sinks, const int64_t* shape,
                              const int64_t* key_strides, const int64_t* value_strides, float scale, float soft_cap) {
  const Attention call{shape[0],
                       shape[1],
                       shape[2],
                       shape[3],
                       positions,
                       block_table,
                       paged(key_strides, shape[4]),
                       paged(value_strides, shape[4]),
                       scale,
                       soft_cap,
                       shape[5],
                       sinks};
  switch (type) {
    case 0: return attend_all<float>(call, q, k, v, out), 0;
    case 1: return attend_all<_Float16>(call, q, k, v, out), 0;
    case 2:
#ifdef __AVX512BF16__
      if (call.size % 2 == 0) return attend_all<bfloat16, Pair>(call, q, k, v, out), 0;
#endif
      return attend_all<bfloat16>(call, q, k, v, out), 0;
  }
  return -1;
}

int ragkv_query_scores(int type, const void* q, const void* k, const int64_t* q_positions, const int64_t* k_positions,
                       float* votes, const int64_t* shape, float scale, float soft_cap) {
  const Scores call{shape[0],    shape[1],    shape[2], shape[3], shape[4], shape[5],
                    shape[6],    q_positions, k_positions, scale, soft_cap, shape[7]};
  switch (type) {
    case 0: return vote_all<float>(call, q, k, votes), 0;
    case 1: return vote_all<_Float16>(call, q, k, votes), 0;
    case 2: return vote_all<bfloat16>(call, q, k, votes), 0;
  }
  return -1;
}

int ragkv_kv_fuse(int stored, int type, const void* chunks, int64_t num_chunks, const float* cos, const float* sin,
                  void* key_cache, void* value_cache, const int64_t* shape, const int64_t* key_strides,
                  const int64_t* value_strides) {
  const Fuse call{shape[0],
                  shape[1],
                  shape[2],
                  int(shape[3]),
                  cos,
                  sin,
                  paged(key_strides, shape[4]),
                  paged(value_strides, shape[4])};
  const auto rows = (const Chunk*)chunks;
  switch (type) {
    case 0: return fuse_stored<float>(stored, call, rows, num_chunks, key_cache, value_cache);
    case 1: return fuse_stored<_Float16>(stored, call, rows, num_chunks, key_cache, value_cache);
    case 2: return fuse_stored<bfloat16>(stored, call, rows, num_chunks, key_cache, value_cache);
  }
  return -1;
}

}  // extern "C"
