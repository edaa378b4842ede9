import pytest
import torch

from fasttfm import ops
from fasttfm.ops.core.backends import triton_interpreted
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.rotary import SPEC

TestRotary = op_tests(SPEC)


def tables(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return angles.cos().float(), angles.sin().float()


def test_scores_depend_on_distances() -> None:
    """The product of a rotated query and a rotated key depends only on the difference of their positions."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64).unbind()
    angles = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    cos, sin = angles.cos(), angles.sin()

    def score(query: int, key: int) -> torch.Tensor:
        rotated = (
            ops.rotary(x, cos, sin, positions=torch.tensor([position])) for x, position in ((q, query), (k, key))
        )
        return torch.linalg.vecdot(*rotated)

    torch.testing.assert_close(score(7, 3), score(44, 40))
    assert not torch.allclose(score(7, 3), score(7, 4))


def test_packed_sequences_match_single_sequences() -> None:
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(9, 2, 8), tables(6, 4)
    positions = ops.position_ids_from_cu_seqlens(torch.tensor([0, 3, 9], dtype=torch.int32))
    packed = ops.rotary(x, cos, sin, positions=positions)
    assert torch.equal(packed, torch.cat([ops.rotary(part, cos, sin) for part in x.split((3, 6))]))


def test_queries_and_keys_of_one_projection_are_read_in_place() -> None:
    torch.manual_seed(0)
    qkv, (cos, sin) = torch.randn(5, 3, 2, 8), tables(5, 4)
    pair = qkv[:, :2].flatten(1, 2)
    assert pair.data_ptr() == qkv.data_ptr()
    rotated = ops.rotary(pair, cos, sin)
    assert torch.equal(rotated[:, :2], ops.rotary(qkv[:, 0], cos, sin))
    assert torch.equal(rotated[:, 2:], ops.rotary(qkv[:, 1], cos, sin))


def test_heads_that_are_not_rotated_are_copied() -> None:
    """Including infinities and NaN, because values are in the same tensor as queries and keys."""
    torch.manual_seed(0)
    qkv, (cos, sin) = torch.randn(5, 3, 2, 8), tables(5, 4)
    qkv[:, 2, 0, 0], qkv[:, 2, 1, 4] = torch.inf, torch.nan
    for backend in ("cpu", "reference", *(["triton"] if triton_interpreted() else [])):
        rotated = ops.rotary(qkv.flatten(1, 2), cos, sin, rotary_heads=4, backend=backend).unflatten(1, (3, 2))
        assert torch.equal(rotated[:, 2].view(torch.int32), qkv[:, 2].view(torch.int32))
        torch.testing.assert_close(rotated[:, :2].flatten(1, 2), ops.rotary(qkv[:, :2].flatten(1, 2), cos, sin))


@pytest.mark.gpu
def test_a_position_outside_of_the_tables_gives_nan_on_a_gpu() -> None:
    x, (cos, sin) = torch.ones(3, 1, 8, device="cuda"), (table.cuda() for table in tables(4, 4))
    y = ops.rotary(x, cos, sin, positions=torch.tensor([3, 4, -1], device="cuda"))
    assert y.isnan().any(-1).flatten().tolist() == [False, True, True]
