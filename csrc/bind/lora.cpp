// Binds the lora family.
#include "../common/lora.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../common/dtype.h"
#include "bind.h"

namespace {

using omni::LoraAdd;
using omni::LoraPart;
using omni::LoraRun;
using omni::Optional;
using omni::ScalarType;
using omni::Tensor;

constexpr size_t kRunNumbers = 3, kPartNumbers = 3;  // as omni_grpc/ops/lora.py has them
constexpr int64_t kCpuTokens = 64;                   // of a piece: a second factor is turned once for all of them

// What a call says of its runs and parts.
struct Lists {
  const std::vector<Tensor>& factors;
  const std::vector<int64_t>& runs;
  const std::vector<int64_t>& parts;
  const std::vector<double>& scales;
};

bool fits(const Lists& lists, const int64_t* part, int64_t inputs, int64_t outputs) {
  const auto count = static_cast<int64_t>(lists.factors.size());
  if (part[0] < -1 || part[0] >= count || part[1] < 0 || part[1] >= count || part[2] < 0) return false;
  const Tensor& up = lists.factors[part[1]];
  if (part[0] < 0) return up.dim() == 1 && up.size(0) <= outputs - part[2];
  const Tensor& down = lists.factors[part[0]];
  return up.dim() == 2 && up.size(0) <= outputs - part[2] && down.dim() == 2 && down.size(0) == up.size(1) &&
         down.size(1) == inputs;
}

void check_lora_add(const Tensor& y, const Tensor& x, const Optional& scale, const Lists& lists) {
  STD_TORCH_CHECK(y.dim() == 2 && x.dim() == 2 && y.size(0) == x.size(0),
                  "lora_add: y and x must be [T, N] and [T, K], got ", y.dim(), " and ", x.dim(),
                  " dimensions, or tokens that differ");
  const ScalarType of_x = x.scalar_type();
  STD_TORCH_CHECK(scale ? of_x == ScalarType::Float8_e4m3fn || of_x == ScalarType::Char : of_x == y.scalar_type(),
                  "lora_add: x must be of y's dtype, or float8 e4m3 or int8 with a scale");
  STD_TORCH_CHECK(!scale || (scale->scalar_type() == ScalarType::Float && scale->dim() == 1 &&
                             scale->size(0) == x.size(0) && scale->device() == y.device()),
                  "lora_add: scale must be float32 [T]");
  bool alike = x.device() == y.device();
  for (const Tensor& each : lists.factors)
    alike = alike && each.device() == y.device() && each.scalar_type() == y.scalar_type();
  STD_TORCH_CHECK(alike, "lora_add: x and factors must be on the device of y, factors in its dtype");
  int64_t parts = 0;
  for (size_t at = 2; at < lists.runs.size(); at += kRunNumbers) parts += lists.runs[at];
  const auto count = static_cast<int64_t>(lists.scales.size());
  STD_TORCH_CHECK(lists.runs.size() % kRunNumbers == 0 && lists.parts.size() == kPartNumbers * lists.scales.size() &&
                      parts == count,
                  "lora_add: ", lists.runs.size(), " numbers of runs, ", lists.parts.size(), " of parts and ", count,
                  " scales do not match");
  int64_t end = 0;
  for (size_t at = 0; at < lists.runs.size(); at += kRunNumbers) {
    const int64_t first = lists.runs[at], tokens = lists.runs[at + 1];
    STD_TORCH_CHECK(end <= first && 0 <= tokens && first + tokens <= y.size(0) && tokens <= INT32_MAX &&
                        0 <= lists.runs[at + 2],
                    "lora_add: run ", at / kRunNumbers, " lies outside of ", y.size(0),
                    " tokens, or before the end of another");
    end = first + tokens;
  }
  for (int64_t part = 0; part < count; ++part)
    STD_TORCH_CHECK(fits(lists, &lists.parts[kPartNumbers * part], x.size(1), y.size(1)), "lora_add: part ", part,
                    " does not fit ", x.size(1), " inputs and ", y.size(1), " outputs");
}

// The runs of one launch are gathered here, and launched when no more fit.
class Batch {
 public:
  using Run = void (*)(LoraAdd&, const Tensor& y, int64_t inner);

  Batch(const LoraAdd& of, const Tensor& y, Run run) : call_(of), y_(y), run_(run) {}

  void add(const LoraRun& run, const std::vector<LoraPart>& parts) {
    const auto count = static_cast<int32_t>(parts.size());
    STD_TORCH_CHECK(count <= omni::kLoraParts, "lora_add: a run of ", count, " parts; kernels take ", omni::kLoraParts,
                    ", the function of this name in omni_grpc.ops any number");
    if (call_.runs == omni::kLoraRuns || parts_ + count > omni::kLoraParts) launch();
    LoraRun& mine = call_.run[call_.runs++];
    mine = run;
    mine.inner_at = inner_;
    mine.first_part = parts_;
    for (const LoraPart& part : parts) {
      LoraPart& to = call_.part[parts_++] = part;
      to.first_block = mine.blocks;
      mine.blocks += (part.rank + omni::kLoraBlock - 1) / omni::kLoraBlock;
    }
    mine.end_part = parts_;
    inner_ += static_cast<int64_t>(run.tokens) * mine.blocks * omni::kLoraBlock;
  }

  void launch() {
    if (call_.runs > 0) run_(call_, y_, inner_);
    call_.runs = parts_ = 0;
    inner_ = 0;
  }

 private:
  LoraAdd call_;
  const Tensor& y_;
  Run run_;
  int32_t parts_ = 0;
  int64_t inner_ = 0;
};

LoraRun tokens_from(int64_t first, int64_t end) {
  LoraRun run{};
  run.first = first;
  run.tokens = static_cast<int32_t>(end - first);
  return run;
}

template <Batch::Run run>
void lora_add(const Tensor& y, const Tensor& x, const Optional& scale, std::vector<Tensor> factors,
              std::vector<int64_t> runs, std::vector<int64_t> parts, std::vector<double> scales, bool gelu) {
  check_lora_add(y, x, scale, {factors, runs, parts, scales});
  if (y.size(0) == 0 || y.size(1) == 0) return;
  STD_TORCH_CHECK(y.stride(1) == 1 || y.size(1) == 1, "lora_add: the kernel takes y with dense rows");
  const Tensor from = omni::with_dense_rows(x);
  const Optional of_tokens = scale ? Optional(omni::contiguous(*scale)) : std::nullopt;
  for (Tensor& factor : factors) factor = omni::contiguous(factor);
  LoraAdd call{};
  call.dtype = omni::dtype_of(y, "lora_add", "y");
  call.code = !scale                                        ? omni::Code::kNone
              : x.scalar_type() == ScalarType::Char ? omni::Code::kInt8
                                                    : omni::Code::kFloat8;
  call.y = y.mutable_data_ptr();
  call.x = from.const_data_ptr();
  call.x_scale = of_tokens ? static_cast<const float*>(of_tokens->const_data_ptr()) : nullptr;
  call.y_stride = y.stride(0);
  call.x_stride = from.stride(0);
  call.in = static_cast<int32_t>(x.size(1));
  call.out = static_cast<int32_t>(y.size(1));
  call.gelu_tanh = gelu;

  Batch batch(call, y, run);
  int64_t end = 0;
  size_t part = 0;
  std::vector<LoraPart> mine;
  for (size_t at = 0; at < runs.size(); at += kRunNumbers) {
    const int64_t first = runs[at], tokens = runs[at + 1];
    const size_t last = part + static_cast<size_t>(runs[at + 2]);
    mine.clear();
    for (; part < last; ++part) {
      const int64_t* place = &parts[kPartNumbers * part];
      const Tensor& up = factors[place[1]];
      LoraPart& made = mine.emplace_back();
      made.down = place[0] < 0 ? nullptr : factors[place[0]].const_data_ptr();
      made.up = up.const_data_ptr();
      made.rank = place[0] < 0 ? 0 : static_cast<int32_t>(up.size(1));
      made.row_begin = static_cast<int32_t>(place[2]);
      made.row_end = static_cast<int32_t>(place[2] + up.size(0));
      made.scale = static_cast<float>(scales[part]);
    }
    if (gelu && end < first) batch.add(tokens_from(end, first), {});
    if (tokens > 0 && (gelu || !mine.empty())) batch.add(tokens_from(first, first + tokens), mine);
    end = first + tokens;
  }
  if (gelu && end < y.size(0)) batch.add(tokens_from(end, y.size(0)), {});
  batch.launch();
}

void run_cpu(LoraAdd& call, const Tensor&, int64_t) {
  for (int32_t number = 0; number < call.runs; ++number)
    torch::stable::parallel_for(0, call.run[number].tokens, kCpuTokens, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kCpuTokens)
        omni_lora_add_cpu(&call, number, at, std::min(end, at + kCpuTokens));
    });
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_cuda(LoraAdd& call, const Tensor& y, int64_t inner) {
  const Tensor scratch = omni::new_empty(y, {inner}, ScalarType::BFloat16);
  call.inner = scratch.mutable_data_ptr();
  omni::launch("lora_add", &omni_lora_add_cuda, call, y);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("lora_add", TORCH_BOX(&lora_add<run_cpu>)); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { m.impl("lora_add", TORCH_BOX(&lora_add<run_cuda>)); }
#endif
