import pytest
import torch

from kernels import dispatch
from kernels.dense_attention import dense_attention
from kernels.dense_attention.reference import dense_attention as reference
from kernels.full_attention import full_attention
from tests.kernels.arguments import DTYPES, attention_inputs, paths
from tests.kernels.tolerances import LSE_ERROR, RELATIVE_ERROR, lse_error, relative_error


@pytest.mark.parametrize("path", paths("dense_attention"))
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "row_offset", "head_dim"),
    [(1, 4, 2, 0, 64), (1, 4, 2, 500, 64), (211, 9, 3, 77, 64), (129, 8, 1, 0, 128), (300, 2, 2, 1000, 128)],
)
def test_equals_reference(tokens, heads, kv_heads, row_offset, head_dim, path, device):
    dtype = DTYPES[0]
    q, k, v = attention_inputs(tokens, heads, kv_heads, row_offset + tokens + 5, head_dim, dtype, device)
    with dispatch.override("dense_attention", path):
        out, lse = dense_attention(q, k, v, row_offset=row_offset)
    end = row_offset + tokens
    want, want_lse = reference(q.double(), k[:, :end].double(), v[:, :end].double(), row_offset, head_dim**-0.5)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert lse_error(lse, want_lse) <= LSE_ERROR[dtype]


@pytest.mark.parametrize("path", paths("full_attention"))
def test_full_attention_sees_every_key(path, device):
    dtype = DTYPES[0]
    q, k, v = attention_inputs(100, 6, 2, 333, 64, dtype, device)
    with dispatch.override("full_attention", path):
        out, lse = full_attention(q, k, v)
    scores = q.double().transpose(0, 1) @ k.double().repeat_interleave(3, 0).transpose(1, 2) / 8
    want = (scores.softmax(-1) @ v.double().repeat_interleave(3, 0)).transpose(0, 1)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert lse_error(lse, scores.logsumexp(-1).T) <= LSE_ERROR[dtype]


def test_wrong_arguments():
    q, k, v = attention_inputs(70, 4, 2, 60, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"at least row_offset \+ tokens = 70 keys, got 60"):
        dense_attention(q, k, v)
    with pytest.raises(ValueError, match=r"q: expected dtype"):
        dense_attention(q.int(), k, v)
