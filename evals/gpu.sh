#!/usr/bin/env bash
# The kernels on a CUDA device: their tests, compiled, then their benchmarks as one table.
# PYTHON: one that has ragkv and its dependencies. MODEL: if set, then also fusion in vLLM, of a small model with random
# weights, and time to first token with that model, a folder whose config.json and tokenizer are enough, or a Hugging Face id.
# DATA: the folder of datasets; if set, then also every experiment that is quick, into OUT (all-gpu by default), with the
# embedded model or RAGKV_MODEL__NAME, which has to have weights.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1
python=${PYTHON:-.venv/bin/python}

if ! command -v "$python" > /dev/null; then
  echo "evals/gpu.sh: there is no $python; run \`make setup\`, or set PYTHON" >&2
  exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "evals/gpu.sh: torch finds no CUDA device, on which the kernels are to run; see \`nvidia-smi\`" >&2
  exit 1
fi

"$python" -m pytest -q tests/kernels

rows=$(mktemp)
trap 'rm -f "$rows"' EXIT
for operator in kv_fuse selective_attention query_scores kv_deviation; do
  "$python" -m "ragkv.evals.kernels.$operator" >> "$rows"
done
"$python" -m ragkv.evals.kernels.timing < "$rows"

if [ -n "${MODEL:-}" ]; then
  "$python" -m pytest -q tests/engine/test_bfloat16.py
  RAGKV_STORE__MEMORY_GIB=${RAGKV_STORE__MEMORY_GIB:-8} "$python" -m ragkv eval ttft --model "$MODEL" --random-weights --tokens 1024,4096,8192 --repeats 3 \
    --policies guided:0.05,query:0.05,none
fi

if [ -n "${DATA:-}" ]; then
  "$python" -m ragkv eval all --quick --data "$DATA" --out "${OUT:-all-gpu}"
fi
