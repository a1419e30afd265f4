"""The route of static files. They are sent from memory: who reads one slowly, or not at all, holds no file open."""

from __future__ import annotations

from http import HTTPStatus

from quart import Blueprint, Response, request
from quart.wrappers.response import DataBody
from werkzeug.exceptions import NotFound

from app.assets import StaticFile, static_dir


def static_blueprint() -> Blueprint:
    """The route of all files that are there now."""
    static, folder = Blueprint("static", __name__), static_dir()
    names = frozenset([path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()])
    for name in names:
        StaticFile.of(name)

    @static.get("/static/<path:filename>")
    async def send(filename: str) -> Response:
        if filename not in names:
            raise NotFound
        try:
            file = StaticFile.of(filename)
        except FileNotFoundError:  # another version is being put in its place
            raise NotFound from None
        response = Response(_Body(file.data), mimetype=file.kind)
        response.content_length = len(file.data)
        response.set_etag(file.mark)
        response.last_modified = file.modified  # type: ignore[assignment]
        # Without the mark of this content the address stands for whatever is there, now or on another server.
        is_own = request.args.get("v") == file.mark
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if is_own else "no-cache"
        answer = await response.make_conditional(request, accept_ranges=True, complete_length=len(file.data))
        if answer.status_code == HTTPStatus.NOT_MODIFIED:
            answer.headers.pop("Content-Length", None)  # it would have to be that of the whole
        return answer

    return static


class _Body(DataBody):
    async def make_conditional(self, begin: int, end: int | None) -> int:
        """As Quart's own, which fails where the last so many bytes are asked for."""
        return await super().make_conditional(max(0, begin + len(self.data)) if begin < 0 else begin, end)
