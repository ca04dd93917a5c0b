"""Which engines are compared: ours, and the peers that are installed.

A peer is said by a flag, `--peer vllm=PYTHON`, or a variable, `MILLRACE_PEER_VLLM=PYTHON`, or found in the folder
`MILLRACE_PEERS` as NAME/bin/python: the Python of a virtual environment with the engine. Some read a converted model:

    vllm                PYTHON
    openvino-genai      PYTHON,FOLDER   `optimum-cli export openvino --weight-format fp16 --model CHECKPOINT FOLDER`
    llama-cpp-python    PYTHON,GGUF     llama.cpp's `convert_hf_to_gguf.py --outtype bf16 CHECKPOINT`
    llama-server        PROGRAM,GGUF    llama.cpp's own server
    transformers        PYTHON          the one beside us, if nothing is said
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.kernels.native.machine import instruction_sets
from tests.bench.cpu.contenders import Contender, InProcess, Served
from tests.bench.cpu.worker import KV_BYTES

OURS, OUR_INT8, OUR_SERVER = "millrace", "millrace int8", "millrace server"
ALL_OURS = (OURS, OUR_INT8, OUR_SERVER)
OURS_TO_THEIRS, INT8_TO_THEIRS = "ours_to_theirs", "int8_to_theirs"  # ratios, of a workload's results
PEERS = ("transformers", "vllm", "openvino-genai", "llama-cpp-python", "llama-server")
CONVERTED = ("openvino-genai", "llama-cpp-python", "llama-server")
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 64
NO_W4 = frozenset({"w4"})  # in process there is no serving
NO_BATCHES = frozenset({"w2", "w3", "w4"})  # llama.cpp's binding answers one after the other


def instructions() -> str:
    """What this processor multiplies with at best: AMX, or the widest vectors, as torch names them."""
    import torch

    return "AMX" if "amx" in instruction_sets() else str(torch.backends.cpu.get_cpu_capability())


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that is installed: its Python or program, and the converted model, if it needs one."""

    name: str
    program: str
    model: str | None = None


class Missing(Exception):
    """A peer that cannot be run; says why, and how it could."""


def find_peers(said: Sequence[str], environment: Mapping[str, str]) -> tuple[list[Peer], list[str]]:
    """The peers that are there, and a line on each that is not."""
    given = dict(each.partition("=")[::2] for each in said)
    if unknown := set(given) - set(PEERS):
        raise SystemExit(f"--peer {sorted(unknown)[0]}: there is no such peer; there are {', '.join(PEERS)}")
    found, missing = [], []
    for name in PEERS:
        try:
            found.append(_find(name, given, environment))
        except Missing as reason:
            missing.append(f"{name} is left out: {reason}")
    return found, missing


def _find(name: str, given: Mapping[str, str], environment: Mapping[str, str]) -> Peer:
    variable = "MILLRACE_PEER_" + name.upper().replace("-", "_")
    told = given.get(name) or environment.get(variable)
    if told is None and name == "transformers":
        told = sys.executable
    if told is None and (folder := environment.get("MILLRACE_PEERS")):
        told = str(Path(folder) / name / "bin" / "python")
    if told is None:
        raise Missing(f"--peer {name}=..., or {variable}, says where it is")
    program, _, model = told.partition(",")
    if not os.access(program, os.X_OK):
        raise Missing(f"there is no program {program}")
    if name in CONVERTED and not Path(model or "/nowhere").exists():
        raise Missing(f"it reads a converted model: --peer {name}={program},MODEL with a MODEL that is there")
    return Peer(name, program, model or None)


def contenders_of(peer: Peer, model: str, threads: int, max_model_len: int = MAX_MODEL_LEN) -> list[Contender]:
    """The ways in which a peer is asked: in a process of its own, over HTTP, or both. The length is its server's."""
    version = distribution_version(peer.program, peer.name)

    def in_process(label: str, engine: str, **more: Any) -> InProcess:
        told = {"version": version, "leaves_out": NO_W4, **more}
        return InProcess(label, engine, peer.program, peer.model or model, threads, **told)

    match peer.name:
        case "vllm":
            env = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30)}
            sizes = ["--max-model-len", str(max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)]
            module = [peer.program, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
            dtype = "bfloat16" if instructions() in ("AMX", "AVX512") else "float32"  # as in `worker.py`
            serve = [*module, "--dtype", dtype, "--port", "{port}", *sizes]
            server = Served("vLLM server", serve, version=version, environment=env)
            return [in_process("vLLM", "vllm", environment=env), server]
        case "openvino-genai":
            return [in_process("OpenVINO", "openvino")]
        case "llama-cpp-python":
            return [in_process("llama.cpp", "llama.cpp", leaves_out=NO_BATCHES)]
        case "llama-server":
            version = _said([peer.program, "--version"])
            sizes = ["-c", "32768", "-np", "32", "-t", str(threads), "-tb", str(threads)]
            serve = [peer.program, "-m", str(peer.model), "--port", "{port}", *sizes]
            return [Served("llama.cpp server", serve, version=version, keeps_connections=False)]
        case _:
            return [in_process("transformers", "transformers")]


def our_contenders(model: str, threads: int, version: str, max_model_len: int = MAX_MODEL_LEN) -> list[Contender]:
    """This engine, in process, there with int8 weights as well, and served; the length is its server's. Bytes for keys
    and values are bounded, as all engines are in memory at once: where two of this one took what they saw fit, 14 of 24
    GiB, one that maps its weights fell to a token a second, as if it read them from the disk each time (Qwen3-0.6B's
    shape). Of what it is told it takes all memory when it starts, and of what it sees fit a part: a burst of 32 took
    0.03 s more of 4.7 then (SmolLM2-135M's)."""
    python = sys.executable
    sizes = ["--max-model-len", str(max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS), "--threads", str(threads)]
    sizes += ["--kv-cache-bytes", str(KV_BYTES)]
    sizes += ["--speculation", "off"]  # random weights repeat themselves: drafts would have it too easy
    serve = [python, "-m", "millrace.deploy", "serve", model, "--port", "{port}", "--device", "cpu", *sizes]
    return [
        InProcess(OURS, "millrace", python, model, threads, version=version, leaves_out=NO_W4),
        InProcess(OUR_INT8, "millrace int8", python, model, threads, version=version, leaves_out=NO_W4),
        Served(OUR_SERVER, serve, version=version),
    ]


def distribution_version(python: str, name: str) -> str:
    """The version of a distribution in that Python; "?" if it tells none."""
    names = [name, "vllm-cpu"] if name == "vllm" else [name]
    code = "import sys\nfrom importlib.metadata import version\n" + "".join(
        f"try: print(version({each!r})); sys.exit()\nexcept ImportError: pass\n" for each in names
    )
    return _said([python, "-c", code])


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0].removeprefix("version: ") if lines and not done.returncode else "?"
