"""A Hugging Face hub with a few models, as an HTTP server: it answers as the real one does, and logs what it is asked for."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
REMOTE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
FILES: dict[str, bytes] = {
    "org/tiny": json.dumps(LLAMA).encode(),
    "org/not-json": b"{'model_type': llama",
    "org/deep": b"[" * 100_000,
    "org/list": b"[1, 2]",
    "org/large": b" " * (2 << 20) + b"{}",
    "org/untyped": b"{}",
    "org/unknown": json.dumps({**LLAMA, "model_type": "no such type"}).encode(),
    "org/own-code": json.dumps({**LLAMA, "model_type": "own", "auto_map": REMOTE}).encode(),
    "org/known-with-code": json.dumps({**LLAMA, "auto_map": REMOTE}).encode(),
    "org/many-layers": json.dumps({**LLAMA, "num_hidden_layers": 10**9}).encode(),
    "org/nested-layers": json.dumps({**LLAMA, "text_config": {"n_layer": 1e300}}).encode(),
    "org/wide": json.dumps({**LLAMA, "hidden_size": 2**62}).encode(),
    "org/negative": json.dumps({**LLAMA, "hidden_size": -64}).encode(),
    "org/text": json.dumps({**LLAMA, "hidden_size": "wide\x1b[31m"}).encode(),
    "org/quantized": json.dumps({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}).encode(),
    "org/encoder-decoder": json.dumps({"model_type": "t5", "num_layers": 2}).encode(),
}
"""The config.json of each model."""
CODE = b"raise SystemExit('remote code has run')\n"


class Hub:
    """What a server was asked for, as "METHOD path", and where it is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.address = ""
        self.token: str | None = None
        self.ends = threading.Event()

    @property
    def files(self) -> set[str]:
        """The names of the files of models that were asked for."""
        return {path.rpartition("/")[2].partition("?")[0] for path in self.asked if "/resolve/" in path}


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """A server that runs for the duration of a `with` block."""
    found = Hub()

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(is_head=True)

        def do_GET(self) -> None:
            self.answer(is_head=False)

        def answer(self, is_head: bool) -> None:
            found.asked.append(f"{self.command} {self.path}")
            found.token = self.headers.get("authorization")
            model, _, file = self.path.strip("/").partition("/resolve/main/")
            if model == "org/slow":
                found.ends.wait(60)
            if model == "org/gated":
                return self.refuse(401, "GatedRepo", is_head)
            if model == "org/broken":
                return self.refuse(500, "", is_head)
            if model == "org/empty" or (model in FILES and file not in ("config.json", "configuration_own.py")):
                return self.refuse(404, "EntryNotFound", is_head)
            if model not in FILES:
                return self.refuse(404, "RepoNotFound", is_head)
            content = FILES[model] if file == "config.json" else CODE
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hash(content):x}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not is_head:
                self.wfile.write(content)
            return None

        def refuse(self, status: int, code: str, is_head: bool) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "no")
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.ends.set()
        server.shutdown()
        server.server_close()
        thread.join()
