"""Run VLMEvalKit without a server. Use it like VLMEvalKit's `run.py`, in its folder."""

from functools import partial

from vlmeval.config import supported_VLM
from vlmeval.vlm import BaseModel

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks import Item
from revisit.eval.engines.local import LocalEngine
from revisit.io.images import open_image


class Revisit(BaseModel):
    INTERLEAVE = False

    def __init__(self, pretrained, method="revisit", max_new_tokens=512, **settings):
        super().__init__()
        self.engine = LocalEngine(pretrained)
        self.method = methods.as_method(method, self.engine.loaded[0], **settings)
        self.decoding = Decoding(max_new_tokens=max_new_tokens)

    def generate_inner(self, message, dataset=None):
        images = [open_image(part["value"]) for part in message if part["type"] == "image"]
        prompt = "\n".join(part["value"] for part in message if part["type"] == "text")
        return self.engine.answer(self.method, self.decoding, 0, [Item("", prompt)], [images])[0].text


supported_VLM["llava-1.5-7b-revisit"] = partial(Revisit, "llava-hf/llava-1.5-7b-hf", alpha=1e-5)
supported_VLM["llava-1.5-7b-greedy"] = partial(Revisit, "llava-hf/llava-1.5-7b-hf", method="greedy")

if __name__ == "__main__":
    from run import load_env, main

    load_env()
    main()
