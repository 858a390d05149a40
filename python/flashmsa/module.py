"""``MSAttention``: an attention layer with MiniMax Sparse Attention inside, for models written in PyTorch.

The layer is the attention of MiniMax-M3: grouped-query attention with per-head RMS norms of queries and keys, rotary
embeddings on a part of each head, and an *indexer* (the proxy) that reads the layer's input through a detach, so that
only the KL loss trains it. Parameters carry the names they have there, hence the ``state_dict`` of a ``self_attn`` of
the Hugging Face model loads as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import _batch_offsets, check_integer, flash_msa_varlen_func

if TYPE_CHECKING:
    from .context_parallel import ContextParallel

Mode = Literal["sparse", "dense"]


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, computed in fp32, with the gain ``1 + weight``.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.

    Example:
        >>> import torch
        >>> from flashmsa.module import RMSNorm
        >>> RMSNorm(64)(torch.randn(3, 2, 64)).shape
        torch.Size([3, 2, 64])
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Sets the gain to 1, as after construction: for weights that were made on the meta device."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., dim] of any floating type; the result has its shape and type."""
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding.

    Args:
        positions: [...] positions of tokens in their documents, counted from 0.
        rotary_dim: channels of a head that are rotated, even.
        theta: base of the frequencies.
        dtype: type of the result; the angles are computed in fp32.

    Returns:
        ``(cos, sin)``, each [..., rotary_dim].

    Example:
        >>> import torch
        >>> from flashmsa.module import rotary_angles
        >>> cos, sin = rotary_angles(torch.arange(5), 8, 10000.0, torch.float32)
        >>> cos.shape
        torch.Size([5, 8])
    """
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first channels of every head, as many as ``cos`` has; the others pass.

    Args:
        x: [..., heads, dim].
        cos, sin: [..., rotary_dim], from :func:`rotary_angles`.

    Returns:
        A new tensor of the shape of ``x``.

    Example:
        >>> import torch
        >>> from flashmsa.module import apply_rotary, rotary_angles
        >>> cos, sin = rotary_angles(torch.arange(5), 8, 10000.0, torch.float32)
        >>> apply_rotary(torch.randn(5, 2, 16), cos, sin).shape
        torch.Size([5, 2, 16])
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1)


def document_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of every row of a pack in its document, found where ``cu_seqlens`` lives, without a synchronisation.

    Args:
        cu_seqlens: int32 [documents + 1], ascending from 0.
        total: rows of the pack. Rows beyond ``cu_seqlens[-1]`` count on from there.

    Returns:
        int64 [total].

    Example:
        >>> import torch
        >>> from flashmsa.module import document_positions
        >>> document_positions(torch.tensor([0, 2, 5], dtype=torch.int32), 5).tolist()
        [0, 1, 0, 1, 2]
    """
    rows = torch.arange(total, device=cu_seqlens.device)
    return rows - cu_seqlens[torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True) - 1]


class Indexer(nn.Module):
    """The proxy: small queries and keys that score all keys, one selection for each of its heads.

    Its input is detached: the KL loss trains these weights and nothing below them.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.q_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden_states`` [T, hidden] to ``(q_proxy, k_proxy)``, [T, heads, head_dim] and [T, kv_heads, head_dim]."""
        hidden_states = hidden_states.detach()
        cos, sin = cos[..., : self.head_dim], sin[..., : self.head_dim]
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


class MSAttention(nn.Module):
    """Causal self-attention over the key blocks that a trained proxy selects.

    Args:
        hidden_size: width of the layer's input and output.
        num_heads: main query heads.
        num_kv_heads: main key/value heads; divides ``num_heads``.
        head_dim: channels of a main head; 64 or 128 on CUDA. Default ``hidden_size / num_heads``.
        num_proxy_heads: proxy query heads, each with a selection of its own for ``num_heads / num_proxy_heads`` main
            heads. Default ``num_kv_heads``.
        num_proxy_kv_heads: proxy key heads; divides ``num_proxy_heads``.
        proxy_head_dim: channels of a proxy head. Default ``head_dim``.
        block_size: tokens in a key block; 64 or 128 on CUDA, at least 16 on the CPU.
        top_k: blocks that a (token, proxy head) reads, at least 1.
        local_blocks: newest blocks always read.
        init_blocks: first blocks always read.
        rotary_dim: channels of a head that the rotary embedding turns, even, at most ``head_dim``; 0 for none.
            Default half of ``head_dim``.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms of queries and keys.
        mode: ``"sparse"``, or ``"dense"`` for the warm-up: attention over the whole prefix, while the proxy learns from
            it. The attribute ``mode`` may be changed at any time.

    Raises:
        ValueError: head counts below 1 or that do not divide, a ``top_k`` below 1, ``rotary_dim`` out of range, an
            unknown ``mode``.

    Example:
        >>> import torch
        >>> from flashmsa.module import MSAttention
        >>> layer = MSAttention(64, num_heads=4, num_kv_heads=2, block_size=16, top_k=2)
        >>> out, kl = layer(torch.randn(2, 100, 64))
        >>> (out.square().mean() + kl).backward()
        >>> out.shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        num_proxy_heads: int | None = None,
        num_proxy_kv_heads: int = 1,
        proxy_head_dim: int | None = None,
        block_size: int = 128,
        top_k: int = 16,
        local_blocks: int = 1,
        init_blocks: int = 0,
        rotary_dim: int | None = None,
        rope_theta: float = 5e6,
        norm_eps: float = 1e-6,
        mode: Mode = "sparse",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("num_heads", num_heads), ("top_k", top_k)):
            check_integer(name, number)
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be positive")
        if head_dim is None and hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size is {hidden_size} and num_heads {num_heads}; give head_dim, or a multiple")
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        num_proxy_heads = num_kv_heads if num_proxy_heads is None else num_proxy_heads
        rotary_dim = head_dim // 4 * 2 if rotary_dim is None else rotary_dim
        _check_multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        _check_multiple("num_heads", num_heads, "num_proxy_heads", num_proxy_heads)
        _check_multiple("num_proxy_heads", num_proxy_heads, "num_proxy_kv_heads", num_proxy_kv_heads)
        if rotary_dim % 2 != 0 or not 0 <= rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and lie in 0 ... head_dim = {head_dim}")
        self.head_dim = head_dim
        self.block_size, self.top_k = block_size, top_k
        self.local_blocks, self.init_blocks = local_blocks, init_blocks
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.mode: Mode = _checked_mode(mode)

        def projection(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.q_proj = projection(hidden_size, num_heads * head_dim)
        self.k_proj = projection(hidden_size, num_kv_heads * head_dim)
        self.v_proj = projection(hidden_size, num_kv_heads * head_dim)
        self.o_proj = projection(num_heads * head_dim, hidden_size)
        self.q_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype)
        self.indexer = Indexer(
            hidden_size,
            num_proxy_heads,
            num_proxy_kv_heads,
            head_dim if proxy_head_dim is None else proxy_head_dim,
            norm_eps,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self) -> None:
        """Draws all weights anew, those of the indexer too, as construction does."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, RMSNorm)):
                module.reset_parameters()

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, top_k={self.top_k}, mode={self.mode!r}"

    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
        mode: Mode | None = None,
        kl_value: bool = True,
        context: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention and the loss that trains the proxy.

        Args:
            hidden_states: [B, S, hidden_size], or [T, hidden_size] with ``cu_seqlens`` or ``context``.
            cu_seqlens: int32 [documents + 1] on the device of ``hidden_states``, ascending from 0: offsets of packed
                documents, which do not see each other. Rows beyond the last offset get output 0.
            max_seqlen: no document has more tokens; 0 if unknown. A true bound saves scratch on CUDA.
            mode: for this call instead of the attribute.
            kl_value: False: ``kl`` is 0 and only carries the gradient, which saves a pass over the selected blocks.
            context: the pack is spread over ranks, and ``hidden_states`` holds the rows of this one. Not together with
                ``cu_seqlens``; ``kl`` is then this rank's part of the loss.

        Returns:
            ``(out, kl)``: out has the shape of ``hidden_states``; kl is a 0-dim fp32 tensor, the mean over tokens and
            proxy heads of the KL divergence in nats (fp64 for fp64 inputs). Its gradient reaches the indexer alone.

        Raises:
            ValueError: a shape that does not fit, or an unknown mode. TypeError: dtypes that do not fit.

        Example:
            >>> import torch
            >>> from flashmsa.module import MSAttention
            >>> layer = MSAttention(64, num_heads=4, num_kv_heads=2, block_size=16, top_k=2)
            >>> cu = torch.tensor([0, 30, 100], dtype=torch.int32)
            >>> out, kl = layer(torch.randn(100, 64), cu_seqlens=cu, max_seqlen=70)
            >>> out.shape, kl.shape
            (torch.Size([100, 64]), torch.Size([]))
        """
        if not isinstance(hidden_states, Tensor):
            raise TypeError(f"hidden_states is {type(hidden_states).__name__}; it must be a tensor")
        packed = cu_seqlens is not None or context is not None
        if hidden_states.dim() != (2 if packed else 3) or hidden_states.shape[-1] != self.q_proj.in_features:
            expected = "[T, hidden_size] for packed documents" if packed else "[B, S, hidden_size]"
            raise ValueError(
                f"hidden_states has shape {tuple(hidden_states.shape)}; it must be {expected}, with hidden_size "
                f"{self.q_proj.in_features}"
            )
        dense = _checked_mode(self.mode if mode is None else mode) == "dense"
        shape = hidden_states.shape
        if context is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and context were both given; the context knows the documents")
            positions = context.positions(hidden_states.device)
        elif cu_seqlens is None:
            batch, max_seqlen = shape[:2]
            positions = torch.arange(max_seqlen, device=hidden_states.device).repeat(batch)
            cu_seqlens = _batch_offsets(batch, max_seqlen, hidden_states.device)
            hidden_states = hidden_states.flatten(0, 1)
        else:
            positions = document_positions(cu_seqlens, shape[0])
        cos, sin = rotary_angles(positions, self.rotary_dim, self.rope_theta, hidden_states.dtype)
        k = apply_rotary(self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))), cos, sin)
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q_proxy, k_proxy = self.indexer(hidden_states, cos, sin)
        # Keys travel while the queries are projected, and their gradients while that is differentiated.
        keys = None if context is None else context.gather(k, v, k_proxy)
        q = apply_rotary(self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))), cos, sin)
        top_k = 0 if dense else self.top_k
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "local_blocks": self.local_blocks,
            "init_blocks": self.init_blocks,
            "kl_value": kl_value,
            "return_kl": True,
        }
        if keys is not None:
            out, kl = keys.attend(q, q_proxy, top_k, **options)
        else:
            assert cu_seqlens is not None
            out, kl = flash_msa_varlen_func(
                q, k, v, q_proxy, k_proxy, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, top_k, **options
            )
        return self.o_proj(out.flatten(-2)).view(shape), kl


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if divisor < 1 or value % divisor != 0:
        raise ValueError(f"{name} is {value} and {divisor_name} is {divisor}; {name} must be a multiple of the other")


def _checked_mode(mode: Mode) -> Mode:
    if mode not in ("sparse", "dense"):
        raise ValueError(f"mode is {mode!r}; it must be 'sparse' or 'dense'")
    return mode
