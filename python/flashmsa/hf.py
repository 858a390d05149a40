"""MiniMax-M3 of Hugging Face transformers (``minimax_m3_vl``) on flashmsa, training of its indexer included.

    import flashmsa.hf
    flashmsa.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashmsa")
    proxy = flashmsa.hf.enable_proxy_loss(model)      # optional: out.loss then trains the indexer as well

What reaches the library. The mask function states which rows belong together as *fragments*, once per forward pass of
the model: an int32 tensor [1, 1, 4, n] whose rows are q_begin, q_end, k_begin, k_end over the flattened batch. It has
four dimensions because transformers hands such masks on untouched. The indexer returns its queries and keys instead of
a selection, since the library selects without a [tokens, tokens] tensor of scores. The attention function brings the
two together.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .functional import _batch_offsets, flash_msa_varlen_func
from .module import apply_rotary

if TYPE_CHECKING:
    from .context_parallel import ContextParallel

NAME = "flashmsa"


class Proxies(NamedTuple):
    """Queries [B, Sq, Hp, Dp] and keys [B, Sk, 1, Dp] of the indexer, from which the library selects."""

    q: Tensor
    k: Tensor


# ---- Fragments ----------------------------------------------------------------------------------------------------


def _padded_fragments(visible: Tensor, q_length: int, q_offset: int | Tensor) -> Tensor:
    """One fragment for each row of the batch, its run of visible keys and the queries among them: int32 [4, B].

    Args:
        visible: bool [B, Sk], the keys that are not padding; one run in each row.
        q_length: queries of a row.
        q_offset: the key slot of a row's first query.
    """
    batch, k_length = visible.shape
    count = visible.sum(dim=1)
    k_begin = visible.to(torch.uint8).argmax(dim=1)
    k_end = k_begin + count
    row = torch.arange(batch, device=visible.device)
    q_begin, q_end = ((k - q_offset).clamp(0, q_length) + row * q_length for k in (k_begin, k_end))
    return torch.stack((q_begin, q_end, k_begin + row * k_length, k_end + row * k_length)).to(torch.int32)


def _packed_fragments(first: Tensor, inside: Tensor | None = None) -> Tensor:
    """One fragment for each document of a pack: int32 [4, documents].

    Args:
        first: bool [B, S], the first token of every document; a row of the batch begins one.
        inside: bool [B, S], the tokens that lie in a document, one run for each; default all.
    """
    first = first.flatten()
    inside = torch.ones_like(first) if inside is None else inside.flatten()
    rows = torch.arange(first.numel(), device=first.device)
    # In compiled code the number of documents may not depend on data: as many as tokens, the last ones empty.
    documents = first.numel() if torch.compiler.is_compiling() else int(first.sum())
    document = (first.cumsum(0) - 1).clamp(min=0)
    begin = rows.new_full((documents,), first.numel())
    begin = begin.scatter_reduce(0, document, torch.where(inside, rows, first.numel()), "amin")
    end = begin + rows.new_zeros(documents).scatter_add(0, document, inside.to(rows.dtype))
    return torch.stack((begin, end, begin, end)).to(torch.int32)


def _document_starts(mask_function: Callable[..., Tensor], batch: int, length: int, device: torch.device) -> Tensor:
    """The first token of every document, bool [B, S], as the mask function of transformers tells it.

    A token begins a document if it may not see its predecessor. Documents that are causal inside and see nothing of
    each other are all that the library computes, so whether a token sees the first and not the next is asked as well.
    """
    rows = torch.arange(batch, device=device)[:, None]
    token = torch.arange(length, device=device).expand(batch, length)

    def sees(key: Tensor) -> Tensor:
        return mask_function(rows, torch.zeros_like(rows), token, key).expand(batch, length)

    starts = ~sees((token - 1).clamp(min=0))
    starts[:, 0] = True
    begin = torch.where(starts, token, 0).cummax(dim=1).values
    following = (token + 1).clamp(max=length - 1)
    _require(
        sees(begin).all() & ~(sees(following) & (following > token)).any(),
        "flashmsa computes causal attention within documents; this model's mask is of another kind (a sliding window, "
        "chunks or tokens that see later ones): use attn_implementation='sdpa'",
    )
    return starts


def _require(condition: Tensor, sentence: str) -> None:
    """Raises ValueError with the sentence unless the 0-dim bool tensor is true; in compiled code, an assertion."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, sentence)
    elif not condition:
        raise ValueError(sentence)


def flash_msa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of ``attn_implementation="flashmsa"``, in the form of transformers' mask interface.

    Args:
        batch_size: rows of the batch.
        q_length: queries of a row.
        kv_length: keys of a row; more than ``q_length`` with a cache.
        q_offset: key slot of the first query.
        kv_offset: must be 0.
        mask_function: which pairs attend; causal, or causal within packed documents.
        attention_mask: bool [batch, keys so far], False on padding. Padding lies on the left or on the right of a row;
            blocks of keys are counted from the first token that is not padding.
        device: where the fragments are wanted.

    Returns:
        int32 [1, 1, 4, fragments], or None where every query sees all keys up to its own slot.

    Raises:
        ValueError: a mask with gaps, or one that is not causal attention within documents.

    Example:
        >>> import torch
        >>> from flashmsa.hf import flash_msa_mask
        >>> padding = torch.tensor([[True, True, False], [True, True, True]])
        >>> flash_msa_mask(2, 3, 3, attention_mask=padding)[0, 0].tolist()
        [[0, 3], [2, 6], [0, 3], [2, 6]]
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(kv_offset, int) and kv_offset != 0:
        raise ValueError(f"kv_offset is {kv_offset}; flashmsa needs a cache that keeps all keys (not a sliding one)")
    if mask_function is not None and mask_function is not causal_mask_function:
        if attention_mask is not None or q_length != kv_length:
            raise ValueError(
                "the attention mask and the packing of documents are both given, or packed documents with a cache; "
                "flashmsa takes packed documents alone (position_ids that restart, or cu_seq_lens_q and cu_seq_lens_k)"
            )
        starts = _document_starts(mask_function, batch_size, q_length, torch.device(device))
        return _packed_fragments(starts)[None, None]
    whole = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if attention_mask is None and whole:
        return None
    slots = torch.arange(kv_length, device=device)
    visible = (slots < q_offset + q_length).expand(batch_size, -1)
    if attention_mask is not None:
        missing = kv_length - attention_mask.shape[1]
        visible = visible & torch.nn.functional.pad(attention_mask.to(device, torch.bool), (0, missing))
        if whole and not torch.compiler.is_compiling() and bool(visible.all()):
            return None
        runs = (visible[:, 1:] & ~visible[:, :-1]).sum(dim=1) + visible[:, 0]
        _require(
            (runs <= 1).all(),
            "attention_mask has a gap; the tokens of a row must be consecutive, with padding before or after them",
        )
    return _padded_fragments(visible, q_length, q_offset)[None, None]


class _Recent(threading.local):
    """What this thread found last in which tensors: the layers of a model are all given the same ones."""

    def __init__(self) -> None:
        self.tensors: tuple[weakref.ref[Tensor], ...] = ()
        self.key: tuple[Any, ...] | None = None
        self.found: Any = None


_recent = _Recent()


def _once(look: Callable[..., Any], tensors: tuple[Tensor | None, ...], *sizes: int) -> Any:
    """``look(*tensors, *sizes)``, which synchronises; so it is done once for the same tensors, not once for a layer."""
    present = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or any(x.is_inference() for x in present):
        return look(*tensors, *sizes)  # Inference tensors do not tell whether they were written to.
    key = (look, sizes, tuple(None if x is None else x._version for x in tensors))
    same = len(present) == len(_recent.tensors) and all(
        seen() is x for seen, x in zip(_recent.tensors, present, strict=True)
    )
    if not same or key != _recent.key:
        found = look(*tensors, *sizes)
        _recent.tensors, _recent.key, _recent.found = tuple(map(weakref.ref, present)), key, found
    return _recent.found


def _cut_at_restarts(
    position_ids: Tensor, attention_mask: Tensor | None, batch: int, q_length: int, k_length: int
) -> Tensor | None:
    """The fragments of a mask (None: each row is one), cut where position_ids [1 or B, S] do not go on by one.

    transformers looks for packed documents only where neither a cache nor a mask is passed, and models make a cache
    unless told not to. Padding is no document: its positions tell nothing.
    """
    fragments = None if attention_mask is None else attention_mask[0, 0]
    if torch.compiler.is_compiling() and fragments is not None and fragments.shape[1] == batch * q_length:
        return fragments  # With a fragment for each token, transformers has found the documents already.
    apart = torch.ones_like(position_ids, dtype=torch.bool)
    apart[:, 1:] = position_ids.diff(dim=1) != 1
    apart = apart.expand(batch, -1).flatten()
    begins = torch.zeros(apart.numel() + 1, dtype=torch.bool, device=apart.device)
    if fragments is None:
        begins[:-1:q_length] = True
        inside = torch.ones_like(apart)
    else:
        bounds = fragments[:2].to(apart.device, torch.long)
        step = torch.ones_like(bounds[0])
        edges = (
            torch.zeros_like(begins, dtype=torch.long).scatter_add(0, bounds[0], step).scatter_add(0, bounds[1], -step)
        )
        begins = begins.index_fill(0, bounds[0], True)
        inside = edges.cumsum(0)[:-1] > 0
    begins = begins[:-1] & inside
    restarts = apart & inside & ~begins
    if q_length != k_length:
        _require(
            ~restarts.any(),
            "position_ids restart, and there are more keys than queries; flashmsa takes packed documents whole, "
            "without a static cache and without earlier keys in another one",
        )
        return fragments
    if not torch.compiler.is_compiling() and not restarts.any():
        return fragments
    return _packed_fragments(restarts | begins, inside)


def _covers_all_rows(attention_mask: Tensor, rows: int) -> Tensor:
    """Whether every row lies in a fragment of the mask: a 0-dim bool tensor, on the host where there is data."""
    covers = (attention_mask[0, 0, 1] - attention_mask[0, 0, 0]).sum() == rows
    return covers if torch.compiler.is_compiling() else covers.cpu()


# ---- The proxy loss -----------------------------------------------------------------------------------------------


class ProxyLoss:
    """The proxy (KL) loss of a model, made by :func:`enable_proxy_loss`.

    Attributes:
        weight: factor of the loss.
        dense: whether sparse layers attend to the whole prefix, for the warm-up of the indexer.
        layers: ``{layer index: KL}`` of the last forward pass, empty unless it was in training mode with gradients
            enabled; 0-dim fp32 tensors with a graph, in nats per token and indexer head.
    """

    def __init__(self, model: nn.Module, weight: float, dense: bool) -> None:
        self.weight = weight
        self.dense = dense
        self.layers: dict[int, Tensor] = {}
        self._open = False
        self._indexers = [module for module in model.modules() if _is_indexer(module)]
        if not self._indexers:
            raise ValueError(
                f"{type(model).__name__} has no layer of type 'minimax_m3_sparse' (config.layer_types); the proxy loss "
                "trains the indexers of such layers"
            )
        if any(getattr(indexer, _ATTRIBUTE, None) is not None for indexer in self._indexers):
            raise ValueError("the proxy loss is enabled for this model already; disable() the first one")
        for indexer in self._indexers:
            setattr(indexer, _ATTRIBUTE, self)
        self._hooks = (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._finish, with_kwargs=True, always_call=True),
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model: they have no last pass, and a tensor with a graph cannot be copied."""
        return {**self.__dict__, "layers": {}}

    @property
    def loss(self) -> Tensor:
        """``weight`` times the sum of ``layers``: a 0-dim fp32 tensor with a graph, for a training loop of your own.

        Raises:
            RuntimeError: no forward pass in training mode so far.
        """
        if not self.layers:
            raise RuntimeError("no KL value yet: run the model in training mode (model.train()) with gradients enabled")
        values = list(self.layers.values())
        return self.weight * torch.stack([value.to(values[0].device) for value in values]).sum()

    def disable(self) -> None:
        """Takes the loss away from the model again."""
        for hook in self._hooks:
            hook.remove()
        for indexer in self._indexers:
            setattr(indexer, _ATTRIBUTE, None)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layers = {}
        self._open = True

    def _add(self, layer: int, kl: Tensor) -> None:
        """Called by the attention of a layer. Activation checkpointing calls it again in the backward pass, when the
        forward pass of the model is over: the second value is the first again, and is dropped."""
        if self._open:
            self.layers[layer] = kl

    def _finish(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        self._open = False
        if output is None or not (model.training and torch.is_grad_enabled()):
            return output
        if not self.layers:
            raise ValueError(
                "the proxy loss is enabled, but no layer computed it: the model needs attn_implementation='flashmsa' "
                "and, for activation checkpointing, gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        loss = getattr(output, "loss", None)
        if loss is not None:
            output.loss = loss + _share_of_step(kwargs) * self.loss.to(loss.device)
        return output


def _share_of_step(kwargs: dict[str, Any]) -> float | Tensor:
    """What part of an optimizer step this batch is, as the model's own loss counts it: transformers' trainer divides by
    num_items_in_batch, the labels of all batches that it accumulates."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or labels is None:
        return 1.0
    if kwargs.get("context_parallel") is not None:
        # The KL's divisor is the whole pack's already, so the pack's part of the step is wanted, not this rank's.
        shifted = kwargs.get("shift_labels", labels)
        pack: Tensor = kwargs["context_parallel"].sum((shifted != -100).sum())
        return pack / torch.as_tensor(items, device=labels.device)
    share: Tensor = (labels[..., 1:] != -100).sum() / torch.as_tensor(items, device=labels.device)
    return share


def enable_proxy_loss(model: nn.Module, weight: float = 1.0, *, dense: bool = False) -> ProxyLoss:
    """Lets the proxy (KL) loss train the indexers of a model on flashmsa. Nothing in transformers does: a selection has
    no gradient.

    From here on, a forward pass in training mode with gradients enabled adds ``weight`` times the sum of the layers' KL
    to the ``loss`` of its output, where it has one. The indexers read the layers' inputs detached, so this loss trains
    them alone, and every other gradient stays what it was. With ``num_items_in_batch`` (the trainer's gradient
    accumulation) the loss is scaled as the model's own is.

    Args:
        model: the model whose forward pass returns the loss, with ``attn_implementation="flashmsa"``.
        weight: factor of the loss.
        dense: warm-up: the sparse layers attend to the whole prefix, and the indexers learn from all of it. The
            attribute of the same name of the result may be changed at any time.

    Returns:
        The handle: values of the last pass, ``disable()``.

    Raises:
        ValueError: no layer with an indexer; enabled already. In a forward pass: reentrant activation checkpointing,
            which would drop the gradient.

    Example:
        >>> import torch
        >>> import flashmsa.hf
        >>> from transformers import MiniMaxM3VLTextConfig, MiniMaxM3VLForCausalLM
        >>> flashmsa.hf.register()
        >>> config = MiniMaxM3VLTextConfig(
        ...     vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=16, index_n_heads=1, index_head_dim=16, index_block_size=16, index_topk_blocks=2,
        ...     layer_types=["minimax_m3_sparse"], mlp_layer_types=["dense"], bos_token_id=None, eos_token_id=None)
        >>> model = MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="flashmsa").train()
        >>> proxy = flashmsa.hf.enable_proxy_loss(model)
        >>> ids = torch.randint(64, (1, 100))
        >>> model(ids, labels=ids).loss.backward()
        >>> proxy.layers[0].item() > 0
        True
    """
    return ProxyLoss(model, weight, dense)


# ---- The indexer --------------------------------------------------------------------------------------------------

_ATTRIBUTE = "_flashmsa_proxy_loss"


def _is_indexer(module: nn.Module) -> bool:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    return isinstance(module, MiniMaxM3VLIndexer)


def _proxy_loss_of(indexer: nn.Module) -> ProxyLoss | None:
    """The loss that this pass through the indexer's layer computes, if any."""
    return getattr(indexer, _ATTRIBUTE, None) if indexer.training and torch.is_grad_enabled() else None


def _proxies(
    indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any
) -> Proxies:
    """The indexer's queries and keys as its own forward computes them, from hidden_states [B, Sq, hidden]."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and _proxy_loss_of(indexer) is not None):
        hidden_states = hidden_states.detach()
        cos, sin = (x[..., : indexer.head_dim] for x in position_embeddings)
        q = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(-1, (-1, indexer.head_dim)))
        k = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(-1, (-1, indexer.head_dim)))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if past_key_values is not None:
            k = past_key_values.layers[indexer.layer_idx].update_index(k.transpose(1, 2)).transpose(1, 2)
    return Proxies(q, k)


def _patched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An indexer's forward that returns :class:`Proxies` under flashmsa, and is itself under any other attention."""

    @functools.wraps(forward)
    def patched(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        position_ids: Tensor,
    ) -> Any:
        if self.config._attn_implementation != NAME:
            return forward(self, hidden_states, position_embeddings, past_key_values, position_ids)
        return _proxies(self, hidden_states, position_embeddings, past_key_values)

    return patched


# ---- Attention ----------------------------------------------------------------------------------------------------


def _pack(x: Tensor) -> Tensor:
    """[B, heads, S, dim] to [B * S, heads, dim]; a view where memory allows."""
    return x.transpose(1, 2).flatten(0, 1)


def _check_mask(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and (attention_mask.dtype != torch.int32 or attention_mask.shape[:3] != (1, 1, 4)):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and type {attention_mask.dtype}; flashmsa takes "
            "[batch, tokens], 0 on padding, or none; not a mask over pairs of tokens"
        )


def _offsets_of_pack(
    cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, attention_mask: Tensor | None, query: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The documents that cu_seq_lens_q and cu_seq_lens_k tell of, int32 [documents + 1] each; None without them."""
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing; packed documents need cu_seq_lens_q and cu_seq_lens_k")
    batch, _, q_length, _ = query.shape
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q was given with a batch of {batch}; packed documents lie in one row")
    if attention_mask is not None:
        _require(
            _once(_covers_all_rows, (attention_mask,), q_length),
            "attention_mask has padding, and cu_seq_lens_q is given; leave out the mask, and let the last document of "
            "cu_seq_lens_q and cu_seq_lens_k end where the padding begins",
        )
    return cu_seq_lens_q.to(query.device, torch.int32), cu_seq_lens_k.to(query.device, torch.int32)


def _bounds(
    attention_mask: Tensor | None, position_ids: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Fragments of queries and of keys as the library's functions take them: [n + 1] offsets or [2, n] bounds."""
    (batch, _, q_length, _), k_length, device = query.shape, key.shape[2], query.device
    fragments = None if attention_mask is None else attention_mask[0, 0]
    if position_ids is not None and position_ids.dim() == 2 and q_length > 1:
        fragments = _once(_cut_at_restarts, (position_ids, attention_mask), batch, q_length, k_length)
    if fragments is not None:
        fragments = fragments.to(device)
        return fragments[:2], fragments[2:]
    if q_length == k_length:
        offsets = _batch_offsets(batch, q_length, device)
        return offsets, offsets
    return _batch_offsets(batch, q_length, device), _batch_offsets(batch, k_length, device)


def flash_msa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    block_indices: Proxies | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of ``attn_implementation="flashmsa"``, in the form of transformers' attention interface.

    Layers with an indexer run sparse; causal layers without one run dense; layers that are not causal (a vision tower)
    are left to sdpa.

    Args:
        module: the attention layer.
        query: [B, Hq, Sq, D].
        key, value: [B, Hkv, Sk, D].
        attention_mask: the result of :func:`flash_msa_mask`.
        scaling: factor of the scores; default D^-1/2.
        dropout: must be 0.
        is_causal: default ``module.is_causal``.
        block_indices: what the indexer returned.
        position_ids: [1 or B, Sq]; positions that do not go on by one mark packed documents, except within padding.
        cu_seq_lens_q, cu_seq_lens_k: int32 [documents + 1], packed documents in a batch of one row. Rows behind the
            last one are padding; a mask may not have any. position_ids are not looked at.
        context_parallel: the pack is spread over ranks, and the tensors hold the rows of this one, in a batch of one
            row. An argument of the model's forward, like the two before. It knows the documents; masks are ignored.

    Returns:
        ``(out, None)``, out [B, Sq, Hq, D]. Rows of padding are 0.

    Raises:
        ValueError: dropout, a sliding window, a mask over pairs, a selection instead of proxies, packed documents with
            earlier keys in a cache, one of cu_seq_lens_q and cu_seq_lens_k alone, or both with a mask that has padding.

    Example:
        >>> import torch
        >>> from flashmsa.hf import flash_msa_attention
        >>> layer = torch.nn.Module()
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> flash_msa_attention(layer, q, k, v, None)[0].shape
        torch.Size([1, 10, 2, 16])
    """
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
        )
    if dropout != 0.0:
        raise ValueError(f"dropout is {dropout}; flashmsa has none: set config.attention_dropout = 0")
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is {kwargs[name]}; flashmsa computes plain causal attention")
    if context_parallel is not None:
        return _attend_over_ranks(module, query, key, value, scaling, block_indices, context_parallel)
    batch, heads, q_length, dim = query.shape
    k_length = key.shape[2]
    _check_mask(attention_mask)
    packed = _offsets_of_pack(cu_seq_lens_q, cu_seq_lens_k, attention_mask, query)
    cu_q, cu_k = packed or _bounds(attention_mask, position_ids, query, key)
    q, k, v = _pack(query), _pack(key), _pack(value)
    if block_indices is None:
        out, _ = ops.forward(q, k, v, None, cu_q, cu_k, k.shape[1], 0, 128, scaling or 0.0, k_length)
        return out.view(batch, q_length, heads, dim), None
    if not isinstance(block_indices, Proxies):
        raise ValueError("block_indices is a selection; flashmsa selects by itself: call flashmsa.hf.register()")
    indexer: Any = module.indexer
    proxy_loss = _proxy_loss_of(indexer)
    out, kl = flash_msa_varlen_func(
        q,
        k,
        v,
        block_indices.q.flatten(0, 1),
        block_indices.k.flatten(0, 1),
        cu_q,
        cu_k,
        q_length,
        k_length,
        0 if proxy_loss is not None and proxy_loss.dense else indexer.topk_blocks,
        scaling,
        block_size=indexer.block_size,
        local_blocks=indexer.local_blocks,
        kl_value=proxy_loss is not None,
        return_kl=True,
    )
    if proxy_loss is not None:
        if packed or cu_q.dim() == 2:
            # The library's mean is over all rows; those in no document hold no loss.
            rows = cu_q[-1] - cu_q[0] if cu_q.dim() == 1 else (cu_q[1] - cu_q[0]).sum()
            kl = kl * (batch * q_length / rows.clamp(min=1))
        proxy_loss._add(indexer.layer_idx, kl)
    return out.view(batch, q_length, heads, dim), None


def _attend_over_ranks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    proxies: Proxies | None,
    context: ContextParallel,
) -> tuple[Tensor, None]:
    from .context_parallel import attention

    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}; context_parallel takes a batch of one "
            "row, without a cache"
        )
    main = (_pack(query), _pack(key), _pack(value))
    if proxies is None:
        return attention(*main, None, None, context, 0, scaling)[None], None
    indexer = module.indexer
    proxy_loss = _proxy_loss_of(indexer)
    out, kl = attention(
        *main,
        proxies.q.flatten(0, 1),
        proxies.k.flatten(0, 1),
        context,
        0 if proxy_loss is not None and proxy_loss.dense else indexer.topk_blocks,
        scaling,
        block_size=indexer.block_size,
        local_blocks=indexer.local_blocks,
        kl_value=proxy_loss is not None,
        return_kl=True,
    )
    if proxy_loss is not None:
        # As in flash_msa_attention: the mean is over the rows in documents.
        kl = kl * (context.plan.total / max(context.plan.cu_seqlens[-1], 1))
        proxy_loss._add(indexer.layer_idx, kl)
    return out[None], None


def select_blocks(module: nn.Module, proxies: Proxies) -> Tensor:
    """The selection that an attention layer reads for unpadded rows, to look at.

    Args:
        module: a layer's attention, with an indexer.
        proxies: what the indexer returns under flashmsa, for instance to a forward hook.

    Returns:
        int32 [B, Hp, Sq, k], ascending block numbers, then -1.

    Example:
        >>> import torch
        >>> from flashmsa.hf import Proxies, select_blocks
        >>> layer = torch.nn.Module()
        >>> layer.indexer = torch.nn.Module()
        >>> layer.indexer.topk_blocks, layer.indexer.block_size, layer.indexer.local_blocks = 2, 16, 1
        >>> proxies = Proxies(torch.randn(1, 64, 2, 32), torch.randn(1, 64, 1, 32))
        >>> select_blocks(layer, proxies)[0, :, 20].tolist()
        [[0, 1], [0, 1]]
    """
    indexer: Any = module.indexer
    batch, q_length = proxies.q.shape[:2]
    q, k = (x.detach().flatten(0, 1) for x in proxies)
    indices: Tensor = ops.select(
        q,
        k,
        _batch_offsets(batch, q_length, q.device),
        _batch_offsets(batch, proxies.k.shape[1], k.device),
        indexer.topk_blocks,
        block_size=indexer.block_size,
        local_blocks=indexer.local_blocks,
    )
    return indices.view(-1, batch, q_length, indexer.topk_blocks).transpose(0, 1)


def register() -> None:
    """Makes ``attn_implementation="flashmsa"`` known to transformers. Calling it again changes nothing.

    Besides the attention and the mask function, two methods of transformers are wrapped, and act differently under this
    name alone: the indexer of MiniMax-M3 returns its queries and keys instead of a selection, and the check of the name
    does not go looking for a FlashAttention package, as it does for every other name that contains "flash".

    Raises:
        ImportError: transformers is missing, or older than 5.17, where the model came.

    Example:
        >>> import flashmsa.hf
        >>> flashmsa.hf.register()
        >>> from transformers import AttentionInterface
        >>> "flashmsa" in AttentionInterface()
        True
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.modeling_utils import PreTrainedModel
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer
    except ImportError as error:
        raise ImportError("flashmsa.hf needs transformers 5.17 or newer: pip install 'transformers>=5.17'") from error

    if NAME in AttentionInterface._global_mapping:
        return
    AttentionInterface.register(NAME, flash_msa_attention)
    AttentionMaskInterface.register(NAME, flash_msa_mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def patched_check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        return NAME if attn_implementation == NAME else check(self, attn_implementation, *args, **kwargs)

    setattr(PreTrainedModel, check.__name__, patched_check)
    setattr(MiniMaxM3VLIndexer, "forward", _patched(MiniMaxM3VLIndexer.forward))  # noqa: B010
