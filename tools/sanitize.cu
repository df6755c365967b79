// Calls the launchers of all kernels over few small shapes: what compute-sanitizer is to look at, without the minutes that
// Python takes under it. Built and run by tools/sanitize.py.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "../csrc/common/attention_q.h"
#include "../csrc/common/cache.h"
#include "../csrc/common/dequant.h"
#include "../csrc/common/dtype.h"
#include "../csrc/common/gemm.h"
#include "../csrc/common/heads.h"
#include "../csrc/common/image.h"
#include "../csrc/common/lora.h"
#include "../csrc/common/norm.h"
#include "../csrc/common/quant.h"
#include "../csrc/common/rope.h"
#include "../csrc/common/step.h"

namespace {

using omni::Code;
using omni::Codes;
using omni::Dtype;

int failures = 0;

void check(const char* what, const char* problem) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (problem == nullptr && error != cudaSuccess) problem = cudaGetErrorString(error);
  if (problem == nullptr) return;
  std::printf("%s: %s\n", what, problem);
  ++failures;
}

// Memory of exactly this size, so that a step beyond it is seen; filled where a kernel reads it.
class Memory {
 public:
  ~Memory() {
    for (void* pointer : all_) cudaFree(pointer);
  }

  void* made(size_t bytes) {
    void* pointer = nullptr;
    cudaMalloc(&pointer, bytes);
    all_.push_back(pointer);
    return pointer;
  }

  template <class T>
  T* filled(const std::vector<T>& values) {
    void* pointer = made(values.size() * sizeof(T));
    cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
    return static_cast<T*>(pointer);
  }

  void* numbers(size_t count, Dtype dtype) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 2654435761u) % 2001u) * 1e-3f - 1.f;
    if (dtype == Dtype::kFloat32) return filled(values);
    std::vector<__nv_bfloat16> halves(count);
    for (size_t i = 0; i < count; ++i) halves[i] = __float2bfloat16(values[i]);
    return filled(halves);
  }

 private:
  std::vector<void*> all_;
};

constexpr size_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

void norm(int64_t tokens, int64_t channels, Dtype dtype, Dtype of_modulation, bool adds, bool all, Code code) {
  Memory memory;
  const size_t count = tokens * channels;
  omni::Norm call{};
  call.x = memory.numbers(count, dtype);
  if (adds) call.y = memory.numbers(count, dtype);
  if (adds) call.sum = memory.made(count * size_of(dtype));
  call.gate = memory.numbers(2 * channels, of_modulation);
  call.scale = memory.numbers(2 * channels, of_modulation);
  call.shift = memory.numbers(2 * channels, of_modulation);
  if (all) call.weight = memory.numbers(channels, of_modulation);
  if (all) call.bias = memory.numbers(channels, of_modulation);
  if (all && adds) call.y_weight = memory.numbers(channels, of_modulation);
  std::vector<int32_t> index(tokens);
  for (int64_t t = 0; t < tokens; ++t) index[t] = static_cast<int32_t>(t % 2);
  call.index = memory.filled(index);
  call.out = memory.made(count * (code == Code::kNone ? size_of(dtype) : 1));
  call.out_scale = static_cast<float*>(memory.made(tokens * sizeof(float)));
  call.tokens = tokens, call.channels = channels, call.rows = 2;
  call.x_stride = call.y_stride = call.gate_stride = call.scale_stride = call.shift_stride = channels;
  call.eps = 1e-6f, call.base = 1.f, call.x_dtype = dtype, call.parameter_dtype = of_modulation, call.code = code;
  check("norm", omni_norm_cuda(&call, nullptr));
}

void activate(int64_t tokens, int64_t channels, Dtype dtype, omni::Activation activation, Code code) {
  Memory memory;
  const size_t count = tokens * channels;
  const bool concat = activation == omni::Activation::kConcatGeluTanh;
  omni::Activate call{};
  call.channels = call.x_channels = call.x_stride = call.up_stride = channels;
  if (concat) call.x_channels = call.x_stride = channels / 40 * 8, call.up_stride = channels - call.x_channels;
  call.x = memory.numbers(tokens * call.x_channels, dtype);
  if (concat || activation == omni::Activation::kSiluMul) call.up = memory.numbers(tokens * call.up_stride, dtype);
  if (activation == omni::Activation::kIdentity) {
    std::vector<int32_t> index(tokens);
    for (int64_t t = 0; t < tokens; ++t) index[t] = static_cast<int32_t>(t * 7 % tokens);
    call.index = memory.filled(index);
  }
  call.out = memory.made(count * (code == Code::kNone ? size_of(dtype) : 1));
  call.out_scale = static_cast<float*>(memory.made(tokens * sizeof(float)));
  call.tokens = tokens, call.activation = activation, call.x_dtype = dtype, call.code = code;
  check("activate", omni_activate_cuda(&call, nullptr));
}

// Two streams of so many tokens whose rows take turns in the result; all but its outputs.
omni::QkNormRope joint(Memory& memory, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size,
                       omni::QkNorm norm) {
  constexpr Dtype kDtype = Dtype::kBFloat16;
  omni::QkNormRope call{};
  call.tokens = 2 * tokens, call.stream_count = 2;
  call.heads = heads, call.kv_heads = kv_heads, call.head_size = size, call.pairs = size / 2;
  for (int s = 0; s < 2; ++s) {
    omni::QkvStream& stream = call.streams[s];
    stream.q = memory.numbers(tokens * heads * size, kDtype);
    stream.k = memory.numbers(tokens * kv_heads * size, kDtype);
    stream.v = memory.numbers(tokens * kv_heads * size, kDtype);
    const int64_t across = norm == omni::QkNorm::kRmsAcross ? 1 : 0;
    stream.weight[0] = memory.numbers(size * (across ? heads : 1), kDtype);
    stream.weight[1] = memory.numbers(size * (across ? kv_heads : 1), kDtype);
    std::vector<int32_t> place(tokens);
    for (int64_t t = 0; t < tokens; ++t) place[t] = static_cast<int32_t>(2 * t + 1 - s);
    stream.place = memory.filled(place);
    stream.begin = s * tokens, stream.tokens = tokens;
    stream.q_stride = heads * size, stream.k_stride = stream.v_stride = kv_heads * size;
  }
  call.table = static_cast<const float*>(memory.numbers(call.tokens * size, Dtype::kFloat32));
  call.eps = 1e-6f, call.norm = norm, call.x_dtype = call.weight_dtype = kDtype;
  return call;
}

void rope(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, omni::QkNorm norm, bool half,
          Codes codes) {
  Memory memory;
  omni::QkNormRope call = joint(memory, tokens, heads, kv_heads, size, norm);
  call.half = half, call.codes = codes;
  for (int which = 0; which < 3; ++which) {
    const size_t rows = call.tokens * (which == 0 ? heads : kv_heads);
    call.out[which] = memory.made(rows * size * (codes == Codes::kNone ? 2 : 1));
    call.scale[which] = static_cast<float*>(memory.made(rows * sizeof(float)));
  }
  if (codes == Codes::kE4m3ByRow) {
    const auto some = static_cast<int32_t>(tokens / 2 + 1);
    call.rows = 3, call.cu = memory.filled(std::vector<int32_t>{0, some, some, static_cast<int32_t>(call.tokens)});
    const size_t scales = 3 * call.rows * kv_heads;
    call.peaks = memory.filled(std::vector<uint32_t>(scales, 0u));
    call.row_scale = memory.filled(std::vector<float>(scales, 0.f));
    check("peaks", omni_qk_row_peaks_cuda(&call, nullptr));
  }
  check("rope", omni_qk_norm_rope_cuda(&call, nullptr));
}

void compare(int64_t elements, Dtype dtype) {
  Memory memory;
  omni::CompareStore call{};
  call.rows = 3, call.dtype = dtype;
  for (int row = 0; row < 3; ++row) {
    call.elements[row] = elements + 5 * row;
    call.now[row] = memory.numbers(call.elements[row], dtype);
    call.before[row] = memory.numbers(call.elements[row], dtype);
    call.known[row] = row != 1;
    call.first_chunk[row + 1] = call.first_chunk[row] + (call.elements[row] + omni::kChunk - 1) / omni::kChunk;
  }
  call.partials = static_cast<float*>(memory.made(call.first_chunk[3] * 2 * sizeof(float)));
  call.sums = static_cast<float*>(memory.made(6 * sizeof(float)));
  check("compare_store", omni_compare_store_cuda(&call, nullptr));
}

// Three runs, the second without a part; of the others each has two low-rank parts and a vector.
void lora(int64_t in, int64_t out, int32_t rank, Code code, bool gelu) {
  Memory memory;
  omni::LoraAdd call{};
  constexpr int kRuns = 3, kParts = 3;
  const int32_t tokens[kRuns] = {33, 5, 70};
  int64_t total = 0, inner = 0;
  for (int r = 0; r < kRuns; ++r) {
    omni::LoraRun& run = call.run[r];
    run.first = total, run.inner_at = inner, run.tokens = tokens[r], run.first_part = run.end_part = r > 1 ? kParts : 0;
    total += tokens[r];
    if (r == 1) continue;
    for (int p = 0; p < kParts; ++p) {
      omni::LoraPart& part = call.part[run.end_part++];
      part.row_begin = p == 1 ? static_cast<int32_t>(out / 3) : 0, part.row_end = static_cast<int32_t>(out);
      part.rank = p < 2 ? rank + p : 0, part.first_block = run.blocks, part.scale = 0.5f;
      if (p < 2) part.down = memory.numbers(part.rank * in, Dtype::kBFloat16);
      part.up = memory.numbers((part.row_end - part.row_begin) * (p < 2 ? part.rank : 1), Dtype::kBFloat16);
      run.blocks += (part.rank + omni::kLoraBlock - 1) / omni::kLoraBlock;
    }
    inner += static_cast<int64_t>(run.tokens) * run.blocks * omni::kLoraBlock;
  }
  call.y = memory.numbers(total * out, Dtype::kBFloat16), call.y_stride = out, call.x_stride = in;
  call.x = code == Code::kNone ? memory.numbers(total * in, Dtype::kBFloat16)
                               : memory.filled(std::vector<int8_t>(total * in, 3));
  if (code != Code::kNone) call.x_scale = memory.filled(std::vector<float>(total, 0.1f));
  call.inner = memory.made(inner * sizeof(__nv_bfloat16));
  call.in = static_cast<int32_t>(in), call.out = static_cast<int32_t>(out), call.runs = kRuns;
  call.gelu_tanh = gelu, call.dtype = Dtype::kBFloat16, call.code = code;
  check("lora_add", omni_lora_add_cuda(&call, nullptr));
}

// Outputs of unlike lengths: guided and not, rescaled and not.
void step(int64_t tokens, int64_t channels, Dtype of_prediction, Dtype of_latents, omni::GuidanceNorm norm,
          float rescale) {
  Memory memory;
  omni::GuideStep call{};
  call.channels = channels, call.states = 3, call.prediction_dtype = of_prediction, call.latents_dtype = of_latents;
  for (int s = 0; s < call.states; ++s) {
    omni::StepState& state = call.state[s];
    const bool guided = s != 1;
    state.tokens = tokens + 5 * s;
    const size_t count = state.tokens * channels;
    state.cond = memory.numbers(count, of_prediction);
    if (guided) state.uncond = memory.numbers(count, of_prediction);
    if (guided) state.guided = memory.made(count * size_of(of_prediction));
    state.latents = memory.numbers(count, of_latents);
    state.next = memory.made(count * size_of(of_prediction));
    state.scale = 4.f, state.width = -0.1f, state.norm = guided ? norm : omni::GuidanceNorm::kNone;
    state.rescale = guided ? rescale : 0.f;
  }
  constexpr size_t kSums = omni::kStepPartials * omni::kStepSums;
  if (rescale != 0.f) call.partials = static_cast<double*>(memory.made(call.states * kSums * sizeof(double)));
  call.nonfinite = memory.filled(std::vector<int32_t>(call.states, 0));
  check("guide_step", omni_guide_step_cuda(&call, nullptr));
}

void image(int64_t area, Dtype dtype) {
  Memory memory;
  omni::PixelsToBytes pixels{};
  pixels.count = 2, pixels.area = pixels.plane_stride = area, pixels.stride = 3 * area, pixels.dtype = dtype;
  pixels.pixels = memory.numbers(pixels.count * pixels.stride, dtype);
  pixels.out = static_cast<uint8_t*>(memory.made(pixels.count * pixels.stride));
  pixels.nonfinite = memory.filled(std::vector<int32_t>{0});
  check("pixels_to_bytes", omni_pixels_to_bytes_cuda(&pixels, nullptr));
  omni::LatentsToBytes latents{};
  latents.channels = 16, latents.area = latents.plane_stride = area, latents.dtype = dtype;
  latents.latents = memory.numbers(latents.channels * area, dtype);
  latents.out = static_cast<uint8_t*>(memory.made(3 * area));
  check("latents_to_bytes", omni_latents_to_bytes_cuda(&latents, nullptr));
}

void heads(int64_t tokens, int64_t size, Dtype dtype) {
  Memory memory;
  omni::QuantizeHeads call{};
  call.rows = 3, call.kv_heads = 4, call.head_size = size, call.x_dtype = dtype;
  const auto some = static_cast<int32_t>(tokens / 2 + 1);
  for (int which = 0; which < 3; ++which) {
    omni::PackedHeads& part = call.parts[which];
    part.heads = which == 0 ? 2 * call.kv_heads : call.kv_heads;
    part.stride = part.heads * size, part.longest = some;
    part.x = memory.numbers(tokens * part.stride, dtype);
    part.codes = memory.made(tokens * part.stride);
    part.cu = memory.filled(std::vector<int32_t>{0, some, some, static_cast<int32_t>(tokens)});
  }
  const size_t scales = 3 * call.rows * call.kv_heads;
  call.peaks = static_cast<uint32_t*>(memory.made(scales * sizeof(uint32_t)));
  call.scales = static_cast<float*>(memory.made(scales * sizeof(float)));
  check("quantize_heads", omni_quantize_heads_cuda(&call, nullptr));
}

// Scales of a block may come out as anything: what counts is where is read and written.
void dequantize(omni::Packing packing, Dtype dtype) {
  Memory memory;
  omni::Dequantize call{};
  const omni::Block block = omni::block_of(packing);
  call.blocks = 77, call.packing = packing, call.out_dtype = dtype;
  std::vector<uint8_t> packed(call.blocks * block.size);
  for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<uint8_t>(i * 31 % 251);
  call.packed = memory.filled(packed);
  call.out = memory.made(call.blocks * block.elements * size_of(dtype));
  check("dequantize", omni_dequantize_cuda(&call, nullptr));
}

void product(const omni::GemmConfig& config, int64_t tokens, int64_t channels, int64_t inputs, bool last_ways) {
  Memory memory;
  omni::GemmQ call{};
  std::vector<uint8_t> codes(std::max(tokens, channels) * inputs);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 31 % 120);
  call.x = memory.filled(std::vector<uint8_t>(codes.begin(), codes.begin() + tokens * inputs));
  call.weight = memory.filled(std::vector<uint8_t>(codes.begin(), codes.begin() + channels * inputs));
  call.x_scale = static_cast<const float*>(memory.numbers(tokens, Dtype::kFloat32));
  call.weight_scale = static_cast<const float*>(memory.numbers(channels, Dtype::kFloat32));
  if (last_ways) call.bias = memory.numbers(channels, Dtype::kBFloat16);
  call.gelu_tanh = call.early = last_ways;
  call.raster = last_ways ? omni::GemmRaster::kAlongTokens : omni::GemmRaster::kAny;
  call.swizzle = last_ways ? 4 : 1;
  call.out = memory.made(tokens * channels * 2);
  call.tokens = tokens, call.channels = channels, call.inputs = inputs;
  check(config.name, config.launch(&call, nullptr));
}

void products(const omni::GemmConfigs& configs) {
  for (int64_t i = 0; i < configs.count; ++i) {
    for (const bool last_ways : {false, true}) {
      product(configs.first[i], 300, 264, 144, last_ways);
      product(configs.first[i], 1, 8, 16, last_ways);
      product(configs.first[i], 700, 1536, 512, last_ways);
    }
  }
}

// Makes the operands of `call` and attends, in every way to do that.
void attend(Memory& memory, omni::AttentionCode& call) {
  auto& rows = call.rows;
  auto& out = call.out;
  out.q_tiles = rows.queries / omni::kTileQueries + rows.rows, out.k_tiles = rows.keys / omni::kTileKeys + rows.rows;
  const size_t q_tiles = rows.heads * out.q_tiles, k_tiles = rows.kv_heads * out.k_tiles;
  constexpr size_t kCodes = omni::kTileKeys * omni::kHeadSize;
  out.q = static_cast<int8_t*>(memory.made(q_tiles * omni::kTileQueries * omni::kHeadSize));
  out.q_scale = static_cast<float*>(memory.made(q_tiles * omni::kTileQueries * sizeof(float)));
  out.k = static_cast<int8_t*>(memory.made(k_tiles * kCodes));
  out.k_scale = static_cast<float*>(memory.made(k_tiles * sizeof(float)));
  out.v = static_cast<uint8_t*>(memory.made(k_tiles * kCodes));
  out.v_scale = static_cast<float*>(memory.made(k_tiles * sizeof(float)));
  call.centre = static_cast<float*>(memory.made(rows.rows * rows.kv_heads * omni::kHeadSize * sizeof(float)));
  check("attention_code", omni_attention_code_cuda(&call, nullptr));
  omni::AttentionQ attention{};
  attention.rows = rows, attention.in = out, attention.scale = 0.09f;
  for (const auto plan : {omni::AttentionPlan::kTogether, omni::AttentionPlan::kTurns, omni::AttentionPlan::kApart}) {
    attention.plan = plan, attention.persistent = plan != omni::AttentionPlan::kTogether;
    attention.out = memory.made(rows.queries * rows.heads * omni::kHeadSize * 2);
    check("attention_q", omni_attention_q_cuda(&attention, nullptr));
  }
}

// The second of three rows has no tokens; queries and keys are of unlike lengths.
void attention(int64_t queries, int64_t keys, int64_t heads, int64_t kv_heads) {
  Memory memory;
  omni::AttentionCode call{};
  omni::QkvStream& stream = call.from.streams[0];
  stream.q_stride = heads * omni::kHeadSize, stream.k_stride = stream.v_stride = kv_heads * omni::kHeadSize;
  stream.q = memory.numbers(queries * stream.q_stride, Dtype::kBFloat16);
  stream.k = memory.numbers(keys * stream.k_stride, Dtype::kBFloat16);
  stream.v = memory.numbers(keys * stream.v_stride, Dtype::kBFloat16);
  call.from.stream_count = 1, call.from.norm = omni::QkNorm::kNone;
  const auto q = static_cast<int32_t>(queries / 3), k = static_cast<int32_t>(keys / 2);
  call.rows.cu_q = memory.filled(std::vector<int32_t>{0, q, q, static_cast<int32_t>(queries)});
  call.rows.cu_k = memory.filled(std::vector<int32_t>{0, k, k, static_cast<int32_t>(keys)});
  call.rows.rows = 3, call.rows.queries = queries, call.rows.keys = keys;
  call.rows.heads = heads, call.rows.kv_heads = kv_heads;
  attend(memory, call);
}

void attention_from_streams(int64_t tokens, int64_t heads, int64_t kv_heads, omni::QkNorm norm) {
  Memory memory;
  omni::AttentionCode call{};
  call.from = joint(memory, tokens, heads, kv_heads, omni::kHeadSize, norm);
  auto& rows = call.rows;
  rows.rows = 2, rows.queries = rows.keys = call.from.tokens, rows.heads = heads, rows.kv_heads = kv_heads;
  const auto all = static_cast<int32_t>(call.from.tokens);
  rows.cu_q = rows.cu_k = memory.filled(std::vector<int32_t>{0, all / 2 + 1, all});
  call.source = static_cast<int32_t*>(memory.made(all * sizeof(int32_t)));
  if (norm == omni::QkNorm::kRmsAcross) call.factor = static_cast<float*>(memory.made(2 * all * sizeof(float)));
  attend(memory, call);
}

}  // namespace

int main() {
  constexpr Dtype kHalf = Dtype::kBFloat16, kFull = Dtype::kFloat32;
  constexpr int64_t kTokens = 700;  // several for each block
  for (const Code code : {Code::kNone, Code::kFloat8, Code::kInt8}) {
    for (const bool adds : {false, true}) {
      for (const int64_t channels : {1536, 2048, 3072, 3840, 520}) {
        norm(kTokens, channels, kHalf, kHalf, adds, false, code);
      }
      for (const int64_t channels : {1536, 5120}) norm(kTokens, channels, kHalf, kFull, adds, false, code);
      norm(kTokens, 1536, kHalf, kHalf, adds, true, code);
      norm(50, 520, kFull, kFull, adds, true, code);
      norm(50, 67, kHalf, kHalf, adds, false, code);
    }
    for (const auto activation : {omni::Activation::kIdentity, omni::Activation::kGeluTanh, omni::Activation::kSiluMul,
                                  omni::Activation::kConcatGeluTanh}) {
      if (activation == omni::Activation::kIdentity && code == Code::kNone) continue;  // no op of the family
      for (const int64_t channels : {768, 1280, 3072, 12288, 520, 67}) activate(kTokens, channels, kHalf, activation, code);
    }
  }
  for (const Codes codes : {Codes::kNone, Codes::kE4m3, Codes::kInt8, Codes::kE4m3ByRow}) {
    for (const auto norm : {omni::QkNorm::kRms, omni::QkNorm::kRmsAcross, omni::QkNorm::kLayer}) {
      if (codes == Codes::kE4m3ByRow && norm == omni::QkNorm::kLayer) continue;  // bounds nothing
      rope(kTokens / 2, 8, 8, 128, norm, false, codes);
      rope(kTokens / 2, 8, 4, 128, norm, false, codes);
      rope(kTokens / 2, 5, 5, 128, norm, true, codes);
      rope(20, 8, 8, 64, norm, false, codes);
    }
  }
  for (const Code code : {Code::kNone, Code::kFloat8, Code::kInt8}) {
    for (const int32_t rank : {1, 15, 16, 40}) lora(264, 200, rank, code, rank == 15);
    lora(1, 1, 3, code, true);
    lora(100, 77, 8, code, false);
  }
  for (const Dtype dtype : {kHalf, kFull}) {
    compare(100003, dtype);
    for (const auto norm : {omni::GuidanceNorm::kNone, omni::GuidanceNorm::kRenorm,
                            omni::GuidanceNorm::kRenormClipped}) {
      for (const float rescale : {0.f, 0.7f}) {
        for (const int64_t channels : {64, 16, 7, 1}) step(501, channels, dtype, kFull, norm, rescale);
        step(501, 64, dtype, kHalf, norm, rescale);
      }
    }
    for (const int64_t area : {64 * 64, 63 * 37, 1}) image(area, dtype);
    for (const int64_t size : {128, 64, 40}) heads(kTokens, size, dtype);
    for (const auto packing : {omni::Packing::kQ4_0, omni::Packing::kQ8_0, omni::Packing::kQ4_K, omni::Packing::kQ5_K,
                               omni::Packing::kQ6_K}) {
      dequantize(packing, dtype);
    }
  }
  for (const auto& configs : {omni_gemm_int8_sm80(), omni_gemm_fp8_sm89(), omni_gemm_int8_sm90(), omni_gemm_fp8_sm90()}) {
    products(configs);
  }
  attention(300, 500, 4, 2);
  attention(1, 1, 1, 1);
  attention_from_streams(150, 4, 4, omni::QkNorm::kRms);
  attention_from_streams(150, 4, 2, omni::QkNorm::kRmsAcross);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
