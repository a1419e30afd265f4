"""LangChain's ChatOpenAI against the server whose address is given. Prints what it saw as JSON."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="fake", max_tokens=6, max_retries=0)
whole = chat.invoke("hi")
chunks = list(chat.stream("hi", stream_usage=True))
usage = next(chunk.usage_metadata for chunk in reversed(chunks) if chunk.usage_metadata)
seen = {
    "whole": whole.content,
    "streamed": "".join(str(chunk.content) for chunk in chunks),
    "reason": whole.response_metadata["finish_reason"],
    "usage": usage["output_tokens"],
}
print(json.dumps(seen))
