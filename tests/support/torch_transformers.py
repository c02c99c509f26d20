"""Transformers in tiny configurations with random weights, by family; all are held against PyTorch
itself.

Every entry is a function that returns a :class:`Model`. A library that is not installed raises
ImportError.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch_models import set_seeds
from torch_packages import torchvision


class Model(NamedTuple):
    """A module with its arguments, as :func:`torch_models.check` takes them.

    Attributes
    ----------
    module : nn.Module
        The module.
    args, kwargs : tuple, dict
        Its arguments.
    options : dict
        Further arguments of the check.
    """

    module: nn.Module
    args: tuple = ()
    kwargs: dict = {}  # noqa: RUF012  (never written)
    options: dict = {}  # noqa: RUF012


#: The functions that return models, by family and name.
FAMILIES: dict[str, dict[str, Callable[[], Model]]] = {}

#: Models that cannot be imported; the option ``line`` is a pattern of the message.
REFUSED: dict[str, dict[str, Callable[[], Model]]] = {}

#: The tolerance of a model of float64 that computes its loss, normalisations or angles in float32.
SINGLE = 2e-5

#: The share of the largest element of a tensor that a difference may have.
TOLERANCE = {
    "encoders": 1e-9,
    "decoders": SINGLE,
    "translation": SINGLE,
    "sounds": 1e-8,
    "images": 1e-8,
    "adapters": SINGLE,
    "plain": 1e-9,
}

#: The number of words, the batch and the length of texts.
WORDS, BATCH, LENGTH = 48, 2, 6

_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GROUPED = {**_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
_IMAGE = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 5,
    **_NO_DROPOUT,
}


def model(family: str, *forms: tuple, table=FAMILIES) -> Callable:
    """Enter a function into a table, once for each form: its suffix and its arguments."""

    def enter(function):
        name = function.__name__.strip("_")
        for suffix, *arguments in forms or [("",)]:
            table.setdefault(family, {})["-".join(filter(None, (name, suffix)))] = (
                lambda arguments=tuple(arguments): _seeded(family, function, arguments)
            )
        return function

    return enter


def _seeded(family: str, function: Callable, arguments: tuple) -> Model:
    set_seeds()
    built = function(*arguments)
    return built._replace(options={"tolerance": TOLERANCE[family], **built.options})


def transformers():
    """Return the package transformers."""
    torchvision()
    return importlib.import_module("transformers")


def hugging_face(kind: str, config: str, attention: str = "eager", **values) -> nn.Module:
    """Return a model of transformers of a configuration."""
    package = transformers()
    config = getattr(package, config)(**values)
    config._attn_implementation = attention
    return getattr(package, kind)(config).train().double()


def words(*shape: int) -> torch.Tensor:
    """Return indices of words, none of which is a special one."""
    return torch.randint(5, WORDS, shape or (BATCH, LENGTH))


def padding(length: int = LENGTH, left: bool = False) -> torch.Tensor:
    """Return the attention mask of texts of different lengths."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if left:
        mask[1, : length // 3] = 0
    else:
        mask[1, -(length // 3) :] = 0
    return mask


def texts(labels: torch.Tensor | None = None, left: bool = False) -> dict:
    """Return words, their mask and labels; a padded word has none."""
    mask = padding(left=left)
    if labels is None:
        labels = words().masked_fill(mask == 0, -100)
    return {"input_ids": words(), "attention_mask": mask, "labels": labels}


def images(channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size, dtype=torch.float64)


def classes() -> torch.Tensor:
    return torch.tensor([3, 1])


# Encoders of texts


@model("encoders", ("eager", "eager"), ("sdpa", "sdpa"))
def bert_masked(attention):
    module = hugging_face("BertForMaskedLM", "BertConfig", attention, **_TEXT, **_NO_DROPOUT)
    return Model(module, (), texts())


@model("encoders")
def bert_classification():
    module = hugging_face(
        "BertForSequenceClassification", "BertConfig", **_TEXT, **_NO_DROPOUT, num_labels=5
    )
    return Model(module, (), {**texts(classes()), "token_type_ids": torch.ones_like(words()) % 2})


@model("encoders")
def bert_several_labels():
    """The loss of several labels at once is the binary cross entropy."""
    module = hugging_face(
        "BertForSequenceClassification",
        "BertConfig",
        "sdpa",
        **_TEXT,
        **_NO_DROPOUT,
        num_labels=5,
        problem_type="multi_label_classification",
    )
    return Model(module, (), texts((torch.rand(BATCH, 5) > 0.5).double()))


@model("encoders")
def bert_questions():
    module = hugging_face("BertForQuestionAnswering", "BertConfig", "sdpa", **_TEXT, **_NO_DROPOUT)
    places = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 30])}
    return Model(module, (), {"input_ids": words(), "attention_mask": padding(), **places})


@model("encoders")
def bert_words():
    module = hugging_face(
        "BertForTokenClassification", "BertConfig", "sdpa", **_TEXT, **_NO_DROPOUT, num_labels=5
    )
    return Model(module, (), texts(words() % 5))


@model("encoders")
def bert_checkpointed():
    module = hugging_face("BertForMaskedLM", "BertConfig", "sdpa", **_TEXT, **_NO_DROPOUT)
    module.gradient_checkpointing_enable()
    return Model(module, (), texts())


@model("encoders")
def roberta():
    module = hugging_face("RobertaForMaskedLM", "RobertaConfig", "sdpa", **_TEXT, **_NO_DROPOUT)
    return Model(module, (), texts())


@model("encoders")
def distilbert():
    module = hugging_face(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "sdpa",
        vocab_size=WORDS,
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return Model(module, (), texts())


@model("encoders")
def albert():
    """Its layers share their parameters."""
    module = hugging_face(
        "AlbertForMaskedLM",
        "AlbertConfig",
        **{**_TEXT, "num_hidden_layers": 2},
        **_NO_DROPOUT,
        embedding_size=8,
    )
    return Model(module, (), texts())


@model("encoders")
def electra():
    module = hugging_face(
        "ElectraForPreTraining", "ElectraConfig", "sdpa", **_TEXT, **_NO_DROPOUT, embedding_size=8
    )
    return Model(
        module, (), {"input_ids": words(), "labels": (words() % 2).double()}, {"tolerance": SINGLE}
    )


@model("encoders", ("2", "DebertaV2"), ("1", "Deberta"))
def deberta(name):
    module = hugging_face(
        f"{name}ForMaskedLM",
        f"{name}Config",
        **_TEXT,
        **_NO_DROPOUT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=8,
    )
    return Model(module, (), texts(), {"tolerance": SINGLE})


@model("encoders")
def mpnet():
    module = hugging_face("MPNetForMaskedLM", "MPNetConfig", **_TEXT, **_NO_DROPOUT)
    return Model(module, (), texts())


@model("encoders")
def xlnet():
    module = hugging_face(
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=WORDS,
        d_model=16,
        n_layer=1,
        n_head=2,
        d_inner=24,
        dropout=0.0,
        use_mems_train=False,
    )
    return Model(module, (), texts())


@model("encoders")
def modernbert():
    module = hugging_face(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        "sdpa",
        **_TEXT,
        global_attn_every_n_layers=1,
        local_attention=4,
        pad_token_id=0,
    )
    return Model(module, (), texts(), {"tolerance": SINGLE})


# Decoders of texts


_GPT = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}


@model("decoders", ("eager", "eager"), ("sdpa", "sdpa"))
def gpt2(attention):
    """The embedding and the last layer are tied."""
    return Model(hugging_face("GPT2LMHeadModel", "GPT2Config", attention, **_GPT), (), texts())


@model("decoders")
def gpt2_with_cache():
    """The keys and values of each layer are outputs."""
    values = {**_GPT, "use_cache": True}
    return Model(hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **values), (), texts())


@model("decoders")
def gpt2_left_padded():
    module = hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **_GPT)
    return Model(module, (), texts(left=True))


@model("decoders")
def gpt2_checkpointed():
    module = hugging_face("GPT2LMHeadModel", "GPT2Config", "sdpa", **_GPT)
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
        **_TEXT,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return Model(module, (), texts())


@model("decoders")
def gpt_j():
    values = {**_GPT, "rotary_dim": 4, "n_inner": 24}
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
    module = hugging_face("LlamaForCausalLM", "LlamaConfig", attention, **_GROUPED)
    return Model(module, (), texts())


@model("decoders")
def llama_classification():
    """The last word before the padding decides, and its place depends on the words."""
    module = hugging_face(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        "sdpa",
        **_GROUPED,
        num_labels=5,
        pad_token_id=0,
    )
    return Model(module, (), texts(classes()))


@model("decoders", *((name.lower(), name) for name in ("Qwen2", "Qwen3", "Gemma", "Gemma2")))
def grouped(name):
    values = {**_GROUPED, "head_dim": 4} if name != "Qwen2" else _GROUPED
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
    values = {**_GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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
        **{**_GROUPED, "num_hidden_layers": 2},
        head_dim=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Model(module, (), texts())


@model("decoders")
def mistral():
    """Its attention has a window."""
    module = hugging_face(
        "MistralForCausalLM", "MistralConfig", "sdpa", **_GROUPED, sliding_window=4
    )
    return Model(module, (), texts(left=True))


@model("decoders")
def phi():
    module = hugging_face("PhiForCausalLM", "PhiConfig", "sdpa", **_GROUPED)
    return Model(module, (), texts())


@model("decoders")
def phi3():
    module = hugging_face("Phi3ForCausalLM", "Phi3Config", "sdpa", **_GROUPED, pad_token_id=0)
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
        **_GROUPED,
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


# Encoders with decoders


@model("translation")
def t5():
    """Four names are one tensor."""
    module = hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return Model(module, (), texts())


_TRANSLATION = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
}


@model("translation", ("eager", "eager"), ("sdpa", "sdpa"))
def bart(attention):
    module = hugging_face("BartForConditionalGeneration", "BartConfig", attention, **_TRANSLATION)
    return Model(module, (), texts())


@model("translation")
def marian():
    module = hugging_face(
        "MarianMTModel",
        "MarianConfig",
        "sdpa",
        **_TRANSLATION,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return Model(module, (), texts())


@model("translation")
def pegasus():
    module = hugging_face(
        "PegasusForConditionalGeneration", "PegasusConfig", "sdpa", **_TRANSLATION
    )
    return Model(module, (), texts())


# Sounds


@model("sounds")
def whisper():
    values = {key: _TRANSLATION[key] for key in _TRANSLATION if "position" not in key}
    module = hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "sdpa",
        **values,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    sounds = torch.randn(BATCH, 4, 12, dtype=torch.float64)
    return Model(module, (), {"input_features": sounds, "labels": words(BATCH, 4)})


def _wav2vec(kind: str) -> nn.Module:
    return hugging_face(
        kind,
        "Wav2Vec2Config",
        "sdpa",
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=[8, 8],
        conv_stride=[3, 2],
        conv_kernel=[4, 3],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=5,
        classifier_proj_size=8,
    )


@model("sounds")
def wav2vec_classification():
    sounds = torch.randn(BATCH, 60, dtype=torch.float64)
    module = _wav2vec("Wav2Vec2ForSequenceClassification")
    return Model(module, (), {"input_values": sounds, "labels": classes()})


@model("sounds")
def audio_spectrogram():
    values = {key: _IMAGE[key] for key in _IMAGE if key != "image_size"}
    module = hugging_face(
        "ASTForAudioClassification",
        "ASTConfig",
        "sdpa",
        **{**values, "patch_size": 4},
        num_mel_bins=8,
        max_length=12,
        frequency_stride=4,
        time_stride=4,
    )
    sounds = torch.randn(BATCH, 12, 8, dtype=torch.float64)
    return Model(module, (), {"input_values": sounds, "labels": classes()})


# Images


@model("images", *((name.lower(), name) for name in ("ViT", "DeiT", "Beit", "Dinov2")))
def vision(name):
    kind = f"{name}ForImageClassification"
    values = {**_IMAGE, "drop_path_rate": 0.0}
    if name == "Beit":
        values |= {"use_relative_position_bias": True, "use_mean_pooling": True}
    module = hugging_face(kind, f"{name}Config", "sdpa", **values)
    return Model(module, (), {"pixel_values": images(), "labels": classes()})


@model("images")
def masked_autoencoder():
    values = {
        **_IMAGE,
        "decoder_hidden_size": 8,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 12,
    }
    module = hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", "sdpa", **values)
    noise = torch.rand(BATCH, 4, dtype=torch.float64)
    return Model(module, (), {"pixel_values": images(), "noise": noise})


@model("images", ("", "Swin"), ("2", "Swinv2"))
def swin(name):
    module = hugging_face(
        f"{name}ForImageClassification",
        f"{name}Config",
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=5,
        **_NO_DROPOUT,
    )
    return Model(module, (), {"pixel_values": images(), "labels": classes()})


@model("images")
def segformer():
    module = hugging_face(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=5,
        **_NO_DROPOUT,
    )
    labels = torch.randint(0, 5, (BATCH, 16, 16))
    labels[0, 0] = 255
    return Model(module, (), {"pixel_values": images(), "labels": labels})


@model("images")
def clip():
    package = transformers()
    text = {**_TEXT, "eos_token_id": 2}
    vision = {key: _IMAGE[key] for key in _IMAGE if "dropout" not in key}
    config = package.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    config._attn_implementation = "sdpa"
    module = package.CLIPModel(config).train().double()
    ids = words()
    ids[:, -1] = 2
    values = {"input_ids": ids, "pixel_values": images(), "attention_mask": torch.ones_like(ids)}
    return Model(module, (), {**values, "return_loss": True})


@model("images")
def siglip():
    package = transformers()
    text = {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {key: _IMAGE[key] for key in _IMAGE if "dropout" not in key}
    config = package.SiglipConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "sdpa"
    module = package.SiglipModel(config).train().double()
    values = {"input_ids": words(), "pixel_values": images(), "return_loss": True}
    return Model(module, (), values)


class Detection(nn.Module):
    """Queries that attend to an image; heads for classes and boxes, and a given matching of queries
    and objects."""

    def __init__(self, width=8, queries=3):
        super().__init__()
        self.backbone = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(16, width))
        self.queries = nn.Embedding(queries, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 16, 0.0, batch_first=True)
        self.classes = nn.Linear(width, 5)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, image, labels, boxes, matching):
        features = self.backbone(image).flatten(2).transpose(1, 2) + self.place
        queries = self.queries.weight.unsqueeze(0).expand(len(image), -1, -1)
        hidden = self.transformer(features, queries)
        scores, predicted = self.classes(hidden), self.boxes(hidden).sigmoid()
        rows = torch.arange(len(image)).unsqueeze(1)
        wanted = torch.full(scores.shape[:2], 4)
        wanted[rows, matching] = labels
        weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1], dtype=scores.dtype)
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), wanted, weights)
        chosen = predicted[rows, matching]
        corners = [
            torch.cat([box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2], -1)
            for box in (chosen, boxes)
        ]
        return loss + 5 * (chosen - boxes).abs().mean() + 2 * (1 - overlap(*corners)).mean()


def overlap(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the generalised intersection over union of boxes."""
    low, high = torch.maximum(first, other), torch.minimum(first, other)
    common = (high[..., 2:] - low[..., :2]).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (first, other)]
    union = areas[0] + areas[1] - common
    hull = (low[..., 2:] - high[..., :2]).prod(-1)
    return common / union - (hull - union) / hull


@model("images")
def detection():
    labels = torch.randint(0, 4, (BATCH, 2))
    boxes = torch.rand(BATCH, 2, 4, dtype=torch.float64) * 0.4 + 0.3
    matching = torch.tensor([[0, 2], [1, 0]])
    return Model(Detection().double(), (images(), labels, boxes, matching))


@model(
    "images",
    *(
        ("vit", "vit_tiny_patch16_224", {"patch_size": 8}),
        ("deit-distilled", "deit_tiny_distilled_patch16_224", {"patch_size": 8}),
        ("cait", "cait_xxs24_224", {"patch_size": 8}),
        ("beit", "beit_base_patch16_224", {"patch_size": 8}),
        ("eva", "eva02_tiny_patch14_224", {"patch_size": 8}),
        ("vit-registers", "vit_base_patch16_siglip_224", {"patch_size": 8, "num_classes": 5}),
    ),
)
def timm(name, values):
    torchvision()
    package = importlib.import_module("timm")
    values = {"embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5, **values}
    module = package.create_model(name, pretrained=False, img_size=16, **values).train().double()
    options = {"loss": _classification, "targets": (classes(),)}
    return Model(module, (images(),), {}, options)


def _classification(result, target):
    scores = result if isinstance(result, torch.Tensor) else sum(result) / len(result)
    return nn.functional.cross_entropy(scores, target)


@model("images")
def perceiver():
    module = hugging_face(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        num_latents=4,
        d_latents=16,
        d_model=8,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        qk_channels=8,
        v_channels=16,
        attention_probs_dropout_prob=0.0,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    values = texts()
    values["inputs"] = values.pop("input_ids")
    return Model(module, (), values)


# Adapters


@model(
    "adapters", ("gpt2", "GPT2", {}), ("llama", "Llama", {}), ("dora", "Llama", {"use_dora": True})
)
def lora(name, options):
    """Only the adapters are trained."""
    torchvision()
    peft = importlib.import_module("peft")
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
    values = _GPT if name == "GPT2" else _GROUPED
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


# Models that cannot be imported


@model("encoders", table=REFUSED)
def electra_with_mask():
    """Its loss takes the words that are not padded: their number depends on values."""
    values = texts((words() % 2).double())
    module = hugging_face("ElectraForPreTraining", "ElectraConfig", **_TEXT, **_NO_DROPOUT)
    return Model(module, (), values, {"line": "active_loss"})


@model("encoders", table=REFUSED)
def longformer():
    module = hugging_face(
        "LongformerForMaskedLM",
        "LongformerConfig",
        **{**_TEXT, "max_position_embeddings": 20},
        **_NO_DROPOUT,
        attention_window=4,
    )
    return Model(module, (), texts(), {"line": "if is_global_attn"})


@model("encoders", table=REFUSED)
def fnet():
    module = hugging_face("FNetForMaskedLM", "FNetConfig", **_TEXT, hidden_dropout_prob=0.0)
    return Model(
        module, (), {"input_ids": words(), "labels": words()}, {"line": "fourier_transform"}
    )


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


@model("sounds", table=REFUSED)
def wav2vec_ctc():
    sounds = torch.randn(BATCH, 90, dtype=torch.float64)
    return Model(
        _wav2vec("Wav2Vec2ForCTC"),
        (),
        {"input_values": sounds, "labels": words(BATCH, 3)},
        {"line": "labels.max"},
    )


# PyTorch's own


class Sum(nn.Module):
    """The squares of the first result of a module, with weights."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        weights = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
        return (output.square() * weights).mean(), output


def sequence(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, LENGTH, 8)), dtype=torch.float64)


@model("plain")
def transformer():
    module = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True, norm_first=True)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4).double(),
        "tgt_is_causal": True,
        "src_key_padding_mask": padding() == 0,
        "memory_key_padding_mask": padding() == 0,
    }
    return Model(Sum(module).double(), (sequence(), sequence(BATCH, 4, 8)), masks)


@model("plain", ("relu", "relu", False), ("gelu-first", "gelu", True))
def encoder_layer(activation, first):
    """Without gradients, and only then, PyTorch would take another path."""
    module = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, activation, batch_first=True, norm_first=first
    )
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH).double()
    bias = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(padding() == 0, -1e4)
    kwargs = {"src_mask": causal, "src_key_padding_mask": bias, "is_causal": True}
    return Model(Sum(module).double(), (sequence(),), kwargs)


@model("plain")
def encoder_with_empty_places():
    """The encoder would gather the places that are not padded, in evaluation mode."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Model(Sum(module).double(), (sequence(),), {"src_key_padding_mask": padding() == 0})


_MASKS = {
    "none": {},
    "weights": {"need_weights": True, "average_attn_weights": False},
    "boolean": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)},
    "heads": {"attn_mask": torch.linspace(-1, 1, BATCH * 2 * 36).double().reshape(-1, 6, 6)},
    "padding": {"key_padding_mask": padding() == 0},
    "both": {"key_padding_mask": padding() == 0, "attn_mask": torch.eye(6, dtype=torch.bool)},
}


@model("plain", *((name, masks) for name, masks in _MASKS.items()))
def attention(masks):
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=True)
    return Model(Sum(module).double(), (sequence(),) * 3, {"need_weights": False, **masks})


@model("plain")
def attention_with_bias():
    """Keys and values of other widths, with learned and zero rows."""
    module = nn.MultiheadAttention(
        8, 2, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=5, batch_first=True
    )
    data = (sequence(), sequence(BATCH, 4, 6), sequence(BATCH, 4, 5))
    return Model(Sum(module).double(), data)
