"""LiteLLM against the server whose address is given. Prints what it saw as JSON."""

from __future__ import annotations

import json
import sys

import litellm

asked = {
    "model": "openai/fake",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 6,
}
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
seen = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "reason": whole.choices[0].finish_reason,
    "usage": usage.completion_tokens,
}
print(json.dumps(seen))
