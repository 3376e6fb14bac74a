#!/usr/bin/env bash
# Everything that needs a GPU, in one go and without a network: build, tests, benchmarks, one report.
#   benchmarks/gpu_session.sh [folder]       results land in the folder (default: gpu-results)
# For a bare machine with Python, torch (CUDA), triton and nvcc; tests and steps want pytest, hypothesis and transformers,
# the lab scipy, peers what SPECDEC_PEERS names. Every part has a time limit of its own, 530 s in all, and
# writes its results as it goes: what an abort leaves behind is complete up to there. The exit status counts failed parts.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" MAX_JOBS=${MAX_JOBS:-$(nproc)} TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/$out/triton}"
python=${PYTHON:-python3}
failed=0

part() { # part NAME SECONDS COMMAND...: runs with a limit, keeps the output, notes how it went
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  echo "== $name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  tail -n 15 "$out/$name.log"
  printf '%s\t%s\t%s s\n' "$name" "$([ $status = 0 ] && echo passed || echo "failed ($status)")" "$((SECONDS - started))" | tee -a "$out/summary.tsv"
  [ $status = 0 ] || failed=$((failed + 1))
}

: >"$out/summary.tsv"
part machine 10 bash -c "nvidia-smi; $python -c 'import torch, triton, sys; print(sys.version, torch.__version__, triton.__version__)'"
part build 110 env SPECDEC_BUILD=auto "$python" setup.py -q build_ext --inplace
part built 10 "$python" -c "import torch, specdec_kernels._C, specdec_kernels._C_cuda"
part list 10 "$python" -c "import specdec_kernels; print(specdec_kernels.explain())"
part captured 50 "$python" -m pytest -v --maxfail=20 tests/gpu -k "captured or dispatcher or memory"
part tests 70 "$python" -m pytest -v --maxfail=20 tests/gpu -k agrees
part operators 40 "$python" -m pytest -q tests/kernels/test_registered.py tests/kernels/test_dispatch.py
part example 25 "$python" examples/embed_ops.py
part steps 75 "$python" -m benchmarks.step --out "$out" --shape 1b --rows 1 8 --drafted 0 4 --steps 30
part eagle3 25 "$python" -m benchmarks.step --out "$out" --shape 1b --drafter eagle3 --rows 1 8 --drafted 4 --modes graph --steps 30 --most-overhead 60
part lab 20 "$python" -m benchmarks.lab_draws --device cuda --threads 1 --rules token replay traversal --draws 100000 --out "$out/lab_draws.json"
part kernels 85 "$python" -m benchmarks.kernels.gpu --out "$out" --rounds 20
"$python" -m benchmarks.report "$out" || failed=$((failed + 1))
echo "== $failed parts failed; $SECONDS s; report: $out/report.html"
exit "$failed"
