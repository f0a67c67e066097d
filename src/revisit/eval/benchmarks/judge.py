"""A language model as judge, behind any OpenAI-compatible endpoint; every reply is kept, so a run can be resumed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revisit import settings
from revisit.errors import RevisitError, missing

TIMEOUT = 60.0  # seconds
ATTEMPTS = 5
RETRIED = (408, 409, 429)  # statuses after which the client tries again, as after all from 500 on


@dataclass(frozen=True)
class Judge:
    """`url` is the base of the API, such as https://api.openai.com/v1; its key is in the variable OPENAI_API_KEY.

    `cache` is a JSON-lines file with one {"key", "model", "reply"} per question asked, appended to as replies arrive.
    """

    url: str
    model: str
    cache: Path | None = None
    temperature: float = 0.0
    _known: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RevisitError(f"The judge's address must start with http:// or https://, not {self.url!r}.")
        if not self.model:
            raise RevisitError("A judge needs the name of its model.")
        if self.cache and self.cache.exists():
            self._known.update(_read_cache(self.cache))

    def ask(self, prompt: str, system: str | None = None) -> str:
        """Return the reply to a prompt, from the cache if the same model was asked before at the same temperature."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        request = {"model": self.model, "messages": messages, "temperature": self.temperature}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if key not in self._known:
            reply = self._post(request)
            self._known[key] = reply
            if self.cache is not None:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with self.cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "model": self.model, "reply": reply}, ensure_ascii=False) + "\n")
        return self._known[key]

    def _post(self, request: dict[str, Any]) -> str:
        """Return the server's reply; the client retries with growing pauses while the server is busy."""
        try:
            import openai
        except ImportError as error:
            raise missing("openai") from error
        try:
            with openai.OpenAI(
                base_url=self.url,
                api_key=settings.secret("OPENAI_API_KEY") or "none",
                timeout=TIMEOUT,
                max_retries=ATTEMPTS - 1,
            ) as client:
                content = client.chat.completions.create(**request).choices[0].message.content
        except openai.APIStatusError as error:
            if error.status_code in RETRIED or error.status_code >= 500:
                raise self._silent(f"status {error.status_code}") from error
            detail = error.response.text[:300].strip()
            raise RevisitError(
                f"The judge at {self.url} rejected the request: status {error.status_code} {detail}."
            ) from error
        except openai.APIConnectionError as error:
            raise self._silent(str(error.__cause__ or error)) from error
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise RevisitError(f"The judge at {self.url} did not return a chat completion.") from error
        if not isinstance(content, str):
            raise RevisitError(f"The judge at {self.url} sent a reply without text.")
        return content

    def _silent(self, problem: str) -> RevisitError:
        return RevisitError(
            f"The judge at {self.url} did not answer after {ATTEMPTS} attempts ({problem.rstrip('.')}); "
            "run the same command again to resume."
        )


def _read_cache(path: Path) -> dict[str, str]:
    """Read replies by key; an incomplete last line is cut off."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RevisitError(f"{path} cannot be read as the judge's cache: {error}.") from error
    whole, end = raw[: raw.rfind(b"\n") + 1], raw[raw.rfind(b"\n") + 1 :]
    known = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            known[row["key"]] = row["reply"]
        except (ValueError, KeyError, TypeError) as error:
            raise RevisitError(f"{path} line {number} is not a judge's reply; delete the line or the file.") from error
    start = b'{"key"'
    if end and not start.startswith(end[: len(start)]):
        raise RevisitError(f"{path} is not a judge's cache; use another file, or delete this one.")
    if end:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return known
