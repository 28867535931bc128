"""Compiled kernels: built once, never from a damaged file, and missed without harm."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from forge_ptq.numerics import compiled
from forge_ptq.numerics import observer_native as native
from forge_ptq.numerics.compiled import NotCompiledError, find_compiler, load
from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.stats import measure
from tests.unit.test_stats import assert_same

ROOT = Path(__file__).resolve().parents[2]
try:
    COMPILER = find_compiler()[0]
except NotCompiledError:
    COMPILER = ""
with_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler on the PATH")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


@pytest.fixture
def fresh_kernel():
    """The process forgets whether it has a kernel, before and after."""
    native.kernel.cache_clear()
    yield
    native.kernel.cache_clear()


def compiler(folder: Path, script: str) -> str:
    file = folder / "some-c++"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def counting_compiler(folder: Path) -> tuple[str, Path]:
    log = folder / "calls"
    return compiler(folder, f'echo call >> {log}; exec {COMPILER} "$@"'), log


@with_compiler
def test_it_is_compiled_once_per_source_compiler_and_cpu(source, tmp_path, monkeypatch):
    cache = tmp_path / "deep" / "cache"
    command, log = counting_compiler(tmp_path)
    monkeypatch.setenv("CXX", command)
    for _ in range(2):
        assert load(source, cache).answer() == 42
    assert log.read_text().count("call") == 1
    assert cache.stat().st_mode & 0o777 == 0o700
    source.write_text(source.read_text().replace("42", "43"))
    assert load(source, cache).answer() == 43
    monkeypatch.setenv("CXX", f"{command} -DSOMETHING")
    assert load(source, cache).answer() == 43
    monkeypatch.setattr(compiled, "_cpu", lambda: "another CPU")
    assert load(source, cache).answer() == 43
    assert log.read_text().count("call") == 4
    assert len(list(cache.iterdir())) == 4
    assert {file.suffix for file in cache.iterdir()} == {".so"}


@with_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "short", "one bit", "none of ours"])
def test_a_damaged_library_is_never_loaded_but_built_again(source, tmp_path, damage):
    cache = tmp_path / "cache"
    load(source, cache)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    flipped = bytes([whole[len(whole) // 2] ^ 1])
    body = whole[: -compiled.SEAL_BYTES]
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "short": whole[:20],
        "one bit": whole[: len(whole) // 2] + flipped + whole[len(whole) // 2 + 1 :],
        "none of ours": body,
    }
    # A new file: the library that is loaded keeps its own.
    kept.unlink()
    kept.write_bytes(damaged[damage])
    assert load(source, cache).answer() == 42
    assert kept.read_bytes()[: -compiled.SEAL_BYTES] == body
    assert [file.name for file in cache.iterdir()] == [kept.name]


@with_compiler
def test_two_processes_compile_at_once(source, tmp_path, monkeypatch):
    cache, started = tmp_path / "cache", tmp_path / "started"
    started.mkdir()
    wait = f"touch {started}/$$; while [ $(ls {started} | wc -l) -lt 2 ]; do sleep 0.01; done"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'{wait}; exec {COMPILER} "$@"'))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    both = [
        context.Process(target=lambda: answers.put(load(source, cache).answer())) for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [answers.get() for _ in both] == [42, 42]
    assert len(list(started.iterdir())) == 2
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(compiled, "_compile", None)  # what they left behind is whole
    assert load(source, cache).answer() == 42


@with_compiler
def test_a_cache_that_others_can_write_to_is_left_alone(source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert load(source, cache).answer() == 42
    assert list(cache.iterdir()) == []
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    assert load(source, no_folder / "cache").answer() == 42
    assert load(source, Path("relative")).answer() == 42
    assert not Path("relative").exists()


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compiled.cache_directory() == Path("/somewhere/forge_ptq/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/of/somebody")
    assert compiled.cache_directory() == Path("/home/of/somebody/.cache/forge_ptq/kernels")


FAILURES = {
    "absent": (None, r"no C\+\+ compiler: c\+\+ or g\+\+ or clang\+\+ is not on the PATH"),
    "failing": (
        "echo some text; echo internal error >&2; exit 3",
        r"\(3\): some text \| internal err",
    ),
    "doing nothing": ("exit 0", r"failed \(0\)"),
    "writing no library": (
        'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"',
        "does not load: .*file too short|does not load: .*invalid ELF header",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_without_a_working_compiler_torch_counts(kind, tmp_path, monkeypatch, caplog, fresh_kernel):
    script, message = FAILURES[kind]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if script is None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", compiler(tmp_path, script))
    model, x_BTC = nn.Sequential(nn.Linear(7, 3)), torch.randn(2, 5, 7)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with ActivationObserver(model, ["0"]) as observer:
                model(x_BTC)
                stats = observer.take()["0"]
            assert_same(stats, measure(x_BTC))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(f"collected by torch, which is slower: .*{message}", record.message)


def test_a_compiler_that_is_not_there_is_named(source, monkeypatch):
    monkeypatch.setenv("CXX", "absent-c++ -O1")
    with pytest.raises(NotCompiledError, match="CXX='absent-c\\+\\+' is not on the PATH"):
        load(source)


def test_a_compiler_that_hangs_is_killed_with_its_children(source, tmp_path, monkeypatch):
    child = tmp_path / "child"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"sleep 60 & echo $! > {child}; wait"))
    monkeypatch.setattr(compiled, "TIMEOUT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(NotCompiledError, match=r"took longer than 0\.5 s"):
        load(source, tmp_path / "cache")
    assert time.monotonic() - start < 10
    assert not list((tmp_path / "cache").iterdir())
    # The child has no parent that would reap it; as a zombie it is dead too.
    status = Path(f"/proc/{int(child.read_text())}/stat")
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the compiler's child still runs"
        time.sleep(0.01)


def test_the_name_says_what_went_in(tmp_path, monkeypatch):
    command = [compiler(tmp_path, "exit 0")]
    names = {compiled._key(b"x", command), compiled._key(b"y", command)}
    names.add(compiled._key(b"x", [*command, "-g"]))
    os.utime(command[0], ns=(1, 1))
    names.add(compiled._key(b"x", command))
    monkeypatch.setattr(compiled, "_cpu", lambda: "another CPU")
    names.add(compiled._key(b"x", command))
    assert len(names) == 5
    assert compiled._key(b"x", command) in names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "apps").mkdir()
    for package in ("forge_ptq", "kernels"):
        subprocess.run(
            ["cp", "-r", "-P", str(ROOT / package), str(folder)], check=True, timeout=20
        )  # links stay links
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, timeout=60, capture_output=True
    )
    (built,) = (folder / "dist").iterdir()
    return built


def test_sources_are_in_the_wheel_and_no_package_is_called_kernels(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        packed = archive.read("forge_ptq/kernels/cpu/observe.cpp")
    assert hashlib.sha256(packed).digest() == hashlib.sha256(native.SOURCE.read_bytes()).digest()
    # Hugging Face's package of that name would be overwritten, and transformers imports it.
    assert not [name for name in names if name.startswith("kernels/")]
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*.cpp")}
    assert {f"forge_ptq/{name}" for name in sources} <= set(names)
    assert not list((ROOT / "kernels").rglob("*.py"))


@with_compiler
def test_an_unpacked_wheel_finds_them(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "from forge_ptq.numerics import observer_native as n; import forge_ptq; "
        "print(forge_ptq.__file__, n.kernel() is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "forge_ptq" / "__init__.py"), "True"]
