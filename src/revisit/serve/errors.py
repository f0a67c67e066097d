"""Errors as clients receive them: an HTTP status and one sentence."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from revisit.errors import unknown

LONGEST = 400  # characters of a message, which may quote what a client sent


class ApiError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, printable(message), param, code

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error in the form that OpenAI's clients parse."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        param = None if self.param is None else printable(self.param, 100)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}


def server_error() -> ApiError:
    """Return the error for a failure that is not the client's; its details are only logged."""
    return ApiError(500, "Internal error on this request; see the server's log.")


def printable(text: str, length: int = LONGEST) -> str:
    """Return the beginning of a text, with lone surrogates escaped so that it can be encoded."""
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.encode("utf-8", "backslashreplace").decode()


def from_validation(error: ValidationError, fields: Collection[str]) -> ApiError:
    """Return the first error in a body; an unknown field is compared with `fields`."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return ApiError(400, str(unknown("request field", printable(where, 60), fields)), param=where)
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return ApiError(400, f"{printable(where, 100)}: {message}." if where else f"{message}.", param=where or None)
