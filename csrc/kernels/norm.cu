// The norm family on CUDA: a row in registers between its one read and its one write, and the next one on its way.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/norm.h"
#include "../common/rows.cuh"
#include "norm.cuh"

namespace {

using omni::Code;
using omni::at_row;
using omni::check_row;
using omni::Form;
using omni::kPack;
using omni::kRowThreads;
using omni::kRowWarps;
using omni::Norm;
using omni::Reused;
using omni::unchecked_row;

constexpr int kThreads = 384;  // of a packed row at most: 12288 channels in bfloat16, and 168 registers for each

// Reductions of one row have scratch of their own, and rows take turns with two sets: with one barrier for each
// reduction, nobody writes a set before everybody has read it.
struct Scratch {
  float y_squares[kRowWarps];
  float total[kRowWarps];
  float squares[kRowWarps];
  uint32_t peak[kRowWarps];
  float4 part[kRowWarps];  // of a warp: its mean, its squares, and how many elements it has
};

struct Moments {
  float mean;
  float inverse;  // of the standard deviation, or of the root of the mean square
};

// Of a row, with one barrier: every warp centres its part on the mean of that part, and the parts are joined about the
// mean of the first, as Chan, Golub and LeVeque (1979) join two. Not E[x^2] - mean^2: residual streams have channels a
// thousand times larger than the rest. `count` is how many elements of the row the warp has, of_count 1 / count; what
// is beyond the row must be zeros. No product here is left to the compiler to fuse, so that fused calls and separate ones
// give the same bits.
template <int kPacks>
__device__ __forceinline__ Moments moments(const Norm& call, const float (&value)[kPacks][kPack], int packs,
                                           float count, float of_count, Scratch& scratch) {
  const float share = 1.f / static_cast<float>(call.channels);
  float centre = 0.f;
  if (!call.rms) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      total += ((value[i][0] + value[i][1]) + (value[i][2] + value[i][3])) +
               ((value[i][4] + value[i][5]) + (value[i][6] + value[i][7]));
    }
    centre = __fmul_rn(omni::warp_sum(total), of_count);
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (i * blockDim.x + threadIdx.x >= packs) break;
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < kPack; j += 2) {
      const float a = value[i][j] - centre, b = value[i][j + 1] - centre;
      even = fmaf(a, a, even);
      odd = fmaf(b, b, odd);
    }
    squares += even + odd;
  }
  squares = omni::warp_sum(squares);
  const int warps = blockDim.x / omni::kWarp;
  if (warps > 1) {
    if (threadIdx.x % omni::kWarp == 0) {
      scratch.part[threadIdx.x / omni::kWarp] = make_float4(centre, squares, count, 0.f);
    }
    __syncthreads();
    const float first = scratch.part[0].x;
    float apart = 0.f;
    squares = 0.f;
#pragma unroll 2
    for (int warp = 0; warp < warps; ++warp) {
      const float4 part = scratch.part[warp];
      const float distance = part.x - first, moment = __fmul_rn(part.z, distance);
      apart += moment;
      squares += fmaf(moment, distance, part.y);
    }
    const float shift = __fmul_rn(apart, share);
    centre = first + shift;
    squares = fmaf(-apart, shift, squares);
  }
  return {centre, rsqrtf(fmaf(squares, share, call.eps))};
}

// Weight and bias, then scale and shift, whichever there are.
template <class M>
__device__ __forceinline__ void modulate(const Norm& call, int64_t row, int pack, float (&value)[kPack]) {
  float a[kPack];
  if (call.weight != nullptr) {
    omni::load_pack<Reused>(static_cast<const M*>(call.weight) + pack * kPack, a);
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[j] *= a[j];
  }
  if (call.bias != nullptr) {
    omni::load_pack<Reused>(static_cast<const M*>(call.bias) + pack * kPack, a);
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[j] += a[j];
  }
  if (call.scale != nullptr) {
    omni::load_pack<Reused>(at_row<M>(call.scale, row, call.scale_stride) + pack * kPack, a);
#pragma unroll
    for (int j = 0; j < kPack; ++j) a[j] += call.base;
    if (call.shift != nullptr) {
      float b[kPack];
      omni::load_pack<Reused>(at_row<M>(call.shift, row, call.shift_stride) + pack * kPack, b);
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[j] = fmaf(value[j], a[j], b[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[j] *= a[j];
    }
  } else if (call.shift != nullptr) {
    omni::load_pack<Reused>(at_row<M>(call.shift, row, call.shift_stride) + pack * kPack, a);
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[j] += a[j];
  }
}

template <class X, class M, int kPacks, bool kAdd, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) norm_packed(const __grid_constant__ Norm call) {
  __shared__ Scratch scratch[2];
  const int packs = static_cast<int>(call.channels / kPack);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t next = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (next >= call.tokens) return;

  omni::RawRow<X, kPacks> raw_x;
  omni::RawRow<X, kAdd ? kPacks : 1> raw_y;
  raw_x.load(call.x, next, call.x_stride, packs);
  if constexpr (kAdd) raw_y.load(call.y, next, call.y_stride, packs);
  int64_t next_row = unchecked_row(call, next);

  int share_of_warp = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int first = i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x / omni::kWarp * omni::kWarp);
    share_of_warp += max(0, min(omni::kWarp, packs - first)) * kPack;
  }
  const float count = static_cast<float>(share_of_warp), of_count = 1.f / fmaxf(count, 1.f);

  for (int turn = 0; next < call.tokens; turn ^= 1) {
    Scratch& mine = scratch[turn];
    const int64_t token = next, row = next_row;
    check_row(call, row);
    float value[kPacks][kPack];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw_x.unpack(i, value[i]);

    if constexpr (kAdd) {
      float factor = 1.f;
      if (call.y_weight != nullptr) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          float y[kPack];
          raw_y.unpack(i, y);
#pragma unroll
          for (int j = 0; j < kPack; ++j) squares += y[j] * y[j];
        }
        factor = rsqrtf(omni::block_sum(squares, mine.y_squares) / static_cast<float>(call.channels) + call.eps);
      }
      X* sum = static_cast<X*>(call.sum) + token * call.channels;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int pack = i * blockDim.x + threadIdx.x;
        if (pack >= packs) break;
        float y[kPack], a[kPack];
        raw_y.unpack(i, y);
        if (call.y_weight != nullptr) {
          omni::load_pack<Reused>(static_cast<const M*>(call.y_weight) + pack * kPack, a);
#pragma unroll
          for (int j = 0; j < kPack; ++j) y[j] *= factor * a[j];
        }
        if (call.gate != nullptr) {
          omni::load_pack<Reused>(at_row<M>(call.gate, row, call.gate_stride) + pack * kPack, a);
#pragma unroll
          for (int j = 0; j < kPack; ++j) value[i][j] = fmaf(y[j], a[j], value[i][j]);
        } else {
#pragma unroll
          for (int j = 0; j < kPack; ++j) value[i][j] += y[j];
        }
        omni::store_rounded(sum + pack * kPack, value[i]);
      }
    }

    next += step;
    if (next < call.tokens) {
      raw_x.load(call.x, next, call.x_stride, packs);
      if constexpr (kAdd) raw_y.load(call.y, next, call.y_stride, packs);
      next_row = unchecked_row(call, next);
    }
    if constexpr (kForm == Form::kSumOnly) continue;

    const Moments of = moments<kPacks>(call, value, packs, count, of_count, mine);
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * blockDim.x + threadIdx.x;
      if (pack >= packs) break;
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[i][j] = (value[i][j] - of.mean) * of.inverse;
      modulate<M>(call, row, pack, value[i]);
      if constexpr (kForm == Form::kPlain) {
        omni::store_pack(static_cast<X*>(call.out) + token * call.channels + pack * kPack, value[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j) peak = omni::larger(peak, value[i][j]);
      }
    }

    if constexpr (kForm == Form::kCoded) {
      const omni::RowScale row_scale(omni::row_max(peak, mine.peak), call.code);
      if (threadIdx.x == 0) call.out_scale[token] = row_scale.scale;
      omni::store_row_codes<kPacks>(call.out, token * call.channels, value, packs, row_scale, call.code);
    }
  }
}

// Any width, any alignment and every combination; reads a row several times, from L2 after the first.
template <class X, class M>
__global__ void __launch_bounds__(kRowThreads) norm_scalar(const __grid_constant__ Norm call) {
  __shared__ Scratch scratch[2];
  const float channels = static_cast<float>(call.channels);
  int turn = 0;
  for (int64_t token = blockIdx.x; token < call.tokens; token += gridDim.x, turn ^= 1) {
    Scratch& mine = scratch[turn];
    const int64_t row = unchecked_row(call, token);
    check_row(call, row);
    const X* x = at_row<X>(call.x, token, call.x_stride);
    const M* scale = at_row<M>(call.scale, row, call.scale_stride);
    const M* shift = at_row<M>(call.shift, row, call.shift_stride);
    const M* weight = static_cast<const M*>(call.weight);
    const M* bias = static_cast<const M*>(call.bias);

    if (call.y != nullptr) {
      const X* y = at_row<X>(call.y, token, call.y_stride);
      const M* gate = at_row<M>(call.gate, row, call.gate_stride);
      const M* y_weight = static_cast<const M*>(call.y_weight);
      X* sum = static_cast<X*>(call.sum) + token * call.channels;
      float factor = 1.f;
      if (call.y_weight != nullptr) {
        float squares = 0.f;
        for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
          squares += omni::to_float(y[c]) * omni::to_float(y[c]);
        }
        factor = rsqrtf(omni::block_sum(squares, mine.y_squares) / channels + call.eps);
      }
      for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
        float added = omni::to_float(y[c]);
        if (call.y_weight != nullptr) added *= factor * omni::to_float(y_weight[c]);
        if (call.gate != nullptr) added *= omni::to_float(gate[c]);
        omni::store(sum + c, omni::to_float(x[c]) + added);
      }
      x = sum;  // each thread reads what it wrote itself
    }
    if (call.out == nullptr) continue;

    float mean = 0.f;
    if (!call.rms) {
      float total = 0.f;
      for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) total += omni::to_float(x[c]);
      mean = omni::block_sum(total, mine.total) / channels;
    }
    float squares = 0.f;
    for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
      const float centred = omni::to_float(x[c]) - mean;
      squares += centred * centred;
    }
    const float inverse = rsqrtf(omni::block_sum(squares, mine.squares) / channels + call.eps);

    const auto result = [&](int64_t c) {
      float value = (omni::to_float(x[c]) - mean) * inverse;
      if (call.weight != nullptr) value *= omni::to_float(weight[c]);
      if (call.bias != nullptr) value += omni::to_float(bias[c]);
      if (call.scale != nullptr) value *= call.base + omni::to_float(scale[c]);
      if (call.shift != nullptr) value += omni::to_float(shift[c]);
      return value;
    };
    if (call.code == Code::kNone) {
      X* out = static_cast<X*>(call.out) + token * call.channels;
      for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) omni::store(out + c, result(c));
      continue;
    }
    float peak = 0.f;
    for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) peak = omni::larger(peak, result(c));
    const omni::RowScale row_scale(omni::row_max(peak, mine.peak), call.code);
    if (threadIdx.x == 0) call.out_scale[token] = row_scale.scale;
    for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
      omni::store_code(call.out, token * call.channels + c, result(c), row_scale, call.code);
    }
  }
}

using Kernel = void (*)(Norm);

template <class X, class M, int kPacks>
Kernel packed_kernel(const Norm& call) {
  if (call.y == nullptr) {
    return call.code == Code::kNone ? norm_packed<X, M, kPacks, false, Form::kPlain>
                                    : norm_packed<X, M, kPacks, false, Form::kCoded>;
  }
  if (call.out == nullptr) return norm_packed<X, M, kPacks, true, Form::kSumOnly>;
  return call.code == Code::kNone ? norm_packed<X, M, kPacks, true, Form::kPlain>
                                  : norm_packed<X, M, kPacks, true, Form::kCoded>;
}

template <class X, class M>
Kernel packed_kernel(const Norm& call, int packs) {
  if (packs == 1) return packed_kernel<X, M, 1>(call);
  if constexpr (omni::kRowPacks<X> == 4) {
    if (packs == 3) return packed_kernel<X, M, 3>(call);
    if (packs == 4) return packed_kernel<X, M, 4>(call);
  }
  return packed_kernel<X, M, 2>(call);
}

template <class X, class M>
const char* launch(const Norm& call, cudaStream_t stream) {
  const bool packed = omni::all_aligned<X, M>(call);
  if (packed && omni::norm_fits_bulk(call)) return omni::launch_norm_bulk(call, stream);
  const omni::RowLayout layout = omni::row_layout<X>(call.channels / kPack, kThreads / omni::kWarp);
  if (packed && layout.warps > 0) {
    return omni::launch_rows(packed_kernel<X, M>(call, layout.packs), call, omni::row_block(layout), stream);
  }
  return omni::launch_rows(norm_scalar<X, M>, call, omni::scalar_block(call.channels), stream);
}

using Launch = const char* (*)(const Norm&, cudaStream_t);

constexpr Launch kLaunches[2][2] = {
    {launch<float, float>, launch<float, __nv_bfloat16>},
    {launch<__nv_bfloat16, float>, launch<__nv_bfloat16, __nv_bfloat16>},
};

}  // namespace

const char* omni_norm_cuda(const Norm* call, void* stream) {
  return kLaunches[static_cast<int>(call->x_dtype)][static_cast<int>(call->parameter_dtype)](
      *call, static_cast<cudaStream_t>(stream));
}
