"""The sizes of a memory plan: against real learners, engines and heads, and calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned import LARGE, SMALL, on_gpu, plan
from support import tiny_config
from tiny_run import settings

from paceline.build import memory
from paceline.build.config import load_config
from paceline.build.memory_parts import (
    activation_bytes,
    gathered_weights,
    head_training_bytes,
    kv_bytes_per_token,
    layer_activations,
    layer_gradients,
    num_head_weights,
    num_layer_weights,
)
from paceline.build.memory_plan import (
    GIB,
    HEAD_VOCABULARY,
    RunShape,
    plan_parts,
)
from paceline.config import DraftSection
from paceline.model.decoder import Decoder
from paceline.model.dspark import DSparkHead, dspark_config
from paceline.model.eagle3 import Eagle3Head, head_config
from paceline.model.shapes import SHAPES
from paceline.model.weights import init
from paceline.rl.learner import Learner
from paceline.rl.packing import KEYS_PER_TOKEN


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_optimizer_equal_those_of_a_learner(family: str, optimizer: str, rank: int, dtype: str) -> None:
    biases = {"qkv_bias": family != "qwen3", "o_bias": family == "llama", "mlp_bias": family == "llama"}
    model = tiny_config(family=family, qk_norm=family == "qwen3", tie_embeddings=family == "llama", **biases)
    targets = 'learner.lora_targets=["q_proj", "v_proj", "up_proj", "down_proj"]'
    config = on_gpu(f"learner.optimizer={optimizer}", f"learner.lora_rank={rank}", f"model.dtype={dtype}", targets)
    learner = Learner(init(model, 0, getattr(torch, dtype)), config.learner, num_steps=1)
    sizes = plan_parts(config, RunShape(model, 80 * GIB), 1024, 2048)
    assert sizes.learner_weights == sum(p.nbytes for p in learner.decoder.parameters())
    own = sum(p.nbytes for p in Decoder(model).to(getattr(torch, dtype)).parameters())
    adapters = sum(p.nbytes for name, p in learner.decoder.named_parameters() if ".lora." in name)
    assert sizes.engine_weights == (adapters if rank else own)
    optim = learner.optimizer
    copies = [m for name, m in optim.masters.items() if m is not optim.parameters[name]]
    assert sizes.masters == sum(m.nbytes for m in copies)
    assert sizes.gradients == sum(m.nbytes for m in optim.masters.values())
    moments = [t for each, _ in optim.optimizers for state in each.state.values() for t in state.values() if t.ndim]
    assert sizes.moments == sum(moment.nbytes for moment in moments) > 0


def test_head_weights_equal_those_of_a_head() -> None:
    for model in (tiny_config(vocab_size=40_000), tiny_config(family="qwen2", qkv_bias=True)):
        config = head_config(model, min(model.vocab_size, HEAD_VOCABULARY))
        for each in (config, replace(config, own_embedding=True, fc_norm=True, layer_ids=(1, 2))):
            with torch.device("meta"):
                head = Eagle3Head(each)
            assert num_head_weights(each) == sum(p.numel() for p in head.parameters())
        several = dspark_config(model, config.draft_vocab_size, (1, 2), num_layers=3, markov_rank=7)
        for one in (several, replace(several, own_embedding=True, has_confidence=False)):
            with torch.device("meta"):
                assert num_head_weights(one) == sum(p.numel() for p in DSparkHead(one).parameters())


def test_all_layers_of_a_head_are_counted() -> None:
    config = on_gpu("model.dtype=bfloat16")
    one, three = (dspark_config(SMALL, 32000, (1, 2), num_layers=num) for num in (1, 3))
    keys = 2 * SMALL.num_kv_heads * SMALL.head_dim
    assert kv_bytes_per_token(config, SMALL, [one]) == 2 * (SMALL.num_layers + 1) * keys + 2 * 2 * SMALL.hidden_size
    assert kv_bytes_per_token(config, SMALL, [one, three]) - kv_bytes_per_token(config, SMALL, [one]) == 2 * 2 * keys
    section = DraftSection(unroll=7)
    tokens = max(section.tokens_per_batch, section.online_tokens)
    per_layer = layer_activations(on_gpu("model.dtype=float32"), three.layer)
    more = head_training_bytes(config, section, three) - head_training_bytes(config, section, one)
    assert more == tokens * (7 + 1) * 2 * per_layer, "the context counts as a step"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("shares_prompt", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_in_plain_torch_are_near_those_that_autograd_keeps(
    family: str, rank: int, shares_prompt: bool, dtype: str
) -> None:
    """In bfloat16 too: the Triton kernels do not support 24 dimensions."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 8, "num_heads": 8, "head_dim": 24}
    model = tiny_config(family=family, qk_norm=family == "qwen3", num_kv_heads=4, **shape)
    config = load_config(None, [f"model.dtype={dtype}", f"learner.lora_rank={rank}"])
    decoder = init(model, 0, getattr(torch, dtype))
    Learner(decoder, config.learner, num_steps=1)
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by address; the tensors stay alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[at] = tensor
        return tensor

    lengths, prefixes = ([32, 64, 64, 64], [None, 0, 0, 0]) if shares_prompt else ([64] * 4, [None] * 4)
    num = sum(lengths)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(torch.zeros(num, dtype=torch.int64), torch.arange(num), decoder.attention(lengths, prefixes))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert 0.9 * measured < activation_bytes(config, model, num) < 1.2 * measured


def test_targets() -> None:
    """Sizes of whole runs, calculated by hand from the shapes: 608 tokens for each of 256 sequences."""
    small = plan(SMALL, 141e9)
    assert small.kv_tokens == 608 * 256 and small.tokens_per_microbatch == 8192
    assert small.sum_bytes <= 65 * GIB
    num = 1_720_574_976  # parameters of Qwen3-1.7B
    assert (small.learner_weights, small.masters, small.moments) == (2 * num, 4 * num, 8 * num)
    # 61,504 bytes per token and layer: residuals, norms, qkv, attention, gate_up.
    assert small.activations == 8192 * 28 * (16384 + 8192 + 8192 + 4096 + 64 + 24576)
    large = plan(LARGE, 141e9, "learner.lora_rank=16")
    assert large.tokens_per_microbatch == 8192 and large.sum_bytes <= 65 * GIB


def test_lora_needs_no_second_copy_of_the_weights() -> None:
    """The engine of a merged run of 8B has 15.3 GiB more."""
    lora, num, num_adapters = "learner.lora_rank=16", 8_190_735_360, 43_646_976
    large = plan(LARGE, 141e9, lora)
    assert large.engine_weights == 2 * num_adapters and large.learner_weights == 2 * (num + num_adapters)
    assert 2 * num - large.engine_weights > 14 * GIB
    assert plan(LARGE, 141e9, lora, "train.max_staleness=2").published_weights == 3 * 2 * num_adapters
    assert plan(LARGE, 141e9, lora, num_ranks=2).engine_weights == 2 * (num + num_adapters), "ranks shard theirs"
    vllm = plan(LARGE, 250e9, lora, "engine.kind=vllm", "engine.vllm.gpu_memory_utilization=0.2", "engine.sleep=true")
    assert vllm.engine_weights == 2 * num, "it gets merged weights"
    few = plan(LARGE, 141e9, lora, 'learner.lora_targets=["q_proj", "v_proj"]')
    assert few.engine_weights == 2 * 36 * 16 * ((4096 + 4096) + (4096 + 1024))


def test_reference_published_weights_checkpointing_and_ranks() -> None:
    plain = plan(SMALL, 141e9)
    assert plain.reference == plain.published_weights == 0
    with_reference = plan(SMALL, 141e9, "algorithm.beta=0.1")
    assert with_reference.reference == plain.engine_weights
    assert plan(SMALL, 141e9, "algorithm.beta=0.1", "learner.lora_rank=8").reference == 0
    assert plan(SMALL, 141e9, "train.max_staleness=2").published_weights == 3 * plain.engine_weights
    few = plan(SMALL, 141e9, "learner.activation_checkpointing=true")
    assert few.activations < plain.activations / 4
    training = head_training_bytes(on_gpu(), DraftSection(), head_config(SMALL, HEAD_VOCABULARY))
    assert few.activations + few.backward >= training
    ranks = plan(SMALL, 141e9, num_ranks=4)
    assert ranks.moments == plain.moments // 4 and ranks.engine_weights == plain.engine_weights
    # The shards of trained weights are float32 masters. Embedding and LM head are gathered in 16 bits.
    assert ranks.masters == plain.masters // 4 and ranks.learner_weights == 2 * gathered_weights(SMALL)
    lora = "learner.lora_rank=8"
    frozen = plan(SMALL, 141e9, lora, num_ranks=4).learner_weights - ranks.learner_weights
    assert frozen == plain.learner_weights // 4, "frozen ones have 16 bits"
    in_float32 = [plan(SMALL, 141e9, "model.dtype=float32", num_ranks=n).learner_weights for n in (1, 4)]
    assert in_float32[1] == in_float32[0] // 4 + 4 * gathered_weights(SMALL)


def test_draft_model_is_counted() -> None:
    plain = plan(SMALL, 141e9)
    assert plain.kv_tokens is not None
    for name, num_weights in (("x", 1_720_574_976), ("layers:28", 0)):  # layers of the target share its weights
        given = ["speculation.method=draft_model", f"speculation.draft_model={name}"]
        with_draft = plan(SMALL, 141e9, *given, "speculation.audit_every=0", draft=SMALL)
        assert with_draft.drafter == 2 * num_weights + plain.kv_tokens * 2 * 2 * 28 * 8 * 128
        for audits in ([], ["speculation.audit_every=10"]):
            audited = plan(SMALL, 141e9, *given, *audits, draft=SMALL)
            assert audited.drafter == 2 * with_draft.drafter, "an audit builds another one"
        stale = plan(SMALL, 141e9, *given, "train.max_staleness=1", draft=SMALL)
        assert stale.drafter == with_draft.drafter, "no audit is possible"


def test_the_head_that_is_used_is_counted() -> None:
    given, default = "speculation.method=eagle3", head_config(SMALL, HEAD_VOCABULARY)
    assert plan(SMALL, 141e9, given, head=default) == plan(SMALL, 141e9)
    assert plan(SMALL, 141e9, given, head=replace(default, draft_vocab_size=16384)) == plan(SMALL, 141e9), "smaller"
    large = replace(default, draft_vocab_size=SMALL.vocab_size, own_embedding=True, layer_ids=(2, 14, 20, 25))
    before, after = plan(SMALL, 141e9), plan(SMALL, 141e9, given, head=large)
    num_more = num_head_weights(large) - num_head_weights(default)
    assert num_more == 2048 * (2 * 151936 - HEAD_VOCABULARY + 2048)
    assert after.drafter - before.drafter == num_more * (2 + 1 + 16)
    assert after.kv - before.kv == 155648 * 2048 * 2  # hidden states of a fourth layer
    few = ["learner.activation_checkpointing=true", given]
    untrained, trained = (plan(SMALL, 141e9, *few, *more, head=large) for more in ([], ["draft.online=every"]))
    assert trained.activations > untrained.activations


def test_shape_of_the_head() -> None:
    config = load_config(None, ["model.name=smollm2-135m", "speculation.method=hybrid"])
    found = memory.read_head(config, SHAPES["smollm2-135m"])
    assert found is not None and 0 < found.draft_vocab_size < 49152 and found.layer.hidden_size == 576
    assert memory.read_head(load_config(None, []), SHAPES["smollm2-135m"]) is None, "it is not used"


def test_copies_of_prompts_are_counted() -> None:
    """In the backward pass of attention: k and v, and their gradients for query heads and as sums."""
    config, size = on_gpu("learner.lora_rank=16"), 2
    copies = size * (2 * 8 + 2 * 32 + 2 * 8) * 128 * KEYS_PER_TOKEN * 8192
    others = 8192 * layer_activations(config, LARGE) + size * num_layer_weights(LARGE)
    assert layer_gradients(config, LARGE, 8192, 8192) == copies + others


def test_models_without_kernels_are_planned_in_plain_torch() -> None:
    other = replace(SMALL, head_dim=96)
    assert plan(other, 141e9).activations > 1.4 * plan(SMALL, 141e9).activations
    assert plan(replace(SMALL, head_dim=64), 141e9).activations < plan(SMALL, 141e9).activations


def test_shape_of_the_draft_model(tmp_path: Path) -> None:
    given = ["speculation.method=draft_model", "speculation.draft_model=layers:2"]
    draft = memory.read_draft_model(load_config(None, given), SMALL)
    assert draft == replace(SMALL, num_layers=2)
    assert memory.read_draft_model(load_config(None, ["speculation.method=suffix", given[1]]), SMALL) is None
    settings(tmp_path)
    named = memory.read_draft_model(
        load_config(None, [given[0], f"speculation.draft_model={tmp_path / 'model'}"]), SMALL
    )
    assert named is not None and named.num_layers == 2 and named.hidden_size == 32
