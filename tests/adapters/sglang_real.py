"""SGLang's real classes on a CPU: what its import needs there, and a small model of them.

PyPI's torchvision is built for CUDA. Beside a PyTorch for CPUs its library does not load, and its import fails for want
of two operators' schemas, which nothing here calls.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch import nn


def declare_torchvision_operators():
    """Let torchvision be imported where its library cannot be loaded. What is returned has to be kept."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it is there
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_kept = declare_torchvision_operators() if torch.version.cuda is None else None

from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

__all__ = ["HookRegistry", "LogitsProcessor", "ModelRunner"]

# What is hooked, and what it was. In a list: the registry replaces what modules hold by name, here too.
OWN = [LogitsProcessor._compute_lm_head]
HOOKED = [(LogitsProcessor, "_compute_lm_head"), (ModelRunner, "init_cuda_graphs")]


@contextlib.contextmanager
def ranks(size, rank=0):
    """What SGLang's parallel context says on tensor-parallel rank ``rank`` of ``size``, whose CPU group is a word."""
    group = SimpleNamespace(world_size=size, rank_in_group=rank, cpu_group="the CPU group")
    widths = {"tp_size": size, "attn_tp_size": size, "moe_tp_size": size}
    with get_parallel().override(tp_rank=rank, tp_group=group, **widths):
        yield


@contextlib.contextmanager
def configured(**arguments):
    """SGLang's configuration for these server arguments, in a process that is tensor-parallel rank 0 of 1."""
    with get_context().override_server_args(**arguments), ranks(1):
        yield


def head(vocab, hidden, kind=ParallelLMHead, dtype=torch.bfloat16, **arguments):
    """An SGLang head with random weights, those of the padding too."""
    made = kind(vocab, hidden, params_dtype=dtype, **arguments)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


class Model(nn.Module):
    """What SGLang's models are to their heads: ``forward`` hands the last hidden states to the LogitsProcessor."""

    def __init__(self, lm_head, vocab, name="lm_head", processor=LogitsProcessor, logit_scale=None, **config):
        super().__init__()
        setattr(self, name, lm_head)
        self._head_name = name
        self.logits_processor = processor(SimpleNamespace(vocab_size=vocab, **config), logit_scale=logit_scale)

    def forward(self, hidden_states, buffer=None):
        """The LogitsProcessor's output for a decoding batch: hidden_states (rows, hidden)."""
        metadata = LogitsMetadata(forward_mode=ForwardMode.DECODE, next_token_logits_buffer=buffer)
        return self.logits_processor(None, hidden_states, getattr(self, self._head_name), metadata)

    def logits(self, hidden_states, buffer=None):
        """(rows, vocab), float32."""
        return self(hidden_states, buffer).next_token_logits


def runner(model):
    """A ModelRunner with ``model`` loaded, whose ``init_cuda_graphs`` is the real one."""
    made = object.__new__(ModelRunner)
    made.model, made.is_draft_worker, made.is_generation = model, False, True
    return made


def captured(warm_up=lambda: None):
    """Stands for capture_cuda_graphs, which needs a GPU; ``warm_up`` is what it runs before it captures."""

    def capture(**arguments):
        warm_up()
        one = SimpleNamespace(runner=None)
        return SimpleNamespace(eager_runner=None, prefill=one, decode=one, memory_usage=None, time_usage=None)

    return capture


VocabEmbedding = VocabParallelEmbedding
