// What the kernels of the rope family share.
#pragma once

#include <cassert>

#include "../common/device.cuh"
#include "../common/rope.h"

namespace omni {

constexpr int kUnit = 2 * kPack;  // channels of a head that one thread has

__device__ __forceinline__ const QkvStream& stream_of(const QkNormRope& call, int64_t token) {
  int s = 0;
  while (s + 1 < call.stream_count && token >= call.streams[s + 1].begin) ++s;
  return call.streams[s];
}

// `token` counts within its stream.
__device__ __forceinline__ int64_t place_of(const QkvStream& stream, int64_t token) {
  return stream.place == nullptr ? stream.begin + token : stream.place[token];
}

__device__ __forceinline__ void check_place(const QkNormRope& call, int64_t place) {
  assert(place >= 0 && place < call.tokens && "place holds a row that the result lacks");
}

__device__ __forceinline__ void affine_pack(const void* values, Dtype dtype, int at, float (&out)[kPack]) {
  if (dtype == Dtype::kFloat32) {
    load_pack<Reused>(static_cast<const float*>(values) + at, out);
  } else {
    load_pack<Reused>(static_cast<const __nv_bfloat16*>(values) + at, out);
  }
}

// Where the two packs of a thread lie in its head: far enough apart that neighbours read neighbouring packs, and such
// that in the pairing by halves the second pack has the partners of the first.
struct UnitPlace {
  int at[2];      // their first channels
  bool turns[2];  // by halves the packs turn together
  int turn_at[2];  // where turns of four pairs begin in a row of the table: those of a pack, or by halves the first and
                   // the second four of both

  __device__ __forceinline__ UnitPlace(const QkNormRope& call, int lane) {
    const int size = static_cast<int>(call.head_size), pairs = static_cast<int>(call.pairs);
    if (call.half) {
      const int turning = pairs / kPack;
      const bool mine = lane < turning;
      at[0] = mine ? lane * kPack : 2 * pairs + (lane - turning) * kPack;
      at[1] = at[0] + (mine ? pairs : size / 2 - pairs);
      turns[0] = turns[1] = mine;
      turn_at[0] = 2 * at[0];
      turn_at[1] = 2 * at[0] + kPack;
    } else {
      at[0] = lane * kPack;
      at[1] = at[0] + size / 2;
      turns[0] = at[0] < 2 * pairs;
      turns[1] = at[1] < 2 * pairs;
      turn_at[0] = at[0];
      turn_at[1] = at[1];
    }
  }
};

// rope_bulk.cu: whether it serves the call, which has packs everywhere, on the current device; and its launch.
bool rope_fits_bulk(const QkNormRope& call);
const char* launch_rope_bulk(const QkNormRope& call, cudaStream_t stream);

}  // namespace omni
