"""C++ of ``kernels/``, compiled when it is first asked for and kept in the user's cache.

The sources have a plain C interface and include nothing of torch, so that a compiler needs about a
second instead of the half minute of a torch extension, and a library serves any version of torch.
It is built for this very CPU. The compiler is ``$CXX``, or the first of c++, g++ and clang++ that
is on the PATH; ``CXX=false`` thus turns compiled kernels off.

What is in the cache was written for good and by us, or is not used: a library is renamed into
place when it is whole, ends with a hash of its contents (an ELF loader does not look beyond the
sections; a truncated library would kill the process with SIGBUS, not raise), and lies in a
directory that nobody else can write to. Its name is a hash of everything that went into it, the
CPU's features included, since home directories are shared between machines. Processes that
compile at the same time do the same work twice, and neither waits for the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "kernels"
"""In a checkout a link to its ``kernels/``; in a wheel the files themselves. There is no package
called ``kernels``: Hugging Face has one, which transformers looks for."""

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti",
)  # fmt: skip
TIMEOUT_S = 30.0
"""For one compilation, after which the compiler is killed. It takes about one second."""

SEAL_BYTES = hashlib.sha256().digest_size


class NotCompiledError(RuntimeError):
    """There is no compiled kernel on this machine; the message says why."""


def load(source: Path, cache: Path | None = None) -> ctypes.CDLL:
    """The library made of one C++ file; from the cache (default: ``cache_directory``) if it is
    there. Takes one or two seconds where it is not, and at most TIMEOUT_S.

    Raises NotCompiledError without a compiler, if it fails or takes too long, and for a library
    that does not load.
    """
    command = find_compiler()
    text = source.read_bytes()
    name = f"{source.stem}-{_key(text, command)}.so"
    cache = cache_directory() if cache is None else cache
    usable = _is_ours(cache)
    kept = cache / name
    if usable and _is_sealed(kept):
        return _open(kept)
    with tempfile.TemporaryDirectory(prefix="forge_ptq-") as folder:
        built = Path(folder) / name
        _compile(command, source, built)
        contents = built.read_bytes()
        built.write_bytes(contents + hashlib.sha256(contents).digest())
        if usable:
            # A full disk or a cache that was removed meanwhile costs the next process a second.
            with contextlib.suppress(OSError):
                _keep(built, kept)
        return _open(built)  # the mapping outlives the file


def find_compiler() -> list[str]:
    """The compiler's command, first word absolute; NotCompiledError if there is none."""
    given = shlex.split(os.environ.get("CXX", ""))
    for candidate in [given[0]] if given else COMPILERS:
        if found := shutil.which(candidate):
            return [str(Path(found).absolute()), *given[1:]]
    looked_for = f"CXX={given[0]!r}" if given else " or ".join(COMPILERS)
    raise NotCompiledError(f"no C++ compiler: {looked_for} is not on the PATH")


def cache_directory() -> Path:
    """Where libraries are kept: ``forge_ptq/kernels`` in $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # Without a home directory "~" stays what it is; _is_ours refuses a relative path.
    return Path(root or os.path.expanduser("~/.cache")) / "forge_ptq" / "kernels"


def _is_ours(cache: Path) -> bool:
    """Whether the directory is there (it is made), ours, and closed to others' writing."""
    if not cache.is_absolute():
        return False
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = cache.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(source: bytes, command: list[str]) -> str:
    """Hex digits that differ if the library could. A compiler is known by its file, which is
    quicker than asking for its version."""
    compiler = Path(command[0]).resolve()
    file = compiler.stat()
    parts = [*command, *FLAGS, str(compiler), str(file.st_size), str(file.st_mtime_ns), _cpu()]
    return hashlib.sha256(source + "\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What ``-march=native`` depends on: model and features of the first CPU."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        lines += [line for line in first.splitlines() if line.split("\t")[0].strip() in wanted]
    return "\n".join(lines)


def _is_sealed(file: Path) -> bool:
    try:
        contents = file.read_bytes()
    except OSError:
        return False
    body, seal = contents[:-SEAL_BYTES], contents[-SEAL_BYTES:]
    return hashlib.sha256(body).digest() == seal


def _keep(built: Path, kept: Path) -> None:
    """Copy into the cache so that nobody ever sees half of it."""
    handle, partial = tempfile.mkstemp(dir=kept.parent, prefix=f"{kept.stem}-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(built.read_bytes())
        os.replace(partial, kept)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise


def _compile(command: list[str], source: Path, out: Path) -> None:
    arguments = [*command, *FLAGS, str(source), "-o", str(out)]
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(out.parent)},  # removed with it if it is killed
            start_new_session=True,  # so that the compilers behind the driver are killed with it
        )
    except OSError as error:
        raise NotCompiledError(f"{command[0]} does not run: {error}") from error
    with process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"{command[0]} took longer than {TIMEOUT_S:g} s"
                raise NotCompiledError(message) from error
            raise
    if process.returncode != 0 or not out.is_file():
        last = " | ".join(output.strip().splitlines()[-3:])
        raise NotCompiledError(f"{shlex.join(command)} failed ({process.returncode}): {last}")


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NotCompiledError(f"the compiled library does not load: {error}") from error
