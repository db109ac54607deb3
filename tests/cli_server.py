"""Runs command lines, each in a process of its own, without importing torch anew for each.

Reads one JSON object per line, {"words": [...], "cwd": "..."}; answers with {"code", "stdout", "stderr"}. The process
imports the package once and forks a child per request, which becomes what the installed command is.
"""

import json
import os
import sys
import tempfile

from longhorizon.cli import main


def serve(words: list[str], cwd: str) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(cwd)
            sys.argv = ["longhorizon", *words]
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            code = 99
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return {"code": os.waitstatus_to_exitcode(status), "stdout": texts[0], "stderr": texts[1]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(**json.loads(line))), flush=True)
