#!/usr/bin/env bash
# Makes .venv with everything ragkv needs, pinned, and ragkv itself (editable). Returns at once if nothing changed.
# RAGKV_DEVICE=cpu|cuda overrides the choice of the lock, PYTHON=… that of the interpreter.
set -euo pipefail
cd "$(dirname "$0")"

log=.venv/setup.log
stamp=.venv/setup.stamp
torch_cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        # The base interpreter: the one found may be that of an activated .venv, which can't rebuild itself.
        "$candidate" -c 'import sys
if (3, 11) <= sys.version_info < (3, 14): print(sys._base_executable)
else: sys.exit(1)' 2>/dev/null && return
    done
    fail "no Python 3.11, 3.12 or 3.13 found (tried: ${PYTHON:-python3 python3.13 python3.12 python3.11})" \
        "install one (Debian 12 or newer: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make setup"
}

choose_device() { # sets device and reason
    if [ -n "${RAGKV_DEVICE:-}" ]; then
        device=$RAGKV_DEVICE
        reason="RAGKV_DEVICE says so"
    elif nvidia-smi -L 2>/dev/null | grep -q GPU; then
        device=cuda
        reason="an NVIDIA driver answers: $(nvidia-smi -L | head -n 1)"
    else
        device=cpu
        reason="no NVIDIA driver answers (nvidia-smi -L)"
    fi
    case $device in
        cpu | cuda) ;;
        *) fail "RAGKV_DEVICE=$device is neither cpu nor cuda" ;;
    esac
}

# step NUMBER TITLE COMMAND…: runs it with its output in the log, and shows how far it is and for how long.
step() {
    local title="[$1/5] $2" start=$SECONDS pid code=0 last=$SECONDS
    shift 2
    : >"$log"
    "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        if [ -t 1 ]; then
            printf '\r\033[K%s: %d s%s' "$title" $((SECONDS - start)) "$(progress)"
        elif ((SECONDS - last >= 15)); then
            last=$SECONDS
            printf '%s: %d s%s\n' "$title" $((SECONDS - start)) "$(progress)"
        fi
        sleep 0.5
    done
    wait "$pid" || code=$?
    trap - INT TERM
    [ ! -t 1 ] || printf '\r\033[K'
    if [ "$code" -ne 0 ]; then
        printf '%s: failed after %d s\n' "$title" $((SECONDS - start)) >&2
        grep -vE '^(WARNING|Ignoring|Requirement already satisfied)' "$log" | cut -c 1-500 | tail -n 5 >&2 || true
        fail "the whole output is in $log; check the network, pip's index settings (pip config list) and the free" \
            "disk space, then run it again: it goes on where it stopped"
    fi
    printf '%s: done in %d s\n' "$title" $((SECONDS - start))
}

compile() {
    .venv/bin/python -m compileall -q -j 0 .venv/lib || true
}

progress() { # the last thing pip's log tells, in a few words
    awk -v wanted="$num_pins" '
        /^(Collecting|Processing|Requirement already satisfied)/ { num_found++; file = "" }
        /Downloading .*\(.*B\)/ { file = $2; sub(/.*\//, "", file); sub(/-.*/, "", file); size = $(NF - 1) " " $NF }
        /^Installing collected/ { installing = 1 }
        END {
            if (installing) printf ", unpacking"
            else if (num_found > 1) printf ", package %d of %d%s", num_found, wanted, file ? ", " file " " size : ""
        }' "$log"
}

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] ||
    fail "the locks are for Linux on x86-64, this is $(uname -sm); elsewhere try: pip install -e '.[cpu]'"
python=$(find_python)
choose_device
lock=requirements/$device.txt
key="$device $python $("$python" -V) $(pwd -P)
$(cat "$lock" pyproject.toml setup.sh kernels/native/*.{cpp,h} | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
    exit 0
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
num_pins=$(grep -c == "$lock")
echo "Setting up .venv with $lock ($num_pins packages, Python $version): $reason."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python can't make virtual environments; on Debian or Ubuntu run: apt install python$version-venv"
# Another device or interpreter needs other packages: start afresh. Without a stamp, go on where a set-up stopped.
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$(head -n 1 <<<"$key")" ]; then
    rm -rf .venv
fi
mkdir -p .venv
rm -f "$stamp"

pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
install=("${pip[@]}" install --no-deps --no-compile --progress-bar off)
step 1 "virtual environment" "$python" -m venv .venv
# torch's CPU build lives on an index of its own. Only torch is looked for there: asking it for every package is
# slow, and where it can't be reached pip still finds the wheel on the user's own indexes or --find-links.
if [ "$device" = cpu ]; then
    step 2 "torch, CPU build (about 200 MB)" "${install[@]}" --extra-index-url "$torch_cpu_index" "$(grep '^torch==' "$lock")"
else
    step 2 "torch, CUDA build (about 1 GB)" "${install[@]}" "$(grep '^torch==' "$lock")"
fi
step 3 "all other packages" "${install[@]}" -r "$lock"
step 4 "ragkv" "${install[@]}" --no-build-isolation -e .
# vLLM imports thousands of modules in each of its three processes: without bytecode a start takes twice as long, and
# where PYTHONDONTWRITEBYTECODE is set, every start. Templates and tests in the packages that aren't Python stay behind.
step 5 "bytecode" compile
printf '%s' "$key" >"$stamp"
