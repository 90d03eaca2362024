"""The demo's training step beside PyTorch's of the same shape, in turns in one run.

    python -m benchmarks.trainer_torch     # needs torch beside this library

The network in PyTorch is nanoGPT's: pre-norm, no biases, GELU, tied head, fused causal attention,
global clip 1.0, fused AdamW. It runs as written and through torch.compile; the faster counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.trainer_step import circumstances, stepper, tokens_of
from examples.nanogpt import data, model
from examples.nanogpt.config import parse

RESULTS = Path(__file__).parent / "results"


class Block(nn.Module):
    def __init__(self, config: model.GPTConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(D, bias=False) for _ in range(2))
        self.attention_in, self.attention_out = (nn.Linear(D, n * D, bias=False) for n in (3, 1))
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            y.view(B, T, self.heads, -1).transpose(1, 2)
            for y in self.attention_in(self.attention_norm(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: model.GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, bias=False)

    def forward(self, tokens):
        x, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_stepper(flags: list[str], steps: int, compiled: bool) -> Callable[[], float]:
    """A function that takes `steps` training steps and returns the seconds of one."""
    config = parse([*flags, "--vocab-size", str(data.BYTES)])
    torch.manual_seed(0)
    network = GPT(config.model)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, (0.9, 0.95), fused=True)
    loss_of = torch.compile(network) if compiled else network
    tokens = torch.from_numpy(tokens_of(config)).long()

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_of(tokens).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        return (time.perf_counter() - start) / steps

    run()  # compiles
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of an arm in a round")
    options = parser.parse_args()
    flags = ["--optimizer", "adamw"]
    arms = {
        "ours": stepper(flags, options.steps),
        "torch": torch_stepper(flags, options.steps, compiled=False),
        "torch.compile": torch_stepper(flags, options.steps, compiled=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(options.rounds):
        for name, run in arms.items():
            seconds[name].append(run())
    config = parse(flags)
    tokens = config.batch_size * config.model.context
    speed = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    for name, value in speed.items():
        print(f"{name:14} {value:9,.0f} tokens/s")
    ratio = speed["ours"] / max(speed["torch"], speed["torch.compile"])
    print(f"ours / the faster of PyTorch's: {ratio:.2f}")
    report = {
        **circumstances(),
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "seconds_of_a_step": seconds,
        "ratio": ratio,
    }
    (RESULTS / "trainer_torch.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
