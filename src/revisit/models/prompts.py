"""Turn prompts and images into model inputs with the model's own chat template and processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from revisit.errors import RevisitError, brief
from revisit.io.images import listed
from revisit.models import families
from revisit.models.reader import opener
from revisit.video.clip import Video
from revisit.video.reading import as_videos
from revisit.video.sampling import Sampling

if TYPE_CHECKING:
    import torch
    from transformers import BatchFeature

    from revisit.io.images import ImageLike
    from revisit.models.types import Processor
    from revisit.video.clip import VideoLike, Visual


MAX_TEXT = 4_000_000  # characters that a template may produce


class Message(TypedDict):
    """One turn of a conversation: {"type": "image"}, {"type": "video"} and {"type": "text", "text": …} parts."""

    role: str
    content: list[dict[str, str]]


def render(processor: Processor, messages: Sequence[Message], **variables: object) -> str:
    """Format a conversation, up to where the answer begins, with the processor's chat template or else in a plain format."""
    if getattr(processor, "chat_template", None) is None:
        return _plain(processor, messages)
    try:
        text = processor.apply_chat_template(
            list(messages),  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=True,
            **variables,  # type: ignore[arg-type]
        )
    except Exception as error:  # a template may raise anything
        raise RevisitError(f"The chat template of this model cannot format this conversation: {brief(error)}") from None
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise RevisitError(f"The chat template of this model produced more than {MAX_TEXT:,} characters.")
    return text


def _plain(processor: Processor, messages: Sequence[Message]) -> str:
    if families.prefixes_images(processor):
        return " ".join(part["text"] for message in messages for part in message["content"] if part["type"] == "text")
    names = {"system": "", "user": "USER: ", "assistant": "ASSISTANT: "}

    def text(part: dict[str, str]) -> str:
        kind = part["type"]
        return part["text"] if kind == "text" else f"{getattr(processor, f'{kind}_token', f'<{kind}>')}\n"

    turns = (names[m["role"]] + "".join(map(text, m["content"])) for m in messages)
    return " ".join([*turns, "ASSISTANT:"])


def chat_text(processor: Processor, prompt: str, visuals: Sequence[object] = (None,)) -> str:
    """Format one prompt after its images and videos, by default one image, up to where the answer begins."""
    content: list[dict[str, str]] = [{"type": "video" if isinstance(visual, Video) else "image"} for visual in visuals]
    content.append({"type": "text", "text": prompt})
    return render(processor, [{"role": "user", "content": content}])


def prepare(
    processor: Processor,
    prompts: str | Sequence[str],
    images: ImageLike | Sequence[ImageLike | Sequence[ImageLike] | None] | None = None,
    videos: VideoLike | Sequence[VideoLike | Sequence[VideoLike] | None] | None = None,
    *,
    frames: int | None = None,
    fps: float | None = None,
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Turn prompts, images and videos into left-padded model inputs, through the model's own chat template.

    Args:
        processor: The model's processor.
        prompts: One prompt, or a list of them for a batch.
        images: With one prompt, an image, a list of images, or None. With a list of prompts, a list with one of these for
            each prompt. An image is anything that `open_image` takes.
        videos: The same for videos, which follow the images. A video is a path, a list of frames, or a list of (frame, time) pairs;
            frames without times are a second apart, or as far apart as `fps` implies.
        frames: How many frames to take from each video, evenly spaced; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
        device: Device of the inputs; the CPU by default.

    Returns:
        The processor's output, for `generate(model, **inputs)`.

    Raises:
        RevisitError: An image cannot be read, a prompt contains the model's image token, or the lists do not match.
    """
    prompts, image_lists, video_lists = _as_batch(processor, prompts, images, videos)
    read = opener(processor, Sampling(frames, fps))
    opened = [read(pair) for pair in zip(image_lists, video_lists, strict=True)]
    return prepare_opened(processor, prompts, opened, device)


def prepare_opened(
    processor: Processor,
    prompts: Sequence[str],
    visuals: Sequence[Sequence[Visual]],
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Turn prompts with opened images and videos into model inputs."""
    for prompt in prompts:
        check_no_image_tokens(processor, "prompt", prompt)
    texts = [chat_text(processor, prompt, row) for prompt, row in zip(prompts, visuals, strict=True)]
    return encode(processor, texts, visuals, device)


def _as_batch(
    processor: Processor, prompts: object, images: object, videos: Any
) -> tuple[list[str], list[list[ImageLike]], list[list[VideoLike]]]:
    """Return a list of prompts, and lists of images and of videos for each; raise RevisitError for other arguments."""
    if not hasattr(processor, "image_processor"):
        raise RevisitError(
            f"The first argument must be the model's processor, not {type(processor).__name__}: model, processor = revisit.load(…)."
        )
    if isinstance(prompts, str):
        image_list: list[Any] = _as_list(images)
        if len(image_list) == 1 and (inner := listed(image_list[0])) is not None:  # [[image]], as for a batch of one
            image_list = list(inner)
        return [prompts], [image_list], [as_videos(videos)]
    texts = listed(prompts)
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise RevisitError(
            "The prompt must be a string or a list of strings, followed by the images: prepare(processor, prompt, image)."
        )
    if not len(texts):
        raise RevisitError("The list of prompts is empty.")
    rows: dict[str, Any] = {}
    for kind, given in {"images": images, "videos": videos}.items():
        rows[kind] = batch = [None] * len(texts) if given is None else listed(given)
        if batch is None or len(batch) != len(texts):
            count = 1 if batch is None else len(batch)
            one = kind.removesuffix("s")
            raise RevisitError(
                f"There are {len(texts)} prompts but {kind} for {count}: pass a list with one {one}, or a list, for each prompt."
            )
    return list(texts), [_as_list(entry) for entry in rows["images"]], [as_videos(entry) for entry in rows["videos"]]


def _as_list(images: Any) -> list[ImageLike]:
    if images is None:
        return []
    several = listed(images)
    return [images] if several is None else list(several)


def encode(
    processor: Processor,
    texts: Sequence[str],
    visuals: Sequence[Sequence[Visual]],
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Encode texts that already contain the placeholders of their images and videos."""
    nested = [[visual for visual in row if not isinstance(visual, Video)] for row in visuals]
    videos = [visual for row in visuals for visual in row if isinstance(visual, Video)]
    if videos:
        require_videos(processor)
    bos = processor.tokenizer.bos_token
    has_bos = bool(bos) and any(text.startswith(bos) for text in texts)
    try:
        inputs = processor(
            text=list(texts),
            images=nested if any(nested) else None,
            **(_video_inputs(processor, videos) if videos else {}),
            padding=True,
            return_tensors="pt",
            **({"add_special_tokens": False} if has_bos else {}),  # the template has added them
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # processors raise many kinds, and a panic of a tokenizer in Rust is no Exception
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise RevisitError(
                "The prompt is not valid Unicode: check that the terminal or file is in UTF-8."
            ) from None
        raise RevisitError(f"The model's processor cannot encode this prompt: {brief(error)}") from error
    keeps = device is None or str(device) == "meta"  # an off-loaded model moves its inputs itself
    return inputs if keeps else inputs.to(device)  # type: ignore[no-any-return]


def _video_inputs(processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Return the processor's arguments for videos, whose frames are already sampled; it would guess their times otherwise."""
    least = getattr(processor.video_processor, "temporal_patch_size", None) or 1  # frames that Qwen-VL merges
    videos = [video if len(video.times) >= least else video.pick([0] * least) for video in videos]
    metadata = [video.metadata() for video in videos]
    return {"videos": [video.pixels for video in videos], "video_metadata": metadata, "do_sample_frames": False}


def require_videos(processor: Processor) -> None:
    """Raise RevisitError if a model's processor cannot read videos."""
    if getattr(processor, "video_processor", None) is not None:
        return
    name = type(processor).__name__
    if "video_processor" in getattr(processor, "get_attributes", list)():
        raise RevisitError(
            f"{name} reads videos only with torchvision, which is not installed: pip install torchvision."
        )
    raise RevisitError(f"{name} reads images, not videos: use a model for videos, such as Qwen/Qwen3-VL-2B-Instruct.")


def need_question(prompt: str) -> str:
    """Return the prompt; raise RevisitError if it is blank."""
    if not prompt.strip():
        raise RevisitError(f"The prompt must be a question or a request, not {prompt!r}.")
    return prompt


def check_no_image_tokens(processor: Processor, what: str, text: str) -> None:
    """Raise RevisitError if a text contains an image token; the message calls the text `what`."""
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The {what} contains {token!r}, which marks an image in this model; leave it out.")


def vision_texts(processor: Processor) -> tuple[str, ...]:
    """Return the tokens that stand for an image or a video in prompts."""
    texts = {str(getattr(processor, name, None) or "") for name in families.VISION_TOKENS}
    return tuple(sorted(texts - {""}))
