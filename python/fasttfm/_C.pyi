"""The native core. Launchers take every field by keyword: addresses and dtype codes are integers (see _native.py)."""

from typing import TypedDict

from typing_extensions import Unpack

version: str
compiler: str
cuda_version: int  # 13000 for toolkit 13.0; 0 when built without CUDA: then there are no launchers named _cuda
cuda_archs: str

def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def share_openmp(library_path: str) -> tuple[str, str]: ...
def parallel_runtime() -> str: ...
def use_plain_threads() -> None: ...

class _Elementwise(TypedDict):
    x: int
    y: int
    count: int
    x_dtype: int
    y_dtype: int
    function: int
    threads: int

def elementwise_cpu(**fields: Unpack[_Elementwise]) -> None: ...

# ---- layer_norm ------------------------------------------------------------------------------------------------------

class _LayerNormForward(TypedDict):
    x: int
    weight: int
    bias: int
    y: int
    mean: int
    rstd: int
    rows: int
    columns: int
    x_stride: int
    eps: float
    dtype: int

class _LayerNormForwardCpu(_LayerNormForward):
    threads: int

class _LayerNormForwardCuda(_LayerNormForward):
    parameter_dtype: int
    device: int
    stream: int

class _LayerNormBackward(TypedDict):
    dy: int
    x: int
    weight: int
    mean: int
    rstd: int
    dx: int
    dweight: int
    dbias: int
    workspace: int
    rows: int
    columns: int
    x_stride: int
    dtype: int

class _LayerNormBackwardCpu(_LayerNormBackward):
    threads: int

class _LayerNormBackwardCuda(_LayerNormBackward):
    weight_dtype: int
    bias_dtype: int
    blocks: int
    device: int
    stream: int

def layer_norm_workspace(rows: int, columns: int) -> int: ...
def layer_norm_forward_cpu(**fields: Unpack[_LayerNormForwardCpu]) -> None: ...
def layer_norm_forward_cuda(**fields: Unpack[_LayerNormForwardCuda]) -> None: ...
def layer_norm_backward_cpu(**fields: Unpack[_LayerNormBackwardCpu]) -> None: ...
def layer_norm_backward_cuda(**fields: Unpack[_LayerNormBackwardCuda]) -> None: ...

# ---- bias_gelu -------------------------------------------------------------------------------------------------------

class _BiasGeluForward(TypedDict):
    x: int
    bias: int
    y: int
    rows: int
    columns: int
    x_stride: int
    activation: int
    dtype: int

class _BiasGeluForwardCpu(_BiasGeluForward):
    threads: int

class _BiasGeluForwardCuda(_BiasGeluForward):
    bias_dtype: int
    device: int
    stream: int

class _BiasGeluBackward(TypedDict):
    dy: int
    x: int
    bias: int
    dx: int
    dbias: int
    workspace: int
    rows: int
    columns: int
    x_stride: int
    activation: int
    dtype: int

class _BiasGeluBackwardCpu(_BiasGeluBackward):
    threads: int

class _BiasGeluBackwardCuda(_BiasGeluBackward):
    bias_dtype: int
    parts: int
    device: int
    stream: int

def bias_gelu_workspace(rows: int, columns: int) -> int: ...
def bias_gelu_forward_cpu(**fields: Unpack[_BiasGeluForwardCpu]) -> None: ...
def bias_gelu_forward_cuda(**fields: Unpack[_BiasGeluForwardCuda]) -> None: ...
def bias_gelu_backward_cpu(**fields: Unpack[_BiasGeluBackwardCpu]) -> None: ...
def bias_gelu_backward_cuda(**fields: Unpack[_BiasGeluBackwardCuda]) -> None: ...

# ---- gelu_layer_norm -------------------------------------------------------------------------------------------------

class _GeluLayerNormForward(TypedDict):
    x: int
    linear_bias: int
    weight: int
    bias: int
    y: int
    mean: int
    rstd: int
    rows: int
    columns: int
    x_stride: int
    eps: float
    activation: int
    dtype: int

class _GeluLayerNormForwardCpu(_GeluLayerNormForward):
    workspace: int
    threads: int

class _GeluLayerNormForwardCuda(_GeluLayerNormForward):
    parameter_dtype: int
    device: int
    stream: int

class _GeluLayerNormBackward(TypedDict):
    dy: int
    x: int
    linear_bias: int
    weight: int
    mean: int
    rstd: int
    dx: int
    dlinear_bias: int
    dweight: int
    dbias: int
    workspace: int
    rows: int
    columns: int
    x_stride: int
    activation: int
    dtype: int

class _GeluLayerNormBackwardCpu(_GeluLayerNormBackward):
    threads: int

class _GeluLayerNormBackwardCuda(_GeluLayerNormBackward):
    linear_bias_dtype: int
    weight_dtype: int
    bias_dtype: int
    blocks: int
    device: int
    stream: int

def gelu_layer_norm_forward_workspace(rows: int, columns: int) -> int: ...
def gelu_layer_norm_backward_workspace(rows: int, columns: int) -> int: ...
def gelu_layer_norm_forward_cpu(**fields: Unpack[_GeluLayerNormForwardCpu]) -> None: ...
def gelu_layer_norm_forward_cuda(**fields: Unpack[_GeluLayerNormForwardCuda]) -> None: ...
def gelu_layer_norm_backward_cpu(**fields: Unpack[_GeluLayerNormBackwardCpu]) -> None: ...
def gelu_layer_norm_backward_cuda(**fields: Unpack[_GeluLayerNormBackwardCuda]) -> None: ...
