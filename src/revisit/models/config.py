"""Model names and configurations, read without loading weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError, brief, did_you_mean
from revisit.io.files import read_file
from revisit.models import families, photo

if TYPE_CHECKING:
    from revisit.models.types import Model

EMBEDDED = "tiny"
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")  # options of a download
# Optional files that transformers ignores if they are damaged, and those of which it ignores a dangling link.
SETTINGS = ("generation_config.json", "chat_template.jinja")
LOCAL_SETTINGS = (
    *SETTINGS,
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
MAX_BYTES = 1 << 28  # of a settings file


def embedded_folder() -> Path:
    """Return the folder of the embedded model, which transformers can load."""
    folder = Path(__file__).parents[1] / "embedded" / "weights" / "tiny"
    if not (folder / "model.safetensors").is_file():
        raise RevisitError(
            f"The embedded model is missing from {folder}; install revisit-decoding again, as files, not in an archive."
        )
    return folder


def resolve(name_or_path: str | Path) -> str:
    """Return the local path or Hub id of a model name.

    The strings "tiny" and "photo" always mean the embedded models; write "./tiny", or pass a Path, for a folder of that name.
    """
    if not isinstance(name_or_path, (str, Path)) or "\0" in str(name_or_path):
        raise RevisitError(f"A model must be a path or a Hub id, not {name_or_path!r}.")
    if name_or_path == EMBEDDED:
        return str(embedded_folder())
    if name_or_path == photo.NAME:  # assembled on first use
        return str(photo.assembled_folder())
    name = str(name_or_path)
    if name in (EMBEDDED, photo.NAME):  # a Path: it drops a leading "./"
        return f"./{name}"
    return str(Path(name).expanduser()) if name.startswith("~") else name


def is_embedded(name_or_path: str | Path) -> bool:
    """Return whether a name means the embedded model: "tiny", or its folder."""
    return name_or_path == EMBEDDED or Path(name_or_path).resolve() == embedded_folder().resolve()


def name_of(model: Model) -> str:
    """Return a loaded model's Hub id, or the name of its folder without the path to it."""
    source = str(getattr(model.config, "_name_or_path", ""))
    if not source or not Path(source).is_dir():
        return source or type(model).__name__
    folder = Path(source).resolve()
    if is_embedded(folder):
        return EMBEDDED
    return photo.NAME if photo.is_assembled(folder) else folder.name


def load_config(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Load the configuration of a model."""
    name = resolve(name_or_path)
    _check_type(name, _read_config(name, kwargs), trust_remote_code)
    _check_settings(name, {option: kwargs[option] for option in HUB if option in kwargs})
    from transformers import AutoConfig  # takes seconds, so only after the checks

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:  # configuration classes raise many kinds
        raise RevisitError(f"The configuration of {name!r} cannot be read: {brief(error)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model folder."""
    try:
        value = json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise RevisitError(f"{str(path)!r} is not valid JSON ({brief(error)}); get a complete copy.") from None
    if not isinstance(value, dict):
        raise RevisitError(f"{str(path)!r} must contain a JSON object.")
    return value


def _check_settings(name: str, hub: dict[str, Any]) -> None:
    """Raise RevisitError for damaged settings, which transformers would replace by defaults; only a missing file is optional."""
    if Path(name).is_dir():
        files = [Path(name, hub.get("subfolder") or "", file) for file in LOCAL_SETTINGS]
    else:
        from transformers.utils.hub import cached_file

        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        files = [Path(found) for file in SETTINGS if (found := cached_file(name, file, **quiet, **hub))]
    for path in filter(os.path.lexists, files):
        if path.suffix == ".json":
            read_object(path)
            continue
        try:
            if not read_file(path, MAX_BYTES).decode().strip():
                raise ValueError("it is empty")
        except (OSError, ValueError) as error:
            raise RevisitError(f"{str(path)!r} cannot be read ({brief(error)}); get a complete copy.") from None


def _read_config(name: str, hub: dict[str, Any]) -> dict[str, Any]:
    """Read config.json before any class interprets it."""
    if Path(name).exists():
        file = Path(name, hub.get("subfolder") or "", "config.json")
        if file.with_name("adapter_config.json").exists() and not os.path.lexists(file):
            raise RevisitError(
                f"{name!r} holds an adapter, not a model: load its base model, and wrap it with peft's PeftModel.from_pretrained."
            )
        if not os.path.lexists(file):
            raise RevisitError(f"{name!r} is not a model folder: it has no config.json.")
        return read_object(file)
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise RevisitError(f"There is no model folder {name!r}; check the path.")
    hint = did_you_mean(name, (EMBEDDED, photo.NAME))
    if not _hub_is_reachable(name, hub):
        raise RevisitError(
            f"There is no model {name!r} on this machine, and the Hub cannot be reached; check the network, or use a local folder.{hint}"
        )
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(name, **hub)[0]  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise RevisitError(
            f"There is no model {name!r}, neither as a local folder nor on the Hub: {brief(error)}{hint}"
        ) from None


def _hub_is_reachable(name: str, hub: dict[str, Any]) -> bool:
    """Return whether the Hub is reachable or not needed, with a single request; a download would retry for minutes."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    file: dict[str, Any] = {"repo_id": name, "filename": "config.json", "revision": hub.get("revision")}
    try:
        if not hub.get("local_files_only") and not try_to_load_from_cache(**file, cache_dir=hub.get("cache_dir")):
            get_hf_file_metadata(hf_hub_url(**file), token=hub.get("token"))
    except (OSError, ValueError):  # the Hub answered with an error, which the download will report
        return True
    except Exception:  # raised by the HTTP library that huggingface_hub uses
        return False
    return True


def _check_type(name: str, raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Raise RevisitError unless transformers can load this type of model without code from its repository."""
    from transformers import CONFIG_MAPPING, __version__

    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise RevisitError(f"The config.json of {name!r} has no model_type.")
    family = families.of(kind)
    if family.native_suffix:
        raise RevisitError(
            f"{name!r} is a checkpoint of type {kind}, which needs custom code: load {name.rstrip('/') + family.native_suffix!r} "
            "instead, the same weights for transformers."
        )
    if kind in CONFIG_MAPPING or (trust_remote_code and "auto_map" in raw):
        return
    if "auto_map" in raw:
        raise RevisitError(
            f"{name!r} is of type {kind[:60]!r}, which runs code from its repository: read that code, then "
            "allow it with trust_remote_code=True (--trust-remote-code)."
        )
    raise RevisitError(f"{name!r} is of type {kind[:60]!r}, which transformers {__version__} does not support.")


def describe_model(name: str, trust_remote_code: bool = False) -> Any:
    """Read the two configurations that recommended settings depend on, without weights."""
    from transformers import GenerationConfig

    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(resolve(name))
    except OSError:  # optional
        generation = GenerationConfig()
    except Exception as error:
        raise RevisitError(f"The generation_config.json of {name!r} cannot be read: {brief(error)}") from error
    return SimpleNamespace(config=config, generation_config=generation)
