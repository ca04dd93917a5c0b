#!/usr/bin/env bash
# The timed run on a machine that has torch and Triton, and this checkout without an installation. For 15 minutes:
#
#   OUT=measured bash tests/bench/gpu/on_device.sh                                   # 9 minutes: correctness, then times
#   OUT=measured bash tests/bench/gpu/on_device.sh --part steps --budget-s 120      # again what failed, with the rest
#
# More arguments are those of the timed run. OUT gets its rows, one by one, and its summary.
set -euo pipefail
cd "$(dirname "$0")/../../.."
mkdir -p build/link/millrace
ln -sfn "$PWD"/deploy/package/*.py build/link/millrace/
for part in runtime kernels model stages deploy; do ln -sfn "$PWD/$part" "build/link/millrace/$part"; done
export PYTHONPATH="$PWD/build/link:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
if compgen -G ".wheels/*.whl" >/dev/null; then
    "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/wheels .wheels/*.whl
    export PYTHONPATH="$PYTHONPATH:$PWD/build/wheels"
fi
"${PYTHON:-python3}" - <<'END'
from importlib.util import find_spec

names = ("orjson", "structlog", "llguidance", "tokenizers", "safetensors", "transformers")
if missing := [name for name in names if find_spec(name) is None]:
    print(f"the parts workload, gates and transformers will fail: no {', '.join(missing)}; see .wheels in tests/bench/gpu/README.md")
END
exec "${PYTHON:-python3}" -m tests.bench.gpu.timed_run --out "${OUT:?where results go}" "$@"
