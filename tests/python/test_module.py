"""MSAttention against the formulas of its parts, and against the attention layer of MiniMax-M3 in transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashmsa import MSAttention
from flashmsa.module import apply_rotary, document_positions, rotary_angles

HIDDEN, BLOCK, TOP_K = 96, 64, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_layer(device: str = "cpu", **options: object) -> MSAttention:
    """A layer whose attention is far from uniform."""
    layer = MSAttention(
        HIDDEN, 4, 2, head_dim=64, block_size=BLOCK, top_k=TOP_K, rope_theta=1e4, device=device, **options
    )
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, -0.5, 1.5)
    return layer


def error(x: Tensor, reference: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def gradients(layer: MSAttention) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


# ---- Parts --------------------------------------------------------------------------------------------------------


def test_rotary_turns_pairs_and_passes_the_rest() -> None:
    """Channels i and i + 4 turn by position * theta^(-2i / 8), as complex numbers do."""
    x, positions = torch.randn(7, 3, 16, dtype=torch.float64), torch.arange(7) + 5
    y = apply_rotary(x, *rotary_angles(positions, 8, 1e4, torch.float64))
    angles = positions[:, None] * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(y[..., :8], torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(y[..., 8:], x[..., 8:])


def test_positions_start_anew_in_every_document() -> None:
    cu = torch.tensor([0, 0, 3, 3, 4, 8, 8], dtype=torch.int32)
    assert document_positions(cu, 8).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


# ---- The layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2, 2, 1), (4, 4, 2, 2), (6, 1, 3, 1)])
def test_shapes_of_heads(heads: tuple[int, int, int, int], device: str) -> None:
    queries, keys, proxies, proxy_keys = heads
    layer = MSAttention(
        HIDDEN,
        queries,
        keys,
        head_dim=64,
        num_proxy_heads=proxies,
        num_proxy_kv_heads=proxy_keys,
        block_size=BLOCK,
        top_k=TOP_K,
        device=device,
    )
    out, kl = layer(torch.randn(2, 200, HIDDEN, device=device))
    (out.square().mean() + kl).backward()
    assert out.shape == (2, 200, HIDDEN)
    assert kl.item() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_losses_train_their_own_parameters_alone(device: str) -> None:
    layer = make_layer(device)
    x = torch.randn(1, 200, HIDDEN, device=device, requires_grad=True)
    out, kl = layer(x)
    kl.backward(retain_graph=True)
    assert x.grad is None
    assert gradients(layer).keys() == {name for name, _ in layer.named_parameters() if name.startswith("indexer")}
    layer.zero_grad()
    out.sum().backward()
    assert x.grad.abs().max() > 0
    assert not any(name.startswith("indexer") for name in gradients(layer))


def test_dense_mode_equals_sdpa(device: str) -> None:
    layer, x = make_layer(device, mode="dense"), torch.randn(2, 300, HIDDEN, device=device)
    out, kl = layer(x)
    cos, sin = rotary_angles(torch.arange(300, device=device), layer.rotary_dim, layer.rope_theta, x.dtype)

    def heads(projection: torch.nn.Linear, norm: torch.nn.Module | None) -> Tensor:
        y = projection(x).unflatten(-1, (-1, 64))
        return (y if norm is None else apply_rotary(norm(y), cos, sin)).transpose(1, 2)

    q, k, v = heads(layer.q_proj, layer.q_norm), heads(layer.k_proj, layer.k_norm), heads(layer.v_proj, None)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert error(out, layer.o_proj(expected.transpose(1, 2).flatten(-2))) < 1e-5
    assert kl > 0.01
    sparse, _ = layer(x, mode="sparse")
    assert error(sparse[:, : TOP_K * BLOCK], out[:, : TOP_K * BLOCK]) < 1e-5
    assert error(sparse[:, TOP_K * BLOCK :], out[:, TOP_K * BLOCK :]) > 1e-2


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_packed_documents_equal_each_alone(mode: str, device: str) -> None:
    lengths = [1, 200, 64, 135]
    layer, x = make_layer(device, mode=mode), torch.randn(400, HIDDEN, device=device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    out, kl = layer(x, cu_seqlens=cu, max_seqlen=200)
    alone = [layer(document[None]) for document in x.split(lengths)]
    assert error(out, torch.cat([y[0] for y, _ in alone])) < 1e-5
    mean = sum(length * value for length, (_, value) in zip(lengths, alone, strict=True)) / 400
    torch.testing.assert_close(kl, mean, rtol=1e-4, atol=0)


def test_rows_beyond_the_last_document_are_padding() -> None:
    layer, x = make_layer(), torch.randn(100, HIDDEN)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    expected, _ = layer(x[:70], cu_seqlens=cu)
    out, _ = layer(torch.cat((x[:70], torch.full((30, HIDDEN), torch.nan))), cu_seqlens=cu)
    torch.testing.assert_close(out[:70], expected)
    assert (out[70:] == 0).all()


def test_kl_falls_in_warm_up() -> None:
    """Training the indexer alone, dense first: the selection it makes then holds more of the attention's weight."""
    layer, x = make_layer(mode="dense"), torch.randn(2, 300, HIDDEN)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=1e-2)
    with torch.no_grad():
        target, first = layer(x)
        before = error(layer(x, mode="sparse")[0], target)
    for _ in range(30):
        optimizer.zero_grad()
        _, kl = layer(x)
        kl.backward()
        optimizer.step()
    with torch.no_grad():
        after = error(layer(x, mode="sparse")[0], target)
    assert kl < 0.5 * first
    assert after < before


def test_without_kl_value_the_gradient_stays() -> None:
    layer, x = make_layer(), torch.randn(1, 200, HIDDEN)
    layer(x)[1].backward()
    expected = gradients(layer)
    layer.zero_grad()
    _, kl = layer(x, kl_value=False)
    kl.backward()
    assert kl == 0
    for name, gradient in gradients(layer).items():
        assert torch.equal(gradient, expected[name]), name


def test_bf16_autocast() -> None:
    layer, x = make_layer(), torch.randn(1, 200, HIDDEN)
    expected, _ = layer(x, mode="dense")
    with torch.autocast("cpu", torch.bfloat16):
        out, kl = layer(x, mode="dense")
    assert (out.dtype, kl.dtype) == (torch.bfloat16, torch.float32)
    assert 1e-4 < error(out, expected) < 3e-2


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="num_heads is 4 and num_kv_heads is 3"):
        MSAttention(64, 4, 3)
    with pytest.raises(ValueError, match="num_proxy_heads is 2 and num_proxy_kv_heads is 4"):
        MSAttention(64, 4, 2, num_proxy_kv_heads=4)
    with pytest.raises(ValueError, match="hidden_size is 65"):
        MSAttention(65, 4, 2)
    with pytest.raises(ValueError, match="rotary_dim is 7"):
        MSAttention(64, 4, 2, rotary_dim=7)
    with pytest.raises(ValueError, match="mode is 'warm'"):
        MSAttention(64, 4, 2, mode="warm")
    layer = make_layer()
    with pytest.raises(ValueError, match="mode is 'warm'"):
        layer(torch.randn(1, 10, HIDDEN), mode="warm")
    with pytest.raises(ValueError, match=r"hidden_states has shape \(10, 96\)"):
        layer(torch.randn(10, HIDDEN))


# ---- MiniMax-M3 ---------------------------------------------------------------------------------------------------


def test_what_is_no_tensor_and_what_counts_nothing_is_refused() -> None:
    layer = make_layer("cpu")
    for value in (None, torch.zeros(1, 8, HIDDEN).numpy()):
        with pytest.raises(TypeError, match="^hidden_states is (NoneType|ndarray); it must be a tensor"):
            layer(value)
    for heads, top_k, sentence in ((0, 2, "num_heads is 0; it must be positive"), (4, 0, "top_k is 0; it must be")):
        with pytest.raises(ValueError, match=sentence):
            MSAttention(HIDDEN, heads, 2, top_k=top_k)
    with pytest.raises(TypeError, match="top_k is NoneType; it must be an integer"):
        MSAttention(HIDDEN, 4, 2, top_k=None)  # type: ignore[arg-type]


def test_weights_can_be_made_on_the_meta_device() -> None:
    """reset_parameters() gives them the values of construction: those of one seed, and gains of 1."""
    torch.manual_seed(3)
    expected = MSAttention(HIDDEN, 4, 2, block_size=BLOCK, top_k=2)
    layer = MSAttention(HIDDEN, 4, 2, block_size=BLOCK, top_k=2, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 9.0)
    torch.manual_seed(3)
    layer.reset_parameters()
    for (name, mine), theirs in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_weights_of_minimax_m3_fit_and_give_its_attention() -> None:
    """The state_dict of the model's self_attn loads, and output and gradients are those of its eager attention."""
    pytest.importorskip("transformers", minversion="5.17")
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

    config = m3.MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        index_n_heads=2,
        index_head_dim=64,
        index_block_size=BLOCK,
        index_topk_blocks=TOP_K,
        layer_types=["minimax_m3_sparse"],
    )
    config._attn_implementation = "eager"
    layer, theirs = make_layer(), m3.MiniMaxM3VLAttention(config, 0)
    theirs.load_state_dict(layer.state_dict())

    x = torch.randn(2, 300, HIDDEN)
    embeddings = m3.MiniMaxM3VLRotaryEmbedding(config)(x, torch.arange(300)[None])
    expected, _ = theirs(x, embeddings, None)
    out, kl = layer(x)
    assert error(out, expected) < 1e-5

    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    (out * cotangent).sum().backward()
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert error(layer.get_parameter(name).grad, parameter.grad) < 1e-5, name
    assert kl > 0
