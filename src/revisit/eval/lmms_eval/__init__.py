"""lmms-eval: every decoding method as its model `revisit`.

    lmms-eval --model revisit --model_args pretrained=llava-hf/llava-1.5-7b-hf,method=revisit,alpha=1e-5 --tasks pope

Settings of the method are model arguments and not `--gen_kwargs`, because lmms-eval's answer cache depends on the former. The
`lmms_eval.models` entry point loads this module; the model itself is imported when it is used.
"""

from __future__ import annotations

from typing import Any


def manifests() -> Any:
    """Return the entry that lmms-eval registers."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="revisit", simple_class_path="revisit.eval.lmms_eval.model.Revisit")
