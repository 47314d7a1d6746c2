"""Specs and simulation configs: known model sizes, and error messages."""

from __future__ import annotations

import pytest

from paceline.config_io import ConfigError
from paceline.sim.simulator import Simulator, load_simulation_config, presets
from paceline.sim.specs import Efficiency, Hardware, Model, Software, load_spec, shipped_specs


@pytest.mark.parametrize("kind", [Hardware, Model, Software, Efficiency])
def test_every_shipped_spec_loads_and_has_a_source(kind):
    assert shipped_specs(kind)
    for name in shipped_specs(kind):
        assert len(load_spec(kind, name, "").source) > 20


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name):
    assert load_simulation_config(name).about
    Simulator(load_simulation_config(name))


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
def test_models_have_their_published_sizes(name, total, active):
    model = load_spec(Model, name, "")
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
def test_errors_name_the_unit_and_the_closest_key(tmp_path, line, message):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_spec(Hardware, str(path), "hardware").memory_gb == 80
    kept = [each for each in GOOD.splitlines() if each.split(" ")[0] != line.split(" ")[0]]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError, match=message):
        load_spec(Hardware, str(path), "hardware")


def test_missing_keys_and_missing_specs(tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nsource = "me"\nmemory_gb = 80\n')
    with pytest.raises(ConfigError, match="memory_tb_s is missing"):
        load_spec(Hardware, str(tmp_path / "mine.toml"), "hardware")
    with pytest.raises(ConfigError, match=r"hardware = 'h300': no such spec; choose one of a100"):
        load_spec(Hardware, "h300", "hardware")
    with pytest.raises(ConfigError, match="does not exist"):
        load_spec(Hardware, str(tmp_path / "none.toml"), "hardware")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_spec(Hardware, str(tmp_path / "bad.toml"), "hardware")


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("nvidia-235b-512", ["engine.gpus=1"], r"does not fit: 23\d GB of weights per device, but .* has 167 GB"),
        ("nvidia-235b-512", ["engine.gpus=256"], "more than the 128 experts"),
        ("nvidia-235b-512", ["engine.tp=3"], "engine.tp = 3: does not divide engine.gpus = 16"),
        ("nvidia-235b-512", ["engine.gpus=24"], "does not divide the 512 devices"),
        ("nvidia-8b-zero", ["engine.gpus=2"], "has no experts to spread"),
        ("nvidia-8b-zero", ["engine.gpus=64", "engine.tp=64", "pipeline.gpus=64"], "does not divide the 32 heads"),
        ("nvidia-8b-zero", ["hardware=a100", "engine.precision=fp8"], "has no fp8"),
        ("nvidia-8b-zero", ["workload.max_tokens=50000"], "exceeds the 40960 positions"),
        (
            "nvidia-8b-zero",
            ["hardware=h100", "workload.max_tokens=40000", "engine.memory_share=0.25"],
            "engine's memory",
        ),
        ("nvidia-8b-zero", ["acceptance=4.5"], "must be from 1 to 4 for drafts of 3 tokens"),
        ("nvidia-8b-zero", ["pipeline.lag=1"], "can't overlap"),
        ("nvidia-8b-async", ["generation_gpus=64"], "must be from 1 to 63"),
        ("nvidia-8b-zero", ["workload.batch=33"], "not a multiple of workload.group"),
        ("nvidia-8b-zero", ["pipeline.gpu=8"], r"unknown key pipeline.gpu: did you mean gpus\?"),
        ("nvidia-8b-zero", ["speculation.method=magic"], "must be one of none, eagle3"),
        ("nvidia-8b-zero", ["speculation.method=draft_model"], "speculation.draft_model is not set"),
        (
            "nvidia-8b-zero",
            ["speculation.method=draft_model", "draft_model=qwen3-235b-a22b"],
            "the drafter does not fit: 470.2 GB of weights per device, but 151.0 GB left beside Qwen3-8B",
        ),
        (
            "nvidia-8b-zero",
            ["speculation.method=draft_model", "draft_model=smollm2-135m", "engine.gpus=4", "engine.tp=4"],
            "does not divide the 9 heads of speculation.draft_model, SmolLM2-135M",
        ),
        ("nvidia-8b-zero", ["hardware=a100", "training_precision=fp8"], "pipeline.training_precision = 'fp8': A100"),
        ("nvidia-8b-zero", ["hardware=a100", "head_precision=fp8"], "speculation.head_precision = 'fp8': A100"),
        ("nvidia-8b-zero", ["k=0", "speculation.policy=auto"], "speculation.k = 0: policy 'auto' needs at least 1"),
        (
            "nvidia-8b-zero",
            ["acceptance=2", "acceptance_probabilities=[0.5]"],
            r"acceptance = 2 with speculation.acceptance_probabilities = \[0.5\]",
        ),
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
            "pipeline.gpus = 32: no link between the devices; set network_gb_s",
        ),
        ("nvidia-8b-one", [], "is not a preset; choose one of 1.5b-1xh200, 8b-8xh100, 8b-8xh200, nvidia-235b-2048"),
    ],
)
def test_invalid_configs_are_errors(preset, overrides, message):
    with pytest.raises(ConfigError, match=message):
        simulator = Simulator(load_simulation_config(preset, overrides))
        simulator.run(simulator.config.speculation)


def test_a_value_in_place_of_a_section_is_an_error(tmp_path):
    (tmp_path / "mine.toml").write_text("speculation = 3\n")
    with pytest.raises(ConfigError, match="speculation is a value, not a section"):
        load_simulation_config(str(tmp_path / "mine.toml"), ["k=5"])


def test_overriding_acceptance_probabilities_replaces_acceptance():
    speculation = load_simulation_config("nvidia-8b-zero", ["acceptance_probabilities=[0.5, 0.25]"]).speculation
    assert speculation.length(2) == pytest.approx(1 + 0.5 + 0.125)


def test_overriding_k_alone_keeps_the_acceptance_probabilities():
    before = load_simulation_config("nvidia-8b-zero").speculation
    longer = load_simulation_config("nvidia-8b-zero", ["k=7"]).speculation
    assert longer.length(3) == pytest.approx(before.length(3)) == pytest.approx(3.32)
    assert longer.length(7) > 3.32
    given = load_simulation_config("nvidia-8b-zero", ["k=7", "acceptance=5.06"]).speculation
    assert given.length(7) == pytest.approx(5.06)
