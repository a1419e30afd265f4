"""The server that is asked: what it serves, and in which words it can be asked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

from app.limit.asking import as_object, ask, one_line, what_is_wrong
from app.limit.dispatch import Job, Planned, run_job
from app.limit.exchange import NO_TEXT, NO_USAGE, NOT_STREAMED, make_post
from app.limit.prompts import Spelling, make_text
from app.limit.scrapes import values_of
from engine.errors import ConfigError, RelevoError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.limit.exchange import Answer

APIS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
NOT_FOUND: Final = 404
PROBE_SECONDS: Final = 120.0
# Words of the two prompts from which it is learnt how many tokens a word makes, and the length of their answers.
PROBE_WORDS, PROBE_TOKENS = (16, 80), 4
PLAIN: Final = Spelling(tokens_per_word=1.0, extra_tokens=0.0)


class EndpointError(RelevoError):
    """A server cannot be measured; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how it is asked.

    Attributes:
        url: without a path behind it, such as `http://127.0.0.1:8000`.
        path: of the server where it is not at the root, such as `/openai`.
        api: a key of `APIS`.
        model: the name by which it is asked for.
        keys: headers with the API key; `metrics_keys` those for `/metrics`.
        context: longest prompt plus answer in tokens; `None` is not known.
        ignores_end: takes `ignore_eos`, so that answers have the lengths that are asked for.
        max_tokens_name: what it calls the length of an answer.
        spelling: how many tokens a word makes.
        seats: requests that it answers at once, where it tells beside its metrics.
        has_metrics: whether `/metrics` tells something that is known (`app/limit/scrapes.py`).
        hides_metrics: it wants another key.
    """

    url: str
    path: str
    api: str
    model: str
    keys: Mapping[str, str] = field(repr=False)
    metrics_keys: Mapping[str, str] = field(repr=False)
    context: int | None = None
    ignores_end: bool = True
    max_tokens_name: str = "max_tokens"
    spelling: Spelling = PLAIN
    seats: int | None = None
    has_metrics: bool = False
    hides_metrics: bool = False

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it is https."""
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        return str(parts.hostname), parts.port or (443 if tls else 80), tls

    def request(self, text: str, num_tokens: int, *, is_background: bool = False) -> str:
        """The bytes of a request for so long an answer to a text, as text."""
        body: dict[str, Any] = {
            "model": self.model,
            self.max_tokens_name: num_tokens,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": [{"role": "user", "content": text}]} if self.api == "chat" else {"prompt": text}
        body |= {"ignore_eos": True} if self.ignores_end else {}
        body |= {"service_tier": "flex"} if is_background else {}
        return make_post(urlsplit(self.url).netloc, self.path + APIS[self.api], body, self.keys).decode()

    @property
    def scrape(self) -> str:
        """The request for its metrics; empty where it has none."""
        if not self.has_metrics:
            return ""
        host = urlsplit(self.url).netloc
        lines = [f"GET {self.path}/metrics HTTP/1.1", f"Host: {host}", "Connection: close"]
        return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in self.metrics_keys.items()), "", ""])

    def metrics(self) -> Mapping[str, float]:
        """What its metrics say now; empty where it shows none."""
        status, body = self.get("/metrics", self.metrics_keys)
        return values_of(body) if status == 200 else {}

    def get(self, route: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """Status and body of a GET; status 0 and the reason where nobody answers."""
        return ask(self.url + self.path + route, headers)


def find_endpoint(
    url: str,
    api: str,
    *,
    model: str | None = None,
    key: str | None = None,
    admin_token: str | None = None,
    context: int | None = None,
) -> Endpoint:
    """Ask a server what it serves and how it can be asked.

    Args:
        url: with or without `/v1` at its end.
        model: the name to ask for; `None` takes the first that the server lists.
        admin_token: for `/metrics` where the key does not open it.
        context: in tokens; `None` takes what the server says.

    Raises:
        ConfigError: the URL is none.
        EndpointError: nobody answers, a key is refused, or answers are no streams that can be measured.
    """
    parts = _parts_of(url)
    found = Endpoint(
        f"{parts.scheme}://{parts.netloc}",
        parts.path.rstrip("/").removesuffix("/v1"),
        api,
        model or "",
        {"Authorization": f"Bearer {key}"} if key else {},
        {"Authorization": f"Bearer {admin_token or key}"} if admin_token or key else {},
        context,
    )
    return _with_words(_with_metrics(_with_model(found), has_token=admin_token is not None))


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.username or parts.query or not (url.isascii() and url.isprintable() and " " not in url):
        raise ConfigError(f"--url {url} is no address of a server; give one such as http://127.0.0.1:8000.")
    return parts


def _with_model(endpoint: Endpoint) -> Endpoint:
    """With the model's name, its context and its seats, as far as the server tells them."""
    status, body = endpoint.get("/v1/models", endpoint.keys)
    if status in (401, 403):
        raise EndpointError(_refused(endpoint, status))
    where = endpoint.url + endpoint.path
    if wrong := what_is_wrong(where, status, body):
        raise EndpointError(wrong)
    listed = [entry for entry in as_object(body).get("data") or () if isinstance(entry, dict) and entry.get("id")]
    names = [str(entry["id"]) for entry in listed]
    name = endpoint.model or (names[0] if names else "")
    if not name and status == NOT_FOUND:
        root = f", perhaps {endpoint.url}" if endpoint.path else ""
        raise EndpointError(f"{where} has no /v1/models (HTTP 404); give the address of the API with --url{root}.")
    if not name:
        raise EndpointError(f"{where} lists no model at /v1/models; name one with --model.")
    entry = listed[names.index(name)] if name in names else {}
    # llama-server lists the context that a model was trained with; what it serves stands among its properties.
    told = as_object(endpoint.get("/props", endpoint.keys)[1]) if entry.get("owned_by") == "llamacpp" else {}
    settings = told.get("default_generation_settings")
    served = settings.get("n_ctx") if isinstance(settings, dict) else None
    context = endpoint.context or _positive(entry.get("max_model_len")) or _positive(served)
    return replace(endpoint, model=name, context=context, seats=_positive(told.get("total_slots")))


def _positive(told: Any) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) and told > 0 else None


def _with_metrics(endpoint: Endpoint, *, has_token: bool) -> Endpoint:
    """Knowing whether its metrics can be read."""
    status, body = endpoint.get("/metrics", endpoint.metrics_keys)
    is_refused = status in (401, 403)
    if is_refused and has_token:
        raise EndpointError(
            f"{endpoint.url} refuses the admin token (HTTP {status}); give the right one with --admin-token."
        )
    return replace(endpoint, has_metrics=status == 200 and bool(values_of(body)), hides_metrics=is_refused)


def _with_words(endpoint: Endpoint) -> Endpoint:
    """With the fields that it takes, and how many tokens it makes of words: two short answers are asked for."""
    variants = [(ends, name) for name in ("max_tokens", "max_completion_tokens") for ends in (True, False)]
    answers: list[Answer] = []
    for ignores_end, name in variants:
        endpoint = replace(endpoint, ignores_end=ignores_end, max_tokens_name=name)
        answers = _probe(endpoint)
        if not answers[0].error.startswith(("HTTP 400", "HTTP 422")):
            break
    for answer in answers:
        _check(endpoint, answer)
    (few, many), (short, long) = PROBE_WORDS, [answer.prompt_tokens for answer in answers]
    if long <= short:
        raise EndpointError(
            f"{endpoint.url} counts {long} tokens for a prompt of {many} words: its usage is not of use."
        )
    per_word = (long - short) / (many - few)
    return replace(endpoint, spelling=Spelling(per_word, short - few * per_word))


def _probe(endpoint: Endpoint) -> list[Answer]:
    host, port, tls = endpoint.address
    salt = secrets.token_hex(8)
    planned = [Planned(endpoint.request(make_text(number, f"{salt} probe"), PROBE_TOKENS)) for number in PROBE_WORDS]
    job = Job(host, port, tls, planned, (0, len(planned)), PROBE_SECONDS, streams=1, seconds=PROBE_SECONDS)
    return list(run_job(job).answers)


def _check(endpoint: Endpoint, answer: Answer) -> None:
    """Say what is wrong with an answer, in words that lead on."""
    where = endpoint.url + endpoint.path + APIS[endpoint.api]
    kind = answer.error.partition(":")[0]
    told = {
        NOT_STREAMED: f"{where} does not stream: without a stream there is no time to the first token.",
        NO_USAGE: f"The streams of {where} hold no usage: without it tokens cannot be counted.",
        NO_TEXT: f"{where} answers without any text.",
        "HTTP 401": _refused(endpoint, 401),
        "HTTP 403": _refused(endpoint, 403),
        "HTTP 404": f"{where} knows no such route or model ({endpoint.model}); see --api and --model.",
        "cannot connect": f"{endpoint.url} cannot be reached: {answer.error.partition(': ')[2]}.",
    }
    if answer.error:
        raise EndpointError(told.get(kind, f"{where} cannot be measured: {one_line(answer.error)}"))


def _refused(endpoint: Endpoint, status: int) -> str:
    given = "the key" if endpoint.keys else "who has no key"
    return f"{endpoint.url} refuses {given} (HTTP {status}); give the right one with --api-key."
