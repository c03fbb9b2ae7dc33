"""Attention as one opaque operator, which Hugging Face models reach under the name ``precgraph``.

``model.set_attn_implementation("precgraph")`` routes a model's attention to :func:`opaque_attention`. Under
``torch.export`` it stays one node; run eagerly it computes the reference attention, forward and backward, so that
a Hugging Face model and a compiled one can be compared bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precgraph.errors import UnsupportedModelError
from precgraph.ops import AttentionSpec

IMPLEMENTATION = "precgraph"
# Tensors that transformers hands through to attention functions and that say nothing new here.
_HARMLESS = ("position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "input_ids")


def _spec(q: Tensor, k: Tensor, scale: float, window: int, softcap: float, layer: int) -> AttentionSpec:
    return AttentionSpec(scale, window, softcap, layer, q.shape[2], k.shape[2], q.shape[3])


@torch.library.custom_op("precgraph::attention", mutates_args=())
def opaque_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, layer: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of every row of ``q [B, T, H, D]``, ``k, v [B, T, Hkv, D]``, each row one sequence.

    Returns the output ``[B, T, H·D]`` in q's dtype and the fp32 log-sum-exp ``[B·T, H]``.
    """
    from precgraph.lowering.reference.attention import attend_packed

    spec = _spec(q, k, scale, window, softcap, layer)
    out, lse = attend_packed(_pack(q), _pack(k), _pack(v), _bounds(q), spec)
    return out.view(*q.shape[:2], -1), lse


@opaque_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, layer: int) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, width = q.shape
    lse = q.new_empty((rows * tokens, heads), dtype=torch.float32)
    return q.new_empty((rows, tokens, heads * width)), lse


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    ctx.spec = _spec(q, k, *rest)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
    from precgraph.lowering.reference.attention import attend_packed_backward

    q, k, v, out, lse = ctx.saved_tensors
    grads = attend_packed_backward(
        _pack(dout), _pack(q), _pack(k), _pack(v), _pack(out), lse, _bounds(q), ctx.spec
    )  # fmt: skip
    return (*(g.view_as(t) for g, t in zip(grads, (q, k, v), strict=True)), None, None, None, None)


opaque_attention.register_autograd(_backward, setup_context=_setup)


def _pack(x: Tensor) -> Tensor:
    return x.reshape(1, -1, *x.shape[2:])


def _bounds(q: Tensor) -> list[int]:
    return [row * q.shape[1] for row in range(q.shape[0] + 1)]


def _huggingface_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface (5.x): ``q [B, H, T, D]``, returns ``[B, T, H, D]``."""
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention with sinks (a learned logit a head) has no exact kernel",
            remedy="GPT-OSS is not served: its sinks, and its experts with biases and interleaved, transposed weights",
        )
    if dropout or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention with dropout or without a causal mask has no exact kernel"
        )
    extra = [k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in _HARMLESS]
    if extra:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {extra[0]!r} to attention, which has no exact kernel"
        )
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    width = v.shape[-1]
    if width > q.shape[-1]:
        raise UnsupportedModelError(f"{type(module).__name__}: values wider than queries have no exact kernel")
    if width < q.shape[-1]:  # latent attention: columns of zeros change no other one
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))
    out, _ = opaque_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), scale, int(sliding_window or 0), float(softcap or 0.0),
        int(getattr(module, "layer_idx", 0)),
    )  # fmt: skip
    out = out.unflatten(-1, (q.shape[1], q.shape[3]))
    return out if width == q.shape[-1] else out[..., :width], None


def _no_mask(*args: Any, mask_function: Any = None, **_: Any) -> None:
    """Causality and windows are in the operator, padding is removed before the program runs.

    transformers composes masks out of functions; what is not causality or a window would be lost here.
    """
    if mask_function is not None and not _known(mask_function):
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise UnsupportedModelError(f"attention with the mask {name} has no kernel: only causal masks and windows have")


# Windows and bounds of packed sequences are in the program, padding is removed before it; and what combines them.
_MASKS = ("causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function", "padding_mask_function")
_COMBINED = ("and_masks", "add_offsets_to_mask_function")


def _known(mask_function: Any) -> bool:
    """Whether a mask function of transformers says nothing that the program does not say itself."""
    name = getattr(mask_function, "__qualname__", "").partition(".")[0]
    if name in _MASKS:
        return True
    cells = [c.cell_contents for c in (getattr(mask_function, "__closure__", None) or ())]
    parts = [f for cell in cells for f in (cell if isinstance(cell, tuple | list) else (cell,)) if callable(f)]
    return name in _COMBINED and bool(parts) and all(map(_known, parts))


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _huggingface_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)
