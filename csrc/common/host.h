// The host family as plain C, which Python calls through ctypes: memory that a device copies from, the reading of files
// into it, and the copies of blocks. Each function returns null or what is wrong in words, which last until the same
// thread calls again.
#pragma once

#include <cstdint>

#define OMNI_EXPORT __attribute__((visibility("default")))

namespace omni {

constexpr int32_t kHost = -1;  // the number of the device that is none: copies go to the host's memory

// Bytes of a file and where they go.
struct Piece {
  const char* file;
  int64_t offset;
  int64_t bytes;
  void* target;
};

struct Streamer;

}  // namespace omni

extern "C" {

// Reserves addresses for `bytes`, from a multiple of 2 MiB on. Pages cost memory once they are written.
OMNI_EXPORT const char* omni_region_map(int64_t bytes, void** where);
OMNI_EXPORT const char* omni_region_unmap(void* where, int64_t bytes);

// Locks pages, so that `device` copies from them at its full speed while it computes. One call for each range that a
// single copy takes: copies do not cross two of them.
OMNI_EXPORT const char* omni_region_pin(void* where, int64_t bytes, int32_t device);
OMNI_EXPORT const char* omni_region_unpin(void* where, int32_t device);

// Reads all pieces with so many threads.
OMNI_EXPORT const char* omni_read_pieces(const omni::Piece* pieces, int64_t count, int32_t threads);

// A stream of copies into slots on a device; with kHost, a thread that copies. For each slot
//   copy     waits until the slot is released, copies into it, and leaves it ready; returns at once;
//   wait     makes `stream` (a cudaStream_t; on the host, the caller) wait until what was copied last is there;
//   release  lets the next copy begin once `stream` has got so far.
// A slot is free at first. One thread at a time may call.
OMNI_EXPORT const char* omni_streamer_open(int32_t device, int32_t slots, omni::Streamer** streamer);
OMNI_EXPORT const char* omni_streamer_copy(omni::Streamer* streamer, int32_t slot, void* target, const void* source,
                                           int64_t bytes);
OMNI_EXPORT const char* omni_streamer_wait(omni::Streamer* streamer, int32_t slot, void* stream);
OMNI_EXPORT const char* omni_streamer_release(omni::Streamer* streamer, int32_t slot, void* stream);
// Waits for the copies that have begun, and frees it.
OMNI_EXPORT const char* omni_streamer_close(omni::Streamer* streamer);
}
