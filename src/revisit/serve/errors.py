"""Errors in responses: an HTTP status and one sentence."""

from __future__ import annotations

LONGEST = 400  # characters of a message, which may quote the request


class ApiError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, excerpt(message), param, code

    @property
    def reason(self) -> str:
        """What went wrong, in a word that contains nothing of the request."""
        return self.code or ("invalid_request" if self.status < 500 else "server_error")

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error in the form that OpenAI's clients parse."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        param = None if self.param is None else excerpt(self.param, 100)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}


def server_error() -> ApiError:
    """Return the error for an unexpected failure; its details are only logged."""
    return ApiError(500, "Internal error on this request; see the server's log.")


def excerpt(text: str, length: int = LONGEST) -> str:
    """Return the beginning of a text, with lone surrogates escaped so that it can be encoded."""
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.encode("utf-8", "backslashreplace").decode()
