"""Python processes that need not import PyTorch, Lightning and matplotlib, which takes seconds.

One process imports these packages without the run-time checks of types, and `os.fork` copies it for each command. The
copy has the arguments, folder, environment, outputs and exit code of a new process, and imports torchcaps itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import gc, json, os, runpy, signal, sys, types, warnings
import lightning, matplotlib.figure, torch, torchmetrics

gc.collect()
gc.freeze()  # the copies do not change the memory of these objects, so it is not copied

for line in sys.stdin:
    words, folder, environment, outputs, seconds = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

signal.alarm(seconds)  # ends the process
for stream, path in enumerate((os.devnull, *outputs)):
    os.dup2(os.open(path, os.O_RDWR), stream)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
if words[:2] == ["-W", "error"]:
    warnings.resetwarnings()  # PyTorch has added filters of its own
    warnings.simplefilter("error")
    words = words[2:]
kind, *sys.argv = words if words[0] in ("-c", "-m") else ("", *words)
if kind == "-c":
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code, sys.argv[0], sys.path[0] = sys.argv[0], "-c", ""
    exec(code, main.__dict__)
elif kind == "-m":
    sys.path[0] = folder
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class WarmPython:
    """Runs Python with the words of a command line: ``-c`` and code, ``-m`` and a module, or the path of a script.

    The words can begin with ``-W error``.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)

    def __call__(self, words, folder=".", timeout=300) -> subprocess.CompletedProcess:
        """Run a command and return its exit code and outputs. After `timeout` seconds, it is ended by SIGALRM."""
        words = [str(word) for word in words]
        with tempfile.TemporaryDirectory() as outputs:
            paths = [Path(outputs) / name for name in ("output", "error")]
            for path in paths:
                path.touch()
            task = (words, os.path.abspath(folder), self.environment, [str(path) for path in paths], timeout)
            print(json.dumps(task), file=self.server.stdin, flush=True)
            code = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(words, code, *(path.read_text() for path in paths))

    def __enter__(self) -> "WarmPython":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate()
