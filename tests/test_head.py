"""What is read as a head, what stands for itself, and the heads of a model."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from conftest import HIDDEN, VOCAB, assert_close, assert_logits, exact, inputs, linear
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune

import lowbatch_lmhead
from lowbatch_lmhead import project, register_head
from lowbatch_lmhead.head import find_heads, read_head

NO_HEADS = {
    "None": None,
    "a number": 3,
    "a string": "lm_head",
    "a list": [torch.ones(3, 3)],
    "an empty tuple": (),
    "a tuple of numbers": (1, 2),
    "a tuple of one": (torch.ones(3, 3),),
    "a tuple of three": (torch.ones(3, 3), None, None),
    "a bias that is a number": (torch.ones(3, 3), 0.5),
    "an activation": nn.ReLU(),
    "an object": object(),
    "a class": nn.Linear,
}


class Wrapper(nn.Module):
    """As a LoRA layer wraps a head: the base layer's weight shows, and the logits are more than it gives."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down = linear(4, HIDDEN, dtype=base.weight.dtype)
        self.up = linear(VOCAB, 4, dtype=base.weight.dtype)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Int8(nn.Linear):
    """A quantized head: an integer weight and a forward that scales."""

    def __init__(self):
        super().__init__(HIDDEN, VOCAB, bias=False)
        self.weight = nn.Parameter(torch.randint(-127, 128, (VOCAB, HIDDEN), dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Engine:
    """Another library's head, which is no module."""

    def __init__(self, weight, bias=None):
        self.weight, self.bias = weight, bias


class Tagged(torch.Tensor):
    """A weight that may hold its data elsewhere."""


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias, kernel):
    head, x = linear(bias=bias), inputs(3)
    read = read_head(head)
    assert read.weight is head.weight
    assert read.bias is head.bias
    assert (read.own, read.reasons) == (None, ())
    assert_logits(project(head, x), head, x)
    assert kernel.calls


def test_embedding_gives_its_weight_as_a_tied_head(kernel):
    head, x = nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16), inputs(3)
    head.register_forward_hook(lambda *_: pytest.fail("the look-up is not the head"))
    assert_logits(project(head, x), head, x)
    assert kernel.calls


@pytest.mark.parametrize("bias", [False, True])
def test_tensor_and_tuple(bias, kernel):
    head, x = linear(bias=True), inputs(3)
    given = (head.weight, head.bias) if bias else head.weight
    assert_close(project(given, x), exact(x, head.weight, head.bias if bias else None))
    assert_close(project((head.weight, None), x), exact(x, head.weight))
    assert kernel.calls


def test_one_weight_with_and_without_its_bias(kernel):
    head, x = linear(bias=True), inputs(3)
    for _ in range(3):
        assert_close(project((head.weight, head.bias), x), exact(x, head.weight, head.bias))
        assert_close(project((head.weight, None), x), exact(x, head.weight))


@pytest.mark.parametrize("wrong", NO_HEADS.values(), ids=NO_HEADS)
@pytest.mark.parametrize(
    "call", [project, lowbatch_lmhead.explain, lowbatch_lmhead.applies, lambda head, x: lowbatch_lmhead.bind(head)]
)
def test_what_is_no_head_is_a_value_error(call, wrong):
    with pytest.raises(ValueError, match="head"):
        call(wrong, inputs(2))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 4), (4, 0)])
def test_a_weight_of_another_shape_is_a_value_error(shape):
    with pytest.raises(ValueError, match=r"shape \(vocab, hidden\)"):
        project(torch.ones(shape), torch.ones(2, 4))


def test_a_bias_of_another_shape_is_a_value_error():
    with pytest.raises(ValueError, match=r"\(vocab,\) = \(100,\), got \(7,\)"):
        project((linear().weight, torch.ones(7, dtype=torch.bfloat16)), inputs(2))


class TestRegistered:
    def test_reader_and_subclass(self, kernel):
        class Derived(Engine):
            pass

        register_head(Engine, lambda head: (head.weight, head.bias))
        plain, x = linear(bias=True), inputs(3)
        for type_ in (Engine, Derived):
            assert_logits(project(type_(plain.weight, plain.bias), x), plain, x)
        assert kernel.calls

    def test_subclass_registered_by_itself(self):
        class Derived(Engine):
            pass

        register_head(Engine, lambda head: pytest.fail("the subclass has its own reader"))
        register_head(Derived, lambda head: (head.weight, None))
        plain, x = linear(), inputs(3)
        assert_logits(project(Derived(plain.weight), x), plain, x)

    def test_registered_linear_subclass_is_read_by_its_reader(self, kernel):
        # An engine's head may be a Linear whose forward must not be called.
        class Parallel(nn.Linear):
            def forward(self, x):
                raise RuntimeError("this head's forward should not be called")

        register_head(Parallel, lambda head: (head.weight, None))
        head, x = Parallel(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16), inputs(3)
        assert_logits(project(head, x), head, x)

    def test_none_calls_the_head(self, kernel):
        class Quantized(Engine):
            def __call__(self, x):
                return 3 * F.linear(x, self.weight)

        register_head(Quantized, lambda head: None)
        plain, x = linear(), inputs(3)
        head = Quantized(plain.weight)
        assert_close(project(head, x), 3 * exact(x, plain.weight))
        assert "the reader of Quantized left this head to itself" in str(lowbatch_lmhead.explain(head, x))
        assert not kernel.calls

    def test_reader_may_change_its_mind(self, kernel):
        class Loading(Engine):
            ready = False

            def __call__(self, x):
                return 3 * F.linear(x, self.weight)

        register_head(Loading, lambda head: (head.weight, None) if head.ready else None)
        plain, x = linear(), inputs(3)
        head = Loading(plain.weight)
        for ready in (False, True, True, False, True):
            head.ready = ready
            assert_close(project(head, x), (1 if ready else 3) * exact(x, plain.weight))
        assert kernel.calls

    def test_none_for_what_cannot_be_called(self):
        register_head(Engine, lambda head: None)
        with pytest.raises(
            ValueError,
            match=r"returned None, so the head computes by itself, but .* cannot be called: give it a __call__",
        ):
            project(Engine(None), inputs(2))

    @pytest.mark.parametrize(
        "returned",
        [5, "weight", torch.ones(3, 3), (1, 2), (torch.ones(VOCAB, HIDDEN), 5)],
        ids=["number", "string", "tensor", "numbers", "bias"],
    )
    def test_reader_that_returns_something_else(self, returned):
        register_head(Engine, lambda head: returned)
        with pytest.raises(ValueError, match=r"the reader of Engine must return \(weight, bias or None\) or None"):
            project(Engine(None), inputs(2).float())

    def test_head_without_weak_references(self, kernel):
        class Slotted:
            __slots__ = ("weight",)

        register_head(Slotted, lambda head: (head.weight, None))
        plain, x = linear(), inputs(3)
        head = Slotted()
        head.weight = plain.weight
        assert_logits(lowbatch_lmhead.bind(head)(x), plain, x)
        assert_logits(project(head, x), plain, x)

    @pytest.mark.parametrize(
        ("type_", "reader"), [(3, print), (Engine(None), print), (Engine, "weight"), (Engine, None)]
    )
    def test_wrong_registration(self, type_, reader):
        with pytest.raises(ValueError, match=r"register_head|reader"):
            register_head(type_, reader)


def _own_forward():
    return Doubled(HIDDEN, VOCAB, bias=False)


def _instance_forward():
    head = nn.Linear(HIDDEN, VOCAB)
    head.forward = lambda x: F.linear(x, head.weight) - 1
    return head


def _forward_hook():
    head = nn.Linear(HIDDEN, VOCAB)
    head.register_forward_hook(lambda module, args, output: output * 5)
    return head


def _forward_pre_hook():
    head = nn.Linear(HIDDEN, VOCAB)
    head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return head


def _weight_norm():
    return parametrizations.weight_norm(nn.Linear(HIDDEN, VOCAB))


def _orthogonal():
    return parametrizations.orthogonal(nn.Linear(HIDDEN, VOCAB))


def _old_weight_norm():
    return torch.nn.utils.weight_norm(nn.Linear(HIDDEN, VOCAB))


def _pruned():
    return prune.random_unstructured(nn.Linear(HIDDEN, VOCAB), "weight", 0.5)


def _lora():
    return Wrapper(nn.Linear(HIDDEN, VOCAB))


def _dynamically_quantized():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(HIDDEN, VOCAB)), {nn.Linear})[0]


def _compiled():
    return torch.compile(nn.Linear(HIDDEN, VOCAB), backend="eager")


STANDS_FOR_ITSELF = {
    _own_forward: "Doubled has a forward of its own",
    _instance_forward: "its forward was replaced on the instance",
    _forward_hook: "it has hooks",
    _forward_pre_hook: "it has hooks",
    _weight_norm: "its weight is parametrized",
    _orthogonal: "its weight is parametrized",
    _old_weight_norm: "it has hooks",
    _pruned: "it has hooks",
    _lora: "Wrapper is no type that the library knows",
    _dynamically_quantized: "Linear is no type that the library knows",
    Int8: "Int8 has a forward of its own",
    _compiled: "OptimizedModule is no type that the library knows",
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("make", "reason"), STANDS_FOR_ITSELF.items(), ids=lambda v: getattr(v, "__name__", ""))
class TestRefusedHeads:
    """A head that computes in its own way gives its own logits."""

    def test_reason(self, make, reason, kernel):
        decision = lowbatch_lmhead.explain(make(), inputs(3, dtype=torch.float32))
        assert not decision
        assert reason in str(decision)

    def test_own_logits(self, make, reason, kernel):
        head, x = make().float() if make is not Int8 else make(), inputs(3, dtype=torch.float32)
        expected = head(x)
        assert torch.equal(project(head, x), expected)
        assert torch.equal(lowbatch_lmhead.bind(head)(x), expected)
        wide = project(head, x, out_dtype=torch.float32)
        assert torch.equal(wide, expected.float())
        assert not kernel.calls

    def test_out(self, make, reason, kernel):
        head, x = make(), inputs(3, dtype=torch.float32)
        expected = head(x)
        out = torch.full_like(expected, float("nan"))
        assert project(head, x, out=out) is out
        assert torch.equal(out, expected)
        with pytest.raises(ValueError, match=r"\(2, 7\).*\(3, 100\)"):
            project(head, x, out=torch.empty(2, 7))

    def test_warmup_reports_it(self, make, reason, kernel):
        report = lowbatch_lmhead.warmup(make())
        assert reason in str(report)
        assert not kernel.compiled


@pytest.mark.parametrize("make", [Int8, _own_forward])
def test_own_logits_in_their_own_dtype(make, kernel):
    """A quantized weight's dtype says nothing about the logits."""
    head, x = make().bfloat16() if make is not Int8 else make(), inputs(3)
    expected = head(x)
    out = torch.full_like(expected, float("nan"))
    assert torch.equal(project(head, x, out=out), expected)
    assert torch.equal(project(head, x, out_dtype=torch.bfloat16), expected)


def test_global_hooks_run(kernel):
    head, x = linear(), inputs(3)
    project(head, x)  # prepared: the quick way
    calls = kernel.calls
    with register_module_forward_hook(lambda module, args, output: output * 5):
        assert torch.equal(project(head, x), 5 * F.linear(x, head.weight))
        assert "it has hooks" in str(lowbatch_lmhead.explain(head, x))
    with register_module_forward_pre_hook(lambda module, args: (args[0] * 2,)):
        assert torch.equal(project(head, x), F.linear(2 * x, head.weight))
    assert kernel.calls == calls
    assert_logits(project(head, x), head, x)
    assert kernel.calls == calls + 1


def test_parametrized_embedding_gives_its_effective_weight(kernel):
    head, x = parametrizations.weight_norm(nn.Embedding(VOCAB, HIDDEN)), inputs(3, dtype=torch.float32)
    head.parametrizations.weight.original0.mul_(2)
    assert_logits(project(head, x), head, x)
    assert "its weight is parametrized" in str(lowbatch_lmhead.explain(head, x))


@pytest.mark.parametrize("wrapped", ["weight", "bias"])
def test_tensor_subclass_is_left_to_itself(wrapped, kernel):
    head, x = linear(bias=True), inputs(3)
    tensors = {"weight": head.weight.data, "bias": head.bias.data}
    tensors[wrapped] = tensors[wrapped].as_subclass(Tagged)
    given = (tensors["weight"], tensors["bias"])
    assert f"its {wrapped} is a Tagged" in str(lowbatch_lmhead.explain(given, x))
    assert_close(project(given, x).as_subclass(torch.Tensor), exact(x, head.weight, head.bias))
    assert not kernel.calls


def test_linear_subclass_without_a_forward_is_taken(kernel):
    class Named(nn.Linear):
        pass

    head, x = Named(HIDDEN, VOCAB, dtype=torch.bfloat16), inputs(3)
    assert_logits(project(head, x), head, x)
    assert kernel.calls


def test_meta_head(kernel):
    head, x = nn.Linear(HIDDEN, VOCAB, device="meta"), torch.empty(3, HIDDEN, device="meta")
    assert "its weight is on the meta device" in str(lowbatch_lmhead.explain(head, x))
    assert "its weight is on the meta device" in str(lowbatch_lmhead.warmup(head))
    logits = project(head, x)
    assert logits.device.type == "meta"
    assert logits.shape == (3, VOCAB)
    assert project(head, x, out_dtype=torch.float32).dtype is torch.float32


def test_lazy_head(kernel):
    head, x = nn.LazyLinear(VOCAB), inputs(3, dtype=torch.float32)
    assert "its weight is not initialized" in str(lowbatch_lmhead.explain(head, x))
    assert "its weight is not initialized" in str(lowbatch_lmhead.warmup(head))
    assert_logits(project(head, x), head, x)


def test_lazy_head_is_taken_once_it_has_a_weight(kernel):
    head, x = nn.LazyLinear(VOCAB, bias=False), inputs(3, dtype=torch.float32)
    bound = lowbatch_lmhead.bind(head)
    bound(x)
    assert_logits(bound(x), head, x)
    assert_logits(project(head, x), head, x)
    assert kernel.calls


class Model(nn.Module):
    """Tests give it heads as attributes."""

    def __init__(self, **heads):
        super().__init__()
        for name, head in heads.items():
            self.add_module(name, head)


class WithOutput(Model):
    def get_output_embeddings(self):
        return self.lm_head


class WithoutOutput(Model):
    def get_output_embeddings(self):
        raise NotImplementedError


class Vocabulary(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


@pytest.fixture
def registered():
    register_head(Vocabulary, lambda head: (head.weight, None))
    return Vocabulary(linear().weight)


class TestFindHeads:
    @pytest.mark.parametrize("tied", [False, True])
    def test_transformers_model(self, tied, kernel):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        assert find_heads(model) == [("lm_head", model.lm_head)]
        report = lowbatch_lmhead.warmup(model)
        assert [(head.name, head.vocab, head.hidden) for head in report.heads] == [("lm_head", VOCAB, HIDDEN)]
        tokens = torch.randint(VOCAB, (2, 5))
        states = model.model(tokens).last_hidden_state[:, -1:, :]
        assert_logits(project(model.lm_head, states), model.lm_head, states)
        assert kernel.calls > kernel.compiled
        assert_close(project(model.lm_head, states), model(tokens, logits_to_keep=1).logits)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        with pytest.raises(ValueError, match=r"LlamaModel has no head .* example model.lm_head"):
            find_heads(model.model)

    def test_output_embeddings(self):
        head = linear()
        assert find_heads(WithOutput(lm_head=head)) == [("lm_head", head)]

    def test_no_output_embeddings(self, registered):
        with pytest.raises(ValueError, match="WithoutOutput has no head"):
            find_heads(WithoutOutput(lm_head=linear()))
        assert find_heads(WithoutOutput(lm_head=registered)) == [("lm_head", registered)]

    def test_registered_types(self, registered):
        head = linear()
        model = WithOutput(lm_head=head, draft=Model(heads=nn.ModuleList([registered, registered])))
        assert find_heads(model) == [("lm_head", head), ("draft.heads.0", registered)]

    def test_registered_output_embeddings_once(self, registered):
        assert find_heads(WithOutput(lm_head=registered)) == [("lm_head", registered)]

    @pytest.mark.parametrize("make", [linear, lambda: nn.Embedding(5, 3), lambda: linear().weight])
    def test_a_head_itself(self, make):
        head = make()
        ((name, found),) = find_heads(head)
        assert name == "head"
        assert found is head

    @pytest.mark.parametrize("nothing", [None, 5, "model", nn.ReLU(), nn.Sequential(nn.Linear(3, 3))], ids=repr)
    def test_none_found_says_what_to_pass(self, nothing):
        with pytest.raises(ValueError, match=r"Pass the head itself, for example model.lm_head"):
            lowbatch_lmhead.warmup(nothing)

    def test_invalid_tuple(self):
        with pytest.raises(ValueError, match="weight, bias or None"):
            lowbatch_lmhead.warmup((1, 2))

    def test_head_type_unknown_but_accepted_by_project(self, kernel):
        head, x = Wrapper(linear()), inputs(3)
        assert torch.equal(project(head, x), head(x))
        assert "Wrapper is no type that the library knows" in str(lowbatch_lmhead.warmup(head))


def test_reading_a_head_keeps_nothing_of_it(kernel):
    head = linear()
    project(head, inputs(3))
    kept = [
        o for o in gc.get_referrers(head.weight) if isinstance(o, (list, tuple, dict)) and o is not head._parameters
    ]
    assert not kept
