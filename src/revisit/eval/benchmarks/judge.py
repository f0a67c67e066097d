"""A language model as judge, behind any OpenAI-compatible endpoint; every reply is kept, so a run can be resumed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from revisit import settings
from revisit.errors import RevisitError, missing

TIMEOUT = 60.0  # seconds
ATTEMPTS = 5


class Judge:
    """A model behind `url`, the base of an API such as https://api.openai.com/v1; its key is in the variable OPENAI_API_KEY.

    `cache` is an SQLite file with every reply, written as replies arrive.
    """

    def __init__(self, url: str, model: str, cache: Path | None = None, temperature: float = 0.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise RevisitError(f"The judge's address must start with http:// or https://, not {url!r}.")
        if not model:
            raise RevisitError("A judge needs the name of its model.")
        self.url, self.model, self.temperature = url, model, temperature
        try:
            if cache is not None:
                cache.parent.mkdir(parents=True, exist_ok=True)
            self._replies = sqlite3.connect(cache or ":memory:", isolation_level=None)
            self._replies.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise RevisitError(f"{cache} cannot be used as the judge's cache: {error}; use another file.") from error

    def ask(self, prompt: str, system: str | None = None) -> str:
        """Return the reply to a prompt, from the cache if the same model was asked before at the same temperature."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        request = {"model": self.model, "messages": messages, "temperature": self.temperature}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        found = self._replies.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        if found is None:
            found = (self._post(request),)
            self._replies.execute("INSERT INTO replies VALUES (?, ?)", (key, *found))
        return str(found[0])

    def close(self) -> None:
        """Close the cache."""
        self._replies.close()

    def _post(self, request: dict[str, Any]) -> str:
        """Return the server's reply; the client retries with growing pauses while the server is busy."""
        try:
            import openai
        except ImportError as error:
            raise missing("openai") from error
        key = settings.secret("OPENAI_API_KEY") or "none"
        try:
            with openai.OpenAI(base_url=self.url, api_key=key, timeout=TIMEOUT, max_retries=ATTEMPTS - 1) as client:
                content = client.chat.completions.create(**request).choices[0].message.content
        except openai.APIStatusError as error:
            detail = error.response.text[:300].strip()
            raise RevisitError(
                f"The judge at {self.url} rejected the request: status {error.status_code} {detail}; run the same command again to resume."
            ) from error
        except openai.APIConnectionError as error:
            problem = str(error.__cause__ or error).rstrip(".")
            raise RevisitError(
                f"The judge at {self.url} did not answer after {ATTEMPTS} attempts ({problem}); run the same command again to resume."
            ) from error
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise RevisitError(f"The judge at {self.url} did not return a chat completion.") from error
        if not isinstance(content, str):
            raise RevisitError(f"The judge at {self.url} sent a reply without text.")
        return content
