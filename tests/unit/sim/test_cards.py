"""Cards and scenarios: numbers that are known, and mistakes that are named."""

from __future__ import annotations

import pytest

from paceline.config import ConfigError
from paceline.sim.cards import Efficiency, Hardware, Model, Software, card, shipped
from paceline.sim.scenario import Simulator, load, presets


@pytest.mark.parametrize("kind", [Hardware, Model, Software, Efficiency])
def test_every_shipped_card_is_read_and_says_where_its_numbers_come_from(kind):
    assert shipped(kind)
    for name in shipped(kind):
        assert len(card(kind, name, "").source) > 20


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_simulated(name):
    assert load(name).about
    Simulator(load(name))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-8b", 8.19e9, 7.57e9),
        ("qwen3-235b-a22b", 235.1e9, 21.5e9),
        ("qwen3-30b-a3b", 30.5e9, 3.03e9),
        ("llama-3-70b", 70.6e9, 69.5e9),
        ("smollm2-135m", 134.5e6, 134.5e6),
    ],
)
def test_shapes_have_the_published_sizes(name, total, active):
    model = card(Model, name, "")
    assert model.num_params == pytest.approx(total, rel=0.01)
    assert model.active_params == pytest.approx(active, rel=0.02)


GOOD = 'name = "mine"\nsource = "me"\nmemory_gb = 80\nmemory_tb_s = 2\nbf16_tflops = 300\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory_tb_s = 3350", r"memory_tb_s = 3350: must be from 0.005 to 100 in TB/s; is it in another unit\?"),
        ("memory_gb = 8.0e10", r"memory_gb = 8e\+10: must be from 1 to 4000 in GB"),
        ("memory_gb = -1", "must be from 1 to 4000"),
        ("bf16_tflops = nan", "bf16_tflops = nan"),
        ('memory_gb = "80"', r"memory_gb = '80': must be a number"),
        ("nvlink_gpus = 8.5", "must be a whole number"),
        ("memry_gb = 80", "did you mean memory_gb"),
    ],
)
def test_wrong_units_and_keys_are_named(tmp_path, line, message):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert card(Hardware, str(path), "hardware").memory_gb == 80
    kept = [each for each in GOOD.splitlines() if each.split(" ")[0] != line.split(" ")[0]]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError, match=message):
        card(Hardware, str(path), "hardware")


def test_a_card_that_lacks_a_number_or_does_not_exist(tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nsource = "me"\nmemory_gb = 80\n')
    with pytest.raises(ConfigError, match="memory_tb_s is missing"):
        card(Hardware, str(tmp_path / "mine.toml"), "hardware")
    with pytest.raises(ConfigError, match=r"hardware = 'h300': no such card; shipped are a100"):
        card(Hardware, "h300", "hardware")
    with pytest.raises(ConfigError, match="No such file"):
        card(Hardware, str(tmp_path / "none.toml"), "hardware")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        card(Hardware, str(tmp_path / "bad.toml"), "hardware")


@pytest.mark.parametrize(
    ("preset", "words", "message"),
    [
        ("nvidia-235b-512", ["engine.gpus=1"], r"does not fit: 23\d GB of weights a device, 167 GB"),
        ("nvidia-235b-512", ["engine.gpus=256"], "more than the 128 experts"),
        ("nvidia-235b-512", ["engine.tp=3"], "engine.tp = 3: does not divide engine.gpus = 16"),
        ("nvidia-235b-512", ["engine.gpus=24"], "does not divide the 512 devices"),
        ("nvidia-8b-zero", ["engine.gpus=2"], "has no experts to spread"),
        ("nvidia-8b-zero", ["engine.gpus=64", "engine.tp=64", "pipeline.gpus=64"], "does not divide the 32 heads"),
        ("nvidia-8b-zero", ["hardware=a100", "engine.precision=fp8"], "has no fp8"),
        ("nvidia-8b-zero", ["workload.max_tokens=50000"], "beyond the 40960 positions"),
        (
            "nvidia-8b-zero",
            ["hardware=h100", "workload.max_tokens=40000", "engine.memory_share=0.25"],
            "engine's memory",
        ),
        ("nvidia-8b-zero", ["acceptance=4.5"], "brings from 1 to 4"),
        ("nvidia-8b-zero", ["pipeline.lag=1"], "can't overlap"),
        ("nvidia-8b-async", ["generation_gpus=64"], "must be from 1 to 63"),
        ("nvidia-8b-zero", ["workload.batch=33"], "no multiple of workload.group"),
        ("nvidia-8b-zero", ["pipeline.gpu=8"], r"unknown key pipeline.gpu: did you mean gpus\?"),
        ("nvidia-8b-zero", ["speculation.method=magic"], "must be one of none, eagle3"),
        ("nvidia-8b-zero", ["speculation.method=draft_model"], "speculation.draft_model is not set"),
        (
            "nvidia-8b-zero",
            ["speculation.method=draft_model", "draft_model=qwen3-235b-a22b"],
            "the drafter does not fit: 470.2 GB of its weights a device, 151.0 GB left beside Qwen3-8B",
        ),
        (
            "nvidia-8b-zero",
            ["speculation.method=draft_model", "draft_model=smollm2-135m", "engine.gpus=4", "engine.tp=4"],
            "does not divide the 9 heads of speculation.draft_model, SmolLM2-135M",
        ),
        ("nvidia-8b-zero", ["hardware=a100", "training_precision=fp8"], "pipeline.training_precision = 'fp8': A100"),
        ("nvidia-8b-zero", ["hardware=a100", "head_precision=fp8"], "speculation.head_precision = 'fp8': A100"),
        ("nvidia-8b-zero", ["k=0", "speculation.policy=auto"], "speculation.k = 0: policy 'auto' needs at least 1"),
        ("nvidia-8b-zero", ["acceptance=2", "chances=[0.5]"], r"acceptance = 2 with speculation.chances = \[0.5\]"),
        ("nvidia-8b-async", ["lag=64", "batch=1000000", "group=1"], "192 batches are simulated"),
        (
            "nvidia-8b-zero",
            [
                "hardware=neoverse-n1-2",
                "model=smollm2-135m",
                "max_tokens=4000",
                "engine.precision=fp32",
                "head_precision=fp32",
                "training_precision=fp32",
            ],
            "pipeline.gpus = 32: weights have no way between devices; give network_gb_s",
        ),
        ("nvidia-8b-one", [], "is no preset; there are nvidia-235b-2048"),
    ],
)
def test_impossible_scenarios_are_refused_with_a_reason(preset, words, message):
    with pytest.raises(ConfigError, match=message):
        simulator = Simulator(load(preset, words))
        simulator.run(simulator.scenario.speculation)


def test_a_section_that_is_none(tmp_path):
    (tmp_path / "mine.toml").write_text("speculation = 3\n")
    with pytest.raises(ConfigError, match="speculation is a value, not a section"):
        load(str(tmp_path / "mine.toml"), ["k=5"])


def test_acceptance_and_chances_take_each_others_place():
    chosen = load("nvidia-8b-zero", ["chances=[0.5, 0.25]"]).speculation
    assert chosen.length(2) == pytest.approx(1 + 0.5 + 0.125)


def test_positions_keep_their_chances_where_only_k_changes():
    before = load("nvidia-8b-zero").speculation
    longer = load("nvidia-8b-zero", ["k=7"]).speculation
    assert longer.length(3) == pytest.approx(before.length(3)) == pytest.approx(3.32)
    assert longer.length(7) > 3.32
    assert load("nvidia-8b-zero", ["k=7", "acceptance=5.06"]).speculation.length(7) == pytest.approx(5.06)
