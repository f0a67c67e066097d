"""A promised rate: what was calibrated, and whether a call keeps to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from revisit.decoding.method import METHODS, Method, MethodLike, as_method
from revisit.errors import RevisitError, listed
from revisit.io.files import digest, write_json
from revisit.io.records import read_json
from revisit.models.config import name_of

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

Loss = Literal["caption", "share"]
GUARD = ("floor", "floor_layer", "names")  # the settings of a method that a rate sets
ENTRY = "rates"  # of generation_config.json
WORDS = (
    "over images like those of the calibration, for objects of the list, before any change of model, method, prompt or length; not for a "
    "single image, and not for each object"
)


class Rate(BaseModel):
    """A certified rate of mistakes, and everything that it depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bound: Literal[
        "floor", "expectation"
    ]  # names are withheld while decoding, or sentences are removed from finished texts
    risk: float
    confidence: float | None  # over calibrations; None for "expectation", which holds on average over them
    loss: Loss
    model: str
    fingerprint: str
    dtype: str
    layer: int  # whose vision tokens are read
    method: str
    settings: dict[str, Any]  # with the floor
    prompt: str
    max_new_tokens: int
    threshold: float  # the floor, or the support below which a word is flagged
    images: int
    mistakes: float  # the sum of the losses
    data: str  # SHA-256 of the images and their labels
    revisit: str  # version
    hash: str = ""

    @classmethod
    def sealed(cls, **values: Any) -> Self:
        """Return a rate with the hash of its content."""
        rate = cls(**values)
        return rate.model_copy(update={"hash": rate.content_hash()})

    def content_hash(self) -> str:
        """Return the SHA-256 of everything but the hash."""
        return digest(self.model_dump(mode="json", exclude={"hash"}))

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        """Return the rate that a file or an entry contains.

        Raises:
            RevisitError: It is no rate, or was changed after it was written.
        """
        try:
            rate = cls.model_validate(content)
        except ValidationError as error:
            wrong = listed([".".join(map(str, error.errors()[0]["loc"])) or "its form"])
            raise RevisitError(f"{where} is not a calibration by `revisit calibrate` ({wrong} is wrong).") from None
        if rate.hash != rate.content_hash():
            raise RevisitError(f"{where} was changed after it was calibrated: run `revisit calibrate` again.")
        return rate

    def promise(self) -> str:
        """Return the promise in words, with what it covers."""
        what = {"caption": "captions that name an absent object", "share": "named objects that are absent"}[self.loss]
        how = "on average over calibrations" if self.confidence is None else f"with {self.confidence:.0%} confidence"
        return f"At most {self.risk:g} of {what}, {how}: {WORDS}."

    def write(self, path: Path) -> None:
        """Write the rate as JSON."""
        write_json(path, self.model_dump(mode="json"))

    def decoding_method(self) -> Method:
        """Return the method with its floor."""
        return METHODS.get(self.method, **self.settings)

    def call_differences(
        self, method: Method | None, prompt: str | None, max_new_tokens: int | None, *, plain: bool = True
    ) -> list[str]:
        """Say in which ways a call differs from what was calibrated, apart from the model; `plain` is whether it decodes greedily."""
        pairs: list[tuple[str, Any, Any]] = []
        if method is not None:
            pairs.append(("method", _settings(method), _settings(self.decoding_method())))
        pairs += [("prompt", prompt, self.prompt)] if prompt is not None else []
        pairs += [("max_new_tokens", max_new_tokens, self.max_new_tokens)] if max_new_tokens is not None else []
        found = [f"the {what} is {now!r}, not {then!r}" for what, now, then in pairs if now != then]
        return found if plain else [*found, "answers are sampled, searched with beams, or follow a schema"]

    def differences(
        self,
        model: Model,
        processor: Processor,
        method: Method | None = None,
        prompt: str | None = None,
        max_new_tokens: int | None = None,
        *,
        plain: bool = True,
    ) -> list[str]:
        """Say in which ways a call differs from what was calibrated; see `call_differences`."""
        found = self.call_differences(method, prompt, max_new_tokens, plain=plain)
        pairs: list[tuple[str, Any, Any]] = [("data type", dtype_of(model), self.dtype)]
        if self.bound == "expectation":
            from revisit.forward.support import check_layer  # imports torch
            from revisit.models.parts import ModelParts

            pairs.append(("layer of the check", check_layer(model, ModelParts.of(model).depth), self.layer))
        found += [f"the {what} is {now!r}, not {then!r}" for what, now, then in pairs if now != then]
        if dtype_of(model) == self.dtype and model_fingerprint(model, processor) != self.fingerprint:
            found.append(
                f"the model {name_of(model)!r} is not the one that was calibrated ({self.model!r}), or was changed since"
            )
        return found

    def settle(self, method: Method | None, prompt: str | None, max_new_tokens: int | None) -> tuple[Method, str, int]:
        """Return the method with its floor, the prompt and the length of a call; what is None comes from the calibration."""
        own = self.decoding_method()
        if method is not None:
            if method.floor not in (0.0, self.threshold):
                raise RevisitError(f"The risk sets the floor to {self.threshold:g}: leave out floor={method.floor:g}.")
            own = method.replace(floor=own.floor, floor_layer=own.floor_layer, names=own.names)
        return own, self.prompt if prompt is None else prompt, max_new_tokens or self.max_new_tokens

    def checked(self, *call: Any, plain: bool = True, any_calibration: bool = False) -> str:
        """Return the promise for a call (see `differences`), or that none is made if differences are allowed.

        Raises:
            RevisitError: The call differs from what was calibrated.
        """
        found = self.differences(*call, plain=plain)
        if not found:
            return self.promise()
        if not any_calibration:
            raise RevisitError(
                f"The calibration does not hold here: {'; '.join(found)}. Calibrate again, or allow it with --any-calibration "
                "(any_calibration=True)."
            )
        return f"No rate is promised: {'; '.join(found)}."


def _settings(method: Method) -> str:
    """Return a method with its settings, without those that the rate sets."""
    kept = {key: value for key, value in method.settings().items() if key not in GUARD}
    return f"{method.name} {json.dumps(kept, sort_keys=True)}"


def dtype_of(model: Model) -> str:
    """Return the data type of a model's weights."""
    return str(model.dtype).removeprefix("torch.")


def model_fingerprint(model: Model, processor: Processor) -> str:
    """Return a hash of a loaded model: its type, its tokenizer, and numbers from all over each of its weights.

    It does not depend on the version of transformers, which may rename weights and add fields to configurations.
    """
    import torch

    weights = []
    for tensor in model.state_dict().values():
        some = b""
        if not tensor.is_meta:  # as off-loaded ones are
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // 1024)].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        weights.append(hashlib.sha256(f"{tuple(tensor.shape)}".encode() + some).hexdigest())
    vocabulary = digest(sorted(processor.tokenizer.get_vocab().items()))
    return digest([model.config.model_type, vocabulary, getattr(processor, "chat_template", None), sorted(weights)])


def find_rate(
    model: Model, risk: float, calibration: str | Path | None, bound: Literal["floor", "expectation"] = "floor"
) -> Rate:
    """Return the calibration for a risk, from a file or from the model's own entry.

    Raises:
        RevisitError: There is none, or it certified a larger risk only.
    """
    where = f"The entry {ENTRY!r} of the model's generation_config.json" if calibration is None else str(calibration)
    entries = getattr(model.generation_config, ENTRY, None) or []
    if calibration is not None:
        entries = [read_json(Path(calibration))]
    elif not isinstance(entries, list):
        raise RevisitError(f"{where} must be a list.")
    known = [Rate.parse(entry, where) for entry in entries]
    command = f"revisit calibrate --model {name_of(model)} --data DATA --risk {risk:g}"
    command += "" if bound == "floor" else " --bound expectation"
    if not (fitting := [rate for rate in known if rate.bound == bound]):
        source = str(calibration) if known else f"the model {name_of(model)!r}"
        raise RevisitError(f"{source} has no calibration for this: run `{command}`.")
    kept = [rate for rate in fitting if rate.risk <= risk + 1e-12]
    if not kept:
        certified = min(rate.risk for rate in fitting)
        raise RevisitError(
            f"A risk of {risk:g} was not certified, but {certified:g} was: use that, or run `{command}`."
        )
    return max(kept, key=lambda rate: rate.risk)


def promised_call(
    model: Model,
    processor: Processor,
    risk: float,
    calibration: str | Path | None,
    any_calibration: bool,
    method: MethodLike | None,
    prompt: str | None,
    max_new_tokens: int | None,
    *,
    plain: bool = True,
) -> tuple[Method, str, int, str]:
    """Return the method with its floor, the prompt, the length, and the promise of a call with a certified risk.

    What is None comes from the calibration. `plain` is whether the call decodes greedily.

    Raises:
        RevisitError: The risk was not certified, or the call differs from what was calibrated.
    """
    rate = find_rate(model, risk, calibration)
    chosen, prompt, length = rate.settle(None if method is None else as_method(method, model), prompt, max_new_tokens)
    note = rate.checked(model, processor, chosen, prompt, length, plain=plain, any_calibration=any_calibration)
    return chosen, prompt, length, note


def no_risk(calibration: str | Path | None, any_calibration: bool) -> None:
    """Raise RevisitError for the arguments that need a risk."""
    if calibration is not None or any_calibration:
        raise RevisitError("A calibration needs a risk: add risk=0.2 (--risk 0.2), one that it certified.")


def add_entry(folder: Path, entries: Mapping[str, Any]) -> Path:
    """Add entries to the generation_config.json of a model folder; a rate replaces the one of the same kind."""
    path = folder / "generation_config.json"
    content = read_json(path) if path.is_file() else {}
    for name, value in entries.items():
        if name == ENTRY:
            value = [*(old for old in content.get(ENTRY, []) if old.get("bound") != value["bound"]), value]
        content[name] = value
    write_json(path, content)
    return path
