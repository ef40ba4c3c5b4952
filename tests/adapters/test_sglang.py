"""SGLang's own classes project through the library: on the CPU, by the reference backend, which counts.

Not run here for want of a GPU: a capture. What SGLang runs before one is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import logging
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_close, exact, inputs, linear, python
from scripted import Script, Tactics, steady
from torch import nn

from lowbatch_lmhead import backends, devices
from lowbatch_lmhead.tuning import timing

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; `make test-sglang` installs and tests it", allow_module_level=True)

import sglang_real as real
from sglang_real import HookRegistry, LogitsProcessor, Model, configured

from lowbatch_lmhead.adapters import sglang as adapter

VOCAB, HIDDEN = 200, 64  # SGLang pads the vocabulary to 256
WITHOUT_TUNING = {"disable_flashinfer_autotune": True}


@pytest.fixture(autouse=True)
def _unhooked(monkeypatch):
    """Each test starts and ends with SGLang as it is installed."""
    monkeypatch.delenv("LOWBATCH_LMHEAD_DISABLE", raising=False)
    monkeypatch.setattr(adapter, "_registered", False)
    for owner, name in real.HOOKED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    HookRegistry.reset()
    yield
    HookRegistry.reset()


@pytest.fixture
def engine(kernel, monkeypatch):
    """engine(model, **server arguments): SGLang with the plugin, up to where it serves ``model`` (or what it returns)."""
    with contextlib.ExitStack() as stack:

        def start(model, warm_up=lambda: None, **arguments):
            stack.enter_context(configured(**(WITHOUT_TUNING | arguments)))
            hook()
            made = model if isinstance(model, nn.Module) else model()
            monkeypatch.setattr("sglang.srt.model_executor.model_runner.capture_cuda_graphs", real.captured(warm_up))
            monkeypatch.setattr("sglang.srt.model_executor.model_runner.prebuild_deepep_v2_buffer", lambda model: None)
            real.runner(made).init_cuda_graphs()
            kernel.calls = 0
            return made

        yield start


def hook():
    adapter.register()
    HookRegistry.apply_hooks()


def plain(**config):
    return lambda: Model(real.head(VOCAB, HIDDEN), VOCAB, **config)


def own_projection(*arguments, **more):
    return real.OWN[0](*arguments, **more)


def own(model, x, buffer=None):
    """What SGLang's own projection gives for the same call."""
    hooked, LogitsProcessor._compute_lm_head = LogitsProcessor._compute_lm_head, real.OWN[0]
    try:
        return model.logits(x, buffer).clone()
    finally:
        LogitsProcessor._compute_lm_head = hooked


# --- how SGLang loads it ---


def test_the_entry_point_loads_as_sglang_loads_it(tmp_path):
    section = re.search(
        r'^\[project\.entry-points\."sglang\.srt\.plugins"\]\n((?:.+\n)+)', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert section, "pyproject.toml has no entry point for SGLang"
    folder = tmp_path / "lowbatch_lmhead-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbatch-lmhead\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{section[1].replace(chr(34), '')}")
    said = python(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'tests/adapters')!r}]\n"
        "import sglang_real\n"
        "import lowbatch_lmhead.adapters.sglang as adapter\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins(); load_plugins(); adapter.register(); sglang_real.HookRegistry.apply_hooks()\n"
        "for owner, name in sglang_real.HOOKED:\n"
        "    print(name, getattr(getattr(owner, name), '__wrapped__', None) is not None)\n"
        "print([len(hooks) for hooks in sglang_real.HookRegistry._hooks.values()])\n"
    )
    assert said.splitlines()[-3:] == ["_compute_lm_head True", "init_cuda_graphs True", "[1, 1]"]


def test_importing_the_adapter_imports_no_engine():
    assert python("import sys, lowbatch_lmhead.adapters.sglang; print('sglang' in sys.modules)").strip() == "False"


def test_registering_twice_hooks_once():
    adapter.register()
    hook()
    assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == {
        adapter.PROJECTION: 1,
        adapter.PREPARATION: 1,
    }
    assert LogitsProcessor._compute_lm_head.__wrapped__ is real.OWN[0]


def test_the_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("LOWBATCH_LMHEAD_DISABLE", "1")
    hook()
    assert not HookRegistry._hooks
    assert LogitsProcessor._compute_lm_head is real.OWN[0]


def without_lm_head(self, hidden_states, head, embedding_bias=None, *, out=None):
    return hidden_states


def with_another_switch(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
    return hidden_states if self.use_something_new else None


@pytest.mark.parametrize("method", [without_lm_head, with_another_switch])
def test_an_unknown_interface_is_left_alone(method, monkeypatch, caplog):
    monkeypatch.setattr(LogitsProcessor, "_compute_lm_head", method)
    hook()
    assert LogitsProcessor._compute_lm_head is method
    (record,) = [one for one in caplog.records if one.name == "lowbatch_lmhead"]
    assert adapter.KNOWN_VERSIONS in record.getMessage()
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize(("owner", "name"), real.HOOKED)
def test_a_method_that_is_gone_is_an_unknown_interface(owner, name, monkeypatch, caplog):
    monkeypatch.delattr(owner, name)
    hook()
    assert not HookRegistry._hooks
    assert f"has no {owner.__name__}.{name}" in caplog.text
    assert adapter.KNOWN_VERSIONS in caplog.text


def test_the_interface_of_older_versions_is_known():
    def without_out(self, hidden_states, lm_head, embedding_bias=None):
        return self.use_fp32_lm_head, self.rl_on_policy_target

    assert tuple(inspect.signature(without_out).parameters) == adapter._PARAMETERS[:-1]
    assert adapter._attributes_of_self(without_out) < adapter._SWITCHES
    assert adapter._out_dtype(SimpleNamespace()) is None  # no switch at all


def test_a_failure_is_one_warning_and_sglang_as_it_was(monkeypatch, caplog):
    def fail(*arguments, **more):
        raise RuntimeError("no registry today")

    monkeypatch.setattr(HookRegistry, "register", fail)
    hook()
    assert LogitsProcessor._compute_lm_head is real.OWN[0]
    (record,) = [one for one in caplog.records if one.name == "lowbatch_lmhead"]
    assert "no registry today" in record.getMessage()


# --- what is served ---


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_engines_method_projects_through_the_kernel(engine, kernel, rows):
    model = engine(plain())
    x = inputs(rows)
    logits = model.logits(x)
    assert kernel.calls == 1
    assert logits.shape == (rows, VOCAB)
    assert logits.dtype is torch.float32
    assert_close(logits.bfloat16(), own(model, x))
    assert kernel.calls == 1, "SGLang's own projection is no kernel of ours"
    assert_close(logits.bfloat16(), exact(x, model.lm_head.weight[:VOCAB]))


@pytest.mark.parametrize("error", [ValueError, AttributeError, RuntimeError])
def test_an_error_of_the_library_does_not_stop_the_engine(engine, monkeypatch, caplog, error):
    model, x = engine(plain()), inputs(2)

    def fail(*arguments, **more):
        raise error("not today")

    monkeypatch.setattr(adapter, "project", fail)
    for _ in range(2):
        assert torch.equal(model.logits(x), own(model, x))
    assert caplog.text.count("not today") == 1


def test_it_returns_what_sglangs_method_returns(engine, kernel):
    model = engine(plain())
    x = inputs(4)
    ours = model.logits_processor._compute_lm_head(x, model.lm_head)
    theirs = own_projection(model.logits_processor, x, model.lm_head)
    assert kernel.calls == 1
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_scale_and_soft_cap_stay_sglangs(engine, kernel, monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.logits_processor._is_cpu", True)  # its soft cap on a GPU is a Triton kernel
    model = engine(plain(logit_scale=0.25, final_logit_softcapping=5.0))
    x = inputs(4)
    logits = model.logits(x)
    assert kernel.calls == 1
    assert logits.abs().max() <= 5.0
    assert_close(logits, own(model, x), within=5e-3)


@pytest.mark.parametrize("tie", ["weight", "module", "embedding"])
def test_tied_heads(engine, kernel, tie):
    def model():
        embedding = real.head(VOCAB, HIDDEN, real.VocabEmbedding)
        if tie == "embedding":  # the model projects through what it looks tokens up in
            return Model(embedding, VOCAB, name="embed_tokens")
        made = Model(embedding if tie == "module" else real.head(VOCAB, HIDDEN).tie_weights(embedding), VOCAB)
        made.embed_tokens = embedding
        return made

    model = engine(model)
    x = inputs(2)
    logits = model.logits(x)
    assert kernel.calls == 1
    assert_close(logits.bfloat16(), own(model, x))


def test_a_head_that_is_a_linear(engine, kernel):
    model = engine(lambda: Model(linear(VOCAB, HIDDEN), VOCAB))
    x = inputs(2)
    assert_close(model.logits(x).bfloat16(), own(model, x))
    assert kernel.calls == 1


def test_an_excluded_head_of_a_quantized_model(engine, kernel):
    def model():
        made = real.head(VOCAB, HIDDEN)
        made.quant_method = type("UnquantizedLinearMethod", (), {"apply": None})()
        return Model(made, VOCAB)

    engine(model).logits(inputs(2))
    assert kernel.calls == 1


def test_a_shard(engine, kernel):
    def model():
        with real.ranks(2, rank=1):
            shard = real.head(VOCAB, HIDDEN)
        return Model(shard, VOCAB)

    model = engine(model)
    assert model.lm_head.weight.shape == (128, HIDDEN)
    x = inputs(2)
    assert_close(model.logits(x).bfloat16(), own(model, x))
    assert kernel.calls == 1


def test_weights_may_be_replaced(engine, kernel):
    model = engine(plain())
    x = inputs(2)
    for weight in (torch.randn(256, HIDDEN), torch.randn(256, HIDDEN)):
        del model.lm_head.weight
        model.lm_head.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        assert_close(model.logits(x).bfloat16(), own(model, x))
    model.lm_head.weight.data.neg_()
    assert_close(model.logits(x).bfloat16(), own(model, x))
    assert kernel.calls == 3


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"enable_fp32_lm_head": True}, {}),
        ({}, {"enable_lm_head_fp32": True}),
        ({}, {"enable_lm_head_output_fp32": True}),
    ],
)
def test_the_float32_flags_give_unrounded_logits(engine, kernel, arguments, config):
    model = engine(plain(**config), **arguments)
    x = inputs(4)
    logits = model.logits(x)
    assert kernel.calls == 1
    assert_close(logits, exact(x, model.lm_head.weight[:VOCAB]))  # 1e-5: bfloat16 would be 2e-3
    if not config.get("enable_lm_head_output_fp32"):  # which SGLang ignores on a CPU
        assert_close(logits, own(model, x))


def test_float32_logits_are_written_into_the_buffer(engine, kernel):
    model = engine(lambda: Model(real.head(256, HIDDEN), 256), enable_fp32_lm_head=True)
    x, buffer = inputs(4), torch.full((4, 256), float("nan"))
    received = []
    spy = model.logits_processor._copy_logits_to_buffer
    model.logits_processor._copy_logits_to_buffer = lambda logits, *more, **named: (
        received.append(logits) or spy(logits, *more, **named)
    )
    logits = model.logits(x, buffer)
    assert kernel.calls == 1
    assert logits is buffer
    assert received[0] is buffer, "the kernel itself writes there"
    assert_close(buffer, exact(x, model.lm_head.weight))


def test_a_buffer_of_another_shape_is_not_written(engine, kernel):
    model = engine(lambda: Model(real.head(256, HIDDEN), 256), enable_fp32_lm_head=True)
    x, buffer = inputs(4), torch.full((8, 256), float("nan"))
    assert_close(model.logits(x, buffer), exact(x, model.lm_head.weight))
    assert kernel.calls == 1
    assert buffer.isnan().all()


def test_a_buffer_does_not_change_the_rounding(engine, kernel):
    model = engine(lambda: Model(real.head(256, HIDDEN), 256))
    x, buffer = inputs(4), torch.full((4, 256), float("nan"))
    assert model.logits(x, buffer) is buffer
    assert kernel.calls == 1
    assert torch.equal(buffer, buffer.bfloat16().float())
    assert torch.equal(buffer, model.logits(x))


# --- what stays SGLang's ---


def lora(model):
    wrapped = nn.Module()
    wrapped.weight = model.lm_head.weight
    wrapped.set_lora = wrapped.apply_lora = lambda *arguments: None
    wrapped.forward = lambda x: model_output(x)
    model.lm_head = wrapped


def model_output(x):
    return torch.full((x.shape[0], 256), 7.0, dtype=x.dtype)


def quantized(model):
    model.lm_head.quant_method = SimpleNamespace(apply=lambda head, x, bias: model_output(x))


def gguf(model):
    quantized(model)
    del model.lm_head.weight


def packed(model):
    model.lm_head.quant_method = type("PackWeightMethod", (), {})()


def biased(model):
    model.lm_head.bias = nn.Parameter(torch.randn(256).bfloat16(), requires_grad=False)


def on_policy(model):
    model.logits_processor.rl_on_policy_target = "fsdp"


def wrapped_weight(model):
    weight = torch.randn(256, HIDDEN).bfloat16().as_subclass(type("Quantized", (torch.Tensor,), {}))
    del model.lm_head.weight
    model.lm_head.weight = weight


@pytest.mark.parametrize("change", [lora, quantized, gguf, packed, biased, on_policy, wrapped_weight])
def test_heads_that_stay_sglangs(engine, kernel, change):
    def model():
        made = plain()()
        change(made)
        return made

    model = engine(model)
    x = inputs(4)
    assert torch.equal(model.logits(x), own(model, x))
    assert (kernel.calls, kernel.compiled) == (0, 0)


def test_a_head_is_left_alone_with_the_reason(engine, caplog):
    caplog.set_level(logging.INFO, "lowbatch_lmhead")

    def model():
        made = plain()()
        biased(made)
        return made

    engine(model)
    assert "ParallelLMHead is left to SGLang: it has a bias" in caplog.text


@pytest.mark.parametrize("change", [quantized, on_policy, wrapped_weight])
def test_heads_that_change_afterwards(engine, kernel, change):
    model = engine(plain())
    change(model)
    x = inputs(4)
    assert torch.equal(model.logits(x), own(model, x))
    assert kernel.calls == 0


@pytest.mark.parametrize("rows", [0, 40])
def test_row_counts_beyond_the_kernels(engine, kernel, rows):
    model = engine(plain())
    x = inputs(rows)
    assert torch.equal(model.logits(x), own(model, x))
    assert kernel.calls == 0


def test_input_of_another_dtype(engine, kernel):
    model = engine(plain())
    x = inputs(4, dtype=torch.float32)
    assert torch.equal(model.logits(x), own(model, x))
    assert kernel.calls == 0


def test_an_embedding_bias_of_the_call(engine, kernel):
    model = engine(plain())
    x, bias = inputs(4), torch.randn(256).bfloat16()
    logits = model.logits_processor._compute_lm_head(x, model.lm_head, bias)
    assert torch.equal(logits, own_projection(model.logits_processor, x, model.lm_head, bias))
    assert kernel.calls == 0


def test_a_buffer_of_another_dtype_is_refused_as_by_sglang(engine, kernel):
    model = engine(lambda: Model(real.head(256, HIDDEN), 256), enable_fp32_lm_head=True)
    x, out = inputs(4), torch.zeros(4, 256, dtype=torch.bfloat16)
    logits = model.logits_processor._compute_lm_head(x, model.lm_head, out=out)
    assert torch.equal(logits, own_projection(model.logits_processor, x, model.lm_head, out=out))
    assert kernel.calls == 0


def test_deterministic_inference(engine, kernel, caplog):
    model = engine(plain(), enable_deterministic_inference=True)
    x = inputs(4)
    assert torch.equal(model.logits(x), own(model, x))
    assert (kernel.calls, kernel.compiled) == (0, 0)
    assert caplog.text.count("deterministic") == 1


def test_inside_torch_compile(engine, kernel):
    model = engine(plain())
    processor, lm_head, x = model.logits_processor, model.lm_head, inputs(4)
    compiled = torch.compile(lambda x: processor._compute_lm_head(x, lm_head), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), own_projection(processor, x, lm_head))
    assert kernel.calls == 0


# --- preparing ---


def test_nothing_is_compiled_once_it_serves(engine, kernel):
    model = engine(plain())
    prepared = kernel.compiled
    assert prepared > 0
    other = Model(real.head(VOCAB + 100, HIDDEN), VOCAB + 100)
    for rows in (*range(1, 18), 64):
        model.logits(inputs(rows))
        other.logits(inputs(rows))
    model.lm_head.weight.data = torch.randn(512, HIDDEN).bfloat16()  # no shape that was prepared
    model.logits(inputs(4))
    del model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.randn(256, HIDDEN))  # nor such a dtype
    model.logits(inputs(4))
    assert kernel.compiled == prepared
    assert kernel.calls == 16


def test_it_is_prepared_before_the_first_capture(engine, kernel):
    model = built()
    met = []

    def warm_up():
        compiled, kernel.calls = kernel.compiled, 0
        model.logits(inputs(2))
        met.append((compiled, kernel.calls))

    engine(model, warm_up)
    assert met == [(kernel.compiled, 1)]
    assert kernel.compiled > 0


def built(**config):
    with configured(**WITHOUT_TUNING):
        return plain(**config)()


def test_a_head_of_another_name_is_prepared_by_the_warm_up(engine, kernel):
    with configured(**WITHOUT_TUNING):
        model = Model(real.head(VOCAB, HIDDEN), VOCAB, name="output")
    engine(model, warm_up=lambda: model.logits(inputs(2)))
    prepared = kernel.compiled
    x = inputs(4)
    assert_close(model.logits(x).bfloat16(), own(model, x))
    assert (kernel.calls, kernel.compiled) == (1, prepared)


def test_nothing_is_prepared_inside_a_capture(engine, kernel, monkeypatch):
    with configured(**WITHOUT_TUNING):
        model = Model(real.head(VOCAB, HIDDEN), VOCAB, name="output")
    monkeypatch.setattr(adapter, "is_capturing", lambda device: True)
    engine(model, warm_up=lambda: model.logits(inputs(2)))
    assert (kernel.calls, kernel.compiled) == (0, 0)


def test_an_embedding_model_is_not_prepared(kernel, monkeypatch):
    with configured(**WITHOUT_TUNING):
        model = real.runner(plain()())
        model.is_generation = False
        adapter._prepare_model(model)
    assert kernel.compiled == 0


@pytest.fixture
def tuned(kernel, monkeypatch):
    """Tuning by a script, in which the one kernel is quicker than the default GEMM up to 4 rows."""
    tactics = Tactics("a")
    script = Script(steady(default=100, a=lambda rows: 90 if rows <= 4 else 110))
    monkeypatch.setattr(timing, "timer_for", script)
    before = list(backends._KERNELS)
    backends._KERNELS[:] = [tactics]
    yield tactics, script
    backends._KERNELS[:] = before


def test_tuning_decides_which_row_counts_are_served(engine, tuned):
    kernel, script = tuned
    model = engine(plain(), disable_flashinfer_autotune=False)
    assert script.made == 1
    kernel.calls.clear()
    for rows in (1, 4, 5, 16):
        x = inputs(rows)
        assert_close(model.logits(x).bfloat16(), own(model, x))
    assert kernel.calls == [("a", 1), ("a", 4)]


def test_rows_beyond_those_that_were_tuned_are_served_as_without_tuning(engine, tuned, monkeypatch):
    kernel, _ = tuned
    monkeypatch.setattr(devices, "untuned_rows", lambda arch: 64)
    model = engine(plain(), disable_flashinfer_autotune=False)
    kernel.calls.clear()
    for rows in (32, 33, 64, 65):
        model.logits(inputs(rows))
    assert kernel.calls == [("a", 33), ("a", 64)]


def test_sglangs_switch_turns_tuning_off(engine, tuned):
    kernel, script = tuned
    model = engine(plain(), disable_flashinfer_autotune=True)
    kernel.calls.clear()
    model.logits(inputs(16))
    assert script.made == 0
    assert kernel.calls == [("a", 16)]


@pytest.mark.parametrize(("draft", "flags"), [(False, {}), (True, {}), (True, {"enable_lm_head_fp32": True})])
def test_each_head_and_type_is_prepared_once_in_the_order_of_the_model(kernel, monkeypatch, draft, flags):
    seen = []
    monkeypatch.setattr(adapter, "_served_rows", lambda weight, dtype: seen.append((weight, dtype)) or (False, True))
    with configured(**WITHOUT_TUNING):
        first, second = plain()(), plain(**flags)()
        both = nn.Sequential(first, second)
        adapter._prepare_model(real.runner(both))
        if draft:
            adapter._prepare_model(real.runner(both))
    types = [None, torch.float32] if flags else [None]
    assert [(id(weight), dtype) for weight, dtype in seen] == [
        (id(one.lm_head.weight), dtype) for dtype in types for one in (first, second)
    ]


def test_all_tensor_parallel_ranks_tune_together(monkeypatch):
    seen = []

    def autotune(weight, **arguments):
        seen.append(arguments)
        return SimpleNamespace(heads=[SimpleNamespace(rows=())])

    monkeypatch.setattr(adapter, "autotune", autotune)
    with configured():
        adapter._served_rows(torch.zeros(2, 2), None)
        with real.ranks(2):
            adapter._served_rows(torch.zeros(2, 2), torch.float32)
    assert [(one["out_dtype"], one["process_group"]) for one in seen] == [
        (None, None),
        (torch.float32, "the CPU group"),
    ]


@pytest.mark.parametrize("where", ["autotune", "_find_heads", "_reason_against"])
def test_an_error_does_not_keep_the_engine_from_serving(engine, kernel, monkeypatch, caplog, where):
    def fail(*arguments, **more):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(adapter, where, fail)
    model = engine(plain(), disable_flashinfer_autotune=False)
    x = inputs(4)
    assert torch.equal(model.logits(x), own(model, x))
    assert kernel.calls == 0
    assert "out of luck" in caplog.text


def test_a_configuration_that_cannot_be_read_leaves_all_to_sglang(engine, kernel, monkeypatch, caplog):
    def fail():
        raise RuntimeError("not published")

    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", fail)
    with configured(**WITHOUT_TUNING):
        assert not adapter._may_prepare()
    assert "not published" in caplog.text


def test_the_hooks_keep_no_head_alive(engine, kernel):
    model = engine(plain())
    model.logits(inputs(2))
    kept = weakref.ref(model.lm_head), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert [one() for one in kept] == [None, None]
