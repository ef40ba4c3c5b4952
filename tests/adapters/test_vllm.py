"""The vLLM plugin in vLLM's own classes, on the CPU: one gloo process, and two of them for tensor parallelism.

A reference kernel and a scripted clock stand for the GPU. ``own`` is what vLLM computes without the plugin.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import HIDDEN, ROOT, assert_close, inputs, python
from scripted import Script, Tactics, steady
from torch import nn

import lowbatch_lmhead
from lowbatch_lmhead import adapters, testing
from lowbatch_lmhead.adapters import vllm as adapter
from lowbatch_lmhead.tuning import timing

vllm = pytest.importorskip("vllm", reason="vLLM is not installed (tests/adapters/vllm-requirements.txt says how)")

from vllm import plugins  # noqa: E402
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

VOCAB = 1000  # padded to 1024 by vLLM
NAME = "LogitsProcessor"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration of vLLM, which is current while the tests run, in a process that is all of the ranks."""
    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(made):
        init = tmp_path_factory.mktemp("vllm") / "init"
        parallel_state.init_distributed_environment(1, 0, f"file://{init}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield made
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture(autouse=True)
def clean(config, monkeypatch):
    """vLLM without a plugin, on which nothing was loaded yet."""
    for name in ("VLLM_PLUGINS", "VLLM_BATCH_INVARIANT", adapters.DISABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    adapter._heads.clear()
    op_registry_oot.pop(NAME, None)
    yield
    op_registry_oot.pop(NAME, None)
    adapter._heads.clear()


@pytest.fixture
def clock(monkeypatch):
    """Times by which the kernel wins."""
    script = Script(steady(default=100, a=80))
    monkeypatch.setattr(timing, "timer_for", script)
    return script


@pytest.fixture
def kernel(clock):
    """The plugin is registered and a kernel serves CPU heads; ``compiled`` and ``calls`` say what it did."""
    adapter.register()
    with testing.reference_backend(Tactics("a")) as backend, torch.inference_mode():
        yield backend


def make_head(kind=ParallelLMHead, vocab=VOCAB, method=None, **arguments):
    quantization = None
    if method is not None:  # as a quantization config hands it out
        quantization = SimpleNamespace(get_quant_method=lambda layer, prefix: method(), online_quantization_config=None)
    with torch.inference_mode(False):
        head = kind(vocab, HIDDEN, params_dtype=torch.bfloat16, quant_config=quantization, **arguments)
        for parameter in head.parameters():
            parameter.data.normal_()
    return head


def make_processor(head_dtype=None, vocab=VOCAB, **arguments):
    made = LogitsProcessor(vocab, **arguments)
    made.head_dtype = head_dtype
    return made


def own(processor, head, x, bias=None, ask="__call__"):
    """What vLLM's own class computes."""
    replaced = op_registry_oot.pop(NAME)
    try:
        plain = make_processor(
            processor.head_dtype,
            processor.vocab_size,
            org_vocab_size=processor.org_vocab_size,
            scale=processor.scale,
            soft_cap=processor.soft_cap,
        )
        assert type(plain) is LogitsProcessor
        return getattr(plain, ask)(head, x, bias)
    finally:
        op_registry_oot[NAME] = replaced


def profile(processor, head, rows=16, bias=None):
    """As vLLM does before it serves."""
    return processor(head, inputs(rows), bias)


def execute_model(processor, head, x, bias=None):
    """A step for requests: its name is what the plugin knows it by."""
    return processor(head, x, bias)


def compile_or_warm_up_model(step, *arguments):
    return step(*arguments)


def assert_served(kernel, processor, head, bias=None, rows=(1, 3, 16)):
    """The kernel serves each of ``rows`` and gives vLLM's logits."""
    for count in rows:
        x, before = inputs(count), len(kernel.calls)
        expected = own(processor, head, x, bias)
        logits = execute_model(processor, head, x, bias)
        assert kernel.calls[before:] == [("a", count)]
        assert (logits.shape, logits.dtype) == (expected.shape, expected.dtype)
        # Both were rounded to bfloat16, and softly capped or scaled after it.
        assert_close(logits.float(), expected.float(), 1e-5 if logits.dtype == torch.float32 else 5e-3)


def assert_left_to_vllm(kernel, processor, head, bias=None, rows=(1, 16)):
    for count in rows:
        x = inputs(count)
        expected = own(processor, head, x, bias)
        before = len(kernel.calls)
        assert torch.equal(execute_model(processor, head, x, bias), expected)
        assert kernel.calls[before:] == []


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "lowbatch_lmhead"]


# --- loading ---


def installed(tmp_path, monkeypatch):
    """Metadata of an installed distribution, as pip leaves it, with the plugin's entry point."""
    info = tmp_path / "site" / "lowbatch_lmhead_entry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbatch-lmhead-entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlowbatch_lmhead = lowbatch_lmhead.adapters.vllm:register\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_vllm_loads_the_entry_point(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch)
    plugins.load_general_plugins()
    assert type(make_processor()).__name__ == "LowBatchLogitsProcessor"
    assert isinstance(make_processor(), LogitsProcessor)


@pytest.mark.parametrize(
    ("variable", "value"), [("VLLM_PLUGINS", "another"), ("VLLM_PLUGINS", ""), (adapters.DISABLE, "1")]
)
def test_it_can_be_turned_off(tmp_path, monkeypatch, variable, value):
    installed(tmp_path, monkeypatch)
    monkeypatch.setenv(variable, value)
    plugins.load_general_plugins()
    assert type(make_processor()) is LogitsProcessor


def test_disable_0_leaves_it_on(monkeypatch):
    monkeypatch.setenv(adapters.DISABLE, "0")
    adapter.register()
    assert NAME in op_registry_oot


def test_registering_again_changes_nothing(caplog):
    adapter.register()
    first = op_registry_oot[NAME]
    adapter.register()
    assert op_registry_oot[NAME] is first
    assert not warnings(caplog)


def test_a_class_that_someone_else_registered_is_left_alone(caplog):
    class Theirs(LogitsProcessor):
        pass

    LogitsProcessor.register_oot(Theirs)
    adapter.register()
    adapter.register()
    assert op_registry_oot[NAME] is Theirs
    (said,) = warnings(caplog)
    assert "Theirs is registered for vLLM's LogitsProcessor already" in said


def test_a_version_that_is_not_known_works_where_the_interface_is_the_same(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    adapter.register()
    assert NAME in op_registry_oot
    assert not warnings(caplog)


def renamed(monkeypatch):
    monkeypatch.delattr(LogitsProcessor, "_apply_head")


def with_another_parameter(monkeypatch):
    monkeypatch.setattr(LogitsProcessor, "_apply_head", lambda self, lm_head, x, embedding_bias, more: None)


def without_a_class(monkeypatch):
    monkeypatch.delattr(vllm.model_executor.layers.vocab_parallel_embedding, "UnquantizedEmbeddingMethod")


@pytest.mark.parametrize("change", [renamed, with_another_parameter, without_a_class])
def test_another_interface_is_left_alone(monkeypatch, caplog, change):
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    change(monkeypatch)
    adapter.register()
    assert NAME not in op_registry_oot
    (said,) = warnings(caplog)
    assert "vLLM 9.9.9" in said
    assert "0.26.0, 0.33.0" in said


def test_register_never_raises(monkeypatch, caplog):
    monkeypatch.setattr(adapter, "make_processor", lambda engine: 1 / 0)
    adapter.register()
    assert NAME not in op_registry_oot
    (said,) = warnings(caplog)
    assert "ZeroDivisionError" in said


def test_importing_the_adapter_does_not_import_vllm():
    assert python("import lowbatch_lmhead.adapters.vllm, sys; print('vllm' in sys.modules)").strip() == "False"


# --- heads ---


@pytest.mark.parametrize("method", [UnquantizedEmbeddingMethod, UnquantizedLinearMethod])
@pytest.mark.parametrize("head_dtype", [None, torch.bfloat16, torch.float32])
def test_the_engine_projects_through_the_kernel(kernel, head_dtype, method):
    head, processor = make_head(method=method), make_processor(head_dtype)
    if head_dtype is torch.float32 and method is UnquantizedLinearMethod and vllm.__version__ == "0.26.0":
        pytest.skip("vLLM 0.26.0 refuses this itself")
    first = profile(processor, head)
    assert first.shape == (16, VOCAB)
    assert_served(kernel, processor, head)


def test_float32_logits_were_never_rounded(kernel):
    head, processor = make_head(), make_processor(torch.float32)
    profile(processor, head)
    x = inputs(3)
    exact = x.double() @ head.weight.double().T
    assert_close(processor(head, x), exact[:, :VOCAB].float())
    assert kernel.calls


def test_a_tied_embedding(kernel):
    head, processor = make_head(VocabParallelEmbedding), make_processor()
    profile(processor, head)
    assert_served(kernel, processor, head)


def test_a_head_tied_to_an_embedding(kernel):
    embedding = make_head(VocabParallelEmbedding)
    head, processor = make_head().tie_weights(embedding), make_processor()
    profile(processor, head)
    assert_served(kernel, processor, head)


@pytest.mark.parametrize(("vocab", "org"), [(1000, 1000), (1024, 1024), (1016, 1000), (997, 997)])
def test_vocabulary_padding_and_added_tokens(kernel, vocab, org):
    head = make_head(vocab=vocab, org_num_embeddings=org)
    processor = make_processor(vocab=vocab, org_vocab_size=org)
    assert profile(processor, head).shape == (16, org)
    assert_served(kernel, processor, head)


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_embedding_bias(kernel, head_dtype):
    head, processor = make_head(bias=True), make_processor(head_dtype)
    profile(processor, head, bias=head.bias)
    assert_served(kernel, processor, head, head.bias)
    assert_served(kernel, processor, head, torch.randn(1024).bfloat16())
    profile(processor, head)
    assert_served(kernel, processor, head)


def test_soft_cap_and_scale(kernel):
    head, processor = make_head(), make_processor(soft_cap=30.0, scale=0.25)
    profile(processor, head)
    assert_served(kernel, processor, head)


def test_top_tokens(kernel):
    head, processor = make_head(), make_processor(soft_cap=30.0, scale=0.25)
    profile(processor, head)
    with torch.inference_mode(False):
        head.weight.data[VOCAB:] = 100.0  # padding must not win
    x = inputs(5)
    before = len(kernel.calls)
    assert torch.equal(processor.get_top_tokens(head, x), own(processor, head, x, ask="get_top_tokens"))
    assert len(kernel.calls) == before + 1


def test_several_heads_of_one_processor(kernel):
    heads, processor = [make_head(vocab=VOCAB + 64 * index) for index in range(3)], make_processor()
    for head in heads:
        profile(processor, head)
    for head in heads:
        assert_served(kernel, processor, head, rows=[2])


def test_rows_that_no_kernel_serves_are_vllms(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert_served(kernel, processor, head, rows=[1, 32])
    assert_left_to_vllm(kernel, processor, head, rows=[33, 200])


def test_other_than_two_dimensions_are_vllms(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    x = inputs(2, 3)
    before = len(kernel.calls)
    assert torch.equal(processor(head, x), own(processor, head, x))
    assert len(kernel.calls) == before


class Quantized(UnquantizedEmbeddingMethod):
    """Another method, whatever it computes."""

    def apply(self, layer, x, bias=None):
        return 2 * super().apply(layer, x, bias)


def test_a_quantized_head_is_left_to_vllm(kernel, caplog):
    head, processor = make_head(method=Quantized), make_processor()
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)
    assert not kernel.compiled
    assert not warnings(caplog)


def test_a_head_that_is_quantized_later(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    head.quant_method = Quantized()
    assert_left_to_vllm(kernel, processor, head)


def test_batch_invariance_is_left_to_vllm_and_said_once(kernel, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for _ in range(2):
        head, processor = make_head(), make_processor()
        profile(processor, head)
        assert_left_to_vllm(kernel, processor, head)
    assert not kernel.compiled
    (said,) = warnings(caplog)
    assert "VLLM_BATCH_INVARIANT" in said


class Punica:
    """Stands for what adds an adapter's logits."""

    def add_lora_logits(self, logits, *rest):
        logits += 1


def lora(processor):
    made = LogitsProcessorWithLoRA(processor, HIDDEN, torch.bfloat16, torch.device("cpu"), None)
    made.sharded_to_full_mapping_gpu = made.lora_a_stacked = made.lora_b_stacked = None
    made.punica_wrapper = Punica()
    return made


def test_lora_adds_to_the_projection(kernel, monkeypatch):
    monkeypatch.setattr(
        "vllm.lora.layers.logits_processor.current_platform", SimpleNamespace(can_update_inplace=lambda: True)
    )
    head, processor = make_head(), make_processor()
    with_lora = lora(processor)
    profile(with_lora, head)
    x = inputs(4)
    before = len(kernel.calls)
    assert_close(with_lora(head, x), own(processor, head, x) + 1, 5e-3)
    assert len(kernel.calls) == before + 1


def test_a_wrapped_head_is_left_to_vllm(kernel):
    class Wrapped(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer
            self.quant_method, self.tp_size = base_layer.quant_method, 1
            self.weight = base_layer.weight

    head, processor = Wrapped(make_head()), make_processor()
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)
    assert not kernel.compiled


def test_torch_compile_traces_vllms_own_projection(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    x = inputs(3)
    before = len(kernel.calls)
    compiled = torch.compile(lambda x: processor._apply_head(head, x, None), backend="eager", fullgraph=True)
    with torch.inference_mode(False), torch.no_grad():
        assert torch.equal(compiled(x.clone()), x @ head.weight.T)
    assert len(kernel.calls) == before


# --- preparation ---


def test_the_first_projection_tunes_and_gives_vllms_logits(kernel, clock):
    head, processor, x = make_head(), make_processor(), inputs(16)
    logits = processor(head, x)
    assert torch.equal(logits, own(processor, head, x))
    assert max(clock.rows_timed()) == 32


def test_nothing_is_compiled_or_tuned_after_that(kernel, clock):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    compiled, made = list(kernel.compiled), clock.made
    for rows in range(1, 50):
        execute_model(processor, head, inputs(rows))
    assert kernel.compiled == compiled
    assert clock.made == made


@pytest.mark.parametrize(("seqs", "tokens", "rows"), [(4, 0, 4), (4, 2, 12), (256, 0, 32)])
def test_rows_of_the_largest_batch_are_tuned_and_the_others_prepared(
    kernel, clock, config, monkeypatch, seqs, tokens, rows
):
    monkeypatch.setattr(config.scheduler_config, "max_num_seqs", seqs)
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace(num_speculative_tokens=tokens))
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert max(clock.rows_timed()) == rows
    compiled = list(kernel.compiled)
    assert_served(kernel, processor, head, rows=range(1, 17))
    assert kernel.compiled == compiled


def test_vllms_switch_turns_tuning_off(kernel, clock, config, monkeypatch):
    monkeypatch.setattr(config.kernel_config, "enable_flashinfer_autotune", False)
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert not clock.made
    assert_served(kernel, processor, head)


def test_where_the_default_gemm_is_quicker_it_is_vllms(kernel, monkeypatch):
    monkeypatch.setattr(timing, "timer_for", Script(steady(default=100, a=120)))
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)


def test_no_settings_are_the_defaults():
    assert adapter.Settings.read(None) == (True, 32)


def test_a_head_that_is_first_met_while_serving_is_vllms_for_good(kernel, clock, caplog):
    head, processor = make_head(), make_processor()
    assert_left_to_vllm(kernel, processor, head)
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)
    assert not kernel.compiled
    assert not clock.made
    (said,) = warnings(caplog)
    assert "requests were served before it was prepared" in said


def test_steps_of_the_warm_up_prepare(kernel):
    head, processor = make_head(), make_processor()
    compile_or_warm_up_model(execute_model, processor, head, inputs(2))
    assert_served(kernel, processor, head)


def test_inside_a_capture_nothing_is_prepared(kernel, monkeypatch, caplog):
    head, processor, x = make_head(), make_processor(), inputs(4)
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "is_capturing", lambda device: True)
        for _ in range(2):
            assert torch.equal(compile_or_warm_up_model(processor, head, x), own(processor, head, x))
    assert not kernel.compiled
    (said,) = warnings(caplog)
    assert "CUDA graph capture" in said
    compile_or_warm_up_model(processor, head, x)
    assert_served(kernel, processor, head)


def test_a_weight_that_is_loaded_after_profiling(kernel):
    """As vLLM's loader does it, through ``.data``, which changes no version."""
    head, processor = make_head(), make_processor()
    head.weight.data.zero_()
    profile(processor, head)
    assert_left_to_vllm_quietly(kernel, processor, head)
    with torch.inference_mode(False):
        head.weight.data.normal_()
    compile_or_warm_up_model(execute_model, processor, head, inputs(2))
    assert_served(kernel, processor, head, rows=[1, 16])


def assert_left_to_vllm_quietly(kernel, processor, head):
    """Still in the warm-up."""
    x = inputs(2)
    before = len(kernel.calls)
    assert torch.equal(compile_or_warm_up_model(execute_model, processor, head, x), own(processor, head, x))
    assert kernel.calls[before:] == []


def test_a_weight_that_is_loaded_while_serving_stays_vllms(kernel):
    head, processor = make_head(), make_processor()
    head.weight.data.zero_()
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)
    with torch.inference_mode(False):
        head.weight.data.normal_()
    compiled = list(kernel.compiled)
    assert_left_to_vllm(kernel, processor, head)
    assert kernel.compiled == compiled


@pytest.mark.parametrize("name", ["warmup", "Dispatcher"])
def test_a_preparation_that_fails_leaves_the_head_to_vllm(kernel, monkeypatch, caplog, name):
    monkeypatch.setattr(adapter, name, lambda *arguments, **more: 1 / 0)
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert_left_to_vllm(kernel, processor, head)
    assert any("ZeroDivisionError" in said for said in warnings(caplog))


def test_without_tuning_the_head_is_prepared_as_warmup_does(kernel, monkeypatch, caplog):
    monkeypatch.setattr(adapter, "autotune", lambda *arguments, **more: 1 / 0)
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert_served(kernel, processor, head)
    assert any("without tuning" in said for said in warnings(caplog))


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_what_the_library_refuses_vllm_computes(kernel, monkeypatch, caplog, error):
    head, processor = make_head(), make_processor()
    profile(processor, head)

    def refuse(head, x, out):
        raise error("no such input")

    (served,) = adapter._heads.values()
    monkeypatch.setattr(served, "project", refuse)
    assert_left_to_vllm(kernel, processor, head)
    assert any("no such input" in said for said in warnings(caplog))


def test_a_vllm_that_gives_other_logits_is_left_alone(kernel, monkeypatch, caplog):
    """A later vLLM might give other shapes from the same method."""
    original = LogitsProcessor._apply_head
    monkeypatch.setattr(
        LogitsProcessor,
        "_apply_head",
        lambda self, lm_head, hidden_states, embedding_bias: original(self, lm_head, hidden_states, embedding_bias)[
            :, :5
        ],
    )
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert not kernel.compiled
    assert any("gave logits (16, 5)" in said for said in warnings(caplog))


# --- afterwards ---


def test_weights_may_change(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    compiled = list(kernel.compiled)
    with torch.inference_mode(False):
        head.weight.data.normal_()
        assert_served(kernel, processor, head, rows=[2])
        head.weight.data = torch.randn(1024, HIDDEN).bfloat16()
        assert_served(kernel, processor, head, rows=[2])
        head.weight = nn.Parameter(torch.randn(1024, HIDDEN).bfloat16(), requires_grad=False)
        assert_served(kernel, processor, head, rows=[2])
    assert kernel.compiled == compiled


@pytest.mark.parametrize(("rows", "dtype"), [(2048, torch.bfloat16), (1024, torch.float32)])
def test_a_weight_of_another_kind_is_vllms_and_nothing_is_compiled_for_it(kernel, rows, dtype):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    compiled, first, other = list(kernel.compiled), head.weight, torch.randn(rows, HIDDEN, dtype=dtype)
    with torch.inference_mode(False):
        head.weight = nn.Parameter(other, requires_grad=False)
    x = inputs(2).to(dtype)
    before = len(kernel.calls)
    assert torch.equal(execute_model(processor, head, x), own(processor, head, x))
    assert kernel.compiled == compiled
    assert len(kernel.calls) == before
    head.weight = first
    assert_served(kernel, processor, head)


def test_a_bias_is_that_of_its_call(kernel, monkeypatch):
    """Whatever another thread projects in the middle of it."""
    head, processor, x = make_head(), make_processor(), inputs(2)
    mine, theirs = torch.randn(1024).bfloat16(), torch.randn(1024).bfloat16()
    profile(processor, head, bias=mine)
    read = adapter._weight

    def read_after_another_thread(module):
        monkeypatch.setattr(adapter, "_weight", read)
        assert_served(kernel, processor, head, theirs, rows=[2])
        return read(module)

    expected = own(processor, head, x, mine)
    monkeypatch.setattr(adapter, "_weight", read_after_another_thread)
    assert_close(execute_model(processor, head, x, mine).float(), expected.float(), 5e-3)
    assert adapter._weight is read


def test_a_bias_is_not_kept_alive(kernel):
    head, processor, bias = make_head(), make_processor(), torch.randn(1024).bfloat16()
    profile(processor, head, bias=bias)
    assert_served(kernel, processor, head, bias)
    kept = weakref.ref(bias)
    del bias
    assert kept() is None


def test_a_head_is_not_kept_alive(kernel):
    head, processor = make_head(), make_processor()
    profile(processor, head)
    assert adapter._heads
    del head
    gc.collect()
    assert not adapter._heads


# --- the library's own functions ---


def test_the_library_takes_vllms_heads(kernel):
    model = nn.Module()
    model.lm_head = make_head(bias=True)
    report = lowbatch_lmhead.autotune(model)
    assert [head.name for head in report.heads] == ["lm_head"]
    x = inputs(3)
    assert lowbatch_lmhead.applies(model.lm_head, x)
    expected = nn.functional.linear(x, model.lm_head.weight, model.lm_head.bias)
    assert_close(lowbatch_lmhead.project(model.lm_head, x).float(), expected.float(), 5e-3)
    assert kernel.calls


def test_the_library_leaves_vllms_quantized_heads(kernel):
    decision = lowbatch_lmhead.explain(make_head(method=Quantized), inputs(3))
    assert not decision
    assert "left this head to itself" in decision.reasons[0]


# --- tensor parallelism ---

RANK = """
import json, sys
sys.path[:0] = [{tests!r}]
import torch
torch.set_num_threads(1)
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from lowbatch_lmhead import adapters, testing
from lowbatch_lmhead.adapters import vllm as adapter
from lowbatch_lmhead.tuning import timing
from scripted import Script, Tactics, steady

rank, vocab, hidden = int(sys.argv[1]), 1000, 64
config = VllmConfig(device_config=DeviceConfig(device="cpu"))
config.parallel_config.tensor_parallel_size = 2
generator = torch.Generator().manual_seed(5)
weight = torch.randn(vocab, hidden, generator=generator).bfloat16()
x = torch.randn(3, hidden, generator=generator).bfloat16()
with set_current_vllm_config(config), torch.inference_mode():
    parallel_state.init_distributed_environment(2, rank, "file://" + sys.argv[2], rank, "gloo")
    parallel_state.initialize_model_parallel(2, 1)
    head = ParallelLMHead(vocab, hidden, params_dtype=torch.bfloat16)
    head.weight_loader(head.weight, weight)
    plain = LogitsProcessor(vocab)
    plain.use_all_gather = True
    own, own_top = plain(head, x), plain.get_top_tokens(head, x)
    adapter.register()
    # Either tactic is the quicker one on one rank; by the slower rank's times it is b on both.
    timing.timer_for = Script(steady(default=100, a=80 + 18 * rank, b=92 - 2 * rank))
    with testing.reference_backend(Tactics("a", "b")) as kernel:
        processor = LogitsProcessor(vocab)
        processor.use_all_gather = True
        processor(head, torch.randn(16, hidden).bfloat16())
        kernel.calls.clear()
        logits, top = processor(head, x), processor.get_top_tokens(head, x)
    print(json.dumps(dict(
        shard=list(head.weight.shape), shape=list(logits.shape), calls=kernel.calls,
        error=((logits.float() - own.float()).norm() / own.float().norm()).item(),
        exact=((logits.double() - x.double() @ weight.double().T).norm() / own.double().norm()).item(),
        top=torch.equal(top, own_top),
    )))
"""


def test_two_tensor_parallel_ranks(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK.format(tests=str(ROOT / "tests")), str(rank), str(tmp_path / "init")],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "LOWBATCH_LMHEAD_CACHE": str(tmp_path / f"cache{rank}"),  # they must agree without a file in common
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for (out, error), process in zip(done, processes):
        assert process.returncode == 0, error
        said = json.loads(out.splitlines()[-1])
        assert said["shard"] == [512, HIDDEN]
        assert said["shape"] == [3, VOCAB]
        assert said["calls"] == [["b", 3], ["b", 3]]
        assert said["error"] < 5e-3
        assert said["exact"] < 2.5e-3
        assert said["top"]
