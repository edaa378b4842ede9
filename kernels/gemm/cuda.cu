// The launcher of cuBLASLt GEMMs. Descriptors are prepared once for each problem (shape, types, epilogue) and cached.
// The library's heuristic takes hundreds of microseconds, and batches have any number of tokens, so that it is asked
// only for rounded sizes (rounded_up), and problems whose sizes round to the same ones use the same algorithm.
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "common/cuda/launch.cuh"
#include "gemm/cublaslt.h"
#include "gemm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using cublaslt::Descriptor;

// The problem: all parameters on which the descriptors and the choice of an algorithm depend.
struct Kind {
  int64_t rows, columns, inner;
  int32_t device;
  DType dtype, out_dtype;
  int8_t transposed_a, transposed_b, has_bias, adds;
  int8_t a_fp8, b_fp8, fast_accumulation, unused[5];

  bool operator==(const Kind& other) const { return std::memcmp(this, &other, sizeof(Kind)) == 0; }
};
static_assert(sizeof(Kind) == 48, "no padding: kinds are compared and hashed as bytes");

struct KindHash {
  size_t operator()(const Kind& kind) const {
    uint64_t words[sizeof(Kind) / 8], hash = 0;
    std::memcpy(words, &kind, sizeof(kind));
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Choice {
  cublaslt::Algorithm algorithm;
  size_t workspace_bytes;
};

struct Prepared {
  Descriptor product, a, b, d;
  Choice choice;
};

constexpr size_t kMaxPrepared = 4096;  // bounds the caches, because token counts may take any value
constexpr int kMaxDevices = 64;

Status of_library(const cublaslt::Library& library, int status) {
  if (status == cublaslt::kSuccess) return {};
  return {StatusCode::cuda_error, library.status_text(status)};
}

int type_code(DType dtype) {
  return dtype == DType::f32 ? cublaslt::kReal32F : dtype == DType::bf16 ? cublaslt::kReal16BF : cublaslt::kReal16F;
}

int operand_code(DType dtype, int8_t fp8) {
  if (fp8 == static_cast<int8_t>(Fp8Format::none)) return type_code(dtype);
  return fp8 == static_cast<int8_t>(Fp8Format::e4m3) ? cublaslt::kReal8FE4M3 : cublaslt::kReal8FE5M2;
}

// The handle of a device, which is current. There is one per device, and it is never destroyed.
Status handle_of(const cublaslt::Library& library, int device, cublaslt::Handle* handle) {
  static std::mutex mutex;
  static cublaslt::Handle handles[kMaxDevices] = {};
  if (device < 0 || device >= kMaxDevices) return {StatusCode::bad_value, "gemm: device: expected 0 to 63"};
  const std::lock_guard<std::mutex> lock(mutex);
  Status status;
  if (handles[device] == nullptr) status = of_library(library, library.create(&handles[device]));
  *handle = handles[device];
  return status;
}

// The library's matrices are column-major, so it computes d^T [N, M] = b^T a^T, and its first operand is b.
int describe(const cublaslt::Library& library, const Kind& kind, Prepared* prepared) {
  const int transposed = cublaslt::kTransposed;
  const int8_t fast = kind.fast_accumulation;
  const auto rows = static_cast<uint64_t>(kind.rows), columns = static_cast<uint64_t>(kind.columns),
             inner = static_cast<uint64_t>(kind.inner);
  const auto layout = [&](Descriptor* to, int code, bool across, uint64_t of_rows, uint64_t of_columns) {
    if (across) std::swap(of_rows, of_columns);
    return library.layout_init(to, sizeof(Descriptor), code, of_rows, of_columns, static_cast<int64_t>(of_rows));
  };
  int status = layout(&prepared->b, operand_code(kind.dtype, kind.b_fp8), kind.transposed_b, columns, inner);
  if (status == 0) status = layout(&prepared->a, operand_code(kind.dtype, kind.a_fp8), kind.transposed_a, inner, rows);
  if (status == 0) status = layout(&prepared->d, type_code(kind.out_dtype), false, columns, rows);
  if (status == 0)
    status = library.product_init(&prepared->product, sizeof(Descriptor), cublaslt::kCompute32F, cublaslt::kReal32F);
  const auto set = [&](int attribute, const void* value, size_t size) {
    if (status == 0) status = library.product_set(&prepared->product, attribute, value, size);
  };
  if (kind.transposed_b) set(cublaslt::kTransposeA, &transposed, sizeof(transposed));
  if (kind.transposed_a) set(cublaslt::kTransposeB, &transposed, sizeof(transposed));
  if (fast) set(cublaslt::kFastAccumulation, &fast, sizeof(fast));
  if (kind.has_bias) set(cublaslt::kEpilogue, &cublaslt::kEpilogueBias, sizeof(cublaslt::kEpilogueBias));
  return status;
}

// The next multiple of a sixteenth of the power of two below, and of 16: up to 1/16 more. Of the usual widths of models
// it is the width itself.
int64_t rounded_up(int64_t size) {
  int64_t step = 16;
  while (step * 32 <= size) step *= 2;
  return (size + step - 1) / step * step;
}

// Asks the library's heuristic for the algorithm of a problem that `prepared` describes.
Status choose(const cublaslt::Library& library, cublaslt::Handle handle, Prepared* prepared) {
  Descriptor preference;
  const uint64_t bytes = kGemmWorkspace;
  const uint32_t alignment = 16;
  int status = library.preference_init(&preference, sizeof(preference));
  const auto set = [&](int attribute, const auto& value) {
    if (status == 0) status = library.preference_set(&preference, attribute, &value, sizeof(value));
  };
  set(cublaslt::kMaxWorkspace, bytes);
  set(cublaslt::kReductionMask, cublaslt::kReduceInComputeType);
  for (int attribute : {cublaslt::kAlignmentA, cublaslt::kAlignmentB, cublaslt::kAlignmentC, cublaslt::kAlignmentD})
    set(attribute, alignment);
  cublaslt::HeuristicResult result{};
  int returned = 0;
  if (status == 0)
    status = library.heuristic(handle, &prepared->product, &prepared->b, &prepared->a, &prepared->d, &prepared->d,
                               &preference, 1, &result, &returned);
  if (status != 0) return of_library(library, status);
  if (returned == 0 || result.state != 0) return bad_size("gemm: cuBLASLt has no algorithm for these sizes");
  prepared->choice = {result.algorithm, result.workspace_bytes};
  return {};
}

// Sets the parameters that differ between calls of the same problem.
int set_pointers(const cublaslt::Library& library, const Gemm& call, Prepared* prepared) {
  int status = 0;
  const auto set = [&](int attribute, const auto& pointer) {
    if (status == 0 && pointer != nullptr)
      status = library.product_set(&prepared->product, attribute, &pointer, sizeof(pointer));
  };
  set(cublaslt::kBiasPointer, call.bias);
  set(cublaslt::kScalePointerA, call.b_scale);  // the library's first operand is b
  set(cublaslt::kScalePointerB, call.a_scale);
  return status;
}

// Describes a problem and sets the parameters of a call, whose alignment the heuristic reads.
int prepare(const cublaslt::Library& library, const Kind& kind, const Gemm& call, Prepared* prepared) {
  const int status = describe(library, kind, prepared);
  return status == 0 ? set_pointers(library, call, prepared) : status;
}

class Cache {
 public:
  explicit Cache(const cublaslt::Library& library) : library_(library) {}

  // `exact`: with the algorithm of the heuristic for the problem's own sizes.
  Status get(cublaslt::Handle handle, const Kind& kind, const Gemm& call, bool exact, Prepared* prepared) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = prepared_.find(kind);
    if (known != prepared_.end() && !exact) {
      *prepared = known->second;
      return {};
    }
    if (const int code = prepare(library_, kind, call, prepared); code != 0) return of_library(library_, code);
    Status status;
    if (exact)
      status = choose(library_, handle, prepared);
    else
      status = choose_for_rounded(handle, kind, call, &prepared->choice);
    if (status.code != StatusCode::ok) return status;
    if (prepared_.size() >= kMaxPrepared) prepared_.clear();
    prepared_.insert_or_assign(kind, *prepared);
    return {};
  }

 private:
  Status choose_for_rounded(cublaslt::Handle handle, Kind kind, const Gemm& call, Choice* choice) {
    kind.rows = rounded_up(kind.rows);
    kind.inner = rounded_up(kind.inner);
    const auto known = choices_.find(kind);
    if (known != choices_.end()) {
      *choice = known->second;
      return {};
    }
    Prepared rounded;
    if (const int code = prepare(library_, kind, call, &rounded); code != 0) return of_library(library_, code);
    const Status status = choose(library_, handle, &rounded);
    if (status.code != StatusCode::ok) return status;
    if (choices_.size() >= kMaxPrepared) choices_.clear();
    choices_.emplace(kind, rounded.choice);
    *choice = rounded.choice;
    return {};
  }

  const cublaslt::Library& library_;
  std::mutex mutex_;
  std::unordered_map<Kind, Prepared, KindHash> prepared_;
  std::unordered_map<Kind, Choice, KindHash> choices_;  // of rounded sizes
};

Status check(const Gemm& call) {
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) return unknown_dtype();
  if (call.out_dtype != call.dtype && call.out_dtype != DType::f32)
    return {StatusCode::bad_value, "gemm: out_dtype is dtype or fp32"};
  for (int64_t size : {call.rows, call.columns, call.inner})
    if (size < 1 || size > 0x7fffffff) return bad_size("gemm: sizes are 1 to 2^31 - 1");
  const int64_t a_row = call.transposed_a ? call.rows : call.inner,
                b_row = call.transposed_b ? call.inner : call.columns;
  const bool fp8 = call.a_fp8 != Fp8Format::none;
  if (fp8 != (call.b_fp8 != Fp8Format::none) || (fp8 && (call.transposed_a || !call.transposed_b)))
    return {StatusCode::bad_value, "gemm: FP8: both operands or none, a [M, K] and b [N, K]"};
  const int64_t vector = fp8 ? 16 : 8;
  if (a_row % vector != 0 || b_row % vector != 0 || call.columns % 8 != 0)
    return bad_size("gemm: rows start at 16 bytes");
  for (const void* tensor : {call.a, call.b, call.bias, call.c, static_cast<const void*>(call.d)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "gemm: tensors start at multiples of 16 bytes"};
  return {};
}

}  // namespace

Status gemm(const Gemm& call) {
  Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const cublaslt::Library* library = cublaslt::library();
  if (library == nullptr) return {StatusCode::cuda_error, "gemm: the process has loaded no libcublasLt"};
  static Cache cache(*library);
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  cublaslt::Handle handle = nullptr;
  status = handle_of(*library, call.device, &handle);
  if (status.code != StatusCode::ok) return status;
  Kind kind;
  std::memset(&kind, 0, sizeof(kind));
  kind.rows = call.rows;
  kind.columns = call.columns;
  kind.inner = call.inner;
  kind.device = call.device;
  kind.dtype = call.dtype;
  kind.out_dtype = call.out_dtype;
  kind.transposed_a = call.transposed_a != 0;
  kind.transposed_b = call.transposed_b != 0;
  kind.has_bias = call.bias != nullptr;
  kind.adds = call.c != nullptr;
  kind.a_fp8 = static_cast<int8_t>(call.a_fp8);
  kind.b_fp8 = static_cast<int8_t>(call.b_fp8);
  kind.fast_accumulation = call.fast_accumulation != 0;
  const float one = 1.0f, beta = kind.adds ? 1.0f : 0.0f;
  const void* c = kind.adds ? call.c : call.d;
  // An algorithm that does not support the exact sizes is replaced by the heuristic's choice for them.
  for (bool exact : {false, true}) {
    Prepared prepared;  // a copy for this call, because pointers are written into it
    status = cache.get(handle, kind, call, exact, &prepared);
    if (status.code != StatusCode::ok) return status;
    if (const int code = set_pointers(*library, call, &prepared); code != 0) return of_library(*library, code);
    const int code = library->matmul(handle, &prepared.product, &one, call.b, &prepared.b, call.a, &prepared.a, &beta,
                                     c, &prepared.d, call.d, &prepared.d, &prepared.choice.algorithm, call.workspace,
                                     prepared.choice.workspace_bytes, call.stream);
    status = of_library(*library, code);
    if (code != cublaslt::kInvalidValue && code != cublaslt::kNotSupported) break;
  }
  return status;
}

int64_t gemm_library_version() {
  const cublaslt::Library* library = cublaslt::library();
  return library == nullptr ? 0 : static_cast<int64_t>(library->version());
}

}  // namespace cuda
}  // namespace fasttfm
