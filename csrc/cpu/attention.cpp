// Attention of packed rows on the CPU: online softmax (https://arxiv.org/abs/2205.14135) over blocks of keys.
//
// Queries are the lanes of vectors. So scores are a product of keys with transposed queries, which needs no copy of the
// keys; maxima and sums run along vectors and not across them; and what is made lies transposed until it is written.
#include "../common/attention.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "../common/cpu.h"

namespace {

using omni::Attention;
using omni::AttentionPiece;
using omni::BFloat16;

constexpr int64_t kKeys = 64;  // of a block: with its values it stays in the second level of cache
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.442695041f;

template <int kLanes>
struct VectorOf;
template <>
struct VectorOf<16> {
  typedef float Type __attribute__((vector_size(64)));
};
template <>
struct VectorOf<8> {
  typedef float Type __attribute__((vector_size(32)));
};
template <>
struct VectorOf<4> {
  typedef float Type __attribute__((vector_size(16)));
};

// A way to compute: products keep R * N vectors of so many lanes in registers, and W queries lie side by side in memory.
template <int R_, int N_, int kLanes_>
struct Shape {
  static constexpr int R = R_, N = N_, kLanes = kLanes_, W = N * kLanes;
  using Vector = typename VectorOf<kLanes>::Type;
};

// acc[i] += sum over n of a[i * down + n * along] * b[n], for R lines of a and the first N vectors of each line of b.
template <class S, int R, int N>
OMNI_INLINE void product(const float* __restrict__ a, int64_t down, int64_t along, const float* __restrict__ b,
                         int64_t lines, typename S::Vector (&acc)[R][N]) {
  using Vector = typename S::Vector;
  for (int64_t n = 0; n < lines; ++n) {
    const Vector* line = reinterpret_cast<const Vector*>(b + n * S::W);
    Vector of_b[N];
    for (int j = 0; j < N; ++j) of_b[j] = line[j];
    for (int i = 0; i < R; ++i) {
      const float of_a = a[i * down + n * along];
      for (int j = 0; j < N; ++j) acc[i][j] += of_a * of_b[j];
    }
  }
}

template <class S, int R, int N>
OMNI_INLINE void put(const typename S::Vector (&acc)[R][N], float* out) {
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < N; ++j) reinterpret_cast<typename S::Vector*>(out + i * S::W)[j] = acc[i][j];
  }
}

// out[key] = k[key] . q: R keys at a time, and then by powers of two what is left.
template <class S, int R, int N>
OMNI_INLINE void score(const float* k, int64_t stride, int64_t keys, const float* q, int64_t size, float* out) {
  int64_t key = 0;
  for (; key + R <= keys; key += R) {
    typename S::Vector acc[R][N] = {};
    product<S, R, N>(k + key * stride, stride, 1, q, size, acc);
    put<S, R, N>(acc, out + key * S::W);
  }
  if constexpr (R > 1) score<S, R / 2, N>(k + key * stride, stride, keys - key, q, size, out + key * S::W);
}

// out[c] = out[c] * decay + sum over keys of v[key][c] * weights[key]: R channels at a time.
template <class S, int R, int N>
OMNI_INLINE void mix(const float* v, int64_t stride, int64_t size, const float* weights, int64_t keys,
                     const float* decay, float* out) {
  using Vector = typename S::Vector;
  int64_t c = 0;
  for (; c + R <= size; c += R) {
    Vector acc[R][N];
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < N; ++j) {
        acc[i][j] = reinterpret_cast<Vector*>(out + (c + i) * S::W)[j] * reinterpret_cast<const Vector*>(decay)[j];
      }
    }
    product<S, R, N>(v + c, 1, stride, weights, keys, acc);
    put<S, R, N>(acc, out + c * S::W);
  }
  if constexpr (R > 1) mix<S, R / 2, N>(v + c, stride, size - c, weights, keys, decay, out + c * S::W);
}

// Scores of a block become weights against the largest score so far; `decay` is what that makes of what was added up
// before. The first lane sees `sees` keys of the block, each further one another key; what it does not see weighs 0.
template <class S, int N, bool kHides>
OMNI_INLINE void weigh(float* block, int64_t keys, int64_t sees, float* __restrict__ most, float* __restrict__ total,
                       float* __restrict__ decay) {
  constexpr int kWide = N * S::kLanes;
  float now[kWide], sum[kWide] = {};
  std::memcpy(now, most, sizeof now);
  for (int64_t key = 0; key < keys; ++key) {
    const float* __restrict__ line = block + key * S::W;
#pragma omp simd
    for (int lane = 0; lane < kWide; ++lane) {
      const float score = !kHides || key < sees + lane ? line[lane] : kNothing;
      now[lane] = now[lane] > score ? now[lane] : score;
    }
  }
  for (int64_t key = 0; key < keys; ++key) {
    float* __restrict__ line = block + key * S::W;
#pragma omp simd
    for (int lane = 0; lane < kWide; ++lane) {
      const float weight = omni::power_of_2(line[lane] - now[lane]);
      line[lane] = !kHides || key < sees + lane ? weight : 0.f;
      sum[lane] += line[lane];
    }
  }
#pragma omp simd
  for (int lane = 0; lane < kWide; ++lane) {
    // where both are -inf nothing was seen yet, and their difference is no number
    decay[lane] = most[lane] == now[lane] ? 1.f : omni::power_of_2(most[lane] - now[lane]);
    total[lane] = total[lane] * decay[lane] + sum[lane];
    most[lane] = now[lane];
  }
}

// What a piece works in. Queries lie in groups of W, each transposed.
template <int W>
struct Scratch {
  float* q;       // [groups, size, W], times scale and log2 e
  float* made;    // [groups, size, W]
  float* most;    // [kPieceQueries] each
  float* total;
  float* decay;   // [W]
  float* scores;  // [kKeys, W]
  float* k;       // [kKeys, size] each, in float32
  float* v;

  Scratch(float* memory, int64_t size)
      : q(memory),
        made(q + omni::kPieceQueries * size),
        most(made + omni::kPieceQueries * size),
        total(most + omni::kPieceQueries),
        decay(total + omni::kPieceQueries),
        scores(decay + W),
        k(scores + kKeys * W),
        v(k + kKeys * size) {}
};

int64_t floats(int64_t size) {
  constexpr int64_t kWidest = omni::kPieceQueries;
  return 2 * omni::kPieceQueries * (size + 1) + kWidest * (1 + kKeys) + 2 * kKeys * size;
}

// Keys or values in float32: where they are, or copied.
template <class T>
OMNI_INLINE const float* wide(const T* x, int64_t& stride, int64_t lines, int64_t size, float* scratch) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    for (int64_t line = 0; line < lines; ++line) omni::wide(x + line * stride, size, scratch + line * size);
    stride = size;
    return scratch;
  }
}

// A block of keys and values of the row, in float32.
struct Block {
  const float* k;
  const float* v;
  int64_t k_stride;
  int64_t v_stride;
  int64_t keys;
};

template <class S, int N>
OMNI_INLINE void attend(const Block& block, const Scratch<S::W>& at, int64_t size, int64_t lane, int64_t sees) {
  float* made = at.made + lane * size;
  score<S, S::R, N>(block.k, block.k_stride, block.keys, at.q + lane * size, size, at.scores);
  if (sees < block.keys) {
    weigh<S, N, true>(at.scores, block.keys, sees, at.most + lane, at.total + lane, at.decay);
  } else {
    weigh<S, N, false>(at.scores, block.keys, sees, at.most + lane, at.total + lane, at.decay);
  }
  mix<S, S::R, N>(block.v, block.v_stride, size, at.scores, block.keys, at.decay, made);
}

template <int W, class T>
OMNI_INLINE void begin(const Attention& call, const T* q, int64_t count, int64_t padded, const Scratch<W>& at) {
  for (int64_t lane = 0; lane < padded; ++lane) {
    float* line = at.q + lane / W * W * call.head_size + lane % W;
    for (int64_t c = 0; c < call.head_size; ++c) {
      line[c * W] = lane < count ? omni::to_float(q[lane * call.q_stride[0] + c]) * call.scale * kLog2E : 0.f;
    }
    at.most[lane] = kNothing;
    at.total[lane] = 0.f;
  }
  std::memset(at.made, 0, (padded + W - 1) / W * W * call.head_size * sizeof(float));
}

template <int W, class T>
OMNI_INLINE void finish(const Attention& call, T* out, int64_t count, const Scratch<W>& at) {
  for (int64_t lane = 0; lane < count; ++lane) {
    // a query that sees no key gives zeros
    const float inverse = at.total[lane] == 0.f ? 0.f : 1.f / at.total[lane];
    const float* line = at.made + lane / W * W * call.head_size + lane % W;
    for (int64_t c = 0; c < call.head_size; ++c) {
      omni::store(out + lane * call.heads * call.head_size + c, line[c * W] * inverse);
    }
  }
}

template <class S, class T>
OMNI_INLINE void run(const Attention& call, const AttentionPiece& piece, float* memory) {
  constexpr int W = S::W;
  const int64_t size = call.head_size, kv_head = piece.head / (call.heads / call.kv_heads);
  const int64_t first_q = call.cu_q[piece.row] + piece.first, first_k = call.cu_k[piece.row];
  const int64_t keys = call.cu_k[piece.row + 1] - first_k;
  const int64_t hidden = keys - (call.cu_q[piece.row + 1] - call.cu_q[piece.row]);
  const T* q = static_cast<const T*>(call.q) + first_q * call.q_stride[0] + piece.head * call.q_stride[1];
  const T* k = static_cast<const T*>(call.k) + first_k * call.k_stride[0] + kv_head * call.k_stride[1];
  const T* v = static_cast<const T*>(call.v) + first_k * call.v_stride[0] + kv_head * call.v_stride[1];
  const Scratch<W> at(memory, size);
  const int64_t padded = (piece.count + S::kLanes - 1) / S::kLanes * S::kLanes;
  begin(call, q, piece.count, padded, at);
  // keys that the first query of the piece sees, and the last
  const int64_t sees = call.causal ? hidden + piece.first + 1 : keys;
  const int64_t seen = call.causal ? sees + piece.count - 1 : keys;
  for (int64_t first = 0; first < seen; first += kKeys) {
    Block block{nullptr, nullptr, call.k_stride[0], call.v_stride[0], seen - first < kKeys ? seen - first : kKeys};
    block.k = wide(k + first * call.k_stride[0], block.k_stride, block.keys, size, at.k);
    block.v = wide(v + first * call.v_stride[0], block.v_stride, block.keys, size, at.v);
    for (int64_t lane = 0; lane < padded; lane += W) {
      const int64_t of_lane = call.causal ? sees + lane - first : block.keys;
      if (padded - lane < W) {
        attend<S, 1>(block, at, size, lane, of_lane);
      } else {
        attend<S, S::N>(block, at, size, lane, of_lane);
      }
    }
  }
  finish(call, static_cast<T*>(call.out) + (first_q * call.heads + piece.head) * size, piece.count, at);
}

using Kernel = void (*)(const Attention&, const AttentionPiece&, float*);

// Of the 32 registers that AVX-512 has 16 add up, of AVX2's 16 there are 12.
template <class T>
OMNI_TARGET("avx512f,avx512dq,avx512bw,avx512vl")
void with_avx512(const Attention& call, const AttentionPiece& piece, float* memory) {
  run<Shape<8, 2, 16>, T>(call, piece, memory);
}

template <class T>
OMNI_TARGET("avx2,fma")
void with_avx2(const Attention& call, const AttentionPiece& piece, float* memory) {
  run<Shape<6, 2, 8>, T>(call, piece, memory);
}

template <class T>
void plain(const Attention& call, const AttentionPiece& piece, float* memory) {
  run<Shape<4, 2, 4>, T>(call, piece, memory);
}

template <class T>
Kernel fastest() {
  if (OMNI_HAS(512, "avx512dq") && OMNI_HAS(512, "avx512bw") && OMNI_HAS(512, "avx512vl")) return with_avx512<T>;
  return OMNI_HAS(256, "avx2") && OMNI_HAS(256, "fma") ? with_avx2<T> : plain<T>;
}

}  // namespace

int64_t omni_attention_scratch(const Attention* call) { return floats(call->head_size); }

void omni_attention_cpu(const Attention* call, const AttentionPiece* piece, float* scratch) {
  static const Kernel kernels[] = {fastest<float>(), fastest<BFloat16>()};
  kernels[static_cast<int>(call->dtype)](*call, *piece, scratch);
}
