"""Decoders of texts, and adapters of them."""

from __future__ import annotations

import importlib

from torch import nn
from torch_packages import torchvision

from .parts import (
    GPT,
    GROUPED,
    REFUSED,
    TEXT,
    WORDS,
    Model,
    classes,
    hugging_face,
    model,
    texts,
    words,
)


@model("decoders", ("eager", "eager"), ("sdpa", "sdpa"))
def gpt2(attention):
    """The embedding and the last layer are tied."""
    return Model(hugging_face("GPT2LMHeadModel", "GPT2Config", attention, **GPT), (), texts())


@model("decoders")
def gpt2_with_cache():
    """The keys and values of each layer are outputs."""
    values = {**GPT, "use_cache": True}
    return Model(hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **values), (), texts())


@model("decoders")
def gpt2_left_padded():
    module = hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **GPT)
    return Model(module, (), texts(left=True))


@model("decoders")
def gpt2_checkpointed():
    module = hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **GPT)
    module.gradient_checkpointing_enable({"use_reentrant": True})
    return Model(module, (), texts())


@model("decoders")
def gpt_neo():
    """It alternates between local and global attention."""
    module = hugging_face(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=WORDS,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        window_size=4,
        attention_types=[[["global", "local"], 1]],
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return Model(module, (), texts())


@model("decoders")
def gpt_neox():
    module = hugging_face(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        "sdpa",
        **TEXT,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return Model(module, (), texts())


@model("decoders")
def gpt_j():
    values = {**GPT, "rotary_dim": 4, "n_inner": 24}
    return Model(hugging_face("GPTJForCausalLM", "GPTJConfig", **values), (), texts())


@model("decoders")
def opt():
    module = hugging_face(
        "OPTForCausalLM",
        "OPTConfig",
        "sdpa",
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=16,
        word_embed_proj_dim=8,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        use_cache=False,
    )
    return Model(module, (), texts())


@model("decoders", ("eager", "eager"), ("sdpa", "sdpa"))
def llama(attention):
    module = hugging_face("LlamaForCausalLM", "LlamaConfig", attention, **GROUPED)
    return Model(module, (), texts())


@model("decoders")
def llama_classification():
    """The last word before the padding decides, and its place depends on the words."""
    module = hugging_face(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        "sdpa",
        **GROUPED,
        num_labels=5,
        pad_token_id=0,
    )
    return Model(module, (), texts(classes()))


@model("decoders", *((name.lower(), name) for name in ("Qwen2", "Qwen3", "Gemma", "Gemma2")))
def grouped(name):
    values = {**GROUPED, "head_dim": 4} if name != "Qwen2" else GROUPED
    if name == "Gemma2":
        values = {**values, "sliding_window": 4, "num_hidden_layers": 2}
    return Model(hugging_face(f"{name}ForCausalLM", f"{name}Config", **values), (), texts())


@model(
    "decoders",
    *(
        (name.lower(), name)
        for name in (
            "Olmo",
            "Olmo2",
            "Cohere",
            "Granite",
            "Glm",
            "SmolLM3",
            "StableLm",
            "Starcoder2",
        )
    ),
)
def others(name):
    values = {**GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "Glm":
        values["head_dim"] = 4
    if name == "Starcoder2":
        values |= {"residual_dropout": 0.0, "embedding_dropout": 0.0}
    return Model(hugging_face(f"{name}ForCausalLM", f"{name}Config", "sdpa", **values), (), texts())


@model("decoders")
def gemma3():
    module = hugging_face(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "sdpa",
        **{**GROUPED, "num_hidden_layers": 2},
        head_dim=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Model(module, (), texts())


@model("decoders")
def mistral():
    """Its attention has a window."""
    module = hugging_face(
        "MistralForCausalLM", "MistralConfig", "sdpa", **GROUPED, sliding_window=4
    )
    return Model(module, (), texts(left=True))


@model("decoders")
def phi():
    module = hugging_face("PhiForCausalLM", "PhiConfig", "sdpa", **GROUPED)
    return Model(module, (), texts())


@model("decoders")
def phi3():
    module = hugging_face("Phi3ForCausalLM", "Phi3Config", "sdpa", **GROUPED, pad_token_id=0)
    return Model(module, (), texts())


@model("decoders", ("alibi", True), ("rotary", False))
def falcon(alibi):
    module = hugging_face(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        alibi=alibi,
        use_cache=False,
    )
    return Model(module, (), texts())


@model("decoders")
def mpt():
    module = hugging_face(
        "MptForCausalLM",
        "MptConfig",
        vocab_size=WORDS,
        d_model=16,
        n_layers=1,
        n_heads=2,
        max_seq_len=16,
        expansion_ratio=2,
        use_cache=False,
    )
    return Model(module, (), texts())


def _mixtral(experts: str) -> nn.Module:
    return hugging_face(
        "MixtralForCausalLM",
        "MixtralConfig",
        "sdpa",
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation=experts,
    )


@model("decoders")
def mixtral():
    """Two of four experts take each word; all experts compute all words."""
    return Model(_mixtral("batched_mm"), (), texts())


@model("decoders")
def mamba():
    module = hugging_face(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=WORDS,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=1,
        use_cache=False,
        use_mambapy=False,
    )
    return Model(module, (), {"input_ids": words(2, 4), "labels": words(2, 4)})


@model(
    "adapters", ("gpt2", "GPT2", {}), ("llama", "Llama", {}), ("dora", "Llama", {"use_dora": True})
)
def lora(name, options):
    """Only the adapters are trained."""
    torchvision()
    peft = importlib.import_module("peft")
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
    values = GPT if name == "GPT2" else GROUPED
    module = hugging_face(kind, f"{name}Config", "sdpa", **values)
    names = ["c_attn"] if name == "GPT2" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=names,
        lora_dropout=0.0,
        init_lora_weights=False,
        **options,
    )
    return Model(peft.get_peft_model(module, config).train().double(), (), texts())


@model("decoders", table=REFUSED)
def mixtral_loop():
    """The words of each expert are gathered: their number depends on values."""
    return Model(_mixtral("eager"), (), texts(), {"line": "for expert_idx in expert_hit"})


@model("decoders", table=REFUSED)
def bloom():
    """Its biases grow with the distance (ALiBi), and its activation is a function with a gradient
    of its own."""
    module = hugging_face(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=WORDS,
        hidden_size=16,
        n_layer=1,
        n_head=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return Model(module, (), texts(), {"line": "GeLUFunction.apply"})
