"""The config file: what is read, what is refused and in which words, and what the sub-commands make of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from ft_accelerate import yaml_config
from ft_accelerate.commands import main
from ft_accelerate.commands.config import questions
from ft_accelerate.options import FIELDS, OPTIONS, SECTION
from ft_accelerate.yaml_config import Document, load, plain, save
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

HEAD = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nmixed_precision: 'no'\n"


@pytest.fixture
def written(tmp_path: pathlib.Path) -> Callable[[str], str]:
    def write(text: str, name: str = "ft.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_the_example_is_read_and_every_option_can_stand_in_a_file(written: Callable[[str], str]) -> None:
    document = load("examples/accelerate/ft.yaml")
    assert document.section["replicas"] == "2"
    values = {"int": "3", "float": "2.5", "bool": "true", "str": "word"}
    lines = [
        f"  {name}: {option.choices[0] if option.choices else SPECIAL.get(name, values[option.kind.__name__])}"
        for name, option in OPTIONS.items()
    ]
    section = load(written(HEAD + f"{SECTION}:\n" + "\n".join(lines))).section
    assert section.keys() == OPTIONS.keys()
    assert all(isinstance(value, OPTIONS[name].kind) for name, value in section.items())


SPECIAL = {
    "lighthouse": "host0:29510",
    "lr_scaling": "linear",
    "on_exhausted": "shadow",
    "replicas": "2:8",
    "chaos": "kill=30s",
}


def test_each_field_of_the_plugin_is_an_option_but_for_those_the_launcher_sets() -> None:
    assert set(FIELDS) - set(OPTIONS) == {"config_file", "replica_id"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{SECTION}: {{min_replica: 1}}", r"fault_tolerance_config in .*ft.yaml has an unknown key min_replica; did "
         "you mean min_replicas"),
        (f"{SECTION}: {{config_version: 7, shiny: 1}}", "written by a newer ft-accelerate .config_version 7, this one "
         "reads up to 1.: pip install --upgrade"),
        (f"{SECTION}: {{config_version: new}}", "config_version='new'"),
        (f"{SECTION}: {{timeout_s: soon}}", "fault_tolerance_config.timeout_s in .*='soon' must be a number"),
        (f"{SECTION}: {{timeout_s: 0}}", "timeout_s in .* more than 0"),
        (f"{SECTION}: {{standby: -1}}", "standby in .*='-1' must be a whole number, 0 or more"),
        (f"{SECTION}: {{gpus: some}}", "gpus in .*='some' must be one of auto, share, all, none"),
        (f"{SECTION}: {{replicas: x}}", "fault_tolerance_config.replicas in .*='x' must be a number of replica groups"),
        (f"{SECTION}: {{replicas: 3:2}}", "replicas in .*='3:2' must be 1 to 1024 replica groups, the first"),
        (f"{SECTION}: {{chaos: explode=1s}}", "explode"),
        (f"{SECTION}: {{name: [a]}}", "name in .* must be a text"),
        (f"{SECTION}: [replicas]", "must be followed by indented lines such as `replicas: 2`; leave out the dashes"),
        ("fault_tolerance: {replicas: 2}", "has an unknown key fault_tolerance; did you mean fault_tolerance_config"),
        ("num_proceses: 2", "has an unknown key num_proceses; did you mean num_processes"),
        ("num_processes: four", "num_processes='four' in .*ft.yaml must be a whole number"),
        ("num_machines: 1.5", "num_machines=1.5 in .* must be a whole number"),
        ("num_processes: true", "num_processes=True in .* must be a whole number"),
        ("fsdp_config: 2", "fsdp_config=2 in .* must be followed by indented lines"),
        ("mixed_precision: no", "mixed_precision in .*: YAML reads a bare no as false"),
        ("compute_environment: AMAZON_SAGEMAKER", "replica groups are started on this machine only"),
        (": :", "cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_are_named(written: Callable[[str], str], text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(written(HEAD + text))


def test_a_number_in_quotes_is_one(written: Callable[[str], str]) -> None:
    rest = load(written(HEAD + "num_processes: '4'\nmain_process_port: null\ndowncast_bf16: 'no'")).rest
    assert (rest["num_processes"], rest["main_process_port"], rest["downcast_bf16"]) == (4, None, "no")


def test_no_file_an_empty_one_and_one_without_distributed_type(written: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml cannot be read: .*No such file"):
        load("missing.yaml")
    with pytest.raises(ConfigError, match="has no settings"):
        load(written(""))
    with pytest.raises(ConfigError, match="has no distributed_type"):
        load(written("num_processes: 1"))


def test_a_range_of_replicas_is_no_number_in_base_sixty(written: Callable[[str], str]) -> None:
    assert load(written(HEAD + f"{SECTION}:\n  replicas: 2:8")).section == {"replicas": "2:8"}


@pytest.mark.parametrize("name", ["ft.yaml", "ft.json"])
def test_what_is_saved_is_what_is_read(tmp_path: pathlib.Path, name: str) -> None:
    rest = {"distributed_type": "NO", "num_processes": 1, "compute_environment": "LOCAL_MACHINE"}
    section = {"replicas": "3:4", "min_replicas": 2, "timeout_s": 7.5, "gpus": "none"}
    path = str(tmp_path / "deep" / name)
    save(Document(path, rest, section))
    again = load(path)
    assert (again.rest, again.section) == (rest, section)
    with plain(again) as other:
        assert load_config_from_file(other).num_processes == 1  # accelerate's own reader takes the rest


def test_default_then_update_then_env(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ft.yaml"
    file = ["--config_file", str(path)]
    assert main(["config", "default", *file, "--mixed_precision", "bf16"]) == 0
    first = load(str(path))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert first.section == {"replicas": str(devices if devices > 1 else 2)}
    assert (first.rest["mixed_precision"], first.rest["num_processes"]) == ("bf16", 1)
    assert first.rest["use_cpu"] is (devices == 0)
    assert main(["config", "default", *file]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err

    old = yaml.safe_load(path.read_text())
    old["fp16"] = old.pop("mixed_precision") == "bf16"  # as an old accelerate wrote it
    old[SECTION] = {"replicas": 4, "min_replicas": 3}  # and an old one of ours
    path.write_text(yaml.safe_dump(old))
    assert main(["config", "update", *file]) == 0
    updated = yaml.safe_load(path.read_text())
    assert updated["mixed_precision"] == "fp16"
    assert updated[SECTION] == {"config_version": 1, "replicas": "4", "min_replicas": 3}

    monkeypatch.setenv("FT_TOKEN", "do-not-print")
    monkeypatch.setenv("ACCELERATE_FT_TIMEOUT_S", "9")
    capsys.readouterr()
    assert main(["env", *file]) == 0
    shown = capsys.readouterr().out
    for words in ("`Accelerate` version", "- min_replicas: 3", "- mixed_precision: fp16", "ACCELERATE_FT_TIMEOUT_S: 9",
                  "FT_TOKEN: (set)", "`ft-training` version"):  # fmt: skip
        assert words in shown
    assert "do-not-print" not in shown


def test_update_of_nothing_and_an_unknown_command(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["config", "update", "--config_file", str(tmp_path / "no.yaml")]) == 2
    assert "does not exist: write it with" in capsys.readouterr().err
    assert main(["lanch"]) == 2
    assert "there is no command lanch; did you mean launch?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert re.search(r"config .*launch .*env .*test .*lighthouse", capsys.readouterr().out.replace("\n", " "))
    assert main(["--version"]) == 0


def test_questions_one_answer_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    prompts: list[str] = []

    def silent(prompt: str) -> str:
        prompts.append(prompt)
        return ""

    assert questions(silent) == {"replicas": "2"}
    assert prompts[0] == "How many replica groups should run on this machine? [2]: "

    wanted = {"min_replicas": ["x", "2"], "gpus": ["none"], "timeout_s": ["30"]}

    def answer(prompt: str) -> str:
        if prompt.startswith("How many"):
            return "4:8"
        if prompt.startswith("Do you wish"):
            return "maybe" if not capsys.readouterr().out else "yes"
        for name, texts in wanted.items():
            if prompt.startswith(OPTIONS[name].help.rstrip(".")) and texts:
                return texts.pop(0)
        return ""

    assert questions(answer) == {"replicas": "4:8", "min_replicas": 2, "gpus": "none", "timeout_s": 30.0}
    assert "min_replicas='x' must be a whole number" in capsys.readouterr().out


def test_the_default_file_is_not_accelerates_own() -> None:
    assert yaml_config.default_file().endswith("accelerate/default_ft_config.yaml")
    assert json.dumps(yaml_config.default_accelerate_file()) != json.dumps(yaml_config.default_file())
