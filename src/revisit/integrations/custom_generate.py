"""A folder that transformers loads with `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

Put into a model's own folder (or hub repository), the same files make every `generate()` of that model use the method,
`transformers serve` and pipelines included. transformers runs code from a folder only if its user says so by
`trust_remote_code`; nothing in this package sets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from revisit import __version__
from revisit.decoding.method import Method
from revisit.errors import RevisitError

CODE = '''"""Loaded by transformers: `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

from revisit import methods

METHOD = {method!r}
SETTINGS = {settings}


def generate(model: Any, *args: Any, method: str = METHOD, settings: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`model.generate(...)` decoded by a method.

    Settings come from the `settings` argument, else, for ReVisiT, from `revisit` (a mapping) of the `generation_config` argument;
    those that are not given keep this file's values, and the rest is what is recommended for the model.
    """
    if settings is None:
        settings = (getattr(kwargs.get("generation_config"), "revisit", None) or {{}}) if method == "revisit" else {{}}
    own = SETTINGS if method == METHOD else {{}}
    chosen = methods.as_method(method, model, **{{**own, **settings}})
    return GenerationMixin.generate(model, *args, custom_generate=chosen, **kwargs)
'''

README = """---
library_name: transformers
tags:
  - custom_generate
---

# {title}

{summary} ({source}).

```python
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained("a vision-language model")
output = model.generate(**inputs, custom_generate="this folder or repository", trust_remote_code=True)
```

transformers asks for `trust_remote_code` because the folder holds a short Python file, custom_generate/generate.py: read it first.

Other methods and settings: `model.generate(..., method="revisit", settings={{"alpha": 1e-3}})`.
Needs `pip install revisit-decoding`.
"""


def write(
    folder: Path, method: Method, *, settings: Mapping[str, object] | None = None, overwrite: bool = False
) -> list[Path]:
    """Write the folder.

    Args:
        folder: Where to write.
        method: The method.
        settings: The settings to fix, by default all of the method's; the others are those recommended for each model.
        overwrite: Replace existing files.

    Returns:
        The files.
    """
    settings = method.settings() if settings is None else settings
    files = {
        folder / "custom_generate" / "generate.py": CODE.format(method=method.name, settings=_python(settings)),
        folder / "custom_generate" / "requirements.txt": f"revisit-decoding>={__version__}\n",
        folder / "README.md": README.format(
            title=f"{method.name} decoding", summary=_sentence(method.summary), source=method.source
        ),
    }
    present = [path for path in files if path.exists()]
    if present and not overwrite:
        raise RevisitError(f"{present[0]} exists; choose another folder, or use --overwrite.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _python(settings: Mapping[str, object]) -> str:
    """Settings as Python source."""
    json.dumps(dict(settings))  # raises for values that could not be read back
    return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in settings.items()) + "}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
