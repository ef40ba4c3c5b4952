"""Preparing: what is compiled and checked, what is dropped, what warmup reports."""

from __future__ import annotations

import contextlib
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from conftest import HIDDEN, VOCAB, Counting, assert_close, assert_logits, exact, inputs, linear, mistake
from torch import nn

from lowbatch_lmhead import bind, explain, project, register_head, testing, verify, warmup
from lowbatch_lmhead.backends import Launch


class Broken(Counting):
    """The reference backend with a fault of its own: ``fault(out, bias)`` is done to its logits."""

    def __init__(self, fault, name="broken"):
        super().__init__()
        self.fault, self.name = fault, name

    def compile(self, problem, tactic):
        launch = super().compile(problem, tactic)

        def call(weight, x, bias, out):
            launch.call(weight, x, bias, out)
            self.fault(out)

        return Launch(call, self.name, str(tactic))


def _raise(out):
    raise RuntimeError("CUDA error: no kernel image")


def _zeros(out):
    out.zero_()


def _unwritten(out):
    out.fill_(float("nan"))


def _last_row(out):
    out[:, -1] = 0


def _last_input(out):
    out[-1] = out[0] if len(out) > 1 else 0


def _half_unwritten(out):
    out[:, out.shape[1] // 2 :] = float("nan")


def _shifted(out):
    out.copy_(out.roll(1, dims=1))


def _infinite(out):
    out[0, 0] = float("inf")


def _scaled(out):
    out.mul_(1.05)


FAULTS = {
    _raise: "RuntimeError: CUDA error: no kernel image",
    _zeros: "logits differ from the default GEMM",
    _unwritten: r"300 of 300 logits differ .* row 0 at vocabulary row 0: nan instead of",
    _last_row: r"3 of 300 logits differ .* row 0 at vocabulary row 99: 0 instead of",
    _last_input: r"100 of 300 logits differ .* row 2 at vocabulary row 0",
    _half_unwritten: r"150 of 300 logits differ .* row 0 at vocabulary row 50: nan",
    _shifted: "logits differ",
    _infinite: r"1 of 300 logits differ .* vocabulary row 0: inf instead of",
    _scaled: "logits differ",
}


@pytest.fixture
def serve():
    """Register backends for CPU heads, first choice first."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        yield lambda *backends: [stack.enter_context(testing.reference_backend(backend)) for backend in backends]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestDropping:
    @pytest.mark.parametrize(("fault", "reason"), FAULTS.items(), ids=[fault.__name__[1:] for fault in FAULTS])
    def test_next_in_line_serves(self, fault, reason, serve, caplog):
        broken, right = serve(Broken(fault), Counting())
        head, x = linear(bias=True), inputs(3)
        for _ in range(3):
            assert_logits(project(head, x), head, x)
        decision = explain(head, x)
        assert decision.taken
        assert decision.backend == "reference"
        assert len(decision.reasons) == 1
        (said,) = warnings(caplog)
        assert said == f"100x64, rows 3: dropped {decision.reasons[0]}"
        with pytest.raises(ValueError, match=rf"^broken \(4 splits\): .*{reason}"):
            raise ValueError(decision.reasons[0])
        assert (broken.compiled, broken.calls, right.compiled) == (1, 1, 1)

    @pytest.mark.parametrize("fault", [_raise, _last_row])
    def test_default_gemm_serves_when_all_are_dropped(self, fault, serve, caplog):
        serve(Broken(fault, "first"), Broken(fault, "second"))
        head, x = linear(bias=True), inputs(3)
        for _ in range(3):
            assert torch.equal(project(head, x), F.linear(x, head.weight, head.bias))
        decision = explain(head, x)
        assert (decision.taken, decision.backend, decision.tactic) == (False, "default GEMM", None)
        assert [reason.split(" ")[0] for reason in decision.reasons] == ["first", "second"]
        assert str(decision).startswith("3 rows: default GEMM\n  because first (4 splits): ")
        assert len(warnings(caplog)) == 2
        report = str(warmup(head))
        assert "default GEMM" in report
        assert "because second (4 splits)" in report

    def test_compiler_that_raises(self, serve, caplog):
        class NoCompiler(Counting):
            name = "uncompiled"

            def compile(self, problem, tactic):
                super().compile(problem, tactic)
                raise OSError("ptxas\n  failed " + "x" * 1000)

        broken, _ = serve(NoCompiler(), Counting())
        head = linear()
        for rows in (1, 2, 3):
            x = inputs(rows)
            assert_logits(project(head, x), head, x)
        assert broken.compiled == 1, "a tactic that was dropped is not tried again"
        (said,) = warnings(caplog)
        assert "uncompiled (4 splits): OSError: ptxas failed xxx" in said
        assert len(said) < 450

    def test_what_is_wrong_at_one_row_count_serves_nowhere(self, serve):
        def five(out):
            if len(out) == 5:
                out.zero_()

        broken, right = serve(Broken(five), Counting())
        head = linear()
        report = warmup(head)
        first, last, decision = report.heads[0].ranges()[0]
        assert (first, last, decision.backend, decision.prepared) == (1, 16, "reference", True)
        for rows in range(1, 17):
            x = inputs(rows)
            assert_logits(project(head, x), head, x)
        assert right.compiled == broken.compiled == 1

    def test_what_turns_out_wrong_no_longer_serves_what_was_prepared_before(self, serve, caplog):
        broken, right = serve(Broken(lambda out: out.zero_() if len(out) == 5 else None), Counting())
        head = linear()
        bound = bind(head)
        for rows in (3, 5, 3, 5):
            x = inputs(rows)
            assert_logits(bound(x), head, x)
            assert explain(head, x).backend == ("broken" if rows == 3 and not right.compiled else "reference")
        assert right.compiled == broken.compiled == 1

    def test_second_tactic_serves(self, serve, caplog):
        class Two(Counting):
            def tactics(self, problem):
                return ["bad", "good"]

            def compile(self, problem, tactic):
                launch = super().compile(problem, tactic)
                return launch if tactic == "good" else Launch(lambda *tensors: None, self.name, tactic)

        serve(Two())
        head, x = linear(), inputs(3)
        assert_logits(project(head, x), head, x)
        assert explain(head, x).tactic == "good"
        assert explain(head, inputs(4)).tactic == "good", "a dropped tactic is passed over for other row counts too"

    def test_launch_that_refuses_later(self, kernel, monkeypatch, caplog):
        head, x = linear(), inputs(3)
        project(head, x)
        compute = testing.Reference.compile

        def refuse(self, problem, tactic):
            launch = compute(self, problem, tactic)

            def call(weight, x, bias, out):
                if x.data_ptr() == hated:
                    raise ValueError("mismatched x")
                launch.call(weight, x, bias, out)

            return Launch(call, launch.backend, launch.tactic)

        monkeypatch.setattr(testing.Reference, "compile", refuse)
        testing.forget()
        hated = x.data_ptr()
        for _ in range(3):
            assert_logits(project(head, x), head, x)
        assert warnings(caplog) == ["a launch refused what the gate let pass, the default GEMM serves: mismatched x"]


class TestMistake:
    VOCAB, HIDDEN, ROWS = 131077, 16, 2

    @pytest.fixture(scope="class")
    @classmethod
    def weight(cls):
        return torch.randn(cls.VOCAB, cls.HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()

    def launch(self, change):
        def call(weight, x, bias, out):
            logits = x.float() @ weight.float().t()
            if bias is not None:
                logits += bias.float()
            change(logits)
            out.copy_(logits)

        return Launch(call, "test", "test")

    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("row", [0, 1])
    @pytest.mark.parametrize("column", [0, 1, 1000, 65535, 65536, VOCAB // 2, VOCAB - 1])
    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "off"])
    def test_one_wrong_logit(self, out_dtype, row, column, wrong, weight):
        # A hundredth of a logit's standard deviation, beside bfloat16's rounding of the logit.
        def change(logits):
            off = logits[row, column] + 0.01 * logits[row, column].abs() + 0.01 * weight[column].float().norm()
            logits[row, column] = off if wrong == "off" else wrong

        found = mistake(self.launch(change), weight, None, self.ROWS, out_dtype)
        assert found is not None
        assert found.startswith("1 of ")
        assert f"the first of row {row} at vocabulary row {column}: " in found

    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("scale", [1e-20, 1e-3, 1, 1e6])
    def test_right_logits(self, out_dtype, has_bias, scale, weight):
        weight = weight * scale
        bias = (torch.randn(self.VOCAB) * 100 * scale).bfloat16() if has_bias else None
        assert mistake(self.launch(lambda logits: None), weight, bias, self.ROWS, out_dtype) is None

    def test_forgotten_bias(self, weight):
        bias = torch.randn(self.VOCAB).bfloat16()
        launch = Launch(lambda weight, x, bias, out: out.copy_(F.linear(x, weight)), "test", "test")
        assert "logits differ" in mistake(launch, weight, bias, self.ROWS, torch.bfloat16)

    def test_rounded_float32(self, weight):
        def change(logits):
            logits.copy_(logits.bfloat16())

        assert "logits differ" in mistake(self.launch(change), weight, None, self.ROWS, torch.float32)

    def test_partly_nan_weight(self, weight):
        weight = weight.clone()
        weight[100:200] = float("nan")
        weight[-1, 0] = float("inf")
        assert mistake(self.launch(lambda logits: None), weight, None, self.ROWS, torch.bfloat16) is None

        def change(logits):
            logits[:, 200] = 0

        found = mistake(self.launch(change), weight, None, self.ROWS, torch.bfloat16)
        assert found.startswith("2 of ")
        assert "vocabulary row 200:" in found

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
    def test_weight_that_says_nothing(self, value):
        weight = torch.full((VOCAB, HIDDEN), value, dtype=torch.bfloat16)
        with pytest.raises(verify.NotYet):
            mistake(self.launch(lambda logits: None), weight, None, 1, torch.bfloat16)

    def test_rows_of_zeros_are_compared(self, weight):
        weight = weight.clone()
        weight[100:300] = 0
        assert mistake(self.launch(lambda logits: None), weight, None, self.ROWS, torch.bfloat16) is None

        def change(logits):
            logits[1, 200] = 1

        assert "vocabulary row 200" in mistake(self.launch(change), weight, None, self.ROWS, torch.bfloat16)

    def test_tiny_and_huge_rows(self, weight):
        weight = weight.clone()
        weight[0] *= 1e-24
        weight[1000:2000] *= 1e19
        assert mistake(self.launch(lambda logits: None), weight, None, self.ROWS, torch.float32) is None

        def change(logits):
            logits[0, 1500] *= 3

        assert "vocabulary row 1500" in mistake(self.launch(change), weight, None, self.ROWS, torch.float32)

    def test_bias_that_bars_tokens(self, weight):
        bias = torch.zeros(self.VOCAB).bfloat16()
        bias[-3:] = -torch.inf
        assert mistake(self.launch(lambda logits: None), weight, bias, self.ROWS, torch.bfloat16) is None

    @pytest.mark.parametrize("what", ["x taken for compact", "a row too many", "a column too many"])
    def test_memory_around(self, what, weight):
        def call(weight, x, bias, out):
            logits = x.float() @ weight.float().t()
            if what == "x taken for compact":
                logits = x.as_strided(x.shape, (x.shape[1], 1)).float() @ weight.float().t()
            elif what == "a row too many":
                out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[0] * out.stride(0)).fill_(1)
            else:
                out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[1]).fill_(1)
            out.copy_(logits)

        assert mistake(Launch(call, "test", "test"), weight, None, self.ROWS, torch.bfloat16) is not None

    def test_bias_alone_is_noticed_beside_a_large_bias(self, weight):
        bias = torch.full((self.VOCAB,), 500.0).bfloat16()
        launch = Launch(lambda weight, x, bias, out: out.copy_(bias.expand_as(out)), "test", "test")
        assert "logits differ" in mistake(launch, weight * 0.01, bias, self.ROWS, torch.float32)

    def test_global_random_state_is_left_alone(self, kernel):
        head, before = linear(), torch.get_rng_state()
        warmup(head)
        assert kernel.calls
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("mode", ["autocast", "grad", "inference"])
    def test_modes_around_the_check(self, mode, kernel):
        head = linear(bias=True).requires_grad_(mode == "grad")
        context = {
            "autocast": torch.autocast("cpu", dtype=torch.float16),
            "grad": torch.enable_grad(),
            "inference": torch.inference_mode(),
        }[mode]
        with context:
            report = warmup(head)
        assert report.heads[0].decisions[0].backend == "reference" or mode == "autocast"
        for rows in (1, 16):
            x = inputs(rows)
            assert_logits(project(head, x), head, x)


class Heads(nn.Module):
    """A model with the heads that it is given, each of a registered type."""

    def __init__(self, *heads):
        super().__init__()
        self.heads = nn.ModuleList(heads)


class Projector(nn.Module):
    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.fixture
def heads():
    """Make a model of Projectors."""
    register_head(Projector, lambda head: (head.weight, head.bias))
    return lambda *parts: Heads(*(Projector(*part) for part in parts))


class TestWarmup:
    def test_one_compilation_for_all_row_counts(self, kernel):
        head = linear()
        warmup(head)
        assert (kernel.compiled, kernel.calls) == (1, 32)  # each check is two launches
        warmup(head)
        assert (kernel.compiled, kernel.calls) == (1, 32)

    def test_heads_of_one_shape_share_their_launches(self, kernel):
        first, second = linear(), linear()
        warmup(first)
        x = inputs(3)
        assert_logits(project(second, x), second, x)
        assert kernel.compiled == 1

    def test_other_dtypes_and_biases_are_compiled_apart(self, kernel):
        head = linear()
        warmup(head)
        warmup(head, out_dtype=torch.float32)
        warmup(linear(bias=True))
        warmup(linear(dtype=torch.float32))
        assert kernel.compiled == 4
        assert explain(head, inputs(3), out_dtype=torch.float32).prepared

    def test_max_rows(self, kernel):
        head = linear()
        report = warmup(head, max_rows=4)
        assert [explain(head, inputs(rows)).prepared for rows in range(1, 7)] == [True] * 4 + [False] * 2
        assert kernel.calls == 8
        assert "  1-4 rows" in str(report)
        assert "1-5 rows" not in str(report)

    def test_more_rows_than_the_plan_has(self, kernel):
        report = warmup(linear(), max_rows=1000)
        assert kernel.calls == 32
        assert "  1-16 rows   reference (4 splits)" in str(report)
        assert "  17+ rows    default GEMM" in str(report)

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True, [4]])
    def test_wrong_max_rows(self, wrong, kernel):
        with pytest.raises(ValueError, match="max_rows must be a whole number of at least 1, or None, got"):
            warmup(linear(), max_rows=wrong)
        assert not kernel.compiled

    @pytest.mark.parametrize("wrong", [torch.float16, "float32", 5])
    def test_wrong_out_dtype(self, wrong, kernel):
        with pytest.raises(ValueError, match="out_dtype must be None"):
            warmup(linear(), out_dtype=wrong)
        assert not kernel.compiled

    def test_needs_no_grad_mode(self):
        with testing.reference_backend(Counting()) as kernel:
            head = linear(bias=True).requires_grad_()
            warmup(head)
            with torch.no_grad():
                assert explain(head, inputs(3)).prepared
            assert kernel.compiled == 1

    def test_weight_met_twice_is_prepared_once(self, heads, kernel):
        weight = linear().weight
        report = warmup(heads((weight,), (weight,), (linear(vocab=50).weight,)))
        assert (kernel.compiled, kernel.calls) == (2, 64)
        assert [(head.name, head.vocab) for head in report.heads] == [
            ("heads.0", 100),
            ("heads.1", 100),
            ("heads.2", 50),
        ]
        assert report.heads[0].decisions == report.heads[1].decisions

    def test_one_weight_with_and_without_bias(self, heads, kernel):
        plain = linear(bias=True)
        model = heads((plain.weight,), (plain.weight, plain.bias))
        warmup(model)
        for head in model.heads:
            assert explain(head, inputs(3)).prepared

    def test_one_weight_taken_and_left_to_itself(self, heads, kernel):
        weight = linear().weight
        model = heads((weight,), (weight,))
        quantized = model.heads[1]
        register_head(Projector, lambda head: None if head is quantized else (head.weight, head.bias))
        report = warmup(model)
        assert report.heads[0].decisions[0].taken
        assert not report.heads[1].decisions[0].taken

    def test_refused_head(self, kernel):
        head = linear()
        head.register_forward_hook(lambda *_: None)
        report = warmup(head)
        assert str(report).splitlines()[:3] == [
            "head 100x64",
            "  all rows    default GEMM",
            "              because it has hooks",
        ]
        assert not kernel.compiled

    def test_without_a_gpu(self):
        report = warmup(linear())
        assert "because the head is on cpu, not on a CUDA GPU" in str(report)
        assert (report.compiled, report.loaded) == (0, 0)

    def test_report_is_json(self, heads, kernel):
        report = warmup(heads((linear().weight,), (linear().weight.t(),)))
        given = json.loads(json.dumps(report.to_dict()))
        assert given["compiled"] == given["loaded"] == 0, "the reference backend makes no objects"
        assert given["seconds"] > 0
        first, second = given["heads"]
        assert (first["name"], first["vocab"], first["hidden"]) == ("heads.0", 100, 64)
        assert [entry["rows"] for entry in first["rows"]] == list(range(1, 18))
        assert first["rows"][0] == {
            "rows": 1,
            "taken": True,
            "prepared": True,
            "backend": "reference",
            "tactic": "4 splits",
            "reasons": [],
        }
        assert "kernels serve up to 16 rows on cpu" in str(first["rows"][16]["reasons"])
        (refused,) = second["rows"]
        assert (refused["rows"], refused["taken"]) == (0, False)
        assert refused["reasons"] == ["the weight is not contiguous: strides (1, 64) for shape (64, 100)"]

    def test_report_counts_what_was_compiled(self, monkeypatch):
        from lowbatch_lmhead import objects

        class Compiled(Counting):
            def compile(self, problem, tactic):
                objects.counts.compiled += 1
                return super().compile(problem, tactic)

        with testing.reference_backend(Compiled()):
            report = warmup(linear())
            assert (report.compiled, report.loaded) == (1, 0)
            assert str(report).endswith(" s, 1 kernels compiled, 0 loaded")
            assert warmup(linear()).compiled == 0

    @pytest.mark.parametrize("progress", [True, False, None])
    def test_progress(self, progress, kernel, capsys):
        warmup(linear(), progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("warming up head" in err and "/16" in err) if progress else err == ""


def test_first_call_prepares_its_row_count_alone(kernel):
    head = linear()
    project(head, inputs(5))
    assert [explain(head, inputs(rows)).prepared for rows in (4, 5, 6)] == [False, True, False]
    assert (kernel.compiled, kernel.calls) == (1, 3)
    bind(head)(inputs(6))
    assert (kernel.compiled, kernel.calls) == (1, 6)


def test_weight_that_is_loaded_later(serve):
    """A head prepared before its weights are there is checked against what it holds then, and right afterwards."""
    serve(Counting())
    head = linear()
    head.weight.data.zero_()
    warmup(head)
    head.weight.data.normal_()
    x = inputs(3)
    assert_close(project(head, x), exact(x, head.weight))
