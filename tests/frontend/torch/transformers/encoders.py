"""Encoders of texts."""

from __future__ import annotations

import torch

from .parts import (
    BATCH,
    NO_DROPOUT,
    REFUSED,
    SINGLE,
    TEXT,
    WORDS,
    Model,
    classes,
    hugging_face,
    model,
    padding,
    texts,
    words,
)


@model("encoders", ("eager", "eager"), ("sdpa", "sdpa"))
def bert_masked(attention):
    module = hugging_face("BertForMaskedLM", "BertConfig", attention, **TEXT, **NO_DROPOUT)
    return Model(module, (), texts())


@model("encoders")
def bert_classification():
    module = hugging_face(
        "BertForSequenceClassification", "BertConfig", **TEXT, **NO_DROPOUT, num_labels=5
    )
    return Model(module, (), {**texts(classes()), "token_type_ids": torch.ones_like(words()) % 2})


@model("encoders")
def bert_several_labels():
    """The loss of several labels at once is the binary cross entropy."""
    module = hugging_face(
        "BertForSequenceClassification",
        "BertConfig",
        "sdpa",
        **TEXT,
        **NO_DROPOUT,
        num_labels=5,
        problem_type="multi_label_classification",
    )
    return Model(module, (), texts((torch.rand(BATCH, 5) > 0.5).double()))


@model("encoders")
def bert_questions():
    module = hugging_face("BertForQuestionAnswering", "BertConfig", "sdpa", **TEXT, **NO_DROPOUT)
    places = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 30])}
    return Model(module, (), {"input_ids": words(), "attention_mask": padding(), **places})


@model("encoders")
def bert_words():
    module = hugging_face(
        "BertForTokenClassification", "BertConfig", "sdpa", **TEXT, **NO_DROPOUT, num_labels=5
    )
    return Model(module, (), texts(words() % 5))


@model("encoders")
def bert_checkpointed():
    module = hugging_face("BertForMaskedLM", "BertConfig", "sdpa", **TEXT, **NO_DROPOUT)
    module.gradient_checkpointing_enable()
    return Model(module, (), texts())


@model("encoders")
def roberta():
    module = hugging_face("RobertaForMaskedLM", "RobertaConfig", "sdpa", **TEXT, **NO_DROPOUT)
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
        **{**TEXT, "num_hidden_layers": 2},
        **NO_DROPOUT,
        embedding_size=8,
    )
    return Model(module, (), texts())


@model("encoders")
def electra():
    module = hugging_face(
        "ElectraForPreTraining", "ElectraConfig", "sdpa", **TEXT, **NO_DROPOUT, embedding_size=8
    )
    return Model(
        module, (), {"input_ids": words(), "labels": (words() % 2).double()}, {"tolerance": SINGLE}
    )


@model("encoders", ("2", "DebertaV2"), ("1", "Deberta"))
def deberta(name):
    module = hugging_face(
        f"{name}ForMaskedLM",
        f"{name}Config",
        **TEXT,
        **NO_DROPOUT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=8,
    )
    return Model(module, (), texts(), {"tolerance": SINGLE})


@model("encoders")
def mpnet():
    module = hugging_face("MPNetForMaskedLM", "MPNetConfig", **TEXT, **NO_DROPOUT)
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
        **TEXT,
        global_attn_every_n_layers=1,
        local_attention=4,
        pad_token_id=0,
    )
    return Model(module, (), texts(), {"tolerance": SINGLE})


@model("encoders", table=REFUSED)
def electra_with_mask():
    """Its loss takes the words that are not padded: their number depends on values."""
    values = texts((words() % 2).double())
    module = hugging_face("ElectraForPreTraining", "ElectraConfig", **TEXT, **NO_DROPOUT)
    return Model(module, (), values, {"line": "active_loss"})


@model("encoders", table=REFUSED)
def longformer():
    module = hugging_face(
        "LongformerForMaskedLM",
        "LongformerConfig",
        **{**TEXT, "max_position_embeddings": 20},
        **NO_DROPOUT,
        attention_window=4,
    )
    return Model(module, (), texts(), {"line": "if is_global_attn"})


@model("encoders", table=REFUSED)
def fnet():
    module = hugging_face("FNetForMaskedLM", "FNetConfig", **TEXT, hidden_dropout_prob=0.0)
    return Model(
        module, (), {"input_ids": words(), "labels": words()}, {"line": "fourier_transform"}
    )
