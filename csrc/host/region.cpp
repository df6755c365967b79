// Memory of the host that a device copies from, and files that are read straight into it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../common/host.h"
#include "words.h"

namespace {

using omni::Piece;
using omni::words;

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kReadBytes = int64_t{8} << 20;  // what a thread reads at a time

std::string failed(const std::string& what) { return what + ": " + std::strerror(errno); }

// One file of a reading, open for as long as that lasts.
struct File {
  explicit File(const char* path) : descriptor(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor >= 0) close(descriptor);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor;
};

// Reads all of a piece; empty where that went well.
std::string read_piece(const Piece& piece, int descriptor) {
  int64_t done = 0;
  while (done < piece.bytes) {
    const ssize_t got = pread(descriptor, static_cast<char*>(piece.target) + done,
                              static_cast<size_t>(piece.bytes - done), piece.offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(piece.file);
    if (got == 0) return std::string(piece.file) + " ends at byte " + std::to_string(piece.offset + done);
    done += got;
  }
  return "";
}

std::vector<Piece> cut(const Piece* pieces, int64_t count) {
  std::vector<Piece> parts;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t at = 0; at < pieces[i].bytes; at += kReadBytes) {
      parts.push_back({pieces[i].file, pieces[i].offset + at, std::min(kReadBytes, pieces[i].bytes - at),
                       static_cast<char*>(pieces[i].target) + at});
    }
  }
  return parts;
}

}  // namespace

const char* omni_region_map(int64_t bytes, void** where) {
  if (bytes <= 0) return words("a region needs at least one byte");
  // more than asked for, and what lies before and behind the aligned part is given back
  const size_t length = static_cast<size_t>(bytes), slack = static_cast<size_t>(kHugePage);
  void* mapped = mmap(nullptr, length + slack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return words(failed("mapping " + std::to_string(bytes) + " bytes of host memory"));
  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (start + slack - 1) / slack * slack;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto up = [page](uintptr_t address) { return (address + page - 1) / page * page; };
  const uintptr_t end = up(aligned + length), mapped_end = up(start + length + slack);
  if (aligned > start) munmap(mapped, aligned - start);
  if (mapped_end > end) munmap(reinterpret_cast<void*>(end), mapped_end - end);
  *where = reinterpret_cast<void*>(aligned);
  madvise(*where, length, MADV_HUGEPAGE);  // a kernel without huge pages refuses, and small ones serve
  return nullptr;
}

const char* omni_region_unmap(void* where, int64_t bytes) {
  return munmap(where, static_cast<size_t>(bytes)) == 0 ? nullptr : words(failed("unmapping host memory"));
}

const char* omni_region_pin(void* where, int64_t bytes, int32_t device) {
#ifdef OMNI_GRPC_CUDA_ARCHS
  const omni::OnDevice on(device);
  if (on.problem != cudaSuccess) return words("choosing the device", on.problem);
  return words("pinning host memory", cudaHostRegister(where, static_cast<size_t>(bytes), cudaHostRegisterPortable));
#else
  static_cast<void>(where), static_cast<void>(bytes), static_cast<void>(device);
  return words("this library was built without CUDA");
#endif
}

const char* omni_region_unpin(void* where, int32_t device) {
#ifdef OMNI_GRPC_CUDA_ARCHS
  const omni::OnDevice on(device);
  if (on.problem != cudaSuccess) return words("choosing the device", on.problem);
  return words("unpinning host memory", cudaHostUnregister(where));
#else
  static_cast<void>(where), static_cast<void>(device);
  return words("this library was built without CUDA");
#endif
}

const char* omni_read_pieces(const Piece* pieces, int64_t count, int32_t threads) {
  std::map<std::string, File> files;
  for (int64_t i = 0; i < count; ++i) {
    const auto [place, is_new] = files.try_emplace(pieces[i].file, pieces[i].file);
    if (place->second.descriptor < 0) return words(failed(std::string("opening ") + pieces[i].file));
  }
  const std::vector<Piece> parts = cut(pieces, count);
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex guard;
  std::string problem;
  const auto work = [&] {
    for (size_t i = next++; i < parts.size() && !stop; i = next++) {
      const std::string wrong = read_piece(parts[i], files.at(parts[i].file).descriptor);
      if (wrong.empty()) continue;
      const std::lock_guard<std::mutex> lock(guard);
      if (!stop.exchange(true)) problem = wrong;
    }
  };
  const size_t wanted = std::min<size_t>(parts.size(), static_cast<size_t>(std::max(threads, 1)));
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < wanted) others.emplace_back(work);
  } catch (const std::system_error&) {
    // fewer threads than asked for read as much
  }
  work();
  for (std::thread& other : others) other.join();
  return problem.empty() ? nullptr : words(problem);
}
