"""MiniMax-M3 of transformers on flashmsa, against the model's own eager attention with the same weights.

Where numbers are compared, the selection is the eager indexer's, replayed: a near tie that rounding decides the other
way would otherwise change a whole block. That the library selects as the eager indexer does has a test of its own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

import flashmsa.hf

SPARSE, DENSE = "minimax_m3_sparse", "full_attention"
BLOCK, TOP_K, VOCABULARY = 64, 3, 96


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    flashmsa.hf.register()
    torch.manual_seed(0)
    # A machine that does something else besides lets threads wait for each other at every small operation.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(
    layers: tuple[str, ...] = (DENSE, SPARSE, SPARSE),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    last_mlp: str = "sparse",
    head_dim: int = 64,
    block: int = BLOCK,
) -> m3.MiniMaxM3VLForCausalLM:
    """A small model with eager attention in training mode; its norms' gains and its scores are not all alike."""
    config = m3.MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=head_dim,
        index_block_size=block,
        index_topk_blocks=TOP_K,
        layer_types=list(layers),
        mlp_layer_types=["dense"] * (len(layers) - 1) + [last_mlp],
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = m3.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, -0.5, 1.5)
    for attention in attentions(model):
        attention.scaling *= 1.5
    return model.to(device, dtype).train()


def twin(model: m3.MiniMaxM3VLForCausalLM) -> m3.MiniMaxM3VLForCausalLM:
    """The same weights on flashmsa."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("flashmsa")
    return other


def tokens(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(1, VOCABULARY, shape, device=device)


def attentions(model: m3.MiniMaxM3VLForCausalLM) -> list[m3.MiniMaxM3VLAttention]:
    return [layer.self_attn for layer in model.model.layers]


@contextlib.contextmanager
def recorded(model: m3.MiniMaxM3VLForCausalLM) -> Iterator[list[Any]]:
    """What the indexers return, in the order of their calls."""
    results: list[Any] = []
    hooks = [
        attention.indexer.register_forward_hook(lambda module, args, output: results.append(output))
        for attention in attentions(model)
        if attention.indexer is not None
    ]
    yield results
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def replayed(model: m3.MiniMaxM3VLForCausalLM, selections: list[Tensor]) -> Iterator[None]:
    """Eager indexers return these selections, in the order of their calls, and the library uses them."""
    remaining = iter(selections)

    def attend(*args: Any, **kwargs: Any) -> Any:
        chosen = next(remaining).transpose(0, 1).flatten(1, 2).int()
        chosen = torch.nn.functional.pad(chosen, (0, TOP_K - chosen.shape[2]), value=-1)
        return flashmsa.flash_msa_varlen_func(*args, block_indices=chosen, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if model.config._attn_implementation == "flashmsa":
            patch.setattr(flashmsa.hf, "flash_msa_varlen_func", attend)
        else:
            patch.setattr(m3.MiniMaxM3VLIndexer, "forward", lambda self, *args, **kwargs: next(remaining))
        yield


def error(x: Tensor, reference: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    reference = reference.double()
    return ((x.double() - reference).norm() / reference.norm()).item()


def step(model: m3.MiniMaxM3VLForCausalLM, ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """Logits, loss and gradients of a training step."""
    model.zero_grad()
    output = model(ids, labels=ids, **kwargs)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}


# ---- The same model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(DENSE, DENSE), (SPARSE,), (DENSE, SPARSE, SPARSE)])
def test_logits_and_gradients_equal_eager_in_fp32(layers: tuple[str, ...], device: str) -> None:
    model = make_model(layers, device)
    other = twin(model)
    ids = tokens(2, 300, device=device)
    with recorded(model) as selections:
        expected = step(model, ids)
    with replayed(other, selections):
        actual = step(other, ids)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert error(actual[name], value) < 2e-5, name


@pytest.mark.parametrize("size", [64, 128])
def test_logits_and_gradients_err_as_eager_in_bf16(size: int, device: str) -> None:
    """Each tensor's error against fp32 is at most twice that of eager bf16, plus a floor. Heads and blocks of 128 run
    on the Hopper kernels where there is such a card."""
    if size == 128 and device == "cpu":
        pytest.skip("slow, and nothing new on the CPU")
    model = make_model(device=device, dtype=torch.bfloat16, head_dim=size, block=size)
    other, reference = twin(model), copy.deepcopy(model).float()
    ids = tokens(2, 5 * size, device=device)
    with recorded(model) as selections:
        eager = step(model, ids)
    with replayed(other, selections):
        actual = step(other, ids)
    with replayed(reference, selections):
        expected = step(reference, ids)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert error(actual[name], value) <= 2 * error(eager[name], value) + 1e-3, name


def test_library_selects_as_the_eager_indexer(device: str) -> None:
    model = make_model(device=device)
    other = twin(model)
    ids = tokens(2, 5 * BLOCK + 7, device=device)
    with recorded(model) as expected, torch.no_grad():
        model(ids)
    with recorded(other) as proxies, torch.no_grad():
        other(ids)
    selection = flashmsa.hf.select_blocks(attentions(other)[1], proxies[0])
    assert selection.shape == expected[0].shape
    assert torch.equal(selection.sort().values.long(), expected[0].sort().values)


def test_whole_model_equals_eager_with_its_own_selection() -> None:
    model = make_model()
    ids = tokens(2, 300)
    with torch.no_grad():
        assert error(twin(model)(ids).logits, model(ids).logits) < 1e-4


def test_from_config_takes_the_name() -> None:
    config = make_model().config
    model = m3.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="flashmsa")
    assert model.config._attn_implementation == "flashmsa"
    model.set_attn_implementation("eager")
    flashmsa.hf.register()
    model.set_attn_implementation("flashmsa")
    assert model(tokens(1, 100)).logits.isfinite().all()


def test_activation_checkpointing_changes_nothing() -> None:
    model = twin(make_model())
    proxy = flashmsa.hf.enable_proxy_loss(model)
    ids = tokens(2, 200)
    expected = step(model, ids, use_cache=False)
    model.gradient_checkpointing_enable()
    loss, layers = model(ids, labels=ids, use_cache=False).loss, dict(proxy.layers)
    loss.backward()
    assert all(proxy.layers[i] is kl for i, kl in layers.items())  # not those of the second pass
    actual = step(model, ids, use_cache=False)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_compiles_to_one_graph() -> None:
    """With packed documents and the proxy loss, both of which read the data where they can."""
    model = twin(make_model((SPARSE,), last_mlp="dense"))
    flashmsa.hf.enable_proxy_loss(model)
    ids, positions = tokens(1, 150), torch.cat((torch.arange(60), torch.arange(90)))[None]
    expected = step(model, ids, position_ids=positions, use_cache=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    actual = step(compiled, ids, position_ids=positions, use_cache=False)
    assert actual.keys() == {name if name in ("logits", "loss") else f"_orig_mod.{name}" for name in expected}
    for name, value in expected.items():
        assert error(actual.get(name, actual.get(f"_orig_mod.{name}")), value) < 1e-6, name


@pytest.mark.parametrize("mask", [None, "ones", "left", "right"])
def test_compiled_code_packs_as_eager_code_does(mask: str | None) -> None:
    """With the model's own cache, where transformers does not look for documents."""
    model = twin(make_model((SPARSE,), last_mlp="dense")).eval()
    ids, positions = tokens(1, 150), torch.cat((torch.arange(60), torch.arange(90)))[None]
    kwargs: dict[str, Any] = {"position_ids": positions}
    visible = torch.ones(1, 150, dtype=torch.long)
    if mask is not None:
        visible[0, {"ones": slice(0), "left": slice(7), "right": slice(140, 150)}[mask]] = 0
        kwargs["attention_mask"] = visible
    with torch.no_grad():
        expected = model(ids, **kwargs).logits[visible.bool()]
        actual = torch.compile(model, backend="eager", fullgraph=True)(ids, **kwargs).logits[visible.bool()]
        ends = torch.tensor([0, 150], dtype=torch.int32)
        together = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits[visible.bool()]
    assert error(actual, expected) < 1e-6
    assert error(actual, together) > 1e-2


# ---- Which tokens see each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str, device: str) -> None:
    """A padded row equals the row alone: blocks are counted from its first token, whichever side the padding is on."""
    model = twin(make_model(device=device))
    rows = [tokens(1, length, device=device) for length in (250, 300, 1)]
    ids = torch.zeros(3, 300, dtype=torch.long, device=device)
    mask = torch.zeros(3, 300, dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        where = slice(300 - row.shape[1], 300) if side == "left" else slice(0, row.shape[1])
        ids[i, where], mask[i, where] = row[0], 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            assert error(logits[i][mask[i].bool()], model(row).logits[0]) < 2e-5


def test_right_padding_equals_eager() -> None:
    model = make_model()
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, 240:] = 0
    ids = tokens(2, 300) * mask
    with torch.no_grad():
        expected, actual = model(ids, attention_mask=mask).logits, twin(model)(ids, attention_mask=mask).logits
    assert error(actual[mask.bool()], expected[mask.bool()]) < 1e-4


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_documents_equal_each_alone(how: str, use_cache: bool, device: str) -> None:
    model = twin(make_model(device=device))
    lengths = [1, 130, 64, 205]
    documents = [tokens(1, length, device=device) for length in lengths]
    kwargs: dict[str, Any]
    if how == "position_ids":
        kwargs = {"position_ids": torch.cat([torch.arange(length, device=device) for length in lengths])[None]}
    else:
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        kwargs = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 205, "max_length_k": 205}
    with torch.no_grad():
        logits = model(torch.cat(documents, dim=1), use_cache=use_cache, **kwargs).logits
        alone = torch.cat([model(document).logits for document in documents], dim=1)
    assert error(logits, alone) < 2e-5


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_documents_with_padding_equal_each_alone(side: str, use_cache: bool, device: str) -> None:
    """Whatever the positions of padding are."""
    model = twin(make_model(device=device))
    ids, mask, positions = (torch.zeros(3, 300, dtype=torch.long, device=device) for _ in range(3))
    rows = [[1, 130, 64], [205], [299, 1]]
    documents = [[tokens(1, length, device=device) for length in row] for row in rows]
    for i, row in enumerate(rows):
        where = slice(300 - sum(row), 300) if side == "left" else slice(0, sum(row))
        ids[i, where], mask[i, where] = torch.cat(documents[i], dim=1)[0], 1
        positions[i, where] = torch.cat([torch.arange(length, device=device) for length in row])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
        for i, row_documents in enumerate(documents):
            alone = torch.cat([model(document).logits[0] for document in row_documents])
            assert error(logits[i][mask[i].bool()], alone) < 2e-5


def test_packed_documents_in_inference_mode() -> None:
    model = twin(make_model())
    ids = tokens(1, 150)
    with torch.inference_mode():
        positions = torch.cat((torch.arange(60), torch.arange(90)))[None]
        logits = model(ids, position_ids=positions).logits
        alone = torch.cat((model(ids[:, :60]).logits, model(ids[:, 60:]).logits), dim=1)
    assert error(logits, alone) < 2e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_with_a_static_cache_are_refused(compiled: bool) -> None:
    from transformers import StaticCache

    model, ids = twin(make_model((SPARSE,), last_mlp="dense")).eval(), tokens(1, 100)
    positions = torch.cat((torch.arange(60), torch.arange(40)))[None]
    run: Any = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        run(ids, past_key_values=StaticCache(model.config, max_cache_len=120))
        with pytest.raises(RuntimeError if compiled else ValueError, match="position_ids restart"):
            run(ids, position_ids=positions, past_key_values=StaticCache(model.config, max_cache_len=120))


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_one_of_the_two_offsets_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seq_lens_. is missing"):
        twin(make_model())(tokens(1, 100), **{given: torch.tensor([0, 60, 100], dtype=torch.int32)})


@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_besides_offsets_is_refused(use_cache: bool) -> None:
    """A mask of ones says nothing that the offsets do not; neither do positions, from which transformers makes one."""
    model, ids, mask = twin(make_model()), tokens(1, 100), torch.ones(1, 100, dtype=torch.long)
    ends = torch.tensor([0, 60, 100], dtype=torch.int32)
    positions = torch.cat((torch.arange(60), torch.arange(40)))[None]
    kwargs: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": use_cache}
    kwargs["position_ids"] = positions
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask, **kwargs).logits, model(ids, **kwargs).logits)
        mask[0, 90:] = 0
        with pytest.raises(ValueError, match="attention_mask has padding"):
            model(ids, attention_mask=mask, **kwargs)


def test_mask_function_of_packed_documents() -> None:
    from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]])
    function = and_masks(causal_mask_function, packed_sequence_mask_function(documents))
    fragments = flashmsa.hf.flash_msa_mask(2, 6, 6, mask_function=function)
    assert fragments[0, 0].tolist() == [[0, 3, 4, 6, 7], [3, 4, 6, 7, 12]] * 2
    with pytest.raises(ValueError, match="both given"):
        flashmsa.hf.flash_msa_mask(2, 6, 6, mask_function=function, attention_mask=torch.ones(2, 6, dtype=torch.bool))


def test_mask_with_a_gap_is_refused() -> None:
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, 50] = 0
    with pytest.raises(ValueError, match="attention_mask has a gap"):
        twin(make_model())(tokens(1, 100), attention_mask=mask)


def test_ready_made_mask_is_refused() -> None:
    mask = torch.zeros(1, 1, 100, 100)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        twin(make_model())(tokens(1, 100), attention_mask=mask)


def test_masks_of_other_kinds_are_refused() -> None:
    from transformers.masking_utils import bidirectional_mask_function, sliding_window_causal_mask_function

    for mask_function in (sliding_window_causal_mask_function(10), bidirectional_mask_function):
        with pytest.raises(ValueError, match="a sliding window"):
            flashmsa.hf.flash_msa_mask(1, 100, 100, mask_function=mask_function)


def test_dropout_is_refused() -> None:
    model = make_model()
    model.config.attention_dropout = 0.1
    model = m3.MiniMaxM3VLForCausalLM._from_config(model.config, attn_implementation="flashmsa").train()
    with pytest.raises(ValueError, match=r"dropout is 0\.1"):
        model(tokens(1, 100))


def test_attention_that_is_not_causal_is_left_to_sdpa() -> None:
    """The vision tower of the model: no mask, all see all."""
    config = m3.MiniMaxM3VLVisionConfig(hidden_size=32, num_attention_heads=2)
    attention = m3.MiniMaxM3VLVisionAttention(config)
    q, k, v = torch.randn(3, 1, 2, 10, 16)
    out, _ = flashmsa.hf.flash_msa_attention(attention, q, k, v, None, scaling=0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25).transpose(1, 2)
    torch.testing.assert_close(out, expected)


# ---- Generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 30])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_with_a_cache_equals_one_pass(cache: str, padding: int, device: str) -> None:
    """A static cache has room for keys that are not there yet."""
    from transformers import DynamicCache, StaticCache

    model = twin(make_model(device=device)).eval()
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=333)
    ids, mask = tokens(2, 270, device=device), torch.ones(2, 270, dtype=torch.long, device=device)
    mask[1, :padding] = 0
    logits = []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for begin, end in ((0, 200), (200, 269), (269, 270)):
            output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=past, use_cache=True)
            logits.append(output.logits)
    assert error(torch.cat(logits, dim=1)[mask.bool()], whole[mask.bool()]) < 2e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(cache: str, device: str) -> None:
    model = make_model(device=device).eval()
    prompt = tokens(2, 200, device=device)
    expected, actual = (
        x.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation=cache, disable_compile=True)
        for x in (model, twin(model))
    )
    assert torch.equal(actual, expected)


# ---- The proxy loss -----------------------------------------------------------------------------------------------


def eager_kl(attention: m3.MiniMaxM3VLAttention, hidden: Tensor, cos: Tensor, sin: Tensor, chosen: Tensor) -> Tensor:
    """KL of a layer for one document, from the definition: hidden [1, S, C], chosen bool [Hp, S, S]."""
    shape = (1, hidden.shape[1], -1, attention.head_dim)
    with torch.no_grad():
        q = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
        q, k = m3.apply_rotary_pos_emb(q, k, cos, sin)
        group = attention.num_key_value_groups
        scores = q @ k.repeat_interleave(group, dim=1).transpose(2, 3) * attention.scaling
        each = chosen.repeat_interleave(q.shape[1] // chosen.shape[0], dim=0)
        teacher = scores[0].masked_fill(~each, -torch.inf).softmax(-1).unflatten(0, (chosen.shape[0], -1)).mean(1)
    indexer = attention.indexer
    q = indexer.q_norm(indexer.q_proj(hidden.detach()).view(shape)).transpose(1, 2)
    k = indexer.k_norm(indexer.k_proj(hidden.detach()).view(shape)).transpose(1, 2)
    q, k = m3.apply_rotary_pos_emb(q, k, cos, sin)
    student = (q @ k.transpose(2, 3) * indexer.head_dim**-0.5)[0].masked_fill(~chosen, -torch.inf).log_softmax(-1)
    pairs = torch.where(teacher > 0, teacher * (teacher.clamp(min=1e-30).log() - student), 0.0)
    return pairs.sum() / (chosen.shape[0] * chosen.shape[1])


@pytest.mark.parametrize("dense", [False, True])
def test_proxy_loss_is_the_kl_and_trains_the_indexer_alone(dense: bool, device: str) -> None:
    model = twin(make_model((SPARSE,), device))
    ids = tokens(1, 300, device=device)
    plain = step(model, ids)
    assert not any("indexer" in name for name in plain)

    proxy = flashmsa.hf.enable_proxy_loss(model, weight=0.5, dense=dense)
    inputs: list[Any] = []
    hook = attentions(model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs), with_kwargs=True
    )
    with recorded(model) as proxies:
        result = step(model, ids)
    hook.remove()

    causal = torch.ones(300, 300, dtype=torch.bool, device=device).tril()
    chosen = causal.expand(2, -1, -1)
    if not dense:
        blocks = flashmsa.hf.select_blocks(attentions(model)[0], proxies[0])[0]
        kept = torch.zeros(2, 300, 300 // BLOCK + 2, dtype=torch.bool, device=device)
        kept.scatter_(2, torch.where(blocks < 0, kept.shape[2] - 1, blocks).long(), True)
        chosen = kept[..., :-1].repeat_interleave(BLOCK, dim=2)[..., :300] & causal
    cos, sin = inputs[0]["position_embeddings"]
    kl = eager_kl(attentions(model)[0], inputs[0]["hidden_states"], cos, sin, chosen)
    assert error(proxy.layers[0].detach(), kl) < 1e-4
    assert kl > 0.01

    model.zero_grad()
    (0.5 * kl).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 4
    for name, value in expected.items():
        assert error(result[name], value) < 1e-4, name
    assert result["loss"] > plain["loss"] or dense
    if not dense:
        torch.testing.assert_close(result["loss"], plain["loss"] + 0.5 * proxy.layers[0].detach())
        for name, value in plain.items():
            if name != "loss":
                torch.testing.assert_close(result[name], value, msg=name)


def test_proxy_loss_falls_in_training() -> None:
    model = twin(make_model())
    proxy = flashmsa.hf.enable_proxy_loss(model)
    indexers = [p for name, p in model.named_parameters() if "indexer" in name]
    optimizer = torch.optim.Adam(indexers, lr=1e-2)
    ids, values = tokens(2, 300), []
    for _ in range(12):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        values.append(proxy.loss.item())
    assert values[-1] < 0.7 * values[0]


def test_proxy_loss_of_a_padded_batch_counts_its_tokens_alone() -> None:
    model = twin(make_model((SPARSE,)))
    proxy = flashmsa.hf.enable_proxy_loss(model)
    row = tokens(1, 200)
    model(row)
    alone = proxy.layers[0]
    ids = torch.zeros(2, 300, dtype=torch.long)
    ids[:, :200] = row
    model(ids, attention_mask=(ids > 0).long())
    torch.testing.assert_close(proxy.layers[0], alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("over_ranks", [False, True])
def test_proxy_loss_counts_no_rows_behind_a_pack(over_ranks: bool) -> None:
    from flashmsa.context_parallel import ContextParallel, make_plan

    model = twin(make_model((SPARSE,)))
    proxy = flashmsa.hf.enable_proxy_loss(model)
    ids, positions = tokens(1, 300), torch.cat((torch.arange(150), torch.arange(50), torch.arange(100)))[None]
    model(ids[:, :200], position_ids=positions[:, :200])
    alone = proxy.layers[0]
    if over_ranks:
        context = ContextParallel(make_plan([0, 150, 200], 1, total=300))
        shards = context.shard(ids, 1), context.shard(positions, 1)
        model(shards[0], position_ids=shards[1], use_cache=False, context_parallel=context)
    else:
        ends = torch.tensor([0, 150, 200], dtype=torch.int32)
        model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    torch.testing.assert_close(proxy.layers[0], alone, rtol=1e-5, atol=0)


def test_proxy_loss_of_nothing_but_padding_is_0() -> None:
    model = twin(make_model((SPARSE,)))
    proxy = flashmsa.hf.enable_proxy_loss(model)
    model(tokens(1, 100), attention_mask=torch.zeros(1, 100, dtype=torch.long))
    assert proxy.layers[0] == 0


def test_proxy_loss_shares_a_step_as_the_trainer_does() -> None:
    """Two batches with num_items_in_batch give the gradients of one batch of both."""
    model = twin(make_model())
    flashmsa.hf.enable_proxy_loss(model)
    ids = tokens(2, 150)
    expected = step(model, ids)
    items = torch.tensor(2 * 149)
    model.zero_grad()
    for row in ids:
        model(row[None], labels=row[None], num_items_in_batch=items).loss.backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert error(parameter.grad, expected[name]) < 2e-5, name


def test_proxy_loss_is_for_training() -> None:
    model = twin(make_model()).eval()
    proxy = flashmsa.hf.enable_proxy_loss(model)
    ids = tokens(1, 100)
    evaluated = model(ids, labels=ids).loss
    assert not proxy.layers
    with pytest.raises(RuntimeError, match="no KL value yet"):
        _ = proxy.loss
    proxy.disable()
    model.train()
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, evaluated)
    loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "indexer" in name)
    flashmsa.hf.enable_proxy_loss(model)
    with pytest.raises(ValueError, match="enabled for this model already"):
        flashmsa.hf.enable_proxy_loss(model)


def test_proxy_loss_of_a_copied_model_is_its_own() -> None:
    model = twin(make_model())
    proxy = flashmsa.hf.enable_proxy_loss(model)
    ids = tokens(1, 100)
    model(ids, labels=ids)
    other, layers = copy.deepcopy(model), dict(proxy.layers)
    assert any("indexer" in name for name in step(other, ids))
    assert all(proxy.layers[i] is kl for i, kl in layers.items())
    proxy.disable()
    assert any("indexer" in name for name in step(other, ids))
    assert not any("indexer" in name for name in step(model, ids))


def test_proxy_loss_refuses_reentrant_checkpointing() -> None:
    model = twin(make_model())
    flashmsa.hf.enable_proxy_loss(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    ids = tokens(1, 100)
    with pytest.raises(ValueError, match="reentrant"):
        model(ids, labels=ids, use_cache=False)


def test_proxy_loss_needs_a_sparse_layer() -> None:
    with pytest.raises(ValueError, match="no layer of type 'minimax_m3_sparse'"):
        flashmsa.hf.enable_proxy_loss(make_model((DENSE,)))
