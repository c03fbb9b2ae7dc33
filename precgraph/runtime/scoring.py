"""token_logprobs: what a trainer calls to score the tokens of a batch."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from precgraph.errors import InputError
from precgraph.runtime.checkpointing import checkpointed
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.contexts import PackedContext
from precgraph.runtime.inputs import Packed, pack, require_values
from precgraph.runtime.logprobs import chosen_logprobs, logprobs_from_logits, require_temperature
from precgraph.runtime.sizes import filled

LOGPROB_ROWS = 512  # rows of logits that token_logprobs holds at a time


@overload
def token_logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = ..., position_ids: Tensor | None = ..., *,
    temperature: float | Tensor = ..., entropy: Literal[False] = ..., cu_seq_lens: Tensor | None = ...,
    rows: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def token_logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = ..., position_ids: Tensor | None = ..., *,
    temperature: float | Tensor = ..., entropy: Literal[True], cu_seq_lens: Tensor | None = ...,
    rows: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@torch.compiler.disable  # type: ignore[untyped-decorator]  # as the forward of a compiled model
def token_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    cu_seq_lens: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of ``input_ids [B, S]`` under a compiled causal language model.

    Returns fp32 ``[B, S - 1]``, whose entry ``t`` is log p(token ``t + 1`` | tokens up to ``t``) of the distribution
    after ``temperature``, over the full vocabulary, bit for bit what an engine reports for a token that it sampled.
    Entries that predict nothing (padding, the first token of a sequence) are 0. ``temperature`` is one number, or
    ``[B]``, one a row. With ``entropy``, also the entropies in nats. Logits are made %d rows at a time.

    A ``model`` compiled with ``mode="train"`` gives values with gradients, and is what a loss wants. A rollout
    (``mode="infer"``) has no backward: its values are the same bits without gradients, and torch's ``backward()`` on
    them fails ("does not require grad").

    ``rows [n]`` int64 asks for some entries only, such as those of the responses: flat indices into ``[B, S - 1]``. The
    result is then ``[n]``, bit for bit those entries, and no other row goes through lm_head. InputError for an index
    that predicts nothing.
    """
    compiled = _program_of(model)
    packed = pack(input_ids, attention_mask, position_ids, cu_seq_lens, model.config.get_text_config().vocab_size)
    divisors = _temperatures(temperature, packed)
    names = checkpointed(model, compiled.runner.program)
    hidden = compiled.hidden(packed.ids, packed.positions, PackedContext(packed.bounds), checkpoint=names)
    at = _predicting(packed, rows)
    scored = _scored(compiled, packed, hidden, at, divisors, entropy)
    out = packed.unpack(scored, at)[:, :-1] if rows is None else scored
    return (out[..., 0], out[..., 1]) if entropy else out[..., 0]


def _program_of(model: Any) -> Compiled:
    """What ``model`` carries; InputError for a model that is not compiled, or that a wrapper holds."""
    compiled: Compiled | None = getattr(model, "precgraph", None)
    if compiled is not None and compiled.trace.graph.causal_lm:
        return compiled
    if isinstance(getattr(getattr(model, "module", None), "precgraph", None), Compiled):  # DistributedDataParallel
        raise InputError(
            f"token_logprobs takes the compiled model itself, not the {type(model).__name__} around it",
            remedy="pass its .module; the wrapper's reducer is not entered so: with several ranks, average the "
            "gradients yourself between backward and step",
        )
    raise InputError(
        "token_logprobs needs a compiled causal language model", remedy="call precgraph.compile(model) first"
    )


def _scored(compiled: Compiled, packed: Packed, hidden: Tensor, at: Tensor, divisors: Tensor, entropy: bool) -> Tensor:
    """Log-probabilities of the tokens after those at ``at [n]``, with ``entropy`` entropies beside: ``[n, 1 or 2]``."""
    count = at.numel()
    if not count:  # lm_head has nothing to do; what is differentiated is still a function of the parameters
        return hidden[0, at].float()[:, : 1 + entropy]
    if missing := filled(count % LOGPROB_ROWS, at.device) - count % LOGPROB_ROWS:
        at = torch.cat([at, at[-1:].expand(missing)])
    targets = packed.ids[0, at + 1]

    def score(part: Tensor, ids: Tensor, divisor: Tensor) -> Tensor:
        if not entropy:
            return chosen_logprobs(compiled.logits(part), ids, divisor)[:, None]
        return torch.stack(logprobs_from_logits(compiled.logits(part), ids, divisor, entropy=True), -1)

    chunks = zip(*(x.split(LOGPROB_ROWS) for x in (at, targets, divisors[at])), strict=True)
    parts = [
        torch_checkpoint(score, hidden[:, r], i, d, use_reentrant=False, preserve_rng_state=False)
        if hidden.requires_grad
        else score(hidden[:, r], i, d)
        for r, i, d in chunks
    ]
    return torch.cat(parts)[:count]


def _predicting(packed: Packed, rows: Tensor | None) -> Tensor:
    """The packed tokens whose next token is to be scored: all that have one, or those of ``rows``."""
    device, count = packed.ids.device, packed.ids.shape[1]
    ends = torch.zeros(count, dtype=torch.bool, device=device)
    ends[torch.tensor(packed.bounds[1:], device=device) - 1] = True
    if rows is None:
        return (~ends).nonzero().flatten()
    height, width = packed.shape[0], packed.shape[1] - 1
    require_values("rows", rows)  # whoever calls may have no type checker
    if rows.dim() != 1 or rows.dtype != torch.int64 or not bool(((rows >= 0) & (rows < height * width)).all()):
        raise InputError(f"rows must be a vector of int64 indices into the {height} x {width} entries of the result")
    place = torch.full((height * (width + 1),), count, device=device)
    place[packed.where] = torch.arange(count, device=device)
    at = place[rows + rows // max(width, 1)]  # the result has a column less than the batch
    if not bool((~torch.cat([ends, ends.new_ones(1)]))[at].all()):
        raise InputError(
            "rows hold an index that predicts nothing: padding, or the last token of a sequence",
            remedy="an entry is named by the token before the one that it scores",
        )
    return at


def _temperatures(temperature: float | Tensor, packed: Packed) -> Tensor:
    """The temperature of every packed token, ``[T]`` fp32."""
    require_temperature(temperature)
    given = torch.as_tensor(temperature, dtype=torch.float32, device=packed.ids.device)
    rows, width = packed.shape
    if given.numel() not in (1, rows) or given.dim() > 1:
        raise InputError(f"temperature must be one number or one for each of the {rows} rows, not {list(given.shape)}")
    return given.expand(rows)[packed.where // width]


token_logprobs.__doc__ = (token_logprobs.__doc__ or "") % LOGPROB_ROWS
