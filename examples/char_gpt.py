"""Train a character-level GPT on Python's manual, and let it write.

The text is ``pydoc_data.topics``, which every Python has. ``python examples/char_gpt.py``
takes about two minutes on two cores. With ``--lora RANK`` the trained network is then adapted to
another text, the sources of Python's library, by low-rank adapters: the network stays as it is, and
only the adapters are trained and saved. ``--frozen int4`` stores its weights in 4 bits meanwhile.
"""

from __future__ import annotations

import argparse
import inspect
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, Trainer, lora, memory_of, train_step


def manual() -> str:
    """Return the text of Python's manual of the language."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values())


def sources() -> str:
    """Return the text of some modules of Python's library."""
    import ast
    import dataclasses
    import subprocess
    import typing

    return "\n".join(map(inspect.getsource, (argparse, ast, dataclasses, subprocess, typing)))


class Text:
    """A text as numbers of its characters: the first nine tenths to train with, the rest to
    validate.

    Parameters
    ----------
    text : str
        The text.
    alphabet : str
        The characters; others are left out.
    """

    def __init__(self, text: str, alphabet: str):
        places = {character: i for i, character in enumerate(alphabet)}
        self.data = np.array(
            [places[character] for character in text if character in places], "int64"
        )
        self.split = len(self.data) * 9 // 10

    def batch(self, rng, size: int, context: int, train: bool = True):
        """Return tokens of shape (size, context), and the tokens that follow each."""
        first, last = (0, self.split) if train else (self.split, len(self.data))
        starts = rng.integers(first, last - context - 1, size)
        rows = np.stack([self.data[start : start + context + 1] for start in starts])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


class Block(nn.Module):
    """Causal attention and a perceptron, each beside a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A network that predicts the next character at each place."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def perplexity(trainer: Trainer, text: Text, options) -> float:
    """Return the exponential of the mean loss on text that the network was not trained with."""
    rng, losses = np.random.default_rng(0), []
    for _ in range(8):
        tokens, targets = text.batch(rng, options.batch, options.context, train=False)
        logits = torch.from_numpy(trainer.predict(tokens).numpy())
        losses.append(float(loss_of(logits, torch.from_numpy(targets))))
    return math.exp(sum(losses) / len(losses))


def train(trainer: Trainer, text: Text, options, steps: int) -> None:
    """Run steps with a learning rate that rises first and then falls along a cosine."""
    rng = np.random.default_rng(options.seed)
    start = time.perf_counter()
    for i in range(steps):
        warm = min(1.0, (i + 1) / (0.1 * steps + 1))
        lr = options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * i / steps))
        result = trainer.step(*text.batch(rng, options.batch, options.context), lr=lr)
        if (i + 1) % max(1, steps // 5) == 0:
            seconds = time.perf_counter() - start
            print(f"step {i + 1}: loss {result.loss:.3f}, {1000 * seconds / (i + 1):.1f} ms a step")


def sample(trainer: Trainer, alphabet: str, prompt: str, options) -> str:
    """Return a text that the network writes after a prompt."""
    rng, tokens = (
        np.random.default_rng(options.seed),
        [alphabet.index(character) for character in prompt],
    )
    for _ in range(options.sample):
        window = tokens[-options.context :]
        context = np.zeros((options.batch, options.context), "int64")
        context[0, : len(window)] = (
            window  # later characters do not change the outputs at earlier ones
        )
        logits = trainer.predict(context).numpy()[0, len(window) - 1].astype("float64") / 0.8
        logits = logits[: len(alphabet)]
        chances = np.exp(logits - logits.max())
        tokens.append(int(rng.choice(len(alphabet), p=chances / chances.sum())))
    return "".join(alphabet[token] for token in tokens)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the command; return perplexities by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {
        "steps": (600, "steps of training"),
        "batch": (16, "texts in a batch"),
        "context": (64, "characters that the network sees"),
        "width": (128, "numbers for each character"),
        "layers": (3, "blocks"),
        "heads": (4, "heads of attention"),
        "sample": (300, "characters to write"),
        "workers": (1, "processes; groups of --parts of them have a share of each batch"),
        "parts": (1, "processes among which the layers and the vocabulary are divided"),
        "nodes": (1, "machines among which the processes are divided"),
        "lora": (0, "the rank of adapters to another text; 0 for none"),
        "lora-steps": (300, "steps of training of the adapters"),
        "seed": (0, "the seed of the network and of the batches"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument("--frozen", choices=["int8", "int4"], help="the form of frozen weights")
    parser.add_argument("--lr", type=float, default=3e-3, help="the largest learning rate")
    parser.add_argument("--save", type=Path, help="a file for the trained adapters or network")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="for other machines"
    )
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    if options.workers % options.parts or options.heads % options.parts:
        parser.error("--workers and --heads must be multiples of --parts")
    groups = options.workers // options.parts
    if options.batch % groups:
        parser.error("--batch must be a multiple of --workers / --parts")
    if options.workers > 1 and options.lora:
        parser.error("--lora trains with one worker")
    if options.workers == 1:
        return _run(options, None)
    from relax_grad.distributed import session

    # Without parts, each worker is its own group.
    groups = groups if options.parts > 1 else 1
    with session(
        options.workers, nodes=options.nodes, num_groups=groups, listen=options.listen
    ) as workers:
        return _run(options, workers)


def parallel_trainer(step, workers, parts: int):
    """Return a trainer on all workers, of which groups of ``parts`` have parts of the layers and of
    the vocabulary."""
    from relax_grad.distributed import along, column, data_parallel, row, tensor_parallel

    if parts == 1:
        return data_parallel(step, workers)
    shards = {
        "tokens.weight": along(0),
        "*.qkv.*": column(parts=3),
        "*.out.weight": row(),
        "*.mlp.0.*": column(),
        "*.mlp.2.weight": row(),
        "head.weight": column(),
    }
    if workers.num_groups == 1:
        return tensor_parallel(step, workers, shards=shards)
    return data_parallel(step, workers, shards=shards)


def _run(options, workers) -> dict[str, float]:
    """Train in this process, or on workers; return perplexities by name."""

    text = manual()
    alphabet = "".join(sorted(set(text + sources())))
    alphabet = "".join(character for character in alphabet if character.isascii())
    text = Text(text, alphabet)
    torch.manual_seed(options.seed)
    characters = -(-len(alphabet) // options.parts) * options.parts  # some may occur in no text
    network = GPT(characters, options.context, options.width, options.layers, options.heads)
    tokens, targets = map(
        torch.from_numpy,
        text.batch(np.random.default_rng(0), options.batch, options.context),
    )
    # The number of texts is symbolic where each worker has a share of them.
    shapes = {name: {0: "batch"} for name in ("tokens", "target")} if workers else None
    imported = from_module(
        network, (tokens,), loss=loss_of, targets=(targets,), dynamic_shapes=shapes
    )
    step = train_step(imported, AdamW(weight_decay=0.01), clip_norm=1.0)
    trainer = parallel_trainer(step, workers, options.parts) if workers else Trainer(step)
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{count:,} parameters, {len(text.data):,} characters, {len(alphabet)} different ones")
    train(trainer, text, options, options.steps)
    results = {"manual": perplexity(trainer, text, options)}
    print(f"perplexity of unseen text: {results['manual']:.2f}\n")
    print(sample(trainer, alphabet, "The ", options))
    if not options.lora:
        if options.save:
            imported.save(options.save, trainer.params)
        return results

    imported.copy_to(network, trainer.params)
    imported = imported.copy_from(network)
    targets = ["*qkv.weight", "*out.weight", "*mlp.*.weight"]
    adapted = lora(imported, options.lora, targets, frozen=options.frozen)
    step = train_step(adapted, AdamW(weight_decay=0.0), clip_norm=1.0)
    trainer = Trainer(step)
    code = Text(sources(), alphabet)
    results["code before"] = perplexity(trainer, code, options)
    size = sum(math.prod(parameter.shape) for parameter in adapted.params.values())
    print(f"\nadapters of rank {options.lora}: {size:,} parameters")
    print(f"frozen weights: {memory_of(step).frozen:,} bytes")
    train(trainer, code, options, options.lora_steps)
    results["code"] = perplexity(trainer, code, options)
    print(
        f"perplexity of Python's sources: {results['code before']:.2f} before, "
        f"{results['code']:.2f} with adapters\n"
    )
    print(sample(trainer, alphabet, "def ", options))
    with tempfile.TemporaryDirectory() as folder:
        path = options.save or Path(folder, "adapters.safetensors")
        adapted.save(path, trainer.params)
        print(f"\nthe file of the adapters has {path.stat().st_size:,} bytes")
    # The merged network is one of PyTorch's again.
    imported.copy_to(network, adapted.merged(trainer.params))
    tokens, _ = code.batch(np.random.default_rng(1), options.batch, options.context)
    with torch.no_grad():
        wanted = network.eval()(torch.from_numpy(tokens)).numpy()
    results["difference"] = float(np.abs(trainer.predict(tokens).numpy() - wanted).max())
    print(f"largest difference of merged weights from adapters: {results['difference']:.1e}")
    return results


if __name__ == "__main__":
    main()
