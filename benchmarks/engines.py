"""Engines with and without this library: the same greedy tokens, the kernel in a profile, the time of a step.

    python benchmarks/engines.py all --out benchmarks/results/h200/engines.json
    python benchmarks/engines.py transformers --out DIR/transformers.json [--models granite whisper] [--small]
    python benchmarks/engines.py vllm --eager 0 --out DIR/vllm.json                     (one engine to a process)
    python benchmarks/engines.py merge --vllm DIR/vllm.json --transformers DIR/transformers.json \\
        --out benchmarks/results/h200/engines.json      (what those hold replaces the same cases; vLLM's tokens stay)

transformers: generate() of a model with a tied head and one with an odd vocabulary, with the shapes of granite-3.1-2b and
whisper-large-v3 and few layers (--small: tiny shapes, on a CPU too), patched and not. vLLM: the real engine on a small Llama
with random weights, with the plugin found through its entry point and without it, eagerly and with CUDA graphs.

Tokens are compared between processes with and without the plugin. Times are taken in one process, in turn, because a step of
such a small model is mostly host time and differs by more from process to process than a head takes: in vLLM the plugin is
told, for some rounds, that no row count is served. The way without the library is timed twice ("again"): a difference that
is no larger than that between those two says nothing. gpu_us is the time of all kernels of a step, profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# In the name of every kernel that is launched here: kernel_cutlass_<method>_<module><class>_object_at_...
KERNELS = ("lowbatch_lmhead",)
ROUNDS = 6  # of two ways or three, each as often the first
TOKENS = 64
TIMED_TOKENS = 32  # of transformers, whose tokens take milliseconds
BATCHES = (1, 4, 16)
LLAMA = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096}  # fmt: skip


def profiled(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """The GPU time of one of ``step()``'s steps in microseconds, and this library's kernels among those that ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    ours = sorted({event.key for event in events if any(name in event.key for name in KERNELS)})
    return {"gpu_us": round(sum(event.self_device_time_total for event in events) / steps, 1), "kernels": ours}


def rounds_in_turn(
    ways: dict[str, Callable[[], Any]], around: dict[str, Callable[[], Any]] | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each, measured in turn. What a context manager of ``around`` does is not timed."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for index in range(ROUNDS + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            with (around or {}).get(name, contextlib.nullcontext)():
                begin = time.perf_counter()
                ways[name]()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: values[1:] for name, values in times.items()}


def in_turn(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, measured in turn."""
    return {name: statistics.median(values) for name, values in rounds_in_turn(ways).items()}


def spread(times: dict[str, list[float]], steps: int, what: str) -> dict[str, Any]:
    """Median and quartiles of a step."""
    quartiles = {name: statistics.quantiles([ms / steps for ms in rounds], n=4) for name, rounds in times.items()}
    return {
        what: {name: round(values[1], 4) for name, values in quartiles.items()},
        f"{what}_quartiles": {name: [round(values[0], 4), round(values[2], 4)] for name, values in quartiles.items()},
    }


def agreement(first: list[list[int]], second: list[list[int]]) -> dict[str, Any]:
    """How far two generations go together: after a first difference (a tie in bfloat16) they are two texts."""
    common = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(first, second)]
    return {"sequences": len(first), "identical": sum(c == len(x) for c, x in zip(common, first)), "common": common}


# --- transformers ---


def granite(small: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = (1155, 256, 2) if small else (49155, 2048, 4)
    config = GraniteConfig(vocab_size=sizes[0], hidden_size=sizes[1], intermediate_size=2 * sizes[1],
                           num_hidden_layers=sizes[2], num_attention_heads=8, num_key_value_heads=8,
                           tie_word_embeddings=True, pad_token_id=0)  # fmt: skip
    prompt = torch.randint(3, sizes[0], (max(BATCHES), 16))
    return GraniteForCausalLM(config), {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def whisper(small: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = (1866, 256, 1) if small else (51866, 1280, 2)
    config = WhisperConfig(vocab_size=sizes[0], d_model=sizes[1], encoder_layers=sizes[2], decoder_layers=sizes[2],
                           encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=512,
                           decoder_ffn_dim=512, num_mel_bins=80, max_source_positions=100, pad_token_id=0, bos_token_id=1,
                           eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                           begin_suppress_tokens=None)  # fmt: skip
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(max(BATCHES), 80, 200)}


MODELS = {"granite": granite, "whisper": whisper}


def run_transformers(arguments: argparse.Namespace) -> None:
    import transformers

    from lowbatch_lmhead.adapters import transformers as adapter

    transformers.logging.set_verbosity_error()  # generate() warns of the two lengths it is given, each time
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for name in arguments.models:
        torch.manual_seed(0)
        model, inputs = MODELS[name](arguments.small)
        model = model.to(device, torch.bfloat16).eval()
        # Random logits lie close together; a wider embedding keeps ties of bfloat16 apart.
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=0.05)
        inputs = {
            key: value.to(device, torch.bfloat16 if value.is_floating_point() else None)
            for key, value in inputs.items()
        }
        with adapter.patch(model, max_rows=max(BATCHES)) as patch:
            served = str(patch)
        for batch in BATCHES:
            part = {key: value[:batch] for key, value in inputs.items()}

            def run(tokens: int = TIMED_TOKENS, model: Any = model, part: Any = part) -> list[list[int]]:
                return generate(model, part, tokens)

            def patched(model: Any = model) -> Any:
                return adapter.patch(model, prepare=None)  # prepared before

            around = {"plain": contextlib.nullcontext, "patched": patched}
            tokens, seen = {}, {}
            with torch.inference_mode():
                times = rounds_in_turn({"plain": run, "patched": run, "plain again": run}, around)
                for way, manager in around.items():
                    with manager():
                        tokens[way] = run(TOKENS)
                        if device == "cuda":
                            seen[way] = profiled(lambda run=run: run(8), 8)
            found.append(
                {
                    "model": name,
                    "vocab": model.get_output_embeddings().weight.shape[0],
                    "hidden": model.get_output_embeddings().weight.shape[1],
                    "batch": batch,
                    "transformers": transformers.__version__,
                    **spread(times, TIMED_TOKENS, "ms_per_token"),
                    "tokens": agreement(tokens["plain"], tokens["patched"]),
                    "profile": seen,
                    "served": served,
                }
            )
            print(json.dumps({key: value for key, value in found[-1].items() if key != "served"}), flush=True)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def generate(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> list[list[int]]:
    made: torch.Tensor = model.generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
    return made.tolist()


# --- vLLM ---


def run_vllm(arguments: argparse.Namespace) -> None:
    """One engine in this process; the plugin is there or not by the environment."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0")
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
                  "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
                  "bos_token_id": 1, "eos_token_id": 2, **LLAMA}  # fmt: skip
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=bool(arguments.eager), seed=0,
                     gpu_memory_utilization=0.5, max_model_len=1024, max_num_seqs=max(BATCHES))  # fmt: skip

        def widen(model: Any) -> None:
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(std=parameter.shape[-1] ** -0.5)

        engine.apply_model(widen)
        results = []
        for batch in BATCHES:
            generator = torch.Generator().manual_seed(batch)
            prompts = [
                {"prompt_token_ids": torch.randint(3, LLAMA["vocab_size"], (16,), generator=generator).tolist()}
                for _ in range(batch)
            ]

            def run(tokens: int = TOKENS, prompts: list[Any] = prompts) -> list[list[int]]:
                greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                made = engine.generate(prompts, greedy, use_tqdm=False)
                return [list(one.outputs[0].token_ids) for one in made]

            version = importlib.metadata.version("vllm")
            result = {"eager": bool(arguments.eager), "batch": batch, "vllm": version, "tokens": run()}
            if arguments.plugin:
                result |= beside_vllm(run)
            results.append(result)
            print(json.dumps({key: value for key, value in result.items() if key != "tokens"}), flush=True)
        arguments.out.write_text(json.dumps(results))


def beside_vllm(run: Callable[..., Any]) -> dict[str, Any]:
    """The time of a step with the plugin and without, in this process."""
    from lowbatch_lmhead.adapters import vllm as adapter

    rows = {key: head.rows for key, head in adapter._heads.items()}
    assert rows, "the engine has projected through no head of the plugin's"

    def without(tokens: int = TOKENS) -> Any:
        for head in adapter._heads.values():
            head.rows = frozenset()
        return run(tokens)

    def with_(tokens: int = TOKENS) -> Any:
        for key, head in adapter._heads.items():
            head.rows = rows[key]
        return run(tokens)

    ways = {"without": without, "with": with_}
    return {
        **spread(rounds_in_turn({**ways, "without again": without}), TOKENS, "ms_per_step"),
        "profile": {name: profiled(lambda way=way: way(8), 8) for name, way in ways.items()},
    }


def with_entry_point(folder: Path) -> dict[str, str]:
    """An environment in which this working tree counts as installed, entry points and all."""
    info = folder / "lowbatch_lmhead-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbatch-lmhead\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlowbatch_lmhead = lowbatch_lmhead.adapters.vllm:register\n"
    )
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_all(arguments: argparse.Namespace) -> None:
    import machine

    found: dict[str, Any] = {"machine": machine.describe(), "vllm": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = with_entry_point(folder / "site")
        for eager in (1, 0):
            runs = {}
            for plugin in (0, 1):
                out = folder / f"{eager}{plugin}.json"
                command = [sys.executable, __file__, "vllm", "--eager", str(eager), "--plugin", str(plugin)]
                disable = {"LOWBATCH_LMHEAD_DISABLE": str(1 - plugin)}
                done = subprocess.run([*command, "--out", str(out)], env={**environment, **disable}, check=False)
                runs[plugin] = json.loads(out.read_text()) if done.returncode == 0 else None
            if None in runs.values():
                found["vllm"].append({"eager": bool(eager), "failed": [k for k, v in runs.items() if v is None]})
                continue
            for without, with_ in zip(runs[0], runs[1]):
                tokens = agreement(without["tokens"], with_["tokens"])
                found["vllm"].append({**with_, "tokens": tokens})
        out = folder / "transformers.json"
        subprocess.run([sys.executable, __file__, "transformers", "--out", str(out)], env=environment, check=False)
        found["transformers"] = json.loads(out.read_text()) if out.exists() else "failed"
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["vllm"], indent=1))


def run_merge(arguments: argparse.Namespace) -> None:
    """What was measured again, in the place of the same cases of ``--out``, but for vLLM's tokens: two processes'."""
    found = json.loads(arguments.out.read_text())
    for engine, keys in (("vllm", ("eager", "batch")), ("transformers", ("model", "batch"))):
        path = getattr(arguments, engine)
        again = {tuple(one[key] for key in keys): one for one in json.loads(path.read_text())} if path else {}
        old = {tuple(one[key] for key in keys): one for one in found[engine]}
        for case, one in again.items():
            if engine == "vllm":
                assert case in old, f"no tokens were compared in {case}: run `engines.py all`"
                one = {**one, "tokens": old[case]["tokens"]}
            old[case] = one
        found[engine] = list(old.values())
    if arguments.missing is not None:
        found["what is missing"] = arguments.missing
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    functions = {"all": run_all, "transformers": run_transformers, "vllm": run_vllm, "merge": run_merge}
    for name, function in functions.items():
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True)
        if name == "vllm":
            command.add_argument("--eager", type=int, default=1)
            command.add_argument("--plugin", type=int, default=1)
        if name == "transformers":
            command.add_argument("--small", action="store_true")
            command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        if name == "merge":
            command.add_argument("--vllm", type=Path)
            command.add_argument("--transformers", type=Path)
            command.add_argument("--missing", help="what the file says of what it does not hold")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
