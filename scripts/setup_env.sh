#!/usr/bin/env bash
# Makes .venv with the tested set. A second run finds it complete and returns at once.
# Usage: scripts/setup_env.sh        Environment: PYTHON (default python3.11), VENV (default .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
python=${PYTHON:-python3.11}
locks=(requirements/torch-cpu.lock requirements/cpu.lock requirements/cpu-source.lock)
compiled=requirements/cpu-compiled.lock
torch_index=https://download.pytorch.org/whl/cpu
building=$venv/.building      # there while an installation is under way
stamp=$venv/.complete         # hash of what the finished environment was made from
log=$venv/setup.log

wanted() {
    cat "${locks[@]}" "$compiled" pyproject.toml scripts/{setup_env.sh,check_env.py,no_pycosat.py} |
        sha256sum
}
complete() {
    [[ -x $venv/bin/python && ! -e $building && -f $stamp && $(<"$stamp") == "$want" ]]
}
say() { printf '[set-up %3ds] %s\n' "$SECONDS" "$*"; }
die() {
    printf 'set-up: %s\n' "$@" >&2
    exit 1
}

child=
# pip turns Ctrl-C into an ordinary failure, which must not be taken for one and worked around.
stop() {
    [[ -z $child ]] || kill "$child" 2>/dev/null || true
    printf 'set-up: interrupted\n' >&2
    exit 130
}
trap stop INT TERM HUP

want=$(wanted)
if complete; then exit 0; fi

# One installation at a time; whoever waited finds the work done.
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if ! flock --nonblock 9; then
    say "another set-up of $venv is under way, waiting for it"
    flock 9
fi
if complete; then exit 0; fi

[[ $(uname -sm) == "Linux x86_64" ]] ||
    die "the lock file holds packages for x86-64 Linux; this is $(uname -sm)"
command -v "$python" >/dev/null ||
    die "$python not found. On Debian or Ubuntu: apt-get install python3.11 python3.11-venv" \
        "(or set PYTHON to a Python 3.11)"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    die "$python is $("$python" -V 2>&1); the lock file is for Python 3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python lacks the venv module. On Debian or Ubuntu: apt-get install python3.11-venv"

if [[ -e $building ]]; then
    say "the last set-up was interrupted, starting over"
    rm -rf "$venv"
fi
if [[ ! -x $venv/bin/python ]]; then
    say "1/4 virtual environment in $venv ($("$python" -V 2>&1))"
    mkdir -p "$venv"
    touch "$building"
    "$python" -m venv "$venv" >>"$log" 2>&1 ||
        die "cannot make a virtual environment with $python, see $log"
fi
touch "$building"
rm -f "$stamp"
: >"$log"

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 9>&-
}
failed() {
    tail -n 15 "$log" >&2
    die "$1" "the whole log is in $log"
}
# Runs a command in the background and says now and then how far pip has come.
with_progress() {
    local total=$1 waited=0 status=0
    shift
    : >"$log"
    "$@" &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
        if ((waited % 15 == 0)); then
            if grep -q '^Installing collected' "$log"; then
                say "    all fetched, installing"
            else
                say "    $(grep -cE '^(Collecting|Processing)' "$log" || true) of $total fetched"
            fi
        fi
    done
    wait "$child" || status=$?
    child=
    return "$status"
}

# Builds with the environment's own setuptools: nothing is resolved or fetched for a build.
pip_build() { pip install --no-deps --no-build-isolation --use-pep517 "$@"; }

if ! "$venv/bin/python" scripts/check_env.py "${locks[@]}" >>"$log" 2>&1; then
    say "2/4 torch, CPU build"
    if ! pip install --no-deps --only-binary :all: -r requirements/torch-cpu.lock; then
        say "    not where pip looks, taking PyTorch's own index of CPU wheels"
        pip install --no-deps --only-binary :all: --index-url "$torch_index" \
            -r requirements/torch-cpu.lock || failed "torch could not be installed"
    fi
    count=$(grep -c "^[^#]" requirements/cpu.lock)
    say "3/4 $count packages of the lock file (about two minutes, log in $log)"
    with_progress "$count" pip install --no-deps --no-compile --only-binary :all: \
        -r requirements/cpu.lock ||
        failed "the packages of the lock file could not be installed"
    say "    compiling to bytecode on all cores"
    # pip would do it on one. Templates that some packages ship are no Python: their errors are moot.
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.11/site-packages \
        >>"$log" 2>&1 9>&- || true
    pip_build -r requirements/cpu-source.lock ||
        failed "the packages of requirements/cpu-source.lock could not be built"
    "$venv/bin/python" scripts/check_env.py "${locks[@]}" 2>&1 | tee -a "$log" ||
        failed "the environment is not what the lock file says"
fi
if ! "$venv/bin/python" -c 'import pycosat; pycosat.solve' 2>/dev/null &&
    ! pip_build -r "$compiled"; then
    say "    no C compiler: reasoning-gym's zebra_puzzles will not work, nothing else misses it"
    cp scripts/no_pycosat.py "$("$venv/bin/python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py"
fi
say "4/4 forge_ptq itself"
rm -rf forge_ptq.egg-info # a stale one would hide the installed entry points from here
pip_build --editable . || failed "forge_ptq could not be installed"

rm -f "$building"
printf '%s' "$want" >"$stamp"
say "done"
