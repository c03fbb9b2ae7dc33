"""Tiny models of every family that the tests run through: same structure as the real ones, a second to trace.

Widths are awkward: most are not multiples of 128, so that blocks are padded and projections straddle. Norm
weights and biases are random rather than ones and zeros, so that leaving one out changes the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCABULARY = 997
WINDOW = 100  # mistral's sliding window, shorter than the longest test sequences
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, tuple[type, Any, dict[str, Any]]] = {
    # Like SmolLM2: tied, hidden 192, and k and v of 96 columns beside q of 192.
    "llama": (LlamaConfig, LlamaForCausalLM, {
        "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }),
    # The heads together are wider than the hidden state.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {
        "hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "tie_word_embeddings": False,
    }),
    "mistral": (MistralConfig, MistralForCausalLM, {
        "hidden_size": 128, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 1,
        "sliding_window": WINDOW, "tie_word_embeddings": False,
    }),
}  # fmt: skip
CAUSAL_LMS = tuple(_FAMILIES)
_MORE: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {
        "hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2,
    }),
    "phi3": (Phi3Config, Phi3ForCausalLM, {
        "hidden_size": 128, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2,
    }),
    # Layers alternate between a window and none; a scale of attention that is not the head's width.
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {
        "hidden_size": 144, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 40,
    }),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {
        "hidden_size": 144, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    # More experts than select.min_features, whose rows (gate and up: 192) end within a block.
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {
        "hidden_size": 144, "moe_intermediate_size": 96, "intermediate_size": 224, "num_experts": 18,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "mlp_only_layers": [1],
    }),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {
        "hidden_size": 128, "intermediate_size": 160, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }),
}  # fmt: skip
_MORE["deepseek_v3"] = (DeepseekV3Config, DeepseekV3ForCausalLM, {
    "hidden_size": 128, "intermediate_size": 224, "moe_intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
})  # fmt: skip
# Queries through a latent, groups of experts; the Lite shape has neither.
_DEEPSEEK_V2: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 224, "moe_intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64,
    "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_MORE["deepseek_v2"] = (DeepseekV2Config, DeepseekV2ForCausalLM, _DEEPSEEK_V2)
_MORE["deepseek_v2_lite"] = (DeepseekV2Config, DeepseekV2ForCausalLM, {
    **_DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None,
})  # fmt: skip
MORE_LMS = tuple(_MORE)  # in tests/test_more_families.py, which asks less of each than the shared tests
_FAMILIES.update(_MORE)
# The same operators as a family above, in other layers: no RoPE in some, and OLMo 2 with windows.
_LIKE: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {
        "hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2,
        "no_rope_layers": [1, 0],
    }),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, {
        "hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip
LIKE_LMS = tuple(_LIKE)
_FAMILIES.update(_LIKE)
# What a checkpoint of them says, and no other family's does; of the tests that are about that alone.
_FAMILIES["glm4_moe"] = (Glm4MoeConfig, Glm4MoeForCausalLM, {  # a router's bias in fp32, as deepseek_v3
    "hidden_size": 128, "intermediate_size": 224, "moe_intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
})  # fmt: skip
_FAMILIES["qwen2_moe"] = (Qwen2MoeConfig, Qwen2MoeForCausalLM, {  # a window of 0 tokens, which means none
    "hidden_size": 128, "intermediate_size": 224, "moe_intermediate_size": 96, "num_experts": 8,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2,
})  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny causal language model, with ``changes``."""
    make, _, own = _FAMILIES[name]
    return make(**{**_COMMON, **own, **changes})


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """What the config.json of a checkpoint of it says."""
    return {**config(name, **changes).to_dict(), "architectures": [_FAMILIES[name][1].__name__]}


def causal_lm(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny bf16 causal language model with random weights: of ``CAUSAL_LMS`` or ``MORE_LMS``."""
    model = _model(name, changes)
    _randomise(model, seed)
    return model


def meta_lm(name: str, **changes: Any) -> PreTrainedModel:
    """The same model without weights, on the meta device."""
    with torch.device("meta"):
        return _model(name, changes)


def _model(name: str, changes: dict[str, Any]) -> PreTrainedModel:
    # Not model.to(bfloat16), which would round the fp32 RoPE frequencies too.
    model: PreTrainedModel = _FAMILIES[name][1]._from_config(config(name, **changes), dtype=torch.bfloat16)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as from_pretrained has it, whatever dtype is asked for
    model.train(False)
    return model


def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


# ------------------------------------------------------------------------------------ plain modules


class MLP(nn.Module):
    """Two linears with biases around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 200)
        self.act = nn.GELU()
        self.down = nn.Linear(200, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class MeanAbsNorm(nn.Module):
    """``weight * bf16(x / (mean |x| + eps))`` in fp32: a norm that no pattern knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide / (wide.abs().mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


class CustomNorm(nn.Module):
    """A residual block with a norm that must be kept as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = MeanAbsNorm(96)
        self.gate_proj = nn.Linear(96, 160, bias=False)
        self.up_proj = nn.Linear(96, 160, bias=False)
        self.down_proj = nn.Linear(160, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class MoE(nn.Module):
    """16 small experts, the best 4 by a router's softmax; all are computed, the others multiplied by zero."""

    experts, width, top = 16, 24, 4

    def __init__(self) -> None:
        super().__init__()
        self.route_proj = nn.Linear(64, self.experts, bias=False)
        self.up_proj = nn.Linear(64, self.experts * self.width, bias=False)
        self.down_proj = nn.Linear(self.experts * self.width, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.route_proj(x).float().softmax(-1)
        best, index = probabilities.topk(self.top, dim=-1)
        gate = torch.zeros_like(probabilities).scatter(-1, index, best).to(x.dtype)
        hidden = F.silu(self.up_proj(x)).view(*x.shape[:-1], self.experts, self.width) * gate.unsqueeze(-1)
        out: Tensor = x + self.down_proj(hidden.flatten(-2))
        return out


_MODULES: dict[str, tuple[type[nn.Module], int]] = {
    "mlp": (MLP, 96),
    "custom_norm": (CustomNorm, 96),
    "moe": (MoE, 64),
}
PLAIN_MODULES = tuple(_MODULES)


def plain_module(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tiny bf16 module, one of ``PLAIN_MODULES``, and example inputs ``[1, 12, features]``."""
    make, features = _MODULES[name]
    module = make()
    _randomise(module, seed)
    x = torch.randn(1, 12, features, generator=torch.Generator().manual_seed(seed + 1))
    return module.to(torch.bfloat16).eval(), (x.to(torch.bfloat16),)
