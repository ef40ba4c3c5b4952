"""Models of transformers, patched: the same logits and tokens, our launch counted, and all that is done to a model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from conftest import Counting, assert_close, exact, python
from torch import nn
from torch.nn.utils import parametrizations, prune

import lowbatch_lmhead
from lowbatch_lmhead import dispatch, testing
from lowbatch_lmhead.adapters import transformers as adapter

transformers = pytest.importorskip("transformers", minversion="4.57")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, HIDDEN = 128, 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER_DECODER = {"vocab_size": VOCAB, "d_model": HIDDEN, "pad_token_id": 0, "eos_token_id": None}
LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def build(name, **change):
    """(class, config) of a model with random weights."""
    t = transformers
    given = SMALL | change
    if name == "gpt2":
        return t.GPT2LMHeadModel, t.GPT2Config(
            vocab_size=257, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None
        )
    if name == "whisper":
        return t.WhisperForConditionalGeneration, t.WhisperConfig(
            **ENCODER_DECODER | {"vocab_size": 131}, **LAYERS, num_mel_bins=8, max_source_positions=20,
            max_target_positions=64, decoder_start_token_id=1, bos_token_id=1,
        )  # fmt: skip
    if name == "t5":
        return t.T5ForConditionalGeneration, t.T5Config(
            **ENCODER_DECODER, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
    if name == "bart":
        return t.BartForConditionalGeneration, t.BartConfig(
            **ENCODER_DECODER, **LAYERS, max_position_embeddings=64, bos_token_id=1, decoder_start_token_id=1,
            forced_eos_token_id=None,
        )  # fmt: skip
    config, model = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
        "granite": (t.GraniteConfig, t.GraniteForCausalLM),
        "gemma2": (t.Gemma2Config, t.Gemma2ForCausalLM),
        "phi": (t.PhiConfig, t.PhiForCausalLM),  # its head has a bias
    }[name]
    if name == "granite":
        given |= {"logits_scaling": 3.0}
    if name == "gemma2":
        given |= {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    if name == "phi":
        given.pop("head_dim")
    return model, config(**given)


def make(name="llama", dtype=torch.float32, seed=3, **change):
    torch.manual_seed(seed)
    kind, config = build(name, **change)
    model = kind(config).eval()
    with torch.no_grad():  # logits far enough apart, and a bias that counts
        for parameter in model.get_output_embeddings().parameters():
            parameter.normal_(std=0.5)
    return model.to(dtype)


def prompts(model, rows=2, length=5):
    generator = torch.Generator().manual_seed(11)
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        return {"input_features": torch.randn(rows, 8, 40, generator=generator).to(model.dtype)}
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model, inputs=None, tokens=6, **options):
    return model.generate(
        **(inputs or prompts(model)),
        **{"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        | options,
    )


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(**(inputs or prompts(model)), logits_to_keep=1, use_cache=False).logits


def head_of(model):
    return model.get_output_embeddings()


def snapshot(head):
    """All that makes a head what it is: identities, so that an equal but other object shows."""
    tensors = {name: id(parameter) for name, parameter in head._parameters.items()}
    return type(head), {name: id(value) for name, value in vars(head).items()}, list(vars(head)), tensors


def warm(model, **options):
    """Patched, and served by the reference backend: autotune, the default, would find that it is not quicker."""
    return adapter.patch(model, **{"prepare": "warmup"} | options)


def is_patched(head):
    return isinstance(head, adapter.Projecting)


@pytest.fixture
def kernel():
    """The reference backend, counting; without no_grad, since generate() brings its own."""
    with testing.reference_backend(Counting()) as backend:
        yield backend


class Served:
    """Whether our launch ran within the ``with`` block, and how often."""

    def __init__(self, backend):
        self.backend = backend

    def __enter__(self):
        self.before = self.backend.calls
        return self

    def __exit__(self, *error):
        self.calls = self.backend.calls - self.before


ARCHITECTURES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "granite": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "phi": {},
    "whisper": {},
    "t5": {},
    "bart": {},
}


class TestArchitectures:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_generate(self, name, dtype, kernel):
        model = make(name.split()[0], dtype, **ARCHITECTURES[name])
        expected = generate(model)
        assert not kernel.calls
        before = snapshot(head_of(model))
        with warm(model), Served(kernel) as served:
            got = generate(model)
        assert snapshot(head_of(model)) == before
        assert served.calls == len(got.logits) == 6
        # The logits of the first step, and of all as long as no tie fell otherwise.
        same = (got.sequences == expected.sequences)[:, -6:].all(0).cumprod(0).sum()
        assert dtype is torch.bfloat16 or same == 6
        for step in range(min(int(same) + 1, 6)):
            assert got.logits[step].dtype == expected.logits[step].dtype
            assert_close(got.logits[step], expected.logits[step], within=1e-5 if dtype is torch.float32 else 1e-2)

    @pytest.mark.parametrize("name", ["whisper", "t5", "bart", "gpt2", "granite"])
    def test_where_the_head_is(self, name, kernel):
        model = make(name)
        patch = warm(model, prepare=None)
        (head,) = patch.heads
        assert head.module is head_of(model)
        assert head.name == {"whisper": "proj_out"}.get(name, "lm_head")

    def test_several_heads(self, kernel):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = nn.ModuleList([nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, VOCAB, bias=False)])

            def get_output_embeddings(self):
                return self.heads

        model = Model()
        patch = warm(model)
        assert [head.name for head in patch.heads] == ["heads.0", "heads.1"]
        assert all(map(is_patched, model.heads))
        adapter.unpatch(model)
        assert not any(map(is_patched, model.heads))

    def test_a_head_that_get_output_embeddings_does_not_give(self, kernel):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lm_head = nn.Linear(HIDDEN, VOCAB)

        model = Model()
        warm(model)
        assert is_patched(model.lm_head)


class TestDecoding:
    """In float32, where a tie does not hide a mistake."""

    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 3},
            {"do_sample": True, "temperature": 0.8},
            {"num_beams": 2, "do_sample": True},
            {"cache_implementation": "static"},
            {"use_cache": False},
        ],
        ids=lambda options: ", ".join(options),
    )
    def test_options(self, options, kernel):
        model = make()

        def run():
            torch.manual_seed(5)
            return generate(model, **options).sequences

        expected = run()
        with warm(model), Served(kernel) as served:
            assert torch.equal(run(), expected)
        assert served.calls >= 6

    @pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
    def test_assisted(self, how, kernel):
        model, assistant = make(), make(seed=4, num_hidden_layers=1)
        options = (
            {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 3, "eos_token_id": 0}
        )
        inputs = prompts(model, rows=1, length=9)
        expected = generate(model, inputs, tokens=12, **options).sequences
        with warm(model), warm(assistant), Served(kernel) as served:
            assert torch.equal(generate(model, inputs, tokens=12, **options).sequences, expected)
        assert served.calls

    def test_static_cache_compiled(self, kernel):
        model = make()
        expected = generate(model, cache_implementation="static").sequences
        warm(model)
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        with Served(kernel) as served:
            assert torch.equal(generate(model, cache_implementation="static").sequences, expected)
        assert served.calls == 6

    def test_pipeline(self, kernel):
        tokenizers = pytest.importorskip("tokenizers")
        words = {f"w{index}": index for index in range(VOCAB)}
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0")
        model = make()
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        expected = pipe("w5 w6 w7", max_new_tokens=6, do_sample=False)
        with warm(pipe.model), Served(kernel) as served:
            assert pipe("w5 w6 w7", max_new_tokens=6, do_sample=False) == expected
        assert served.calls == 6


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize("name", ["llama", "phi"])
    def test_fullgraph_before_and_after(self, name, kernel):
        """A model that was compiled already is served once it is patched, and not any more once it is unpatched."""
        model = make(name)
        expected = logits_of(model)
        compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)

        def run():
            with torch.no_grad():
                return compiled(**prompts(model), logits_to_keep=1, use_cache=False).logits

        for patched in (False, True, False, True):
            if patched:
                warm(model)
            else:
                adapter.unpatch(model)
            with Served(kernel) as served:
                assert_close(run(), expected)
            assert served.calls == patched

    def test_compiled_module_is_patched_through(self, kernel):
        model = make()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected = logits_of(model)
        patch = warm(compiled, prepare="warmup")
        assert [head.patched for head in patch.heads] == [True]
        with Served(kernel) as served:
            assert_close(logits_of(compiled, **prompts(model)), expected)
        assert served.calls == 1
        adapter.unpatch(compiled)
        assert not is_patched(model.lm_head)

    def test_where_no_kernel_runs_the_graph_is_as_before(self):
        model = make()
        graphs = []

        def keep(graph, _):
            graphs.append(str(graph.graph))
            return graph.forward

        warm(model)
        compiled = torch.compile(model.lm_head, backend=keep, fullgraph=True)
        with torch.no_grad():
            compiled(torch.randn(2, HIDDEN))
        assert graphs
        assert "lowbatch_lmhead.project" not in graphs[0]

    def test_export_does_not_need_this_library(self, kernel):
        model = make()
        warm(model)
        with torch.no_grad():
            exported = torch.export.export(model.lm_head, (torch.randn(2, HIDDEN),))
        assert "lowbatch_lmhead.project" not in str(exported)

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("how", ["jit", "fx"])
    def test_recorded(self, how, grad, kernel):
        model, x, other = make(), torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
        warm(model)
        expected = nn.functional.linear(other, model.lm_head.weight)
        with torch.set_grad_enabled(grad):
            within = nn.Sequential(model.lm_head)
            graph = torch.jit.trace(within, x) if how == "jit" else torch.fx.symbolic_trace(within)
            with Served(kernel) as served:
                assert_close(graph(other), expected)
        assert served.calls == 0

    def test_training_compiled(self, kernel):
        model = make()
        expected = gradients(model)
        warm(model)
        compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        assert_same(gradients(model, compiled), expected, exact=False)


def gradients(model, forward=None):
    model.zero_grad(set_to_none=True)
    inputs = prompts(model)
    (forward or model)(**inputs, labels=inputs["input_ids"]).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(got, expected, exact=True):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor is not None, name
        if exact:
            assert torch.equal(got[name], tensor), name
        else:
            torch.testing.assert_close(got[name], tensor)


class TestTraining:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_gradients(self, tied, dtype, kernel):
        model = make(dtype=dtype, tie_word_embeddings=tied)
        expected = gradients(model)
        warm(model)
        with Served(kernel) as served:
            assert_same(gradients(model), expected)
        assert served.calls == 0

    def test_gradient_checkpointing(self, kernel):
        model = make()
        expected = gradients(model)
        warm(model)
        model.gradient_checkpointing_enable()
        model.train()
        assert_same(gradients(model), expected, exact=False)

    def test_frozen_head_gives_gradients_to_what_is_below(self, kernel):
        model = make()
        model.lm_head.requires_grad_(False)
        inputs = prompts(model)

        def below():
            model.zero_grad()
            model(**inputs, labels=inputs["input_ids"], logits_to_keep=0).loss.backward()
            return model.model.norm.weight.grad.clone()

        expected = below()
        with warm(model):
            assert torch.equal(below(), expected)

    def test_weights_trained_meanwhile_are_those_that_serve(self, kernel):
        model = make()
        warm(model)
        before = logits_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        gradients(model)
        optimizer.step()
        with Served(kernel) as served:
            got = logits_of(model)
        assert served.calls == 1
        adapter.unpatch(model)
        assert_close(got, logits_of(model))
        assert not torch.allclose(got, before)


class TestUndo:
    def test_exactly(self, kernel):
        model = make(tie_word_embeddings=True)
        model.lm_head.register_forward_hook(lambda *_: None)
        before, state = snapshot(model.lm_head), set(model.state_dict())
        warm(model)
        assert is_patched(model.lm_head)
        assert set(model.state_dict()) == state
        adapter.unpatch(model)
        assert snapshot(model.lm_head) == before
        assert type(model.lm_head) is nn.Linear

    def test_after_an_exception(self, kernel):
        model = make()
        before = snapshot(model.lm_head)
        with pytest.raises(KeyError, match="patched: True"), warm(model):
            raise KeyError(f"patched: {is_patched(model.lm_head)}")
        assert snapshot(model.lm_head) == before

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_after_an_exception_while_preparing(self, error, kernel, monkeypatch):
        def fails(*_, **__):
            raise error

        monkeypatch.setattr(adapter.api, "autotune", fails)
        model = make()
        before = snapshot(model.lm_head)
        with pytest.raises(error):
            adapter.patch(model)
        assert snapshot(model.lm_head) == before

    def test_twice_is_harmless(self, kernel):
        model = make()
        before = snapshot(model.lm_head)
        warm(model)
        once = type(model.lm_head)
        with warm(model):
            assert type(model.lm_head) is once
        assert type(model.lm_head) is once, "the inner one changed nothing, so it undoes nothing"
        with Served(kernel) as served:
            generate(model)
        assert served.calls == 6
        adapter.unpatch(model)
        assert snapshot(model.lm_head) == before
        adapter.unpatch(model)
        assert snapshot(model.lm_head) == before

    def test_another_out_dtype_for_a_while(self, kernel):
        model = make(dtype=torch.bfloat16)
        warm(model)
        with warm(model, out_dtype=torch.float32):
            assert logits_of(model).dtype is torch.float32
        assert logits_of(model).dtype is torch.bfloat16
        assert is_patched(model.lm_head)

    def test_undo_again_and_after_unpatch(self, kernel):
        model = make()
        patch = warm(model)
        adapter.unpatch(model)
        patch.undo()
        patch.undo()
        assert type(model.lm_head) is nn.Linear

    def test_unpatch_what_was_not_patched(self):
        model = make()
        before = snapshot(model.lm_head)
        adapter.unpatch(model)
        assert snapshot(model.lm_head) == before

    def test_a_bound_forward_that_someone_kept(self, kernel):
        model, x = make(), torch.randn(2, HIDDEN)
        warm(model)
        kept = model.lm_head.forward
        adapter.unpatch(model)
        with torch.no_grad(), Served(kernel) as served:
            assert torch.equal(kept(x), model.lm_head(x))
        assert served.calls == 0

    def test_derived_class_is_a_value_error_and_undone_after(self, kernel):
        model, x = make(), torch.randn(2, HIDDEN)
        warm(model)
        parametrizations.weight_norm(model.lm_head)
        with torch.no_grad():
            assert_close(model.lm_head(x), nn.functional.linear(x, model.lm_head.weight), within=1e-5)
        with pytest.raises(ValueError, match="undo that first"):
            adapter.unpatch(model)
        nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
        adapter.unpatch(model)
        assert type(model.lm_head) is nn.Linear


class TestCopies:
    def test_deepcopy_has_its_own_head(self, kernel):
        model = make(tie_word_embeddings=True)
        warm(model)
        expected = logits_of(model)
        copied = copy.deepcopy(model)
        assert is_patched(copied.lm_head)
        assert copied.lm_head is not model.lm_head
        assert copied.lm_head.weight is copied.model.embed_tokens.weight
        assert copied.lm_head.weight is not model.lm_head.weight
        with torch.no_grad():
            model.lm_head.weight.zero_()
        with Served(kernel) as served:
            assert_close(logits_of(copied), expected)
        assert served.calls == 1
        adapter.unpatch(copied)
        assert type(copied.lm_head) is nn.Linear
        assert is_patched(model.lm_head)
        assert_close(logits_of(copied), expected)

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle_holds_a_plain_head(self, protocol, kernel):
        model = make()
        warm(model)
        expected = logits_of(model)
        data = pickle.dumps(model, protocol)
        assert b"lowbatch" not in data
        read = pickle.loads(data)
        assert type(read.lm_head) is nn.Linear
        assert_close(logits_of(read), expected)
        assert is_patched(model.lm_head)

    def test_torch_save(self, kernel):
        model = make()
        warm(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert type(read.lm_head) is nn.Linear
        assert_close(logits_of(read), logits_of(model))

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_save_pretrained(self, tied, kernel, tmp_path):
        model = make(tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / "before")
        warm(model)
        model.save_pretrained(tmp_path / "patched")
        for file in (tmp_path / "before").iterdir():
            assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name
        read = type(model).from_pretrained(tmp_path / "patched")
        assert_close(logits_of(read), logits_of(model))


class TestChanges:
    """What is done to a model after it is patched."""

    @pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to", "data", "parameter"])
    def test_weights(self, change, kernel):
        model = make()
        warm(model)
        logits_of(model)
        weight = model.lm_head.weight
        if change == "data":
            weight.data = torch.randn_like(weight)
        elif change == "parameter":
            model.lm_head.weight = nn.Parameter(torch.randn_like(weight))
        elif change == "to":
            model.to(torch.bfloat16)
        else:
            getattr(model, change)()
        with Served(kernel) as served:
            got = logits_of(model)
        assert served.calls  # more than one where the launch for another dtype is checked first
        adapter.unpatch(model)
        assert_close(got, logits_of(model), within=5e-3 if got.dtype.itemsize == 2 else 1e-5)

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_resize_token_embeddings(self, tied, kernel):
        model = make(tie_word_embeddings=tied)
        warm(model)
        model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
        got = logits_of(model)
        warm(model)
        with Served(kernel) as served:
            assert_close(logits_of(model), got)
        assert served.calls == 1
        assert got.shape[-1] == VOCAB + 3
        adapter.unpatch(model)
        assert type(model.lm_head) is nn.Linear
        assert_close(logits_of(model), got)

    def test_set_output_embeddings(self, kernel):
        model = make()
        old, new = model.lm_head, nn.Linear(HIDDEN, VOCAB, bias=False)
        with warm(model):
            model.set_output_embeddings(new)
            assert_close(logits_of(model), logits_of(model))
        assert type(old) is nn.Linear, "undone though it is not in the model any more"
        assert model.lm_head is new
        assert type(new) is nn.Linear

    def test_hooks_run_as_before(self, kernel):
        model, seen = make(), []
        before = model.lm_head.register_forward_pre_hook(lambda head, args: seen.append("pre"))
        warm(model)
        after = model.lm_head.register_forward_hook(lambda head, args, logits: logits * 2)
        with Served(kernel) as served:
            got = logits_of(model)
            assert_close(lowbatch_lmhead.project(model.lm_head, torch.ones(1, HIDDEN)),
                         2 * model.lm_head.weight.sum(1)[None].detach(), within=1e-5)  # fmt: skip
        assert seen == ["pre"] * 2
        assert served.calls == 1, "the second needs gradients"
        after.remove()
        before.remove()
        assert_close(got / 2, logits_of(model))

    def test_pruned_weight(self, kernel):
        model = make()
        warm(model)
        prune.random_unstructured(model.lm_head, "weight", amount=0.5)
        got = logits_of(model)
        adapter.unpatch(model)
        assert torch.equal(got, logits_of(model))

    def test_autocast(self, kernel):
        model = make()
        with torch.autocast("cpu", torch.bfloat16):
            expected = logits_of(model)
            warm(model)
            assert torch.equal(logits_of(model), expected)

    def test_what_the_head_refuses_it_still_refuses(self, kernel):
        model = make()
        wrong = [
            torch.randn(2, HIDDEN + 1),
            torch.randn(2, HIDDEN).double(),
            torch.ones(2, HIDDEN, dtype=torch.long),
            None,
        ]

        def says(x):
            with pytest.raises(Exception) as error, torch.no_grad():  # noqa: PT011
                model.lm_head(x)
            return error.type, str(error.value)

        expected = [says(x) for x in wrong]
        warm(model)
        assert [says(x) for x in wrong] == expected

    @pytest.mark.parametrize("name", ["llama", "phi"])
    def test_front_door_on_a_patched_head(self, name, kernel):
        """warmup, explain, bind and project see the weight, so float32 logits are not rounded on the way."""
        model = make(name, torch.bfloat16)
        warm(model, prepare=None)
        x = torch.randn(3, HIDDEN).bfloat16()
        with torch.no_grad():
            assert lowbatch_lmhead.warmup(model).heads[0].decisions[0].taken
            assert lowbatch_lmhead.explain(model.lm_head, x).taken
            got = lowbatch_lmhead.bind(model.lm_head, out_dtype=torch.float32)(x)
            assert_close(got, exact(x, model.lm_head.weight, model.lm_head.bias))


class TestAccelerate:
    @pytest.fixture(autouse=True)
    def accelerate(self):
        return pytest.importorskip("accelerate")

    @staticmethod
    def hooked(model):
        from accelerate import dispatch_model

        return dispatch_model(model, {"": "cpu"}, force_hooks=True)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_hooks_on_the_head(self, when, kernel):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        class Seen(AlignDevicesHook):
            count = 0

            def pre_forward(self, module, *args, **kwargs):
                self.count += 1
                return super().pre_forward(module, *args, **kwargs)

        model = make()
        expected, hook = logits_of(model), Seen(io_same_device=True)
        if when == "before":
            add_hook_to_module(model.lm_head, hook)
            before = snapshot(model.lm_head)
        patch = warm(model)
        assert patch.heads[0].prepared.decisions[0].taken
        if when == "after":
            add_hook_to_module(model.lm_head, hook)
        with Served(kernel) as served:
            assert_close(logits_of(model), expected)
        assert (served.calls, hook.count) == (1, 1)
        copied = copy.deepcopy(model)
        with Served(kernel) as served:
            assert_close(logits_of(copied), expected)
        assert served.calls == 1
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        assert_close(logits_of(model), expected)
        adapter.unpatch(model)
        if when == "before":
            assert snapshot(model.lm_head) == before
        assert model.lm_head._old_forward.__func__ is nn.Linear.forward
        with Served(kernel) as served:
            assert_close(logits_of(model), expected)
        assert (served.calls, hook.count) == (0, 3)

    @pytest.mark.parametrize("removed", ["before", "while patched"])
    def test_hooks_removed(self, removed, kernel):
        from accelerate.hooks import remove_hook_from_module

        model = make()
        expected = logits_of(model)
        self.hooked(model)
        if removed == "before":
            remove_hook_from_module(model, recurse=True)
        warm(model, prepare=None)
        if removed != "before":
            remove_hook_from_module(model, recurse=True)
        with Served(kernel) as served:
            assert_close(logits_of(model), expected)
        assert served.calls
        data = pickle.dumps(model.lm_head)
        assert b"lowbatch" not in data
        read, x = pickle.loads(data), torch.randn(2, HIDDEN)
        assert_close(read(x), nn.functional.linear(x, model.lm_head.weight))
        adapter.unpatch(model)
        assert type(model.lm_head) is nn.Linear
        assert vars(model.lm_head)["forward"].__func__ is nn.Linear.forward  # as accelerate leaves it
        assert_close(logits_of(model), expected)

    def test_offloaded_weights(self, kernel):
        from accelerate import cpu_offload

        model = make()
        expected = logits_of(model)
        cpu_offload(model, torch.device("cpu"))
        assert model.lm_head.weight.device.type == "meta"
        with warm(model) as patch:
            assert "meta device" in str(patch)
            with Served(kernel) as served:
                assert_close(logits_of(model), expected)
            assert served.calls
        assert_close(logits_of(model), expected)


class Quantized(nn.Linear):
    """As bitsandbytes has them: a Linear whose forward is its own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.round())


class Subclass(torch.Tensor):
    """As torchao has them: a weight that is a tensor subclass."""


class TestLeftAlone:
    def left_alone(self, model, caplog, *expected):
        logits, before = logits_of(model), snapshot(head_of(model))
        patch = adapter.patch(model)
        (head,) = patch.heads
        assert not head.patched
        for words in expected:
            assert words in str(patch)
            assert words in caplog.text
        adapter.unpatch(model)
        assert snapshot(head_of(model)) == before
        adapter.patch(model)
        assert torch.equal(logits_of(model), logits)

    def test_quantized(self, kernel, caplog):
        model = make()
        model.lm_head = Quantized(HIDDEN, VOCAB, bias=False)
        self.left_alone(model, caplog, "Quantized has a forward of its own")

    def test_quantized_weight(self, kernel, caplog):
        model = make()
        weight = model.lm_head.weight.detach().as_subclass(Subclass)
        model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        self.left_alone(model, caplog, "its weight is a Subclass: quantized")

    def test_parametrized(self, kernel, caplog):
        model = make()
        parametrizations.weight_norm(model.lm_head)
        self.left_alone(model, caplog, "parametrized")

    def test_pruned(self, kernel, caplog):
        model = make()
        prune.random_unstructured(model.lm_head, "weight", amount=0.5)
        self.left_alone(model, caplog, "pruned")

    def test_forward_replaced(self, kernel, caplog):
        model = make()
        own = model.lm_head.forward
        model.lm_head.forward = lambda x: own(x) * 2
        self.left_alone(model, caplog, "its forward was replaced on the instance")

    def test_no_linear(self, kernel, caplog):
        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))

            def forward(self, x):
                return nn.functional.linear(x, self.weight)

        model = make()
        model.lm_head = Head()
        self.left_alone(model, caplog, "not an nn.Linear")

    def test_a_class_that_copies_itself(self, kernel, caplog):
        class Shared(nn.Linear):
            def __deepcopy__(self, memo):
                return self

        model = make()
        model.lm_head = Shared(HIDDEN, VOCAB, bias=False)
        self.left_alone(model, caplog, "Shared has a __deepcopy__ of its own")

    def test_subclass_without_a_forward_is_taken(self, kernel):
        class Named(nn.Linear):
            tag = "kept"

        model = make()
        model.lm_head = Named(HIDDEN, VOCAB, bias=False)
        expected = logits_of(model)
        with warm(model), Served(kernel) as served:
            assert isinstance(model.lm_head, Named)
            assert model.lm_head.tag == "kept"
            assert_close(logits_of(model), expected)
        assert served.calls == 1
        assert type(model.lm_head) is Named


class TestPeft:
    @pytest.fixture(autouse=True)
    def peft(self):
        return pytest.importorskip("peft")

    @staticmethod
    def lora(model, *modules):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(8)
        return get_peft_model(model, LoraConfig(target_modules=list(modules), init_lora_weights=False)).eval()

    def test_on_the_head(self, kernel, caplog):
        model = self.lora(make(), "lm_head")
        expected = logits_of(model, **prompts(model))
        patch = warm(model)
        assert "adds to the logits" in str(patch)
        assert "adds to the logits" in caplog.text
        with Served(kernel) as served:
            assert torch.equal(logits_of(model, **prompts(model)), expected)
        assert served.calls == 0

    def test_on_other_layers(self, kernel):
        model = self.lora(make(), "q_proj", "v_proj")
        expected = generate(model, prompts(model)).sequences
        with warm(model), Served(kernel) as served:
            assert torch.equal(generate(model, prompts(model)).sequences, expected)
        assert served.calls == 6
        assert type(model.base_model.model.lm_head) is nn.Linear

    def test_on_a_patched_head(self, kernel):
        plain = self.lora(make(), "lm_head")
        model = make()
        warm(model)
        model = self.lora(model, "lm_head")
        with Served(kernel) as served:
            got = logits_of(model, **prompts(model))
        assert served.calls == 1
        assert_close(got, logits_of(plain, **prompts(plain)))
        adapter.unpatch(model)
        assert type(model.base_model.model.lm_head.base_layer) is nn.Linear
        assert_close(logits_of(model, **prompts(model)), got)

    def test_training(self, kernel):
        model = self.lora(make(), "q_proj")

        def run():
            model.zero_grad(set_to_none=True)
            inputs = prompts(model)
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

        expected = run()
        with warm(model):
            assert_same(run(), expected)


class TestFloat32Logits:
    @pytest.mark.parametrize("name", ["llama", "bart", "whisper"])
    def test_generate(self, name, kernel):
        model = make(name, torch.bfloat16)
        head, seen = head_of(model), []
        watch = head.register_forward_hook(lambda _, args, logits: seen.append((args[0], logits)))
        with warm(model, out_dtype=torch.float32), Served(kernel) as served:
            out = generate(model)
        watch.remove()
        assert served.calls == 6
        assert {logits.dtype for _, logits in seen} == {torch.float32} == {logits.dtype for logits in out.logits}
        for x, logits in seen:
            assert_close(logits, x.double() @ head.weight.double().t())

    def test_many_rows_and_training_too(self, kernel):
        model = make(dtype=torch.bfloat16)
        warm(model, out_dtype=torch.float32)
        x = torch.randn(100, HIDDEN).bfloat16().requires_grad_()
        logits = model.lm_head(x)
        assert_close(logits.detach(), x.detach().double() @ model.lm_head.weight.detach().double().t())
        logits.sum().backward()
        assert x.grad is not None
        compiled = torch.compile(model.lm_head, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            assert compiled(x).dtype is torch.float32

    def test_a_weight_that_is_computed_is_cast_up(self, kernel):
        model, x = make(dtype=torch.bfloat16), torch.randn(3, HIDDEN).bfloat16()
        warm(model, out_dtype=torch.float32)
        prune.random_unstructured(model.lm_head, "weight", amount=0.5)
        with torch.no_grad():
            got = model.lm_head(x)
            assert got.dtype is torch.float32
            assert torch.equal(got, nn.functional.linear(x, model.lm_head.weight).float())

    @pytest.mark.parametrize("wrong", [torch.float16, "float32"])
    def test_another_dtype_is_a_value_error(self, wrong, kernel):
        model = make(dtype=torch.bfloat16)
        for _ in range(2):
            with pytest.raises(ValueError, match="out_dtype must be"):
                warm(model, out_dtype=wrong)
            assert not is_patched(model.lm_head) or wrong == "float32"


class TestPrepare:
    def test_default_measures_where_a_kernel_can_serve(self, kernel, monkeypatch):
        asked = []
        autotune = lowbatch_lmhead.autotune
        monkeypatch.setattr(adapter.api, "autotune", lambda *a, **k: asked.append(k) or autotune(*a, **k, budget_s=0))
        patch = adapter.patch(make(dtype=torch.bfloat16))
        assert asked == [{"max_rows": 32, "out_dtype": None}]
        assert patch.heads[0].prepared.name == "lm_head"

    def test_cpu_costs_nothing(self, monkeypatch):
        monkeypatch.setattr(dispatch.Dispatcher, "run", lambda *_: pytest.fail("not even asked"))
        model = make()
        patch = adapter.patch(model)
        assert "not on a CUDA GPU" in str(patch)
        expected = logits_of(model)
        adapter.unpatch(model)
        assert torch.equal(logits_of(model), expected)

    def test_warmup_rows(self, kernel):
        model = make()
        patch = adapter.patch(model, prepare="warmup", max_rows=3)
        assert kernel.compiled == 1
        assert [decision.rows for decision in patch.heads[0].prepared.decisions] == [1, 2, 3, 4]
        lines = str(patch).splitlines()
        assert lines[0] == "lm_head: patched"
        assert "128x64" in lines[1]
        assert "reference (4 splits)" in lines[2]

    def test_none_leaves_it_to_the_first_call(self, kernel):
        model = make()
        patch = adapter.patch(model, prepare=None)
        assert str(patch) == "lm_head: patched"
        assert not kernel.compiled
        logits_of(model)
        assert kernel.compiled

    @pytest.mark.parametrize("prepare", ["autotune", "warmup"])
    @pytest.mark.parametrize("wrong", [{"prepare": "tune"}, {"prepare": True}, {"max_rows": 0}, {"max_rows": "4"}])
    def test_wrong_arguments(self, wrong, prepare, kernel):
        model = make()
        with pytest.raises(ValueError, match=r"prepare must be|max_rows must be"):
            adapter.patch(model, **{"prepare": prepare} | wrong)
        assert type(model.lm_head) is nn.Linear

    @pytest.mark.parametrize("wrong", [nn.ReLU(), None, "model", object()])
    def test_no_head(self, wrong):
        with pytest.raises(
            ValueError, match=r"get_output_embeddings\(\), as transformers 4.57 .*found transformers \d"
        ):
            adapter.patch(wrong)
        adapter.unpatch(wrong)

    def test_strided_last_position_is_taken(self, kernel):
        """transformers 5 gives the head hidden_states[:, -1:, :]."""
        model = make()
        adapter.patch(model, prepare="warmup")
        x = torch.randn(3, 7, HIDDEN)[:, -1:, :]
        assert not x.is_contiguous()
        with torch.no_grad(), Served(kernel) as served:
            for _ in range(3):
                assert_close(model.lm_head(x), nn.functional.linear(x, model.lm_head.weight), within=1e-5)
        assert served.calls == 3

    def test_many_rows_go_to_the_own_forward(self, kernel):
        model, x = make(), torch.randn(100, HIDDEN)
        adapter.patch(model, prepare="warmup")
        with torch.no_grad(), Served(kernel) as served:
            assert torch.equal(model.lm_head(x), nn.functional.linear(x, model.lm_head.weight))
        assert served.calls == 0


def test_import_needs_no_transformers():
    code = "import sys, lowbatch_lmhead.adapters.transformers; print('transformers' in sys.modules)"
    assert python(code).strip() == "False"
