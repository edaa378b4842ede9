// The launchers of the Hopper GEMM with an activation; its epilogues are in cuda_gemm.cuh.
#include <cstdint>

#include "common/count.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/rows.cuh"
#include "gelu_gemm/hopper.cuh"
#include "gelu_gemm/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = GemmShape<192, 4, 2, 7>;
// The shape for a forward that writes only the activation.
using LoneShape = GemmShape<192, 4, 1, 7>;

int64_t row_tiles(int64_t rows) { return (rows + Shape::kRows - 1) / Shape::kRows; }

template <class S, template <Activation, Kept> class E, Kept KEPT>
Status run_activated(const GemmOperands& operands, const GeluGemmParams& p, Activation activation) {
  return with_activation(activation, [&](auto tag) { return run_gemm<S, E<decltype(tag)::value, KEPT>>(operands, p); });
}

}  // namespace

Status gelu_gemm_forward(const GeluGemmForward& call) {
  const GemmOperands operands = {call.x,     call.weight, call.x_stride, call.inputs,
                                 call.dtype, call.device, call.stream,   call.dependent != 0};
  const Status status =
      check_gemm(operands, call.rows, call.columns, {call.x, call.weight, call.bias, call.h, call.derivative, call.a});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  GeluGemmParams p = {};
  p.bias = call.bias;
  p.bias_dtype = call.bias_dtype;
  p.product = static_cast<char*>(call.derivative == nullptr ? call.h : call.derivative);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  const Status mapped = make_result_map<Shape>(&p.map, call.a, call.dtype, call.rows, call.columns);
  if (mapped.code != StatusCode::ok) return mapped;
  if (call.derivative != nullptr)
    return run_activated<Shape, GeluForward, Kept::derivative>(operands, p, call.activation);
  return call.h != nullptr ? run_activated<Shape, GeluForward, Kept::product>(operands, p, call.activation)
                           : run_activated<LoneShape, GeluForward, Kept::nothing>(operands, p, call.activation);
}

Status gated_gemm(const ActivatedGemm& call) {
  const GemmOperands operands = {call.x,     call.weight, call.x_stride, call.inputs,
                                 call.dtype, call.device, call.stream,   call.dependent != 0};
  constexpr int64_t kTogether = kTileColumns / 2;  // columns of the gate in a part
  const int64_t columns = (call.columns + kTogether - 1) / kTogether * kTileColumns;
  const Status status = check_gemm(operands, call.rows, columns, {call.x, call.weight, call.bias, call.a});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  if (call.columns % kVector != 0) return bad_size("gated_gemm: columns must be a multiple of 8");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  GeluGemmParams p = {};
  p.bias = call.bias;
  p.bias_dtype = call.bias_dtype;
  p.activation = static_cast<char*>(call.a);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(columns);
  p.gate = static_cast<int>(call.columns);
  return with_activation(call.activation,
                         [&](auto tag) { return run_gemm<Shape, GatedForward<decltype(tag)::value>>(operands, p); });
}

Status gelu_gemm_backward(const GeluGemmBackward& call) {
  const GemmOperands operands = {call.dy,    call.weight, call.dy_stride, call.outputs,
                                 call.dtype, call.device, call.stream};
  Status status = check_gemm(operands, call.rows, call.columns,
                             {call.dy, call.weight, call.bias, call.h, call.derivative, call.dh, call.a});
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.rows > 0) {
    GeluGemmParams p = {};
    p.bias = call.bias;
    p.bias_dtype = call.bias_dtype;
    p.kept = static_cast<const char*>(call.derivative == nullptr ? call.h : call.derivative);
    p.product = static_cast<char*>(call.dh);
    p.activation = static_cast<char*>(call.a);
    p.sums = call.dbias == nullptr ? nullptr : call.workspace;
    p.rows = static_cast<int>(call.rows);
    p.columns = static_cast<int>(call.columns);
    if (call.derivative == nullptr)
      status = run_activated<Shape, GeluBackward, Kept::product>(operands, p, call.activation);
    else  // the kernel does not depend on the activation
      status = run_gemm<Shape, GeluBackward<Activation::gelu, Kept::derivative>>(operands, p);
  }
  if (status.code != StatusCode::ok || call.dbias == nullptr) return status;
  return sum_parts(call.workspace, {call.dbias, call.bias_dtype}, {}, static_cast<int>(row_tiles(call.rows)),
                   call.columns, call.stream);
}

int64_t gelu_gemm_workspace(int64_t rows, int64_t columns) {
  return (baseline::Count(row_tiles(rows)) * columns).value;
}

}  // namespace cuda
}  // namespace fasttfm
