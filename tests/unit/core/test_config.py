"""Configs and overrides: strict, complete in their complaints, loadable again."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.config import RunConfig, changed_keys, load_config, parse_overrides
from harness.core.errors import ConfigError


def test_overrides_reach_nested_keys_with_yaml_types() -> None:
    config = load_config(
        "tiny",
        ["train.lr=1e-3", "train.steps=7", "data.path=/some/where", "model.args.dim=128"],
        "bf16",
    )
    assert (config.train.lr, config.train.steps, config.data.path) == (1e-3, 7, "/some/where")
    assert config.model.args["dim"] == 128
    assert config.model.args["layers"] == 2, "other arguments of the file stay"
    assert config.recipe == "bf16"


def test_all_problems_of_a_command_line_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            "tiny",
            [
                "train.stpes=3",
                "train.lr=fast",
                "trian.seed=1",
                "checkpoint.keep=1",
                "train.seed=-1",
            ],
        )
    text = str(caught.value)
    for expected in (
        'did you mean "steps"?',
        "'fast'",
        'did you mean "train"?',
        "checkpoint.keep",
        "train.seed",
    ):
        assert expected in text
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("override", ["train.lr", "=3", "train..lr=1", "train.l r=1"])
def test_malformed_overrides_are_named(override: str) -> None:
    with pytest.raises(ConfigError, match="not an override"):
        parse_overrides([override])


def test_types_are_not_coerced() -> None:
    for override in ("train.steps=3.0", "train.steps='3'", "train.steps=true", "tracking.mlflow=1"):
        with pytest.raises(ConfigError):
            load_config("tiny", [override])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["data.format=jsonl"], "JSONL"),
        (["data.format=PARQUET"], "Parquet"),
        (["data.format=JSONL"], "JSONL"),
    ],
)
def test_a_choice_is_taken_in_any_case(given: list[str], taken: str) -> None:
    assert load_config("tiny", given, "fp8_hybrid").data.format == taken


def test_other_choices_too_and_no_more_than_case() -> None:
    config = load_config(
        "tiny", ["checkpoint.best=Train_Loss", "data.packing=DOCUMENTS"], "fp8_hybrid"
    )
    assert (config.checkpoint.best, config.data.packing) == ("train_loss", "documents")
    with pytest.raises(ConfigError, match=r"'json' is not one of .*\n.*JSONL"):
        load_config("tiny", ["data.format=json"], "fp8_hybrid")


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"global_batch \(5\) is not a multiple of train.micro_batch \(2\)"
    ):
        load_config("tiny", ["train.global_batch=5"])


def test_a_rule_about_two_keys_does_not_repeat_the_whole_config() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("tiny", ["train.micro_batch=3"])
    assert "given" not in str(refused.value)
    assert str(refused.value).endswith("fix: correct one of them")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("steps=4", "train.steps"),
        ("lr=1e-3", "train.lr"),
        ("train.mlflow=false", "tracking.mlflow"),
    ],
)
def test_a_key_without_its_section_names_the_section(override: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"fix: did you mean {meant}\?"):
        load_config("tiny", [override])


def test_unknown_config_names_the_near_match() -> None:
    with pytest.raises(ConfigError, match='did you mean "quickstart"'):
        load_config("quickstrat")


def test_a_dumped_config_loads_again(tmp_path: Path) -> None:
    import yaml

    config = load_config("quickstart", ["train.betas=[0.8, 0.99]"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(str(path)) == config


def test_changed_keys_are_dotted() -> None:
    old = RunConfig().model_dump()
    new = load_config("tiny", ["recipe=auto"]).model_dump()
    keys = changed_keys(old, new)
    assert "train.steps" in keys
    assert "model.args.dim" in keys
    assert "train.seed" not in keys


@pytest.mark.parametrize("window", [1, 7])
def test_a_spread_of_too_few_losses_is_refused(window: int) -> None:
    """Of one or two losses it would be 0, and every rise a spike."""
    with pytest.raises(ConfigError, match="spike_window"):
        load_config("tiny", [f"guard.spike_window={window}"])
    assert load_config("tiny", ["guard.spike_window=8"]).guard.spike_window == 8
