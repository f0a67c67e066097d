"""Errors as clients see them: an HTTP status and one sentence, which repeats little of what the client sent."""

from __future__ import annotations

import re
from collections.abc import Collection

from pydantic import ValidationError

from revisit.errors import unknown
from revisit.serve.limits import ECHO


class ApiError(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, printable(message), param, code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as OpenAI's clients expect it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        param = None if self.param is None else printable(shorten(self.param))
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}


def server_error() -> ApiError:
    """The error for a failure that is not the client's; the details are only logged."""
    return ApiError(500, "Internal error on this request; see the server's log.")


def shorten(text: str, length: int = ECHO) -> str:
    """The text, or its beginning with an ellipsis: `length` characters at most."""
    return text if len(text) <= length else text[: length - 1] + "…"


def quoted(value: object) -> str:
    """A short literal for a message; large containers are not written out first."""
    if isinstance(value, str):
        return repr(shorten(value, ECHO // 2))
    if isinstance(value, (list, dict)) and value:
        return "a list" if isinstance(value, list) else "an object"
    return shorten(repr(value), ECHO // 2)


def printable(text: str) -> str:
    """Text that can be sent: lone surrogates are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def from_validation(error: ValidationError, fields: Collection[str] = ()) -> ApiError:
    """The first error in a request; for an unknown field at the top the nearest of `fields` is suggested."""
    first = error.errors(include_url=False, include_context=True)[0]
    kind, where = first["type"], _place(first["loc"])
    if kind == "json_invalid":
        return ApiError(400, "The request body is not valid JSON.")
    if kind == "model_type" and not where:
        return ApiError(400, "The request body must be a JSON object.")
    if kind == "extra_forbidden":
        name = shorten(str(first["loc"][-1]), ECHO // 2)
        if len(first["loc"]) == 1 and "decoding" in fields and name in ("method", "settings"):
            example = '"method": "revisit"' if name == "method" else '"method": "revisit", "settings": {…}'
            sentence = f'{name} belongs in the field decoding: {{"decoding": {{{example}}}}}.'
            return ApiError(400, sentence, param=where)
        if len(first["loc"]) == 1 and fields:
            return ApiError(400, str(unknown("request field", name, fields)), param=where)
        return ApiError(400, f"{shorten(where)} is not a field of this request; remove it.", param=where)
    if kind == "value_error":
        return ApiError(400, f"{where}: {first['ctx']['error']}".removeprefix(": "), param=where)
    if kind == "missing":
        return ApiError(400, f"{where} is missing.", param=where)
    sentence = re.sub(r"^\w+ should (be|have)", r"must \1", shorten(first["msg"])).replace(" after validation", "")
    got = "" if kind in ("too_long", "too_short") else f", not {quoted(first['input'])}"  # there pydantic says how many
    return ApiError(400, f"{where}: {sentence}{got}.", param=where)


def _place(location: tuple[int | str, ...]) -> str:
    """messages[0].content[2].text, without the names of a union's members."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("as_"):
            text += f".{part}" if text else part
    return shorten(text, ECHO // 2)
