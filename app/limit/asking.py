"""Short questions to a server before it is measured, and what is wrong where it does not answer them as it should."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import IO, TYPE_CHECKING, Any, Final

from app.limit.exchange import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

ASK_SECONDS: Final = 10.0
MAX_BYTES: Final = 16 << 20
MAX_CHARS: Final = 200
REDIRECTS: Final = (301, 302, 303, 307, 308)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Goes nowhere: the key is for the server that was named, and requests are measured there alone."""

    def redirect_request(
        self,
        req: urllib.request.Request,  # noqa: ARG002
        fp: IO[bytes],
        code: int,
        msg: str,  # noqa: ARG002
        headers: Message,
        newurl: str,
    ) -> None:
        """Let the redirect be the answer, its aim in place of the body."""
        raise urllib.error.HTTPError(newurl, code, newurl, headers, fp)


def ask(url: str, headers: Mapping[str, str], *, patch: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Status and body of a GET, or status and aim of a redirect; status 0 and the reason where nobody answers.

    Args:
        patch: send this as a PATCH instead.
    """
    # Requests are sent without a proxy, so this is not asked through one either.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (checked to be http)
    if patch is not None:
        request.method, request.data = "PATCH", json.dumps(patch).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with opener.open(request, timeout=ASK_SECONDS) as answer:
            return answer.status, answer.read(MAX_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            said = error.msg if error.code in REDIRECTS else error.read(MAX_BYTES).decode(errors="replace")
            return error.code, said
    except (OSError, HTTPException) as error:
        return 0, str(getattr(error, "reason", error)) or type(error).__name__


def what_is_wrong(url: str, status: int, body: str) -> str:
    """Why what came from `/v1/models` is of no use, and what to do; empty where it may be."""
    if not status:
        return f"{url} cannot be reached: {_with_advice(one_line(body))}."
    if status in REDIRECTS:
        aim = one_line(body).partition("/v1/models")[0] or "elsewhere"
        return f"{url} sends whoever asks on to {aim} (HTTP {status}); give that address with --url."
    if status >= 500:
        return f"{url} cannot serve now (HTTP {status}: {one_line(body)})."
    if re.match(r"\s*<(!doctype|html|\?xml)", body, re.IGNORECASE):
        return f"{url} answers with a page, not with OpenAI's API; give the address of the API with --url."
    return ""


def _with_advice(reason: str) -> str:
    """The reason that a library gives, and what may be done."""
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return f"{reason}; its certificate is not trusted here, SSL_CERT_FILE=FILE names one that is"
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:
        return f"{reason}; it may speak no TLS: try http://"
    return reason


def as_object(body: str) -> dict[str, Any]:
    """A JSON object; empty where it is something else."""
    try:
        found = json.loads(body)
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


def one_line(said: str) -> str:
    """What a server says, as part of a line: a page's words without its marks, and not too much of it."""
    text = " ".join(re.sub(r"<[^>]*>", " ", said).split())
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
