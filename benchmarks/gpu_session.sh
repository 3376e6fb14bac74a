#!/usr/bin/env bash
# Everything that needs a GPU, in one go and without a network: build, tests, benchmarks, one report.
#   benchmarks/gpu_session.sh [folder]       results land in the folder (default: gpu-results)
# For a bare machine with Python, torch (CUDA), triton and nvcc; tests and steps want pytest, hypothesis and transformers,
# the lab scipy, peers what SPECDEC_PEERS names. Every part has a time limit of its own. Limits, and what is granted to
# parts that do not end when asked to, add up to less than 540 s. Parts write their results as they go: what an abort
# leaves behind is complete up to there, and the report is made of it. The exit status counts failed parts; 130 or 143
# says that the session was interrupted.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" MAX_JOBS=${MAX_JOBS:-$(nproc)} TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/$out/triton}"
python=${PYTHON:-python3}
grace=2
failed=0
running=
child=

part() { # part NAME SECONDS COMMAND...: runs with a limit, keeps the output, notes how it went
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  echo "== $name (at most $limit s)"
  running=$name
  timeout --kill-after=$grace "$limit" "$@" >"$out/$name.log" 2>&1 & # behind: a signal need not wait for it to end
  child=$!
  wait "$child"
  status=$?
  running= child=
  tail -n 15 "$out/$name.log"
  printf '%s\t%s\t%s s\n' "$name" "$([ $status = 0 ] && echo passed || echo "failed ($status)")" "$((SECONDS - started))" | tee -a "$out/summary.tsv"
  [ $status = 0 ] || failed=$((failed + 1))
}

interrupted() { # interrupted STATUS: ends the part that runs, and the session
  trap '' INT TERM
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null
    wait "$child"
    printf '%s\tinterrupted\t\n' "$running" >>"$out/summary.tsv"
  fi
  exit "$1"
}

report() { # of whatever there is; a failure counts unless the session failed already
  local status=$?
  trap - EXIT
  timeout --kill-after=$grace 10 "$python" -m benchmarks.report "$out" || [ $status != 0 ] || status=1
  echo "== $failed parts failed; $SECONDS s; report: $out/report.html"
  exit "$status"
}

: >"$out/summary.tsv"
trap report EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
part machine 10 bash -c "nvidia-smi; $python -c 'import torch, triton, sys; print(sys.version, torch.__version__, triton.__version__)'"
part build 95 env SPECDEC_BUILD=auto "$python" setup.py -q build_ext --inplace
part built 8 "$python" -c "import torch, specdec_kernels._C, specdec_kernels._C_cuda"
part list 8 "$python" -c "import specdec_kernels; print(specdec_kernels.explain())"
part captured 45 "$python" -m pytest -v --maxfail=20 tests/gpu -k "captured or dispatcher or memory"
part tests 60 "$python" -m pytest -v --maxfail=20 tests/gpu -k "agrees and not options"
part options 45 "$python" -m pytest -v --maxfail=20 tests/gpu -k options
part operators 30 "$python" -m pytest -q tests/kernels/test_registered.py tests/kernels/test_dispatch.py
part example 20 "$python" examples/embed_ops.py
part steps 65 "$python" -m benchmarks.step --out "$out" --shape 1b --rows 1 8 --drafted 0 4 --steps 30
part eagle3 22 "$python" -m benchmarks.step --out "$out" --shape 1b --drafter eagle3 --rows 1 8 --drafted 4 --modes graph --steps 30 --most-overhead 60
part lab 15 "$python" -m benchmarks.lab_draws --device cuda --threads 1 --rules token replay traversal --draws 100000 --out "$out/lab_draws.json"
part kernels 70 "$python" -m benchmarks.kernels.gpu --out "$out" --rounds 20
exit "$failed"
