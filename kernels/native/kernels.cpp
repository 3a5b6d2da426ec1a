// The operators on CPU, called through ctypes (`ragkv.kernels.native`); the references in Python define them.
//
// Compiled for several instruction sets; vectors are GCC's and Clang's own. Queries are the columns of a product, so a
// row of KV is a row of factors as it lies in memory, and softmax goes down the columns, in float32. Compiled for finite
// numbers only: what a query doesn't see is set to LOWEST, not to minus infinity.
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

#include "products.h"

namespace {

constexpr int MOST_SIDES = 12;  // that share a block's keys and values

inline float total(vec x) {
  float parts[W];
  store(parts, x);
  for (int width = W / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}

inline void cap(float* s, int64_t n, float scale, float soft_cap) {
  for (int64_t i = 0; i < n; ++i) s[i] = soft_cap * std::tanh(s[i] * scale / soft_cap);
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

// selective_attention

struct Attention {
  int64_t num_queries, num_heads, num_kv_heads, size;
  const int64_t *positions, *block_table;
  Paged keys, values;
  float scale, soft_cap;
  int64_t window;      // 0: none
  const float* sinks;  // null: none
};

// KV of one head, from token n on, up to KEYS of them. Where it lies in memory as products read it, it is read there.
template <typename T, typename Cell>
struct Block {
  const Attention& c;
  int64_t head, n;
  int count;

  const T* token(const T* cache, const Paged& layout, int i) const {
    const int64_t at = n + i;
    return cache + c.block_table[at / layout.block_size] * layout.block + at % layout.block_size * layout.row +
           head * layout.head;
  }
  bool is_contiguous(const Paged& layout) const {
    return count == KEYS && n % layout.block_size + KEYS <= layout.block_size;
  }

  // Rows are keys, sums are over their numbers. room: [KEYS][depth].
  Factors keys(const T* k, int depth, float* room) const {
    const Paged& layout = c.keys;
    if constexpr (std::is_same_v<T, float>)
      if (is_contiguous(layout)) return {token(k, layout, 0), layout.number, layout.row};
    if constexpr (in_tiles<Cell>)
      if (is_contiguous(layout) && layout.number == 1 && layout.row % 2 == 0)
        return {(const float*)token(k, layout, 0), 1, layout.row / 2};
    for (int i = 0; i < count; ++i) {
      const T* from = token(k, layout, i);
      float* to = room + size_t(i) * depth;
      if constexpr (Cell::numbers == 2)
        for (int d = 0; d < depth; ++d) to[d] = pair(from[2 * d * layout.number], from[(2 * d + 1) * layout.number]);
      else
        for (int d = 0; d < depth; ++d) to[d] = number(from[d * layout.number]);
    }
    std::fill(room + size_t(count) * depth, room + size_t(KEYS) * depth, 0.0f);
    return {room, 1, depth};
  }

  // Rows are numbers of values, sums are over tokens. room: [KEYS / Cell::numbers][height], for tiles twice.
  Factors values(const T* v, int size, int height, float* room) const {
    const Paged& layout = c.values;
    if constexpr (std::is_same_v<T, float>)
      if (size == height && is_contiguous(layout)) return {token(v, layout, 0), layout.row, 1};
    for (int i = 0; i < count; i += Cell::numbers) {
      const T* from = token(v, layout, i);
      float* to = room + size_t(i / Cell::numbers) * height;
      if constexpr (Cell::numbers == 2) {
        const T* next = i + 1 < count ? token(v, layout, i + 1) : nullptr;
        for (int d = 0; d < size; ++d) to[d] = pair(from[d], next ? next[d] : T{});
      } else
        for (int d = 0; d < size; ++d) to[d] = number(from[d]);
    }
    const int used = (count + Cell::numbers - 1) / Cell::numbers;
    std::fill(room + size_t(used) * height, room + size_t(KEYS / Cell::numbers) * height, 0.0f);
#ifdef __AMX_BF16__
    if constexpr (in_tiles<Cell>) {
      float* columns = room + KEYS / 2 * height;
      for (int i = 0; i < KEYS / 2; i += 16)
        for (int d = 0; d < height; d += 16)
          transpose(room + i * height + d, height, columns + d * KEYS / 2 + i, KEYS / 2);
      return {columns, 1, KEYS / 2};
    }
#endif
    return {room, height, 1};
  }
};

// SIDE rows (query, member of the group) of one KV head. Sums are [height][SIDE].
struct Rows {
  const float* queries;  // [depth][SIDE]
  float *sums, *top, *total;
  const int32_t* positions;  // sorted
};

// Turns scores [KEYS][SIDE] of tokens from n on into 2^(factor * score - top). Keeps up top, total and sums.
inline void soften(const Attention& c, const Rows& rows, int64_t n, float factor, int height, float* scores) {
  const int64_t first = rows.positions[0], last = rows.positions[SIDE - 1];
  const bool sees_all = n + KEYS - 1 <= first && !(c.window && last - c.window + 1 > n);
  ivec positions[2];
  std::memcpy(positions, rows.positions, sizeof positions);
  const auto visible = [&](int i, int half) {
    const int32_t at = int32_t(n + i);
    const ivec is_past = positions[half] >= at;
    return c.window ? is_past & (positions[half] - int32_t(c.window) < at) : is_past;
  };
  if (!sees_all)
    for (int i = 0; i < KEYS; ++i)
      for (int half = 0; half < 2; ++half) {
        float* s = scores + i * SIDE + half * W;
        store(s, visible(i, half) ? load(s) : vec{} + LOWEST);
      }
  vec most[4] = {load(scores), load(scores + W), load(scores + SIDE), load(scores + SIDE + W)};
  for (int i = 2; i < KEYS; i += 2)  // four at a time: each waits for its own last result
    for (int part = 0; part < 4; ++part) {
      const vec x = load(scores + i * SIDE + part * W);
      most[part] = x > most[part] ? x : most[part];
    }
  vec tops[2], added[2] = {};
  for (int half = 0; half < 2; ++half) {
    const vec x = (most[half] > most[half + 2] ? most[half] : most[half + 2]) * factor;
    const vec before = load(rows.top + half * W);
    tops[half] = x > before ? x : before;
  }
  for (int i = 0; i < KEYS; ++i)
    for (int half = 0; half < 2; ++half) {
      float* s = scores + i * SIDE + half * W;
      vec p = exp2_(load(s) * factor - tops[half]);
      if (!sees_all) p = visible(i, half) ? p : vec{};
      store(s, p);
      added[half] += p;
    }
  for (int half = 0; half < 2; ++half) {
    const vec before = load(rows.top + half * W), top = tops[half], faded = exp2_(before - top);
    store(rows.total + half * W, load(rows.total + half * W) * faded + added[half]);
    store(rows.top + half * W, top);
    bool fades = false;
    for (int i = 0; i < W; ++i) fades |= top[i] > before[i];
    for (int d = 0; fades && d < height; ++d) {
      float* sum = rows.sums + size_t(d) * SIDE + half * W;
      store(sum, load(sum) * faded);
    }
  }
}

// Rows [first, last) (query, member of the group) of one KV head. No product of a row depends on which others there are.
template <typename T, typename Cell>
void attend(const Attention& c, const T* q, const T* k, const T* v, T* out, int64_t head, int64_t first, int64_t last) {
  constexpr bool PAIRS = Cell::numbers == 2;
  const int group = int(c.num_heads / c.num_kv_heads), size = int(c.size), depth = size / Cell::numbers;
  const int height = (size + Cell::rows - 1) / Cell::rows * Cell::rows, num_rows = int(last - first);
  const int padded = (num_rows + SIDE - 1) / SIDE * SIDE;
  std::vector<float> queries(size_t(padded) * depth), sums(size_t(padded) * height), keys(size_t(KEYS) * depth),
      values(size_t(KEYS) / Cell::numbers * height * (in_tiles<Cell> ? 2 : 1)), scores(KEYS * SIDE),
      top(padded, LOWEST), total(padded);
  std::vector<int32_t> positions(padded);
  const auto of = [&](int64_t row) {  // where its query is
    return (row / group * c.num_heads + head * group + row % group) * size;
  };
  for (int row = 0; row < padded; ++row) {
    const int64_t like = first + std::min(row, num_rows - 1);
    positions[row] = int32_t(c.positions[like / group]);
    if (c.sinks) top[row] = c.sinks[head * group + like % group] * LOG2E, total[row] = 1.0f;
    const T* from = q + of(like);
    float* to = &queries[size_t(row / SIDE) * depth * SIDE + row % SIDE];
    for (int d = 0; d < depth; ++d)
      if constexpr (PAIRS)
        to[d * SIDE] = pair(from[2 * d], from[2 * d + 1]);
      else
        to[d * SIDE] = number(from[d]) * c.scale;
  }
  const float scale = PAIRS ? c.scale : 1.0f;  // scaled pairs would lose digits
  const float factor = (c.soft_cap ? 1.0f : scale) * LOG2E;
  const int64_t end = positions[padded - 1] + 1;
  const int64_t begin = c.window ? std::max<int64_t>(0, positions[0] - c.window + 1) : 0;
  [[maybe_unused]] std::conditional_t<in_tiles<Cell>, TilesInUse, Nothing> tiles;
  for (int64_t n = begin; n < end; n += KEYS) {
    const Block<T, Cell> block{c, head, n, int(std::min<int64_t>(KEYS, end - n))};
    const Factors key = block.keys(k, depth, keys.data()), value = block.values(v, size, height, values.data());
    for (int row = 0; row < padded; row += SIDE) {
      const Rows rows{&queries[size_t(row) * depth], &sums[size_t(row) * height], &top[row], &total[row], &positions[row]};
      if (rows.positions[SIDE - 1] < n) continue;                            // all are before n
      if (c.window && rows.positions[0] - c.window + 1 >= n + KEYS) continue;  // sees none of it yet
      for (int i = 0; i < KEYS; i += Cell::rows)
        product<false, Cell>(key.from(i), rows.queries, depth, &scores[i * SIDE]);
      if (c.soft_cap) cap(scores.data(), KEYS * SIDE, scale, c.soft_cap);
      soften(c, rows, n, factor, height, scores.data());
      Cell::as_factors(scores.data());
      for (int d = 0; d < height; d += Cell::rows)
        product<true, Cell>(value.from(d), scores.data(), KEYS / Cell::numbers,
                            rows.sums + size_t(d) * SIDE);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    T* to = out + of(first + row);
    const float* sum = &sums[size_t(row / SIDE) * height * SIDE + row % SIDE];
    for (int d = 0; d < size; ++d) put(to + d, sum[d * SIDE] / total[row]);
  }
}

template <typename T, typename Cell = Single>
void attend_all(const Attention& c, const void* q, const void* k, const void* v, void* out) {
  const int64_t rows = c.num_queries * (c.num_heads / c.num_kv_heads), sides = (rows + SIDE - 1) / SIDE;
  const int64_t threads = num_threads(), least = (sides + MOST_SIDES - 1) / MOST_SIDES;
  // Of one length, and as many as keep all threads busy to the end: a head's tiles differ in how many keys they see.
  const auto is_even = [&](int64_t tiles) {
    const int64_t units = tiles * c.num_kv_heads;
    return units % threads == 0 && (tiles == 1 || units > 2 * threads);
  };
  int64_t tiles = least;
  while (tiles < sides && !is_even(tiles) && tiles * c.num_kv_heads < 4 * threads) ++tiles;
  const int64_t rows_each = (sides + tiles - 1) / tiles * SIDE;
  tiles = (rows + rows_each - 1) / rows_each;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < tiles * c.num_kv_heads; ++i) {
    const int64_t tile = tiles - 1 - i / c.num_kv_heads;  // the longest first
    attend<T, Cell>(c, (const T*)q, (const T*)k, (const T*)v, (T*)out, i % c.num_kv_heads, tile * rows_each,
                    std::min(rows, (tile + 1) * rows_each));
  }
}

// query_scores

struct Scores {
  int64_t num_queries, num_heads, num_kv_heads, size, num_tokens, k_head, k_token;
  const int64_t *q_positions, *k_positions;
  float scale, soft_cap;
  int64_t window;
};

// Adds the attention of rows [first, last) (query, member of the group) of one KV head, SIDE at most, to votes [N].
template <typename T, typename Cell>
void vote(const Scores& c, const T* q, const T* k, int64_t head, int64_t first, int64_t last, float* votes) {
  constexpr bool PAIRS = Cell::numbers == 2;
  const int64_t group = c.num_heads / c.num_kv_heads, size = c.size, num_tokens = c.num_tokens;
  const int64_t depth = size / Cell::numbers;
  std::vector<float> queries(size_t(depth) * SIDE), room(size_t(KEYS) * depth),
      scores(size_t(num_tokens + KEYS) * SIDE);
  int32_t seen[SIDE], unseen[SIDE];  // the last position that a row sees, and the last that it doesn't see any more
  float counts[SIDE];
  for (int row = 0; row < SIDE; ++row) {
    const int64_t like = std::min(first + row, last - 1);
    seen[row] = int32_t(c.q_positions[like / group]);
    unseen[row] = c.window ? seen[row] - int32_t(c.window) : INT32_MIN;
    counts[row] = first + row < last ? 1.0f : 0.0f;
    const T* from = q + (like / group * c.num_heads + head * group + like % group) * size;
    for (int64_t d = 0; d < depth; ++d)
      if constexpr (PAIRS)
        queries[d * SIDE + row] = pair(from[2 * d], from[2 * d + 1]);
      else
        queries[d * SIDE + row] = number(from[d]) * c.scale;
  }
  const float scale = PAIRS ? c.scale : 1.0f, factor = (c.soft_cap ? 1.0f : scale) * LOG2E;
  [[maybe_unused]] std::conditional_t<in_tiles<Cell>, TilesInUse, Nothing> tiles;
  for (int64_t n = 0; n < num_tokens; n += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, num_tokens - n);
    const T* from = k + head * c.k_head + n * c.k_token;
    Factors keys{room.data(), 1, depth};
    if constexpr (std::is_same_v<T, float>)
      if (count == KEYS) keys = {from, 1, c.k_token};
    if constexpr (in_tiles<Cell>)
      if (count == KEYS && c.k_token % 2 == 0) keys = {(const float*)from, 1, c.k_token / 2};
    for (int64_t i = 0; keys.at == room.data() && i < count; ++i)
      for (int64_t d = 0; d < depth; ++d)
        if constexpr (PAIRS)
          room[i * depth + d] = pair(from[i * c.k_token + 2 * d], from[i * c.k_token + 2 * d + 1]);
        else
          room[i * depth + d] = number(from[i * c.k_token + d]);
    for (int i = 0; i < KEYS; i += Cell::rows)
      product<false, Cell>(keys.from(i), queries.data(), int(depth), &scores[size_t(n + i) * SIDE]);
  }
  if (c.soft_cap) cap(scores.data(), num_tokens * SIDE, scale, c.soft_cap);
  vec shares[2];
  for (int half = 0; half < 2; ++half) {
    ivec newest, oldest;
    std::memcpy(&newest, seen + half * W, sizeof newest);
    std::memcpy(&oldest, unseen + half * W, sizeof oldest);
    float* s = scores.data() + half * W;
    vec most = vec{} + LOWEST, added{};
    for (int64_t n = 0; n < num_tokens; ++n) {
      const int32_t at = int32_t(c.k_positions[n]);
      const vec x = (newest >= at) & (oldest < at) ? load(s + n * SIDE) : vec{} + LOWEST;
      store(s + n * SIDE, x);
      most = x > most ? x : most;
    }
    const vec top = most * factor;
    for (int64_t n = 0; n < num_tokens; ++n) {
      const vec p = exp2_(load(s + n * SIDE) * factor - top);
      store(s + n * SIDE, p);
      added += p;
    }
    shares[half] = load(counts + half * W) / added;
  }
  for (int64_t n = 0; n < num_tokens; ++n)
    votes[n] += total(load(&scores[n * SIDE]) * shares[0] + load(&scores[n * SIDE + W]) * shares[1]);
}

template <typename T, typename Cell = Single>
void vote_all(const Scores& c, const void* q, const void* k, float* votes) {
  const int64_t rows = c.num_queries * (c.num_heads / c.num_kv_heads), sides = (rows + SIDE - 1) / SIDE;
  const int64_t units = sides * c.num_kv_heads;
  const int teams = int(std::min<int64_t>(units, num_threads()));
  std::vector<float> sums(size_t(teams) * c.num_tokens);
#pragma omp parallel for schedule(static, 1)
  for (int team = 0; team < teams; ++team)  // each has its own units: sums don't depend on timing
    for (int64_t i = team; i < units; i += teams)
      vote<T, Cell>(c, (const T*)q, (const T*)k, i / sides, i % sides * SIDE, std::min(rows, (i % sides + 1) * SIDE),
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
  int64_t num_tokens, moved, start, num_added, stride;
};
static_assert(sizeof(Chunk) == 18 * 8, "as in the table");

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
    const int64_t slot = chunk.slots[t], from = head * chunk.stride + t;
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
#if defined(__AMX_BF16__)  // products of pairs in vectors take longer there than of floats
      if (call.size % Tiles::rows == 0 && has_tiles()) return attend_all<bfloat16, Tiles>(call, q, k, v, out), 0;
#elif defined(__AVX512BF16__)
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
    case 2:
#ifdef __AMX_BF16__
      if (call.size % Tiles::rows == 0 && has_tiles()) return vote_all<bfloat16, Tiles>(call, q, k, votes), 0;
#endif
      return vote_all<bfloat16>(call, q, k, votes), 0;
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
