// Binds the rope family.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../common/attention_q.h"
#include "../common/dtype.h"
#include "../common/rope.h"
#include "bind.h"
#include "tiles.h"

namespace {

using omni::Codes;
using omni::dtype_of;
using omni::QkNorm;
using omni::QkNormRope;
using omni::QkvStream;
using omni::ScalarType;
using omni::Tensor;
using omni::with_dense_rows;
using Tensors = std::vector<Tensor>;

constexpr const char* kOp = "qk_norm_rope";

// The inputs of a call, with whatever the kernels need in the layout that they need it in. It must outlive the call.
struct Operands {
  Tensors q, k, v, weights, biases, place;
  std::optional<Tensor> table;
};

// --- checks ----------------------------------------------------------------------------------------------------------

QkNorm norm_of(const std::string& norm) {
  if (norm == "none") return QkNorm::kNone;
  if (norm == "rms") return QkNorm::kRms;
  if (norm == "rms_across") return QkNorm::kRmsAcross;
  STD_TORCH_CHECK(norm == "layer", "qk_norm_rope: norm must be one of none, rms, rms_across, layer, got ", norm);
  return QkNorm::kLayer;
}

void check_heads(const Operands& in) {
  for (const Tensors* part : {&in.q, &in.k, &in.v}) {
    for (const Tensor& x : *part) {
      STD_TORCH_CHECK(x.dim() == 3, "qk_norm_rope: q, k and v must be [T, H, D], got ", x.dim(), " dimensions");
    }
  }
  const int64_t heads = in.q[0].size(1), size = in.q[0].size(2), kv_heads = in.k[0].size(1);
  STD_TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "qk_norm_rope: ", heads,
                  " query heads are not a multiple of ", kv_heads, " key heads");
  for (size_t s = 0; s < in.q.size(); ++s) {
    const Tensor& q = in.q[s];
    STD_TORCH_CHECK(q.size(1) == heads && q.size(2) == size, "qk_norm_rope: q is [T, ", heads, ", ", size, "] and [",
                    q.size(0), ", ", q.size(1), ", ", q.size(2), "]; all streams must have the same heads");
    for (const Tensors* part : {&in.k, &in.v}) {
      if (part->empty()) continue;
      const Tensor& y = (*part)[s];
      STD_TORCH_CHECK(y.size(0) == q.size(0) && y.size(1) == kv_heads && y.size(2) == size, "qk_norm_rope: ",
                      part == &in.k ? "k" : "v", " must be (", q.size(0), ", ", kv_heads, ", ", size, "), got (",
                      y.size(0), ", ", y.size(1), ", ", y.size(2), ")");
    }
  }
  for (const Tensors* part : {&in.q, &in.k, &in.v}) {
    for (const Tensor& x : *part) {
      STD_TORCH_CHECK(x.scalar_type() == in.q[0].scalar_type(), "qk_norm_rope: q, k and v must have the same dtype");
    }
  }
}

void check_affine(const Operands& in, const char* name, const Tensors& parts, QkNorm norm) {
  if (parts.empty()) return;
  STD_TORCH_CHECK(norm != QkNorm::kNone, "qk_norm_rope: ", name, " are given without a norm");
  STD_TORCH_CHECK(parts.size() == 2 * in.q.size(), "qk_norm_rope: ", name,
                  " must be one for q and one for k of each of ", in.q.size(), " streams, got ", parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& x = i % 2 == 0 ? in.q[0] : in.k[0];
    const int64_t channels = x.size(2) * (norm == QkNorm::kRmsAcross ? x.size(1) : 1);
    STD_TORCH_CHECK(parts[i].dim() == 1 && parts[i].size(0) == channels, "qk_norm_rope: ", name, " must have ",
                    channels, " channels, got ", parts[i].dim() == 1 ? parts[i].size(0) : -1);
    STD_TORCH_CHECK(parts[i].scalar_type() == parts[0].scalar_type(), "qk_norm_rope: ", name,
                    " must have the same dtype");
  }
}

void check(const Operands& in, QkNorm norm, const std::string& pairs) {
  STD_TORCH_CHECK(pairs == "interleaved" || pairs == "half",
                  "qk_norm_rope: pairs must be one of interleaved, half, got ", pairs);
  const size_t count = in.q.size();
  STD_TORCH_CHECK(1 <= count && count <= omni::kMostStreams && in.k.size() == count &&
                      (in.v.empty() || in.v.size() == count),
                  "qk_norm_rope: q, k and v must be 1 to ", omni::kMostStreams, " streams, got ", count, ", ",
                  in.k.size(), " and ", in.v.size());
  STD_TORCH_CHECK(in.place.size() == count || (count == 1 && in.place.empty()), "qk_norm_rope: place has ",
                  in.place.size(), " entries for ", count, " streams");
  check_heads(in);
  check_affine(in, "weights", in.weights, norm);
  check_affine(in, "biases", in.biases, norm);
  STD_TORCH_CHECK(in.weights.empty() || in.biases.empty() ||
                      in.weights[0].scalar_type() == in.biases[0].scalar_type(),
                  "qk_norm_rope: weights and biases must have the same dtype");
  int64_t tokens = 0;
  for (const Tensor& x : in.q) tokens += x.size(0);
  if (in.table) {
    STD_TORCH_CHECK(in.table->dim() == 3 && in.table->size(2) == 2 && in.table->scalar_type() == ScalarType::Float,
                    "qk_norm_rope: table must be float32 [T, R, 2], got ", in.table->dim(),
                    " dimensions or another dtype");
    STD_TORCH_CHECK(in.table->size(0) == tokens, "qk_norm_rope: table has ", in.table->size(0), " rows for ", tokens,
                    " tokens");
    STD_TORCH_CHECK(2 * in.table->size(1) <= in.q[0].size(2), "qk_norm_rope: table has ", in.table->size(1),
                    " pairs, heads have ", in.q[0].size(2), " channels");
  }
  for (size_t s = 0; s < in.place.size(); ++s) {
    const Tensor& place = in.place[s];
    STD_TORCH_CHECK(place.scalar_type() == ScalarType::Int && place.dim() == 1 && place.size(0) == in.q[s].size(0),
                    "qk_norm_rope: place must be int32 [T_s], got ", place.dim(),
                    " dimensions, another dtype or another size");
  }
  bool together = !in.table || in.table->device() == in.q[0].device();
  for (const Tensors* part : {&in.q, &in.k, &in.v, &in.weights, &in.biases, &in.place}) {
    for (const Tensor& x : *part) together = together && x.device() == in.q[0].device();
  }
  STD_TORCH_CHECK(together, "qk_norm_rope: all tensors must be on one device");
}

// --- the call --------------------------------------------------------------------------------------------------------

// Tokens may be anywhere, what is of one token must lie side by side.
Tensor with_dense_heads(const Tensor& x) {
  const bool channels = x.stride(2) == 1 || x.size(2) == 1, heads = x.stride(1) == x.size(2) || x.size(1) == 1;
  return channels && heads ? x : omni::contiguous(x);
}

void make_dense(Operands& in) {
  for (Tensors* part : {&in.q, &in.k, &in.v}) {
    for (Tensor& x : *part) x = with_dense_heads(x);
  }
  for (Tensors* part : {&in.weights, &in.biases, &in.place}) {
    for (Tensor& x : *part) x = with_dense_rows(x);
  }
  if (in.table) in.table = omni::contiguous(*in.table);
}

QkNormRope call_of(const Operands& in, QkNorm norm, const std::string& pairs, double eps) {
  QkNormRope call{};
  for (size_t s = 0; s < in.q.size(); ++s) {
    QkvStream& stream = call.streams[s];
    stream.q = in.q[s].const_data_ptr();
    stream.k = in.k[s].const_data_ptr();
    stream.v = in.v.empty() ? nullptr : in.v[s].const_data_ptr();
    for (int which = 0; which < 2; ++which) {
      stream.weight[which] = in.weights.empty() ? nullptr : in.weights[2 * s + which].const_data_ptr();
      stream.bias[which] = in.biases.empty() ? nullptr : in.biases[2 * s + which].const_data_ptr();
    }
    stream.place = in.place.empty() ? nullptr : static_cast<const int32_t*>(in.place[s].const_data_ptr());
    stream.begin = call.tokens;
    stream.tokens = in.q[s].size(0);
    stream.q_stride = in.q[s].stride(0);
    stream.k_stride = in.k[s].stride(0);
    stream.v_stride = in.v.empty() ? 0 : in.v[s].stride(0);
    call.tokens += stream.tokens;
  }
  call.stream_count = static_cast<int64_t>(in.q.size());
  call.heads = in.q[0].size(1);
  call.kv_heads = in.k[0].size(1);
  call.head_size = in.q[0].size(2);
  call.table = in.table ? static_cast<const float*>(in.table->const_data_ptr()) : nullptr;
  call.pairs = in.table ? in.table->size(1) : 0;
  call.eps = static_cast<float>(eps);
  call.norm = norm;
  call.half = pairs == "half";
  call.x_dtype = dtype_of(in.q[0], kOp, "q");
  const Tensors& affine = in.weights.empty() ? in.biases : in.weights;
  call.weight_dtype = affine.empty() ? omni::Dtype::kFloat32 : dtype_of(affine[0], kOp, "weights");
  return call;
}

using Run = void (*)(const QkNormRope&, const Operands&);

template <Run run>
Tensors qk_norm_rope(const Tensors& q, const Tensors& k, const Tensors& v, const Tensors& weights,
                     const Tensors& biases, const std::optional<Tensor>& table, const Tensors& place,
                     const std::string& norm, const std::string& pairs, double eps) {
  Operands in{q, k, v, weights, biases, place, table};
  const QkNorm kind = norm_of(norm);
  check(in, kind, pairs);
  make_dense(in);
  QkNormRope call = call_of(in, kind, pairs, eps);
  Tensors out;
  for (const int64_t heads : {call.heads, call.kv_heads, call.kv_heads}) {
    if (out.size() == 2 && in.v.empty()) break;
    out.push_back(omni::new_empty(in.q[0], {call.tokens, heads, call.head_size}));
    call.out[out.size() - 1] = out.back().mutable_data_ptr();
  }
  if (call.tokens > 0 && call.head_size > 0) run(call, in);
  return out;
}

void run_cpu(const QkNormRope& call, const Operands& in) {
  for (int64_t s = 0; s < call.stream_count; ++s) {
    const QkvStream& stream = call.streams[s];
    const auto wrong = omni::outside(stream.place, stream.tokens, call.tokens);
    STD_TORCH_CHECK(!wrong, "qk_norm_rope: place holds ", wrong.value_or(0), ", there are ", call.tokens, " tokens");
  }
  const int64_t channels = (call.heads + 2 * call.kv_heads) * call.head_size;
  const int64_t grain = std::max<int64_t>(1, omni::kParallelElements / channels);
  torch::stable::parallel_for(0, call.tokens, grain,
                              [&](int64_t begin, int64_t end) { omni_qk_norm_rope_cpu(&call, begin, end); });
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_cuda(const QkNormRope& call, const Operands& in) { omni::launch(kOp, &omni_qk_norm_rope_cuda, call, in.q[0]); }

Tensors qk_norm_rope_quantize(const Tensors& q, const Tensors& k, const Tensors& v, const Tensors& weights,
                              const Tensors& biases, const std::optional<Tensor>& table, const Tensors& place,
                              const std::string& norm, const std::string& pairs, double eps, ScalarType codes) {
  STD_TORCH_CHECK(codes == ScalarType::Float8_e4m3fn || codes == ScalarType::Char,
                  "qk_norm_rope: codes must be float8_e4m3fn or int8");
  STD_TORCH_CHECK(!v.empty(), "qk_norm_rope: quantization needs q, k and v, and v is missing");
  Operands in{q, k, v, weights, biases, place, table};
  const QkNorm kind = norm_of(norm);
  check(in, kind, pairs);
  make_dense(in);
  QkNormRope call = call_of(in, kind, pairs, eps);
  call.codes = codes == ScalarType::Char ? Codes::kInt8 : Codes::kE4m3;
  Tensors out, scales;
  for (const int64_t heads : {call.heads, call.kv_heads, call.kv_heads}) {
    out.push_back(omni::new_empty(in.q[0], {call.tokens, heads, call.head_size}, codes));
    scales.push_back(omni::new_empty(in.q[0], {call.tokens, heads}, ScalarType::Float));
    call.out[out.size() - 1] = out.back().mutable_data_ptr();
    call.scale[out.size() - 1] = static_cast<float*>(scales.back().mutable_data_ptr());
  }
  if (call.tokens > 0 && call.head_size > 0) run_cuda(call, in);
  out.insert(out.end(), scales.begin(), scales.end());
  return out;
}

Tensors qk_norm_rope_quantize_heads(const Tensors& q, const Tensors& k, const Tensors& v, const Tensors& weights,
                                const std::optional<Tensor>& table, const Tensors& place, const Tensor& cu,
                                const std::string& norm, const std::string& pairs, double eps) {
  STD_TORCH_CHECK(!v.empty(), "qk_norm_rope: quantization needs q, k and v, and v is missing");
  Operands in{q, k, v, weights, {}, place, table};
  const QkNorm kind = norm_of(norm);
  STD_TORCH_CHECK(kind == QkNorm::kRms || kind == QkNorm::kRmsAcross,
                  "qk_norm_rope: quantized heads need a norm of rms or rms_across, got ", norm);
  check(in, kind, pairs);
  STD_TORCH_CHECK(cu.scalar_type() == ScalarType::Int && cu.dim() == 1 && cu.size(0) > 0 &&
                      cu.device() == in.q[0].device(),
                  "qk_norm_rope: cu must be int32 [R + 1], on the device of q");
  make_dense(in);
  const Tensor offsets = omni::contiguous(cu);
  QkNormRope call = call_of(in, kind, pairs, eps);
  call.codes = Codes::kE4m3ByRow;
  call.rows = offsets.size(0) - 1;
  call.cu = static_cast<const int32_t*>(offsets.const_data_ptr());
  Tensors out;
  for (const int64_t heads : {call.heads, call.kv_heads, call.kv_heads}) {
    out.push_back(
        omni::new_empty(in.q[0], {call.tokens, heads, call.head_size}, ScalarType::Float8_e4m3fn));
    call.out[out.size() - 1] = out.back().mutable_data_ptr();
  }
  // the peaks beside the scales, for one pass that clears both
  Tensor both = omni::new_zeros(in.q[0], {2, 3, call.rows, call.kv_heads}, ScalarType::Float);
  call.row_scale = static_cast<float*>(both.mutable_data_ptr());
  call.peaks = reinterpret_cast<uint32_t*>(call.row_scale + 3 * call.rows * call.kv_heads);
  if (call.tokens > 0 && call.head_size > 0 && call.rows > 0) {
    omni::launch(kOp, &omni_qk_row_peaks_cuda, call, in.q[0]);
    run_cuda(call, in);
  }
  out.push_back(torch::stable::select(both, 0, 0));
  return out;
}

Tensors qk_norm_rope_quantize_tiles(const Tensors& q, const Tensors& k, const Tensors& v, const Tensors& weights,
                                const std::optional<Tensor>& table, const Tensors& place, const Tensor& cu,
                                const std::string& norm, double eps) {
  STD_TORCH_CHECK(!v.empty(), "qk_norm_rope: quantization needs q, k and v, and v is missing");
  Operands in{q, k, v, weights, {}, place, table};
  const QkNorm kind = norm_of(norm);
  check(in, kind, "interleaved");
  STD_TORCH_CHECK(in.q[0].size(2) == omni::kHeadSize, "qk_norm_rope: quantized tiles need heads of ",
                  omni::kHeadSize, " channels, got ", in.q[0].size(2));
  make_dense(in);
  for (Tensors* part : {&in.q, &in.k, &in.v}) {
    for (Tensor& x : *part) {
      STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "qk_norm_rope: quantized tiles are made from bfloat16");
      const bool aligned = x.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
      if (!aligned) x = omni::clone(x);
    }
  }
  for (Tensor& weight : in.weights) {
    if (reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 16 != 0) weight = omni::clone(weight);
  }
  omni::AttentionCode call{};
  call.from = call_of(in, kind, "interleaved", eps);
  call.rows.queries = call.rows.keys = call.from.tokens;
  call.rows.heads = call.from.heads;
  call.rows.kv_heads = call.from.kv_heads;
  return omni::code_tiles(kOp, call, in.q[0], cu, cu);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope<run_cpu>)); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) {
  m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope<run_cuda>));
  m.impl("qk_norm_rope_quantize", TORCH_BOX(&qk_norm_rope_quantize));
  m.impl("qk_norm_rope_quantize_heads", TORCH_BOX(&qk_norm_rope_quantize_heads));
  m.impl("qk_norm_rope_quantize_tiles", TORCH_BOX(&qk_norm_rope_quantize_tiles));
}
#endif
