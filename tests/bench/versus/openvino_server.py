"""OpenVINO GenAI's continuous batching behind `/v1/completions`, to be measured beside servers: it brings none.

    python openvino_server.py MODEL --port PORT [--max-num-seqs N] [--max-num-batched-tokens N] [--cache-gb N]

Runs in an environment of its own that has `openvino-genai`; `MODEL` is a folder with an exported model, or a .gguf file
that OpenVINO can read. Knows just what the comparison asks for: streamed, greedy completions, the end token ignored
where that is asked. One thread steps the pipeline, one serves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_genai.py_openvino_genai import GenerationStatus


@dataclass(slots=True)
class Request:
    """What is asked, and where its answer goes: each token's text, and `None` at the end."""

    prompt_ids: list[int]
    max_tokens: int
    ignore_eos: bool
    texts: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)


class Pipeline:
    """Requests in, text out."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = options.max_num_seqs
        config.max_num_batched_tokens = options.max_num_batched_tokens
        config.cache_size = options.cache_gb
        config.dynamic_split_fuse = True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(options.model, config, "CPU", {})
        self.tokenizer = self._pipe.get_tokenizer()
        self.asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step for ever; answers go to `loop`."""
        running: list[tuple[Any, Request]] = []
        while True:
            while not running or not self.asked.empty():
                running.append(self._add(self.asked.get()))
            self._pipe.step()
            fresh = [(request, token) for handle, request in running for token in self._read(handle)]
            texts = self.tokenizer.decode([[token] for _, token in fresh]) if fresh else []
            events = [(request, text) for (request, _), text in zip(fresh, texts, strict=True)]
            ended = [each for each in running if each[0].get_status() != GenerationStatus.RUNNING]
            running = [each for each in running if each[0].get_status() == GenerationStatus.RUNNING]
            loop.call_soon_threadsafe(self._tell, [*events, *[(request, None) for _, request in ended]])

    def _add(self, request: Request) -> tuple[Any, Request]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = request.ignore_eos
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        return self._pipe.add_request(next(self._numbers), prompt, config), request

    @staticmethod
    def _read(handle: Any) -> list[int]:
        return list(next(iter(handle.read().values())).generated_ids) if handle.can_read() else []

    @staticmethod
    def _tell(events: list[tuple[Request, str | None]]) -> None:
        for request, text in events:
            request.texts.put_nowait(text)


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipeline: Pipeline) -> None:
    """One request, then the connection is closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, *_ = head.split(" ")
        found = re.search(r"content-length: *(\d+)", head.lower())
        content = await reader.readexactly(int(found[1])) if found else b""
        if method == "POST" and path == "/v1/completions":
            await stream(writer, json.loads(content), pipeline)
        else:
            known = {"/health": {}, "/v1/models": {"data": [{"id": "openvino"}]}}
            said = json.dumps(known.get(path, {"error": "not found"})).encode()
            status = "200 OK" if path in known else "404 Not Found"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n".encode())
            writer.write(said)
        await writer.drain()
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, body: dict[str, Any], pipeline: Pipeline) -> None:
    """The answer's pieces as events, then usage."""
    prompt = body["prompt"]
    ids = prompt if isinstance(prompt, list) else pipeline.tokenizer.encode(prompt).input_ids.data[0].tolist()
    request = Request(ids, body["max_tokens"], bool(body.get("ignore_eos")))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    pipeline.asked.put(request)
    num_tokens = 0
    while (text := await request.texts.get()) is not None:
        num_tokens += 1
        write_event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    write_event(writer, {"choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": num_tokens}})
    writer.write(b"data: [DONE]\n\n")


def write_event(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    """One server-sent event."""
    writer.write(b"data: " + json.dumps(data).encode() + b"\n\n")


async def serve(pipeline: Pipeline, port: int, started: queue.SimpleQueue[asyncio.AbstractEventLoop]) -> None:
    """Listen, and tell which loop does."""
    server = await asyncio.start_server(lambda r, w: serve_connection(r, w, pipeline), "127.0.0.1", port)
    started.put(asyncio.get_running_loop())
    await server.serve_forever()


def main() -> None:
    """Load, then serve until the process is ended; a step that fails ends it too."""
    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind /v1/completions.")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--cache-gb", type=int, default=1)
    options = parser.parse_args()
    pipeline = Pipeline(options)
    started: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    threading.Thread(target=lambda: asyncio.run(serve(pipeline, options.port, started)), daemon=True).start()
    pipeline.run(started.get(timeout=60))


if __name__ == "__main__":
    main()
