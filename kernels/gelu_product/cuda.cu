// The launchers of the Hopper GEMM with an activation; the kernel is in cuda_product.cuh.
#include <cstdint>
#include <initializer_list>

#include "common/count.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/rows.cuh"
#include "gelu_product/cuda_product.cuh"
#include "gelu_product/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = ProductShape<192, 4, 2, 7>;

int64_t row_tiles(int64_t rows) { return (rows + Shape::kRows - 1) / Shape::kRows; }

Status check_product(const ProductOperands& operands, int64_t rows, int64_t columns,
                     std::initializer_list<const void*> tensors) {
  if (operands.dtype != DType::bf16 && operands.dtype != DType::f16) return unknown_dtype();
  if (rows < 0 || rows > 0x7fffffff / 2 || operands.inner < kVector || operands.inner % kVector != 0 ||
      operands.inner > 0x7fffffff / 2 || columns < kVector || columns % kVector != 0 || columns > 0x7fffffff / 4)
    return bad_size("gelu_product: inputs and columns must be multiples of 8, and sizes must fit 32-bit indices");
  if (operands.a_stride % kVector != 0) return misaligned_rows();
  for (const void* tensor : tensors)
    if (!rows_aligned(tensor, 0)) return misaligned_rows();
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, operands.device);
  if (error != cudaSuccess) return status_of(error);
  if (major != 9) return {StatusCode::bad_value, "gelu_product: these kernels require compute capability 9.0"};
  return {};
}

template <bool BACKWARD, Kept KEPT, Activation A>
Status run_with(const ProductOperands& operands, const ProductParams& p) {
  int multiprocessors = 0;
  const Status status = count_multiprocessors(operands.device, &multiprocessors);
  if (status.code != StatusCode::ok) return status;
  return operands.dtype == DType::bf16 ? launch_product<bf16_t, Shape, A, BACKWARD, KEPT>(operands, p, multiprocessors)
                                       : launch_product<f16_t, Shape, A, BACKWARD, KEPT>(operands, p, multiprocessors);
}

template <bool BACKWARD, Kept KEPT>
Status run_product(const ProductOperands& operands, const ProductParams& p, Activation activation) {
  return with_activation(activation,
                         [&](auto tag) { return run_with<BACKWARD, KEPT, decltype(tag)::value>(operands, p); });
}

}  // namespace

Status gelu_product_forward(const GeluProductForward& call) {
  const ProductOperands operands = {call.x,     call.weight, call.x_stride, call.inputs,
                                    call.dtype, call.device, call.stream};
  const Status status = check_product(operands, call.rows, call.columns,
                                      {call.x, call.weight, call.bias, call.h, call.derivative, call.a});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  ProductParams p = {};
  p.bias = call.bias;
  p.bias_dtype = call.bias_dtype;
  p.product = static_cast<char*>(call.derivative == nullptr ? call.h : call.derivative);
  p.activation = static_cast<char*>(call.a);
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  return call.derivative == nullptr ? run_product<false, Kept::product>(operands, p, call.activation)
                                    : run_product<false, Kept::derivative>(operands, p, call.activation);
}

Status gelu_product_backward(const GeluProductBackward& call) {
  const ProductOperands operands = {call.dy,    call.weight, call.dy_stride, call.outputs,
                                    call.dtype, call.device, call.stream};
  Status status = check_product(operands, call.rows, call.columns,
                                {call.dy, call.weight, call.bias, call.h, call.derivative, call.dh, call.a});
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.rows > 0) {
    ProductParams p = {};
    p.bias = call.bias;
    p.bias_dtype = call.bias_dtype;
    p.kept = static_cast<const char*>(call.derivative == nullptr ? call.h : call.derivative);
    p.product = static_cast<char*>(call.dh);
    p.activation = static_cast<char*>(call.a);
    p.sums = call.dbias == nullptr ? nullptr : call.workspace;
    p.rows = static_cast<int>(call.rows);
    p.columns = static_cast<int>(call.columns);
    if (call.derivative == nullptr)
      status = run_product<true, Kept::product>(operands, p, call.activation);
    else  // the kernel does not depend on the activation
      status = run_with<true, Kept::derivative, Activation::gelu>(operands, p);
  }
  if (status.code != StatusCode::ok || call.dbias == nullptr) return status;
  return sum_parts(call.workspace, {call.dbias, call.bias_dtype}, {}, static_cast<int>(row_tiles(call.rows)),
                   call.columns, call.stream);
}

int64_t gelu_product_workspace(int64_t rows, int64_t columns) {
  return (baseline::Count(row_tiles(rows)) * columns).value;
}

}  // namespace cuda
}  // namespace fasttfm
