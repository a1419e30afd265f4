"""Stands in for `relevo limit` at the page `/ops/limit`: does what a file says, a JSON object a line.

    python -m tests.limit_child SCRIPT [flags of relevo limit]

{"say": {...}}           a line of --progress-json
{"raw": "text"}          a line as it stands
{"words": true}          its own words, as what it is at
{"file": "--mix="}       what the file behind such a word holds, as what it is at
{"get": "/metrics"}      the status of that route, asked for with its key, as what it is at
{"chat": 5}              asks for an answer of so many tokens, and waits for it
{"wait": "PATH"}         until that file is there
{"deaf": true}           asked to end, it does not
{"pid": "PATH"}          writes its number there
{"exit": 1, "error": ""} its end, after a line on stderr
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def argument(flag: str) -> str:
    """What follows a flag, or stands behind it in the same word."""
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(flag):
            return word.removeprefix(flag)
    raise SystemExit(f"there is no {flag}")


def say(what: str) -> None:
    told = {"event": "progress", "seconds": 1, "planned_seconds": 480, "what": what, "rate": None}
    print(json.dumps(told), flush=True)


def ask(path: str, key: str, body: dict[str, Any] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(argument("--url") + path, data, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def main() -> None:
    key = Path(argument("--api-key=@")).read_text()
    for line in Path(sys.argv[1]).read_text().splitlines():
        match json.loads(line):
            case {"say": told}:
                print(json.dumps(told), flush=True)
            case {"raw": text}:
                print(text, flush=True)
            case {"words": _}:
                say(json.dumps([sys.argv[2:], [name for name in os.environ if name.startswith("RELEVO_")]]))
            case {"file": flag}:
                say(Path(argument(flag)).read_text())
            case {"get": path}:
                say(f"{path} {ask(path, key)}")
            case {"chat": num_tokens}:
                message = {"role": "user", "content": "how fast are you?"}
                body = {"model": "fake", "messages": [message], "max_tokens": num_tokens, "ignore_eos": True}
                say(f"chat {ask('/v1/chat/completions', key, body)}")
            case {"wait": path}:
                parent = os.getppid()
                while not Path(path).exists() and os.getppid() == parent:
                    time.sleep(0.01)
            case {"deaf": _}:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case {"pid": path}:
                Path(path).write_text(str(os.getpid()))
            case {"exit": code, "error": error}:
                print(error, file=sys.stderr)
                sys.exit(code)


if __name__ == "__main__":
    main()
