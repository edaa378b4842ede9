"""The native core. Functions of tensors take their arguments by position. Launchers take every field by keyword:
addresses and dtype codes are integers (see _native.py)."""

from types import ModuleType
from typing import TypedDict

from torch import Tensor
from typing_extensions import Unpack

version: str
compiler: str
cuda_version: int  # 13000 for toolkit 13.0; 0 when built without CUDA: then there are no launchers named _cuda
cuda_archs: str
column_sum_strip: int  # columns that a block of column_sum_cuda takes
adamw_chunk: int  # elements that a block of adamw_step_cuda takes
adamw_tensor_bytes: int  # of a tensor's row in its table
adamw_group_bytes: int

class DoesNotFit(RuntimeError):
    """Blocks that wait for each other do not all fit on the GPU at the same time: nothing was launched."""

def driver_version() -> int: ...  # the newest CUDA of the GPU driver, as cuda_version; 0 without a driver
def compute_capability(device: int) -> int: ...  # 90 for 9.0
def block_memory(device: int) -> int: ...  # bytes of shared memory
def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def share_openmp(library_path: str) -> tuple[str, str]: ...
def find_blas(library_path: str) -> str: ...  # the file that has sgemm_; "" where there is none
def parallel_runtime() -> str: ...
def use_plain_threads() -> None: ...
def use_torch(torch: ModuleType) -> None: ...
def signature(kinds: str, *tensors: Tensor | None) -> bytes | None: ...
def tensor_table(tensors: list[Tensor | None], target: int, period: int) -> int: ...  # a type's code, -1 or -2

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

def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, statistics: Tensor, eps: float, /
) -> None: ...
def layer_norm_backward_workspace(x: Tensor, /) -> int: ...
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    workspace: Tensor,
    /,
) -> None: ...
def layer_norm_backward_memory_cuda(columns: int, dtype: int, limit: int) -> int: ...

# ---- rms_norm --------------------------------------------------------------------------------------------------------

def rms_norm_forward(x: Tensor, weight: Tensor | None, y: Tensor, rstd: Tensor, eps: float, /) -> None: ...
def rms_norm_backward_workspace(x: Tensor, /) -> int: ...
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor | None,
    workspace: Tensor,
    /,
) -> None: ...
def rms_norm_backward_memory_cuda(columns: int, dtype: int, limit: int) -> int: ...

# ---- gated_activation ------------------------------------------------------------------------------------------------

def gated_activation_forward(
    x: Tensor, bias: Tensor | None, y: Tensor, activation: int, gate_first: int, /
) -> None: ...
def gated_activation_backward_workspace(x: Tensor, /) -> int: ...
def gated_activation_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    dx: Tensor,
    dbias: Tensor | None,
    workspace: Tensor | None,
    activation: int,
    gate_first: int,
    /,
) -> None: ...

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
    y: int
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

# ---- gelu_product ----------------------------------------------------------------------------------------------------

class _GeluProductForward(TypedDict):
    x: int
    weight: int
    bias: int
    h: int
    derivative: int
    a: int
    rows: int
    inputs: int
    columns: int
    x_stride: int
    activation: int
    dtype: int
    bias_dtype: int
    device: int
    stream: int

class _GeluProductBackward(TypedDict):
    dy: int
    weight: int
    bias: int
    h: int
    derivative: int
    dh: int
    a: int
    dbias: int
    workspace: int
    rows: int
    outputs: int
    columns: int
    dy_stride: int
    activation: int
    dtype: int
    bias_dtype: int
    device: int
    stream: int

def gelu_product_workspace_cuda(rows: int, columns: int) -> int: ...
def gelu_product_forward_cuda(**fields: Unpack[_GeluProductForward]) -> None: ...
def gelu_product_backward_cuda(**fields: Unpack[_GeluProductBackward]) -> None: ...

# ---- column_sum ------------------------------------------------------------------------------------------------------

class _ColumnSum(TypedDict):
    x: int
    sum: int
    workspace: int
    rows: int
    columns: int
    x_stride: int
    dtype: int

class _ColumnSumCpu(_ColumnSum):
    threads: int

class _ColumnSumCuda(_ColumnSum):
    sum_dtype: int
    parts: int
    device: int
    stream: int

def column_sum_workspace(rows: int, columns: int) -> int: ...
def column_sum_cpu(**fields: Unpack[_ColumnSumCpu]) -> None: ...
def column_sum_cuda(**fields: Unpack[_ColumnSumCuda]) -> None: ...

# ---- dropout_add_layer_norm ------------------------------------------------------------------------------------------

class _DropoutAddLayerNorm(TypedDict):
    z: int
    weight: int
    mean: int
    rstd: int
    rows: int
    columns: int
    seed: int
    cu_seqlens: int
    sequences: int
    tokens_per_sequence: int
    threshold: int
    scale: float
    dtype: int
    residual_dtype: int

class _DropoutAddLayerNormForward(_DropoutAddLayerNorm):
    x: int
    residual: int
    bias: int
    linear_bias: int
    y: int
    x_stride: int
    residual_stride: int
    eps: float

class _DropoutAddLayerNormForwardCpu(_DropoutAddLayerNormForward):
    threads: int

class _DropoutAddLayerNormForwardCuda(_DropoutAddLayerNormForward):
    parameter_dtype: int
    device: int
    stream: int

class _DropoutAddLayerNormBackward(_DropoutAddLayerNorm):
    dy: int
    dz: int
    dresidual: int
    dx: int
    dweight: int
    dbias: int
    dlinear_bias: int
    workspace: int

class _DropoutAddLayerNormBackwardCpu(_DropoutAddLayerNormBackward):
    threads: int

class _DropoutAddLayerNormBackwardCuda(_DropoutAddLayerNormBackward):
    weight_dtype: int
    bias_dtype: int
    linear_bias_dtype: int
    blocks: int
    device: int
    stream: int
    block_memory: int

def dropout_add_layer_norm_workspace(rows: int, columns: int) -> int: ...
def dropout_add_layer_norm_forward_cpu(**fields: Unpack[_DropoutAddLayerNormForwardCpu]) -> None: ...
def dropout_add_layer_norm_forward_cuda(**fields: Unpack[_DropoutAddLayerNormForwardCuda]) -> None: ...
def dropout_add_layer_norm_backward_cpu(**fields: Unpack[_DropoutAddLayerNormBackwardCpu]) -> None: ...
def dropout_add_layer_norm_backward_memory_cuda(
    columns: int, dtype: int, residual_dtype: int, linear_bias: int, limit: int
) -> int: ...
def dropout_add_layer_norm_backward_cuda(**fields: Unpack[_DropoutAddLayerNormBackwardCuda]) -> None: ...

# ---- embedding -------------------------------------------------------------------------------------------------------

class _EmbeddingRows(TypedDict):
    word_table: int
    position_table: int
    segment_table: int
    ids: int
    position_ids: int
    segment_ids: int
    cu_seqlens: int
    weight: int
    seed: int
    sequences: int
    tokens_per_sequence: int
    rows: int
    columns: int
    threshold: int
    scale: float
    layer_norm: int
    table_dtype: int
    dtype: int
    threads: int

class _EmbeddingForward(_EmbeddingRows):
    bias: int
    y: int
    mean: int
    rstd: int
    eps: float

class _EmbeddingBackward(_EmbeddingRows):
    dy: int
    mean: int
    rstd: int
    dx: int
    positions: int
    dweight: int
    dbias: int
    workspace: int

class _EmbeddingTableBackward(TypedDict):
    dx: int
    indices: int
    dtable: int
    first: int
    next: int
    rows: int
    columns: int
    table_rows: int
    excluded: int
    dtype: int
    threads: int

def embedding_workspace(rows: int, columns: int) -> int: ...
def embedding_forward_cpu(**fields: Unpack[_EmbeddingForward]) -> None: ...
def embedding_backward_cpu(**fields: Unpack[_EmbeddingBackward]) -> None: ...
def embedding_table_backward_cpu(**fields: Unpack[_EmbeddingTableBackward]) -> None: ...

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
    block_memory: int

def gelu_layer_norm_forward_workspace(rows: int, columns: int) -> int: ...
def gelu_layer_norm_backward_workspace(rows: int, columns: int) -> int: ...
def gelu_layer_norm_forward_cpu(**fields: Unpack[_GeluLayerNormForwardCpu]) -> None: ...
def gelu_layer_norm_forward_cuda(**fields: Unpack[_GeluLayerNormForwardCuda]) -> None: ...
def gelu_layer_norm_backward_cpu(**fields: Unpack[_GeluLayerNormBackwardCpu]) -> None: ...
def gelu_layer_norm_backward_memory_cuda(columns: int, dtype: int, limit: int) -> int: ...
def gelu_layer_norm_backward_cuda(**fields: Unpack[_GeluLayerNormBackwardCuda]) -> None: ...

# ---- pack ------------------------------------------------------------------------------------------------------------

class _PackCopy(TypedDict):
    source: int
    target: int
    cu_seqlens: int
    sequences: int
    max_seqlen: int
    total: int
    token_bytes: int
    threads: int

def pack_cpu(**fields: Unpack[_PackCopy]) -> None: ...
def unpack_cpu(**fields: Unpack[_PackCopy]) -> None: ...

# ---- attention -------------------------------------------------------------------------------------------------------

class _AttentionCall(TypedDict):
    q: int
    k: int
    v: int
    q_sequence_stride: int
    q_token_stride: int
    q_head_stride: int
    k_sequence_stride: int
    k_token_stride: int
    k_head_stride: int
    v_sequence_stride: int
    v_token_stride: int
    v_head_stride: int
    cu_seqlens: int
    cu_seqlens_k: int
    lengths: int
    lengths_k: int
    seed: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    max_seqlen: int
    max_seqlen_k: int
    window_left: int
    window_right: int
    scale: float
    threshold: int
    dropout_scale: float
    dtype: int
    workspace: int

class _AttentionForward(_AttentionCall):
    out: int
    lse: int

class _AttentionForwardCpu(_AttentionForward):
    threads: int

class _AttentionForwardCuda(_AttentionForward):
    device: int
    stream: int

class _AttentionBackward(_AttentionCall):
    dout: int
    out: int
    lse: int
    dq: int
    dk: int
    dv: int
    dq_sequence_stride: int
    dq_token_stride: int
    dq_head_stride: int
    dk_sequence_stride: int
    dk_token_stride: int
    dk_head_stride: int
    dv_sequence_stride: int
    dv_token_stride: int
    dv_head_stride: int

class _AttentionBackwardCpu(_AttentionBackward):
    threads: int

class _AttentionBackwardCuda(_AttentionBackward):
    device: int
    stream: int
    column_sums: int
    column_sums_dtype: int
    column_parts: int

def attention_forward_workspace(head_dim: int, threads: int) -> int: ...
def attention_backward_workspace(max_seqlen: int, max_seqlen_k: int, head_dim: int, threads: int) -> int: ...
def attention_forward_cpu(**fields: Unpack[_AttentionForwardCpu]) -> None: ...
def attention_backward_cpu(**fields: Unpack[_AttentionBackwardCpu]) -> None: ...
def attention_forward_cuda(**fields: Unpack[_AttentionForwardCuda]) -> None: ...
def attention_backward_workspace_cuda(sequences: int, heads: int, head_dim: int, tokens: int, longest: int) -> int: ...
def attention_column_parts_cuda(sequences: int, heads: int, head_dim: int, max_seqlen: int) -> int: ...
def attention_backward_cuda(**fields: Unpack[_AttentionBackwardCuda]) -> None: ...

# ---- linear_cross_entropy --------------------------------------------------------------------------------------------

class _LinearCrossEntropy(TypedDict):
    logits: int
    bias: int
    labels: int
    coefficients: int
    seed: int
    losses: int
    correct: int
    samples: int
    rows: int
    first_row: int
    vocabulary: int
    stride: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    temperature: float
    gradient: int
    threads: int

def linear_cross_entropy_cpu(**fields: Unpack[_LinearCrossEntropy]) -> None: ...

# ---- distillation_loss -----------------------------------------------------------------------------------------------

class _DistillationLoss(TypedDict):
    student: int
    teacher: int
    student_bias: int
    teacher_bias: int
    counted: int
    coefficients: int
    losses: int
    rows: int
    vocabulary: int
    stride: int
    temperature: float
    gradient: int
    threads: int

def distillation_loss_cpu(**fields: Unpack[_DistillationLoss]) -> None: ...

# ---- adamw -----------------------------------------------------------------------------------------------------------

class _AdamW(TypedDict):
    table: int
    workspace: int
    partial_norms: int
    norm: int
    max_norm: float
    grad_scale: int
    found_inf: int
    tensors: int
    groups: int
    chunks: int
    device: int
    stream: int

def adamw_workspace_cuda(tensors: int, groups: int) -> int: ...
def adamw_step_cuda(**fields: Unpack[_AdamW]) -> None: ...
def adamw_norm_cuda(**fields: Unpack[_AdamW]) -> None: ...

# ---- gemm ------------------------------------------------------------------------------------------------------------

class _Gemm(TypedDict):
    a: int
    b: int
    bias: int
    c: int
    d: int
    workspace: int
    rows: int
    columns: int
    inner: int
    transposed_a: int
    transposed_b: int
    dtype: int
    out_dtype: int
    device: int
    stream: int

def gemm_workspace_bytes_cuda() -> int: ...
def gemm_library_version_cuda() -> int: ...  # of the cuBLASLt in the process; 0 where there is none
def gemm_cuda(**fields: Unpack[_Gemm]) -> None: ...

# ---- transformer_block -----------------------------------------------------------------------------------------------

class _TransformerShape(TypedDict):
    layers: int
    tokens: int
    width: int
    intermediate: int
    heads: int
    sequences: int
    max_seqlen: int
    processors: int
    pre_norm: int
    training: int
    recompute: int
    keep_activation: int
    dtype: int
    residual_dtype: int

class _TransformerRegions(_TransformerShape):
    workspace_bytes: int
    fused_activation: int
    table: int
    kind: int

class _TransformerSizes(_TransformerShape):
    sizes: int

class _TransformerCall(_TransformerShape):
    parameters: int
    x: int
    cu_seqlens: int
    seeds: int
    kept: int
    scratch: int
    window_left: int
    window_right: int
    activation: int
    attention_threshold: int
    attention_scale: float
    threshold_a: int
    scale_a: float
    threshold_b: int
    scale_b: float
    eps_a: float
    eps_b: float
    parameter_dtype: int
    device: int
    stream: int

class _TransformerForward(_TransformerCall):
    residual: int
    y: int
    z: int

class _TransformerBackward(_TransformerCall):
    z: int
    dy: int
    dz: int
    dx: int
    dresidual: int
    gradients: int
    block_memory: int
    part: int
    dout: int
    dqkv: int

def transformer_block_regions(**fields: Unpack[_TransformerRegions]) -> None: ...
def transformer_block_sizes_cpu(**fields: Unpack[_TransformerSizes]) -> None: ...
def transformer_block_forward_cpu(**fields: Unpack[_TransformerForward]) -> None: ...
def transformer_block_backward_cpu(**fields: Unpack[_TransformerBackward]) -> None: ...
def transformer_block_sizes_cuda(**fields: Unpack[_TransformerSizes]) -> None: ...
def transformer_block_forward_cuda(**fields: Unpack[_TransformerForward]) -> None: ...
def transformer_block_backward_cuda(**fields: Unpack[_TransformerBackward]) -> None: ...
