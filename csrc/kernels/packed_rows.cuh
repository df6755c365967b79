// Where the tiles of a packed batch lie: see common/attention_q.h.
#pragma once

#include <cstdint>

namespace omni {

// A tile of `size` tokens: the row that it is of and its number in that row.
struct Tile {
  int row;
  int number;
  int first;   // token of the row
  int length;  // of the row, in tokens

  // Whether the row reaches this far. Some numbers are left out between rows.
  __device__ __forceinline__ bool there() const { return first < length; }
};

__device__ __forceinline__ int first_tile(const int32_t* cu, int row, int size) { return cu[row] / size + row; }

// `tile` is at least 0 and `rows` at least 1.
__device__ __forceinline__ Tile find_tile(const int32_t* cu, int rows, int size, int tile) {
  int low = 0, high = rows - 1;  // the last row that begins at or before the tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(cu, middle, size) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int number = tile - first_tile(cu, low, size);
  return {low, number, number * size, cu[low + 1] - cu[low]};
}

}  // namespace omni
